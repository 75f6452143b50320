"""Scales of quantized weights. Files in FP8 hold small numbers, and beside them a tensor of scales: one for each block,
for each row, or one alone. The weight is the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.shards import LocalShard, torch_dtype
from bytecheckpoint.dtypes import QUANTIZED_DTYPES, SCALE_SUFFIXES
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.region import whole

_FULL_PRECISION = {"bfloat16", "float16", "float32", "float64"}
"""Dtypes that have all values of the quantized ones, so that a product is rounded once."""
_DTYPES_OF_SCALES = _FULL_PRECISION | {"float8_e8m0fnu"}
_ZERO_POINT = "_zero_point"
_MULTIPLIED_NUMEL = 1 << 21
"""Elements that are multiplied in one go, unless the first dimension has more in one row."""


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
        scales = self.scales.reshape(grid).to(target.device, torch.promote_types(target.dtype, torch.float32))
        if not target.dim():
            target.mul_(scales)
            return
        spread = [
            torch.arange(first, first + length, device=target.device) // block
            for first, length, block in zip(*region, self.block_shape, strict=True)
        ]
        # A few rows at a time: torch takes 8 bytes for each element of a product in another dtype.
        num_rows = max(1, _MULTIPLIED_NUMEL * target.shape[0] // target.numel())
        for rows, numbers in zip(torch.split(target, num_rows), torch.split(spread[0], num_rows), strict=True):
            of_rows = scales
            for dim, of_dim in enumerate([numbers, *spread[1:]]):
                if grid[dim] > 1:
                    of_rows = of_rows.index_select(dim, of_dim)
            rows.mul_(of_rows)


class WeightScales:
    """The scales of the quantized weights that shards are filled with."""

    def __init__(self, saved: Mapping[str, StoredTensor]) -> None:
        """`saved` has the tensors of a checkpoint by the names of their chunks."""
        self._saved = saved
        self.names: set[str] = set()
        """Names in the checkpoint of the scales of the shards that were added."""
        self.places: dict[str, LocalShard] = {}
        """Memory that a load has to fill with scales, by the name of their chunks."""
        self._scaled: list[ScaledShard] = []

    def add(self, shard: LocalShard, stored_fqn: str, *, is_kept: Callable[[str], bool] = lambda _: False) -> None:
        """Adds a shard if it is filled from a quantized weight with scales, and has full precision itself; but not if
        `is_kept` says that the scales of this name are wanted as they are.

        Raises the errors of `blocks_of`.
        """
        weight = self._saved.get(stored_fqn)
        name = weight and name_of_scales(weight, shard.dtype, self._saved)
        if weight is None or name is None or is_kept(name):
            return
        self.names.add(name)
        scales = self._saved[name]
        blocks = blocks_of(weight, scales, self._saved)
        if scales.fqn not in self.places:
            self.places[scales.fqn] = _memory_for(scales)
        self._scaled.append(ScaledShard(shard, self.places[scales.fqn].tensor, blocks))

    def multiply(self) -> None:
        """Multiplies the shards, which are filled, by their scales."""
        with torch.inference_mode():  # some targets may be tensors of inference mode
            for each in self._scaled:
                each.multiply()


def name_of_scales(weight: StoredTensor, wanted_dtype: str, names: Container[str]) -> str | None:
    """Returns the one of `names` that has the scales of a stored weight which is converted to `wanted_dtype`; None if
    it has no scales, or stays quantized.
    """
    if weight.dtype not in QUANTIZED_DTYPES or wanted_dtype not in _FULL_PRECISION:
        return None
    return next((name for suffix in SCALE_SUFFIXES if (name := weight.fqn + suffix) in names), None)


def blocks_of(weight: StoredTensor, scales: StoredTensor, names: Container[str]) -> tuple[int, ...]:
    """Returns the lengths of the block of a weight that each of its scales is for. `names` are those of all tensors.

    Raises CheckpointMismatchError (shape, dtype, conflict) if the shapes do not tell the blocks, the scales are no
    floating-point numbers, or there are zero points: the product would not be the weight.
    """
    found = block_shape(weight.shape, scales.shape)
    kind = why = ""
    if scales.dtype not in _DTYPES_OF_SCALES:
        kind, why = "dtype", f"dtype {scales.dtype}, which does not tell the numbers to multiply by"
    elif weight.fqn + _ZERO_POINT in names:
        kind, why = "conflict", f"{weight.fqn + _ZERO_POINT!r:.200} beside them, which is no factor"
    elif found is None:
        kind = "shape"
        why = f"shape {list(scales.shape)}, which does not tell the part of {list(weight.shape)} that each is for"
    if found is None or why:
        raise CheckpointMismatchError(
            f"the scales {scales.fqn!r:.200} have {why}; take {weight.fqn!r:.200} as {weight.dtype}, with its scales",
            kind=kind,
        )
    return found


def block_shape(shape: tuple[int, ...], scales_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the lengths of the block of a weight that each of its scales is for; None if they cannot be told: along a
    dimension, blocks have the length of a power of two, and the last may be shorter.
    """
    if math.prod(scales_shape) == 1:
        return tuple(max(length, 1) for length in shape)
    if len(scales_shape) == 1 and scales_shape == shape[:1]:  # a scale for each row
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


def _memory_for(scales: StoredTensor) -> LocalShard:
    shape = scales.shape
    memory = torch.empty(shape, dtype=torch_dtype(scales.dtype), device="cpu")
    return LocalShard(scales.fqn, scales.dtype, shape, whole(shape), memory, memory.data_ptr(), None, memory.nbytes)
