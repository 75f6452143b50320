"""How what a rank writes is cut into chunks and lies in data files, and where the checksummed extents of a file end.
It knows no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.offers import Offer, Write
from bytecheckpoint.region import Region

EXTENT_BYTES = 1 << 20
"""A checksum covers at most this much: what a partial read may have to read beyond what it wants, at each end."""
MIN_EXTENT_BYTES = 128 << 10
"""What is no longer than this is not cut again: a request reads as much while it begins, and manifests stay short."""
_OWN_EXTENT_BYTES = 256 << 10
"""A chunk this large has extents of its own."""
_PARTS_OF_CHUNK = 16
"""Any part of a chunk costs at most two of these more than it is; half, a quarter or an eighth of it, none."""
_EXTENTS_OF_FILE = 1024
"""About as many at most where extents are shorter than EXTENT_BYTES, so that manifests of many files stay short."""


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

    Small neighbours share an extent; a large chunk starts one of its own and is cut into equal parts, so that it can be
    read and verified straight in the memory that it is meant for, and half of it without a byte of the other half. No
    extent reaches over a multiple of `block_bytes`: files are written in such blocks, each with the checksums of its
    own bytes.
    """
    chunks = list(chunk_bytes)
    return _split_at_blocks(_group_chunks(header_bytes, chunks), block_bytes)


def _group_chunks(header_bytes: int, chunk_bytes: Sequence[int]) -> list[int]:
    extents = _cut(header_bytes, EXTENT_BYTES)
    least = max(MIN_EXTENT_BYTES, sum(chunk_bytes) // _EXTENTS_OF_FILE)
    small = 0
    for num_bytes in chunk_bytes:
        if small and small + num_bytes > EXTENT_BYTES:
            extents.append(small)
            small = 0
        if num_bytes >= _OWN_EXTENT_BYTES:
            extents += [small] if small else []
            extents += _cut(num_bytes, min(EXTENT_BYTES, max(least, num_bytes // _PARTS_OF_CHUNK)))
            small = 0
        else:
            small += num_bytes
    return [*extents, small] if small else extents


def _cut(num_bytes: int, max_bytes: int) -> list[int]:
    """Equal parts, a power of two of them: where ranks become twice as many, shards end where parts do."""
    num_parts = 1
    while num_parts * max_bytes < num_bytes:
        num_parts *= 2
    # Multiples of every item size: what ranks exchange is cut where extents end, and never within an element.
    bounds = [*(num_bytes * number // num_parts // 16 * 16 for number in range(num_parts)), num_bytes]
    return [end - start for start, end in pairwise(bounds) if end > start]


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
