"""Host memory that several threads share: a pool of equal blocks, and a budget counted in bytes. Knows no tensors."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol


class CopyEvent(Protocol):
    """A point in a queue of copies that a device makes while the host goes on."""

    def query(self) -> bool:
        """Returns True if everything before it is done."""

    def synchronize(self) -> None:
        """Returns when everything before it is done."""


def map_block(num_bytes: int) -> memoryview:
    """Returns memory aligned to pages, so that it can be written past the page cache."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages make direct writes cheaper. A child that is forked meanwhile needs none of them.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    return memoryview(memory)


class _Returned(NamedTuple):
    block: memoryview
    events: Sequence[CopyEvent]
    """The block is free when these are done."""


class BufferPool:
    """Blocks of equal length, kept because the first touch of a page costs more than a copy into it. Each is made when
    it is first needed. Methods may be called from any thread.
    """

    def __init__(
        self,
        block_bytes: int,
        num_blocks: int,
        *,
        new_block: Callable[[int], memoryview] = map_block,
        mark: Callable[[], Iterable[CopyEvent]] | None = None,
    ) -> None:
        """At most `num_blocks`, which `new_block` makes. `mark` returns, when a block comes back, the events after
        which it is free; without it, it is free at once.
        """
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._num_made = 0
        self._new_block = new_block
        self._mark = mark
        self._returned: deque[_Returned] = deque()
        self._changed = threading.Condition()
        self.second_block = threading.Lock()
        """Held by a thread that waits for a block while it has another: two such threads might wait for ever."""

    def grow(self, num_blocks: int) -> None:
        """Raises the number of blocks to at least this many."""
        with self._changed:
            self._num_blocks = max(num_blocks, self._num_blocks)
            self._changed.notify_all()

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Gives a block for as long as the context lasts; waits until one is free."""
        block = self.take()
        try:
            yield block
        finally:
            self.give(block)

    def take(self) -> memoryview:
        """Returns a free block, or a new block while the limit allows one; else waits until a block is free."""
        returned: _Returned | None = None
        with self._changed:
            self._changed.wait_for(lambda: self._returned or self._num_made < self._num_blocks)
            if self._num_made < self._num_blocks and not self._has_free():
                self._num_made += 1
            else:  # without events all are free, and the last one may still be in the processor's cache
                returned = self._returned.pop() if self._mark is None else self._returned.popleft()
        try:
            if returned is None:
                return self._new_block(self._block_bytes)
            for event in returned.events:
                event.synchronize()
        except BaseException:
            self._put_back(returned)
            raise
        return returned.block

    def give(self, block: memoryview) -> None:
        """Takes a block back."""
        events: list[CopyEvent] = []
        try:
            if self._mark is not None:
                events.extend(self._mark())
        finally:  # another thread may wait for it, whatever has failed
            self._put_back(_Returned(block, events))

    def _has_free(self) -> bool:
        return bool(self._returned) and all(event.query() for event in self._returned[0].events)

    def _put_back(self, returned: _Returned | None) -> None:
        """Makes the block available to others; if there is none, a new one may be made instead."""
        with self._changed:
            if returned is None:
                self._num_made -= 1
            else:
                self._returned.append(returned)
            self._changed.notify()


class ByteBudget:
    """Bytes that several threads share. A request for more than there are gets all of them, alone."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free = num_bytes
        self._broken_by: type[Exception] | None = None
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> None:
        """Waits until so many are free. Raises the error that `break_off` was given."""
        wanted = min(num_bytes, self._num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._broken_by is not None or self._free >= wanted)
            if self._broken_by is not None:
                raise self._broken_by
            self._free -= wanted

    def give(self, num_bytes: int) -> None:
        """Frees what `take` took."""
        with self._changed:
            self._free += min(num_bytes, self._num_bytes)
            self._changed.notify_all()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Takes them for as long as the context lasts."""
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give(num_bytes)

    def break_off(self, error: type[Exception]) -> None:
        """Makes every call of `take` raise this error, also those that wait."""
        with self._changed:
            self._broken_by = error
            self._changed.notify_all()
