"""Threads that wait for their next job. Who starts a thread waits until it has had its turn on a core, which training
needs as well; one that is there already is only told.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from bytecheckpoint.runtime.thread_priority import Priority, priority

T = TypeVar("T")

_SPARE_NAME = "bytecheckpoint-spare"

_Job = Callable[[], object]
_Jobs = SimpleQueue[tuple[str, _Job]]
"""The jobs of one thread, each with the name that the thread has meanwhile."""


class SpareThreads:
    """As many threads as were ever at work at the same time. Daemons, so that a program may join all others."""

    def __init__(self, *, is_awaited: bool) -> None:
        """Where they are awaited, the interpreter does not end before their jobs have, and once it is about to no more
        jobs are taken.
        """
        self._is_awaited = is_awaited
        self._is_over = False
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def begin(self, name: str, do: _Job) -> None:
        """Does it on a spare thread, or on a new one where there is none, with the priority that the caller has now.
        What it raises goes to threading.excepthook.

        Raises RuntimeError, with nothing done, where there can be no more threads.
        """
        with self._lock:
            if self._is_over:
                raise RuntimeError("the interpreter is exiting")
            idle = self._idle.setdefault(priority(), [])
            jobs = idle.pop() if idle else self._start(idle)
            jobs.put((name, do))

    def submit(self, name: str, do: Callable[[], T]) -> Future[T]:
        """The same, for one who asks for what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
                future.set_exception(error)

        self.begin(name, run)
        return future

    def _start(self, idle: list[_Jobs]) -> _Jobs:
        if self._is_awaited and not self._all:
            threading._register_atexit(self._end)  # type: ignore[attr-defined]  # atexit comes when it is too late
        jobs: _Jobs = SimpleQueue()
        threading.Thread(target=self._work, args=(jobs, idle), name=_SPARE_NAME, daemon=True).start()
        self._all.append(jobs)
        return jobs

    @staticmethod
    def _work(jobs: _Jobs, idle: list[_Jobs]) -> None:
        this = threading.current_thread()
        while True:
            this.name, do = jobs.get()
            try:
                do()
            except BaseException:  # noqa: BLE001  reported, and the thread is still good for others
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), this)))
            del do  # what it holds is not to be held until the next one comes
            this.name = _SPARE_NAME
            idle.append(jobs)

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
        for jobs in self._all:
            is_done = threading.Event()
            jobs.put((_SPARE_NAME, is_done.set))  # after what it has to do now
            is_done.wait()

    def _forget(self) -> None:
        """A forked child has none of them."""
        self._lock = threading.Lock()
        self._idle: dict[Priority, list[_Jobs]] = {}
        """By priority: a thread starts with that of who starts it, and cannot raise it."""
        self._all: list[_Jobs] = []
