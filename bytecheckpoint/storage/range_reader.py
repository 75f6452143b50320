"""The reads of a load plan, many in flight, each verified before its bytes are used. It handles bytes; putting them
into tensors is the business of whoever passes `place`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.runtime.buffers import BufferPool, ByteBudget
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.compression import decode_frame
from bytecheckpoint.storage.store import FillHook, Store, SupportsReadBytes

ALIGNMENT = 16
"""Of the largest items, in bytes."""
_NUM_COPIES = 2
"""Of a read, beside those that are under way: see `fetch_bytes`."""


class FrameRead(NamedTuple):
    """A frame of a compressed chunk that lies in the range of a read."""

    byte_offset: int
    """From the start of the file."""
    byte_length: int
    raw_bytes: int
    """How long it is when decompressed."""
    codec: str
    item_bytes: int
    target: memoryview | None
    """Where the raw bytes go; None where they go through scratch memory."""
    place: Callable[[memoryview], None]
    """Called with the raw bytes, from any thread."""


class Read(NamedTuple):
    """One range of a file that is wanted."""

    file: DataFile
    name: str
    """Of the object in the store."""
    byte_offset: int
    byte_length: int
    target: Callable[[], AbstractContextManager[memoryview]] | None
    """Gives where the bytes go while they are read; None where they go through scratch memory and `place` takes them
    from there."""
    place: Callable[[memoryview], None]
    """Called with the verified bytes, from any thread."""
    wanted_by: Callable[[int, int], str]
    """Names the tensors that need bytes between two places of the file, for an error; "" where none does."""
    frames: Sequence[FrameRead] = ()


class Memory(Protocol):
    """What scratch memory is made of."""

    def block_bytes(self, byte_length: int) -> int:
        """How much of it a buffer of that length takes."""

    def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
        """Returns a pool of at most so many buffers of that length."""


def fetch_bytes(store: Store, *, scratch_bytes: int, threads: int) -> int:
    """How long reads may be, so that all threads can be at one with this much scratch memory."""
    # What a store has in memory of its own counts: one such read a thread, of which one may be there twice while a
    # client library puts together the pieces in which it came, and a buffer where they are copied to in turn.
    return scratch_bytes // (threads + _NUM_COPIES if isinstance(store, SupportsReadBytes) else threads)


def run_reads(
    store: Store, reads: Sequence[Read], *, threads: int, verify: bool, scratch_bytes: int, memory: Memory
) -> None:
    """Carries out all reads; when one fails, those not begun are dropped and its error is raised.

    Reads that go through scratch memory wait for one another if `scratch_bytes` do not suffice for one per thread.
    More than that is taken only for one read that is longer, with the frame that it decompresses, which is there twice.
    If the store reads into memory of its own, all reads wait so.
    """
    content_bytes = max((read.byte_length + ALIGNMENT for read in reads if read.target is None), default=0)
    raw_bytes = max((_raw_bytes(read) for read in reads), default=0)
    scratch_bytes += threads * ALIGNMENT  # small change must not cost a buffer
    bytes_per_read = memory.block_bytes(content_bytes) + memory.block_bytes(raw_bytes) + _decoding_bytes(reads)
    store_budget = None
    if isinstance(store, SupportsReadBytes):
        longest_bytes = max((read.byte_length for read in reads), default=0)
        budget_bytes = max(1, min(threads * longest_bytes, scratch_bytes - bytes_per_read - longest_bytes))
        store_budget = ByteBudget(budget_bytes)
        scratch_bytes -= budget_bytes + longest_bytes
    # Two for each thread: the one it gave back may still be copied to a device.
    num_buffers = max(1, min(2 * threads, scratch_bytes // max(1, bytes_per_read)))
    contents, raws = memory.new_buffers(num_buffers, content_bytes), memory.new_buffers(num_buffers, raw_bytes)
    checks = {file.name: _Checks(file) for file in {read.file.name: read.file for read in reads}.values() if verify}
    has_failed = False

    def carry_out(read: Read) -> None:
        fill, check = _filling(store, read), checks.get(read.file.name)
        if read.target is not None:
            _run(fill, read, read.target(), check)
            return
        with contents.lend() as buffer:
            # Bytes that are aligned in the file are aligned in memory.
            content = buffer[read.byte_offset % ALIGNMENT :][: read.byte_length]
            _run(fill, read, nullcontext(content), check)
            _decode_all(read, content, raws)

    def run(read: Read) -> None:
        nonlocal has_failed
        with nullcontext() if store_budget is None else store_budget.taken(read.byte_length):
            if has_failed:  # another read, while this one waited
                return
            try:
                carry_out(read)
            except BaseException:
                has_failed = True
                raise

    run_jobs(run, reads, num_threads=threads)


_Fill = Callable[[memoryview, FillHook | None], None]


def _filling(store: Store, read: Read) -> _Fill:
    """What fills the buffer of a read. Where the store has the bytes in memory of its own, they are there already when
    this returns, and that memory is free when the buffer is full.
    """
    if not isinstance(store, SupportsReadBytes):
        return lambda buffer, on_filled: store.read_into(read.name, read.byte_offset, buffer, on_filled=on_filled)
    given = [store.read_bytes(read.name, read.byte_offset, read.byte_length)]

    def fill(buffer: memoryview, _on_filled: FillHook | None) -> None:
        buffer[:] = given.pop()

    return fill


def _run(fill: _Fill, read: Read, target: AbstractContextManager[memoryview], checks: _Checks | None) -> None:
    with target as buffer:
        check = None if checks is None else _Check(checks, read, buffer)
        fill(buffer, check)
        if check is not None:
            check(read.byte_length)  # what the store has not told
    if check is not None:
        check.raise_damage()
    read.place(buffer)


def _raw_bytes(read: Read) -> int:
    """The scratch memory that its frames need, one after the other."""
    return max((frame.raw_bytes for frame in read.frames if frame.target is None), default=0)


def _decoding_bytes(reads: Sequence[Read]) -> int:
    """What undoing one frame takes beside the memory that it goes to, which the codec allocates."""
    return max((frame.raw_bytes for read in reads for frame in read.frames), default=0)


def _decode_all(read: Read, content: memoryview, raws: BufferPool) -> None:
    for frame in read.frames:
        start = frame.byte_offset - read.byte_offset
        encoded = content[start : start + frame.byte_length]
        if frame.target is not None:
            _decode(read, frame, encoded, frame.target)
            frame.place(frame.target)
            continue
        with raws.lend() as raw:
            _decode(read, frame, encoded, raw[: frame.raw_bytes])
            frame.place(raw[: frame.raw_bytes])


def _decode(read: Read, frame: FrameRead, content: memoryview, into: memoryview) -> None:
    try:
        decode_frame(frame.codec, content, frame.item_bytes, into)
    except CheckpointCorruptError as error:
        end = frame.byte_offset + frame.byte_length
        raise CheckpointCorruptError(
            f"{read.name}, bytes {frame.byte_offset} to {end}, part of {read.wanted_by(frame.byte_offset, end)}: "
            f"{error.message}",
            kind=error.kind,
        ) from error


class HostMemory:
    """Scratch memory of reads into host memory."""

    def block_bytes(self, byte_length: int) -> int:
        return byte_length

    def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
        # A bytearray would be zeroed first.
        return BufferPool(byte_length, num_buffers, new_block=lambda num_bytes: np.empty(num_bytes, np.uint8).data)


class _Checks:
    """The checksums of one file, by byte offset."""

    def __init__(self, file: DataFile) -> None:
        ends = accumulate(file.extent_lengths)
        self.extents = {
            end - length: (length, digest)
            for end, length, digest in zip(ends, file.extent_lengths, file.extent_digests, strict=True)
        }
        """Length and digest of each."""


class _Check:
    """Compares each extent of a read, which consists of whole ones, as soon as its bytes are there; none where the file
    has no checksums. Damage in an extent that lies in a gap, and of which nobody needs a byte, is none.
    """

    def __init__(self, checks: _Checks, read: Read, buffer: memoryview) -> None:
        self._extents = checks.extents
        self._read = read
        self._buffer = buffer
        self._position = 0
        self._damage: CheckpointCorruptError | None = None

    def __call__(self, filled: int) -> None:
        while self._extents and self._position < filled and self._damage is None:
            start = self._read.byte_offset + self._position
            length, expected = self._extents[start]
            if self._position + length > filled:
                return
            found = xxhash.xxh3_64_intdigest(self._buffer[self._position : self._position + length])
            # Who needs a byte of it is asked only now: a read may be for thousands of tensors.
            if found != expected and (names := self._read.wanted_by(start, start + length)):
                self._damage = _damaged(self._read, start, start + length, names, expected=expected, found=found)
            self._position += length

    def raise_damage(self) -> None:
        """What was found is raised only now that the read has ended, because only then is it known what it has
        overwritten.
        """
        if self._damage is not None:
            raise self._damage


def _damaged(read: Read, start: int, end: int, names: str, *, expected: int, found: int) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{read.name}: bytes {start} to {end} are damaged (checksum {expected:016x} expected, {found:016x} found); "
        f"they are part of {names}. Copy the file again from a good replica, or load another checkpoint; "
        "`bcp verify` lists all damage",
        kind="checksum",
    )
