"""Megatron's optimizers, without Megatron: DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer and
ChainedOptimizer around torch optimizers. They say which elements of which parameter the tensors in the inner
optimizer's param_groups are; the model of the same state says where in which global tensor those lie.

    DistributedOptimizer   `model_float16_groups` beside `shard_fp32_from_float16_groups` (fp32 copies), and
                           `model_fp32_groups` beside `shard_fp32_groups` (views): a model's parameters, and what this
                           rank has of each as a flat tensor. `_get_model_param_range_map(parameter)["param"]` are its
                           `start` and `end` in the flattened parameter. Cut from buckets that data-parallel ranks
                           share: parameters of which this rank has nothing are in `buffers[i].param_index_map` only.
    Float16Optimizer...    `float16_groups` beside `fp32_from_float16_groups` (whole fp32 copies).
    all of them            `optimizer`, the inner one, whose other parameters are the model's; `grad_scaler` or None;
                           `is_stub_optimizer` where there is nothing to optimize.
    ChainedOptimizer       `chained_optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatOptimizer
from bytecheckpoint.adapters.frameworks.megatron import MegatronEntry, OptimizedElements
from bytecheckpoint.adapters.native.parameter_names import NamesParameters
from bytecheckpoint.adapters.optimizers.optimizer import OptimizerEntry
from bytecheckpoint.manifest.plain_wire import unsupported

_SCALER = "megatron_grad_scaler"
"""Key of the grad scaler's state in the facts. DeepSpeed's is torch's GradScaler, with another key and state."""


def is_megatron_optimizer(value: object) -> bool:
    """Returns True if an object is one of Megatron's optimizers, which are not derived from torch's."""
    if isinstance(value, type | torch.nn.Module | torch.optim.Optimizer):
        return False
    own = getattr(value, "__dict__", {})
    return hasattr(type(value), "reload_model_params") and ("optimizer" in own or "chained_optimizers" in own)


def megatron_optimizer_entry(fqn: str, optimizer: Any, framework: str) -> OptimizerEntry:
    """Returns the entry of one of Megatron's optimizers, including all optimizers in a chain.

    Raises CheckpointSaveError (unsupported_value) if an optimizer does not keep its state where torch's optimizers do,
    or if `framework` is neither "auto" nor "megatron".
    """
    if framework not in {"auto", "megatron"}:
        what = f"Megatron's {type(optimizer).__name__} with framework={framework!r}, which could save no more than its "
        what += "state_dict(), where moments and fp32 copies are missing"
        raise unsupported(fqn, what, 'pass framework="auto" or "megatron"')
    owners = [owner for owner in _chained(optimizer) if not getattr(owner, "is_stub_optimizer", False)]
    for owner in owners:
        _check_readable(fqn, owner)

    def link(modules: Sequence[NamesParameters]) -> None:
        optimized = [of_parameter for owner in owners for of_parameter in _optimized(owner)]
        for module in modules:
            if isinstance(module, MegatronEntry):
                module.link(optimized)

    return OptimizerEntry(fqn, list(map(_with_scaler, owners)), framework="megatron", link=link)


def _with_scaler(owner: Any) -> torch.optim.Optimizer | FlatOptimizer:
    """Returns the inner optimizer, as a FlatOptimizer with the grad scaler's state if `owner` has a scaler."""
    inner: torch.optim.Optimizer = owner.optimizer
    scaler = getattr(owner, "grad_scaler", None)
    if scaler is None:
        return inner

    def facts() -> dict[str, Any]:
        return {_SCALER: dict(scaler.state_dict())}

    def take_facts(stored_facts: Mapping[str, Any]) -> None:
        if _SCALER in stored_facts:
            scaler.load_state_dict(stored_facts[_SCALER])

    return FlatOptimizer(inner, [group["params"] for group in inner.param_groups], lambda _: None, facts, take_facts)


def _chained(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers of a chain and of chains inside it, or the one that is no chain."""
    # Not by `optimizer`, which a chain of a single one has too.
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    else:
        for each in chained:
            yield from _chained(each)


def _check_readable(fqn: str, owner: Any) -> None:
    kind = type(owner).__name__
    inner = owner.optimizer
    if not isinstance(inner, torch.optim.Optimizer) or hasattr(inner, "sub_optimizers"):
        what = f"a {kind} around a {type(inner).__name__}, which does not keep its state as torch's optimizers do"
        raise unsupported(fqn, what, "use an optimizer of torch, Apex or Transformer Engine without CPU offload")
    if getattr(getattr(owner, "ddp_config", None), "use_megatron_fsdp", False):
        raise unsupported(fqn, f"a {kind} of Megatron-FSDP", "use Megatron's DistributedDataParallel, or fully_shard")
    if any(copy is None for group in getattr(owner, "shard_fp32_from_float16_groups", ()) for copy in group):
        what = f"a precision-aware {kind}, whose fp32 copies are inside the inner optimizer"
        raise unsupported(fqn, what, "turn use_precision_aware_optimizer off")


def _optimized(owner: Any) -> Iterator[OptimizedElements]:
    """Yields the elements that the inner optimizer has of each parameter, also where they are none on this rank."""
    seen: set[int] = set()
    copies = _pairs(getattr(owner, "float16_groups", ()), getattr(owner, "fp32_from_float16_groups", ()))
    of_float16 = (OptimizedElements(parameter, copy, 0, "copy") for parameter, copy in copies)
    for of_parameter in chain(_shards(owner), of_float16):
        seen.add(id(of_parameter.held))
        yield of_parameter
    for parameter in chain.from_iterable(group["params"] for group in owner.optimizer.param_groups):
        if id(parameter) not in seen:
            yield OptimizedElements(parameter, parameter, 0, "itself")


def _shards(owner: Any) -> Iterator[OptimizedElements]:
    """Yields the elements, if any, that a DistributedOptimizer has of each parameter on this rank; nothing for another
    kind of optimizer.
    """
    if not hasattr(owner, "shard_fp32_from_float16_groups"):
        return
    here: set[int] = set()
    for parameter, copy in _pairs(owner.model_float16_groups, owner.shard_fp32_from_float16_groups):
        here.add(id(parameter))
        yield OptimizedElements(parameter, copy, owner._get_model_param_range_map(parameter)["param"].start, "copy")
    for parameter, view in _pairs(owner.model_fp32_groups, owner.shard_fp32_groups):
        here.add(id(parameter))
        # With overlap_param_gather the rest of the parameter is one step behind until the next forward pass.
        yield OptimizedElements(parameter, view, owner._get_model_param_range_map(parameter)["param"].start, "share")
    # Every rank must know that a parameter is saved as copies or shares, also a rank that has none of them.
    for parameter in (parameter for buffer in owner.buffers for parameter in buffer.param_index_map):
        if id(parameter) not in here:
            kept_as: Literal["share", "copy"] = "share" if parameter.dtype is torch.float32 else "copy"
            yield OptimizedElements(parameter, torch.empty(0, dtype=torch.float32), 0, kept_as)


def _pairs(parameters: Sequence[Sequence[Any]], held: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    return zip(chain.from_iterable(parameters), chain.from_iterable(held), strict=True)
