"""Turns many wanted parts of a file into few, large fetches, each of whole checksummed extents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import cast

import numpy as np

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch, FlatPart, Frame, Part

MIN_DIRECT_BYTES = 1 << 20
"""Smaller parts go through scratch memory, where they share a fetch with their neighbours."""
MAX_DIRECT_BYTES = 16 << 20
"""Longest fetch into a target: short enough for several threads to share a large tensor."""


class ExtentIndex:
    """The bounds of the extents of a file. Without checksums every byte is an extent of its own."""

    def __init__(self, file: DataFile, *, verify: bool) -> None:
        self._bounds = [0, *accumulate(file.extent_lengths)] if verify and file.extent_lengths else None

    def widen(self, start: int, end: int) -> tuple[int, int]:
        """Returns the smallest run of whole extents that contains the range."""
        if self._bounds is None or start == end:
            return start, end
        return self._bounds[bisect_right(self._bounds, start) - 1], self._bounds[bisect_left(self._bounds, end)]

    def widen_all(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Widens many ranges."""
        if self._bounds is None:
            return starts, ends
        bounds, is_empty = np.array(self._bounds, np.int64), starts == ends
        firsts = bounds[np.searchsorted(bounds, starts, side="right") - 1]
        lasts = bounds[np.minimum(np.searchsorted(bounds, ends), len(bounds) - 1)]
        return np.where(is_empty, starts, firsts), np.where(is_empty, ends, lasts)

    def shrink(self, start: int, end: int) -> tuple[int, int]:
        """Returns the largest run of whole extents inside the range; empty if there is none."""
        if self._bounds is None:
            return start, end
        first = self._bounds[bisect_left(self._bounds, start)]
        last = self._bounds[bisect_right(self._bounds, end) - 1]
        return (first, last) if first < last else (start, start)


def coalesce(
    file: int,
    parts: Iterable[Part],
    frames: Iterable[Frame],
    extents: ExtentIndex,
    *,
    max_gap_bytes: int,
    max_fetch_bytes: int,
) -> list[Fetch]:
    """Returns the fetches of one file that serve all parts and frames.

    Large flat parts are read straight into their targets but for their ends, which lie in extents that neighbours
    share; the rest is merged where gaps are small. A fetch, with the memory in which it decompresses one frame after
    the other, takes more than `max_fetch_bytes` only where one extent, one small part with its extents or one frame
    does.
    """
    fetches: list[Fetch] = []
    small: list[Part | Frame] = [*frames]
    parts = list(parts)
    if max(map(attrgetter("byte_length"), parts), default=0) < MIN_DIRECT_BYTES:
        small += parts
        parts = []
    for part in parts:
        if isinstance(part, FlatPart) and part.byte_length >= MIN_DIRECT_BYTES:
            direct, ends = _split_direct(file, part, extents, min(MAX_DIRECT_BYTES, max_fetch_bytes))
            fetches += direct
            small += ends
        else:
            small.append(part)
    return fetches + _merge(file, small, extents, max_gap_bytes, max_fetch_bytes)


def _split_direct(
    file: int, part: FlatPart, extents: ExtentIndex, max_bytes: int
) -> tuple[list[Fetch], list[FlatPart]]:
    start, end = part.byte_offset, part.byte_offset + part.byte_length
    first, last = extents.shrink(start, end)
    fetches = []
    position = first
    while position < last:
        stop = extents.shrink(position, min(position + max_bytes, last))[1]
        if stop <= position:  # one extent is larger than a fetch
            stop = extents.widen(position, position + 1)[1]
        inner = cut_flat(part, position, stop)
        fetches.append(Fetch(file, position, stop - position, (inner,), is_direct=True))
        position = stop
    ends = [cut_flat(part, start, first), cut_flat(part, max(first, last), end)]
    return fetches, [piece for piece in ends if piece.byte_length]


def cut_flat(part: FlatPart, start: int, end: int) -> FlatPart:
    """Returns the bytes of a part between two places of the file."""
    return FlatPart(part.want, start, end - start, part.target_byte_offset + start - part.byte_offset)


def _merge(
    file: int, items: Sequence[Part | Frame], extents: ExtentIndex, max_gap_bytes: int, max_fetch_bytes: int
) -> list[Fetch]:
    fetches: list[Fetch] = []
    group: list[Part | Frame] = []
    group_start = group_end = scratch_bytes = 0
    for start, end, run in _runs(items, extents):
        own_scratch_bytes = _scratch_bytes(run[0])
        if group and group_start <= start and end <= group_end and not own_scratch_bytes:
            group += run
            continue
        scratch_bytes = max(scratch_bytes, own_scratch_bytes)
        total = max(end, group_end) - group_start + scratch_bytes
        if group and (start > group_end + max_gap_bytes or total > max_fetch_bytes):
            fetches.append(fetch_of(file, group_start, group_end, group))
            group = []
        if not group:
            group_start, group_end, scratch_bytes = start, end, own_scratch_bytes
        group += run
        group_end = max(group_end, end)
    if group:
        fetches.append(fetch_of(file, group_start, group_end, group))
    return fetches


def _runs(items: Sequence[Part | Frame], extents: ExtentIndex) -> Iterator[tuple[int, int, Sequence[Part | Frame]]]:
    """Yields the items in file order, with the bounds of their extents. Small parts in the same extents come together;
    a frame, which is an extent, comes alone.
    """
    starts = np.fromiter(map(attrgetter("byte_offset"), items), np.int64, len(items))
    ends = starts + np.fromiter(map(attrgetter("byte_length"), items), np.int64, len(items))
    order = np.lexsort((ends, starts))
    firsts, lasts = extents.widen_all(starts[order], ends[order])
    changes = np.flatnonzero((np.diff(firsts) != 0) | (np.diff(lasts) != 0)) + 1
    in_order = [items[number] for number in order.tolist()]
    for start, stop in pairwise([0, *changes.tolist(), len(items)] if items else []):
        yield int(firsts[start]), int(lasts[start]), in_order[start:stop]


def _scratch_bytes(item: Part | Frame) -> int:
    """Returns the memory to decompress an item: a codec allocates the raw bytes before they go to the target."""
    if not isinstance(item, Frame):
        return 0
    return item.raw_bytes if item.is_direct else 2 * item.raw_bytes


def fetch_of(file: int, start: int, end: int, items: Sequence[Part | Frame]) -> Fetch:
    """Returns the fetch of a range of a file that these items need, through scratch memory."""
    frames: tuple[Frame, ...] = ()
    if Frame in set(map(type, items)):
        frames = tuple(item for item in items if isinstance(item, Frame))
        items = [item for item in items if not isinstance(item, Frame)]
    parts = cast("tuple[Part, ...]", tuple(items))
    return Fetch(file, start, end - start, parts, is_direct=False, frames=frames)
