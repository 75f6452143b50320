"""Runs a function in a process of its own, because a process remembers its peak memory and its caches for ever."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any


def in_a_process(function: Callable[..., Any], *args: object) -> Any:
    """Returns what the function returns, which must be small. Exits if the process failed."""
    context = multiprocessing.get_context("forkserver")
    results: SimpleQueue[Any] = context.SimpleQueue()
    process = context.Process(target=_call, args=(results, function, args))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{getattr(function, '__name__', function)} ended with {process.exitcode}")
    return results.get()


def _call(results: SimpleQueue[Any], function: Callable[..., Any], args: tuple[object, ...]) -> None:
    results.put(function(*args))
