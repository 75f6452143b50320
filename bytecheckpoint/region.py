"""Geometry of regions: boxes of elements in the global coordinates of a tensor. Everything that resharding needs is
here and nothing else: no tensors, no files, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from math import prod
from typing import NamedTuple

import numpy as np

_FEW_REGIONS = 16
"""Regions up to which comparing each pair is faster than making arrays."""


class Region(NamedTuple):
    """A box of elements: in each dimension the index of its first element, and its length."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + length for offset, length in zip(self.offsets, self.lengths, strict=True))


def describe(region: Region) -> str:
    """Returns a region as text: `[0:4, 8:16]`."""
    return "[" + ", ".join(f"{offset}:{end}" for offset, end in zip(region.offsets, region.ends, strict=True)) + "]"


class TilingFault(NamedTuple):
    """A fault of regions that do not tile a shape: `hole` is a part that no region covers, `overlap` a part that two
    cover. One of the two is None.
    """

    hole: Region | None
    overlap: Region | None


def whole(shape: Sequence[int]) -> Region:
    """Returns the region that is all of a tensor of this shape."""
    return Region((0,) * len(shape), tuple(shape))


def intersect(a: Region, b: Region) -> Region | None:
    """Returns the part that both cover; None if they share no element. Two 0-d regions share their one element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(min(a_end, b_end) - offset for a_end, b_end, offset in zip(a.ends, b.ends, offsets, strict=True))
    return Region(offsets, lengths) if all(length > 0 for length in lengths) else None


def relative(region: Region, to: Region) -> Region:
    """Returns the region in the coordinates of `to`, which contains it."""
    return Region(tuple(map(int.__sub__, region.offsets, to.offsets)), region.lengths)


def shifted(region: Region, offsets: Sequence[int]) -> Region:
    """Returns the region moved by these offsets: the inverse of `relative`."""
    return Region(tuple(map(int.__add__, region.offsets, offsets)), region.lengths)


def split_flat_range(shape: Sequence[int], start: int, length: int) -> list[Region]:
    """Returns regions that, one after the other, are elements `start` to `start + length` of the row-major flat tensor.

    At each position the largest block that is aligned to a suffix of the shape is taken, so there are at most
    2 * len(shape) - 1 regions, and one of a 0-d tensor. A length of 0 gives no region; a range that leaves the tensor
    raises ValueError.
    """
    if start < 0 or length < 0 or start + length > prod(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no elements {start} to {start + length}")
    suffix_numels = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    regions: list[Region] = []
    position, end = start, start + length
    while position < end:
        if not shape:
            return [Region((), ())]
        index = _unravel(position, suffix_numels)
        dim = _outermost_dim(position, end, suffix_numels)
        count = min((end - position) // suffix_numels[dim], shape[dim] - index[dim])
        lengths = (1,) * dim + (count,) + tuple(shape[dim + 1 :])
        regions.append(Region(index, lengths))
        position += count * suffix_numels[dim]
    return regions


def _unravel(position: int, suffix_numels: Sequence[int]) -> tuple[int, ...]:
    index = []
    for numel in suffix_numels:
        coordinate, position = divmod(position, numel)
        index.append(coordinate)
    return tuple(index)


def _outermost_dim(position: int, end: int, suffix_numels: Sequence[int]) -> int:
    for dim, numel in enumerate(suffix_numels):
        if position % numel == 0 and end - position >= numel:
            return dim
    raise ValueError("the last dimension always fits")  # its suffix has one element


def split_rows(region: Region, max_numel: int) -> list[Region]:
    """Cuts the region along its outer dimensions into parts of at most `max_numel` elements, in row-major order.

    A part is a run of rows of the outermost dimension that can be cut; only where one row is too large is the next
    dimension cut as well. `max_numel` is at least 1.
    """
    if region.numel <= max_numel:
        return [region]
    dim = next(dim for dim, length in enumerate(region.lengths) if length > 1)
    row_numel = region.numel // region.lengths[dim]
    num_rows = max(1, max_numel // row_numel)
    parts = []
    for first in range(0, region.lengths[dim], num_rows):
        part = rows(region, dim, first, min(num_rows, region.lengths[dim] - first))
        parts += split_rows(part, max_numel) if part.numel > max_numel else [part]
    return parts


def rows(region: Region, dim: int, first: int, count: int) -> Region:
    """Returns rows `first` to `first + count` of the region, counted from its own start along `dim`."""
    offsets, lengths = list(region.offsets), list(region.lengths)
    offsets[dim] += first
    lengths[dim] = count
    return Region(tuple(offsets), tuple(lengths))


def is_contiguous_in(inner: Region, outer: Region) -> bool:
    """Returns True if the inner region's elements lie without gaps in the row-major memory of the outer one.

    `inner` lies inside `outer` and is not empty.
    """
    partial = [inner.lengths[dim] != outer.lengths[dim] for dim in range(len(outer.lengths))]
    last_partial = max((dim for dim, is_partial in enumerate(partial) if is_partial), default=-1)
    return all(length == 1 for length in inner.lengths[: max(last_partial, 0)])


def flat_span(inner: Region, outer: Region) -> tuple[int, int]:
    """Returns the first and one past the last element of `inner` in the row-major memory of `outer`, gaps included.

    `inner` lies inside `outer` and is not empty.
    """
    start, end, stride = 0, 1, 1
    for dim in reversed(range(len(outer.lengths))):
        first = inner.offsets[dim] - outer.offsets[dim]
        start += first * stride
        end += (first + inner.lengths[dim] - 1) * stride
        stride *= outer.lengths[dim]
    return start, end


def split_at_gaps(inner: Region, outer: Region, max_gap: int) -> list[Region]:
    """Cuts the inner region into parts between which more than `max_gap` elements of the outer one's row-major memory
    lie, and inside which each gap has at most `max_gap` elements.

    `inner` lies inside `outer` and is not empty. The parts are in row-major order.
    """
    num_cut = 0
    span = stride = 1
    for dim in reversed(range(len(outer.lengths))):
        # From the inner to the outer dimensions gaps only grow, so the first dimensions are cut.
        if inner.lengths[dim] > 1 and stride - span > max_gap:
            num_cut = dim + 1
            break
        span += (inner.lengths[dim] - 1) * stride
        stride *= outer.lengths[dim]
    if not num_cut:
        return [inner]
    starts = product(*(range(start, end) for start, end in zip(inner.offsets[:num_cut], inner.ends, strict=False)))
    lengths = (1,) * num_cut + inner.lengths[num_cut:]
    return [Region(start + inner.offsets[num_cut:], lengths) for start in starts]


def find_tiling_fault(shape: Sequence[int], regions: Sequence[Region]) -> TilingFault | None:
    """Returns None if the regions cover every element of the shape exactly once, else a hole or an overlap.

    Empty regions do not matter. A region that reaches out of the shape is returned as the overlap.
    """
    target = whole(shape)
    filled = [region for region in regions if region.numel]
    outside = next((region for region in filled if not lies_inside(region, target)), None)
    overlap = outside or _find_overlap(filled)
    if overlap is not None:
        return TilingFault(None, overlap)
    if sum(region.numel for region in filled) == target.numel:
        return None  # no overlap, and the volumes add up: nothing is left to cover
    return TilingFault(find_hole(target, filled), None)


def lies_inside(region: Region, outer: Region) -> bool:
    """Returns True if no part of a region lies outside of another one with as many dimensions."""
    return all(map(int.__ge__, region.offsets, outer.offsets)) and all(map(int.__le__, region.ends, outer.ends))


def _find_overlap(regions: list[Region]) -> Region | None:
    """Returns a part that two of the regions share; None if none do. Cuts them into groups that cannot overlap, again
    and again: a grid of any kind falls apart into single regions. Groups that no straight cut separates, or only one
    region at a time, are swept.
    """
    groups = [regions]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        parts = _separate(group)
        if parts and (len(group) <= _FEW_REGIONS or max(map(len, parts)) <= len(group) * 3 // 4):
            groups += parts
            continue
        overlap = _compare(group) if len(group) <= _FEW_REGIONS else _sweep(group)
        if overlap is not None:
            return overlap
    return None


def _separate(regions: list[Region]) -> list[list[Region]]:
    """Returns the regions in two groups or more, with a cut across one dimension between each; [] if there is no
    cut.
    """
    for dim in range(len(regions[0].offsets)):
        parts: list[list[Region]] = []
        reached = -1
        for start, end, region in sorted((item.offsets[dim], item.ends[dim], item) for item in regions):
            if start >= reached:
                parts.append([])
            parts[-1].append(region)
            reached = max(reached, end)
        if len(parts) > 1:
            return parts
    return []


def _compare(regions: Iterable[Region]) -> Region | None:
    """Returns a part that two of the regions share; None if none do. Compares all pairs."""
    for first, second in combinations(regions, 2):
        overlap = intersect(first, second)
        if overlap is not None:
            return overlap
    return None


def _sweep(regions: Sequence[Region]) -> Region | None:
    """Returns a part that two of the regions share; None if none do. Compares each with those that begin within it
    along one dimension: the dimension with the fewest such pairs.
    """
    starts = np.array([region.offsets for region in regions], np.int64).reshape(len(regions), -1)
    ends = starts + np.array([region.lengths for region in regions], np.int64).reshape(starts.shape)
    if not starts.shape[1]:
        return _compare(regions)
    orders = np.argsort(starts, axis=0, kind="stable").T
    all_stops = [np.searchsorted(starts[order, dim], ends[order, dim]) for dim, order in enumerate(orders)]
    dim = int(np.argmin([stops.sum() for stops in all_stops]))
    order = orders[dim]
    starts, ends = starts[order], ends[order]
    for index, stop in enumerate(all_stops[dim].tolist()):
        others = slice(index + 1, stop)
        meets = ((starts[others] < ends[index]) & (ends[others] > starts[index])).all(axis=1)
        if meets.any():
            other = index + 1 + int(np.argmax(meets))
            return intersect(regions[order[index]], regions[order[other]])
    return None


def find_hole(target: Region, regions: Iterable[Region]) -> Region | None:
    """Returns a part of `target` that none of the regions covers; None if they cover all of it."""
    uncovered = [target] if target.numel else []
    # In this order the uncovered parts stay few: what lies before a region was covered or never will be.
    for region in sorted(regions):
        uncovered = [part for hole in uncovered for part in subtract(hole, region)]
        if not uncovered:
            return None
    return uncovered[0] if uncovered else None


def subtract(region: Region, removed: Region) -> list[Region]:
    """Returns regions that together are `region` without `removed`; at most two a dimension."""
    common = intersect(region, removed)
    if common is None:
        return [region] if region.numel else []
    remaining: list[Region] = []
    offsets, lengths = list(region.offsets), list(region.lengths)
    for dim in range(len(offsets)):
        before = common.offsets[dim] - offsets[dim]
        after = offsets[dim] + lengths[dim] - (common.offsets[dim] + common.lengths[dim])
        for start, length in ((offsets[dim], before), (common.offsets[dim] + common.lengths[dim], after)):
            if length > 0:
                remaining.append(
                    Region((*offsets[:dim], start, *offsets[dim + 1 :]), (*lengths[:dim], length, *lengths[dim + 1 :]))
                )
        offsets[dim], lengths[dim] = common.offsets[dim], common.lengths[dim]
    return remaining


def grid_counts(shape: Sequence[int], part: Sequence[int]) -> list[int]:
    """Returns the number of parts along each dimension of a regular grid: a tensor cut into parts of the shape `part`,
    smaller at the upper edges, as FSDP, tensor parallelism and meshes of them cut tensors.
    """
    return [-(-length // of_part) for length, of_part in zip(shape, part, strict=True)]


def grid_regions(shape: Sequence[int], part: Sequence[int]) -> list[Region]:
    """Returns the regions of all parts of a regular grid (see `grid_counts`), in row-major order."""
    offsets = product(*(range(0, length, of_part) for length, of_part in zip(shape, part, strict=True)))
    return [Region(start, tuple(map(min, part, map(int.__sub__, shape, start)))) for start in offsets]


def parts_meeting(shape: Sequence[int], part: Sequence[int], region: Region) -> list[tuple[int, Region]]:
    """Returns the parts of a grid that share elements with `region`: of each, its index in `grid_regions`, and the
    whole part as a region.
    """
    if not region.numel:
        return []
    counts = grid_counts(shape, part)
    strides = [prod(counts[dim + 1 :]) for dim in range(len(counts))]
    found = []
    for indices in product(*_spans(part, region)):
        offsets = tuple(map(int.__mul__, indices, part))
        lengths = tuple(map(min, part, map(int.__sub__, shape, offsets)))
        found.append((sum(map(int.__mul__, indices, strides)), Region(offsets, lengths)))
    return found


def count_parts_meeting(part: Sequence[int], region: Region) -> int:
    """Returns the number of parts of a grid that share elements with the region, which is not empty."""
    return prod(map(len, _spans(part, region)))


def _spans(part: Sequence[int], region: Region) -> list[range]:
    """Returns for each dimension the range of indices of the parts that the region meets."""
    return [
        range(offset // of_part, -(-end // of_part))
        for offset, end, of_part in zip(region.offsets, region.ends, part, strict=True)
    ]


def part_of_grid(shape: Sequence[int], coordinates: Sequence[int], num_regions: int) -> tuple[int, ...] | None:
    """Returns the lengths of a part if these regions are a regular grid, in row-major order and none empty; else None.

    `coordinates` is one flat list: for each of the `num_regions` regions its offsets, then its lengths.
    """
    num_dims = len(shape)
    part = tuple(coordinates[num_dims : 2 * num_dims])
    if not num_regions or len(coordinates) != 2 * num_dims * num_regions or not all(shape) or not all(part):
        return None
    if num_regions == 1:
        return part if part == tuple(shape) and not any(coordinates[:num_dims]) else None
    if not num_dims or prod(grid_counts(shape, part)) != num_regions:
        return None
    expected = [number for region in grid_regions(shape, part) for number in (*region.offsets, *region.lengths)]
    return part if list(coordinates) == expected else None
