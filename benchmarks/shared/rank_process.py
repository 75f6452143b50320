"""The worker's end of a process pool: answers with facts, then obeys commands, all as lines of JSON, whatever libraries
print.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TextIO

import torch.distributed as dist

Obey = Callable[[dict[str, str]], dict[str, Any]]
"""Carries out a command; returns what it measured."""


def serve(begin: Callable[[], tuple[dict[str, Any], Obey]]) -> None:
    """Answers with the facts that `begin` returns, then each command with its result or an error."""
    answers = own_standard_output()
    warnings.simplefilter("ignore")  # peers warn every time
    try:
        facts, obey = begin()
        answer(answers, facts)
    except Exception as error:
        answer(answers, {"error": described(error)})
        raise
    for line in sys.stdin:
        try:
            answer(answers, obey(json.loads(line)))
        except Exception as error:  # noqa: BLE001  a candidate that fails is a row that says so
            with contextlib.suppress(Exception):
                sys.excepthook(type(error), error, error.__traceback__)
            answer(answers, {"error": described(error)})


def own_standard_output() -> TextIO:
    """Returns standard output for answers alone; sends what anything else prints to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(answers: TextIO, content: dict[str, Any]) -> None:
    print(json.dumps(content), file=answers, flush=True)


def described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def join(rank: int, num_ranks: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
