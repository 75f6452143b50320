"""How what a rank writes is cut into chunks and lies in data files, and where the checksummed extents of a file end.
It knows no bytes.

Which codec the chunks of a tensor are stored with. It knows names and nothing of the bytes: whether compression pays
is found when they are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise, repeat
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.write_items import Offer, Write
from bytecheckpoint.region import Region

EXTENT_BYTES = 1 << 20
"""A checksum covers at most this much: what a partial read may have to read beyond what it wants, at each end."""
LARGE_CHUNK_BYTES = 16 << 20
"""From here on parts are wanted that are large themselves, and extents are at most a sixteenth of the chunk."""
LARGE_CHUNK_EXTENT_BYTES = 256 << 10
"""A checksum in such a chunk covers at most this much, and mostly at least half of it, in a checkpoint that is not
large itself. Checking so short extents takes a tenth longer than those of 1 MiB; at 64 KiB it would be 45%."""
_MAX_LARGE_EXTENTS = 1 << 20
"""Of a whole checkpoint, about: the checksums in large chunks then take 8 to 16 MB of its manifest, which all ranks get
from one. Of more than 256 GiB they cover more, from 1 TiB on EXTENT_BYTES."""
MIN_EXTENT_BYTES = 128 << 10
"""What is no longer than this is not cut again: a request reads as much while it begins, and manifests stay short."""
OWN_EXTENT_BYTES = 256 << 10
"""A chunk this large has extents of its own."""
_PARTS_OF_CHUNK = 16
"""Any part of a chunk costs at most two of these more than it is; half, a quarter or an eighth of it, none."""
_EXTENTS_OF_FILE = 768
"""Chunks that are not large are cut less often where there would be more of theirs, so that manifests of many files
stay short: they are mostly checksums."""
_HALVES_OF_FILE = 2048
"""Up to here chunks are cut into halves at least: half of them is what each of twice as many ranks wants."""


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
    group: int
    """Chunks of different groups share no extent. 0 is what this rank alone holds, and all that is large."""


def lay_out_files(
    offers: Sequence[Offer], writes: Iterable[Write], *, together: Sequence[Sequence[int]], max_file_bytes: int
) -> list[tuple[PlacedChunk, ...]]:
    """One entry a file, its chunks in file order: by falling item size, so that each is aligned to its own, then FQN.

    `together` has groups of offers, each of which is read together and apart from all others; the first group is wanted
    most. Of the largest items the groups lie at the end, the first one last, and of smaller ones at the front, so that
    the parts of a group lie side by side where there are two item sizes. A file's data section has at most
    `max_file_bytes` unless a single chunk is larger.
    """
    groups = {offer: number for number, of_group in enumerate(together, start=1) for offer in of_group}
    ordered = list(writes)
    largest = max((itemsize(offers[write.offer].dtype) for write in ordered), default=0)

    def order(write: Write) -> tuple[int, int, str, Region]:
        offer, place = offers[write.offer], groups.get(write.offer, len(together) + 1)
        item_bytes = itemsize(offer.dtype)
        return -item_bytes, -place if item_bytes == largest else place, offer.fqn, write.region

    files: list[list[PlacedChunk]] = []
    end = 0
    for index, region in sorted(ordered, key=order):
        offer = offers[index]
        byte_length = region.numel * itemsize(offer.dtype)
        if not files or (files[-1] and end + byte_length > max_file_bytes):
            files.append([])
            end = 0
        group = groups.get(index, 0)
        files[-1].append(PlacedChunk(index, offer.fqn, offer.dtype, offer.shape, region, end, byte_length, group))
        end += byte_length
    return [tuple(file) for file in files]


def cut_extents(
    header_bytes: int,
    chunk_bytes: Iterable[int],
    *,
    block_bytes: int,
    state_bytes: int,
    groups: Sequence[int] = (),
) -> list[int]:
    """The lengths, in bytes, of the extents of a file: the header, then its chunks.

    `state_bytes` is about how much the checkpoint has in all. `groups` has the group of each chunk; empty where there
    is but one.

    Small neighbours of one group share an extent; a large chunk starts one of its own and is cut into equal parts, so
    that it can be read and verified straight in the memory that it is meant for, and half of it without a byte of the
    other half. No extent reaches over a multiple of `block_bytes`: files are written in such blocks, each with the
    checksums of its own bytes.
    """
    header = _cut(header_bytes, num_parts=_power_of_two(header_bytes, EXTENT_BYTES))
    in_large_bytes = min(max(state_bytes // _MAX_LARGE_EXTENTS, LARGE_CHUNK_EXTENT_BYTES), EXTENT_BYTES)
    return _split_at_blocks([*header, *_group_chunks(list(chunk_bytes), groups, in_large_bytes)], block_bytes)


def _group_chunks(chunk_bytes: Sequence[int], groups: Sequence[int], in_large_bytes: int) -> list[int]:
    """The extents of chunks; those of large chunks are of at most `in_large_bytes`."""
    counts = Counter(num_bytes for num_bytes in chunk_bytes if num_bytes >= OWN_EXTENT_BYTES)
    parts_of = _choose_parts(counts, in_large_bytes)
    extents: list[int] = []
    small, last_group = 0, 0
    for num_bytes, group in zip(chunk_bytes, groups or repeat(0), strict=False):
        if small and (small + num_bytes > EXTENT_BYTES or group != last_group):
            extents.append(small)
            small = 0
        last_group = group
        if num_bytes >= OWN_EXTENT_BYTES:
            extents += [small] if small else []
            extents += _cut(num_bytes, num_parts=parts_of[num_bytes])
            small = 0
        else:
            small += num_bytes
    return [*extents, small] if small else extents


def _choose_parts(counts: Mapping[int, int], in_large_bytes: int) -> dict[int, int]:
    """Into how many parts large chunks are cut, by their bytes; `counts` says how many there are of each."""
    large = {
        num_bytes: _power_of_two(num_bytes, in_large_bytes) for num_bytes in counts if num_bytes >= LARGE_CHUNK_BYTES
    }
    others = {num_bytes: count for num_bytes, count in counts.items() if num_bytes < LARGE_CHUNK_BYTES}
    least = MIN_EXTENT_BYTES
    while True:
        parts_of = {
            num_bytes: max(2, _power_of_two(num_bytes, min(EXTENT_BYTES, max(least, num_bytes // _PARTS_OF_CHUNK))))
            for num_bytes in others
        }
        num_extents = sum(parts_of[num_bytes] * count for num_bytes, count in others.items())
        if num_extents <= _EXTENTS_OF_FILE or (least >= EXTENT_BYTES and num_extents <= _HALVES_OF_FILE):
            return large | parts_of
        if least >= EXTENT_BYTES:
            return large | {num_bytes: _power_of_two(num_bytes, EXTENT_BYTES) for num_bytes in others}
        least *= 2


def _power_of_two(num_bytes: int, max_bytes: int) -> int:
    """The least that cuts so many bytes into equal parts of at most `max_bytes`: where ranks become twice as many,
    shards end where parts do.
    """
    num_parts = 1
    while num_parts * max_bytes < num_bytes:
        num_parts *= 2
    return num_parts


def _cut(num_bytes: int, *, num_parts: int) -> list[int]:
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


CodecOption = str | Mapping[str, str] | Sequence[tuple[str, str]]


def codec_of(fqn: str, codec: CodecOption) -> str:
    """The codec for a tensor. `codec` is `SaveOptions.codec`: one for all tensors, or globs of FQNs, each with its own.

    The first glob that matches counts; where none does, the codec is `none`.
    """
    if isinstance(codec, str):
        return codec
    rules = codec.items() if isinstance(codec, Mapping) else codec
    return next((name for glob, name in rules if fnmatchcase(fqn, glob)), "none")
