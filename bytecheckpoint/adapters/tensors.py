"""Tensors turned into shards: which regions of the global tensor this rank holds, and where in memory they are.

Takes plain tensors (and parameters, and subclasses that only add Python attributes), DTensor with Shard and Replicate
placements on any mesh, and ShardedTensor. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what fully_shard makes of tensor parallel

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointSaveError
from bytecheckpoint.region import Region, whole


class LocalShard(NamedTuple):
    """A region that this rank holds, and its memory: the source of a save, the destination of a load."""

    fqn: str
    dtype: str
    """torch's name of it without `torch.`."""
    global_shape: tuple[int, ...]
    region: Region
    """In global coordinates, in elements."""
    tensor: torch.Tensor
    """A view of live memory with the region's lengths as its shape; on the meta device where a load has yet to create
    that memory."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def local_shards(fqn: str, tensor: torch.Tensor) -> list[LocalShard]:
    """The shards of this rank: one for most tensors, several where its rows are strided, none off the mesh.

    An empty share of an uneven split is one shard of no elements, so that every rank knows the FQN.
    Raises CheckpointSaveError (unsupported_value) for what has no dense memory of its own.
    """
    if isinstance(tensor, DTensor):
        return _of_dtensor(fqn, tensor)
    if isinstance(tensor, ShardedTensor):
        return _of_sharded_tensor(fqn, tensor)
    check_dense(fqn, tensor)
    shape = tuple(tensor.shape)
    return [LocalShard(fqn, dtype_name(tensor.dtype), shape, whole(shape), tensor.detach())]


def check_dense(fqn: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise unsupported(fqn, f"a {kind} tensor", "convert it to a dense tensor, or save its components")
    if tensor.is_quantized or dtype_name(tensor.dtype) not in DTYPE_ITEMSIZES:
        raise unsupported(fqn, f"a tensor of dtype {tensor.dtype}", "save its integer values and scales")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(
        tensor, torch.nn.Parameter
    ):
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise unsupported(fqn, f"a tensor subclass, {name}", "save the plain tensors that it is made of")


def check_has_memory(fqn: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        advice = "give it values first: load a checkpoint into it, or call to_empty() and initialise it"
        raise unsupported(fqn, "a tensor on the meta device, which has no values", advice)


def unsupported(fqn: str, what: str, advice: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"{fqn or repr(fqn)} is {what}, which is not supported; nothing was written or changed. Do this: {advice}",
        kind="unsupported_value",
    )


def _of_dtensor(fqn: str, tensor: DTensor) -> list[LocalShard]:
    local = tensor._local_tensor.detach()  # to_local() would be a step of autograd's
    check_dense(fqn, local)
    shape = tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    _check_placements(fqn, tensor)
    mesh_axes = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    intervals = _held_intervals(fqn, shape, tuple(local.shape), mesh_axes)
    dtype = dtype_name(tensor.dtype)
    return [LocalShard(fqn, dtype, shape, region, view) for region, view in _boxes(intervals, local)]


def _check_placements(fqn: str, tensor: DTensor) -> None:
    for placement in tensor.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            kind = type(placement).__name__
            advice = "redistribute it to Shard and Replicate placements first"
            raise unsupported(fqn, f"a DTensor with a {kind} placement, {placement}", advice)


_Interval = tuple[int, int]
"""First index and number of indices, along one tensor dimension."""


_MeshAxis = tuple[Any, int, int]
"""A placement, the number of ranks along this axis, and which of them this rank is."""


def _held_intervals(
    fqn: str, shape: tuple[int, ...], local_shape: tuple[int, ...], mesh_axes: Sequence[_MeshAxis]
) -> list[list[_Interval]]:
    """The indices along each dimension that this rank holds, in the order in which its local tensor has them.

    Strided placements say two things where lengths do not divide evenly: distribute_tensor cuts along the mesh axes
    from left to right, fully_shard cuts what tensor parallelism has cut already. The local tensor tells which it was.
    Raises CheckpointMismatchError (conflict) where it fits neither, or both with different indices.
    """
    layouts = [[_left_to_right(dim, length, mesh_axes) for dim, length in enumerate(shape)]]
    if _may_be_fully_sharded(mesh_axes):
        layouts.append([_right_to_left(dim, length, mesh_axes) for dim, length in enumerate(shape)])
    fitting = [intervals for intervals in layouts if _lengths(intervals) == local_shape]
    if fitting and all(intervals == fitting[0] for intervals in fitting):
        return fitting[0]
    placements = [placement for placement, _, _ in mesh_axes]
    if fitting:
        raise CheckpointMismatchError(
            f"{fqn}: placements {placements} of a {list(shape)} tensor may be those of distribute_tensor or those of "
            f"fully_shard over tensor parallelism, and it cannot be told which of the two it is: they give this rank "
            f"indices {fitting[0]} or {fitting[1]}, as (first, number) along each dimension. Nothing was written or "
            "changed; pad the tensor so that its lengths divide evenly",
            kind="conflict",
        )
    raise CheckpointMismatchError(
        f"{fqn}: placements {placements} of a {list(shape)} tensor give this rank {list(_lengths(layouts[0]))}, but "
        f"its local tensor is {list(local_shape)}; build the DTensor from shards that follow torch.chunk",
        kind="conflict",
    )


def _lengths(intervals: Sequence[Sequence[_Interval]]) -> tuple[int, ...]:
    return tuple(sum(length for _, length in of_dim) for of_dim in intervals)


def _may_be_fully_sharded(mesh_axes: Sequence[_MeshAxis]) -> bool:
    """Whether fully_shard makes such placements: one strided axis, by as much as later axes have cut its dimension."""
    strided = [index for index, axis in enumerate(mesh_axes) if isinstance(axis[0], _StridedShard)]
    if len(strided) != 1:
        return False
    placement = mesh_axes[strided[0]][0]
    later = [num_parts for other, num_parts, _ in mesh_axes[strided[0] + 1 :] if _shards(other, placement.dim)]
    return int(placement.split_factor) == prod(later)


def _shards(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _right_to_left(dim: int, length: int, mesh_axes: Sequence[_MeshAxis]) -> list[_Interval]:
    """As fully_shard lays out what is sharded already: its own axis, the strided one, cuts last."""
    held: list[_Interval] = [(0, length)]
    for placement, num_parts, coordinate in sorted(mesh_axes, key=lambda axis: isinstance(axis[0], _StridedShard)):
        if _shards(placement, dim):
            held = _nth(_chunk(held, num_parts), coordinate)
    return held


def _left_to_right(dim: int, length: int, mesh_axes: Sequence[_MeshAxis]) -> list[_Interval]:
    """As distribute_tensor does it: each axis cuts what those before it left."""
    held: list[_Interval] = [(0, length)]
    for placement, num_parts, coordinate in mesh_axes:
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            pieces = _chunk(held, int(placement.split_factor))
            held = _joined([part for piece in pieces for part in _nth(_chunk(piece, num_parts), coordinate)])
        elif isinstance(placement, Shard) and placement.dim == dim:
            held = _nth(_chunk(held, num_parts), coordinate)
    return held


def _chunk(intervals: Sequence[_Interval], num_parts: int) -> list[list[_Interval]]:
    """The listed indices cut like torch.chunk cuts a dimension: equal parts, rounded up, the last ones short."""
    total = sum(length for _, length in intervals)
    part_length = -(-total // num_parts)
    return [_take(intervals, min(part * part_length, total), part_length) for part in range(num_parts)]


def _take(intervals: Sequence[_Interval], first: int, count: int) -> list[_Interval]:
    taken = []
    for start, length in intervals:
        skipped = min(first, length)
        used = min(length - skipped, count)
        if used:
            taken.append((start + skipped, used))
        first -= skipped
        count -= used
    return taken


def _nth(parts: Sequence[list[_Interval]], index: int) -> list[_Interval]:
    return parts[index] if index < len(parts) else []


def _joined(intervals: Sequence[_Interval]) -> list[_Interval]:
    joined: list[_Interval] = []
    for start, length in intervals:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _boxes(intervals: Sequence[Sequence[_Interval]], local: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """Every combination of one interval a dimension: its global region and its part of the local tensor."""
    with_positions = []
    for of_dim in intervals:
        position, entries = 0, []
        for start, length in of_dim or [(0, 0)]:
            entries.append((start, length, position))
            position += length
        with_positions.append(entries)
    boxes = []
    for combination in product(*with_positions):
        view = local
        for dim, (_, length, position) in enumerate(combination):
            view = view.narrow(dim, position, length)
        region = Region(tuple(entry[0] for entry in combination), tuple(entry[1] for entry in combination))
        boxes.append((region, view))
    return boxes


def _of_sharded_tensor(fqn: str, tensor: ShardedTensor) -> list[LocalShard]:
    shards = []
    for shard in tensor.local_shards():
        check_dense(fqn, shard.tensor)
        region = Region(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        shards.append(
            LocalShard(fqn, dtype_name(shard.tensor.dtype), tuple(tensor.size()), region, shard.tensor.detach())
        )
    return shards
