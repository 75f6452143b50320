"""Layout of data files: the order of chunks, the codec of each, and the ends of the checksummed extents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise, repeat
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.write_items import ItemRegion, WriteItem
from bytecheckpoint.region import Region

EXTENT_BYTES = 1 << 20
"""Limit of an extent: a partial read may have to read as much beyond what it wants, at each end. As with every limit
here, a part may be up to 15 bytes longer."""
_MAX_EXTENTS = 1 << 21
"""Approximate limit for the extents of a checkpoint: their checksums take 16 MB of its manifest, which all ranks get
from the coordinator. Beyond 2 TiB extents are longer than EXTENT_BYTES."""
_LONGEST_EXTENT_BYTES = 4 << 20
"""Limit of an extent of any checkpoint: each thread that reads needs memory for one."""
LARGE_CHUNK_BYTES = 16 << 20
"""Chunks from here on are large: in a checkpoint of up to 2 TiB their extents are at most a sixteenth of the chunk,
because parts that loads want are large."""
LARGE_CHUNK_EXTENT_BYTES = 256 << 10
"""Limit of an extent in a large chunk of a checkpoint that is not large itself. Checking so short extents takes a tenth
longer than extents of 1 MiB; at 64 KiB it would be 45%."""
_MAX_LARGE_EXTENTS = 1 << 20
"""Approximate limit for extents of large chunks in a checkpoint: their checksums take 8 to 16 MB of its manifest, which
all ranks get from the coordinator. Beyond 256 GiB extents are longer."""
MIN_EXTENT_BYTES = 128 << 10
"""Extents no longer than this are not cut: a range request reads as much while it begins, and manifests stay short."""
OWN_EXTENT_BYTES = 256 << 10
"""Chunks from here on have extents of their own, in a checkpoint of up to 2 TiB."""
_PARTS_OF_CHUNK = 16
"""About so many extents has a chunk that is not large, or fewer if they would be short, or too many for a file. Reading
any part reads at most two extents too many; with so many extents, an aligned half, quarter or eighth reads none."""
_EXTENTS_OF_FILE = 768
"""Extents of a file above which chunks that are not large are cut less often: manifests of many files are mostly
checksums, and stay short."""
_HALVES_OF_FILE = 2048
"""Extents of a file up to which chunks are cut into halves at least: each of twice as many ranks wants a half."""


class PlacedChunk(NamedTuple):
    """A chunk and its place in a file's data section."""

    item: int
    """Index into the rank's write items."""
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """The global shape of the tensor."""
    region: Region
    data_offset: int
    """In bytes from the start of the data section."""
    byte_length: int
    group: int
    """Chunks of different groups share no extent. 0: only this rank holds the chunk, or it is not small."""


