"""Jobs on several threads, which are kept between uses: the caller of Thread.start() waits until the new thread has had
a core, which training needs as well, while an idle one only gets a message. Knows nothing of the jobs.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from itertools import islice
from operator import length_hint
from queue import SimpleQueue
from typing import Generic, TypeVar

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.thread_priority import Priority, priority

T = TypeVar("T")
Job = TypeVar("Job")

_IDLE_NAME = "bytecheckpoint-idle"
_NO_JOB = object()
_QUICK_LOOKS = 16
_QUICK_LOOK_S = 0.001

_Jobs = SimpleQueue[tuple[str, Callable[[], object]]]
"""The jobs of one thread, each with the name of the thread while it does that job."""


def run_jobs(do: Callable[[Job], object], jobs: Iterable[Job], *, num_threads: int) -> None:
    """Calls `do` with every job, on up to `num_threads` threads, one of which is the caller's.

    Jobs are taken in order, by one thread at a time, when a thread is free for the next one. Once a call of `do` or
    the iteration has raised, or the caller was interrupted, no further job is taken, and the first error is raised, or
    the interrupt if there was one. No job is running when this returns or raises, unless the caller was interrupted
    again while it waited for the last ones. If the process cannot start all threads, those that it has do all jobs.
    """
    run = _JobRun(do, jobs)
    try:
        try:
            for _ in range(min(num_threads, length_hint(jobs, num_threads)) - 1):
                shared_threads().begin("bytecheckpoint", run.help_out)
        except RuntimeError as error:  # no more threads, or the interpreter is exiting
            if isinstance(error, CheckpointError):  # raised by a signal handler
                raise
        run.work()
    finally:
        errors = run.stop()
    if errors:
        try:
            # An interrupt of the caller must reach it.
            raise next((error for error in errors if not isinstance(error, Exception)), errors[0])
        finally:
            errors.clear()  # a traceback that holds its own error is memory until the next collection


def map_jobs(do: Callable[[Job], T], jobs: Iterable[Job], *, num_threads: int) -> list[T]:
    """Returns what `do` returns for every job, in the order of the jobs. Otherwise like `run_jobs`."""
    jobs = list(jobs)
    results: dict[int, T] = {}

    def run(number: int) -> None:
        results[number] = do(jobs[number])

    run_jobs(run, range(len(jobs)), num_threads=num_threads)
    return [results[number] for number in range(len(jobs))]


def map_looks(do: Callable[[Job], T], jobs: Iterable[Job], *, num_threads: int) -> list[T]:
    """Does what `map_jobs` does, for jobs that each look something up in a store. The caller's thread does them alone
    until they turn out to wait for more than the processor: before that, other threads would only take turns with it.
    """
    jobs = iter(jobs)
    results: list[T] = []
    while batch := list(islice(jobs, _QUICK_LOOKS)):
        started, num_waits = time.monotonic(), _num_waits()
        results += map(do, batch)
        is_slow = time.monotonic() - started > len(batch) * _QUICK_LOOK_S
        if is_slow and _num_waits() >= num_waits + len(batch) // 2:
            return results + map_jobs(do, jobs, num_threads=num_threads)
    return results


def _num_waits() -> float:
    """Returns the number of times that this thread gave up the processor to wait for something; infinite on systems
    without such a count. The time of a job would not show this: on a busy machine, it is long even without waiting.
    """
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else math.inf


class _JobRun(Generic[Job]):
    """One call of `run_jobs`. A thread that begins after it is over does nothing."""

    def __init__(self, do: Callable[[Job], object], jobs: Iterable[Job]) -> None:
        self._do: Callable[[Job], object] | None = do
        self._jobs: Iterator[Job] | None = iter(jobs)
        self._is_over = False
        self._num_helpers = 0
        self._changed = threading.Condition()
        self._errors: list[BaseException] = []
        """In the order of time."""

    def work(self) -> None:
        """Does jobs until none is left, or any thread has failed."""
        try:
            while self._do_next():
                pass
        except BaseException as error:  # noqa: BLE001  raised again by `run_jobs`
            self._errors.append(error)
            self._is_over = True

    def help_out(self) -> None:
        """Does what `work` does, on a thread that is not the caller's, and counts this thread meanwhile. No signal
        handler runs on such a thread, so the count is always undone.
        """
        with self._changed:
            self._num_helpers += 1
        self.work()
        with self._changed:
            self._num_helpers -= 1
            self._changed.notify_all()

    def _do_next(self) -> bool:
        with self._changed:
            if self._is_over or self._jobs is None or self._do is None:
                return False
            try:
                job = next(self._jobs, _NO_JOB)
            except BaseException:
                self._is_over = True  # before another thread takes the next one
                raise
        if job is _NO_JOB:
            return False
        self._do(job)  # type: ignore[arg-type]  # not the sentinel
        return True

    def stop(self) -> list[BaseException]:
        """Ends the run, waits until no job is running any more, and returns the errors."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._num_helpers)
            self._do = self._jobs = None  # a thread that has yet to begin holds this object
            return self._errors


