"""The parts of a tensor that a rank holds, as the placements of a DTensor say.

Takes Replicate, Shard and _StridedShard on meshes of any shape, veScale's RaggedShard and _StridedRaggedShard (told by
their `dims` and `local_units`), and any placement with a method `checkpoint_regions`: see docs/placements.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import index
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.torch_types import Replicate, Shard, StridedShard, placement_types
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.region import Region, lies_inside, split_flat_range, whole

_RegionsOf = Callable[[tuple[int, ...], int, int], Sequence[tuple[Sequence[int], Sequence[int]]]]
"""Takes a shape, the number of ranks along the mesh axis, and which of them this is; gives offsets and lengths of each
region that this rank holds, in the order in which they lie in its memory."""


IndexRun = tuple[int, int]
"""First index and number of indices, along one tensor dimension."""


class MeshAxis(NamedTuple):
    """One axis of a mesh, as one rank sees it."""

    placement: Any
    num_parts: int
    """Number of ranks along the axis."""
    coordinate: int
    """Index of this rank among them."""


class LocalPart(NamedTuple):
    """A region of a tensor, and where in the rank's local tensor it lies."""

    region: Region
    """Region in global coordinates."""
    place: Region | int | None
    """Region of the local tensor, or index of its first element if they are consecutive; None if it is all of it."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the view of the local tensor that holds this region, in its shape."""
        if self.place is None:
            return local
        if isinstance(self.place, int):
            flat = local.view(-1)[self.place : self.place + self.region.numel]
            return flat.view(self.region.lengths)
        for dim, (position, length) in enumerate(zip(*self.place, strict=True)):
            local = local.narrow(dim, position, length)
        return local


def is_known(placement: Any) -> bool:
    """Returns True if a placement says where its parts lie."""
    return isinstance(placement, Replicate | Shard | StridedShard) or _regions_of(placement) is not None


def held_parts(
    fqn: str, shape: tuple[int, ...], local: torch.Tensor, mesh_axes: Sequence[MeshAxis]
) -> Sequence[LocalPart]:
    """Returns the parts of a tensor of this shape that this rank holds: mostly one part, of no elements for an empty
    share.

    Raises CheckpointMismatchError (conflict) where the local tensor does not fit the placements.
    """
    if not placement_types().issuperset(type(axis.placement) for axis in mesh_axes):
        by_regions = [axis for axis in mesh_axes if _regions_of(axis.placement) is not None]
        if by_regions:
            others = [axis for axis in mesh_axes if _regions_of(axis.placement) is None]
            return _parts_by_regions(fqn, shape, local, by_regions, others)
    local_shape, kinds = tuple(local.shape), tuple(type(axis.placement) for axis in mesh_axes)
    find = _find_parts_once if placement_types().issuperset(kinds) else _find_parts
    parts = find(shape, local_shape, tuple(mesh_axes), kinds)
    if parts is None:
        raise _misfit(fqn, shape, local_shape, mesh_axes)
    return parts


def _find_parts(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    mesh_axes: tuple[MeshAxis, ...],
    _kinds: tuple[type, ...],
) -> Sequence[LocalPart] | None:
    """Returns the parts; None unless one layout fits. `_kinds` tells placements apart that torch may call equal."""
    fitting = fitting_intervals(shape, local_shape, mesh_axes)
    if not fitting or any(intervals != fitting[0] for intervals in fitting):
        return None
    return tuple(LocalPart(box, None if place == whole(local_shape) else place) for box, place in boxes_of(fitting[0]))


_find_parts_once = lru_cache(maxsize=1024)(_find_parts)
"""Cached, because `_find_parts` takes as long as all other work for a small tensor."""


def _regions_of(placement: Any) -> _RegionsOf | None:
    """Returns the function that gives the regions of a placement; None for torch's placements and for unknown ones."""
    if isinstance(placement, Replicate | Shard | StridedShard):
        return None
    own: _RegionsOf | None = getattr(placement, "checkpoint_regions", None)
    if own is not None:
        return own
    if hasattr(placement, "dims") and hasattr(placement, "local_units"):
        return lambda shape, num_parts, index: _ragged(placement, shape, num_parts, index)
    return None


