"""Jobs done by several threads. It knows nothing of the jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
