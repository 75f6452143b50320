"""Looks whether a call has failed on another rank while this one waits for bytes, not for a message: a rank that has
ended before it was connected breaks no connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bytecheckpoint.distributed.connection import PeerLeftError
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.threads import shared_threads

_LOOK_S = 1.0
_LOOK_S_A_RANK = 0.0008
"""The two looks of each rank of a whole group take the store some 5 % of a core, at 20 us each."""


@contextmanager
def watching(ranks: Ranks, fail: Callable[[BaseException], object]) -> Iterator[None]:
    """Within the block, a thread looks about once a second, less often in a large group, whether the call has failed.

    Then it calls `fail` once: with CheckpointError (rank_missing) if a rank has ended that sends its messages to this
    one, with PeerLeftError if the coordinator has the error. Not after the block. Without threads nobody looks.
    """
    over, lock = threading.Event(), threading.Lock()

    def look() -> None:
        try:
            while not over.wait(max(_LOOK_S, ranks.num_ranks * _LOOK_S_A_RANK)):
                if ranks.has_failed():
                    raise PeerLeftError
        except (CheckpointError, PeerLeftError) as error:
            with lock:
                if not over.is_set():
                    fail(error)

    try:
        shared_threads().begin("bcp-failures", look)
    except RuntimeError as error:  # no more threads: failures are told by connections, and at the time limit
        if isinstance(error, CheckpointError):  # raised by a signal handler
            raise
    try:
        yield
    finally:
        with lock:
            over.set()
