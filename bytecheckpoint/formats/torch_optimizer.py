"""Turns the state_dict of a torch optimizer into the tree in which this library saves optimizers (docs/format.md): by
parameter name where the checkpoint has the names, else by position.

torch itself knows three forms: parameters by number, by name (torch.distributed.checkpoint.state_dict), and by name
with the whole state_dict flattened to one level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.manifest.plain_wire import MSGPACK_INTS, TensorRef

BY_POSITION = "by_position"
"""Key of a tree whose parameters are called "0", "1", ... as they follow one another in the groups."""

_BESIDE = ("elsewhere", "facts", "outside_model")
"""Keys of a tree that a conversion writes beside those of torch."""
_STATE, _GROUPS = "state.", "param_groups."


def as_saved_here(value: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Returns an optimizer's state_dict as the tree that this library saves, still with its tensors; None for a dict
    that is no such state_dict.
    """
    beside = {key: item for key, item in value.items() if key in _BESIDE and isinstance(item, dict)}
    if "param_groups" in value and value.keys() <= {"state", "param_groups", *beside}:
        tree = _tree_of_nested(value.get("state", {}), value["param_groups"])
        return tree and {**tree, **beside}
    if set(map(type, value)) != {str} or not any(key.startswith(_GROUPS) for key in value):
        return None
    is_flattened = all(key.startswith((_STATE, _GROUPS)) and key.count(".") > 1 for key in value)
    return _tree_of_flattened(value) if is_flattened else None


def without_tensors(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree without the TensorRefs that are values of a parameter's state, as their names say where they
    belong; those in lists and dicts there, and those in groups, stay.
    """
    state = {}
    for name, values in tree["state"].items():
        plain = {key: value for key, value in values.items() if not isinstance(value, TensorRef)}
        if plain:
            state[name] = plain
    return {**tree, "state": state}


def _tree_of_nested(state: Any, groups: Any) -> dict[str, Any] | None:
    """Returns the tree of a nested state_dict; None if it is not that of an optimizer."""
    if not isinstance(state, dict) or type(groups) is not list:
        return None
    if not all(isinstance(group, dict) and type(group.get("params")) is list for group in groups):
        return None
    if not all(isinstance(values, dict) for values in state.values()):
        return None
    keys = [key for group in groups for key in group["params"]]
    if not all(type(key) is str or (type(key) is int and key in MSGPACK_INTS) for key in keys):
        return None
    names = _names(groups)
    is_by_position = names is None and all(type(key) is int for key in keys)
    if len(set(map(str, keys))) < len(keys) or not (is_by_position or names or set(map(type, keys)) <= {str}):
        return None
    # Numbers are positions, unless the state_dict was put together by hand.
    by_key = dict(zip(keys, names or map(str, range(len(keys)) if is_by_position else keys), strict=True))
    by_text = {str(key): name for key, name in by_key.items()}
    tree: dict[str, Any] = {
        "state": {by_text.get(str(key), str(key)): values for key, values in state.items()},
        "groups": {},
    }
    if len(tree["state"]) < len(state):  # as of the keys 1 and "1"
        return None
    for index, group in enumerate(groups):
        params = dict.fromkeys(by_key[key] for key in group["params"])
        values = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        tree["groups"][next(iter(params), f"#{index}")] = {"params": params, "values": values}
    return tree | {BY_POSITION: True} if is_by_position else tree


def _names(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Returns the names that torch has put beside the numbers of parameters, of all groups in order; None if one is
    missing or repeated.
    """
    names = [group.get("param_names") for group in groups]
    counts = [len(group["params"]) for group in groups]
    if not all(type(of_group) is list for of_group in names) or [len(each or ()) for each in names] != counts:
        return None
    found = [name for of_group in names for name in of_group or ()]
    return found if all(type(name) is str for name in found) and len(set(found)) == len(found) else None


def _tree_of_flattened(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the tree of a flattened state_dict; None if one of its values would lie in another."""
    tree: dict[str, Any] = {"state": {}, "groups": {}}
    for path, item in value.items():
        if path.startswith(_GROUPS):
            name, _, key = path.removeprefix(_GROUPS).rpartition(".")
            group = tree["groups"].setdefault(name, {"params": {name: None}, "values": {}})
            if key not in {"params", "param_names"}:
                group["values"][key] = item
    for path, item in value.items():
        if path.startswith(_STATE):
            name, keys = _split(path.removeprefix(_STATE), tree["groups"])
            if not _put(tree["state"].setdefault(name, {}), keys, item):
                return None
    return tree


def _put(root: dict[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Puts a value into nested dicts, at its keys. Returns False, and does not put it, if another value is there or on
    the way.
    """
    at = root
    for key in keys[:-1]:
        at = at.setdefault(key, {})
        if type(at) is not dict:
            return False
    return at.setdefault(keys[-1], value) is value


def _split(path: str, names: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Splits the path of a value in the state into the parameter, the longest in `names`, and the keys below it. Takes
    the last part as the only key if no parameter matches.
    """
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in names:
            return name, parts[count:]
    return ".".join(parts[:-1]), parts[-1:]
