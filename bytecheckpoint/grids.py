"""Regular grids: a tensor cut into parts of one shape, of which those at the upper edges are what is left. So FSDP,
tensor parallelism and meshes of them cut tensors, and a few integers say where ten thousand chunks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from bytecheckpoint.region import Region


def grid_counts(shape: Sequence[int], part: Sequence[int]) -> list[int]:
    """How many parts of these lengths there are along each dimension."""
    return [-(-length // of_part) for length, of_part in zip(shape, part, strict=True)]


def grid_regions(shape: Sequence[int], part: Sequence[int]) -> list[Region]:
    """All parts, in row-major order."""
    offsets = product(*(range(0, length, of_part) for length, of_part in zip(shape, part, strict=True)))
    return [Region(at, tuple(map(min, part, map(int.__sub__, shape, at)))) for at in offsets]


def parts_meeting(shape: Sequence[int], part: Sequence[int], region: Region) -> list[tuple[int, Region]]:
    """The parts that share elements with the region: where each stands in `grid_regions`, and what it is."""
    if not region.numel:
        return []
    counts = grid_counts(shape, part)
    strides = [prod(counts[dim + 1 :]) for dim in range(len(counts))]
    spans = [
        range(offset // of_part, -(-end // of_part))
        for offset, end, of_part in zip(region.offsets, region.ends, part, strict=True)
    ]
    found = []
    for indices in product(*spans):
        offsets = tuple(map(int.__mul__, indices, part))
        lengths = tuple(map(min, part, map(int.__sub__, shape, offsets)))
        found.append((sum(map(int.__mul__, indices, strides)), Region(offsets, lengths)))
    return found


def part_of_grid(shape: Sequence[int], coordinates: Sequence[int], num_regions: int) -> tuple[int, ...] | None:
    """The lengths of a part where these regions are such a grid, in row-major order and without empty ones; else None.

    `coordinates` are those of one region after the other: its offsets, then its lengths.
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
