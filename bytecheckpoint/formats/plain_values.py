"""Plain data of foreign checkpoints, written down as docs/format.md says: what adapters/plain_data.py does for live
state, without torch. Values of torch are stood for by records.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec.msgpack import Ext, encode

from bytecheckpoint.formats.file_reader import too_much

MAX_DEPTH = 64
MAX_DIMS = 64
"""Of a tensor."""
_TUPLE, _PAIRS, _COMPLEX, _SIZE, _DTYPE, _ARRAY, _SCALAR, _REF, _BIG_INT, _ORDERED, _COUNTER = (
    *range(1, 6),
    *range(7, 13),
)
INT64 = range(-(1 << 63), 1 << 64)


class TensorRef(NamedTuple):
    """Stands for a tensor that lies in the files."""

    fqn: str


class DtypeName(NamedTuple):
    """Stands for a torch.dtype."""

    name: str

    def __repr__(self) -> str:
        """As torch's own, because keys become texts."""
        return f"torch.{self.name}"


class SizeValue(NamedTuple):
    """Stands for a torch.Size."""

    lengths: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.lengths)


def encode_value(value: Any, *, path: str) -> bytes:
    """A tree of plain data. Raises UnsafeCheckpointError (limits_exceeded) for one that is nested too deep."""
    return encode(_to_wire(value, path, MAX_DEPTH))


def _to_wire(value: Any, path: str, depth: int) -> Any:
    if depth == 0:
        raise too_much(path, f"its plain data is nested more than {MAX_DEPTH} deep")
    if value is None or type(value) in {bool, float, str, bytes}:
        return value
    match value:
        case np.ndarray() | np.generic():
            code = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
            content = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
            return Ext(code, encode(content))
        case int():
            return value if value in INT64 else Ext(_BIG_INT, encode(str(value)))
        case complex():
            return Ext(_COMPLEX, struct.pack("<dd", value.real, value.imag))
        case TensorRef():
            return Ext(_REF, encode(value.fqn))
        case DtypeName():
            return Ext(_DTYPE, encode(value.name))
        case SizeValue():
            return Ext(_SIZE, encode(list(value.lengths)))
        case dict():
            return _dict_to_wire(value, path, depth)
    items = [_to_wire(item, path, depth - 1) for item in value]  # of a list or tuple
    return items if type(value) is list else Ext(_TUPLE, encode(items))


def _dict_to_wire(value: Mapping[Any, Any], path: str, depth: int) -> Any:
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _to_wire(item, path, depth - 1) for key, item in value.items()}
    pairs = [(key, _to_wire(item, path, depth - 1)) for key, item in value.items()]
    codes = {OrderedDict: _ORDERED, Counter: _COUNTER, dict: _PAIRS, defaultdict: _PAIRS}
    return Ext(codes[type(value)], encode(pairs))
