"""Scales of quantized weights. Files in FP8 hold small numbers, and beside them a tensor of scales: one for each block,
for each row, or one alone. The weight is the product. In MXFP4 the numbers are packed, two in a byte, and transposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.shards import LocalShard, torch_dtype
from bytecheckpoint.dtypes import (
    MXFP4,
    MXFP4_NUMEL,
    MXFP4_SUFFIXES,
    QUANTIZED_DTYPES,
    SCALE_SUFFIXES,
    WEIGHT_BLOCK,
    weight_block,
)
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.region import Region, whole

_FULL_PRECISION = {"bfloat16", "float16", "float32", "float64"}
"""Dtypes that have all values of the quantized ones, so that a product is rounded once."""
_DTYPES_OF_SCALES = _FULL_PRECISION | {"float8_e8m0fnu"}
_ZERO_POINT = "_zero_point"
_E2M1 = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_PAIRS = [(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)]
"""The two numbers in a byte of MXFP4."""
_POWERS = [2.0 ** (byte - 127) for byte in range(256)]
"""The scales in MXFP4."""
_MULTIPLIED_NUMEL = 1 << 21
"""Elements that are multiplied in one go, unless the first dimension has more in one row."""


class ScaledShard(NamedTuple):
    """A shard of products. A load fills `scales` and the numbers, which are in `packed` or else in `shard` itself."""

    shard: LocalShard
    scales: torch.Tensor
    """The scales of the blocks that the shard touches, on the host."""
    block_shape: tuple[int, ...]
    """Lengths of the block of the global tensor that one scale is for."""
    packed: torch.Tensor | None = None
    """Bytes of two 4-bit numbers, of whole blocks, on the host: (matrices, columns, blocks of a column, bytes)."""

    def multiply(self) -> None:
        """Puts into `shard` each number times the scale of its block, in float32 or better, and rounded once."""
        target, region = self.shard.tensor, self.shard.region
        if not target.numel():
            return
        grid = [length for _, length in _touched_blocks(region, self.block_shape)]
        device, dtype = target.device, torch.promote_types(target.dtype, torch.float32)
        scales = self.scales.reshape(grid).to(device)
        if self.packed is not None:
            scales = torch.tensor(_POWERS, dtype=dtype, device=device)[scales.int()]
        scales = scales.to(dtype)
        if not target.dim():
            target.mul_(scales)
            return
        spread = [
            torch.arange(first, first + length, device=device) // block - first // block
            for first, length, block in zip(*region, self.block_shape, strict=True)
        ]
        # A few rows at a time: torch takes 8 bytes for each element of a product in another dtype.
        num_rows = max(1, _MULTIPLIED_NUMEL * target.shape[0] // target.numel())
        parts = [torch.split(each, num_rows) for each in (target, spread[0], self.packed) if each is not None]
        for rows, numbers, *packed in zip(*parts, strict=True):
            if packed:
                rows.copy_(_unpacked(packed[0], rows, region.offsets[1] % MXFP4_NUMEL))
            of_rows = scales
            for dim, of_dim in enumerate([numbers, *spread[1:]]):
                if grid[dim] > 1:
                    of_rows = of_rows.index_select(dim, of_dim)
            rows.mul_(of_rows)


def _unpacked(packed: torch.Tensor, target: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the numbers in packed columns, from row `first` on, with the dtype, shape and device of `target`."""
    pairs = torch.tensor(_PAIRS, dtype=target.dtype, device=target.device)
    columns = pairs[packed.to(target.device).int()].flatten(2)
    return columns.narrow(2, first, target.shape[1]).transpose(1, 2)


