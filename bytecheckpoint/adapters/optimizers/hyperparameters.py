"""The hyperparameters of an optimizer's groups, as its parameters were saved with them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import Problem
from bytecheckpoint.adapters.native.parameter_names import ParameterNames
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer
from bytecheckpoint.adapters.plain.plain_data import encode_plain, keep_in_tree
from bytecheckpoint.manifest.plain_wire import join_fqn, unsupported

_NOT_HYPERPARAMETERS = {"params", "param_names", "is_expert_parallel"}
"""Keys of a group that are neither saved nor loaded: its parameters, and Megatron's flag of the groups whose parameters
expert-parallel ranks divide. That flag belongs to the layout of a run: the same parameters have it with two expert
ranks and not with one, and Megatron finds a group by it. Checkpoints of earlier versions may hold it.
"""


def by_first_parameter(
    fqn: str, groups: Iterable[tuple[Mapping[str, Any], Sequence[ParameterNames]]]
) -> dict[str, dict[str, Any]]:
    """Groups and the parameters in each, as an optimizer of this FQN saves them: by the first parameter of each, so
    that ranks with other parameters add theirs.

    Raises CheckpointSaveError (unsupported_value) where parts of one parameter have different hyperparameters.
    """
    found: dict[str, dict[str, Any]] = {}
    values_of: dict[str, dict[str, Any]] = {}
    for index, (group, parameters) in enumerate(groups):
        # A dict, because ranks may hold other parameters of one group, and dicts of ranks are united.
        names = dict.fromkeys(names.name for names in parameters)
        values = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
        for name in values_of.keys() & names:
            if not same_value(values_of[name], values):
                what = f"an optimizer that has parts of {name} in groups with different hyperparameters"
                raise unsupported(fqn, what, "give its parts names of their own, such as one for each layer")
        values_of |= dict.fromkeys(names, values)
        of_first = found.setdefault(next(iter(names), f"#{index}"), {"params": {}, "values": values})
        of_first["params"] |= names
    return found


def agreed(
    parameters: Iterable[ParameterNames], found: StoredOptimizer, checkpoint: CheckpointView
) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the stored values for a group of these parameters, and those on which they do not agree."""
    by_parameter = map(found.group, parameters)
    groups = {of_parameter.fqn: of_parameter for of_parameter in by_parameter if of_parameter is not None}
    values, problems = {}, []
    keys = dict.fromkeys(key for of_parameters in groups.values() for key in of_parameters.values)
    for key in (key for key in keys if key not in _NOT_HYPERPARAMETERS):
        taken = [of_parameters for of_parameters in groups.values() if found.takes(of_parameters, key)]
        if not taken:
            continue
        first = taken[0]
        if all(key in other.values and same_value(first.values[key], other.values[key]) for other in taken):
            values[key] = first.values[key]
            continue
        fqn = checkpoint.rename(join_fqn(first.fqn, key))
        text = f"{fqn}: the parameters of this group were saved in groups with different values of {key!r}"
        problems.append(Problem("conflict", fqn, text))
    return values, problems


def set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Keeps a tensor the tensor that it is (captured graphs hold it) and a number a number. What is put in is the
    group's own: others may get the same.
    """
    for key, value in values.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor):
            own.copy_(torch.as_tensor(value))
        else:
            is_number = isinstance(value, torch.Tensor) and isinstance(own, int | float)
            group[key] = value.item() if is_number else copy.deepcopy(value)


def same_value(a: Any, b: Any) -> bool:
    """Returns True if two pieces of plain data are equal, to the bit; a number is equal to a tensor of it."""
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    # As bytes, so that NaN is NaN and arrays are compared whole.
    return encode_plain(a, "", keep_in_tree) == encode_plain(b, "", keep_in_tree)
