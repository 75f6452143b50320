"""Jobs done by several threads until they are through, one of them fails or Ctrl-C is pressed. It knows nothing of the
jobs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

Job = TypeVar("Job")


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
