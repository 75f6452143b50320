"""Ranges of files that a load reads or a save writes. A plan makes them, loading and staging attach the memory that the
bytes go to or come from, and the storage carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, overload

import numpy as np

from bytecheckpoint.manifest.records import Chunk
from bytecheckpoint.region import Region


class FlatPart(NamedTuple):
    """Consecutive bytes of a file that go, in the same order, to consecutive bytes of a target's memory."""

    want: int
    """Index into the wants of the load plan."""
    byte_offset: int
    """From the start of the file; in a frame, from its first raw byte."""
    byte_length: int
    target_byte_offset: int
    """From the start of the target's memory."""


class FlatParts(Sequence[FlatPart]):
    """Flat parts as rows of an array: a load may want 100,000 small tensors. Records are made on demand."""

    def __init__(self, rows: np.ndarray) -> None:
        """Takes an int64 array with a row for each part and a column for each field of FlatPart, in their order."""
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> FlatPart: ...
    @overload
    def __getitem__(self, index: slice) -> FlatParts: ...
    def __getitem__(self, index: int | slice) -> FlatPart | FlatParts:
        return FlatParts(self.rows[index]) if isinstance(index, slice) else FlatPart(*self.rows[index].tolist())

    def __iter__(self) -> Iterator[FlatPart]:
        return map(FlatPart._make, self.rows.tolist())


class BoxPart(NamedTuple):
    """A region of a chunk whose elements do not follow one another in file or target, or are converted on the way."""

    want: int
    byte_offset: int
    byte_length: int
    """From the region's first element to its last, gaps included."""
    region: Region
    chunk: Chunk


Part = FlatPart | BoxPart


def split_flat(parts: Iterable[Part]) -> tuple[FlatParts, list[BoxPart]]:
    """Returns the flat parts, and the box parts, both in their order."""
    if isinstance(parts, FlatParts):
        return parts, []
    parts = list(parts)
    flat = [part for part in parts if isinstance(part, FlatPart)]
    rows = np.array(flat, np.int64).reshape(-1, len(FlatPart._fields))
    return FlatParts(rows), [part for part in parts if isinstance(part, BoxPart)]


def ignore_bytes(_: memoryview) -> None:
    """Does nothing: the bytes are in their target already, or only frames need them."""


def name_nothing(*_: int) -> str:
    """Returns "": no tensor needs bytes of the range."""
    return ""


class Frame(NamedTuple):
    """A frame of a compressed chunk that is wanted, and the use of its raw bytes."""

    byte_offset: int
    """From the start of the file. A frame is one extent."""
    byte_length: int
    raw_bytes: int
    """Length when decompressed."""
    codec: str
    item_bytes: int
    parts: tuple[Part, ...]
    target: memoryview | None = None
    """Memory that the raw bytes are decompressed into; None if they go through scratch memory."""
    place: Callable[[memoryview], None] = ignore_bytes
    """Called with the raw bytes, from any thread."""

    @property
    def is_direct(self) -> bool:
        """True if the raw bytes are exactly the bytes of the one part, a FlatPart: they can be decompressed straight
        into its target.
        """
        first = self.parts[0]
        return len(self.parts) == 1 and isinstance(first, FlatPart) and first.byte_length == self.raw_bytes


class Fetch(NamedTuple):
    """One read of a file, and the use of its bytes."""

    file: int
    """Index into the files of the manifest."""
    byte_offset: int
    byte_length: int
    parts: Sequence[Part]
    is_direct: bool
    """The bytes are exactly the bytes of the one part, a FlatPart, and can be read into its target's memory."""
    frames: tuple[Frame, ...] = ()
    """Frames to decompress, which are not in `parts`."""
    target: Callable[[], AbstractContextManager[memoryview]] | None = None
    """Gives the memory that the bytes are read into; None if they go through scratch memory."""
    pieces: Callable[[], AbstractContextManager[Sequence[memoryview]]] | None = None
    """Gives the memory that the bytes are read into where that is in many places, in the order of the file."""
    gap_bytes: int = 0
    """Scratch memory in `pieces`: for the bytes that no part wants."""
    place: Callable[[memoryview], None] = ignore_bytes
    """Called with the verified bytes, from any thread."""
    wanted_by: Callable[[int, int], str] = name_nothing
    """Names the tensors that need bytes between two places of the file, for an error; "" if none does."""

    @property
    def end(self) -> int:
        return self.byte_offset + self.byte_length

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts of the fetch and of its frames."""
        return (*self.parts, *(part for frame in self.frames for part in frame.parts))


def no_content() -> AbstractContextManager[memoryview]:
    """Raises ValueError: no bytes are attached to the block yet."""
    raise ValueError("a block is written before its bytes are attached to it")


class Block(NamedTuple):
    """One write to a file, of consecutive bytes."""

    byte_offset: int
    byte_length: int
    content: Callable[[], AbstractContextManager[memoryview]] = no_content
    """Called and entered once, from any thread, when the store is ready for the bytes. Gives them as one flat view of
    exactly `byte_length` bytes, valid until the context is left: the memory is reused after that.

    A store enters the blocks of an object one at a time and in rising order, so that a ring of memory can stand behind
    them: block k + 1 only when block k has given its bytes. It may have several entered, and leaves them in any order.
    """
    extents: range = range(0)
    """Numbers of the checksummed extents, or of the frames, that the block consists of; empty if it has none."""
    file: int = 0
    """Number of the file among those that a rank writes."""


def cut_blocks(lengths: Iterable[int], *, max_bytes: int, file: int = 0) -> list[Block]:
    """Returns the blocks of a file, from byte 0 on: each of as many whole extents, or frames, as fit into `max_bytes`,
    and of one at least. `lengths` are those of the extents, in bytes.
    """
    blocks: list[Block] = []
    start = num_bytes = first = end = 0
    for length in lengths:
        if num_bytes and num_bytes + length > max_bytes:
            blocks.append(Block(start, num_bytes, extents=range(first, end), file=file))
            start, num_bytes, first = start + num_bytes, 0, end
        num_bytes += length
        end += 1
    return [*blocks, Block(start, num_bytes, extents=range(first, end), file=file)] if num_bytes else blocks
