"""Compares the stored bytes of two tensors element by element, in bounded memory. NaN and infinities count apart from
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize

from .element_values import decode_values, has_values

_SLICE_ELEMENTS = 1 << 18
"""Number of elements that are converted to float64 at once."""
_BITS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<u8"}


class Tolerance(NamedTuple):
    """Two numbers are the same where |a - b| <= atol + rtol * max(|a|, |b|)."""

    atol: float
    rtol: float


class TensorElements(NamedTuple):
    """Elements of one of the two tensors."""

    dtype: str
    content: memoryview
    """Bytes as stored, row-major."""


class FirstDifference(NamedTuple):
    """The first element that differs, in row-major order."""

    position: int
    """Position in the flat tensor."""
    a: str
    """Value on each side, as text: JSON has no NaN."""
    b: str


@dataclass(slots=True)
class ValueDifference:
    """Difference of two tensors of one shape, as far as they were compared."""

    num_differing: int = 0
    num_not_finite: int = 0
    """Number of differing pairs with a NaN or an infinity, so that there is no distance."""
    max_abs: float | int | None = None
    """Largest distance of finite values, within a tolerance too. None if no distance was taken: slices with equal bytes
    are passed over, and there is none between NaN, infinities, or elements that are not numbers."""
    max_rel: float | None = None
    """Largest relative distance: one divided by the larger magnitude of the two values. None as `max_abs`."""
    first: FirstDifference | None = None

    def add(self, other: ValueDifference) -> None:
        """Adds the difference of other elements of the same tensors. Positions of both count from one start."""
        self.num_differing += other.num_differing
        self.num_not_finite += other.num_not_finite
        self.max_abs = larger(self.max_abs, other.max_abs)
        self.max_rel = larger(self.max_rel, other.max_rel)
        firsts = [first for first in (self.first, other.first) if first is not None]
        self.first = min(firsts, default=None)


def larger(a: Any, b: Any) -> Any:
    """Returns the larger of two values, each a number or None; None if both are."""
    return b if a is None else a if b is None else max(a, b)


def can_compare(dtype_a: str, dtype_b: str) -> bool:
    """Returns True if values of these dtypes can be compared: bytes of one dtype, or numbers."""
    return dtype_a == dtype_b or (has_values(dtype_a) and has_values(dtype_b))


def find_difference(a: TensorElements, b: TensorElements, tolerance: Tolerance | None) -> ValueDifference:
    """Compares elements of two dtypes for which `can_compare` holds. Without a tolerance, elements of one dtype are
    compared bit by bit, elements of two dtypes by value. Elements that are not single numbers are always compared bit
    by bit.
    """
    difference = ValueDifference()
    if a.dtype == b.dtype and same_bytes(a.content, b.content):
        return difference
    bytes_a, bytes_b = itemsize(a.dtype), itemsize(b.dtype)
    num_elements = len(a.content) // bytes_a
    for start in range(0, num_elements, _SLICE_ELEMENTS):
        stop = min(start + _SLICE_ELEMENTS, num_elements)
        part_a = TensorElements(a.dtype, a.content[start * bytes_a : stop * bytes_a])
        part_b = TensorElements(b.dtype, b.content[start * bytes_b : stop * bytes_b])
        if a.dtype != b.dtype or not same_bytes(part_a.content, part_b.content):
            difference.add(_compare(part_a, part_b, tolerance, start))
    return difference


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Returns True if two runs of bytes of one length are equal, at the speed of memory."""
    whole_bytes = len(a) // 8 * 8
    words = np.frombuffer(a[:whole_bytes], np.uint64), np.frombuffer(b[:whole_bytes], np.uint64)
    return np.array_equal(*words) and bytes(a[whole_bytes:]) == bytes(b[whole_bytes:])


