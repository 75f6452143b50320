"""The wire format of a manifest's plain values (docs/format.md): msgpack, and extension types for what msgpack lacks.

Readers of other formats and the adapters of live state encode with it. It knows no torch: each of these two passes a
LeafEncoder, which encodes tensors and the values that the other does not have.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec.msgpack import Ext, encode

from bytecheckpoint.errors import CheckpointSaveError

MAX_DEPTH = 64
"""Levels of nesting in a plain value."""
MAX_DIMS = 64
"""Dimensions of a tensor in a plain value, or in a file of another format."""

TUPLE, PAIRS, COMPLEX, SIZE, DTYPE, TENSOR, ARRAY, SCALAR, REF, BIG_INT, ORDERED, COUNTER = range(1, 13)
"""Codes of the extension types."""
MSGPACK_INTS = range(-(1 << 63), 1 << 64)
"""The integers that msgpack holds: those of int64 and of uint64."""
_MAX_INT_BITS = 14_284
"""Longer integers may have more than 4,300 decimal digits, which Python neither writes nor reads."""
_LONGEST_SHOWN_KEY = 60
WRITTEN_AS_THEY_ARE = frozenset({type(None), bool, float, bytes})
_ARRAY_KINDS, _TEXT_KINDS = "biufcSU", "SU"


class TensorRef(NamedTuple):
    """Stands in a tree for a tensor whose bytes lie in data files."""

    fqn: str


class LeafEncoder(Protocol):
    """Encodes the values of a tree that are not plain data of Python's or numpy's."""

    tensor_types: frozenset[type]
    """Types that `encode_tensor` takes."""

    def encode_tensor(self, fqn: str, tensor: Any) -> Ext: ...

    def encode_other(self, value: Any, fqn: str, levels_left: int) -> Any:
        """Returns the msgpack value that represents any other value; `levels_left` of nesting are still allowed, its
        own included. Raises CheckpointSaveError (unsupported_value).
        """


def encode_tree(value: Any, fqn: str, leaves: LeafEncoder) -> bytes:
    """Returns the tree below `fqn` as bytes.

    Raises CheckpointSaveError (unsupported_value), naming the FQN, for a value that is not plain data or is nested too
    deep.
    """
    return encode(to_wire(value, fqn, leaves, MAX_DEPTH))


def join_fqn(fqn: str, key: object) -> str:
    return f"{fqn}.{key}" if fqn else str(key)


def is_at_or_below(fqn: str, roots: set[str]) -> bool:
    """Returns True if an FQN is one of the roots or starts with one of them and a dot."""
    parts = fqn.split(".")
    return any(".".join(parts[:count]) in roots for count in range(1, len(parts) + 1))


def ext(code: int, content: Any) -> Ext:
    return Ext(code, encode(content))


def to_wire(value: Any, fqn: str, leaves: LeafEncoder, levels_left: int) -> Any:
    """Returns the msgpack value for a value at this FQN; `levels_left` of nesting are allowed, its own included."""
    if levels_left == 0:
        raise too_deep(fqn)
    kind = type(value)
    if kind in WRITTEN_AS_THEY_ARE:
        return value
    if kind is str:
        return checked_text(value, fqn)
    if kind is int:
        return value if value in MSGPACK_INTS else _big_int_to_wire(value, fqn)
    if kind in leaves.tensor_types:
        return leaves.encode_tensor(fqn, value)
    if kind is TensorRef:
        return ext(REF, value.fqn)
    if kind in (list, tuple):
        items = value
        if levels_left == 1 or not _are_written_as_they_are(value):
            items = [to_wire(item, join_fqn(fqn, index), leaves, levels_left - 1) for index, item in enumerate(value)]
        return items if kind is list else ext(TUPLE, items)
    if kind in (dict, OrderedDict, Counter):
        return dict_to_wire(value, fqn, leaves, levels_left)
    if kind is complex:
        return Ext(COMPLEX, struct.pack("<dd", value.real, value.imag))
    if _is_plain_array(value):
        content = [value.dtype.str, list(value.shape), _content_of_array(value)]
        return ext(ARRAY if isinstance(value, np.ndarray) else SCALAR, content)
    return leaves.encode_other(value, fqn, levels_left)


def _are_written_as_they_are(items: Sequence[Any]) -> bool:
    kinds = set(map(type, items))
    return kinds <= WRITTEN_AS_THEY_ARE or (
        kinds == {int} and min(items) in MSGPACK_INTS and max(items) in MSGPACK_INTS
    )


def dict_to_wire(value: Mapping[Any, Any], fqn: str, leaves: LeafEncoder, levels_left: int) -> Any:
    has_names = set(map(type, value)) <= {str}
    if not (has_names and "".join(value).isascii()):
        for key in value:
            check_key(key, fqn)
    is_named_dict = has_names and type(value) is dict
    if is_named_dict and levels_left > 1 and WRITTEN_AS_THEY_ARE.issuperset(map(type, value.values())):
        return value
    prefix = f"{fqn}." if fqn else ""
    if is_named_dict:
        tensor_types = leaves.tensor_types
        return {
            key: leaves.encode_tensor(f"{prefix}{key}", item)
            if type(item) in tensor_types and levels_left > 1  # most of a state: told from the rest by one look
            else to_wire(item, f"{prefix}{key}", leaves, levels_left - 1)
            for key, item in value.items()
        }
    pairs = [(key, to_wire(item, f"{prefix}{key}", leaves, levels_left - 1)) for key, item in value.items()]
    return ext(PAIRS if type(value) is dict else ORDERED if type(value) is OrderedDict else COUNTER, pairs)


def _big_int_to_wire(value: int, fqn: str) -> Ext:
    if value.bit_length() > _MAX_INT_BITS:
        what = f"an int of {value.bit_length()} bits, and {_MAX_INT_BITS} is the most that can be saved"
        raise unsupported(fqn, what, "save its bytes, which value.to_bytes gives")
    return ext(BIG_INT, str(value))


def unsupported(fqn: str, what: str, advice: str) -> CheckpointSaveError:
    """Returns the error for a value that cannot be saved."""
    return CheckpointSaveError(
        f"{fqn or repr(fqn)} is {what}, which is not supported; nothing was written or changed. Do this: {advice}",
        kind="unsupported_value",
    )


def too_deep(fqn: str) -> CheckpointSaveError:
    """Returns the error for a tree that is nested too deep, as one is that contains itself."""
    return unsupported(fqn, f"nested more than {MAX_DEPTH} deep", "flatten it, or break the circle that it makes")


def check_key(key: object, fqn: str) -> None:
    """Raises CheckpointSaveError (unsupported_value) unless a key in the dict of this FQN is a str that UTF-8 can hold,
    or an int that an int64 or a uint64 holds. Instances of subclasses, such as bools and members of enums, are refused.
    """
    if type(key) is str and key.isascii():
        return
    if type(key) not in (str, int):
        shown = repr(key)
        what = f"a dict with a key of type {type(key).__name__}"
        is_short = len(shown) <= _LONGEST_SHOWN_KEY and "\n" not in shown  # unlike that of a tensor
        raise unsupported(fqn, f"{what}, {shown}" if is_short else what, "use str or int keys")
    if isinstance(key, int) and key not in MSGPACK_INTS:
        raise unsupported(fqn, f"a dict with the key {key}, which takes more than 64 bits", "use str keys")
    checked_text(str(key), f"{fqn}, in its key {key!r},")


def checked_text(text: str, fqn: str) -> str:
    """Returns the text. Raises CheckpointSaveError (unsupported_value) for half a surrogate pair."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise unsupported(fqn, "text with half a surrogate pair", "encode it as bytes with errors='surrogateescape'")
    return text


