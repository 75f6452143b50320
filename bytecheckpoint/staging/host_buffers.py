"""Host memory of the saves of a process, paged in once and used again: the first touch of a page costs more than the
copy into it.
"""

from __future__ import annotations

import torch

from bytecheckpoint.memory.host_mapping import HostMapping, map_memory
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage.object_io import BLOCK_BYTES

_SCRATCH_BLOCKS = 3
"""Two are written while a third is filled."""
_MAX_SMALL_TAKES = 4
"""The last of so many saves in a row that need less than half of the memory replaces it by less."""


class HostBuffers:
    """Buffers of all saves of a process, allocated by the first save that needs them."""

    def __init__(self) -> None:
        self.staging = StagingMemory()
        """Memory for the snapshot of one asynchronous save at a time."""
        self.scratch = BufferPool(BLOCK_BYTES, _SCRATCH_BLOCKS, new_block=_scratch_block)
        """Blocks for writing without a snapshot, and for putting compressed files together."""


class StagingMemory:
    """One buffer, which grows at once, and shrinks at the fourth save in a row that needs less than half of it. Only
    one save may use it at a time.
    """

    def __init__(self) -> None:
        self._mapping: HostMapping | None = None
        self._num_small_takes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Returns paged-in memory of this length that starts at a page. It may be the same as memory taken earlier,
        which must not be in use any more.
        """
        held_bytes = 0 if self._mapping is None else len(self._mapping)
        self._num_small_takes = self._num_small_takes + 1 if num_bytes < held_bytes // 2 else 0
        if num_bytes > held_bytes or self._num_small_takes >= _MAX_SMALL_TAKES:
            self._mapping, self._num_small_takes = None, 0  # frees the old memory first
            self._mapping = _paged_in(num_bytes) if num_bytes else None
        return memoryview(b"" if self._mapping is None else self._mapping)[:num_bytes]


def _paged_in(num_bytes: int) -> HostMapping:
    # No large pages: the kernel may take seconds to find so many, and the first save would stall.
    mapping = map_memory(num_bytes, large_pages=False)
    torch.frombuffer(mapping, dtype=torch.uint8).zero_()
    return mapping


def _scratch_block(num_bytes: int) -> memoryview:
    return memoryview(map_memory(num_bytes, large_pages=True))
