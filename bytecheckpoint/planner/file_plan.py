"""How the chunks that one rank writes lie in its data files, and where the checksummed extents of a file end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.offers import Offer, Write
from bytecheckpoint.region import Region

EXTENT_BYTES = 1 << 20
"""A checksum covers about this much: what a partial read may have to read beyond what it wants."""


class PlacedChunk(NamedTuple):
    """A chunk and its place in a file's data section."""

    offer: int
    """Index into the rank's offers."""
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """The global shape of the tensor."""
    region: Region
    data_offset: int
    """In bytes from the start of the data section."""
    byte_length: int


def lay_out_files(
    offers: Sequence[Offer], writes: Iterable[Write], *, max_file_bytes: int
) -> list[tuple[PlacedChunk, ...]]:
    """One entry a file, its chunks in file order: by falling item size, then FQN, so that each is aligned to its own.

    A file's data section has at most `max_file_bytes` unless a single chunk is larger.
    """

    def order(write: Write) -> tuple[int, str, Region]:
        offer = offers[write.offer]
        return -itemsize(offer.dtype), offer.fqn, write.region

    files: list[list[PlacedChunk]] = []
    end = 0
    for write in sorted(writes, key=order):
        offer = offers[write.offer]
        byte_length = write.region.numel * itemsize(offer.dtype)
        if not files or (files[-1] and end + byte_length > max_file_bytes):
            files.append([])
            end = 0
        files[-1].append(PlacedChunk(write.offer, offer.fqn, offer.dtype, offer.shape, write.region, end, byte_length))
        end += byte_length
    return [tuple(file) for file in files]


def cut_extents(header_bytes: int, chunk_bytes: Iterable[int], *, block_bytes: int) -> list[int]:
    """The lengths, in bytes, of the extents of a file: the header, then its chunks.

    Small neighbours share an extent; a large chunk starts one of its own and is cut into several, so that it can be
    read and verified straight in the memory that it is meant for. No extent reaches over a multiple of `block_bytes`:
    files are written in such blocks, each with the checksums of its own bytes.
    """
    return _split_at_blocks(_group_chunks(header_bytes, chunk_bytes), block_bytes)


def _group_chunks(header_bytes: int, chunk_bytes: Iterable[int]) -> list[int]:
    extents = _cut(header_bytes)
    small = 0
    for num_bytes in chunk_bytes:
        if small and small + num_bytes > EXTENT_BYTES:
            extents.append(small)
            small = 0
        if num_bytes >= EXTENT_BYTES:
            extents += _cut(num_bytes)
        else:
            small += num_bytes
    return [*extents, small] if small else extents


def _cut(num_bytes: int) -> list[int]:
    full, rest = divmod(num_bytes, EXTENT_BYTES)
    return [EXTENT_BYTES] * full + ([rest] if rest else [])


def _split_at_blocks(extents: Iterable[int], block_bytes: int) -> list[int]:
    split: list[int] = []
    room = block_bytes
    for extent in extents:
        left = extent
        while left > room:
            split.append(room)
            left, room = left - room, block_bytes
        split.append(left)
        room = room - left or block_bytes
    return split
