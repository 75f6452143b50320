"""Trees of plain data, tensors and tensor subclasses: their leaves by FQN, and trees with other leaves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch

from bytecheckpoint.adapters.native.subclass_flatten import is_subclass, parts_of
from bytecheckpoint.adapters.native.subclass_metadata import FACTS
from bytecheckpoint.adapters.shards import PLAIN_TENSORS
from bytecheckpoint.adapters.torch_types import loaded_dtensor
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, TensorRef, too_deep, unsupported

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_LONGEST_INT = 20
"""Characters of the longest int that is a key, one of 64 bits."""
_LEAVES = frozenset({*_SCALARS, TensorRef, *PLAIN_TENSORS})
"""Types of leaves. Without DTensor: a DTensor of a tensor subclass has inner tensors below it."""


def atoms() -> frozenset[type | None]:
    """Returns the types of values that are neither objects with an adapter of their own nor contain such objects: most
    of a state. None stands in place of DTensor while that is not loaded.
    """
    return _with_type(loaded_dtensor())


@cache
def _with_type(kind: type | None) -> frozenset[type | None]:
    return _LEAVES | {kind}


def leaves(value: Any, fqn: str, *, may_repeat: bool = False) -> dict[str, Any]:
    """Returns the leaves of a tree by FQN: what is loaded, compared and renamed one by one.

    Dicts and tensor subclasses are taken apart down to their last key, lists and tuples only where they hold tensors;
    an empty container is a leaf.

    Raises CheckpointSaveError (unsupported_value) where two leaves would have the same FQN, or for a tree nested deeper
    than MAX_DEPTH. With `may_repeat`, one of two leaves of the same FQN is left out.
    """
    found: dict[str, Any] = {}
    _add_leaves(value, fqn, found, MAX_DEPTH, may_repeat=may_repeat)
    return found


def _add_leaves(value: Any, fqn: str, found: dict[str, Any], depth: int, *, may_repeat: bool) -> None:
    if depth == 0:
        raise too_deep(fqn)
    children = _children(value, fqn)
    if not children:
        if fqn in found and not may_repeat:
            raise unsupported(fqn, "the name of two values", "rename a key that contains a dot, or mixes int and str")
        found[fqn] = value
    prefix = f"{fqn}." if fqn else ""
    if depth > 1:
        below = {f"{prefix}{key}": item for key, item in children}
        is_simple = _LEAVES.issuperset(map(type, below.values()))  # as most of a state is
        if is_simple and len(below) == len(children) and fqn not in below and found.keys().isdisjoint(below):
            found.update(below)
            return
    for key, item in children:
        child = f"{prefix}{key}"
        if child == fqn and not may_repeat:  # an empty key below an empty name
            raise unsupported(fqn, "the name of two values", "give the value with the empty key a name")
        if type(item) in _LEAVES and depth > 1 and child not in found:
            found[child] = item
        else:
            _add_leaves(item, child, found, depth - 1, may_repeat=may_repeat)


def _children(value: Any, fqn: str) -> Collection[tuple[object, Any]]:
    """Returns key and item of what a container holds; nothing for a leaf, such as a list without tensors."""
    if isinstance(value, dict):
        return value.items()
    if type(value) in (list, tuple) and _holds_tensor(value, fqn, MAX_DEPTH):
        return list(enumerate(value))
    return parts_of(fqn, value).items() if is_subclass(value) else []


def _holds_tensor(value: Any, fqn: str, depth: int) -> bool:
    if isinstance(value, torch.Tensor | TensorRef):
        return True
    if depth == 0:
        raise too_deep(fqn)
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    if depth > 1 and _SCALARS.issuperset(map(type, items)):  # such as the 625 ints of a random number generator
        return False
    return any(_holds_tensor(item, fqn, depth - 1) for item in items)


def with_leaves(value: Any, fqn: str, new: Mapping[str, Any]) -> Any:
    """Returns the tree with new leaves, or new values for dicts of the parts of a subclass: dicts and lists are changed
    in place, tuples made anew. Leaves not in `new` stay, and so do those of subclasses, which are filled in place.
    """
    children = _children(value, fqn)
    # A container of the name of a leaf stays: {"a.b": 1, "a": {"b": {"c": 2}}}.
    if fqn in new and (not children or (isinstance(value, dict) and FACTS in value)):
        return new[fqn]
    if not children or isinstance(value, torch.Tensor):
        return value
    prefix = f"{fqn}." if fqn else ""
    filled = [(key, with_leaves(item, f"{prefix}{key}", new)) for key, item in children]
    if type(value) is tuple:
        return tuple(item for _, item in filled)
    for key, item in filled:
        value[key] = item
    return value


def descend(tree: Any, path: str) -> Any:
    """Returns the item of a tree at these keys, joined by dots; None if there is none, or if it is None. A key may be
    empty, or hold dots itself.
    """
    for end in (*(at for at, character in enumerate(path) if character == "."), len(path)):
        for item in _items(tree, path[:end]):
            found = item if end == len(path) else descend(item, path[end + 1 :])
            if found is not None:
                return found
    return None


def _items(tree: Any, name: str) -> list[Any]:
    """Returns the items of a dict, list or tuple whose key or index has this text: two of a dict that has it as str and
    as int. None of other values.
    """
    number = int(name) if len(name) <= _LONGEST_INT and name.removeprefix("-").isdecimal() else None
    if str(number) != name:
        number = None
    if isinstance(tree, dict):
        return [tree[key] for key in ((name,) if number is None else (name, number)) if key in tree]
    is_index = type(tree) in (list, tuple) and number is not None and 0 <= number < len(tree)
    return [tree[number]] if is_index else []


def has_attributes(value: object, *names: str) -> bool:
    """Returns True if an object or its class has all of these, without getting their values. Dicts, lists, tuples and
    instances of their subclasses, such as named tuples, are data and never have them.
    """
    if isinstance(value, dict | list | tuple):
        return False
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots only
        own = {}
    return all(name in own or any(name in vars(cls) for cls in type(value).__mro__) for name in names)
