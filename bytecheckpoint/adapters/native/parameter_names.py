"""The names of an optimizer's parameters, in a checkpoint and in the state. Knows nothing of what is stored.

A parameter in the entry whose FQN is `model` is named as in that entry, any other by its FQN. Modules come first,
then the optimizer's own names, then tensors that stand in the state by themselves, such as a learned temperature. So a
name depends on nothing that other ranks hold, and on nothing else that the state holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.frameworks.flat_parameters import FlatParamPart, NamedPart
from bytecheckpoint.adapters.frameworks.fsdp1 import is_flattened
from bytecheckpoint.adapters.native.module_parts import plain_name
from bytecheckpoint.adapters.shards import NEW_TUPLE
from bytecheckpoint.manifest.plain_wire import join_fqn, unsupported

MODEL_FQN = "model"


class NamesParameters(Protocol):
    """An entry of the state that says what the parameters in it are called."""

    fqn: str

    @property
    def parameter_names(self) -> Mapping[int, str]:
        """The names in the entry of all parameters that are not flat memory, by id; of a tied one the first."""

    def in_optimizer(self) -> Iterator[tuple[int, Sequence[NamedPart]]]:
        """Yields the id of each tensor of flat memory that an optimizer may have, with the parts that lie in it."""

    def tied_names(self) -> dict[str, str]:
        """Returns the other names of tied tensors -> their first name."""


class HoldsTensors(Protocol):
    """An entry of the state with tensors that belong to no module."""

    fqn: str

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the state FQN of each tensor, and the tensor."""


class ParameterNames(NamedTuple):
    """The names of one parameter."""

    name: str
    """Name under which its optimizer state is saved."""
    fqns: tuple[str, ...]
    """All FQNs that it has in the state, or may have: several where it is tied, or stands in two modules."""
    elsewhere: tuple[str, ...] = ()
    """Its FQNs in other modules than the first that has it, or its further FQNs if it belongs to none."""

    @property
    def is_outside_model(self) -> bool:
        """True if its name is the FQN that it has in a module other than `model`, or as a tensor of no module."""
        return self.name == self.fqns[0] and join_fqn(MODEL_FQN, self.name) not in self.fqns


class OptimizedParameter(NamedTuple):
    """A parameter of which an optimizer has a part, in flat memory."""

    names: ParameterNames
    part: FlatParamPart


class OptimizedParameters(NamedTuple):
    """Contents of each tensor that an optimizer calls a parameter, by the tensor's id."""

    whole: dict[int, ParameterNames]
    """Tensors that are one parameter each, with its shape and placements."""
    flat: dict[int, list[OptimizedParameter]]
    """Tensors of flat memory, with the parts of parameters in each."""

    def names(self, parameters: Iterable[torch.Tensor]) -> list[ParameterNames]:
        """Returns the names of the parameters that lie in these tensors, wholly or in part."""
        whole, flat = self
        if not flat:
            return [whole[id(parameter)] for parameter in parameters]
        found: list[ParameterNames] = []
        for key in map(id, parameters):
            found += [whole[key]] if key in whole else [of_part.names for of_part in flat[key]]
        return found

    def all_names(self) -> Iterator[ParameterNames]:
        yield from self.whole.values()
        for of_one in self.flat.values():
            yield from (of_part.names for of_part in of_one)


def name_parameters(
    optimizer_fqn: str,
    parameters: Iterable[tuple[torch.Tensor, str | None]],
    modules: Sequence[NamesParameters],
    others: Sequence[HoldsTensors],
) -> OptimizedParameters:
    """Names the contents of the tensors that an optimizer calls parameters. Each is given with the name that the
    optimizer itself has for it, or None.

    `others` are the entries of the state with tensors beside modules. Raises CheckpointSaveError (unsupported_value)
    for a parameter that has no name or is given twice, and if two would have the same name.
    """
    parameters = list(parameters)
    in_modules = _found_in_modules(dict.fromkeys(id(parameter) for parameter, _ in parameters), modules)
    if len(in_modules.whole) == len(parameters) and not in_modules.flat:  # each once: nearly always
        _check_unique(optimizer_fqn, in_modules)
        return in_modules
    found = OptimizedParameters({}, {})
    whole, flat = found
    unnamed = {id(parameter) for parameter, own_name in parameters if own_name is None}
    alone = _found_alone(unnamed - in_modules.whole.keys() - in_modules.flat.keys(), others)
    for parameter, own_name in parameters:
        key = id(parameter)
        if key in whole or key in flat:
            name = next((names.name for names in found.names([parameter])), "without a name")
            what = f"a list of optimizers of which two hold the parameter {name}"
            raise unsupported(optimizer_fqn, what, "give each optimizer a name of its own in the state")
        if key in in_modules.whole:
            whole[key] = in_modules.whole[key]
        elif key in in_modules.flat:
            flat[key] = in_modules.flat[key]
        else:
            whole[key] = alone.get(key) or _named_by_optimizer(optimizer_fqn, parameter, own_name)
    _check_unique(optimizer_fqn, found)
    return found


