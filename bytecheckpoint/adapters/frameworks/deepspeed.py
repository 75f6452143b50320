"""DeepSpeed: engines, and the optimizers in them, as they are in a training that runs. No gather, no padding stored.

Takes, by the attributes that they have and without DeepSpeed:

- an engine, which is its `module` here, under the names that parameters have in it;
- `engine.optimizer`, of every ZeRO stage, BF16_Optimizer and FP16 ones (`zero_partitions.py` says how each keeps what),
  which is the torch optimizer in it: its parameters are the flat masters. With stage 0 it may be a torch optimizer;
- `engine.module` beside `engine.optimizer`, and modules of ZeRO 3 without any.

A parameter that exists in two precisions is stored once, by its master. A load fills the masters; low precision comes
from them for what lies on this rank, and from the checkpoint for the rest. Parameters that are not optimised are the
module's own, or in ZeRO 3 the partition `ds_tensor`; what is gathered at the moment is not read, but filled by a load.
What else a resumed training needs is saved with the optimizer: counters of the engine, its scheduler, the loss scaler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from bytecheckpoint.adapters.frameworks.flat_parameters import (
    FlatModule,
    FlatOptimizer,
    FlatParamMemory,
    NamedParameters,
    NamedPart,
    merged,
    part_of_whole,
)
from bytecheckpoint.adapters.frameworks.zero_partitions import MasterPart, is_wrapper, masters_of, zero3_part
from bytecheckpoint.adapters.native.module_walk import ModuleTree
from bytecheckpoint.manifest.plain_wire import unsupported

_PARTITION, _MASTER, _OWNER = "ds_tensor", "_hp_mapping", "_z3_optimizer"
"""Attributes of parameters: the partition of ZeRO 3, the place of the full-precision copy in mixed precision, and the
optimizer."""
_LINKED = "_hp_optimizer_states_linked"
"""Attribute of a wrapper: true once it has noted which parts of the state belong to a parameter."""
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes that change in a loss scaler; the rest is configuration, which is chosen anew for each run."""

_UNREADABLE = (
    ("swap_optimizer", "with optimizer state on NVMe", "offload to the CPU"),
    ("params_in_nvme_and_cpu", "with parameters on NVMe", "offload to the CPU"),
    ("offloaded_states", "whose states are offloaded", "call engine.reload_states() first"),
    ("zenflow", "with ZenFlow", "turn zenflow off"),
)
"""Attributes that are true where state lies in other places, each with the name of that feature and advice."""
_UNREADABLE_IF_SET = (
    ("superoffload_cpu_optimizer", "with SuperOffload", "turn super_offload off"),
    ("backup_optimizer", "offloaded in part", "set the ratio of the offload to 1.0"),
)
"""Like the table above, for attributes that exist only where state lies in other places."""


def is_engine(value: Any) -> bool:
    """Returns True for an engine of DeepSpeed: a module with another one as its `module`, an optimizer and counters."""
    attributes = vars(value) if isinstance(value, torch.nn.Module) else {}
    return {"optimizer", *COUNTERS} <= attributes.keys() and isinstance(unwrapped(value), torch.nn.Module)


def unwrapped(engine: Any) -> Any:
    return getattr(engine, "module", None)


def flat_optimizer(fqn: str, value: Any, engines: Iterable[Any]) -> FlatOptimizer | None:
    """Returns a record of the torch optimizer in `value`, which is a DeepSpeed optimizer or that of one of `engines`;
    None for any other `value`.

    The torch optimizer that an engine was made with is taken for the engine's own. Raises CheckpointSaveError
    (unsupported_value), naming `fqn`, where not all of its state can be read.
    """
    engine = next((engine for engine in engines if any(each is value for each in _optimizers_in(engine))), None)
    wrapper = value if engine is None else engine.optimizer
    if not is_wrapper(wrapper):
        if not isinstance(value, torch.optim.Optimizer):
            return None
        groups = [group["params"] for group in value.param_groups]
        if value.state and not any(groups):  # none of its state would be saved, nor any loaded
            what = f"a {type(value).__name__} that has state and no parameters, as inside ZeRO 3 between steps"
            raise unsupported(fqn, what, "pass engine.optimizer, or the engine itself beside it")
        facts = partial(resume_facts, value, engine), partial(take_facts, value, engine)
        return None if engine is None else FlatOptimizer(value, groups, lambda _: None, *facts)
    _refuse_unreadable(fqn, wrapper)
    if not isinstance(wrapper.optimizer, torch.optim.Optimizer):
        raise unsupported(fqn, "a DeepSpeed optimizer without an optimizer in it", "save the engine as the model only")
    return FlatOptimizer(
        wrapper.optimizer,
        _groups_of(wrapper),
        lambda named: flat_module(fqn, named, wrapper),
        partial(resume_facts, wrapper, engine),
        partial(take_facts, wrapper, engine),
    )


