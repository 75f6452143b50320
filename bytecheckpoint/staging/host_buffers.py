"""Host memory of the saves of a process, paged in once and used again: the first touch of a page costs more than the
copy into it.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage.object_io import BLOCK_BYTES

_SCRATCH_BLOCKS = 3
"""Two are written while a third is filled."""


class HostBuffers:
    """Buffers of all saves of a process, allocated by the first save that needs them."""

    def __init__(self) -> None:
        self.staging = StagingMemory()
        """Memory for the snapshot of one asynchronous save at a time."""
        self.scratch = BufferPool(BLOCK_BYTES, _SCRATCH_BLOCKS)
        """Blocks for writing without a snapshot, and for putting compressed files together."""


class StagingMemory:
    """One buffer, as large as the largest save so far. Only one save may use it at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> memoryview:
        """Returns paged-in memory of this length that starts at a page. Memory taken earlier is overwritten."""
        if num_bytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
            self._buffer = _allocate(num_bytes)
        return self._buffer[:num_bytes].numpy().data


def _allocate(num_bytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # No large pages: the kernel may take seconds to find so many, and the first save would stall.
    with suppress(OSError, AttributeError):  # a forked data loader does not need it, and would slow down every copy
        memory.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
