"""What a rank holds, for tests of calls that are to leave nothing behind."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple, Self

from torch.distributed import Store

_MAX_MORE = 2
"""Threads are kept for the next job, and connections for the next wait. On a busy machine more of them may come
together than before: far fewer than one a call, which a leak would be.
"""


class HeldByRank(NamedTuple):
    """Threads and file descriptors of this process, and keys of the store that the ranks share."""

    threads: int
    descriptors: int
    keys: int

    @classmethod
    def now(cls, store: Store) -> Self:
        return cls(threading.active_count(), len(os.listdir("/proc/self/fd")), store.num_keys())

    def is_no_more_than(self, before: HeldByRank) -> bool:
        """Of a later moment, after several calls. Fewer are no leak: what was ending before has ended."""
        more = max(self.threads - before.threads, self.descriptors - before.descriptors)
        return more <= _MAX_MORE and self.keys <= before.keys