def _ragged(placement: Any, shape: tuple[int, ...], num_parts: int, index: int) -> list[Region]:
    """Returns the regions of rank `index` of the mesh axis: a run of the flat tensor, as long as its units say. Raises
    ValueError if units, ranks and shape do not fit each other.
    """
    units, dims, numel = tuple(placement.local_units), tuple(placement.dims), prod(shape)
    if len(units) != num_parts:
        raise ValueError(f"it has {len(units)} local_units for {num_parts} ranks")
    if dims != tuple(range(len(dims))) or not sum(units):
        raise ValueError("its dims must be the first ones, and one of its local_units more than 0")
    if numel % sum(units):
        raise ValueError(f"{numel} elements cannot be divided into {sum(units)} local_units")
    unit = numel // sum(units)
    return split_flat_range(shape, sum(units[:index]) * unit, units[index] * unit)


def _parts_by_regions(
    fqn: str,
    shape: tuple[int, ...],
    local: torch.Tensor,
    by_regions: Sequence[MeshAxis],
    others: Sequence[MeshAxis],
) -> Sequence[LocalPart]:
    """Returns the parts of the one placement that gives regions. It cuts what the other placements leave. Raises
    CheckpointMismatchError (conflict) if the local tensor does not fit, or there is more than one such placement.
    """
    axis = by_regions[0]
    intervals = [left_to_right(dim, length, others) or [(0, 0)] for dim, length in enumerate(shape)]
    if len(by_regions) > 1 or any(len(of_dim) > 1 for of_dim in intervals):
        raise _does_not_fit(fqn, axis.placement, "beside it only Shard and Replicate placements are supported")
    offsets, remaining = tuple(start for ((start, _),) in intervals), tuple(length for ((_, length),) in intervals)
    regions_of = _regions_of(axis.placement)
    try:
        found = [] if regions_of is None else regions_of(remaining, axis.num_parts, axis.coordinate)
        # index() also makes Python's integers of numpy's, and refuses all else.
        boxes = [Region(tuple(map(index, at)), tuple(map(index, lengths))) for at, lengths in found]
        regions = [_shifted(box, offsets, remaining) for box in boxes]
    except (TypeError, ValueError) as error:
        raise _does_not_fit(fqn, axis.placement, f"for a part of shape {list(remaining)}, {error}") from error
    regions = regions or [Region(offsets, (0,) * len(shape))]
    numel = sum(region.numel for region in regions)
    if numel != local.numel() or not local.is_contiguous():
        why = f"it gives this rank {numel} elements of {list(remaining)}, but the local tensor has {local.numel()}"
        raise _does_not_fit(fqn, axis.placement, why if numel != local.numel() else "the local tensor has gaps")
    parts, first = [], 0
    for region in regions:
        parts.append(LocalPart(region, first))
        first += region.numel
    return parts


def _shifted(region: Region, offsets: tuple[int, ...], within: tuple[int, ...]) -> Region:
    """Returns the region in global coordinates. Raises ValueError if it leaves the shape that must contain it."""
    has_dims = len(region.offsets) == len(region.lengths) == len(within)
    if not has_dims or min(region.lengths, default=0) < 0 or not lies_inside(region, whole(within)):
        raise ValueError(f"it gives a region at {list(region.offsets)} of {list(region.lengths)}, which lies outside")
    return Region(tuple(map(int.__add__, region.offsets, offsets)), region.lengths)


def _does_not_fit(fqn: str, placement: Any, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{fqn}: the placement {placement} cannot be read: {why}. Nothing was written or changed", kind="conflict"
    )


def _misfit(
    fqn: str, shape: tuple[int, ...], local_shape: tuple[int, ...], mesh_axes: Sequence[MeshAxis]
) -> CheckpointMismatchError:
    fitting = fitting_intervals(shape, local_shape, mesh_axes)
    placements = [placement for placement, _, _ in mesh_axes]
    if fitting:
        return CheckpointMismatchError(
            f"{fqn}: placements {placements} of a {list(shape)} tensor may be those of distribute_tensor or those of "
            f"fully_shard over tensor parallelism, and it cannot be told which of the two it is: they give this rank "
            f"indices {fitting[0]} or {fitting[1]}, as (first, number) along each dimension. Nothing was written or "
            "changed; pad the tensor so that its lengths divide evenly",
            kind="conflict",
        )
    held = lengths_of([left_to_right(dim, length, mesh_axes) for dim, length in enumerate(shape)])
    return CheckpointMismatchError(
        f"{fqn}: placements {placements} of a {list(shape)} tensor give this rank {list(held)}, but "
        f"its local tensor is {list(local_shape)}; build the DTensor from shards that follow torch.chunk",
        kind="conflict",
    )


