"""The host memory that asynchronous saves stage into: paged in once and kept, because the first touch of a page costs
more than the copy into it.
"""

from __future__ import annotations

import mmap

import torch


class StagingMemory:
    """One buffer, as large as the largest save so far. Only one save may use it at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 tensor of this length that starts at a page; what was taken before is overwritten."""
        if num_bytes > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old memory goes before the new comes
            self._buffer = _allocate(num_bytes)
        return self._buffer[:num_bytes]


def _allocate(num_bytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
