"""Inner tensors of a subclass inside a DTensor: each is cut as the outer one is, in its own lengths."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.adapters.tensors import unsupported

_TABLES = frozenset({"qmap"})
"""Inner tensors that hold one table for all elements, as torchao's low-bit optimizer states do: no part of anything."""


def spread_like(
    outer: DTensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, is_table: bool = False
) -> DTensor | None:
    """A DTensor of this global shape whose parts are to those of `outer` as its lengths are to those of `outer`.

    None where the lengths of the parts are not whole numbers, and where blocks do not end where parts end.
    """
    sharded = set() if is_table else _sharded_dims(outer)
    if sharded is None or not _can_follow(len(shape), outer, sharded):
        return None
    lengths = list(shape)
    if outer.device_mesh.get_coordinate() is None:
        lengths, sharded = [0], set()
    for dim in sharded:
        lengths[dim], rest = divmod(shape[dim] * outer._local_tensor.shape[dim], max(outer.shape[dim], 1))
        if rest or not _ends_with_blocks(outer, dim, shape[dim]):
            return None
    local = torch.empty(lengths, dtype=dtype, device=device)
    return _as_dtensor(local, torch.Size(shape), outer, is_table=is_table)


def names_table(fqn: str) -> bool:
    """Whether the inner tensor of this FQN is the same for all parts of the tensor around it."""
    return fqn.rpartition(".")[2] in _TABLES


def spread_as(fqn: str, inner: torch.Tensor, outer: DTensor) -> DTensor | None:
    """The inner tensor of one part of a DTensor as a part of its own global tensor; None where this rank, which holds
    nothing, cannot tell.
    """
    if names_table(fqn):
        return _as_dtensor(inner, inner.shape, outer, is_table=True)
    sharded, local = _sharded_dims(outer), outer._local_tensor
    shape: list[int] | None = None
    if sharded is not None and _can_follow(inner.dim(), outer, sharded):
        if any(local.shape[dim] == 0 for dim in sharded):
            return None
        ratios = {dim: divmod(inner.shape[dim] * outer.shape[dim], local.shape[dim]) for dim in sharded}
        are_whole = not any(rest for _, rest in ratios.values())
        if are_whole and all(_ends_with_blocks(outer, dim, length) for dim, (length, _) in ratios.items()):
            shape = [ratios[dim][0] if dim in sharded else length for dim, length in enumerate(inner.shape)]
    if shape is None:
        what = f"part of a DTensor, {list(inner.shape)} for {list(local.shape)} of {list(outer.shape)}"
        what += f" with placements {outer.placements}, so that which region it is cannot be said"
        raise unsupported(fqn, what, "shard along dimensions that it has, in multiples of its blocks")
    return _as_dtensor(inner, torch.Size(shape), outer, is_table=False)


def _sharded_dims(outer: DTensor) -> set[int] | None:
    """The dimensions along which it is cut; None where that is not how it is cut."""
    cuts = [placement for placement in outer.placements if not isinstance(placement, Replicate)]
    dims = {placement.dim for placement in cuts if isinstance(placement, Shard | _StridedShard)}
    return dims if all(isinstance(placement, Shard | _StridedShard) for placement in cuts) else None


def _can_follow(num_dims: int, outer: DTensor, sharded: set[int]) -> bool:
    """Whether a tensor of so many dimensions has those along which the outer one is cut."""
    return not sharded or num_dims == outer.dim() or (num_dims > 0 and sharded == {0})


def _ends_with_blocks(outer: DTensor, dim: int, length: int) -> bool:
    """Whether parts of the outer tensor end where blocks do, of which an inner tensor of this length has one element
    each, or several: 6 rows with 4 scales are blocks of two rows and a short one, twice.
    """
    if outer._local_tensor.shape[dim] == outer.shape[dim]:  # not cut
        return True
    shorter, longer = sorted((outer.shape[dim], length))
    return not shorter or longer % shorter == 0


def _as_dtensor(local: torch.Tensor, shape: torch.Size, outer: DTensor, *, is_table: bool) -> DTensor:
    placements = tuple(Replicate() for _ in outer.placements) if is_table else outer.placements
    meta = TensorMeta(shape, dense_stride(shape, range(len(shape), 0, -1)), local.dtype)
    spec = DTensorSpec(outer.device_mesh, placements, tensor_meta=meta)
    # Not from_local, which may copy to another device.
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The stride of a tensor without gaps whose dimensions lie in memory as those of this stride do."""
    stride = [0] * len(shape)
    dims = sorted(range(len(shape)), key=lambda dim: (-order[dim], dim))
    for at, dim in enumerate(dims):
        stride[dim] = prod(max(shape[other], 1) for other in dims[at + 1 :])
    return tuple(stride)
