"""Chooses what is saved of a module if a hook of Lightning has changed its state_dict. `shown` is the state_dict that
the hook was given, `left` the one that it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from bytecheckpoint.integrations.shared.partial_module import partial_module


def module_or_part(module: nn.Module, shown: Mapping[str, Any], left: Mapping[str, Any]) -> nn.Module | dict[str, Any]:
    """Returns the module itself if hooks have not changed its state_dict, a module with the remaining parameters and
    buffers if they have only removed some, else the state_dict that they have left.
    """
    if any(value is not shown.get(name) for name, value in left.items()):
        return dict(left)
    if left.keys() == shown.keys():
        return module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return partial_module({name: parameters.get(name, value) for name, value in left.items()})


def is_same(value: Any, shown: Mapping[str, Any]) -> bool:
    """Returns True if `value` is a dict of the very tensors of `shown` under the same names: a hook has then stored the
    state_dict that it was shown under another key of the checkpoint.
    """
    return isinstance(value, dict) and value.keys() == shown.keys() and all(value[key] is shown[key] for key in shown)
