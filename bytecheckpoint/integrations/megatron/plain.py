"""Arguments and the rerun state of Megatron-LM as plain data, and back: no enums, no named tuples, no pickles."""

from __future__ import annotations

import enum
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.errors import CheckpointMismatchError

_PLAIN = (bool, int, float, str, type(None))
_CLASS, _ITEMS = "class", "items"
"""Keys of a dict that stands for an enum or a named tuple, which `with_classes` makes of it."""


def plain_arguments(args: Namespace) -> dict[str, Any]:
    """Returns Megatron's arguments by name. Values that are no plain data, such as dtypes and functions, are text."""
    return {name: _plain_argument(value) for name, value in sorted(vars(args).items())}


def _plain_argument(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain_argument(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain_argument(each) for key, each in value.items()}
    return str(value)


def without_classes(value: Any) -> Any:
    """Returns the tree with its enums and named tuples replaced by dicts, which `with_classes` turns back."""
    if isinstance(value, enum.Enum):
        return {_CLASS: type(value).__name__, _ITEMS: [value.value]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {_CLASS: type(value).__name__, _ITEMS: [without_classes(each) for each in value]}
    if isinstance(value, Mapping):
        return {key: without_classes(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_classes(each) for each in value)
    return value


def with_classes(value: Any, module: Any) -> Any:
    """Undoes `without_classes`: returns the tree with its enums and named tuples, whose classes are taken from
    `module`. Raises CheckpointMismatchError (conflict) for a name that is no such class there.
    """
    if isinstance(value, Mapping) and value.keys() == {_CLASS, _ITEMS}:
        return _class_of(value[_CLASS], module)(*[with_classes(each, module) for each in value[_ITEMS]])
    if isinstance(value, Mapping):
        return {key: with_classes(each, module) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_classes(each, module) for each in value)
    return value


def _class_of(name: str, module: Any) -> Any:
    kind = vars(module).get(name)
    # Hazard: the checkpoint says what is called here.
    if isinstance(kind, type) and (
        issubclass(kind, enum.Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
    ):
        return kind
    raise CheckpointMismatchError(
        f"the checkpoint names {name!r:.200}, which is no enum or named tuple of the {module.__name__} that is "
        "installed; what was loaded is not complete: load with the release of Megatron that saved it",
        kind="conflict",
    )
