"""What a process keeps from one save to the next, because making it again would cost more than the save: memory that is
paged in, and plans. It knows no save.
"""

from __future__ import annotations

from bytecheckpoint.plan_cache import PlanCache
from bytecheckpoint.staging_memory import StagingMemory
from bytecheckpoint.storage.scratch import Scratch
from bytecheckpoint.storage.writer import BLOCK_BYTES

_SCRATCH_BLOCKS = 3
"""Two are being written while a third is filled. Every process keeps them."""


class Kept:
    """Empty at first, and of no cost until it is used."""

    def __init__(self) -> None:
        self.staging = StagingMemory()
        """What the asynchronous save whose turn it is stages into."""
        self.scratch = Scratch(BLOCK_BYTES, _SCRATCH_BLOCKS, is_shared=False)
        """What is written without staging goes through it."""
        self.shared = Scratch(BLOCK_BYTES, _SCRATCH_BLOCKS, is_shared=True)
        """The same for what a forked child holds."""
        self.plans = PlanCache()

    def grow(self, writer_threads: int) -> None:
        """Makes room for so many writes in flight."""
        self.scratch.grow(writer_threads)
        self.shared.grow(writer_threads)
