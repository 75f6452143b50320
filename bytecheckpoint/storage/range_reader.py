"""Range requests of a load, many in flight, each verified as its bytes arrive. Handles bytes, no tensors."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch, Frame
from bytecheckpoint.runtime.buffers import BufferPool, ByteBudget
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.compression import decode_frame
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import FillHook, Store, SupportsReadBytes, SupportsReadPieces

ALIGNMENT = 16
"""Alignment of the largest dtype, in bytes."""
_NUM_COPIES = 2
"""Copies of a fetch beside the fetches under way: see `max_bytes_at_once`."""


class FetchMemory(Protocol):
    """Allocates scratch memory."""

    def block_bytes(self, byte_length: int) -> int:
        """Returns the memory, in bytes, that a buffer of that length takes."""

    def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
        """Returns a pool of at most `num_buffers` buffers of that length."""


class HostMemory:
    """Allocates scratch memory for reads into host memory."""

    def block_bytes(self, byte_length: int) -> int:
        return byte_length

    def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
        return BufferPool(byte_length, num_buffers, new_block=_new_block)


def _new_block(num_bytes: int) -> memoryview:
    """Returns memory that begins a page. Zen 3 copies a page at a third of its speed into memory that begins up to 32
    bytes behind one, as large blocks of malloc do.
    """
    memory = np.empty(num_bytes + mmap.PAGESIZE, np.uint8)  # a bytearray would be zeroed first
    return memory[-memory.ctypes.data % mmap.PAGESIZE :][:num_bytes].data


def max_bytes_at_once(store: Store, *, scratch_bytes: int, threads: int) -> int:
    """Returns the greatest length of a fetch, in bytes, with which the scratch memory has room for one fetch per thread
    and for the copies that the store makes.
    """
    # Memory of the store's own counts: one such fetch per thread, one of which may be there twice while a client
    # library puts together the pieces in which it came, and a buffer that they are copied to in turn.
    return scratch_bytes // (threads + _NUM_COPIES if isinstance(store, SupportsReadBytes) else threads)


def run_fetches(
    store: Store,
    folder: str,
    files: Sequence[DataFile],
    fetches: Sequence[Fetch],
    *,
    threads: int,
    verify: bool,
    scratch_bytes: int,
    memory: FetchMemory,
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Carries out all fetches from these files of a folder. When one fails, those not begun are dropped. Once the begun
    ones have ended, raises the first CheckpointCorruptError in the order of the fetches, else the first error in time.
    `on_failure` is called at once for each fetch that fails, and has to end waits inside the targets of other fetches.

    Fetches that go through scratch memory wait for one another if `scratch_bytes` do not suffice for one per thread.
    If they do not even suffice for the longest fetch and two copies of the longest frame when decompressed, these are
    allocated all the same, for one fetch at a time. From a store with `read_bytes`, all fetches wait in this way.
    """
    through_scratch = [fetch for fetch in fetches if fetch.target is None and fetch.pieces is None]
    content_bytes = max((fetch.byte_length + ALIGNMENT for fetch in through_scratch), default=0)
    frames = [frame for fetch in fetches for frame in fetch.frames]
    raw_bytes = max((frame.raw_bytes for frame in frames if frame.target is None), default=0)
    # A codec allocates as much as the raw bytes beside the memory that they go to.
    decoding_bytes = max((frame.raw_bytes for frame in frames), default=0)
    bytes_per_fetch = memory.block_bytes(content_bytes) + memory.block_bytes(raw_bytes) + decoding_bytes
    scratch_bytes += threads * ALIGNMENT  # alignment must not cost a buffer
    scratch_bytes -= threads * max((fetch.gap_bytes for fetch in fetches), default=0)
    store_budget, filling = None, partial(_reading, store)
    if isinstance(store, SupportsReadBytes):
        filling = partial(_receiving, store)
        longest_bytes = max((fetch.byte_length for fetch in fetches), default=0)
        budget_bytes = max(1, min(threads * longest_bytes, scratch_bytes - bytes_per_fetch - longest_bytes))
        store_budget = ByteBudget(budget_bytes)
        scratch_bytes -= budget_bytes + longest_bytes
    # Two for each thread: the one it gave back may still be copied to a device.
    num_buffers = max(1, min(2 * threads, scratch_bytes // max(1, bytes_per_fetch)))
    content_pool, raw_pool = memory.new_buffers(num_buffers, content_bytes), memory.new_buffers(num_buffers, raw_bytes)
    extents = {number: _extents_of(files[number]) for number in {fetch.file for fetch in fetches} if verify}
    errors: dict[int, BaseException] = {}
    """In the order of time, by the number of the fetch."""

    def carry_out(fetch: Fetch) -> None:
        name = join_name(folder, files[fetch.file].name)
        if fetch.pieces is not None and isinstance(store, SupportsReadPieces):
            _read_pieces(store, name, fetch, fetch.pieces(), extents.get(fetch.file))
            return
        # Before a buffer is taken: memory may suffice for one only, which is not held while a request is under way.
        fill = filling(name, fetch)
        if fetch.target is not None:
            _read(fill, name, fetch, fetch.target(), extents.get(fetch.file))
            return
        with content_pool.lend() as buffer:
            # Bytes that are aligned in the file are aligned in memory.
            content = buffer[fetch.byte_offset % ALIGNMENT :][: fetch.byte_length]
            _read(fill, name, fetch, nullcontext(content), extents.get(fetch.file))
            for frame in fetch.frames:
                encoded = content[frame.byte_offset - fetch.byte_offset :][: frame.byte_length]
                with raw_pool.lend() if frame.target is None else nullcontext(frame.target) as raw:
                    _decode(name, fetch, frame, encoded, raw[: frame.raw_bytes])
                    frame.place(raw[: frame.raw_bytes])

    def run(number: int, fetch: Fetch) -> None:
        with nullcontext() if store_budget is None else store_budget.taken(fetch.byte_length):
            if errors:  # another fetch has failed while this one waited
                return
            try:
                carry_out(fetch)
            except BaseException as error:
                errors[number] = error
                on_failure()
                raise

    with _raising_first(errors):
        run_jobs(lambda numbered: run(*numbered), list(enumerate(fetches)), num_threads=threads)


@contextmanager
def _raising_first(errors: dict[int, BaseException]) -> Iterator[None]:
    """Surrounds the run that adds to `errors`, and clears them at its end. If it fails, raises the first error about
    damage in the order of the fetches, so that threads do not decide which; else the first in time, which may have
    caused the others.
    """
    try:
        yield
    except Exception:
        damaged = (number for number, error in errors.items() if isinstance(error, CheckpointCorruptError))
        first = min(damaged, default=next(iter(errors), None))
        if first is not None:
            raise errors[first] from errors[first].__cause__
        raise
    finally:
        errors.clear()  # a traceback that holds its own error is memory until the next collection


class _FileExtents(NamedTuple):
    """The extents of a file that has checksums."""

    bounds: Sequence[int]
    """Offset of the first byte of each, and of the one behind the last."""
    digests: Sequence[int]


def _extents_of(file: DataFile) -> _FileExtents | None:
    return (
        _FileExtents([*accumulate(file.extent_lengths, initial=0)], file.extent_digests)
        if file.extent_lengths
        else None
    )


_Fill = Callable[[memoryview, FillHook | None], None]


def _read(
    fill: _Fill, name: str, fetch: Fetch, target: AbstractContextManager[memoryview], extents: _FileExtents | None
) -> None:
    """Fills the target of a fetch, compares its bytes with the checksums, and calls `fetch.place`. For damaged bytes,
    raises CheckpointCorruptError (checksum) instead of that call; the target is filled all the same.
    """
    check = _Check(extents, name, fetch)
    with target as buffer:
        # Without extents, nothing is asked for on the way, and the store reads as much at once as it can.
        fill(buffer, (lambda filled: check.add(buffer[check.num_bytes : filled])) if extents else None)
        check.add(buffer[check.num_bytes :])  # the rest, if the store has not reported it
    check.raise_damage()
    fetch.place(buffer)


def _read_pieces(
    store: SupportsReadPieces,
    name: str,
    fetch: Fetch,
    pieces: AbstractContextManager[Sequence[memoryview]],
    extents: _FileExtents | None,
) -> None:
    """Fills and checks the pieces of a fetch, then calls its `place` without bytes: they are in place."""
    check = _Check(extents, name, fetch)
    with pieces as buffers:
        if sum(map(len, buffers)) != fetch.byte_length:  # else each later piece would get its neighbour's bytes
            raise ValueError(f"{name}: {fetch.byte_length} bytes go into {sum(map(len, buffers))} bytes of memory")
        store.read_pieces(name, fetch.byte_offset, buffers, on_filled=check.add_all)
    check.raise_damage()
    fetch.place(memoryview(b""))


def _reading(store: Store, name: str, fetch: Fetch) -> _Fill:
    """Returns a function that reads a fetch into its buffer."""
    return lambda buffer, on_filled: store.read_into(name, fetch.byte_offset, buffer, on_filled=on_filled)


def _receiving(store: SupportsReadBytes, name: str, fetch: Fetch) -> _Fill:
    """Receives the bytes of a fetch. Returns a function, to be called once, that copies them into the buffer and frees
    their memory.
    """
    received = [store.read_bytes(name, fetch.byte_offset, fetch.byte_length)]

    def fill(buffer: memoryview, _on_filled: FillHook | None) -> None:
        buffer[:] = received.pop()

    return fill


def _decode(name: str, fetch: Fetch, frame: Frame, content: memoryview, into: memoryview) -> None:
    try:
        decode_frame(frame.codec, content, frame.item_bytes, into)
    except CheckpointCorruptError as error:
        end = frame.byte_offset + frame.byte_length
        raise CheckpointCorruptError(
            f"{name}, bytes {frame.byte_offset} to {end}, part of {fetch.wanted_by(frame.byte_offset, end)}: "
            f"{error.message}",
            kind=error.kind,
        ) from error


class _Check:
    """Compares each extent of a fetch, which consists of whole extents, with its checksum as soon as its bytes are
    there. Without extents nothing is compared. Damage in an extent of which no tensor needs a byte is ignored: it lies
    in a gap.
    """

    def __init__(self, extents: _FileExtents | None, name: str, fetch: Fetch) -> None:
        self._extents = extents
        self._next = bisect_left(extents.bounds, fetch.byte_offset) if extents else 0
        """Number of the extent behind the one that the last byte is in."""
        self._name = name
        self._fetch = fetch
        self.num_bytes = 0
        """Number of bytes added so far."""
        self._start = self._end = 0
        """Bounds of the extent that the last byte is in, in bytes from the start of the fetch."""
        self._hash = xxhash.xxh3_64()
        self._damage: CheckpointCorruptError | None = None

    def add_all(self, contents: Sequence[memoryview]) -> None:
        """Does what `add` does with each piece of the bytes that follow, but faster."""
        if self._extents is None:
            return
        first, ends = 0, [*accumulate(map(len, contents), initial=self.num_bytes)][1:]
        while first < len(contents):
            # Pieces that end before their extent does are hashed without a step of Python for each.
            last = bisect_left(ends, self._end, first)
            deque(map(self._hash.update, contents[first:last]), maxlen=0)
            if last > first:
                self.num_bytes = ends[last - 1]
            if last < len(contents):
                self.add(contents[last])
            first = last + 1

    def add(self, content: memoryview) -> None:
        """Hashes the bytes that follow those of the call before, and compares the extents that end in them."""
        position, end = self.num_bytes, self.num_bytes + len(content)
        self.num_bytes = end
        if self._start < position and end < self._end:  # the usual case if there are many pieces
            self._hash.update(content)
            return
        while position < end and self._extents:
            if position == self._end:
                self._next += 1
                self._start, self._end = position, self._extents.bounds[self._next] - self._fetch.byte_offset
            part = content[: self._end - position]
            content, position = content[len(part) :], position + len(part)
            if len(part) == self._end - self._start:
                self._compare(xxhash.xxh3_64_intdigest(part))
                continue
            self._hash.update(part)
            if position == self._end:
                self._compare(self._hash.intdigest())
                self._hash.reset()

    def _compare(self, found: int) -> None:
        start, end = self._fetch.byte_offset + self._start, self._fetch.byte_offset + self._end
        expected = self._extents.digests[self._next - 1] if self._extents else found
        # The names are asked for only now: a fetch may be for thousands of tensors.
        if found != expected and (names := self._fetch.wanted_by(start, end)):
            self._extents = None
            self._damage = CheckpointCorruptError(
                f"{self._name}: bytes {start} to {end} are damaged (checksum {expected:016x} expected, "
                f"{found:016x} found); they are part of {names}. Copy the file again from a good replica, or load "
                "another checkpoint; `bcp verify` lists all damage",
                kind="checksum",
            )

    def raise_damage(self) -> None:
        """Raises the error about the first damage found, if any. Called once the whole target is overwritten."""
        if self._damage is not None:
            raise self._damage
