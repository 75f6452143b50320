"""Tensors turned into shards: which regions of the global tensor this rank holds, and where in memory they are.

Takes plain tensors (and parameters, and subclasses that only add Python attributes), DTensor with Shard and Replicate
placements on any mesh, and ShardedTensor. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
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
    mesh_axes = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    intervals = [_dim_intervals(fqn, dim, length, mesh_axes) for dim, length in enumerate(shape)]
    held = tuple(sum(length for _, length in of_dim) for of_dim in intervals)
    if held != tuple(local.shape):
        raise CheckpointMismatchError(
            f"{fqn}: placements {tensor.placements} of a {list(shape)} tensor give this rank {list(held)}, but its "
            f"local tensor is {list(local.shape)}; build the DTensor from shards that follow torch.chunk",
            kind="conflict",
        )
    dtype = dtype_name(tensor.dtype)
    return [LocalShard(fqn, dtype, shape, region, view) for region, view in _boxes(intervals, local)]


_Interval = tuple[int, int]
"""First index and number of indices, along one tensor dimension."""


def _dim_intervals(fqn: str, dim: int, length: int, mesh_axes: Sequence[tuple[Any, int, int]]) -> list[_Interval]:
    """The indices along one dimension that this rank holds, in the order in which its local tensor has them."""
    held: list[_Interval] = [(0, length)]
    for placement, num_parts, coordinate in mesh_axes:
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            pieces = _chunk(held, int(placement.split_factor))
            held = _joined([part for piece in pieces for part in _nth(_chunk(piece, num_parts), coordinate)])
        elif isinstance(placement, Shard) and placement.dim == dim:
            held = _nth(_chunk(held, num_parts), coordinate)
        elif not isinstance(placement, Replicate | Shard | _StridedShard):
            raise unsupported(
                fqn, f"a DTensor with placement {placement}", "redistribute it to Shard and Replicate placements first"
            )
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
