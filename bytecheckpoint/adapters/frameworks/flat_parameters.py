"""Parameters that frameworks flatten: which elements of which tensor a run of a rank's memory is.

FSDP1, Megatron's distributed optimizer and DeepSpeed's ZeRO all keep parts of parameters one after the other in flat
buffers, with padding between them. All are described by the same parts, so no flat buffer is gathered or copied, and no
padding is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.shards import LocalShard, dense_dtype
from bytecheckpoint.manifest.plain_wire import unsupported
from bytecheckpoint.region import Region, split_flat_range


class _FlatRegion(NamedTuple):
    """A region of a part, as it lies in flat memory."""

    region: Region
    """Region of the tensor, in global coordinates."""
    position: int
    """Position of its first element in the flat memory, in elements."""
    strides: tuple[int, ...]
    """Strides in elements of the flat memory."""


class _PartFields(NamedTuple):
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Region
    """Region whose elements are counted by rows: the whole tensor, or this rank's share under tensor parallelism."""
    start: int
    """Index of the first element of the box that lies here."""
    numel: int
    """Number of elements that lie here; 0 where the rank holds nothing of the box."""
    position: int
    """Position of the first of them in the flat memory, in elements."""
    order: tuple[int, ...] | None = None
    """The dimensions from the outermost in memory to the innermost; None where elements are counted by rows."""
    padded_axis: int | None = None
    """The axis along which a checkpoint may hold more or less of the tensor: the difference is padding."""


class FlatParamPart(_PartFields):
    """A run of flat memory: consecutive elements of a tensor, or of a box in it, counted by rows or in `order`."""

    @cached_property
    def _cuts(self) -> Sequence[_FlatRegion]:
        """The regions of the tensor that make up this part. They are found once for the parameter and all of its
        optimizer state, since finding them takes longer than making views of them.
        """
        lengths = self.box.lengths
        if self.order is None and self.start == 0 and self.numel == prod(lengths) > 0:
            return (_FlatRegion(self.box, self.position, _row_strides(lengths)),)
        order = self.order or tuple(range(len(lengths)))
        place_in_order = [order.index(dim) for dim in range(len(order))]
        cuts, position = [], self.position
        nothing = (0,) * len(lengths)
        # An empty region, so that every rank knows the FQN. A tensor without dimensions has one element, so none there.
        empty = [Region(nothing, nothing)] if nothing else []
        for region in split_flat_range([lengths[dim] for dim in order], self.start, self.numel) or empty:
            offsets = tuple(region.offsets[place_in_order[dim]] + at for dim, at in enumerate(self.box.offsets))
            strides = _row_strides(region.lengths)
            held = Region(offsets, tuple(region.lengths[at] for at in place_in_order))
            cuts.append(_FlatRegion(held, position, tuple(strides[at] for at in place_in_order)))
            position += region.numel
        return cuts

    def shards(self, fqn: str, memory: torch.Tensor) -> list[LocalShard]:
        """Returns the shards of this part, as views of the flat memory. A part without elements is one empty shard, or
        none if the parameter has no dimensions.

        `memory` of the box's shape, with as many elements as the part, is taken for the box itself.

        Raises CheckpointSaveError (unsupported_value) for memory of a dtype that cannot be saved, and for memory that
        ends before the part does.
        """
        dtype = dense_dtype(fqn, memory)
        num_elements = memory.numel()
        if memory.requires_grad or memory._is_view():
            memory = memory.detach()
        if num_elements == self.numel and memory.shape == self.box.lengths:
            return [LocalShard(fqn, dtype, self.shape, self.box, memory)]
        end = self.position + self.numel
        if self.numel and end > num_elements:
            what = f"a part of a parameter that ends at element {end} of flat memory, which has {num_elements}"
            raise unsupported(fqn, what, "save outside of contexts that offload or change parameters")
        step = 1 if memory.is_contiguous() else memory.view(-1).stride(0)
        first = memory.storage_offset()
        shards = []
        for region, position, strides in self._cuts:
            places = strides if step == 1 else tuple(step * stride for stride in strides)
            view = memory.as_strided(region.lengths, places, first + step * position)
            shards.append(LocalShard(fqn, dtype, self.shape, region, view))
        return shards


def _row_strides(lengths: Sequence[int]) -> tuple[int, ...]:
    strides = list(accumulate(reversed(lengths[1:]), mul, initial=1)) if lengths else []
    return tuple(reversed(strides))


def part_of_whole(shape: Sequence[int], start: int, numel: int, position: int) -> FlatParamPart:
    """Returns the part of `numel` elements from `start` of the flattened tensor, at `position` of the flat memory."""
    lengths = tuple(shape)
    return FlatParamPart(lengths, Region((0,) * len(lengths), lengths), start, numel, position)


