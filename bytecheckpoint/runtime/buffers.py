"""Blocks of host memory through which bytes go on their way to a store: page-aligned, so that they can be written past
the page cache, and kept, because the first touch of a page costs more than a copy into it. It knows no tensors.

Memory that several threads share, counted in bytes. It allocates nothing.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class BufferPool:
    """A few blocks of equal length that are lent out and taken back. Methods may be called from any thread."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._is_allocated = False
        self._free: list[memoryview] = []
        self._changed = threading.Condition()

    def allocate(self) -> None:
        """Makes the blocks exist, once; lending does it otherwise. A page of them takes memory when it is used first:
        a save of a megabyte is not to wait for 64 of them.
        """
        with self._changed:
            if not self._is_allocated:
                self._free = [self._new_block() for _ in range(self._num_blocks)]
                self._is_allocated = True
                self._changed.notify_all()

    def grow(self, num_blocks: int) -> None:
        """Makes at least so many blocks available."""
        with self._changed:
            missing = num_blocks - self._num_blocks
            self._num_blocks = max(num_blocks, self._num_blocks)
            if self._is_allocated and missing > 0:
                self._free += [self._new_block() for _ in range(missing)]
                self._changed.notify_all()

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """A block for as long as the context lasts; waits until one is free."""
        self.allocate()
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            block = self._free.pop()
        try:
            yield block
        finally:
            with self._changed:
                self._free.append(block)
                self._changed.notify()

    def _new_block(self) -> memoryview:
        memory = mmap.mmap(-1, self._block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages make direct writes cheaper. A child that is forked meanwhile needs none of them.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(OSError, AttributeError):
                memory.madvise(getattr(mmap, advice))
        return memoryview(memory)


class ByteBudget:
    """Bytes that are there for all. Who needs more than there are at all gets all of them, alone."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free = num_bytes
        self._broken_by: type[Exception] | None = None
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        """Waits until there is room. Raises what `break_off` was given."""
        wanted = min(num_bytes, self._num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._broken_by is not None or self._free >= wanted)
            if self._broken_by is not None:
                raise self._broken_by
            self._free -= wanted

    def give(self, num_bytes: int) -> None:
        with self._changed:
            self._free += min(num_bytes, self._num_bytes)
            self._changed.notify_all()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give(num_bytes)

    def break_off(self, error: type[Exception]) -> None:
        """Nobody waits any longer: who does, or comes now, gets this error."""
        with self._changed:
            self._broken_by = error
            self._changed.notify_all()
