"""Waiting for what may never come: a key in a store, or the store itself. It knows nothing of what is awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.threads import shared_threads

T = TypeVar("T")

_SHORTEST_POLL_S = 0.0005
"""Less is no gain: each look takes some 0.1 ms on a core, which the rank that is awaited may need."""
_LONGEST_POLL_S = 0.02


def run_with_timeout(limit_s: float, do: Callable[[], T]) -> T:
    """Does it on a thread that is left behind when it takes too long, which raises TimeoutError.

    A TCPStore's client waits for answers without any limit: where the process that holds the store is stopped or its
    host unreachable, it would hang for ever. So it may where there can be no more threads: without limit is better
    than not at all.
    """
    return run_on_thread(do).result(limit_s)


def run_on_thread(do: Callable[[], T]) -> Future[T]:
    """Does it on a thread while the caller goes on. Where there can be no more threads the caller does it, and gets at
    once what it raises.
    """
    try:
        return shared_threads().submit("bcp-ranks", do)
    except CheckpointError:  # a signal handler's
        raise
    except RuntimeError:
        done: Future[T] = Future()
        done.set_result(do())
        return done


def store_lost(error: Exception) -> CheckpointError:
    """Names a global rank, as every error does: the store of any group is one of the default group."""
    reason = str(error).partition("\n")[0] or "it does not answer"
    return CheckpointError(
        f"rank 0 of the whole job, or the launcher, which holds the store of all process groups, is gone or stopped "
        f"({reason}), so the ranks cannot agree. Look at its log, and start the job again from the last checkpoint",
        kind="rank_missing",
        ranks=(0,),
    )


def poll(is_there: Callable[[], bool], limit_s: float) -> bool:
    """Asks again and again. A blocking wait would hold the lock of the store's client against the training thread."""
    started = time.monotonic()
    while not is_there():
        waited_s = time.monotonic() - started
        if waited_s > limit_s:
            return False
        # In proportion, so that an answer is never noticed much later than it came.
        time.sleep(min(max(waited_s / 10, _SHORTEST_POLL_S), _LONGEST_POLL_S))
    return True
