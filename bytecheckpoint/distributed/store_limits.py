"""Runs work on the store with a time limit, because the store's client has no limit itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.threads import shared_threads

T = TypeVar("T")


def run_with_timeout(limit_s: float, do: Callable[[], T]) -> T:
    """Runs `do` on a thread, and returns or raises what it does. After `limit_s` raises TimeoutError, and leaves the
    thread behind. If there can be no more threads, the caller runs `do`, without a limit.

    A TCPStore's client waits for answers without any limit: it would hang for ever if the process that holds the store
    is stopped or its host unreachable.
    """
    return run_on_thread(do).result(limit_s)


def run_on_thread(do: Callable[[], T]) -> Future[T]:
    """Runs `do` on a thread; if there can be no more threads, the caller runs it, and gets its error at once."""
    try:
        return shared_threads().submit("bcp-ranks", do)
    except CheckpointError:  # a signal handler's
        raise
    except RuntimeError:
        done: Future[T] = Future()
        done.set_result(do())
        return done


def store_lost(error: Exception) -> CheckpointError:
    """Returns the error about a lost store. It names global rank 0: every store is one of the default group."""
    reason = str(error).partition("\n")[0] or "it does not answer"
    return CheckpointError(
        f"rank 0 of the whole job, or the launcher, which holds the store of all process groups, is gone or stopped "
        f"({reason}), so the ranks cannot agree. Look at its log, and start the job again from the last checkpoint",
        kind="rank_missing",
        ranks=(0,),
    )
