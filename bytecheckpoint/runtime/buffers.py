"""Host memory that several threads share: a pool of equal blocks, parts of one piece, and a budget counted in bytes.
Knows no tensors.
"""

from __future__ import annotations

import mmap
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

_ALIGNMENT = 64


class CopyEvent(Protocol):
    """A point in a queue of copies that a device makes while the host goes on."""

    def query(self) -> bool:
        """Returns True if everything before it is done."""

    def synchronize(self) -> None:
        """Waits until everything before it is done."""


def advise(memory: mmap.mmap, *, large_pages: bool) -> None:
    """Asks the kernel to give forked children none of this memory: with a data loader's copy of it, every copy into it
    would be slower. With `large_pages` also asks for large pages, which make direct writes cheaper and take time to
    find. Raises nothing if the kernel does not know the advice.
    """
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE")[: 1 + large_pages]:
        with suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))


def map_block(num_bytes: int) -> memoryview:
    """Returns new memory aligned to pages, so that it can be written past the page cache."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(memory, large_pages=True)
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
        """Makes at most `num_blocks` with `new_block`. `mark` returns, when a block comes back, the events after which
        the block is free; without `mark`, a block is free as soon as it comes back.
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
        """Raises the limit to `num_blocks`, if it is lower. Makes no block yet."""
        with self._changed:
            self._num_blocks = max(num_blocks, self._num_blocks)
            self._changed.notify_all()

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Takes a block, as `take` does, and gives it back when the context ends."""
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
        """Gives a block back to the pool, without waiting; it is free once the events of `mark` are done."""
        events: list[CopyEvent] = []
        try:
            if self._mark is not None:
                events.extend(self._mark())
        finally:  # another thread may wait for it, whatever has failed
            self._put_back(_Returned(block, events))

    def _has_free(self) -> bool:
        return bool(self._returned) and all(event.query() for event in self._returned[0].events)

    def _put_back(self, returned: _Returned | None) -> None:
        """Makes the block available to others. None is for a block that could not be made: another may be made then."""
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
        """Waits until `num_bytes`, or all bytes if these are fewer, are free, and takes them. Raises the error that
        `break_off` was given.
        """
        wanted = min(num_bytes, self._num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._broken_by is not None or self._free >= wanted)
            if self._broken_by is not None:
                raise self._broken_by
            self._free -= wanted

    def give(self, num_bytes: int) -> None:
        """Frees what `take` took for the same `num_bytes`."""
        with self._changed:
            self._free += min(num_bytes, self._num_bytes)
            self._changed.notify_all()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Takes `num_bytes` for as long as the context lasts."""
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


class ArenaPart:
    """A part of an arena. The arena gets it back when its last holder has released it."""

    def __init__(self, arena: Arena, part: tuple[int, int], content: memoryview) -> None:
        """`part` is its first byte and its end, which is the end of `content` too."""
        self.start = part[1] - content.nbytes
        """First byte of the content, in the memory that the arena is a part of."""
        self.content = content
        self._part = part
        self._arena = arena
        self._num_holders = 1

    def hold(self) -> None:
        """Adds a holder, which has to call `release` as well. The caller must be a holder already."""
        with self._arena.changed:
            self._num_holders += 1

    def release(self) -> None:
        with self._arena.changed:
            self._num_holders -= 1
            if not self._num_holders:
                self._arena.give(self._part)


class Arena:
    """The range `bounds` of a memory, which threads share in parts of any length. A part is taken from the first gap
    that is long enough, so that few pages are touched: the first touch of a page costs more than a copy.
    """

    def __init__(self, memory: memoryview, bounds: range, *, max_parts: int) -> None:
        """At most `max_parts` are lent at a time."""
        self._memory = memory
        self._bounds = bounds
        self._max_parts = max_parts
        self._lent: list[tuple[int, int]] = []
        """First byte and end of each part, in ascending order."""
        self._broken_by: type[Exception] | None = None
        self.changed = threading.Condition(threading.RLock())

    def take(self, num_bytes: int, *, lead_bytes: int = 0) -> ArenaPart:
        """Waits until there is room for `num_bytes` of content and `lead_bytes` before it: for ever, if the arena is
        shorter than both together. Raises the error that `break_off` was given.
        """
        length = num_bytes + lead_bytes
        with self.changed:
            self.changed.wait_for(lambda: self._broken_by is not None or self._first_fit(length) is not None)
            if self._broken_by is not None:
                raise self._broken_by
            first = self._first_fit(length) or self._bounds.start
            part = (first, first + length)
            insort(self._lent, part)
        return ArenaPart(self, part, self._memory[first + lead_bytes : first + length])

    def give(self, part: tuple[int, int]) -> None:
        """Frees a part that has no holder any more."""
        with self.changed:
            self._lent.remove(part)
            self.changed.notify_all()

    def break_off(self, error: type[Exception]) -> None:
        """Makes every call of `take` raise this error, also those that wait."""
        with self.changed:
            self._broken_by = error
            self.changed.notify_all()

    def _first_fit(self, length: int) -> int | None:
        """Returns the first byte of a gap of this length; None if there is none, or no more parts may be lent. It is
        aligned for any dtype, or the first byte of `bounds`.
        """
        if len(self._lent) >= self._max_parts:
            return None
        first = self._bounds.start
        for start, end in self._lent:
            if first + length <= start:
                break
            first = -(-end // _ALIGNMENT) * _ALIGNMENT
        return first if first + length <= self._bounds.stop else None
