"""Jobs done by several threads. It knows nothing of the jobs.

Jobs done by several threads until they are through, one of them fails or Ctrl-C is pressed. It knows nothing of the
jobs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from bytecheckpoint.errors import CheckpointError, CheckpointSaveError

Job = TypeVar("Job")


def do_side_by_side(do: Callable[[Job], object], jobs: Sequence[Job], *, num_threads: int) -> None:
    """Does every job once, on up to so many threads, of which the caller's is one. When it returns or raises, none is
    still at work.

    Raises what a job raised. Where there can be fewer threads, those that there are do all of it.
    """
    num_others = max(min(num_threads, len(jobs)) - 1, 0)
    pending = iter(range(len(jobs)))
    lock = threading.Lock()
    done: list[int] = []

    def work() -> None:
        while True:
            with lock:
                number = next(pending, -1)
            if number < 0:
                return
            do(jobs[number])
            done.append(number)

    with ThreadPoolExecutor(max(num_others, 1), thread_name_prefix="bytecheckpoint") as pool:
        futures: list[Future[None]] = []
        try:
            while len(futures) < num_others:
                futures.append(pool.submit(work))
        except RuntimeError as error:  # no more threads, or the interpreter is exiting
            if isinstance(error, CheckpointError):  # a signal handler's
                raise
        work()
    for future in futures:
        future.result()
    if len(done) != len(jobs):  # what fails on a thread whose start seemed to fail has no future to be told by
        raise CheckpointSaveError(
            f"a thread failed, and {len(jobs) - len(done)} of {len(jobs)} pieces of work were not done; nothing was "
            "committed: the process is short of threads or memory",
            kind="rank_failed",
        )


def do_all(do: Callable[[Job], object], jobs: Iterable[Job], *, num_threads: int) -> None:
    """Does every job once. Where one raises, those not begun are left, and its error is raised when none is at work."""
    waiting = iter(jobs)
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            do(job)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="bcp") as pool:
        futures = [pool.submit(work) for _ in range(num_threads)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
        for future in futures:
            future.result()
