"""Tensors that are padded along one axis by an amount that depends on the layout, as vocabularies are: what a
checkpoint and the state both have of them is loaded, what only the state has is zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.region import Region


def as_stored(shard: LocalShard, axis: int | None, stored_shape: Sequence[int] | None) -> LocalShard:
    """What of a shard a stored tensor of this shape has, as a shard of that tensor.

    The shard itself where nothing is padded, or where the two differ along another axis, which is for the load to
    refuse.
    """
    if axis is None or stored_shape is None or not _differ_along(axis, shard.global_shape, stored_shape):
        return shard
    length = _common_length(shard, axis, stored_shape)
    offsets, lengths = list(shard.region.offsets), list(shard.region.lengths)
    lengths[axis] = length
    if not length:
        offsets, lengths = [0] * len(offsets), [0] * len(lengths)
    memory = shard.tensor.narrow(axis, 0, length)
    if not length:
        memory = memory.new_empty(lengths)
    return LocalShard(shard.fqn, shard.dtype, tuple(stored_shape), Region(tuple(offsets), tuple(lengths)), memory)


def beyond(shard: LocalShard, axis: int | None, stored_shape: Sequence[int] | None) -> list[LocalShard]:
    """What of a shard a stored tensor of this shape does not have: one shard, or none."""
    if axis is None or stored_shape is None or not _differ_along(axis, shard.global_shape, stored_shape):
        return []
    length = _common_length(shard, axis, stored_shape)
    offsets, lengths = list(shard.region.offsets), list(shard.region.lengths)
    offsets[axis] += length
    lengths[axis] -= length
    if not lengths[axis]:
        return []
    memory = shard.tensor.narrow(axis, length, lengths[axis])
    return [shard._replace(region=Region(tuple(offsets), tuple(lengths)), tensor=memory, address=0)]


def same_but_for_padding(axis: int | None, shape: Sequence[int], other: Sequence[int]) -> bool:
    """True if the shapes are equal, or differ along this axis only."""
    return tuple(shape) == tuple(other) or (axis is not None and _differ_along(axis, shape, other))


def _differ_along(axis: int, shape: Sequence[int], other: Sequence[int]) -> bool:
    """True if the shapes differ, and along this axis only."""
    if len(shape) != len(other):
        return False
    return [index for index, lengths in enumerate(zip(shape, other, strict=True)) if len(set(lengths)) > 1] == [axis]


def _common_length(shard: LocalShard, axis: int, stored_shape: Sequence[int]) -> int:
    return min(max(stored_shape[axis] - shard.region.offsets[axis], 0), shard.region.lengths[axis])
