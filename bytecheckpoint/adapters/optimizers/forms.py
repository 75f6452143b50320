"""The forms in which a state may hold the state of an optimizer by parameter name: `get_optimizer_state_dict` of
torch.distributed.checkpoint nests it, or flattens it to one level. A checkpoint may have it in the other of the two, or
in the library's own form; tensors have the same names in all three, so only the plain data is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from bytecheckpoint.adapters.key_map import SortedNames
from bytecheckpoint.adapters.optimizers.hyperparameters import same_value
from bytecheckpoint.adapters.optimizers.stored_optimizer import BY_POSITION, is_optimizer_tree, split_state_path
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn

_STATE, _GROUPS, _PARAMS, _NAMES = "state", "param_groups", "params", "param_names"
_BESIDE = ("elsewhere", "facts", "outside_model")
"""Keys of the library's own form that a conversion writes beside those of torch."""


class Form(NamedTuple):
    """The form in which a state holds the state of an optimizer."""

    is_own: bool = False
    """True for the library's own form of optimizers."""
    groups: Sequence[Sequence[str]] | None = None
    """The names of the parameters in each group, for the nested form; None for the other forms."""
    keys: frozenset[str] | None = None
    """Keys that a parameter's state may have. If set, stored state with other keys is loaded as a state_dict."""
    is_numbered: bool = False
    """True for the form of state_dict() of torch's optimizers, with numbers for parameters."""
    beside: frozenset[str] = frozenset()
    """Keys of `_BESIDE` that a nested or numbered form has beside those of torch."""


OWN, FLAT, NUMBERED = Form(is_own=True), Form(), Form(is_numbered=True)

Parse = Callable[[Mapping[Any, Any]], dict[str, Any] | None]
"""Turns a nested or flat tree into the library's own form, tensors or their references included; None for any other."""