class WeightScales:
    """The scales of the quantized weights that shards are filled with."""

    def __init__(self, saved: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> None:
        """`saved` has the tensors of a checkpoint by the names of their chunks; its `metadata` may tell blocks."""
        self._saved = saved
        self._metadata = metadata
        self.names: set[str] = set()
        """Names in the checkpoint of the scales, and of the packed numbers, of the shards that were added."""
        self.places: dict[tuple[str, Region], LocalShard] = {}
        """Memory that a load has to fill with scales, by the name of their chunks and the region."""
        self._scaled: list[ScaledShard] = []

    def add(
        self, shard: LocalShard, stored_fqn: str, *, is_kept: Callable[[str], bool] = lambda _: False
    ) -> tuple[LocalShard, str]:
        """Adds a shard if it is filled from a quantized weight with scales, and has full precision itself; but not if
        `is_kept` is True for the name of the scales: these are wanted as they are. Returns what a load fills and the
        name of its chunks: memory for packed numbers and their name, else `shard` and `stored_fqn`.

        Raises the errors of `blocks_of`, and CheckpointMismatchError (conflict) for a packed weight whose scales are
        wanted as they are.
        """
        weight = self._saved.get(stored_fqn)
        names = names_beside(weight, shard.dtype, self._saved) if weight else ()
        if weight is None or not names or (is_kept(names[0]) and weight.dtype != MXFP4):
            return shard, stored_fqn
        if is_kept(names[0]):
            raise CheckpointMismatchError(
                f"the state has a place for the scales {names[0]!r:.200} too, by which the product would be multiplied "
                f"again; take {weight.fqn!r:.200} without its scales, or the packed numbers with them",
                kind="conflict",
            )
        self.names.update(names)
        scales, *packed = map(self._saved.__getitem__, names)
        blocks = blocks_of(weight, scales, self._saved, self._metadata)
        touched = _touched_blocks(shard.region, blocks)
        if not packed:
            # One alone may have any number of dimensions, and scales of rows have one.
            is_sole = math.prod(scales.shape) == 1
            region = whole(scales.shape) if is_sole else _region(touched[: len(scales.shape)])
            self._scaled.append(ScaledShard(shard, self._place(scales, region), blocks))
            return shard, stored_fqn
        matrices, of_columns, columns = touched  # a stored row is a column of the weight
        place = self._place(scales, _region([matrices, columns, of_columns]))
        region = _region([matrices, columns, of_columns, (0, packed[0].shape[3])])
        device = "meta" if shard.tensor.is_meta else "cpu"
        memory = _memory_for(packed[0], region, device)
        self._scaled.append(ScaledShard(shard, place.transpose(1, 2), blocks, memory.tensor))
        return memory._replace(fqn=shard.fqn, owner=shard.owner), packed[0].fqn

    def _place(self, scales: StoredTensor, region: Region) -> torch.Tensor:
        key = scales.fqn, region
        if key not in self.places:
            self.places[key] = _memory_for(scales, region, "cpu")
        return self.places[key].tensor

    def multiply(self) -> None:
        """Multiplies the shards, which are filled, by their scales."""
        with torch.inference_mode():  # some targets may be tensors of inference mode
            for each in self._scaled:
                each.multiply()


def _touched_blocks(region: Region, blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns, for each dimension, the number of the first block that a region touches, and how many it touches."""
    spans = zip(region.offsets, region.ends, blocks, strict=True)
    return [(first // block, -(-end // block) - first // block) for first, end, block in spans]


def _region(spans: Sequence[tuple[int, int]]) -> Region:
    return Region(tuple(first for first, _ in spans), tuple(length for _, length in spans))


def names_beside(weight: StoredTensor, wanted_dtype: str, names: Container[str]) -> Sequence[str]:
    """Returns the names of the tensors beside a stored weight that give its values in `wanted_dtype`: [scales], if they
    are among `names`; [scales, packed numbers], which always exist, for a packed weight; none if it stays quantized.
    """
    if wanted_dtype not in _FULL_PRECISION:
        return ()
    if weight.dtype == MXFP4:
        return [weight.fqn + suffix for suffix in MXFP4_SUFFIXES]
    suffixes = SCALE_SUFFIXES if weight.dtype in QUANTIZED_DTYPES else ()
    return [name for suffix in suffixes if (name := weight.fqn + suffix) in names][:1]


def blocks_of(
    weight: StoredTensor, scales: StoredTensor, names: Container[str], metadata: Mapping[str, Any]
) -> tuple[int, ...]:
    """Returns the lengths of the block of a weight that each of its scales is for. `names` are those of all tensors,
    `metadata` that of the checkpoint.

    Raises CheckpointMismatchError (shape, dtype, conflict) if neither shapes nor metadata tell the blocks, the scales
    are no floating-point numbers, or there are zero points: the product would not be the weight.
    """
    if weight.dtype == MXFP4:
        return (1, MXFP4_NUMEL, 1)
    found = block_shape(weight.shape, scales.shape, weight_block(metadata))
    kind = why = ""
    if scales.dtype not in _DTYPES_OF_SCALES:
        kind, why = "dtype", f"dtype {scales.dtype}, which does not tell the numbers to multiply by"
    elif weight.fqn + _ZERO_POINT in names:
        kind, why = "conflict", f"{weight.fqn + _ZERO_POINT!r:.200} beside them, which is no factor"
    elif found is None:
        kind = "shape"
        why = f"shape {list(scales.shape)}, which does not tell the part of {list(weight.shape)} that each is for, nor "
        why += f"does a {WEIGHT_BLOCK} in config.json or in the metadata"
    if found is None or why:
        raise CheckpointMismatchError(
            f"the scales {scales.fqn!r:.200} have {why}; take {weight.fqn!r:.200} as {weight.dtype}, with its scales",
            kind=kind,
        )
    return found


def block_shape(
    shape: tuple[int, ...], scales_shape: tuple[int, ...], block: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """Returns the lengths of the block of a weight that each of its scales is for: `block`, of its matrices, if that is
    known and fits. Else a dimension is one block, or has a block for each element, or blocks whose length is a power
    of two, the last of which may be shorter; None if these cannot be told.
    """
    if math.prod(scales_shape) == 1:
        return tuple(max(length, 1) for length in shape)
    if block and len(scales_shape) == len(shape) > 1:
        blocks = (1,) * (len(shape) - 2) + block
        if scales_shape == tuple(-(-length // each) for length, each in zip(shape, blocks, strict=True)):
            return blocks
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


def _memory_for(stored: StoredTensor, region: Region, device: str) -> LocalShard:
    memory = torch.empty(region.lengths, dtype=torch_dtype(stored.dtype), device=device)
    address = 0 if memory.is_meta else memory.data_ptr()
    return LocalShard(stored.fqn, stored.dtype, stored.shape, region, memory, address, None, memory.nbytes)
