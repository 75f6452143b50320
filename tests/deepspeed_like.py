"""What DeepSpeed's engines and optimizers keep on a rank, under the names that they give it, made from whole tensors by
padding, cutting and joining them. Nothing here trains, and nothing is DeepSpeed's: tests/frameworks compares with that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

Status = Enum("Status", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])
Cut = Callable[[Sequence[Tensor]], Tensor]


class Wrapper:
    """An optimizer around a torch optimizer. `masters` and `cuts` are for tests: what each master is, and how the
    values of the parameters in it are cut to what this rank has of them, with zeros as padding.
    """

    def __init__(self, inner: torch.optim.Optimizer, **facts: Any) -> None:
        self.optimizer = inner
        self.real_dp_process_group = [dist.group.WORLD] * len(inner.param_groups)
        self.dp_process_group = dist.group.WORLD
        self.loss_scaler = SimpleNamespace(cur_scale=1.0, dynamic=False)
        self.masters: list[Tensor] = []
        self.cuts: list[tuple[Cut, list[nn.Parameter]]] = []
        vars(self).update(facts)

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("this is what DeepSpeed saves, with padding and all")

    def load_state_dict(self, _state_dict: dict[str, Any]) -> None:
        raise AssertionError("as above")

    def add(self, parameters: list[nn.Parameter], cut: Cut) -> Tensor:
        """The master of these parameters, whose values are still whole and precise."""
        master = cut([parameter.detach() for parameter in parameters]).float().requires_grad_()
        self.masters.append(master)
        self.cuts.append((cut, parameters))
        return master


class Engine(nn.Module):
    def __init__(self, module: nn.Module, optimizer: Any, *, accumulation: int = 1) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.lr_scheduler: Any = None
        self._accumulation = accumulation

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation


def zero_1(inner: torch.optim.Optimizer, dtype: torch.dtype, *, round_robin: bool = False, gap: int = 1) -> Wrapper:
    """ZeRO 1 and 2. With `gap`, parameters start at multiples of it, as with `parameter_alignment`."""
    wrapper = Wrapper(inner, single_partition_of_fp32_groups=[], round_robin_bit16_groups=[])
    if gap > 1:
        wrapper.round_robin_bit16_offsets = []
    for group in inner.param_groups:
        parameters = group["params"][1::2] + group["params"][::2] if round_robin else group["params"]
        starts = [0]
        for parameter in parameters[:-1]:
            starts.append(-(-(starts[-1] + parameter.numel()) // gap) * gap)
        wrapper.round_robin_bit16_groups.append(parameters)
        if gap > 1:
            wrapper.round_robin_bit16_offsets.append(starts)
        master = wrapper.add(parameters, _equal_partition(starts))
        wrapper.single_partition_of_fp32_groups.append(master)
        _join(parameters, starts, dtype)
        group["params"] = [master]
    return wrapper


def bf16(inner: torch.optim.Optimizer, dtype: torch.dtype) -> Wrapper:
    wrapper = Wrapper(inner, fp32_groups_flat_partition=[], bf16_groups=[])
    for group in inner.param_groups:
        parameters = group["params"]
        starts = _starts(parameters)
        wrapper.bf16_groups.append(parameters)
        wrapper.fp32_groups_flat_partition.append(wrapper.add(parameters, _equal_partition(starts)))
        _join(parameters, starts, dtype)
        group["params"] = [wrapper.masters[-1]]
    return wrapper


def fp16(inner: torch.optim.Optimizer, dtype: torch.dtype) -> Wrapper:
    wrapper = Wrapper(inner, fp32_groups_flat=[], fp16_groups=[])
    for group in inner.param_groups:
        parameters = group["params"]
        wrapper.fp16_groups.append(parameters)
        wrapper.fp32_groups_flat.append(wrapper.add(parameters, _whole))
        _join(parameters, _starts(parameters), dtype)
        group["params"] = [wrapper.masters[-1]]
    return wrapper


def fp16_unfused(inner: torch.optim.Optimizer, dtype: torch.dtype) -> Wrapper:
    wrapper = Wrapper(inner, fp32_groups=[], fp16_groups=[])
    for group in inner.param_groups:
        parameters = group["params"]
        masters = [wrapper.add([parameter], lambda values: values[0].clone()) for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
        wrapper.fp16_groups.append(parameters)
        wrapper.fp32_groups.append(masters)
        group["params"] = list(masters)
    return wrapper


def zero_3(
    inner: torch.optim.Optimizer, dtype: torch.dtype, *, num_in_sub_group: int = 99, persistent: int = 0
) -> Wrapper:
    """Parameters of up to `persistent` elements are whole all the time."""
    wrapper = Wrapper(inner, fp32_partitioned_groups_flat=[], fp16_groups=[], sub_group_to_group_id={})
    for index, group in enumerate(inner.param_groups):
        while group["params"]:
            parameters, group["params"] = group["params"][:num_in_sub_group], group["params"][num_in_sub_group:]
            wrapper.sub_group_to_group_id[len(wrapper.masters)] = index
            wrapper.fp16_groups.append(parameters)
            wrapper.fp32_partitioned_groups_flat.append(wrapper.add(parameters, _equal_rows))
            for parameter in parameters:
                partition_parameter(parameter, dtype, is_persistent=parameter.numel() <= persistent)
    return wrapper


def partition_parameter(parameter: Any, dtype: torch.dtype, *, is_persistent: bool = False) -> None:
    """Makes a parameter one of ZeRO 3's."""
    whole = parameter.data.to(dtype)
    parameter.ds_process_group = dist.group.WORLD
    parameter.ds_shape, parameter.ds_numel = whole.shape, whole.numel()
    parameter.ds_tensor = _equal_rows([whole])
    parameter.ds_tensor.ds_numel = parameter.ds_tensor.numel()
    parameter.ds_tensor.status, parameter.ds_tensor.final_location = Status.AVAILABLE, None
    parameter.ds_secondary_tensor = None
    parameter.ds_status = Status.AVAILABLE if is_persistent else Status.NOT_AVAILABLE
    parameter.data = whole if is_persistent else torch.empty(0, dtype=dtype)