def lay_out_files(
    items: Sequence[WriteItem], writes: Iterable[ItemRegion], *, groups: Sequence[Sequence[int]], max_file_bytes: int
) -> list[tuple[PlacedChunk, ...]]:
    """Returns the chunks of each file in file order: by falling dtype size, so that each chunk is aligned, then by
    group, then FQN.

    A group of write items is read together and apart from all others; the first group is wanted most. Among chunks of
    the largest dtype size, groups lie at the end, the first group last; among chunks of each smaller size, groups lie
    at the front, the first group first. So the parts of the first group are neighbours if there are two dtype sizes. A
    file's data section has at most `max_file_bytes` unless a single chunk is larger.
    """
    group_of = {item: number for number, group in enumerate(groups, start=1) for item in group}
    ordered = list(writes)
    largest = max((itemsize(items[write.item].dtype) for write in ordered), default=0)

    def order(write: ItemRegion) -> tuple[int, int, str, Region]:
        item, place = items[write.item], group_of.get(write.item, len(groups) + 1)
        item_bytes = itemsize(item.dtype)
        return -item_bytes, -place if item_bytes == largest else place, item.fqn, write.region

    files: list[list[PlacedChunk]] = []
    end = 0
    for index, region in sorted(ordered, key=order):
        item = items[index]
        byte_length = region.numel * itemsize(item.dtype)
        if not files or end + byte_length > max_file_bytes:
            files.append([])
            end = 0
        group = group_of.get(index, 0)
        files[-1].append(PlacedChunk(index, item.fqn, item.dtype, item.shape, region, end, byte_length, group))
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
    """Returns the lengths, in bytes, of the extents of a file: those of the header, one or more, then of its chunks.

    `state_bytes` is the approximate size of the checkpoint. `groups` has the group of each chunk; it is empty if
    all chunks are of one group.

    Small neighbours of one group share an extent. A chunk of OWN_EXTENT_BYTES or more (in a checkpoint above 2 TiB, of
    the longest extent or more) starts an extent of its own, so that it can be read and verified in its destination
    memory. It is cut into equal parts: two or more, unless the checkpoint is that large or the file has too many
    extents, so that half of it is read without a byte of the other half. No extent reaches over a multiple of
    `block_bytes`: files are written in such blocks, each with the checksums of its own bytes.
    """
    header = _cut(header_bytes, num_parts=_power_of_two(header_bytes, EXTENT_BYTES))
    longest = EXTENT_BYTES
    while longest * _MAX_EXTENTS < state_bytes and longest < _LONGEST_EXTENT_BYTES:
        longest *= 2
    in_large_bytes = min(max(state_bytes // _MAX_LARGE_EXTENTS, LARGE_CHUNK_EXTENT_BYTES), longest)
    extents = _group_chunks(list(chunk_bytes), groups, longest=longest, in_large_bytes=in_large_bytes)
    return _split_at_blocks([*header, *extents], block_bytes)


def _group_chunks(chunk_bytes: Sequence[int], groups: Sequence[int], *, longest: int, in_large_bytes: int) -> list[int]:
    """Returns the lengths of the extents of these chunks, in bytes: at most about `longest`, and in chunks of
    LARGE_CHUNK_BYTES or more at most about `in_large_bytes`.
    """
    own_bytes = OWN_EXTENT_BYTES if longest == EXTENT_BYTES else longest
    counts = Counter(num_bytes for num_bytes in chunk_bytes if num_bytes >= own_bytes)
    parts_of = _choose_parts(counts, longest=longest, in_large_bytes=in_large_bytes)
    extents: list[int] = []
    small, last_group = 0, 0
    for num_bytes, group in zip(chunk_bytes, groups or repeat(0), strict=False):
        if small and (small + num_bytes > longest or group != last_group):
            extents.append(small)
            small = 0
        last_group = group
        if num_bytes >= own_bytes:
            extents += [small] if small else []
            extents += _cut(num_bytes, num_parts=parts_of[num_bytes])
            small = 0
        else:
            small += num_bytes
    return [*extents, small] if small else extents


def _choose_parts(counts: Mapping[int, int], *, longest: int, in_large_bytes: int) -> dict[int, int]:
    """Returns the number of extents of a chunk, a power of two, by the chunk's length in bytes. `counts` has how many
    chunks there are of each length. Extents have at most about `longest` bytes, and `in_large_bytes` in chunks of
    LARGE_CHUNK_BYTES or more.
    """
    large = {
        num_bytes: _power_of_two(num_bytes, in_large_bytes) for num_bytes in counts if num_bytes >= LARGE_CHUNK_BYTES
    }
    others = {num_bytes: count for num_bytes, count in counts.items() if num_bytes < LARGE_CHUNK_BYTES}
    if longest > EXTENT_BYTES:  # so many bytes have enough extents without cutting more often
        return large | {num_bytes: _power_of_two(num_bytes, longest) for num_bytes in others}
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
    """Returns the number of equal parts of which none is longer than `max_bytes`: the least such power of two, so that
    shards still end where parts do if the number of ranks doubles.
    """
    num_parts = 1
    while num_parts * max_bytes < num_bytes:
        num_parts *= 2
    return num_parts


def _cut(num_bytes: int, *, num_parts: int) -> list[int]:
    # Multiples of every dtype size: ranks exchange bytes cut where extents end, and never within an element.
    bounds = [*(num_bytes * number // num_parts // 16 * 16 for number in range(num_parts)), num_bytes]
    return [end - start for start, end in pairwise(bounds) if end > start]


def _split_at_blocks(extents: Iterable[int], block_bytes: int) -> list[int]:
    """Returns the lengths of the extents, each cut where a block of the file ends."""
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
"""`SaveOptions.codec`: one codec for all tensors, or globs of FQNs, each with its own."""


def codec_of(fqn: str, codec: CodecOption) -> str:
    """Returns the codec for a tensor: `codec` itself if it is one name, else that of the first glob that matches the
    FQN, or `none`.
    """
    if isinstance(codec, str):
        return codec
    rules = codec.items() if isinstance(codec, Mapping) else codec
    return next((name for glob, name in rules if fnmatchcase(fqn, glob)), "none")