def _found_in_modules(wanted: Collection[int], modules: Sequence[NamesParameters]) -> OptimizedParameters:
    """Merges the names that several modules have for the tensors with the `wanted` ids, without those that no module
    has. The first module that has a parameter names it; any may hold it in a flat parameter.
    """
    whole: dict[int, ParameterNames] = {}
    flat: dict[int, list[OptimizedParameter]] = {}
    for entry in modules:
        known = entry.parameter_names
        few, many = sorted((wanted, known), key=len)  # there may be as many modules, or optimizers, as parameters
        names = {parameter_id: known[parameter_id] for parameter_id in few if parameter_id in many}
        parts = {flat_id: held for flat_id, held in entry.in_optimizer() if flat_id in wanted}
        others: dict[str, list[str]] = {}
        for other, name in entry.tied_names().items() if names or parts else ():
            others.setdefault(name, []).append(other)
        prefix = f"{entry.fqn}." if entry.fqn else ""
        is_model = entry.fqn == MODEL_FQN
        for parameter_id, name in names.items():
            if name in others:
                of_parameter = _names_of(prefix, others, name, is_model=is_model)
            else:
                fqn = prefix + name
                of_parameter = NEW_TUPLE(ParameterNames, (name if is_model else fqn, (fqn,), ()))
            first = whole.setdefault(parameter_id, of_parameter)
            if first is not of_parameter:
                whole[parameter_id] = _merged(first, of_parameter)
        for flat_id, of_flat in parts.items():
            new = [
                OptimizedParameter(_names_of(prefix, others, name, is_model=is_model), part) for name, part in of_flat
            ]
            before = flat.get(flat_id)
            flat[flat_id] = new if before is None else list(map(_merged_part, before, new))
    for flat_id in flat:
        whole.pop(flat_id, None)
    return OptimizedParameters(whole, flat)


def _names_of(prefix: str, others: Mapping[str, Sequence[str]], name: str, *, is_model: bool) -> ParameterNames:
    fqn = prefix + name
    fqns = (fqn, *(prefix + other for other in others[name])) if name in others else (fqn,)
    return ParameterNames(name if is_model else fqn, fqns)


def _merged(first: ParameterNames, other: ParameterNames) -> ParameterNames:
    """Returns the names of a parameter that stands in two modules: the first of them names it."""
    return ParameterNames(first.name, first.fqns + other.fqns, first.elsewhere + other.fqns)


def _merged_part(first: OptimizedParameter, other: OptimizedParameter) -> OptimizedParameter:
    return OptimizedParameter(_merged(first.names, other.names), first.part)


def _found_alone(wanted: Collection[int], entries: Sequence[HoldsTensors]) -> dict[int, ParameterNames]:
    """Returns the names of the tensors with the `wanted` ids that stand in the state by themselves, by id."""
    found: dict[int, ParameterNames] = {}
    for entry in entries if wanted else ():
        prefix = f"{MODEL_FQN}." if entry.fqn == MODEL_FQN else ""
        for fqn, tensor in entry.tensors():
            key = id(tensor)
            if key in wanted and not is_flattened(tensor):
                names = ParameterNames(fqn.removeprefix(prefix), (fqn,))
                found[key] = _merged(found[key], names) if key in found else names
    return found


def _named_by_optimizer(optimizer_fqn: str, parameter: torch.Tensor, name: str | None) -> ParameterNames:
    """Returns the names of a parameter that only its optimizer names. A checkpoint may have it in a `model`. Raises
    CheckpointSaveError (unsupported_value) if it has no name, or is a flat parameter of FSDP1.
    """
    if is_flattened(parameter):
        what = "an optimizer with a flat parameter of an FSDP1 model that is not in the state"
        raise unsupported(optimizer_fqn, what, "pass the model beside it")
    if name is None:
        raise unsupported(
            optimizer_fqn,
            f"an optimizer with a parameter of shape {list(parameter.shape)} that no module of the state has",
            "pass the model beside it (the module itself, not its state_dict() and no object around it), or the "
            "parameter as a tensor of the state, or build the optimizer from model.named_parameters()",
        )
    name = plain_name(name)
    return ParameterNames(name, (name, join_fqn(MODEL_FQN, name)))


def _check_unique(optimizer_fqn: str, optimized: OptimizedParameters) -> None:
    """Raises CheckpointSaveError (unsupported_value) if two parameters share a name; parts of one parameter may."""
    all_names = list(optimized.all_names())
    if len({names.name for names in all_names}) == len(all_names):
        return
    of_parts = {id(of_part.names) for of_one in optimized.flat.values() for of_part in of_one}
    owners: dict[str, ParameterNames] = {}
    for names in all_names:
        owner = owners.setdefault(names.name, names)
        are_parts = id(owner) in of_parts and id(names) in of_parts
        if owner is not names and not (are_parts and owner == names):
            both = f"{owner.fqns[0]} and {names.fqns[0]}"
            what = f"an optimizer that would save {both} under one name, {names.name}"
            raise unsupported(optimizer_fqn, what, "give one of the two another name in the state")


def check_state_key(fqn: str, key: object) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a key of optimizer state that no FQN can end with."""
    if type(key) is not str or not key or "." in key:
        raise unsupported(fqn, f"optimizer state with the key {key!r}", "use names without dots as keys")
