"""Which part of a tensor a rank holds, as the placements of a DTensor say.

Takes Replicate, Shard and _StridedShard on meshes of any shape, veScale's RaggedShard and _StridedRaggedShard (told by
their `dims` and `local_units`), and any placement with a method `checkpoint_regions`: see docs/placements.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from operator import index
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what fully_shard makes of tensor parallel

from bytecheckpoint.adapters.intervals import MeshAxis, boxes_of, fitting_intervals, left_to_right, lengths_of
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.region import Region, split_flat_range, whole

_RegionsOf = Callable[[tuple[int, ...], int, int], Sequence[tuple[Sequence[int], Sequence[int]]]]
"""Of a shape, the number of ranks along the mesh axis, and which of them: offsets and lengths of each region that this
one holds, in the order in which they lie in its memory."""


_OF_TORCH = frozenset({Replicate, Shard, _StridedShard})


class Part(NamedTuple):
    """A region of a tensor, and where in the rank's local tensor it lies."""

    region: Region
    """In global coordinates."""
    place: Region | int | None
    """A region of the local tensor, or the first of consecutive elements of it; None where it is all of it."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of the local tensor that is this region."""
        if self.place is None:
            return local
        if isinstance(self.place, int):
            flat = local.view(-1)[self.place : self.place + self.region.numel]
            return flat.view(self.region.lengths)
        for dim, (position, length) in enumerate(zip(*self.place, strict=True)):
            local = local.narrow(dim, position, length)
        return local


def is_known(placement: Any) -> bool:
    """Whether a placement says where its parts lie."""
    return isinstance(placement, Replicate | Shard | _StridedShard) or _regions_of(placement) is not None


def held_parts(fqn: str, shape: tuple[int, ...], local: torch.Tensor, mesh_axes: Sequence[MeshAxis]) -> Sequence[Part]:
    """What this rank holds of a tensor of this shape: mostly one part. An empty share is one part of no elements.

    Raises CheckpointMismatchError (conflict) where the local tensor does not fit the placements.
    """
    if not _OF_TORCH.issuperset(type(axis.placement) for axis in mesh_axes):
        by_regions = [axis for axis in mesh_axes if _regions_of(axis.placement) is not None]
        if by_regions:
            others = [axis for axis in mesh_axes if _regions_of(axis.placement) is None]
            return _parts_by_regions(fqn, shape, local, by_regions, others)
    local_shape = tuple(local.shape)
    parts = _parts(shape, local_shape, mesh_axes)
    if parts is None:
        raise _misfit(fqn, shape, local_shape, mesh_axes)
    return parts


def _parts(
    shape: tuple[int, ...], local_shape: tuple[int, ...], mesh_axes: Sequence[MeshAxis]
) -> Sequence[Part] | None:
    """None where the placements fit the local tensor in no way, or in several."""
    kinds = tuple(type(axis.placement) for axis in mesh_axes)
    find = _find_parts_once if _OF_TORCH.issuperset(kinds) else _find_parts
    return find(shape, local_shape, tuple(mesh_axes), kinds)


def _find_parts(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    mesh_axes: tuple[MeshAxis, ...],
    _kinds: tuple[type, ...],
) -> Sequence[Part] | None:
    """`_kinds` tells placements apart that some versions of torch say are equal."""
    fitting = fitting_intervals(shape, local_shape, mesh_axes)
    if not fitting or any(intervals != fitting[0] for intervals in fitting):
        return None
    return tuple(Part(box, None if place == whole(local_shape) else place) for box, place in boxes_of(fitting[0]))


_find_parts_once = lru_cache(maxsize=1024)(_find_parts)
"""It takes as long as all else that is done for a small tensor, and follows from its arguments alone."""


def _regions_of(placement: Any) -> _RegionsOf | None:
    """How a placement that is none of torch's cuts a tensor."""
    if isinstance(placement, Replicate | Shard | _StridedShard):
        return None
    own: _RegionsOf | None = getattr(placement, "checkpoint_regions", None)
    if own is not None:
        return own
    if hasattr(placement, "dims") and hasattr(placement, "local_units"):
        return lambda shape, num_parts, index: _ragged(placement, shape, num_parts, index)
    return None


def _ragged(placement: Any, shape: tuple[int, ...], num_parts: int, index: int) -> list[Region]:
    """A run of the flat tensor for each rank, as long as its units say. Raises ValueError."""
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
) -> Sequence[Part]:
    """Of one placement that gives regions: it cuts what the others, which come first, have left."""
    axis = by_regions[0]
    intervals = [left_to_right(dim, length, others) or [(0, 0)] for dim, length in enumerate(shape)]
    if len(by_regions) > 1 or any(len(of_dim) > 1 for of_dim in intervals):
        raise _does_not_fit(fqn, axis.placement, "beside it only Shard and Replicate placements are supported")
    offsets, left = tuple(start for ((start, _),) in intervals), tuple(length for ((_, length),) in intervals)
    regions_of = _regions_of(axis.placement)
    try:
        found = [] if regions_of is None else regions_of(left, axis.num_parts, axis.coordinate)
        regions = [_shifted(Region(_ints(at), _ints(lengths)), offsets, left) for at, lengths in found]
    except (TypeError, ValueError) as error:
        raise _does_not_fit(fqn, axis.placement, f"for a part of shape {list(left)}, {error}") from error
    regions = regions or [Region(offsets, (0,) * len(shape))]
    numel = sum(region.numel for region in regions)
    if numel != local.numel() or not local.is_contiguous():
        why = f"it gives this rank {numel} elements of {list(left)}, but the local tensor has {local.numel()}"
        raise _does_not_fit(fqn, axis.placement, why if numel != local.numel() else "the local tensor has gaps")
    parts, first = [], 0
    for region in regions:
        parts.append(Part(region, first))
        first += region.numel
    return parts


def _shifted(region: Region, offsets: tuple[int, ...], within: tuple[int, ...]) -> Region:
    """The region in global coordinates. Raises ValueError where it leaves the shape that it is to lie within."""
    is_inside = len(region.offsets) == len(region.lengths) == len(within) and all(
        at >= 0 and length >= 0 and at + length <= end
        for at, length, end in zip(region.offsets, region.lengths, within, strict=True)
    )
    if not is_inside:
        raise ValueError(f"it gives a region at {list(region.offsets)} of {list(region.lengths)}, which lies outside")
    return Region(tuple(map(int.__add__, region.offsets, offsets)), region.lengths)


def _ints(numbers: Sequence[int]) -> tuple[int, ...]:
    """Also of numpy's, which index arithmetic makes. Raises TypeError for what is no integer."""
    return tuple(map(index, numbers))


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
