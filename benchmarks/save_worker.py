"""One rank of benchmarks/save.py: a process that builds a workload and saves it when it is told to.

Reads commands as lines of JSON from standard input and answers each with a line of JSON on standard output, whatever
libraries print. Knows nothing of rounds, tables or other ranks' answers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from save_catalogue import CONTESTANTS, WORKLOADS
from save_timing import Save, time_async, time_limit, time_sync
from save_workloads import Job

MODULES = {"own": ("save_own", "save_torch", "save_limits"), "peers": ("save_peers",)}
TIMERS = {"sync": time_sync, "async": time_async, "limit": time_limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crew", choices=list(MODULES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    answers = own_standard_output()
    warnings.simplefilter("ignore")  # peers warn on every save
    try:
        worker = Worker(arguments)
        answer(answers, {"share_bytes": worker.job.share_bytes})
        for line in sys.stdin:
            answer(answers, worker.obey(json.loads(line)))
    except Exception as error:
        answer(answers, {"error": described(error)})
        raise


def own_standard_output() -> TextIO:
    """Standard output for answers alone: what anything else prints goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(answers: TextIO, content: dict[str, Any]) -> None:
    print(json.dumps(content), file=answers, flush=True)


def described(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Worker:
    """A rank, its state, and the contestants that its Python has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        workload = WORKLOADS[arguments.workload]
        if workload.num_ranks > 1:
            torch.set_num_threads(1)
        if workload.num_ranks > 1 or arguments.crew == "peers":
            join(arguments.rank, workload.num_ranks, arguments.port)
        self._saves: dict[str, Save] = {}
        for module in MODULES[arguments.crew]:
            self._saves |= importlib.import_module(module).contestants()
        self.job = Job(workload, arguments.size)

    def obey(self, command: dict[str, str]) -> dict[str, Any]:
        name = command["contestant"]
        timer = TIMERS[CONTESTANTS[name].kind]
        try:
            return dataclasses.asdict(timer(self._saves[name], Path(command["folder"]), self.job))
        except Exception as error:  # noqa: BLE001  a contestant that fails is a row that says so
            with contextlib.suppress(Exception):
                sys.excepthook(type(error), error, error.__traceback__)
            return {"error": described(error)}


def join(rank: int, num_ranks: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


if __name__ == "__main__":
    main()
