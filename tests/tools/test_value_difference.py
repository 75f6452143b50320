"""Two runs of stored elements compared: every dtype, NaN, infinities, signs of zero, integers that no float holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from packed_checkpoints import tensor_bytes

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.tools.analysis.element_values import has_values
from bytecheckpoint.tools.analysis.value_difference import (
    TensorElements,
    Tolerance,
    can_compare,
    find_difference,
    same_bytes,
)


def side(tensor: torch.Tensor) -> TensorElements:
    return TensorElements(str(tensor.dtype).removeprefix("torch."), memoryview(tensor_bytes(tensor)))


def difference(a, b, tolerance=None, dtype=torch.float32):
    return find_difference(side(torch.tensor(a, dtype=dtype)), side(torch.tensor(b, dtype=dtype)), tolerance)


def test_equal_elements_have_no_difference() -> None:
    found = difference([1.0, math.nan, math.inf, -0.0], [1.0, math.nan, math.inf, -0.0])
    assert (found.num_differing, found.first, found.max_abs) == (0, None, None)


def test_the_largest_distances_and_the_first_place_are_found() -> None:
    found = difference([1.0, 2.0, -4.0, 100.0], [1.0, 2.5, -1.0, 101.0])
    assert found.num_differing == 3
    assert found.max_abs == 3.0
    assert found.max_rel == 0.75
    assert (found.first.position, found.first.a, found.first.b) == (1, "2.0", "2.5")
    assert found.num_not_finite == 0


def test_distances_are_the_same_from_both_sides() -> None:
    forth, back = difference([1.0, 0.0], [3.0, 2.0]), difference([3.0, 2.0], [1.0, 0.0])
    assert (forth.max_abs, forth.max_rel) == (back.max_abs, back.max_rel) == (2.0, 1.0)


def test_without_a_tolerance_every_bit_counts() -> None:
    found = difference([0.0, 1.0], [-0.0, 1.0])
    assert (found.num_differing, found.max_abs, found.max_rel) == (1, 0.0, 0.0)
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = find_difference(side(nan[:1]), side(nan[1:]), None)
    assert (found.num_differing, found.num_not_finite, found.max_abs) == (1, 1, None)


def test_with_a_tolerance_numbers_count() -> None:
    none = Tolerance(0.0, 0.0)
    assert difference([0.0], [-0.0], none).num_differing == 0
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert find_difference(side(nan[:1]), side(nan[1:]), none).num_differing == 0
    assert difference([1.0], [1.25], Tolerance(0.25, 0.0)).num_differing == 0
    assert difference([1.0], [1.5], Tolerance(0.25, 0.0)).num_differing == 1
    assert difference([-4.0], [-5.0], Tolerance(0.0, 0.2)).num_differing == 0
    assert difference([-4.0], [-5.0], Tolerance(0.0, 0.19)).num_differing == 1
    near = difference([1.0, 8.0], [1.25, 8.0], Tolerance(0.25, 0.0))
    assert (near.num_differing, near.max_abs, near.max_rel) == (0, 0.25, 0.2)


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.nan, math.inf, False),
        (math.nan, 1.0, False),
        (1.0, math.inf, False),
    ],
)
def test_what_is_not_finite_has_no_distance_and_no_tolerance_helps(a, b, is_same) -> None:
    found = difference([a], [b], Tolerance(1e30, 1e30))
    assert (found.num_differing, found.num_not_finite, found.max_abs) == (not is_same, not is_same, None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_integers_are_compared_exactly(dtype) -> None:
    info = torch.iinfo(dtype)
    found = difference([info.max, info.max], [info.max - 1, info.min], dtype=dtype)
    assert (found.num_differing, found.max_abs) == (2, info.max - info.min)
    assert found.first.a == str(info.max)
    near = difference([2**60 if info.bits == 64 else 7], [2**60 + 1 if info.bits == 64 else 8], dtype=dtype)
    assert (near.num_differing, near.max_abs) == (1, 1)


def test_large_integers_a_float_cannot_tell_apart_are_no_equal_ones() -> None:
    found = difference([2**62], [2**62 + 1], Tolerance(0.0, 0.0), dtype=torch.int64)
    assert (found.num_differing, found.max_abs) == (1, 1)


def test_large_integers_of_two_dtypes_a_float_cannot_tell_apart_are_no_equal_ones() -> None:
    a, b = side(torch.tensor([2**62, 5])), side(torch.tensor([2**62 + 1, 5], dtype=torch.uint64))
    for tolerance in (None, Tolerance(0.0, 0.0)):
        assert find_difference(a, b, tolerance).num_differing == 1
    assert find_difference(a, b, Tolerance(0.0, 0.01)).num_differing == 0


def test_complex_numbers_have_a_distance() -> None:
    found = difference([1 + 1j, 0j], [1 + 1j, 3 + 4j], dtype=torch.complex64)
    assert (found.num_differing, found.max_abs, found.max_rel) == (1, 5.0, 1.0)
    wide = difference([1 + 1j, 0j], [1 + 1j, 3 + 4j], dtype=torch.complex128)
    assert (wide.num_differing, wide.first.position) == (1, 1)


def test_numbers_of_two_dtypes_are_compared_by_value() -> None:
    values = torch.tensor([1.0, 2.0, 0.1])
    found = find_difference(side(values), side(values.bfloat16()), None)
    assert (found.num_differing, found.first.position) == (1, 2)
    assert found.max_abs == abs(values[2].double() - values.bfloat16()[2].double())
    assert find_difference(side(values), side(values.bfloat16()), Tolerance(0.0, 0.01)).num_differing == 0
    whole = torch.tensor([1, -7])
    assert find_difference(side(whole), side(whole.double()), None).num_differing == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_an_integer_differs_from_a_float_that_only_its_rounding_equals(dtype) -> None:
    whole = torch.tensor([2**53 + 1, 2**53, -(2**53) - 1, 2**63 - 1, -(2**63), 0])
    for sides in ((whole, whole.to(dtype)), (whole.to(dtype), whole)):
        found = find_difference(*map(side, sides), None)
        assert (found.num_differing, found.first.position) == (3, 0)
    unsigned = torch.tensor([2**64 - 1, 2**63, 1], dtype=torch.uint64)
    assert find_difference(side(unsigned), side(unsigned.to(dtype)), None).num_differing == 1


@pytest.mark.parametrize("dtype", sorted(DTYPE_ITEMSIZES))
def test_one_flipped_bit_is_seen_in_every_dtype(dtype) -> None:
    item_bytes = DTYPE_ITEMSIZES[dtype]
    content = bytearray(item_bytes * 9)
    other = bytearray(content)
    other[item_bytes * 5] ^= 1
    found = find_difference(TensorElements(dtype, memoryview(content)), TensorElements(dtype, memoryview(other)), None)
    assert (found.num_differing, found.first.position) == (1, 5)
    assert (found.max_abs is None) is not has_values(dtype)
    assert can_compare(dtype, dtype)
    assert can_compare(dtype, "float32") is has_values(dtype)


def test_many_slices_are_as_one() -> None:
    generator = np.random.default_rng(0)
    a = generator.normal(size=700_001).astype(np.float32)
    b = a.copy()
    b[[3, 300_000, 700_000]] += np.float32([1, 5, 2])
    sides = [TensorElements("float32", memoryview(array.tobytes())) for array in (a, b)]
    found = find_difference(*sides, None)
    gaps = np.abs(a.astype(float) - b.astype(float))
    assert (found.num_differing, found.first.position) == (3, 3)
    assert found.max_abs == gaps.max()
    assert found.max_rel == (gaps / np.maximum(np.abs(a.astype(float)), np.abs(b.astype(float)))).max()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64])
def test_bytes_are_compared_to_the_last(length) -> None:
    content = memoryview(bytearray(range(length)))
    assert same_bytes(content, memoryview(bytes(content)))
    for at in range(length):
        changed = bytearray(content)
        changed[at] ^= 1
        assert not same_bytes(content, memoryview(changed))
