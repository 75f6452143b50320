"""Turns many wanted parts of a file into few, large fetches, each of whole checksummed extents."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, FlatParts, Frame, Part, split_flat

_OFFSET, _LENGTH = FlatPart._fields.index("byte_offset"), FlatPart._fields.index("byte_length")
MIN_DIRECT_BYTES = 1 << 20
"""Smaller parts go through scratch memory, where they share a fetch with their neighbours."""
MAX_DIRECT_BYTES = 16 << 20
"""Longest fetch into a target: short enough for several threads to share a large tensor."""


class ExtentIndex:
    """The bounds of the extents of a file. Without checksums every byte is an extent of its own."""

    def __init__(self, file: DataFile, *, verify: bool) -> None:
        self._bounds = [0, *accumulate(file.extent_lengths)] if verify and file.extent_lengths else None

    def widen(self, start: int, end: int) -> tuple[int, int]:
        """Returns the bounds, in bytes, of the smallest run of whole extents that contains the range; an empty range as
        it is.
        """
        if self._bounds is None or start == end:
            return start, end
        return self._bounds[bisect_right(self._bounds, start) - 1], self._bounds[bisect_left(self._bounds, end)]

    def widen_all(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bounds of many ranges, each widened as `widen` does."""
        if self._bounds is None:
            return starts, ends
        bounds, is_empty = np.array(self._bounds, np.int64), starts == ends
        firsts = bounds[np.searchsorted(bounds, starts, side="right") - 1]
        lasts = bounds[np.minimum(np.searchsorted(bounds, ends), len(bounds) - 1)]
        return np.where(is_empty, starts, firsts), np.where(is_empty, ends, lasts)

    def shrink(self, start: int, end: int) -> tuple[int, int]:
        """Returns the bounds, in bytes, of the largest run of whole extents inside the range; (start, start) if there
        is none.
        """
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

    Large flat parts are read straight into their targets, except for their ends, which lie in extents that neighbours
    share; the rest is merged where gaps are small. A fetch, with the memory in which it decompresses one frame after
    the other, takes more than `max_fetch_bytes` only where one extent, one small part with its extents or one frame
    does.
    """
    flat, others = split_flat(parts)
    rows = flat.rows
    is_large = rows[:, _LENGTH] >= MIN_DIRECT_BYTES
    fetches: list[Fetch] = []
    ends: list[FlatPart] = []
    for part in FlatParts(rows[is_large]):
        direct, part_ends = _split_direct(file, part, extents, min(MAX_DIRECT_BYTES, max_fetch_bytes))
        fetches += direct
        ends += part_ends
    small = np.concatenate([rows[~is_large], np.array(ends, np.int64).reshape(-1, rows.shape[1])])
    items = _Items(small, [*frames, *others])
    return fetches + _merge(file, items, extents, max_gap_bytes, max_fetch_bytes)


class _Items(NamedTuple):
    """Parts and frames of a file, by number: first the rows, then the others."""

    rows: np.ndarray
    others: list[Frame | BoxPart]

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first byte of each item, and the one behind its last."""
        starts = np.fromiter(map(attrgetter("byte_offset"), self.others), np.int64, len(self.others))
        lengths = np.fromiter(map(attrgetter("byte_length"), self.others), np.int64, len(self.others))
        starts, lengths = np.append(self.rows[:, _OFFSET], starts), np.append(self.rows[:, _LENGTH], lengths)
        return starts, starts + lengths

    def scratch_bytes(self, number: int) -> int:
        """Returns the bytes of memory that decompressing an item takes: 0 for a part; the raw bytes of a frame, which
        the codec allocates, and as many again if the frame is not direct and goes through scratch memory.
        """
        item = self.others[number - len(self.rows)] if number >= len(self.rows) else None
        if not isinstance(item, Frame):
            return 0
        return item.raw_bytes if item.is_direct else 2 * item.raw_bytes

    def fetch_of(self, file: int, start: int, end: int, numbers: np.ndarray) -> Fetch:
        """Returns the fetch of a range of the file that these items need."""
        is_flat = numbers < len(self.rows)
        if is_flat.all():
            return Fetch(file, start, end - start, FlatParts(self.rows[numbers]), is_direct=False)
        flat = iter(FlatParts(self.rows[numbers[is_flat]]))
        others = (self.others[number] for number in (numbers[~is_flat] - len(self.rows)).tolist())
        return fetch_of(file, start, end, [next(flat) if each else next(others) for each in is_flat.tolist()])


def _split_direct(
    file: int, part: FlatPart, extents: ExtentIndex, max_bytes: int
) -> tuple[list[Fetch], list[FlatPart]]:
    """Returns direct fetches of the whole extents inside a part, and the ends of the part that are outside of them."""
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
    """Returns the bytes of a part from `start` to `end`: offsets in the file, both within the part."""
    return FlatPart(part.want, start, end - start, part.target_byte_offset + start - part.byte_offset)


def _merge(file: int, items: _Items, extents: ExtentIndex, max_gap_bytes: int, max_fetch_bytes: int) -> list[Fetch]:
    order, runs = _runs(items, extents)
    fetches: list[Fetch] = []
    first = group_start = group_end = scratch_bytes = 0
    for start, end, position in runs:
        own_scratch_bytes = items.scratch_bytes(order[position])
        is_in_group = position > first and group_start <= start and end <= group_end and not own_scratch_bytes
        if is_in_group:
            continue
        scratch_bytes = max(scratch_bytes, own_scratch_bytes)
        total = max(end, group_end) - group_start + scratch_bytes
        if position > first and (start > group_end + max_gap_bytes or total > max_fetch_bytes):
            fetches.append(items.fetch_of(file, group_start, group_end, order[first:position]))
            first = position
        if position == first:
            group_start, group_end, scratch_bytes = start, end, own_scratch_bytes
        group_end = max(group_end, end)
    if len(order):
        fetches.append(items.fetch_of(file, group_start, group_end, order[first:]))
    return fetches


def _runs(items: _Items, extents: ExtentIndex) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Returns the numbers of the items in file order, and the runs of items that need the same extents: the byte
    offsets at which these extents start and end, and the index of the run's first item in that order. A frame, which is
    an extent, is its own run.
    """
    starts, ends = items.bounds()
    order = np.lexsort((ends, starts))
    extent_starts, extent_ends = extents.widen_all(starts[order], ends[order])
    changes = np.flatnonzero((np.diff(extent_starts) != 0) | (np.diff(extent_ends) != 0)) + 1
    places = np.append(0, changes) if len(order) else changes
    return order, list(zip(extent_starts[places].tolist(), extent_ends[places].tolist(), places.tolist(), strict=True))


def fetch_of(file: int, start: int, end: int, items: Sequence[Part | Frame]) -> Fetch:
    """Returns the fetch of a range of a file that these items need, through scratch memory."""
    frames: tuple[Frame, ...] = ()
    if Frame in set(map(type, items)):
        frames = tuple(item for item in items if isinstance(item, Frame))
        items = [item for item in items if not isinstance(item, Frame)]
    parts = cast("tuple[Part, ...]", tuple(items))
    return Fetch(file, start, end - start, parts, is_direct=False, frames=frames)
