"""What the parameters of an optimizer are called, in a checkpoint and in the state. Knows nothing of what is stored.

A parameter of the module whose FQN is `model` has the name that it has in that module, one of any other module has its
FQN. So a name depends on nothing that other ranks hold, and on nothing else that the state holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.flat_parts import FlatPart, NamedPart
from bytecheckpoint.adapters.fsdp1 import is_flattened
from bytecheckpoint.adapters.modules import plain_name
from bytecheckpoint.adapters.plain_data import join_fqn
from bytecheckpoint.adapters.tensors import unsupported

MODEL = "model"


class NamesParameters(Protocol):
    """An entry of the state that says what the parameters in it are called."""

    fqn: str

    def parameters(self) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Every parameter that is no flat memory, with its name in the model; a tied one once."""

    def in_optimizer(self) -> Iterator[tuple[int, Sequence[NamedPart]]]:
        """What an optimizer has in place of the others, by id, and what lies in it."""

    def tied_names(self) -> dict[str, str]:
        """The other names of tied tensors -> their first name."""


class ParameterNames(NamedTuple):
    """What one parameter is called."""

    name: str
    """Under which its optimizer state is saved."""
    fqns: tuple[str, ...]
    """All FQNs that it has in the state, or may have: several where it is tied, or stands in two modules."""
    elsewhere: tuple[str, ...] = ()
    """Those of them that lie in other modules than the first that has it."""


class OptimizedParameter(NamedTuple):
    """A parameter of a module, as an optimizer has it."""

    names: ParameterNames
    part: FlatPart | None
    """Where the optimizer has flat memory that holds a part of the parameter: which. None where it has all of it, as a
    tensor that says how it lies."""


def name_parameters(
    optimizer_fqn: str, parameters: Iterable[tuple[torch.Tensor, str | None]], modules: Sequence[NamesParameters]
) -> dict[int, list[OptimizedParameter]]:
    """What each tensor that an optimizer calls a parameter holds, by its id: one parameter, or parts of several.

    Each is given with the name that its optimizer knows it by.

    Raises CheckpointSaveError (unsupported_value) for a parameter that has no name or is given twice, and where two
    would have the same one.
    """
    parameters = list(parameters)
    in_modules = _found_in_modules({id(parameter) for parameter, _ in parameters}, modules)
    found: dict[int, list[OptimizedParameter]] = {}
    for parameter, own_name in parameters:
        of_parameter = in_modules.get(id(parameter))
        if of_parameter is None and is_flattened(parameter):
            what = "an optimizer with a flat parameter of an FSDP1 model that is not in the state"
            raise unsupported(optimizer_fqn, what, "pass the model beside it")
        if of_parameter is None and own_name is None:
            raise unsupported(
                optimizer_fqn,
                f"an optimizer with a parameter of shape {list(parameter.shape)} that no module of the state has",
                "pass the model beside it, or build the optimizer from model.named_parameters()",
            )
        if id(parameter) in found:
            name = next((optimized.names.name for optimized in found[id(parameter)]), "without a name")
            what = f"a list of optimizers of which two hold the parameter {name}"
            raise unsupported(optimizer_fqn, what, "give each optimizer a name of its own in the state")
        alone = None if own_name is None else OptimizedParameter(_alone(own_name), None)
        found[id(parameter)] = of_parameter or ([] if alone is None else [alone])
    _check_unique(optimizer_fqn, [optimized for of_one in found.values() for optimized in of_one])
    return found


def _found_in_modules(wanted: set[int], modules: Sequence[NamesParameters]) -> dict[int, list[OptimizedParameter]]:
    """By the id of what the optimizer has. The first module that has it gives it its name."""
    found: dict[int, list[OptimizedParameter]] = {}
    for entry in modules:
        parts: dict[int, Sequence[NamedPart | str]] = {}
        for parameter, name in entry.parameters():
            if id(parameter) in wanted:
                parts.setdefault(id(parameter), (name,))
        parts |= {flat_id: of_flat for flat_id, of_flat in entry.in_optimizer() if flat_id in wanted}
        others: dict[str, list[str]] = {}
        for other, name in entry.tied_names().items() if parts else ():
            others.setdefault(name, []).append(other)
        names = partial(_names_of, entry.fqn, others)
        for parameter_id, of_one in parts.items():
            new = [_optimized(part, names) for part in of_one]
            first = found.get(parameter_id)
            found[parameter_id] = new if first is None else list(map(_merged, first, new))
    return found


def _names_of(entry_fqn: str, others: Mapping[str, Sequence[str]], name: str) -> ParameterNames:
    fqns = tuple(join_fqn(entry_fqn, each) for each in (name, *others.get(name, ())))
    return ParameterNames(name if entry_fqn == MODEL else fqns[0], fqns)


def _optimized(part: NamedPart | str, names: Callable[[str], ParameterNames]) -> OptimizedParameter:
    if isinstance(part, str):
        return OptimizedParameter(names(part), None)
    return OptimizedParameter(names(part.name), part.part)


def _merged(first: OptimizedParameter, other: OptimizedParameter) -> OptimizedParameter:
    """Of one that stands in two modules: the first of them gives it its name."""
    names, more = first.names, other.names.fqns
    return first._replace(names=ParameterNames(names.name, names.fqns + more, names.elsewhere + more))


def _alone(name: str) -> ParameterNames:
    """Of a parameter that only its optimizer has a name for: it may have been saved beside a model."""
    name = plain_name(name)
    return ParameterNames(name, (name, join_fqn(MODEL, name)))


def _check_unique(optimizer_fqn: str, optimized: Collection[OptimizedParameter]) -> None:
    """Parts of one parameter share a name, and nothing else does."""
    if len({of_parameter.names.name for of_parameter in optimized}) == len(optimized):
        return
    owners: dict[str, OptimizedParameter] = {}
    for of_parameter in optimized:
        owner = owners.setdefault(of_parameter.names.name, of_parameter)
        are_parts = owner.part is not None and of_parameter.part is not None
        if owner is not of_parameter and not (are_parts and owner.names == of_parameter.names):
            both = f"{owner.names.fqns[0]} and {of_parameter.names.fqns[0]}"
            what = f"an optimizer that would save {both} under one name, {of_parameter.names.name}"
            raise unsupported(optimizer_fqn, what, "give one of the two another name in the state")


def check_state_key(fqn: str, key: object) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a key of optimizer state that no FQN can end with."""
    if type(key) is not str or not key or "." in key:
        raise unsupported(fqn, f"optimizer state with the key {key!r}", "use names without dots as keys")