class ThreadPool:
    """A pool that starts a thread when all are busy, and keeps it. Its threads are daemons, so that a program that
    joins all threads but daemons does not wait for idle ones.

    A forked child has none of them, and starts its own.
    """

    def __init__(self, *, is_awaited: bool) -> None:
        """With `is_awaited`, the interpreter ends only after the jobs of the threads, and no job is accepted once it
        has begun to end.
        """
        self._is_awaited = is_awaited
        self._is_over = False
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def begin(self, name: str, do: Callable[[], object]) -> None:
        """Calls `do` on an idle thread, or on a new one if none is idle, with the priority that the caller has now.
        Does not wait for it; an exception that it raises goes to threading.excepthook.

        Raises RuntimeError, with nothing done, if there can be no more threads, or the interpreter is exiting.
        """
        with self._lock:
            if self._is_over:
                raise RuntimeError("the interpreter is exiting")
            idle = self._idle.setdefault(priority(), [])
            jobs = idle.pop() if idle else self._start(idle)
            jobs.put((name, do))

    def submit(self, name: str, do: Callable[[], T]) -> Future[T]:
        """Begins `do` on a thread, as `begin` does; returns a future of what it returns or raises."""
        future: Future[T] = Future()
        unset = [future]  # emptied: the traceback of an error leads to `run`, which must not hold the future then

        def run() -> None:
            try:
                result = do()
            except BaseException as error:  # noqa: BLE001  raised again where the result is asked for
                unset.pop().set_exception(error)
            else:
                unset.pop().set_result(result)

        self.begin(name, run)
        return future

    def _start(self, idle: list[_Jobs]) -> _Jobs:
        if self._is_awaited and not self._all:
            threading._register_atexit(self._end)  # type: ignore[attr-defined]  # atexit comes when it is too late
        jobs: _Jobs = SimpleQueue()
        threading.Thread(target=self._work, args=(jobs, idle), name=_IDLE_NAME, daemon=True).start()
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
            del do  # an idle thread must not hold what the job held
            this.name = _IDLE_NAME
            idle.append(jobs)

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
        for jobs in self._all:
            is_done = threading.Event()
            jobs.put((_IDLE_NAME, is_done.set))  # after its job
            is_done.wait()

    def _forget(self) -> None:
        # Re-entrant, because the handler of a signal may interrupt `begin` and save.
        self._lock = threading.RLock()
        self._idle: dict[Priority, list[_Jobs]] = {}
        """By priority: a thread inherits that of the thread that starts it, and cannot raise it."""
        self._all: list[_Jobs] = []


@cache
def shared_threads() -> ThreadPool:
    """Returns the pool of the process for work whose caller waits for it: the interpreter does not, when it exits."""
    return ThreadPool(is_awaited=False)


@cache
def background_threads() -> ThreadPool:
    """Returns the pool of the process for work that the interpreter waits for when it exits."""
    return ThreadPool(is_awaited=True)
