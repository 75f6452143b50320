"""What a process keeps from one save to the next, because making it again would cost more than the save: memory that is
paged in, plans, and where it has written. It knows no save.
"""

from __future__ import annotations

from bytecheckpoint.distributed.ranks import COORDINATOR
from bytecheckpoint.saving.plan_cache import PlanCache
from bytecheckpoint.staging.host_buffers import HostBuffers
from bytecheckpoint.storage.store import RemoteStore, Store, full_location


class Kept:
    """Empty at first, and of no cost until it is used."""

    def __init__(self) -> None:
        self.buffers = HostBuffers()
        self.plans = PlanCache()
        self._writable: set[str] = set()
        """The stores that were found to take what is written."""

    def check_writable(self, store: Store, *, asked_by: int) -> None:
        """Raises what a write to the store would raise, so that a save fails before anything is staged. One rank asks
        for all, and only once.
        """
        if (
            asked_by == COORDINATOR
            and isinstance(store, RemoteStore)
            and full_location(store, "") not in self._writable
        ):
            store.check_writable()
            self._writable.add(full_location(store, ""))

    def grow(self, writer_threads: int) -> None:
        """Makes room for so many writes in flight."""
        self.buffers.scratch.grow(writer_threads)