def _compare(a: TensorElements, b: TensorElements, tolerance: Tolerance | None, start: int) -> ValueDifference:
    if not (has_values(a.dtype) and has_values(b.dtype)):
        return _compare_bits(a, b, start)
    values_a, values_b = decode_values(a.dtype, a.content), decode_values(b.dtype, b.content)
    with np.errstate(all="ignore"):
        gaps, scales, is_finite = _distances(values_a, values_b)
        if tolerance is None and a.dtype == b.dtype:
            differs = _bits_differ(a, b)
        else:
            atol, rtol = tolerance or Tolerance(0.0, 0.0)
            same = _are_equal(values_a, values_b) | (np.isnan(values_a) & np.isnan(values_b))
            limits = atol + rtol * scales
            # Hazard: unequal integers beyond 2**53 may be one float64, so that their gap is 0.
            differs = np.where(is_finite, ~same & ((gaps > limits) | (limits == 0)), ~same)
        relative = gaps[is_finite & (scales > 0)] / scales[is_finite & (scales > 0)]
    return ValueDifference(
        num_differing=int(np.count_nonzero(differs)),
        num_not_finite=int(np.count_nonzero(differs & ~is_finite)),
        max_abs=_largest_gap(values_a, values_b, gaps[is_finite]),
        max_rel=float(relative.max()) if relative.size else (0.0 if is_finite.any() else None),
        first=_first(differs, values_a, values_b, start),
    )


def _are_equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compares exactly. numpy makes a float64 of an integer beside a float, and 2**53 + 1 would equal 2.0**53."""
    same: np.ndarray = a == b
    if a.dtype.kind in "iu" and b.dtype.kind in "fc":
        a, b = b, a
    if a.dtype.kind in "fc" and b.dtype.kind in "iu":
        is_in_range = a.real < 2.0 ** np.iinfo(b.dtype).bits / (2 if b.dtype.kind == "i" else 1)
        same &= np.where(same & is_in_range, a.real, 0).astype(b.dtype) == b
    return same


def _distances(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns |a - b|, max(|a|, |b|), and True where both are finite."""
    kind = np.complex128 if "c" in {a.dtype.kind, b.dtype.kind} else np.float64
    wide_a, wide_b = a.astype(kind), b.astype(kind)
    scales = np.maximum(np.abs(wide_a), np.abs(wide_b))
    gaps = _integer_gaps(a, b).astype(np.float64) if _are_same_integers(a, b) else np.abs(wide_a - wide_b)
    return gaps, scales, np.isfinite(wide_a) & np.isfinite(wide_b)


def _are_same_integers(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.dtype.kind in "iu"


def _integer_gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the exact distances, unsigned: neither a float64 nor the signed dtype can hold all of them."""
    unsigned = a.dtype.str.replace("i", "u")
    high, low = np.maximum(a, b), np.minimum(a, b)
    gaps: np.ndarray = high.view(unsigned) - low.view(unsigned)
    return gaps


def _largest_gap(a: np.ndarray, b: np.ndarray, finite_gaps: np.ndarray) -> float | int | None:
    if _are_same_integers(a, b):
        return int(_integer_gaps(a, b).max())
    return float(finite_gaps.max()) if finite_gaps.size else None


def _bits_differ(a: TensorElements, b: TensorElements) -> np.ndarray:
    item_bytes = itemsize(a.dtype)
    bits = [np.frombuffer(side.content, _BITS[item_bytes]) for side in (a, b)]
    differs: np.ndarray = bits[0] != bits[1]
    if item_bytes == 16:
        differs = np.logical_or(differs[0::2], differs[1::2])
    return differs


def _compare_bits(a: TensorElements, b: TensorElements, start: int) -> ValueDifference:
    """Compares the bits of elements that are not single numbers, such as those of packed dtypes."""
    differs = _bits_differ(a, b)
    bits_a, bits_b = (np.frombuffer(side.content, _BITS[itemsize(a.dtype)]) for side in (a, b))
    first = _first(differs, bits_a, bits_b, start)
    as_hex = first and FirstDifference(first.position, f"{int(first.a):#x}", f"{int(first.b):#x}")
    return ValueDifference(num_differing=int(np.count_nonzero(differs)), first=as_hex)


def _first(differs: np.ndarray, a: np.ndarray, b: np.ndarray, start: int) -> FirstDifference | None:
    if not differs.any():
        return None
    index = int(np.argmax(differs))
    return FirstDifference(start + index, str(a[index].item()), str(b[index].item()))