class NamedPart(NamedTuple):
    """A part of a parameter, and the parameter's name."""

    name: str
    """Name of the parameter in its module, without the prefixes of wrappers."""
    part: FlatParamPart


class FlatParamMemory(NamedTuple):
    """A part of a parameter, and its memory."""

    name: str
    """Name as in NamedPart."""
    part: FlatParamPart
    memory: torch.Tensor
    """The memory that a save writes and a load fills: contiguous, and one-dimensional or in the parameter's shape."""


class FlatModule(NamedTuple):
    """The parameters of a module that its framework keeps flat, as one save or load finds them."""

    held: Sequence[FlatParamMemory]
    """Every flat parameter, on every rank; an empty part if this rank has no elements of it."""
    replaced: Collection[int] = frozenset()
    """The ids of tensors that the module shows in place of those parameters, or of their flat memory."""
    aliases: Mapping[str, str] = {}
    """Other names of tied parameters -> the name in `held`."""
    in_optimizer: Mapping[int, Sequence[NamedPart]] = {}
    """Parts in a tensor of an optimizer's param_groups, and in state tensors of its shape, by that tensor's id."""
    copies: Sequence[FlatParamMemory] = ()
    """Memory of the same parameters in lower precision. A load fills it from the same tensors, and
    converts them whatever `cast` says, because the module has the lower precision only. A save does not look at it."""
    finish: Callable[[], None] = lambda: None
    """Called when a load has filled the memory."""


def merged(flat: Sequence[FlatModule]) -> FlatModule | None:
    """Joins the records of one module that several optimizers have. Returns None without any."""
    if len(flat) < 2:
        return next(iter(flat), None)

    def finish() -> None:
        for each in flat:
            each.finish()

    return FlatModule(
        [held for each in flat for held in each.held],
        {tensor_id for each in flat for tensor_id in each.replaced},
        {alias: name for each in flat for alias, name in each.aliases.items()},
        {tensor_id: parts for each in flat for tensor_id, parts in each.in_optimizer.items()},
        [copy for each in flat for copy in each.copies],
        finish,
    )


def split_padding(
    shard: LocalShard, axis: int | None, stored_shape: Sequence[int] | None
) -> tuple[LocalShard, list[LocalShard]]:
    """Splits a shard of a tensor that is padded along one axis by an amount that depends on the layout, as vocabularies
    are. Returns the part that lies in the stored tensor, as a shard of that tensor, which may be empty, and a list with
    the part that lies beyond it, if any.

    The shard is returned whole if nothing is padded, or if the shapes differ along another axis: the load refuses that.
    """
    if axis is None or stored_shape is None or not _differ_along(axis, shard.global_shape, stored_shape):
        return shard, []
    offsets, lengths = list(shard.region.offsets), list(shard.region.lengths)
    length = min(max(stored_shape[axis] - offsets[axis], 0), lengths[axis])
    memory, beyond = torch.split(shard.tensor, [length, lengths[axis] - length], axis)
    padding = []
    if beyond.shape[axis]:
        region = Region(tuple(at + length * (dim == axis) for dim, at in enumerate(offsets)), tuple(beyond.shape))
        padding = [shard._replace(region=region, tensor=beyond, address=0)]
    lengths[axis] = length
    if not length:
        offsets = lengths = [0] * len(offsets)
        memory = memory.new_empty(lengths)
    region = Region(tuple(offsets), tuple(lengths))
    return LocalShard(shard.fqn, shard.dtype, tuple(stored_shape), region, memory), padding


def same_but_for_padding(axis: int | None, shape: Sequence[int], other: Sequence[int]) -> bool:
    """Returns True if the shapes are equal, or differ along this axis only."""
    return tuple(shape) == tuple(other) or (axis is not None and _differ_along(axis, shape, other))


def _differ_along(axis: int, shape: Sequence[int], other: Sequence[int]) -> bool:
    lengths = list(zip(shape, other, strict=False))
    return len(shape) == len(other) and [dim for dim, (a, b) in enumerate(lengths) if a != b] == [axis]


NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]
"""The parameters of a module, each under all of its names."""


class FlatOptimizer(NamedTuple):
    """A torch optimizer inside one of a framework's own, as one save or load finds it."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[Sequence[torch.Tensor]]
    """The parameters of each of its param_groups, also while the framework keeps them elsewhere."""
    module: Callable[[NamedParameters], FlatModule | None]
    """Finds the flat parameters of the module that has the given parameters; returns None where none is flat."""
    facts: Callable[[], dict[str, Any]]
    """Returns the other values that a resumed training needs, as plain data that is the same on all ranks."""
    take_facts: Callable[[Mapping[str, Any]], None]
    """Sets the values of `facts` from a checkpoint; another framework may have saved it without some of them."""