def engine_state(plain: dict[str, Any], wrap: Callable[..., Wrapper]) -> dict[str, Any]:
    """What a model and its torch optimizer hold, in an engine with low-precision parameters. Parameters that do not
    train stay precise. Takes both apart; parameters of one group must have one count of steps.
    """
    model, inner = plain["model"], plain["optimizer"]
    whole = dict(inner.state)
    shapes = {parameter: parameter.shape for parameter in whole}  # ZeRO 3 takes them away
    inner.state.clear()
    wrapper = wrap(inner, torch.bfloat16)
    for master, (cut, parameters) in zip(wrapper.masters, wrapper.cuts, strict=True):
        for key, value in whole.get(parameters[0], {}).items():
            of_all = [whole[parameter][key] for parameter in parameters]
            is_like = isinstance(value, Tensor) and value.shape == shapes[parameters[0]] and key != "step"
            inner.state[master][key] = cut(of_all) if is_like else copy.deepcopy(value)
    if "fp32_partitioned_groups_flat" in vars(wrapper):
        for parameter in model.parameters():
            if not hasattr(parameter, "ds_tensor"):
                partition_parameter(parameter, torch.float32)
            parameter._z3_optimizer = wrapper
    return {"model": Engine(model, wrapper), "optimizer": wrapper}


def differences(state: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not as in another engine that keeps everything in the same way."""
    found, wanted = parts(state), parts(expected)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return [name for name in found if not same(found[name], wanted[name])]


def same(found: Any, wanted: Any) -> bool:
    if isinstance(found, Tensor):
        return bool(found.dtype == wanted.dtype and torch.equal(found, wanted))
    return bool(found == wanted)


def parts(state: dict[str, Any]) -> dict[str, Any]:
    """All that a rank holds, without padding."""
    engine, wrapper = state["model"], state["optimizer"]
    saved = engine.module.state_dict()
    found: dict[str, Any] = {name: buffer for name, buffer in engine.module.named_buffers() if name in saved}
    for name, parameter in engine.module.named_parameters():
        found[f"{name} whole"] = parameter.data
        if hasattr(parameter, "ds_tensor"):
            found[f"{name} here"] = parameter.ds_tensor * mask_of(_equal_rows, [parameter])
    for index, (master, (cut, parameters)) in enumerate(zip(wrapper.masters, wrapper.cuts, strict=True)):
        mask = mask_of(cut, parameters)
        found[f"master {index}"] = master.detach() * mask
        for key, value in wrapper.optimizer.state.get(master, {}).items() if mask.any() else ():
            found[f"master {index} {key}"] = value * mask if value.shape == mask.shape else value
    found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in wrapper.optimizer.param_groups]
    return found


def mask_of(cut: Cut, parameters: list[Any]) -> Tensor:
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in parameters]
    return cut([torch.ones(shape) for shape in shapes])


def pad(flat: Tensor, multiple: int) -> Tensor:
    return torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])


def _equal_partition(starts: Sequence[int]) -> Cut:
    def cut(values: Sequence[Tensor]) -> Tensor:
        size = dist.get_world_size()
        return pad(_placed(values, starts), 2 * size).chunk(size)[dist.get_rank()].clone()

    return cut


def _placed(values: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    flat = values[0].new_zeros(starts[-1] + values[-1].numel())
    for value, start in zip(values, starts, strict=True):
        flat[start : start + value.numel()] = value.reshape(-1)
    return flat


def _starts(parameters: Sequence[Tensor]) -> list[int]:
    starts = [0]
    for parameter in parameters[:-1]:
        starts.append(starts[-1] + parameter.numel())
    return starts


def _whole(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in values])


def _equal_rows(values: Sequence[Tensor]) -> Tensor:
    size = dist.get_world_size()
    return torch.cat([pad(value.reshape(-1), size).chunk(size)[dist.get_rank()] for value in values])


def _join(parameters: Sequence[nn.Parameter], starts: Sequence[int], dtype: torch.dtype) -> None:
    """Low-precision parameters become views of one flat tensor."""
    flat = _placed([parameter.data for parameter in parameters], starts).to(dtype)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
