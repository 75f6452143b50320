"""Objects around modules whose state is that of the modules, as torchtitan's ModelWrapper: saved as the modules are,
so that parameters have the names of the modules and are loaded in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import EntryContents, Expectation
from bytecheckpoint.adapters.frameworks.deepspeed import is_engine
from bytecheckpoint.adapters.frameworks.megatron import is_megatron_module
from bytecheckpoint.adapters.native.module_parts import part_of, plain_name
from bytecheckpoint.adapters.native.module_walk import Stage
from bytecheckpoint.adapters.stateful import Stateful, add_metadata
from bytecheckpoint.adapters.torch_types import DTensor, FullyShardedDataParallel
from bytecheckpoint.manifest.plain_wire import join_fqn


class WrappedModules(NamedTuple):
    """The modules whose state an object gives as its own."""

    stages: list[Stage]
    names: list[str]
    """Keys of the object's own state_dict(), which may have wrappers' prefixes where the modules have none."""


def modules_inside(value: Any) -> WrappedModules | None:
    """Returns the modules in the attributes of an object whose state_dict() gives exactly their state: the same names,
    and the same memory where a module's state is live. None if it gives anything else, such as averages of the weights,
    if no attribute holds a module, or if one of the modules is an engine, Megatron's, or of FSDP1. Calls
    state_dict() of the object and of its modules.
    """
    modules = _modules_in(value)
    if not modules or any(map(_is_read_otherwise, modules)):
        return None
    own = value.state_dict()
    of_modules = _state_of(modules)
    if not isinstance(own, Mapping) or {plain_name(str(name)) for name in own} != of_modules.keys():
        return None
    live = {_memory_key(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}
    is_same = all(
        _memory_key(item) not in live or (_memory_key(own_item) == _memory_key(item) and _is_same_view(own_item, item))
        for name, own_item in own.items()
        for item in [of_modules[plain_name(str(name))]]
        if isinstance(item, torch.Tensor)
    )
    return WrappedModules([Stage(module, None) for module in modules], list(map(str, own))) if is_same else None


def _state_of(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    return {plain_name(name): item for module in modules for name, item in module.state_dict().items()}


def _modules_in(value: Any) -> list[torch.nn.Module]:
    """Returns the modules among the attributes of an object, and in lists and dicts among them, without those inside
    another one found.
    """
    found: dict[int, torch.nn.Module] = {}
    for item in getattr(value, "__dict__", {}).values():
        items = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else [item]
        found |= {id(each): each for each in items if isinstance(each, torch.nn.Module)}
    inside = {id(child) for module in found.values() for child in module.modules() if child is not module}
    return [module for key, module in found.items() if key not in inside]


def _is_read_otherwise(module: torch.nn.Module) -> bool:
    """Returns True for a module that a framework's adapter reads, or whose state_dict() gathers parameters."""
    is_fsdp1 = any(isinstance(each, FullyShardedDataParallel) for each in module.modules())
    return is_fsdp1 or is_engine(module) or is_megatron_module(module)


def _memory_key(value: Any) -> tuple[int, int] | None:
    """Returns a key that tensors of one dtype share if they start at one place in memory, also on the meta device; None
    for a value that is no tensor.
    """
    if not isinstance(value, torch.Tensor):
        return None
    tensor = value._local_tensor if isinstance(value, DTensor) else value
    try:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return id(value), 0


def _is_same_view(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors that start at the same memory have the same elements, in one order."""
    a, b = (each._local_tensor if isinstance(each, DTensor) else each for each in (value, other))
    is_alike = a is b or (a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride())
    return is_alike and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


class ReloadEntry:
    """An object around modules. It may hold a copy of them: once they are loaded, it gets their state."""

    def __init__(self, fqn: str, value: Stateful, inside: WrappedModules) -> None:
        self.fqn = fqn
        self._value = value
        self._inside = inside

    def plain_names(self) -> Mapping[str, str]:
        """Maps each FQN under which the object shows a tensor to the state FQN of that tensor, where the two differ."""
        parts = [(part_of(self.fqn, stage), stage.module) for stage in self._inside.stages]
        plain = {plain_name(name): part.plain_name(name) for part, module in parts for name in module.state_dict()}
        names = ((name, plain[plain_name(name)]) for name in self._inside.names)
        return {join_fqn(self.fqn, name): join_fqn(self.fqn, new) for name, new in names if new != name}

    def collect(self) -> EntryContents:
        """Returns nothing to save: the modules are entries of their own."""
        return EntryContents([], set())

    def expect(self, _checkpoint: CheckpointView) -> Expectation:
        return Expectation([], set(), [])

    def prepare(self, _checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        """Does nothing: a model has its parameters already."""

    def finish(self, _checkpoint: CheckpointView) -> None:
        items = _state_of([stage.module for stage in self._inside.stages])
        state = OrderedDict((name, items[plain_name(name)]) for name in self._inside.names)
        add_metadata(state, self._value.state_dict)
        self._value.load_state_dict(state)
