"""A module that has only some of the values of another one, under the same names, and is saved in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.adapters.native.module_parts import is_extra_state


def partial_module(values: Mapping[str, Any]) -> nn.Module:
    """Returns a module that holds these values, and nothing else: parameters, other tensors as buffers and, under names
    that end in `_extra_state`, extra state. The tensors are not copied, so a load fills them. Extra state can be saved
    only.
    """
    extra = {name.rpartition(".")[0]: value for name, value in values.items() if is_extra_state(name)}
    made = {"": _new_module("", extra)}
    for name, value in values.items():
        folder, _, last = name.rpartition(".")
        owner = _owner_at(folder, made, extra)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        elif not is_extra_state(name):
            owner.register_buffer(last, value)
    return made[""]


def _owner_at(path: str, made: dict[str, nn.Module], extra: Mapping[str, Any]) -> nn.Module:
    """Returns the module at a path. Makes it, and those above it, if they are not in `made`."""
    if path not in made:
        above, _, last = path.rpartition(".")
        made[path] = _new_module(path, extra)
        _owner_at(above, made, extra).add_module(last, made[path])
    return made[path]


def _new_module(path: str, extra: Mapping[str, Any]) -> nn.Module:
    return _WithExtraState(extra[path]) if path in extra else nn.Module()


class _WithExtraState(nn.Module):
    """A module with the extra state of another one."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get_extra_state(self) -> Any:
        return self._value

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError("a part of a model is saved, and never loaded")