def fitting_intervals(
    shape: tuple[int, ...], local_shape: tuple[int, ...], mesh_axes: Sequence[MeshAxis]
) -> list[list[list[IndexRun]]]:
    """Returns each layout that fits the local tensor, none to two: the indices along each dimension that this rank
    holds, in the order in which its local tensor has them.

    Strided placements have two meanings where lengths do not divide evenly: distribute_tensor cuts along the mesh axes
    from left to right, fully_shard cuts what tensor parallelism has cut already. The local tensor tells which it was,
    unless it fits neither, or both.
    """
    layouts = [[left_to_right(dim, length, mesh_axes) for dim, length in enumerate(shape)]]
    if _may_be_fully_sharded(mesh_axes):
        layouts.append([right_to_left(dim, length, mesh_axes) for dim, length in enumerate(shape)])
    return [intervals for intervals in layouts if lengths_of(intervals) == local_shape]


def lengths_of(intervals: Sequence[Sequence[IndexRun]]) -> tuple[int, ...]:
    return tuple(sum(length for _, length in of_dim) for of_dim in intervals)


def _may_be_fully_sharded(mesh_axes: Sequence[MeshAxis]) -> bool:
    """Returns True if fully_shard may have made the placements: one is strided, and its split_factor is the number of
    parts into which later axes cut the same dimension.
    """
    strided = [index for index, axis in enumerate(mesh_axes) if isinstance(axis[0], StridedShard)]
    if len(strided) != 1:
        return False
    placement = mesh_axes[strided[0]][0]
    later = [num_parts for other, num_parts, _ in mesh_axes[strided[0] + 1 :] if _shards(other, placement.dim)]
    return int(placement.split_factor) == prod(later)


def _shards(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard | StridedShard) and placement.dim == dim


def right_to_left(dim: int, length: int, mesh_axes: Sequence[MeshAxis]) -> list[IndexRun]:
    """Returns the indices that this rank holds if fully_shard cut a sharded tensor: its own, strided axis cuts last."""
    held: list[IndexRun] = [(0, length)]
    for placement, num_parts, coordinate in sorted(mesh_axes, key=lambda axis: isinstance(axis[0], StridedShard)):
        if _shards(placement, dim):
            held = _nth_chunk(held, num_parts, coordinate)
    return held


def left_to_right(dim: int, length: int, mesh_axes: Sequence[MeshAxis]) -> list[IndexRun]:
    """Returns this rank's indices if distribute_tensor cut the dimension: each mesh axis cuts what others left."""
    held: list[IndexRun] = [(0, length)]
    for placement, num_parts, coordinate in mesh_axes:
        if isinstance(placement, StridedShard) and placement.dim == dim:
            factor = int(placement.split_factor)
            pieces = [_nth_chunk(held, factor, number) for number in range(factor)]
            held = _joined([part for piece in pieces for part in _nth_chunk(piece, num_parts, coordinate)])
        elif isinstance(placement, Shard) and placement.dim == dim:
            held = _nth_chunk(held, num_parts, coordinate)
    return held


def _nth_chunk(intervals: Sequence[IndexRun], num_parts: int, number: int) -> list[IndexRun]:
    """Returns one part of the listed indices, cut as torch.chunk cuts: equal parts, rounded up, the last ones short."""
    total = sum(length for _, length in intervals)
    part_length = -(-total // num_parts)
    first, count = min(number * part_length, total), part_length
    part = []
    for start, length in intervals:
        skipped = min(first, length)
        used = min(length - skipped, count)
        if used:
            part.append((start + skipped, used))
        first -= skipped
        count -= used
    return part


def _joined(intervals: Sequence[IndexRun]) -> list[IndexRun]:
    joined: list[IndexRun] = []
    for start, length in intervals:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def boxes_of(intervals: Sequence[Sequence[IndexRun]]) -> list[tuple[Region, Region]]:
    """Returns every combination of one interval a dimension: its region in the global tensor, and in the local one."""
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