def _is_plain_array(value: Any) -> bool:
    """Returns True for numpy's own arrays and scalars of numbers, truth values, bytes and text. False for objects,
    times and records, and for a subclass, which is more than its elements, as masks are.
    """
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _ARRAY_KINDS:
        return False
    return type(value) in (np.ndarray, value.dtype.type)


def _content_of_array(value: np.ndarray | np.generic) -> bytes:
    # An array of one element, as numpy makes it of a text scalar, has lost the NULs at the end of the text.
    if isinstance(value, np.bytes_):
        return bytes(value)
    if isinstance(value, np.str_):
        return value.encode("utf-32-le" if value.dtype.str[0] != ">" else "utf-32-be", "surrogatepass")
    return np.ascontiguousarray(value).tobytes()


def array_from_wire(value: Any) -> np.ndarray:
    """Returns the array that was encoded. Raises ValueError, TypeError or, where numpy parses the name of a dtype,
    SyntaxError for a value that encodes no array.
    """
    name, shape, content = value
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"numpy dtype {name} is not plain data")
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def scalar_from_wire(value: Any) -> Any:
    """Returns the scalar that was encoded. Raises as `array_from_wire` does."""
    name, shape, content = value
    dtype = np.dtype(name)
    if dtype.kind not in _TEXT_KINDS:
        return array_from_wire(value)[()]
    if not dtype.itemsize:  # older releases wrote an element of an array for an empty text
        return dtype.type()
    if shape or len(content) != dtype.itemsize:
        raise ValueError(f"{len(content)} bytes are not a numpy scalar of dtype {name} and shape {shape}")
    if dtype.kind == "S":
        return np.bytes_(content)
    return np.str_(bytes(content).decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
