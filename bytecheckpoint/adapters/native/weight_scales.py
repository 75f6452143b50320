"""Scales of quantized weights. Files in FP8 hold small numbers, and beside them a tensor of scales: one for each block,
for each row, or one alone. The weight is the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.shards import LocalShard, torch_dtype
from bytecheckpoint.dtypes import QUANTIZED_DTYPES, SCALE_SUFFIXES
from bytecheckpoint.region import whole

_FULL_PRECISION = {"bfloat16", "float16", "float32", "float64"}
"""Dtypes that have all values of the quantized ones, so that a product is rounded once."""


class ScaledShard(NamedTuple):
    """A shard that a load fills with quantized numbers, to be multiplied afterwards."""

    shard: LocalShard
    scales: torch.Tensor
    """The scales of the whole global tensor, on the host, filled by the same load."""
    block_shape: tuple[int, ...]
    """Lengths of the block of the global tensor that one scale is for."""

    def multiply(self) -> None:
        """Multiplies each element by the scale of its block, in float32 or better, and rounds the product once."""
        target, region = self.shard.tensor, self.shard.region
        if not target.numel():
            return
        grid = [-(-length // block) for length, block in zip(self.shard.global_shape, self.block_shape, strict=True)]
        dtype = torch.promote_types(target.dtype, torch.float32)
        scales = self.scales.reshape(grid).to(target.device, dtype)
        row_dim = max(target.dim() - 2, 0)
        for dim, (first, length, block) in enumerate(zip(*region, self.block_shape, strict=True)):
            if scales.shape[dim] > 1 and (dim != row_dim or block == 1):
                numbers = torch.arange(first, first + length, device=target.device) // block
                scales = scales.index_select(dim, numbers)
        if not target.dim() or scales.shape[row_dim] == 1 or self.block_shape[row_dim] == 1:
            target.mul_(scales)
            return
        # One row of blocks at a time: scales for all elements would take twice the memory of the shard.
        first, length, block = region.offsets[row_dim], region.lengths[row_dim], self.block_shape[row_dim]
        for number in range(first // block, (first + length - 1) // block + 1):
            begin, end = max(number * block, first) - first, min((number + 1) * block, first + length) - first
            target.narrow(row_dim, begin, end - begin).mul_(scales.narrow(row_dim, number, 1))


def scales_of(weight: StoredTensor, wanted_dtype: str, saved: Mapping[str, StoredTensor]) -> str | None:
    """Returns the name in `saved` of the scales of a stored weight that a load converts to `wanted_dtype`; None if it
    has no scales, or stays quantized.
    """
    if weight.dtype not in QUANTIZED_DTYPES or wanted_dtype not in _FULL_PRECISION:
        return None
    return next((name for suffix in SCALE_SUFFIXES if (name := weight.fqn + suffix) in saved), None)


def block_shape(shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the lengths of the block of a weight that each of its scales is for; None if they cannot be told: along a
    dimension, blocks have the length of a power of two, and the last may be shorter.
    """
    if math.prod(scales_shape) == 1:
        return tuple(max(length, 1) for length in shape)
    if len(scales_shape) == 1:  # a scale for each row
        scales_shape += (1,) * (len(shape) - 1)
    if len(scales_shape) != len(shape):
        return None
    blocks = tuple(map(_block_length, shape, scales_shape))
    return blocks if all(blocks) else None


def _block_length(length: int, num_scales: int) -> int:
    """Returns how many elements along one dimension share a scale; 0 if it cannot be told."""
    if num_scales == 1:
        return max(length, 1)
    if num_scales == length:
        return 1
    powers = (1 << exponent for exponent in range(1, length.bit_length()))
    return next((block for block in powers if -(-length // block) == num_scales), 0)


def place_for_scales(fqn: str, scales: StoredTensor) -> LocalShard:
    """Returns memory on the host for all scales of a weight, as a shard of this state FQN."""
    shape = scales.shape
    memory = torch.empty(shape, dtype=torch_dtype(scales.dtype), device="cpu")
    return LocalShard(fqn, scales.dtype, shape, whole(shape), memory, memory.data_ptr(), None, memory.nbytes)
