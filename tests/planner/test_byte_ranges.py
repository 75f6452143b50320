"""Which bytes of a file a piece is made of, against the list of all of them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.manifest import Chunk
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame
from bytecheckpoint.planner.byte_ranges import first_names, names_in, piece_of
from bytecheckpoint.region import Region, flat_span, whole

OFFSET, ITEM_BYTES = 5, 2


@st.composite
def boxes(draw: st.DrawFn) -> BoxPart:
    shape = tuple(
        draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda shape: math.prod(shape) <= 100))
    )
    lengths = [draw(st.integers(1, length)) for length in shape]
    offsets = [draw(st.integers(0, length - taken)) for length, taken in zip(shape, lengths, strict=True)]
    region = Region(tuple(offsets), tuple(lengths))
    first, last = flat_span(region, whole(shape))
    chunk = Chunk(whole(shape), 0, OFFSET, whole(shape).numel * ITEM_BYTES)
    return BoxPart(0, OFFSET + first * ITEM_BYTES, (last - first) * ITEM_BYTES, region, chunk)


@given(boxes())
def test_a_box_touches_the_ranges_in_which_it_has_a_byte(part: BoxPart) -> None:
    shape = part.chunk.region.lengths
    is_wanted = np.zeros(shape, bool)
    is_wanted[tuple(map(slice, part.region.offsets, part.region.ends))] = True
    of_file = np.concatenate([np.zeros(OFFSET, bool), is_wanted.reshape(-1).repeat(ITEM_BYTES), np.zeros(3, bool)])
    num_before = [0, *of_file.cumsum().tolist()]
    piece = piece_of(part)
    for start in range(len(of_file)):
        for end in range(start, len(of_file) + 1):
            assert piece.touches(start, end) == (num_before[start] < num_before[end]), (piece, start, end)


def test_names_are_those_of_parts_and_frames_in_the_range() -> None:
    flat, empty = FlatPart(0, 10, 5, 0), FlatPart(1, 12, 0, 0)
    frame = Frame(20, 10, 100, "zstd", 4, (FlatPart(2, 0, 4, 0), FlatPart(3, 50, 4, 0)))
    fetch = Fetch(0, 8, 30, (flat, empty), is_direct=False, frames=(frame,))
    fqns = ["a", "b", "d", "c"]
    assert names_in(fetch, fqns, 8, 38) == "a, c, d"
    assert names_in(fetch, fqns, 14, 20) == "a"
    assert names_in(fetch, fqns, 29, 38) == "c, d"
    assert [names_in(fetch, fqns, *gap) for gap in ((8, 10), (15, 20), (30, 38))] == [""] * 3


def test_of_many_names_the_first_are_given() -> None:
    assert first_names(["b", "a", "b"]) == "a, b"
    assert first_names(map(str, range(7))) == "0, 1, 2 and 4 more"
