"""A data file made of an image's pieces and written in large blocks, checksummed on the way. It handles bytes; what
they mean is nothing to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import xxhash

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.storage.store import Block, Store

BLOCK_BYTES = 16 << 20
"""About how much one write carries."""


class Piece(NamedTuple):
    """Consecutive bytes of an image."""

    byte_length: int
    load: Callable[[], memoryview]
    """Gives them; may be called more than once and from any thread, and gives the same bytes each time."""


class Image(NamedTuple):
    """The exact bytes of one data file, before it is written."""

    name: str
    """Relative to the checkpoint's folder."""
    data_start: int
    """Length of the header, in bytes."""
    pieces: Sequence[Piece]
    extent_lengths: Sequence[int]
    """In bytes, adding up to the length of the pieces."""

    @property
    def byte_length(self) -> int:
        return sum(piece.byte_length for piece in self.pieces)


def write_image(store: Store, name: str, image: Image) -> DataFile:
    """Writes the image as the object `name`, durably, and returns what the manifest says about it."""
    digests = [0] * len(image.extent_lengths)
    starts = [0, *accumulate(piece.byte_length for piece in image.pieces)]
    blocks = [
        Block(byte_offset, byte_length, _loader(image, starts, digests, byte_offset=byte_offset, extents=extents))
        for byte_offset, byte_length, extents in _blocks(image.extent_lengths)
    ]
    store.write(name, blocks, replace=False)
    return DataFile(image.name, image.byte_length, tuple(image.extent_lengths), tuple(digests))


def _blocks(extent_lengths: Sequence[int]) -> list[tuple[int, int, range]]:
    """Byte offset, byte length and numbers of the extents of each block: whole extents, about BLOCK_BYTES."""
    blocks = []
    offset = length = first = 0
    for index, extent_length in enumerate(extent_lengths):
        if length and length + extent_length > BLOCK_BYTES:
            blocks.append((offset, length, range(first, index)))
            offset, length, first = offset + length, 0, index
        length += extent_length
    if length:
        blocks.append((offset, length, range(first, len(extent_lengths))))
    return blocks


def _loader(
    image: Image, starts: Sequence[int], digests: list[int], *, byte_offset: int, extents: range
) -> Callable[[], Sequence[memoryview]]:
    """Gives a block's bytes and leaves the digests of its extents in `digests`."""

    def load() -> Sequence[memoryview]:
        parts: list[memoryview] = []
        position = byte_offset
        for extent in extents:
            of_extent = _slices(image.pieces, starts, position, image.extent_lengths[extent])
            digests[extent] = _digest(of_extent)
            parts += of_extent
            position += image.extent_lengths[extent]
        return parts

    return load


def _slices(pieces: Sequence[Piece], starts: Sequence[int], byte_offset: int, byte_length: int) -> list[memoryview]:
    """The bytes of a range of the image, as views of the pieces that it touches."""
    slices = []
    index = bisect_right(starts, byte_offset) - 1
    end = byte_offset + byte_length
    while byte_offset < end:
        stop = min(end, starts[index + 1])
        if stop > byte_offset:
            slices.append(pieces[index].load()[byte_offset - starts[index] : stop - starts[index]])
            byte_offset = stop
        index += 1
    return slices


def _digest(parts: Sequence[memoryview]) -> int:
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()
