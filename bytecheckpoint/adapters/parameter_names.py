"""What the parameters of an optimizer are called, in a checkpoint and in the state. Knows nothing of what is stored.

A parameter of the module whose FQN is `model` has the name that it has in that module, one of any other module has its
FQN. So a name depends on nothing that other ranks hold, and on nothing else that the state holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from bytecheckpoint.adapters.modules import ModuleEntry, plain_name
from bytecheckpoint.adapters.plain_data import join_fqn
from bytecheckpoint.adapters.tensors import unsupported

MODEL = "model"


class ParameterNames(NamedTuple):
    """What one parameter is called."""

    name: str
    """Under which its optimizer state is saved."""
    fqns: tuple[str, ...]
    """All FQNs that it has in the state, or may have: several where it is tied, or stands in two modules."""
    elsewhere: tuple[str, ...] = ()
    """Those of them that lie in other modules than the first that has it."""


def name_parameters(
    optimizer_fqn: str, parameters: Iterable[tuple[torch.Tensor, str | None]], modules: Sequence[ModuleEntry]
) -> dict[int, ParameterNames]:
    """The names of parameters, each given with the one that its optimizer knows it by, by the id of the parameter.

    Raises CheckpointSaveError (unsupported_value) for a parameter that has no name or is given twice, and where two
    would have the same one.
    """
    parameters = list(parameters)
    in_modules = _names_in_modules({id(parameter) for parameter, _ in parameters}, modules)
    names: dict[int, ParameterNames] = {}
    for parameter, own_name in parameters:
        of_parameter = in_modules.get(id(parameter)) or _alone(own_name)
        if of_parameter is None:
            raise unsupported(
                optimizer_fqn,
                f"an optimizer with a parameter of shape {list(parameter.shape)} that no module of the state has",
                "pass the model beside it, or build the optimizer from model.named_parameters()",
            )
        if id(parameter) in names:
            what = f"a list of optimizers of which two hold the parameter {of_parameter.name}"
            raise unsupported(optimizer_fqn, what, "give each optimizer a name of its own in the state")
        names[id(parameter)] = of_parameter
    _check_unique(optimizer_fqn, names.values())
    return names


def _names_in_modules(wanted: set[int], modules: Sequence[ModuleEntry]) -> dict[int, ParameterNames]:
    """By the id of the parameter. The first module that has it gives it its name."""
    found: dict[int, ParameterNames] = {}
    for entry in modules:
        prefix = f"{entry.fqn}." if entry.fqn else ""
        names: dict[int, str] = {}
        for parameter, name in entry.parameters():
            if id(parameter) in wanted:
                names.setdefault(id(parameter), name)
        others: dict[str, list[str]] = {}
        for other, name in entry.tied_names().items() if names else ():
            others.setdefault(name, []).append(other)
        for parameter_id, name in names.items():
            fqns: tuple[str, ...] = (prefix + name,)
            if name in others:
                fqns += tuple(prefix + other for other in others[name])
            first = found.get(parameter_id)
            if first is None:
                found[parameter_id] = ParameterNames(name if entry.fqn == MODEL else fqns[0], fqns)
            else:
                found[parameter_id] = ParameterNames(first.name, first.fqns + fqns, first.elsewhere + fqns)
    return found


def _alone(name: str | None) -> ParameterNames | None:
    """Of a parameter that only its optimizer has a name for: it may have been saved beside a model."""
    if name is None:
        return None
    name = plain_name(name)
    return ParameterNames(name, (name, join_fqn(MODEL, name)))


def _check_unique(optimizer_fqn: str, names: Collection[ParameterNames]) -> None:
    if len({of_parameter.name for of_parameter in names}) == len(names):
        return
    owners: dict[str, ParameterNames] = {}
    for of_parameter in names:
        owner = owners.setdefault(of_parameter.name, of_parameter)
        if owner is not of_parameter:
            both = f"{owner.fqns[0]} and {of_parameter.fqns[0]}"
            what = f"an optimizer that would save {both} under one name, {of_parameter.name}"
            raise unsupported(optimizer_fqn, what, "give one of the two another name in the state")
