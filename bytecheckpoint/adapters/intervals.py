"""Which indices along each dimension of a tensor torch's own placements give a rank: Shard and _StridedShard on meshes
of any shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what fully_shard makes of tensor parallel

from bytecheckpoint.region import Region

Interval = tuple[int, int]
"""First index and number of indices, along one tensor dimension."""


class MeshAxis(NamedTuple):
    """One axis of a mesh, as one rank sees it."""

    placement: Any
    num_parts: int
    """How many ranks there are along the axis."""
    coordinate: int
    """Which of them this rank is."""


def fitting_intervals(
    shape: tuple[int, ...], local_shape: tuple[int, ...], mesh_axes: Sequence[MeshAxis]
) -> list[list[list[Interval]]]:
    """The indices along each dimension that this rank holds, in the order in which its local tensor has them.

    Strided placements say two things where lengths do not divide evenly: distribute_tensor cuts along the mesh axes
    from left to right, fully_shard cuts what tensor parallelism has cut already. The local tensor tells which it was,
    unless it fits neither, or both.
    """
    layouts = [[left_to_right(dim, length, mesh_axes) for dim, length in enumerate(shape)]]
    if _may_be_fully_sharded(mesh_axes):
        layouts.append([right_to_left(dim, length, mesh_axes) for dim, length in enumerate(shape)])
    return [intervals for intervals in layouts if lengths_of(intervals) == local_shape]


def lengths_of(intervals: Sequence[Sequence[Interval]]) -> tuple[int, ...]:
    return tuple(sum(length for _, length in of_dim) for of_dim in intervals)


def _may_be_fully_sharded(mesh_axes: Sequence[MeshAxis]) -> bool:
    """Whether fully_shard makes such placements: one strided axis, by as much as later axes have cut its dimension."""
    strided = [index for index, axis in enumerate(mesh_axes) if isinstance(axis[0], _StridedShard)]
    if len(strided) != 1:
        return False
    placement = mesh_axes[strided[0]][0]
    later = [num_parts for other, num_parts, _ in mesh_axes[strided[0] + 1 :] if _shards(other, placement.dim)]
    return int(placement.split_factor) == prod(later)


def _shards(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def right_to_left(dim: int, length: int, mesh_axes: Sequence[MeshAxis]) -> list[Interval]:
    """As fully_shard lays out what is sharded already: its own axis, the strided one, cuts last."""
    held: list[Interval] = [(0, length)]
    for placement, num_parts, coordinate in sorted(mesh_axes, key=lambda axis: isinstance(axis[0], _StridedShard)):
        if _shards(placement, dim):
            held = _nth(_chunk(held, num_parts), coordinate)
    return held


def left_to_right(dim: int, length: int, mesh_axes: Sequence[MeshAxis]) -> list[Interval]:
    """As distribute_tensor does it: each axis cuts what those before it left."""
    held: list[Interval] = [(0, length)]
    for placement, num_parts, coordinate in mesh_axes:
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            pieces = _chunk(held, int(placement.split_factor))
            held = _joined([part for piece in pieces for part in _nth(_chunk(piece, num_parts), coordinate)])
        elif isinstance(placement, Shard) and placement.dim == dim:
            held = _nth(_chunk(held, num_parts), coordinate)
    return held


def _chunk(intervals: Sequence[Interval], num_parts: int) -> list[list[Interval]]:
    """The listed indices cut like torch.chunk cuts a dimension: equal parts, rounded up, the last ones short."""
    total = sum(length for _, length in intervals)
    part_length = -(-total // num_parts)
    return [_take(intervals, min(part * part_length, total), part_length) for part in range(num_parts)]


def _take(intervals: Sequence[Interval], first: int, count: int) -> list[Interval]:
    taken = []
    for start, length in intervals:
        skipped = min(first, length)
        used = min(length - skipped, count)
        if used:
            taken.append((start + skipped, used))
        first -= skipped
        count -= used
    return taken


def _nth(parts: Sequence[list[Interval]], index: int) -> list[Interval]:
    return parts[index] if index < len(parts) else []


def _joined(intervals: Sequence[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, length in intervals:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def boxes_of(intervals: Sequence[Sequence[Interval]]) -> list[tuple[Region, Region]]:
    """Every combination of one interval a dimension: its region in the global tensor, and in the local one."""
    with_positions = []
    for of_dim in intervals:
        position, entries = 0, []
        for start, length in of_dim or [(0, 0)]:
            entries.append((start, length, position))
            position += length
        with_positions.append(entries)
    boxes = []
    for combination in product(*with_positions):
        starts, lengths, positions = (tuple(entry[part] for entry in combination) for part in range(3))
        boxes.append((Region(starts, lengths), Region(positions, lengths)))
    return boxes