@runtime_checkable
class ShowsOptimizers(Protocol):
    """An entry of the state that may hold the state of optimizers."""

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns forms by state FQN."""


def forms_of(entries: Iterable[object]) -> dict[str, Form]:
    """Returns the forms of all optimizer state in these entries, by state FQN."""
    shown = [entry.optimizer_forms() for entry in entries if isinstance(entry, ShowsOptimizers)]
    return {fqn: form for forms in shown for fqn, form in forms.items()}


def forms_in(value: Any, fqn: str) -> dict[str, Form]:
    """Returns the forms of the optimizer state in a tree of plain data, by state FQN: nested, flat or numbered."""
    if not isinstance(value, dict):
        return {}
    if (form := _form_of(value)) is not None:
        return {fqn: form}
    dicts = {kind for kind in set(map(type, value.values())) if issubclass(kind, dict)}
    below = [(key, item) for key, item in value.items() if type(item) in dicts] if dicts else []
    return {name: each for key, item in below for name, each in forms_in(item, join_fqn(fqn, key)).items()}


def _form_of(value: Mapping[Any, Any]) -> Form | None:
    groups = value.get(_GROUPS)
    beside = frozenset(key for key in _BESIDE if isinstance(value.get(key), dict))
    if isinstance(groups, list) and value.keys() <= {_STATE, _GROUPS, *beside}:
        names = [group.get(_PARAMS) for group in groups if isinstance(group, dict)]
        if any(names) and all(isinstance(of_group, list) and set(map(type, of_group)) <= {int} for of_group in names):
            return NUMBERED._replace(beside=beside)
        are_names = all(isinstance(of_group, list) and set(map(type, of_group)) <= {str} for of_group in names)
        are_names = are_names and any(names)
        return Form(groups=[list(of_group or ()) for of_group in names], beside=beside) if are_names else None
    starts = (f"{_STATE}.", f"{_GROUPS}.")
    is_flat = bool(value) and all(type(key) is str and key.startswith(starts) for key in value)
    return FLAT if is_flat and any(key.startswith(starts[1]) for key in value) else None


class Reshaping(NamedTuple):
    """Puts the plain data of a checkpoint into the forms that a state has."""

    forms: Mapping[str, Form]
    """Forms by state FQN."""
    parse: Parse

    def reshaped(self, tree: Any, fqn: str, rename: Callable[[str], str], tensors: SortedNames) -> Any:
        """Returns the tree of this checkpoint FQN, with optimizers in it in the forms that the state has; the tree
        itself if nothing changes. `rename` turns a checkpoint FQN into a state FQN; `tensors` are the checkpoint FQNs
        of all tensors.
        """
        if not isinstance(tree, dict):
            return tree
        name = rename(fqn)
        if name in self.forms:
            return self._in_form(self.forms[name], tree, fqn, tensors)
        below = f"{name}." if name else ""
        if is_optimizer_tree(tree) or not any(name.startswith(below) for name in self.forms):
            return tree
        items = {key: self.reshaped(item, join_fqn(fqn, key), rename, tensors) for key, item in tree.items()}
        return type(tree)(items) if any(items[key] is not tree[key] for key in items) else tree

    def _in_form(self, form: Form, tree: dict[Any, Any], fqn: str, tensors: SortedNames) -> Any:
        if form.beside:
            found = self._in_form(form._replace(beside=frozenset()), tree, fqn, tensors)
            return found | {key: tree[key] for key in form.beside if key in tree}
        stored = OWN if is_optimizer_tree(tree) else _form_of(tree)
        if stored is not None and stored._replace(beside=frozenset()) == form:
            return tree
        own = tree if stored == OWN else self.parse(_without_names(tree))
        if own is None:
            return _with_numbers(tree, fqn, tensors) if form.keys is not None else tree
        if form.is_own and _holds_more(form, own, fqn, tensors):
            return _with_numbers(tree, fqn, tensors)
        if form.is_own:
            return own if stored == OWN else _without_refs(own, fqn)
        if form == NUMBERED and stored == OWN:
            return _with_numbers(tree, fqn, tensors)
        if form == NUMBERED or BY_POSITION in own:
            return tree
        whole = own if stored != OWN else _with_refs(own, fqn, tensors)
        shown = _flat(whole) if form == FLAT else _nested(whole, form.groups or ())
        facts = own.get("facts")
        return {**shown, "facts": facts} if facts else shown


def _holds_more(form: Form, own: Mapping[str, Any], fqn: str, tensors: SortedNames) -> bool:
    """Returns True if an optimizer was saved by position, as in a state_dict(), and has state under keys that are not
    among `form.keys`; False if these are not set.
    """
    if form.keys is None or BY_POSITION not in own:
        return False
    return any(not form.keys >= values.keys() for values in _with_refs(own, fqn, tensors)[_STATE].values())


def _with_numbers(tree: Any, fqn: str, tensors: SortedNames) -> Any:
    """Returns the tree, with each optimizer that was saved by position in the form of its state_dict()."""
    if not isinstance(tree, dict):
        return tree
    if not (is_optimizer_tree(tree) and BY_POSITION in tree):
        items = {key: _with_numbers(item, join_fqn(fqn, key), tensors) for key, item in tree.items()}
        return type(tree)(items) if any(items[key] is not tree[key] for key in items) else tree
    state = {int(name): values for name, values in _with_refs(tree, fqn, tensors)[_STATE].items()}
    groups = [{**group["values"], _PARAMS: list(map(int, group[_PARAMS]))} for group in tree["groups"].values()]
    return {_STATE: state, _GROUPS: groups}


def _without_names(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Returns the tree without the names that torch puts beside numbers: its tensors are called by the numbers."""
    groups = tree.get(_GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return tree
    return {**tree, _GROUPS: [{key: item for key, item in group.items() if key != _NAMES} for group in groups]}


def _without_refs(tree: Mapping[str, Any], fqn: str) -> dict[str, Any]:
    """Returns the library's own tree without references to tensors whose names say where they belong."""
    prefix = f"{join_fqn(fqn, _STATE)}."
    state = {
        name: {
            key: value
            for key, value in values.items()
            # By the type first: an array would be compared element by element.
            if type(value) is not TensorRef or value.fqn != f"{prefix}{name}.{key}"
        }
        for name, values in tree[_STATE].items()
    }
    return {**tree, _STATE: {name: plain for name, plain in state.items() if plain}}


def _with_refs(tree: Mapping[str, Any], fqn: str, tensors: SortedNames) -> dict[str, Any]:
    """Returns the library's own tree with a reference for each tensor of the optimizer."""
    known = {name for group in tree["groups"].values() for name in group[_PARAMS]}
    state = {name: dict(values) for name, values in tree[_STATE].items()}
    state_fqn = join_fqn(fqn, _STATE)
    for tensor in tensors.below(state_fqn):
        name, key = split_state_path(tensor[len(state_fqn) + 1 :], known)
        if name and "." not in key:  # the tree itself refers to tensors in containers
            state.setdefault(name, {})[key] = TensorRef(tensor)
    return {**tree, _STATE: state}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for name, values in tree[_STATE].items() for key, value in _items(f"{_STATE}.{name}", values)}
    for group in tree["groups"].values():
        for name in group[_PARAMS]:
            flat |= {f"{_GROUPS}.{name}.{key}": value for key, value in group["values"].items()}
    return flat


def _items(name: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _items(f"{name}.{key}", value)
        else:
            yield f"{name}.{key}", value


def flat_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flat form of a nested state_dict, in which parameters have names."""
    groups = {
        str(index): {_PARAMS: group[_PARAMS], "values": {key: item for key, item in group.items() if key != _PARAMS}}
        for index, group in enumerate(state_dict[_GROUPS])
    }
    return _flat({_STATE: state_dict[_STATE], "groups": groups})


def _nested(tree: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns the nested form, grouped as in `groups` if these fit the saved parameters and values, else as saved."""
    by_name = {name: group["values"] for group in tree["groups"].values() for name in group[_PARAMS]}
    names = {name for of_group in groups for name in of_group}
    pairs = ((name, of_group[0]) for of_group in groups for name in of_group)
    if names != by_name.keys() or not all(same_value(by_name[name], by_name[first]) for name, first in pairs):
        groups = [list(group[_PARAMS]) for group in tree["groups"].values()]
    values = [by_name[of_group[0]] if of_group else {} for of_group in groups]
    nested = [{**values, _PARAMS: list(of_group)} for values, of_group in zip(values, groups, strict=True)]
    return {_STATE: tree[_STATE], _GROUPS: nested}
