"""Modules: those that a value of the state stands for, their parameters and buffers, and memory for them.

Tensors are read in one walk where that gives what the module's own methods give; torch's methods take one walk each.
Knows the module's own names only, nothing of checkpoints.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import _IncompatibleKeys

from bytecheckpoint.adapters.native.subclass_flatten import is_subclass, with_new_memory
from bytecheckpoint.adapters.plain.plain_tree import has_attributes
from bytecheckpoint.adapters.torch_types import DTensor

_WALKING = ("parameters", "named_parameters", "buffers", "named_buffers", "named_modules", "_named_members")
_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state")
_METHODS = frozenset(_WALKING + _SAVING)
"""Methods that find or save values. A module can also override one by an attribute of its own."""
_FILLING = ("state_dict", "_save_to_state_dict", "named_modules")
"""Methods that decide which values a state_dict has."""
_RENAMING = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""Module with the hooks that only take a wrapper out of names."""
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard."
"""Prefix of the modules with the hooks that put sharded parameters back before a state_dict, and do no more."""

_OBSERVERS = ("torch.ao.quantization.", "torchao.quantization.")
"""Prefixes of the modules with the observers of quantization."""
_OBSERVED = ("scale", "zero_point", "min_val", "max_val")
"""Buffers of observers that get another shape with the first data, and that their load_state_dict() resizes."""


class Stage(NamedTuple):
    """One module of an entry, perhaps a stage of a pipeline. FQNs are those of the whole model."""

    module: torch.nn.Module
    number: int | None
    """Number of the pipeline stage; None if the stage object does not have it."""


def stages_of(value: Any) -> list[Stage]:
    """Returns the modules of a value of the state that is a module, a stage of `torch.distributed.pipelining` (told by
    `submod` and `stage_index`), a list or tuple of these alone, or a schedule of stages. Empty for anything else.
    """
    if isinstance(value, list | tuple):
        stages: list[Stage] = []
        for item in value:
            stage = _stage(item)
            if stage is None:  # most lists hold something else: no further item is looked at
                return []
            stages.append(stage)
        return stages
    stage = _stage(value)
    return [stage] if stage is not None else _of_schedule(value)


def _stage(value: Any) -> Stage | None:
    if isinstance(value, torch.nn.Module):
        return Stage(value, None)
    if not has_attributes(value, "submod", "stage_index"):
        return None
    module, number = value.submod, value.stage_index
    return Stage(module, number) if isinstance(module, torch.nn.Module) and type(number) is int else None


def _of_schedule(value: Any) -> list[Stage]:
    """Returns the stages of a schedule, from private attributes: `_stage` if a rank has one, `_stages` if several."""
    if not has_attributes(value, "step") or not callable(value.step):
        return []
    own = value._stages if has_attributes(value, "_stages") else None
    if not own:
        own = [value._stage if has_attributes(value, "_stage") else None]
    return stages_of(own) if isinstance(own, list) and not isinstance(own[0], torch.nn.Module) else []


