"""Numpy arrays and scalars as dtype, shape and bytes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

_KINDS = "biufcSU"
_TEXT_KINDS = "SU"


def is_plain_array(value: Any) -> bool:
    """True if a value is numpy's own array or scalar. A subclass is more than its elements, as masks are."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in _KINDS:
        return False
    return type(value) in (np.ndarray, value.dtype.type)


def array_to_wire(value: np.ndarray | np.generic) -> list[Any]:
    """The dtype, shape and row-major bytes of an array or a scalar."""
    return [value.dtype.str, list(value.shape), _content(value)]


def _content(value: np.ndarray | np.generic) -> bytes:
    # An array of one element, as numpy makes it of a text scalar, has lost the NULs at the end of the text.
    if isinstance(value, np.bytes_):
        return bytes(value)
    if isinstance(value, np.str_):
        return value.encode("utf-32-le" if value.dtype.str[0] != ">" else "utf-32-be", "surrogatepass")
    return np.ascontiguousarray(value).tobytes()


def array_from_wire(value: Any) -> np.ndarray:
    """The array of `array_to_wire`. Raises ValueError or TypeError for what that never gives."""
    name, shape, content = value
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"numpy dtype {name} is not plain data")
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def scalar_from_wire(value: Any) -> Any:
    """The scalar of `array_to_wire`. Raises as `array_from_wire` does."""
    name, shape, content = value
    dtype = np.dtype(name)
    if dtype.kind not in _TEXT_KINDS:
        return array_from_wire(value)[()]
    if not dtype.itemsize:  # older releases wrote an element of an array for an empty text
        return dtype.type()
    if shape or len(content) != dtype.itemsize:
        raise ValueError(f"{len(content)} bytes are no numpy scalar of dtype {name} and shape {shape}")
    if dtype.kind == "S":
        return np.bytes_(content)
    return np.str_(bytes(content).decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
