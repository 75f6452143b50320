"""Threads that wait for their next job. Who starts a thread waits until it has had its turn on a core, which training
needs as well; one that is there already is only told.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

_SPARE_NAME = "bytecheckpoint-spare"

_Job = Callable[[], object]
_Jobs = SimpleQueue["tuple[str, _Job] | None"]
"""The jobs of one thread, each with the name that the thread has meanwhile; None ends it."""


class SpareThreads:
    """As many threads as were ever at work at the same time."""

    def __init__(self, *, is_awaited: bool) -> None:
        """Where they are awaited, the interpreter does not end before their jobs have, and once it is about to there
        can be no more of them.
        """
        self._is_awaited = is_awaited
        self._is_over = False
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def begin(self, name: str, do: _Job) -> None:
        """Does it on a spare thread, or on a new one where there is none. What it raises goes to threading.excepthook.

        Raises RuntimeError, with nothing done, where there can be no more threads.
        """
        if self._is_over:
            raise RuntimeError("the interpreter is exiting")
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = self._start()
        jobs.put((name, do))

    def _start(self) -> _Jobs:
        if self._is_awaited and not self._all:
            threading._register_atexit(self._end)  # type: ignore[attr-defined]  # atexit comes after threads are joined
        jobs: _Jobs = SimpleQueue()
        thread = threading.Thread(
            target=self._work, args=(jobs, self._idle), name=_SPARE_NAME, daemon=not self._is_awaited
        )
        self._all.append(jobs)
        try:
            thread.start()
        except BaseException:
            jobs.put(None)  # it may have begun
            self._all.remove(jobs)
            raise
        return jobs

    @staticmethod
    def _work(jobs: _Jobs, idle: list[_Jobs]) -> None:
        this = threading.current_thread()
        while (job := jobs.get()) is not None:
            this.name, do = job
            try:
                do()
            except BaseException:  # noqa: BLE001  reported, and the thread is still good for others
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), this)))
            del job, do  # what they hold is not to be held until the next one comes
            this.name = _SPARE_NAME
            idle.append(jobs)

    def _end(self) -> None:
        self._is_over = True
        for jobs in self._all:
            jobs.put(None)

    def _forget(self) -> None:
        """A forked child has none of them."""
        self._idle: list[_Jobs] = []
        self._all: list[_Jobs] = []