class ModuleTree(NamedTuple):
    """A module and all below it, as they were found when the tree was made; values are read when they are asked for."""

    module: torch.nn.Module
    submodules: Sequence[tuple[str, torch.nn.Module]]
    """The module itself and all below it, each under all of its names, in the order of the state_dict."""
    is_walked_as_usual: bool
    """True if parameters and buffers are found by torch's own methods: nothing overrides them, or `walked` made it."""
    is_saved_as_usual: bool
    """True if torch's own methods make the state_dict, and no hook or extra state adds to it; and after `walked`."""
    resharding: Sequence[Callable[..., Any]]
    """The hooks of fully_shard. Any other hook makes `is_saved_as_usual` False."""
    extra_states: Sequence[tuple[str, torch.nn.Module]] = ()
    """Names of extra state that the tree itself looks for, and the module of each."""

    def own_saving(self, known: str) -> Iterator[tuple[str, str]]:
        """Yields the name of each module that itself decides what its state_dict holds, with the way in which it does
        so: a walk would miss that.

        Extra state does not count, nor do hooks that fully_shard or a rename has added, or that come from Python
        modules whose name starts with `known`.
        """
        for name, module in self.submodules:
            usual = {dict, OrderedDict}
            if not {type(module._parameters), type(module._buffers)} <= usual:
                yield name, f"{type(module).__name__}, which keeps its parameters elsewhere"
            own = [method for method in _FILLING if method in module.__dict__ or not _inherit([type(module)], [method])]
            if own:
                yield name, f"{type(module).__name__} with its own {own[0]}"
            for hook in (*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values()):
                if not str(getattr(hook, "__module__", "")).startswith((_FULLY_SHARD, _RENAMING, known)):
                    yield name, f"{type(module).__name__} with the state_dict hook {getattr(hook, '__name__', hook)}"

    def walked(self) -> ModuleTree:
        """Returns the same tree, whose values are found without any method of its modules but `get_extra_state`.

        For modules whose methods communicate. First check that `own_saving` yields nothing.
        """
        getter = torch.nn.Module.get_extra_state
        found = [(name, module) for name, module in self.submodules if type(module).get_extra_state is not getter]
        extra = [(f"{name}._extra_state" if name else "_extra_state", module) for name, module in found]
        return self._replace(is_walked_as_usual=True, is_saved_as_usual=True, extra_states=extra)

    def versions(self) -> dict[str, dict[str, Any]]:
        """Returns the `_metadata` of torch's state_dict(): the version of each module's state."""
        return {name: {"version": module._version} for name, module in self.submodules}

    def reshard(self) -> None:
        """Puts sharded parameters back in their places: a forward pass without a backward one leaves them whole."""
        if not self.is_saved_as_usual:
            self.module.state_dict(keep_vars=True)
            return
        for hook in self.resharding:
            hook(self.module, "", True)

    def load_hooks(self) -> list[Callable[[], None]]:
        """Returns the calls of what `register_load_state_dict_post_hook` has added, in the order of load_state_dict():
        a module after those below it. Leaves out torch's own hooks, which undo what its load_state_dict() did.
        """
        hooks: list[Callable[[], None]] = []
        seen: set[int] = set()

        def add(module: torch.nn.Module) -> None:
            if id(module) in seen:
                return
            seen.add(id(module))
            for child in module._modules.values():
                if child is not None:
                    add(child)
            hooks.extend(
                partial(hook, module, _IncompatibleKeys([], []))
                for hook in getattr(module, "_load_state_dict_post_hooks", {}).values()
                if not str(getattr(hook, "__module__", "")).startswith("torch.")
            )

        add(self.module)
        return hooks

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what `state_dict(keep_vars=True)` of the module returns: live values by the module's own names."""
        if not self.is_saved_as_usual:
            return self.module.state_dict(keep_vars=True)
        values: dict[str, Any] = {}
        for name, module in self.submodules:
            prefix = f"{name}." if name else ""
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    values[prefix + own] = parameter
            for own, buffer in module._buffers.items():
                if buffer is not None and own not in module._non_persistent_buffers_set:
                    values[prefix + own] = buffer
        values |= {name: module.get_extra_state() for name, module in self.extra_states}
        return values

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Returns what `named_parameters()` of the module returns: each parameter once, under its first name."""
        if not self.is_walked_as_usual:
            return self.module.named_parameters()
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for name, module in self.submodules:
            prefix = f"{name}." if name else ""
            for own, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in found:
                    found[id(parameter)] = prefix + own, parameter
        return found.values()

    def buffers(self) -> Iterable[torch.Tensor]:
        """Returns the buffers that `buffers()` of the module returns; some may come more than once."""
        if not self.is_walked_as_usual:
            return self.module.buffers()
        return [buffer for _, module in self.submodules for buffer in module._buffers.values() if buffer is not None]

    def resizable(self) -> set[int]:
        """Returns the ids of the buffers to which a load gives the shape that they have in the checkpoint."""
        classes = {type(module) for _, module in self.submodules}
        observers = {cls for cls in classes if any(base.__module__.startswith(_OBSERVERS) for base in cls.__mro__)}
        modules = [module for _, module in self.submodules if type(module) in observers]
        return {id(module._buffers[name]) for module in modules for name in module._buffers.keys() & _OBSERVED}

    def live(self) -> set[int]:
        """Returns the ids of all parameters and buffers, also of those that no checkpoint holds."""
        if not self.is_walked_as_usual:
            return set(map(id, (*self.module.parameters(), *self.module.buffers())))
        modules = (module for _, module in self.submodules)
        return {id(each) for module in modules for each in (*module._parameters.values(), *module._buffers.values())}


def tree_of(module: torch.nn.Module) -> ModuleTree:
    submodules = list(module.named_modules(remove_duplicate=False))
    modules = [submodule for _, submodule in submodules]
    classes = set(map(type, modules))
    # Scripted modules have containers of their own, and make their tensors anew whenever they are asked for them.
    containers = {type(container) for submodule in modules for container in (submodule._parameters, submodule._buffers)}
    has_own_methods = any(not _METHODS.isdisjoint(submodule.__dict__) for submodule in modules)
    pre_hooks = {id(hook): hook for submodule in modules for hook in submodule._state_dict_pre_hooks.values()}
    resharding = [hook for hook in pre_hooks.values() if str(hook.__module__).startswith(_FULLY_SHARD)]
    has_hooks = len(resharding) < len(pre_hooks) or any(submodule._state_dict_hooks for submodule in modules)
    is_walked_as_usual = containers <= {dict, OrderedDict} and not has_own_methods and _inherit(classes, _WALKING)
    is_saved_as_usual = is_walked_as_usual and not has_hooks and _inherit(classes, _SAVING)
    return ModuleTree(module, submodules, is_walked_as_usual, is_saved_as_usual, resharding)


def _inherit(classes: Iterable[type[torch.nn.Module]], methods: Sequence[str]) -> bool:
    """Returns True if none of the classes overrides one of these methods."""
    return all(getattr(cls, method) is getattr(torch.nn.Module, method) for cls in classes for method in methods)


def target_device(tensor: torch.Tensor) -> torch.device:
    """Returns the device of a tensor; for one on the meta device, that on which it would get memory."""
    if not tensor.is_meta:
        return tensor.device
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def materialize(fqn: str, module: torch.nn.Module, wanted: Collection[int]) -> None:
    """Gives memory to tensors on the meta device that are `wanted` (by id). Parameters stay the same objects.

    What a load does not fill stays on the meta device, where using it fails. A warning names buffers that are not
    persistent, which no checkpoint holds.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) not in wanted:
            return tensor
        device = target_device(tensor)
        if is_subclass(tensor):
            return with_new_memory(tensor, lambda inner: torch.empty_like(inner, device=device))
        return torch.empty_like(tensor, device=device)

    # Swapping keeps identity: optimizers that were built on meta parameters, and ties, stay valid.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(allocate)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    persistent = module.state_dict(keep_vars=True)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in persistent]
    if left:
        warnings.warn(
            f"{fqn}: buffers {left} are not persistent, so no checkpoint holds them; they are still on the meta "
            "device: compute them again before using the model",
            stacklevel=2,
        )
