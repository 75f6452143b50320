"""Geometry against brute force: every region is also a mask of a small numpy array, and both must agree."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.region import (
    Region,
    TilingFault,
    find_hole,
    find_tiling_fault,
    flat_span,
    intersect,
    is_contiguous_in,
    relative,
    rows,
    split_flat_range,
    split_rows,
    subtract,
    whole,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def regions_in(draw: st.DrawFn, shape: tuple[int, ...], *, least: int = 0) -> Region:
    """A region inside this shape, of at least so many elements in each dimension."""
    lengths = [draw(st.integers(least, length)) for length in shape]
    offsets = [draw(st.integers(0, length - taken)) for length, taken in zip(shape, lengths, strict=True)]
    return Region(tuple(offsets), tuple(lengths))


@st.composite
def shape_and_regions(draw: st.DrawFn, *, count: int) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(shapes)
    return shape, [draw(regions_in(shape)) for _ in range(count)]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape cut in two, again and again, at random places."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    parts = [whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        index = draw(st.integers(0, len(parts) - 1))
        dims = [dim for dim, length in enumerate(parts[index].lengths) if length > 1]
        if dims:
            parts += cut(parts.pop(index), draw(st.sampled_from(dims)), draw(st.integers(1, 5)))
    return shape, draw(st.permutations(parts))


def cut(region: Region, dim: int, at: int) -> list[Region]:
    at = min(at, region.lengths[dim] - 1)
    (first, second) = (list(region.lengths), list(region.lengths))
    first[dim], second[dim] = at, region.lengths[dim] - at
    offsets = list(region.offsets)
    offsets[dim] += at
    return [Region(region.offsets, tuple(first)), Region(tuple(offsets), tuple(second))]


def mask(shape: tuple[int, ...], *regions: Region) -> np.ndarray:
    """How many of the regions cover each element."""
    counts = np.zeros(shape, dtype=int)
    for region in regions:
        counts[tuple(map(slice, region.offsets, region.ends))] += 1
    return counts


def flat_indices(shape: tuple[int, ...], region: Region) -> list[int]:
    at = np.arange(math.prod(shape)).reshape(shape)
    return at[tuple(map(slice, region.offsets, region.ends))].ravel().tolist()


def test_a_region_knows_its_ends_and_its_elements() -> None:
    region = Region((1, 2), (3, 4))
    assert region.ends == (4, 6)
    assert region.numel == 12
    assert whole((2, 3)) == Region((0, 0), (2, 3))
    assert whole(()).numel == 1


@given(shape_and_regions(count=2))
def test_intersect_is_what_both_masks_share(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (a, b) = case
    common = intersect(a, b)
    shared = mask(shape, a, b) == 2
    assert (common is None) == (not shared.any())
    if common is not None:
        assert np.array_equal(mask(shape, common) == 1, shared)
        assert intersect(b, a) == common


def test_regions_without_dimensions_share_their_one_element() -> None:
    assert intersect(Region((), ()), Region((), ())) == Region((), ())


def test_regions_of_different_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        intersect(Region((0,), (1,)), Region((0, 0), (1, 1)))


@given(shape_and_regions(count=1))
def test_relative_and_rows_move_and_narrow(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (region,) = case
    assert relative(region, to=region).offsets == (0,) * len(shape)
    assert relative(region, to=whole(shape)) == region
    if shape and region.lengths[0] > 1:
        part = rows(region, 0, 1, region.lengths[0] - 1)
        assert flat_indices(shape, part) == flat_indices(shape, region)[region.numel // region.lengths[0] :]


@given(shapes, st.data())
def test_a_flat_range_becomes_few_regions_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - start))
    regions = split_flat_range(shape, start, length)
    flat = [index for region in regions for index in flat_indices(shape, region)]
    assert flat == list(range(start, start + length))
    assert len(regions) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(("shape", "start", "length"), [((4,), -1, 2), ((4,), 3, 2), ((3, 0), 0, 1), ((), 0, 2)])
def test_a_flat_range_that_leaves_the_tensor_is_refused(shape: tuple[int, ...], start: int, length: int) -> None:
    with pytest.raises(ValueError, match="has no elements"):
        split_flat_range(shape, start, length)


# What RaggedShard's own decomposition gives: shape, sharded dimensions, units of each rank -> regions of each rank.
RAGGED = [
    (
        (2, 64),
        2,
        (21, 21, 22, 0),
        [[((0, 0), (1, 42))], [((0, 42), (1, 22)), ((1, 0), (1, 20))], [((1, 20), (1, 44))], []],
    ),
    (
        (5, 3, 6, 7),
        2,
        (3, 7, 4, 1),
        [
            [((0, 0, 0, 0), (1, 3, 6, 7))],
            [((1, 0, 0, 0), (2, 3, 6, 7)), ((3, 0, 0, 0), (1, 1, 6, 7))],
            [((3, 1, 0, 0), (1, 2, 6, 7)), ((4, 0, 0, 0), (1, 2, 6, 7))],
            [((4, 2, 0, 0), (1, 1, 6, 7))],
        ],
    ),
    (
        (5, 3, 6, 7),
        3,
        (43, 23, 7, 17),
        [
            [((0, 0, 0, 0), (2, 3, 6, 7)), ((2, 0, 0, 0), (1, 1, 6, 7)), ((2, 1, 0, 0), (1, 1, 1, 7))],
            [((2, 1, 1, 0), (1, 1, 5, 7)), ((2, 2, 0, 0), (1, 1, 6, 7)), ((3, 0, 0, 0), (1, 2, 6, 7))],
            [((3, 2, 0, 0), (1, 1, 6, 7)), ((4, 0, 0, 0), (1, 1, 1, 7))],
            [((4, 0, 1, 0), (1, 1, 5, 7)), ((4, 1, 0, 0), (1, 2, 6, 7))],
        ],
    ),
]


@pytest.mark.parametrize(("shape", "num_dims", "units", "expected"), RAGGED)
def test_ragged_shards_split_as_veScale_does(
    shape: tuple[int, ...],
    num_dims: int,
    units: tuple[int, ...],
    expected: list[list[tuple[tuple[int, ...], tuple[int, ...]]]],
) -> None:
    unit_numel = math.prod(shape[:num_dims]) // sum(units) * math.prod(shape[num_dims:])
    starts = itertools.accumulate(units, initial=0)
    for start, count, regions in zip(starts, units, expected, strict=False):
        assert split_flat_range(shape, start * unit_numel, count * unit_numel) == [Region(*item) for item in regions]


# A flat buffer cut over ranks: (shape of the parameter, first element, elements) on each rank, from a distributed
# optimizer's buckets, ZeRO-3 partitions and FSDP1 flat parameters. Every rank's pieces join to the whole parameter.
FLAT_PIECES = [
    ((15, 20), [(0, 128), (128, 172)]),  # emb of 300 elements, over three ranks of 256
    ((13, 10), [(0, 128), (128, 2)]),  # w2 of 130 elements, buckets of 256 over two ranks
    ((2, 3), [(0, 4), (4, 2)]),  # p1 of 6 elements, FSDP1 with original parameters
    ((5,), [(0, 3), (3, 2)]),  # p0 of 5 elements, ZeRO-3 on two ranks
]


@pytest.mark.parametrize(("shape", "pieces"), FLAT_PIECES)
def test_flat_pieces_of_all_ranks_tile_the_parameter(shape: tuple[int, ...], pieces: list[tuple[int, int]]) -> None:
    regions = [region for piece in pieces for region in split_flat_range(shape, *piece)]
    assert find_tiling_fault(shape, regions) is None


@given(shape_and_regions(count=1), st.integers(1, 40))
def test_split_rows_keeps_order_and_size(case: tuple[tuple[int, ...], list[Region]], max_numel: int) -> None:
    shape, (region,) = case
    parts = split_rows(region, max_numel)
    assert all(part.numel <= max_numel for part in parts)
    assert [index for part in parts for index in flat_indices(shape, part)] == flat_indices(shape, region)
    assert all(is_contiguous_in(part, region) for part in parts if part.numel)


def test_split_rows_leaves_alone_what_is_small() -> None:
    region = Region((4, 0), (8, 16))
    assert split_rows(region, 128) == [region]
    assert split_rows(region, 64) == [Region((4, 0), (4, 16)), Region((8, 0), (4, 16))]


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_contiguity_and_span_match_the_flat_indices(shape: tuple[int, ...], data: st.DataObject) -> None:
    outer = data.draw(regions_in(shape, least=1))
    inner = data.draw(regions_in(outer.lengths, least=1))
    at = flat_indices(outer.lengths, inner)
    moved = Region(tuple(map(int.__add__, inner.offsets, outer.offsets)), inner.lengths)
    assert is_contiguous_in(moved, outer) == (at == list(range(at[0], at[0] + len(at))))
    assert flat_span(moved, outer) == (at[0], at[-1] + 1)


@given(shape_and_regions(count=2))
def test_subtract_leaves_exactly_the_rest(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (region, taken) = case
    left = subtract(region, taken)
    expected = (mask(shape, region) == 1) & (mask(shape, taken) == 0)
    assert np.array_equal(mask(shape, *left), expected.astype(int))
    assert len(left) <= max(2 * len(shape), 1)


@given(shape_and_regions(count=5))
def test_a_tiling_fault_is_found_and_true(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, regions = case
    counts = mask(shape, *regions)
    fault = find_tiling_fault(shape, regions)
    assert (fault is None) == bool((counts == 1).all())
    if fault is not None and fault.overlap is not None:
        assert (counts[mask(shape, fault.overlap) == 1] >= 2).all()
    if fault is not None and fault.hole is not None:
        assert fault.hole.numel
        assert (counts[mask(shape, fault.hole) == 1] == 0).all()


@given(tilings(), st.data())
def test_a_tiling_has_no_fault_until_a_part_goes_or_comes_twice(
    case: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    shape, parts = case
    assert find_tiling_fault(shape, parts) is None
    assert find_hole(whole(shape), parts) is None
    index = data.draw(st.integers(0, len(parts) - 1))
    without = parts[:index] + parts[index + 1 :]
    assert find_tiling_fault(shape, without) == TilingFault(find_hole(whole(shape), without), None)
    twice = find_tiling_fault(shape, [*parts, parts[index]])
    assert twice == TilingFault(None, parts[index])


def test_a_pinwheel_that_no_straight_cut_separates_is_a_tiling() -> None:
    parts = [
        Region((0, 0), (1, 2)),
        Region((0, 2), (2, 1)),
        Region((2, 1), (1, 2)),
        Region((1, 0), (2, 1)),
        Region((1, 1), (1, 1)),
    ]
    assert find_tiling_fault((3, 3), parts) is None
    assert find_tiling_fault((3, 3), [*parts[:4], Region((1, 0), (1, 2))]) is not None


def pinwheels(length: int) -> list[Region]:
    """A square in rings of four regions around one another, which no straight cut separates, and one in the middle."""
    parts = []
    for first in range(length // 2):
        arm, last = length - 2 * first - 1, length - first - 1
        parts += [Region((first, first), (1, arm)), Region((first, last), (arm, 1))]
        parts += [Region((last, first + 1), (1, arm)), Region((first + 1, first), (arm, 1))]
    return [*parts, Region((length // 2, length // 2), (1, 1))]


@given(st.integers(0, 60), st.permutations(range(25)), st.integers(0, 24))
@settings(max_examples=50, deadline=None)
def test_pinwheels_in_pinwheels_are_a_tiling_until_a_part_grows(last: int, order: list[int], index: int) -> None:
    parts = pinwheels(13)
    assert len(parts) == 25
    parts = [parts[number] for number in order]
    assert find_tiling_fault((13, 13), parts) is None
    fault = find_tiling_fault((13, 13), parts[:index] + parts[index + 1 :])
    assert fault is not None
    assert fault.hole is not None
    assert intersect(fault.hole, parts[index]) == fault.hole
    grown = Region((last // 13, 0), (1 + last % 13, 2))
    fault = find_tiling_fault((20, 13), [*parts, grown])
    assert fault is not None
    assert fault.overlap in {intersect(part, grown) for part in parts} - {None}


@given(st.integers(1, 4), st.data())
@settings(max_examples=50, deadline=None)
def test_an_overlap_is_found_where_comparing_all_pairs_finds_one(num_dims: int, data: st.DataObject) -> None:
    """Of so many regions of a large shape that they are not just compared; nearly none of them can be separated."""
    shape = (40,) * num_dims
    box = st.tuples(*[st.tuples(st.integers(0, 39), st.integers(1, 12))] * num_dims)
    regions: list[Region] = []
    for dims in data.draw(st.lists(box, min_size=17, max_size=60)):
        region = Region(tuple(at for at, _ in dims), tuple(min(length, 40 - at) for at, length in dims))
        if data.draw(st.integers(0, 30)) == 0 or all(intersect(region, other) is None for other in regions):
            regions.append(region)
    overlaps = {intersect(*pair) for pair in itertools.combinations(regions, 2)} - {None}
    fault = find_tiling_fault(shape, regions)
    found = fault.overlap if fault is not None else None
    assert found in overlaps if overlaps else found is None


def test_thousands_of_regions_that_no_straight_cut_separates_are_compared_at_once() -> None:
    """Pair by pair that would take minutes."""
    parts = pinwheels(2401)
    assert len(parts) > 4000
    assert find_tiling_fault((2401, 2401), parts) is None
    assert find_tiling_fault((2401, 2401), [*parts, parts[777]]) == TilingFault(None, parts[777])


def test_a_region_outside_the_shape_cannot_make_up_for_a_hole() -> None:
    outside = Region((4,), (2,))
    assert find_tiling_fault((4,), [Region((0,), (2,)), outside]) == TilingFault(None, outside)
    assert find_tiling_fault((0, 3), [Region((0, 0), (1, 3))]) == TilingFault(None, Region((0, 0), (1, 3)))


def test_tensors_without_dimensions_or_elements_tile() -> None:
    scalar = Region((), ())
    assert find_tiling_fault((), [scalar]) is None
    assert find_tiling_fault((), []) == TilingFault(scalar, None)
    assert find_tiling_fault((), [scalar, scalar]) == TilingFault(None, scalar)
    assert find_tiling_fault((0,), []) is None
    assert find_tiling_fault((0,), [Region((0,), (0,))]) is None
    assert find_tiling_fault((), [scalar] * 17) == TilingFault(None, scalar)


def test_a_grid_of_many_chunks_is_checked_in_about_linear_time() -> None:
    """Experts stacked over layers, cut by tensor parallelism: pairwise comparison would take minutes."""
    parts = [
        Region((layer, expert, 4 * part), (1, 1, 4)) for layer in range(32) for expert in range(32) for part in range(8)
    ]
    assert find_tiling_fault((32, 32, 32), parts) is None
    hole = find_tiling_fault((32, 32, 32), parts[:777] + parts[778:])
    assert hole == TilingFault(parts[777], None)


@given(shape_and_regions(count=4))
def test_a_hole_is_found_wherever_one_is(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, (target, *regions) = case
    free = (mask(shape, target) == 1) & (mask(shape, *regions) == 0)
    hole = find_hole(target, regions)
    assert (hole is None) == (not free.any())
    if hole is not None:
        assert hole.numel
        assert free[mask(shape, hole) == 1].all()
