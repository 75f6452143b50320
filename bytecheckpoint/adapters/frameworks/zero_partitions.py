"""The parts of parameters that DeepSpeed's optimizers keep in this rank's full-precision memory, and where each is.

Takes, by the attributes that they have:

- ZeRO 1 and 2 (`single_partition_of_fp32_groups`): the parameters of a group one after the other, in the order of
  `round_robin_bit16_groups`, with padding between them where `round_robin_bit16_offsets` says so, and at the end so
  that all ranks hold equally much.
- BF16_Optimizer (`fp32_groups_flat_partition`): the same, in the order of `bf16_groups`.
- FP16_Optimizer (`fp32_groups_flat`): the same, all of it on every rank; FP16_UnfusedOptimizer (`fp32_groups`): a
  tensor for each parameter.
- ZeRO 3 (`fp32_partitioned_groups_flat`): every rank holds equally many elements of each parameter of `fp16_groups`,
  one parameter after the other; the last ranks hold padding.

Optimizers without master weights of their own, and parameters that no optimizer has, are not read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatParamPart, part_of_whole
from bytecheckpoint.manifest.plain_wire import unsupported


class MasterPart(NamedTuple):
    """The part of one parameter that this rank's full-precision memory holds."""

    parameter: torch.nn.Parameter
    part: FlatParamPart
    master: torch.Tensor
    """Tensor that the inner optimizer has as a parameter."""


def part_of_partition(shape: Sequence[int], start: int, partition_numel: int, index: int) -> FlatParamPart:
    """Returns the part of a parameter in partition `index` of flat memory, an empty one if none of it lies there.
    `start` is the parameter's first element in flat memory.
    """
    first = max(start, index * partition_numel)
    end = min(start + prod(shape), (index + 1) * partition_numel)
    if end <= first:
        return part_of_whole(shape, 0, 0, 0)
    return part_of_whole(shape, first - start, end - first, first - index * partition_numel)


def part_of_rank(shape: Sequence[int], rank_numel: int, rank: int, position: int) -> FlatParamPart:
    """Returns the part of a parameter of which each rank holds `rank_numel` elements, padding at the end included; an
    empty part on a rank with nothing but padding. `position` is where the part begins in this rank's memory.
    """
    numel = max(0, min(rank_numel, prod(shape) - rank * rank_numel))
    return part_of_whole(shape, rank * rank_numel, numel, position) if numel else part_of_whole(shape, 0, 0, 0)


def is_wrapper(value: Any) -> bool:
    """Returns True if an object is an optimizer of DeepSpeed's, which keeps the masters of low-precision parameters."""
    attributes = () if isinstance(value, type) else getattr(value, "__dict__", ())
    return "optimizer" in attributes and any(name in attributes for name in _READERS)


def masters_of(fqn: str, wrapper: Any) -> list[MasterPart]:
    """Returns every parameter that the optimizer has, with the part of it on this rank, which may be empty.

    Raises CheckpointSaveError (unsupported_value) where the partitions do not fit the parameters, or where parameters
    are partitioned over fewer than all data-parallel ranks.
    """
    read = next(read for name, read in _READERS.items() if name in vars(wrapper))
    return list(read(fqn, wrapper))


def zero3_part(fqn: str, parameter: Any, position: int) -> FlatParamPart:
    """Returns the part of a parameter of ZeRO 3 on this rank, which may be empty.

    Raises CheckpointSaveError (unsupported_value) if it is not cut evenly over all ranks of its process group.
    """
    size, rank = dist.get_world_size(parameter.ds_process_group), dist.get_rank(parameter.ds_process_group)
    partition = parameter.ds_tensor.ds_numel
    if partition != -(-parameter.ds_numel // size):
        what = f"a ZeRO-3 parameter of {parameter.ds_numel} elements with {partition} on each of {size} ranks (MiCS?)"
        raise unsupported(fqn, what, "partition parameters over all data-parallel ranks")
    return part_of_rank(tuple(parameter.ds_shape), partition, rank, position)


def _in_partitions(fqn: str, wrapper: Any, *, masters: str, groups: str) -> Iterator[MasterPart]:
    """Yields the parts of ZeRO 1 and 2 and BF16_Optimizer; `masters` and `groups` are names of attributes."""
    of_groups: Sequence[Sequence[torch.nn.Parameter]] = getattr(wrapper, groups)
    starts_of_groups = getattr(wrapper, "round_robin_bit16_offsets", None) or map(_one_after_the_other, of_groups)
    rows = zip(getattr(wrapper, masters), of_groups, starts_of_groups, wrapper.real_dp_process_group, strict=True)
    for master, group, starts, process_group in rows:
        _refuse_experts(fqn, process_group, wrapper.dp_process_group)
        size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        needed = max((start + parameter.numel() for start, parameter in zip(starts, group, strict=True)), default=0)
        if needed > size * master.numel():
            what = f"a DeepSpeed optimizer with {needed} elements of parameters in {size} x {master.numel()} of masters"
            raise unsupported(fqn, what, "save outside of contexts that offload or change parameters")
        for start, parameter in zip(starts, group, strict=True):
            yield MasterPart(parameter, part_of_partition(parameter.shape, start, master.numel(), rank), master)


def _fp16(_fqn: str, wrapper: Any) -> Iterator[MasterPart]:
    for master, group in zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True):
        for start, parameter in zip(_one_after_the_other(group), group, strict=True):
            yield MasterPart(parameter, part_of_whole(parameter.shape, 0, parameter.numel(), start), master)


def _fp16_unfused(fqn: str, wrapper: Any) -> Iterator[MasterPart]:
    for masters, group in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
        for master, parameter in zip(masters, group, strict=True):
            if not (master.is_contiguous() and parameter.is_contiguous()):
                what = f"a DeepSpeed optimizer with a parameter of shape {list(parameter.shape)} that is not contiguous"
                raise unsupported(fqn, what, "make the model's parameters contiguous before deepspeed.initialize")
            yield MasterPart(parameter, part_of_whole(parameter.shape, 0, parameter.numel(), 0), master)


def _zero_3(fqn: str, wrapper: Any) -> Iterator[MasterPart]:
    for master, group in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
        position = 0
        for parameter in group:
            _refuse_experts(fqn, parameter.ds_process_group, wrapper.dp_process_group)
            yield MasterPart(parameter, zero3_part(fqn, parameter, position), master)
            position += parameter.ds_tensor.ds_numel


def _one_after_the_other(parameters: Sequence[torch.nn.Parameter]) -> list[int]:
    return list(accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]


def _refuse_experts(fqn: str, process_group: Any, dp_process_group: Any) -> None:
    size, of_all = dist.get_world_size(process_group), dist.get_world_size(dp_process_group)
    if size != of_all:
        what = f"a DeepSpeed optimizer with parameters on {size} of {of_all} data-parallel ranks (MoE experts or MiCS)"
        advice = "use expert parallelism of one rank, because expert-parallel ranks give other experts the same names"
        raise unsupported(fqn, what, advice)


_READERS: Mapping[str, Callable[[str, Any], Iterator[MasterPart]]] = {
    "single_partition_of_fp32_groups": partial(
        _in_partitions, masters="single_partition_of_fp32_groups", groups="round_robin_bit16_groups"
    ),
    "fp32_groups_flat_partition": partial(_in_partitions, masters="fp32_groups_flat_partition", groups="bf16_groups"),
    "fp32_partitioned_groups_flat": _zero_3,
    "fp32_groups_flat": _fp16,
    "fp32_groups": _fp16_unfused,
}
"""Readers of the masters, by the attribute that holds these."""
