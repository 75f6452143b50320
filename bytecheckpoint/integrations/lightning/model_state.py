"""Chooses what is saved of a module if a hook of Lightning has changed its state_dict. `shown` is the state_dict that
the hook was given, `left` the one that it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.adapters.native.module_parts import is_extra_state
from bytecheckpoint.integrations.shared.extra_state import WithExtraState
from bytecheckpoint.manifest.plain_wire import join_fqn


def module_or_part(module: nn.Module, shown: Mapping[str, Any], left: Mapping[str, Any]) -> nn.Module | dict[str, Any]:
    """Returns the module itself if hooks have not changed its state_dict, a module with the remaining parameters and
    buffers if they have only removed some, else the state_dict that they have left.
    """
    if any(value is not shown.get(name) for name, value in left.items()):
        return dict(left)
    return module if left.keys() == shown.keys() else _part_of(module, left)


def _part_of(module: nn.Module, names: Mapping[str, Any]) -> nn.Module:
    """Returns a module that holds these parameters, buffers and extra state, under the same names, and nothing else."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    extra = {name.rpartition(".")[0]: value for name, value in names.items() if is_extra_state(name)}
    part = _made("", extra)
    for name, value in names.items():
        folder, _, last = name.rpartition(".")
        inner, path = part, ""
        for step in filter(None, folder.split(".")):
            path = join_fqn(path, step)
            if step not in inner._modules:
                inner.add_module(step, _made(path, extra))
            inner = inner.get_submodule(step)
        if name in parameters:
            inner.register_parameter(last, parameters[name])
        elif not is_extra_state(name):
            inner.register_buffer(last, value)
    return part


def _made(path: str, extra: Mapping[str, Any]) -> nn.Module:
    return WithExtraState(extra[path]) if path in extra else nn.Module()


def is_same(value: Any, shown: Mapping[str, Any]) -> bool:
    """Returns True if `value` has the same tensors under the same names as `shown`: a hook has stored the state_dict
    that it was shown under another key of the checkpoint.
    """
    return isinstance(value, dict) and value.keys() == shown.keys() and all(value[key] is shown[key] for key in shown)
