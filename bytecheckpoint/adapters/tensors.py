"""Tensors turned into shards: which regions of the global tensor this rank holds, and where in memory they are.

Takes plain tensors (and parameters, and subclasses that only add Python attributes), DTensor with Shard and Replicate
placements on any mesh, and ShardedTensor. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

_STRIDED = torch.strided

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types whose tensors are nothing but their elements: told by one look, because a state holds many of them."""

_DTYPE_NAMES: Mapping[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPE_ITEMSIZES if hasattr(torch, name)
}


class LocalShard(NamedTuple):
    """A region that this rank holds, and its memory: the source of a save, the destination of a load."""

    fqn: str
    dtype: str
    """torch's name of it without `torch.`."""
    global_shape: tuple[int, ...]
    region: Region
    """In global coordinates, in elements."""
    tensor: torch.Tensor
    """Live memory with the region's lengths as its shape: a view that autograd does not see, or the state's own tensor
    where autograd has nothing to do with it. On the meta device where a load has yet to create that memory."""


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class LocalShards:
    """The shards of this rank, collected in one walk over a state.

    Equal shapes share their regions, and how a DTensor lies is found once for all that lie alike. None of that is
    kept beyond the walk, so nothing can be out of date.
    """

    def __init__(self) -> None:
        self.found: list[LocalShard] = []
        self._wholes: dict[torch.Size, Region] = {}
        self._layouts: dict[object, _Layout] = {}

    def add(self, fqn: str, tensor: torch.Tensor) -> None:
        """Adds the shards of a tensor: mostly one, several where its rows are strided, none off the mesh.

        An empty share of an uneven split is one shard of no elements, so that every rank knows the FQN.
        Raises CheckpointSaveError (unsupported_value) for what has no dense memory of its own, and
        CheckpointMismatchError (conflict) for a DTensor whose local tensor does not fit its placements.
        """
        if type(tensor) not in PLAIN_TENSORS:
            self._add_other(fqn, tensor)
            return
        # Written out, down to the constructor, because a state may hold 100,000 small tensors: calls cost half of it.
        dtype = _DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.layout is not _STRIDED or tensor.is_nested:
            dtype = dense_dtype(fqn, tensor)
        shape = tensor.shape
        region = self._wholes.get(shape)
        if region is None:
            region = self._wholes[shape] = whole(shape)
        if tensor.requires_grad or tensor._is_view():
            tensor = tensor.detach()
        self.found.append(tuple.__new__(LocalShard, (fqn, dtype, region.lengths, region, tensor)))

    def _add_other(self, fqn: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            self._add_dtensor(fqn, tensor)
        elif isinstance(tensor, ShardedTensor):
            self.found += _of_sharded_tensor(fqn, tensor)
        else:
            dtype, shape = dense_dtype(fqn, tensor), tuple(tensor.shape)
            self.found.append(LocalShard(fqn, dtype, shape, whole(shape), tensor.detach()))

    def _add_dtensor(self, fqn: str, tensor: DTensor) -> None:
        local = tensor._local_tensor  # to_local() would be a step of autograd's
        dense_dtype(fqn, local)
        # The spec has mesh and placements; many tensors share one, which is then found without comparing them.
        key = tensor._spec, tensor.dtype, tensor.shape, local.shape
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = _layout_of(fqn, tensor)
        memory = local.detach() if local.requires_grad or local._is_view() else local
        for region, part in layout.parts:
            view = memory if part is None else _narrowed(memory, part)
            self.found.append(LocalShard(fqn, layout.dtype, layout.shape, region, view))


def dense_dtype(fqn: str, tensor: torch.Tensor) -> str:
    """The name of the dtype of a tensor that has dense memory of its own.

    Raises CheckpointSaveError (unsupported_value) for any other.
    """
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not _STRIDED or tensor.is_nested or type(tensor) not in PLAIN_TENSORS:
        _refuse_if_not_dense(fqn, tensor)
    return name or dtype_name(tensor.dtype)


def _refuse_if_not_dense(fqn: str, tensor: torch.Tensor) -> None:
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


class _Layout(NamedTuple):
    """How the local tensor of a DTensor lies in the global one."""

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[tuple[Region, Region | None]]
    """Of each part: its region in global coordinates, and in those of the local tensor; None where it is all of it."""


def _layout_of(fqn: str, tensor: DTensor) -> _Layout:
    dtype, shape, local_shape = dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return _Layout(dtype, shape, [])
    _check_placements(fqn, tensor)
    mesh_axes = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    boxes = _boxes(_held_intervals(fqn, shape, local_shape, mesh_axes))
    return _Layout(dtype, shape, [(box, None if part == whole(local_shape) else part) for box, part in boxes])


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


def _boxes(intervals: Sequence[Sequence[_Interval]]) -> list[tuple[Region, Region]]:
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


def _narrowed(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, (position, length) in enumerate(zip(*region, strict=True)):
        tensor = tensor.narrow(dim, position, length)
    return tensor


def _of_sharded_tensor(fqn: str, tensor: ShardedTensor) -> list[LocalShard]:
    shards = []
    for shard in tensor.local_shards():
        dtype = dense_dtype(fqn, shard.tensor)
        region = Region(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        shards.append(LocalShard(fqn, dtype, tuple(tensor.size()), region, shard.tensor.detach()))
    return shards
