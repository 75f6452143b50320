"""Decodes stored bytes to numpy numbers, for every dtype whose elements are single numbers. It needs no torch: numpy
has most of them, bfloat16 is the upper half of a float32, float8_e5m2 of a float16, the other float8 dtypes are tables
of 256 values.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

_NUMPY = {
    **{f"{sign}int{bits}": f"<{sign[:1] or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": "|u1",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}


class _Float8(NamedTuple):
    mantissa_bits: int
    bias: int
    nan_bits: frozenset[int]


_FLOAT8 = {
    "float8_e4m3fn": _Float8(3, 7, nan_bits=frozenset({0x7F, 0xFF})),
    "float8_e4m3fnuz": _Float8(3, 8, nan_bits=frozenset({0x80})),
    "float8_e5m2fnuz": _Float8(2, 16, nan_bits=frozenset({0x80})),
}


def has_values(dtype: str) -> bool:
    """Returns True if `decode_values` knows this dtype."""
    return dtype in _NUMPY or dtype in _FLOAT8 or dtype in {"bfloat16", "float8_e5m2", "float8_e8m0fnu", "complex32"}


def decode_values(dtype: str, content: memoryview) -> np.ndarray:
    """Returns the elements in these bytes, flat; a view if numpy has the dtype. Raises KeyError for an unknown one."""
    if dtype == "bfloat16":
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "float8_e5m2":
        return (np.frombuffer(content, "u1").astype("<u2") << 8).view("<f2")
    if dtype == "complex32":
        parts = np.frombuffer(content, "<f2").astype(np.float32)
        return parts.view(np.complex64)
    if dtype in _FLOAT8 or dtype == "float8_e8m0fnu":
        return _float8_values(dtype)[np.frombuffer(content, np.uint8)]
    return np.frombuffer(content, _NUMPY[dtype])


@cache
def _float8_values(dtype: str) -> np.ndarray:
    if dtype == "float8_e8m0fnu":
        return np.array([2.0 ** (bits - 127) for bits in range(255)] + [math.nan], np.float64)
    return np.array([_float8_value(_FLOAT8[dtype], bits) for bits in range(256)], np.float32)


def _float8_value(layout: _Float8, bits: int) -> float:
    exponent = (bits & 0x7F) >> layout.mantissa_bits
    fraction = (bits & ((1 << layout.mantissa_bits) - 1)) / (1 << layout.mantissa_bits)
    sign = -1.0 if bits & 0x80 else 1.0
    if bits in layout.nan_bits:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - layout.bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - layout.bias)
