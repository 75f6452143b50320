"""Data files with compressed chunks: several threads make frames of a snapshot's bytes. The header has the lengths of
the frames, so it is made last, and stands first in the file. The plan decides what is compressed,
storage/compression.py how.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import xxhash

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.manifest.frames import (
    FRAME_BYTES,
    MAX_ENCODED_BYTES,
    count_frames,
    frame_bytes,
    is_compressible,
    is_worth_it,
)
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.memory.host_mapping import map_memory
from bytecheckpoint.planner.file_layout import PlacedChunk, cut_extents
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.staging.file_image import PlannedFile, encode_file_header
from bytecheckpoint.storage.compression import FrameEncoder, decode_frame
from bytecheckpoint.storage.object_io import BLOCK_BYTES, FileImage

_ROOM_BYTES = MAX_ENCODED_BYTES - FRAME_BYTES
"""Bytes by which a frame may be longer than its raw bytes."""


class ChunkLocation(NamedTuple):
    """Place and codec of a chunk in its file."""

    byte_offset: int
    byte_length: int
    codec: str


class CompressedFile(NamedTuple):
    """All bytes of a data file, in memory."""

    pieces: Sequence[memoryview]
    """The header, then the frames of each chunk, raw if the chunk did not get smaller: in the order of the file."""
    extent_lengths: Sequence[int]
    extent_digests: Sequence[int]
    locations: Sequence[ChunkLocation]
    """Locations of the chunks, in the order of the plan: in the file, raw chunks come before compressed ones."""

    def image(self, name: str, scratch: BufferPool) -> FileImage:
        """Returns the image of the file; its blocks are put together in scratch memory."""
        starts = [0, *accumulate(map(len, self.pieces))]

        @contextmanager
        def content(byte_offset: int, byte_length: int) -> Iterator[memoryview]:
            with scratch.lend() as memory:
                _gather(self.pieces, starts, byte_offset, memory[:byte_length])
                yield memory[:byte_length]

        blocks = []
        for start in range(0, starts[-1], BLOCK_BYTES):
            num_bytes = min(BLOCK_BYTES, starts[-1] - start)
            blocks.append(Block(start, num_bytes, partial(content, start, num_bytes)))
        return FileImage(name, self.extent_lengths, blocks, self.extent_digests)


def allocate_for(files: Iterable[PlannedFile]) -> memoryview:
    """Returns memory in which any one of these files can be compressed.

    Pages exist from their first use until the memory is dropped. Frames from malloc would stay in the arenas of their
    threads, and those of one file would add to those of the next.
    """
    num_bytes = max(sum(map(_room_for, planned.chunks)) for planned in files)
    return memoryview(map_memory(max(num_bytes, 1), large_pages=False))


def _room_for(chunk: PlacedChunk) -> int:
    return chunk.byte_length + count_frames(chunk.byte_length) * _ROOM_BYTES


def compress_file(
    planned: PlannedFile,
    contents: Sequence[Block],
    memory: memoryview,
    *,
    threads: int,
    second_block: threading.Lock,
    on_compressed: Callable[[float], None],
    on_checksum: Callable[[float], None],
) -> CompressedFile:
    """Compresses a file that was planned with codecs into this memory, which must not change until the file is written.
    `contents` are its planned blocks with their content: the next one is prefetched only while `second_block` is free.
    For each frame, calls `on_compressed` and `on_checksum`, on any thread, with the seconds that each step took.

    Raises the errors of the blocks.
    """
    chunks = _chunks_of(planned, memory)
    frames = ((chunk, number) for chunk in chunks for number in range(chunk.num_frames))
    encoders = SimpleQueue[FrameEncoder]()
    for _ in range(threads):
        encoders.put(FrameEncoder())

    def encode(chunk: _CompressedChunk, number: int, raw: memoryview) -> None:
        encoder = encoders.get()
        try:
            started = time.perf_counter()
            checksum_s = chunk.add(number, raw, encoder)
            on_checksum(checksum_s)
            on_compressed(time.perf_counter() - started - checksum_s)
        finally:
            encoders.put(encoder)

    with closing(_Blocks(contents, second_block)) as blocks:
        while (raw := blocks.take()) is not None:
            jobs: list[Callable[[], None]] = [partial(encode, *frame) for frame in _frames_in(frames, raw)]
            # Prefetches the next block while the last frames of this one are made.
            run_jobs(lambda job: job(), [*jobs, blocks.enter_ahead], num_threads=threads)
    return _assemble(chunks)


class _Blocks:
    """The blocks of a file: one in use, and perhaps the next one prefetched."""

    def __init__(self, blocks: Sequence[Block], second_block: threading.Lock) -> None:
        """`second_block` is held only while the next block is awaited, not once it is there: saves share the memory of
        the blocks, and two that have a block each and wait for another might wait for ever.
        """
        self._left = iter(blocks)
        self._second_block = second_block
        self._in_use, self._ahead = ExitStack(), ExitStack()
        self._next: memoryview | None = None
        self._is_entered = False

    def enter_ahead(self) -> None:
        """Prefetches the next block, if any, on any thread: this may wait for memory. Does nothing while another save
        prefetches one.
        """
        if self._second_block.acquire(blocking=False):
            try:
                self._enter()
            finally:
                self._second_block.release()

    def _enter(self) -> None:
        block = next(self._left, None)
        self._next = None if block is None else self._ahead.enter_context(block.content())
        self._is_entered = True

    def take(self) -> memoryview | None:
        """Gives back the block in use, and returns the bytes of the next one; None after the last."""
        self._in_use.close()
        if not self._is_entered:
            self._enter()
        self._in_use, self._ahead = self._ahead, self._in_use
        self._is_entered = False
        return self._next

    def close(self) -> None:
        with self._in_use, self._ahead:
            self._next = None


def _chunks_of(planned: PlannedFile, memory: memoryview) -> list[_CompressedChunk]:
    """Returns the chunks of a file, still without frames, each with its room in memory."""
    bounds = pairwise(accumulate(map(_room_for, planned.chunks), initial=0))
    return [
        _CompressedChunk(chunk, codec, memory[start:end])
        for chunk, codec, (start, end) in zip(planned.chunks, planned.codecs, bounds, strict=True)
    ]


class _CompressedChunk:
    """A chunk, and its frames as they will be stored."""

    def __init__(self, placed: PlacedChunk, codec: str, memory: memoryview) -> None:
        """`memory` has room for the raw bytes of the chunk and `_ROOM_BYTES` more for each frame."""
        self.placed = placed
        self._item_bytes = itemsize(placed.dtype)
        self._memory = memory
        self.codec = codec if is_compressible(placed.byte_length) else "none"
        self.num_frames = count_frames(placed.byte_length)
        self.frames = [memory[:0]] * self.num_frames
        self.digests = [0] * self.num_frames
        self._frame_codecs = ["none"] * self.num_frames

    @property
    def num_stored_bytes(self) -> int:
        return sum(map(len, self.frames))

    def frame_bytes(self, number: int) -> int:
        return frame_bytes(self.placed.byte_length, number)

    def add(self, number: int, raw: memoryview, encoder: FrameEncoder) -> float:
        """Adds one frame, on any thread. If the first one gets no smaller, later ones stay raw. Returns the seconds of
        its checksum.
        """
        codec = self.codec
        frame = raw if codec == "none" else encoder.encode(codec, raw, self._item_bytes)
        if number == 0 and len(frame) >= raw.nbytes:
            self.codec, codec, frame = "none", "none", raw
        self._frame_codecs[number] = codec
        return self._keep(number, frame)

    def restore_raw_if_larger(self) -> None:
        """Restores the raw bytes if the first frame did not get smaller, or all of them together did not."""
        if self.codec != "none" and is_worth_it(self.placed.byte_length, self.num_stored_bytes):
            return
        for number, codec in enumerate(self._frame_codecs):
            if codec != "none":
                raw = bytearray(self.frame_bytes(number))
                decode_frame(codec, self.frames[number], self._item_bytes, memoryview(raw))
                self._keep(number, raw)
        self.codec = "none"

    def _keep(self, number: int, frame: bytes | bytearray | memoryview) -> float:
        """Copies a frame to its place in memory. Returns the seconds of its checksum."""
        start = number * MAX_ENCODED_BYTES
        self.frames[number] = self._memory[start : start + len(frame)]
        _copy(frame, self.frames[number])
        started = time.perf_counter()
        self.digests[number] = xxhash.xxh3_64_intdigest(self.frames[number])
        return time.perf_counter() - started


def _frames_in(
    frames: Iterator[tuple[_CompressedChunk, int]], memory: memoryview
) -> Iterator[tuple[_CompressedChunk, int, memoryview]]:
    """Takes the frames of this block from `frames`: each is a chunk and the frame's number in that chunk. Yields each
    with its raw bytes.
    """
    start = 0
    while start < memory.nbytes:
        chunk, number = next(frames)
        end = start + chunk.frame_bytes(number)
        yield chunk, number, memory[start:end]
        start = end


def _assemble(chunks: Sequence[_CompressedChunk]) -> CompressedFile:
    for chunk in chunks:
        chunk.restore_raw_if_larger()
    # Raw chunks come first, in planned order, so that each is still aligned to its item size.
    in_file = sorted(chunks, key=lambda chunk: chunk.codec != "none")
    header = encode_file_header([(chunk.placed, chunk.num_stored_bytes, chunk.codec) for chunk in in_file])
    ends = accumulate((chunk.num_stored_bytes for chunk in in_file), initial=len(header))
    starts = {id(chunk): start for chunk, start in zip(in_file, ends, strict=False)}
    frames = [frame for chunk in in_file for frame in chunk.frames]
    header_extents = list(_extents(memoryview(header)))
    return CompressedFile(
        pieces=[memoryview(header), *frames],
        # A frame is one extent, compressed or not.
        extent_lengths=[*map(len, header_extents), *map(len, frames)],
        extent_digests=[
            *map(xxhash.xxh3_64_intdigest, header_extents),
            *(digest for chunk in in_file for digest in chunk.digests),
        ],
        locations=[ChunkLocation(starts[id(chunk)], chunk.num_stored_bytes, chunk.codec) for chunk in chunks],
    )


def _extents(header: memoryview) -> Iterator[memoryview]:
    """Yields the header as one extent, or cut as in other files if it is longer than a frame."""
    start = 0
    is_long = len(header) > MAX_ENCODED_BYTES
    for length in cut_extents(len(header), [], block_bytes=BLOCK_BYTES, state_bytes=0) if is_long else [len(header)]:
        yield header[start : start + length]
        start += length


def _gather(pieces: Sequence[memoryview], starts: Sequence[int], byte_offset: int, into: memoryview) -> None:
    index = bisect_right(starts, byte_offset) - 1
    filled = 0
    while filled < into.nbytes:
        skipped = byte_offset + filled - starts[index]
        part = pieces[index][skipped : skipped + into.nbytes - filled]
        _copy(part, into[filled : filled + part.nbytes])
        filled += part.nbytes
        index += 1


def _copy(content: bytes | bytearray | memoryview, into: memoryview) -> None:
    """Copies without the GIL, which assigning to a slice of a memoryview would hold."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(content, np.uint8))