def _optimizers_in(engine: Any) -> Iterator[Any]:
    """Yields the engine's optimizer, the optimizer inside it, and so on."""
    optimizer, seen = engine.optimizer, set[int]()
    while optimizer is not None and id(optimizer) not in seen:
        yield optimizer
        seen.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", None)


def _groups_of(wrapper: Any) -> list[Sequence[torch.Tensor]]:
    """Returns the parameters of the inner optimizer's groups, flat in ZeRO; with ZeRO 3, also between steps, when the
    groups themselves are empty.
    """
    groups: list[Sequence[torch.Tensor]] = [group["params"] for group in wrapper.optimizer.param_groups]
    if "sub_group_to_group_id" not in vars(wrapper) or any(groups):
        return groups
    masters = wrapper.fp32_partitioned_groups_flat
    group_ids = wrapper.sub_group_to_group_id
    return [[each for index, each in enumerate(masters) if group_ids[index] == group] for group in range(len(groups))]


def flat_module(fqn: str, named: NamedParameters, wrapper: Any | None) -> FlatModule | None:
    """Finds the flat memory of a module's parameters: of those that the optimizer `wrapper` has, or, without a wrapper,
    of those that are partitions of ZeRO 3. Returns None if there are none: another optimizer may have them.

    The module may have parameters that the wrapper lacks, such as frozen ones. Raises CheckpointSaveError
    (unsupported_value) if the wrapper has parameters of this module and others besides, or if memory cannot be read.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
    by_id = {id(parameter): parameter for _, parameter in named}
    masters: list[MasterPart] = []
    if wrapper is not None:
        _refuse_unreadable(fqn, wrapper)
        masters = masters_of(fqn, wrapper)
    of_module = [each for each in masters if id(each.parameter) in names]
    if of_module and len(of_module) < len(masters):
        what = f"a module with {len(of_module)} of the {len(masters)} parameters of its DeepSpeed optimizer"
        raise unsupported(fqn, what, "pass the engine, or the whole of engine.module")
    # Only the call without a wrapper takes partitions: their masters may be in another optimizer.
    partitioned: list[Any] = [each for each in by_id.values() if wrapper is None and hasattr(each, _PARTITION)]
    if not of_module and not partitioned:
        return None
    held: list[FlatParamMemory] = []
    copies: list[FlatParamMemory] = []
    in_optimizer: dict[int, list[NamedPart]] = {}
    for of_parameter in of_module:
        name = names[id(of_parameter.parameter)][0]
        held.append(FlatParamMemory(name, of_parameter.part, _flat(of_parameter.master)))
        in_optimizer.setdefault(id(of_parameter.master), []).append(NamedPart(name, of_parameter.part))
        copies += _copies(fqn, name, of_parameter)
    for parameter in partitioned:
        name = names[id(parameter)][0]
        _refuse_unreadable_parameter(fqn, parameter)
        held.append(FlatParamMemory(name, zero3_part(fqn, parameter, 0), _flat(parameter.ds_tensor)))
        copies += _gathered(fqn, name, parameter)
    flat_ids = {id(parameter) for parameter in (*(each.parameter for each in of_module), *partitioned)}
    aliases = {alias: first for flat_id in flat_ids for first, *others in [names[flat_id]] for alias in others}
    return FlatModule(held, flat_ids, aliases, in_optimizer, copies, partial(_finish, of_module, partitioned))


def module_alone(fqn: str, named: NamedParameters, engine: Any | None) -> FlatModule | None:
    """Returns the flat ones among the parameters of an engine, or of a module of ZeRO 3; None if none is flat. `named`
    is without those that an optimizer in the state has: the caller leaves them out.

    Parameters of ZeRO 3 know their optimizer; partitions of those that it does not train have no masters.
    """
    known = [] if engine is None else [engine.optimizer]
    known += [vars(each)[_OWNER] for _, each in named if hasattr(each, _OWNER)]
    wrappers = {id(each): each for each in known if is_wrapper(each)}
    flat = [found for each in wrappers.values() if (found := flat_module(fqn, named, each)) is not None]
    partitions = flat_module(fqn, not_in(named, flat), None)
    return merged(flat if partitions is None else [*flat, partitions])


def not_in(named: NamedParameters, flat: Iterable[FlatModule]) -> NamedParameters:
    """Returns the parameters that are flat in none of these modules."""
    replaced = {tensor_id for each in flat for tensor_id in each.replaced}
    return [(name, parameter) for name, parameter in named if id(parameter) not in replaced]


def has_traces(tree: ModuleTree) -> bool:
    """Returns True if DeepSpeed has marked a parameter, with a partition of ZeRO 3 or the place of its master."""
    found = (each for _, module in tree.submodules for each in module._parameters.values())
    return any(hasattr(each, _PARTITION) or hasattr(each, _MASTER) for each in found)


def refuse_unknown(fqn: str, named: NamedParameters, flat: Iterable[FlatModule]) -> None:
    """Raises CheckpointSaveError (unsupported_value) for parameters whose masters were not found: the next step would
    undo a load, and a save would store rounded values.
    """
    unknown = [name for name, parameter in not_in(named, flat) if hasattr(parameter, _MASTER)]
    if unknown:
        what = f"a module with parameters that DeepSpeed keeps in full precision elsewhere, as {unknown[0]}"
        raise unsupported(fqn, what, "pass the engine as the model, or its engine.optimizer beside the module")


def _flat(master: torch.Tensor) -> torch.Tensor:
    return master.detach().view(-1)


def _copies(fqn: str, name: str, held: MasterPart) -> Iterator[FlatParamMemory]:
    """Yields the low-precision memory of those elements of a parameter whose masters are on other ranks. With ZeRO 3,
    yields the whole parameter while it is gathered, and nothing at other times.
    """
    parameter: Any = held.parameter
    if hasattr(parameter, _PARTITION):
        _refuse_unreadable_parameter(fqn, parameter)
        yield from _gathered(fqn, name, parameter)
        return
    memory = parameter.detach().view(-1)
    end = held.part.start + held.part.numel
    for start, stop in ((0, held.part.start), (end, parameter.numel())):
        if start < stop:
            yield FlatParamMemory(name, part_of_whole(parameter.shape, start, stop - start, start), memory)


def _gathered(fqn: str, name: str, parameter: Any) -> Iterator[FlatParamMemory]:
    """Yields the memory of the ZeRO 3 parameter `name` if it is gathered now: small ones always are, others between
    forward and backward. Raises CheckpointSaveError (unsupported_value), for the module `fqn`, while the gathering is
    under way.
    """
    if parameter.ds_status.name == "INFLIGHT":
        raise unsupported(fqn, "a module whose parameters are being gathered", "save and load between steps")
    if parameter.ds_status.name == "AVAILABLE":
        whole = part_of_whole(tuple(parameter.ds_shape), 0, parameter.ds_numel, 0)
        yield FlatParamMemory(name, whole, parameter.detach().view(-1))


def _finish(masters: Sequence[MasterPart], alone: Sequence[Any]) -> None:
    """Rounds this rank's masters into the low-precision parameters, as DeepSpeed does, and drops hpZ's old copies. The
    load itself has filled the elements whose masters are on other ranks.
    """
    for partitioned in alone:
        partitioned.ds_secondary_tensor = None  # hpZ: gathered within a node, from values that are out of date now
    for held in masters:
        parameter: Any = held.parameter
        start, numel, position = held.part.start, held.part.numel, held.part.position
        if hasattr(parameter, _PARTITION):
            low, start = parameter.ds_tensor, 0
            parameter.ds_secondary_tensor = None
        else:
            low = parameter
        low.detach().view(-1)[start : start + numel].copy_(_flat(held.master)[position : position + numel])


def _refuse_unreadable(fqn: str, wrapper: Any) -> None:
    reasons = [row for row in _UNREADABLE if getattr(wrapper, row[0], False)]
    reasons += [row for row in _UNREADABLE_IF_SET if hasattr(wrapper, row[0])]
    group, mpu = getattr(wrapper, "model_parallel_group", None), getattr(wrapper, "mpu", None)
    if group is not None:
        num_model_ranks = dist.get_world_size(group)
    else:
        num_model_ranks = 1 if mpu is None else int(mpu.get_model_parallel_world_size())
    if num_model_ranks > 1:  # ranks have other parameters under the same names
        reasons.append(("", "with model parallelism", "shard with DTensor, or use Megatron"))
    for _, what, advice in reasons[:1]:
        raise unsupported(fqn, f"a DeepSpeed optimizer {what}", advice)


def _refuse_unreadable_parameter(fqn: str, parameter: Any) -> None:
    if parameter.ds_tensor.status.name != "AVAILABLE" or parameter.ds_tensor.final_location == "nvme":
        raise unsupported(fqn, "a module with parameters on NVMe", "offload to the CPU")
    if hasattr(parameter.ds_tensor, "ds_quant_scale"):
        raise unsupported(fqn, "a module with quantised partitions", "turn zero_quantized_nontrainable_weights off")


def resume_facts(wrapper: Any, engine: Any | None) -> dict[str, Any]:
    """Returns the plain data that a resumed training needs besides parameters and their state."""
    facts: dict[str, Any] = {}
    scaler = _dynamic_scaler(wrapper)
    if scaler is not None:
        facts["loss_scaler"] = {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}
    autocast = getattr(wrapper, "torch_autocast_gradscaler", None)
    if autocast is not None:
        facts["grad_scaler"] = autocast.state_dict()
    if engine is not None:
        facts["engine"] = {name: getattr(engine, name) for name in COUNTERS}
        if getattr(engine, "lr_scheduler", None) is not None:
            facts["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return facts


def take_facts(wrapper: Any, engine: Any | None, facts: Mapping[str, Any]) -> None:
    if hasattr(wrapper, _LINKED):  # the next step makes new links: the load may have removed state to which old ones go
        setattr(wrapper, _LINKED, False)
    scaler = _dynamic_scaler(wrapper)
    for name, value in facts.get("loss_scaler", {}).items():
        if scaler is not None and hasattr(scaler, name):
            setattr(scaler, name, value)
    autocast = getattr(wrapper, "torch_autocast_gradscaler", None)
    if autocast is not None and facts.get("grad_scaler"):
        autocast.load_state_dict(facts["grad_scaler"])
    if engine is None:
        return
    for name, value in facts.get("engine", {}).items():
        # Gradients of micro steps after the last step are in no checkpoint, so their accumulation starts anew.
        begun = value % engine.gradient_accumulation_steps() if name == "micro_steps" else 0
        setattr(engine, name, value - begun)
    if "lr_scheduler" in facts and getattr(engine, "lr_scheduler", None) is not None:
        engine.lr_scheduler.load_state_dict(facts["lr_scheduler"])


def _dynamic_scaler(wrapper: Any) -> Any | None:
    """Returns the object that adapts the loss scale; None where the scale is fixed, as without fp16."""
    of_zero, of_fp16 = getattr(wrapper, "loss_scaler", None), getattr(wrapper, "loss_scale_config", None)
    if getattr(of_zero, "dynamic", False):
        return of_zero
    return of_fp16 if getattr(of_fp16, "dynamic_loss_scale", False) else None
