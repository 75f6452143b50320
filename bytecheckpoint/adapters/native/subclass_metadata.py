"""Metadata of a tensor subclass besides its inner tensors, as plain data: its class by name, what its
`__tensor_flatten__` returns as context, and the shape, stride and dtype that it shows.

A context may hold plain data, enum members, dataclasses, named tuples and devices. Nothing is imported for a
checkpoint: classes are found only where the program has imported them already, and no constructor but that of the
tensor is called.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isnan
from types import MemberDescriptorType
from typing import Any

import torch

from bytecheckpoint.adapters.shards import dtype_name, torch_dtype
from bytecheckpoint.manifest.plain_wire import unsupported

FACTS = "@subclass"
"""Key of the metadata of a subclass, beside its inner tensors. No attribute has such a name."""

_ENUM, _DATACLASS, _NAMEDTUPLE = "@enum", "@dataclass", "@namedtuple"
_DEVICE, _OUTER = "@device", "@shape"
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype})
_SEQUENCES: Mapping[str, type] = {"list": list, "tuple": tuple, "Size": torch.Size}

Facts = list[dict[str, Any]]
"""One dict in a list, so that it is one leaf of a tree: `class`, `context`, `shape`, `stride` and `dtype`."""


def facts_of(fqn: str, tensor: torch.Tensor, context: Any, shown: torch.Tensor) -> Facts:
    """Returns the facts of a subclass with this context; `shown` is the DTensor that holds it, or the tensor itself.

    In a context, a marker replaces the shape of the tensor, because each shard has another: where it is a torch.Size,
    or a list or tuple under the key `shape` or `size`. Any other list stays as it is, also if it equals the shape.
    Raises CheckpointSaveError (unsupported_value) for a context of more than plain data, enum members, dataclasses,
    named tuples and devices.
    """
    name = _name_of(type(tensor))

    def refuse(value: Any) -> Exception:
        what = f"a tensor subclass, {name}, whose context holds an object of type {_name_of(type(value))}"
        return unsupported(fqn, what, "save the plain tensors that it is made of")

    plain = _to_plain(context, tuple(tensor.shape), refuse)
    facts = {"class": name, "context": plain, "shape": list(shown.shape), "stride": list(shown.stride())}
    return [{**facts, "dtype": dtype_name(shown.dtype)}]


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _to_plain(value: Any, shape: tuple[int, ...], refuse: Callable[[Any], Exception]) -> Any:
    """Returns a part of a context as plain data: objects become dicts with a marker, whose values stay but for devices
    and for the shape of the tensor, which `context_of` is given anew. Raises `refuse(value)` for any other value.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is torch.Size:
        return {_OUTER: kind.__name__} if tuple(value) == shape else value
    if kind in (list, tuple):
        return kind(_to_plain(item, shape, refuse) for item in value)
    if kind is dict and all(type(key) is int or (type(key) is str and key[:1] != "@") for key in value):
        return {
            key: {_OUTER: type(item).__name__} if _is_shape(key, item, shape) else _to_plain(item, shape, refuse)
            for key, item in value.items()
        }
    if _is_namedtuple(kind):
        fields = _to_plain(dict(zip(kind._fields, value, strict=True)), shape, refuse)
        return {_NAMEDTUPLE: _name_of(kind), "fields": fields}
    if isinstance(value, torch.device):
        return {_DEVICE: None}
    if isinstance(value, enum.Enum) and value.name in kind.__members__:  # flags may be several in one
        return {_ENUM: _name_of(kind), "name": value.name}
    if dataclasses.is_dataclass(value) and _has_only_fields(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {_DATACLASS: _name_of(kind), "fields": _to_plain(fields, shape, refuse)}
    raise refuse(value)


def _is_shape(key: object, value: Any, shape: tuple[int, ...]) -> bool:
    is_list = key in ("shape", "size") and type(value) in (list, tuple)
    return is_list and tuple(value) == shape and all(type(item) is int for item in value)


def _is_namedtuple(cls: type[Any]) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and type(fields) is tuple and not hasattr(cls, "__del__")


def _has_only_fields(value: Any) -> bool:
    names = {field.name for field in dataclasses.fields(value)}
    return names >= getattr(value, "__dict__", {}).keys() and all(hasattr(value, name) for name in names)


def difference(own: Any, stored: Any) -> str | None:
    """Returns the differences between the facts in a checkpoint and those of a live subclass as text; None if none."""
    if not are_facts(stored):
        return "found no description of a tensor subclass"
    texts = [text for key, expected in own[0].items() for text in _differences(key, stored[0][key], expected)]
    return "; ".join(texts) or None


def _differences(name: str, stored: Any, expected: Any) -> list[str]:
    """Returns one text for each value that differs, in dicts with the same keys down to the last."""
    if type(stored) is dict and type(expected) is dict and stored.keys() == expected.keys():
        return [text for key in stored for text in _differences(f"{name} {key}", stored[key], expected[key])]
    if _is_same(stored, expected):
        return []
    return [f"{name} {stored!r:.80} in the checkpoint, {expected!r:.80} in the state"]


def _is_same(stored: Any, expected: Any) -> bool:
    if type(stored) is not type(expected):
        return False
    if type(stored) in (list, tuple):
        return len(stored) == len(expected) and all(map(_is_same, stored, expected))
    if type(stored) is dict:
        return stored.keys() == expected.keys() and all(_is_same(item, expected[key]) for key, item in stored.items())
    return bool(stored == expected) or (type(stored) is float and isnan(stored) and isnan(expected))


def are_facts(value: Any) -> bool:
    """Returns True if plain data describes a tensor subclass."""
    if type(value) is not list or len(value) != 1 or type(value[0]) is not dict:
        return False
    facts = value[0]
    shape, stride = facts.get("shape"), facts.get("stride")
    if type(shape) is not list or type(stride) is not list or len(shape) != len(stride):
        return False
    dtype = getattr(torch, str(facts.get("dtype")), None)
    is_named = type(facts.get("class")) is str and isinstance(dtype, torch.dtype)
    return "context" in facts and is_named and all(type(length) is int and length >= 0 for length in (*shape, *stride))


def class_of(facts: Any) -> type[Any]:
    """Returns the class named. Raises LookupError unless it is an imported tensor subclass that torch can unflatten."""
    if not are_facts(facts):
        raise LookupError("found no description of a tensor subclass")
    cls = _imported(facts[0]["class"])
    if not (issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_unflatten__")):
        raise LookupError(f"{_name_of(cls)} is not a tensor subclass with __tensor_unflatten__")
    return cls


def context_of(facts: Facts, shape: Sequence[int], device: torch.device) -> Any:
    """Returns the context for `__tensor_unflatten__` of a tensor that shows this shape, on this device.

    Raises LookupError where the facts need a class that is not imported, or are damaged.
    """
    return _from_plain(facts[0]["context"], tuple(shape), device)


def dtype_of(facts: Facts) -> torch.dtype:
    return torch_dtype(facts[0]["dtype"])


def _from_plain(value: Any, shape: tuple[int, ...], device: torch.device) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_from_plain(item, shape, device) for item in value)
    if type(value) is not dict:
        return value
    if _OUTER in value:
        sequence = _SEQUENCES.get(value[_OUTER]) if type(value[_OUTER]) is str else None
        if sequence is None:
            raise LookupError(f"{value[_OUTER]!r:.80} is not a kind of shape")
        return sequence(shape)
    if _DEVICE in value:
        return device
    if _ENUM in value:
        return _member(value)
    if _NAMEDTUPLE in value:
        return _namedtuple(value, shape, device)
    if _DATACLASS in value:
        return _dataclass(value, shape, device)
    return {key: _from_plain(item, shape, device) for key, item in value.items()}


def _member(value: Mapping[str, Any]) -> enum.Enum:
    cls, name = _imported(value[_ENUM]), value.get("name")
    if not issubclass(cls, enum.Enum) or type(name) is not str or name not in cls.__members__:
        raise LookupError(f"{value[_ENUM]} is not an enum with a member {name!r:.80}")
    return cls.__members__[name]


def _namedtuple(value: Mapping[str, Any], shape: tuple[int, ...], device: torch.device) -> Any:
    cls, fields = _imported(value[_NAMEDTUPLE]), _fields(value)
    if not _is_namedtuple(cls) or set(cls._fields) != fields.keys():
        raise LookupError(f"{value[_NAMEDTUPLE]} is not a named tuple with the fields {list(fields)}")
    made: Any = tuple.__new__(cls, (_from_plain(fields[name], shape, device) for name in cls._fields))
    return made


def _fields(value: Mapping[str, Any]) -> dict[str, Any]:
    fields = value.get("fields")
    if type(fields) is not dict:
        raise LookupError(f"{fields!r:.80} are not fields")
    return fields


def _runs_code(cls: type[Any], names: Collection[str]) -> bool:
    """Returns True if setting these fields, or deleting an object of the class, runs code of the class."""
    found = [inspect.getattr_static(cls, name, None) for name in names]
    is_set_by_code = any(hasattr(type(one), "__set__") and not isinstance(one, MemberDescriptorType) for one in found)
    return is_set_by_code or hasattr(cls, "__del__")


def _dataclass(value: Mapping[str, Any], shape: tuple[int, ...], device: torch.device) -> Any:
    """Returns the dataclass instance of this plain data. Raises LookupError where making it would run other code."""
    cls, fields = _imported(value[_DATACLASS]), _fields(value)
    names = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else None
    if names != fields.keys():
        raise LookupError(f"{value[_DATACLASS]} is not a dataclass with the fields {list(fields)}")
    if _runs_code(cls, fields):
        raise LookupError(f"{value[_DATACLASS]} is more than a dataclass: it runs code of its own")
    try:
        made = object.__new__(cls)  # its __init__ may do anything
    except TypeError as error:
        raise LookupError(f"{value[_DATACLASS]} is more than a dataclass: {error}") from error
    for name, item in fields.items():
        object.__setattr__(made, name, _from_plain(item, shape, device))
    return made


def _imported(name: str) -> type[Any]:
    """Returns the class of this name. Raises LookupError unless its module is imported: importing it would run code."""
    parts = str(name).split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = None if found is None else vars(found).get(part) if hasattr(found, "__dict__") else None
        if isinstance(found, type):
            return found
    raise LookupError(f"there is no class {name} in this process; import the module that defines it, and load again")
