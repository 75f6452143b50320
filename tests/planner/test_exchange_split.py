"""A load plan divided between ranks against brute force: whatever the layouts, what a rank reads itself and what it
gets from others together are the numbers that numpy gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from read_shares import assign_readers

from bytecheckpoint.distributed.wire import view_pieces
from bytecheckpoint.loading.receive import pieces_of
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, tensor_record
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Part
from bytecheckpoint.planner.byte_ranges import ByteRange, piece_of
from bytecheckpoint.planner.exchange_plan import (
    DividedPlan,
    Extents,
    ReaderShare,
    can_share,
    divide_plan,
    wanted_runs,
)
from bytecheckpoint.planner.load_plan import Want, box_layout, plan_load
from bytecheckpoint.planner.read_division import Hosts
from bytecheckpoint.region import Region, relative, rows, whole

ITEM_BYTES = 2


class Case:
    """A file with one tensor in several chunks, and what each of several ranks wants of it."""

    def __init__(self, shape: tuple[int, ...], chunks: Sequence[Region], lead_bytes: int, extent: int) -> None:
        self.values = np.arange(1, 1 + int(np.prod(shape)), dtype=np.int16).reshape(shape)
        content = bytearray(lead_bytes)
        records = []
        for region in chunks:
            records.append(Chunk(region, 0, len(content), region.numel * ITEM_BYTES))
            content += cut(self.values, region).tobytes()
        self.content = bytes(content)
        lengths = [min(extent, len(content) - start) for start in range(0, len(content), extent)]
        file = DataFile("f", len(content), lengths, [0] * len(lengths))
        record = tensor_record("int16", shape, records)
        self.manifest = Manifest(save_id="s", files=[file], tensors={"t": record})


def cut(values: np.ndarray, region: Region) -> np.ndarray:
    return values[tuple(map(slice, region.offsets, region.ends))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, list[Want]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    chunks = [whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        part = chunks.pop(0)
        dims = [dim for dim, length in enumerate(part.lengths) if length > 1]
        if not dims:
            chunks.append(part)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, part.lengths[dim] - 1))
        chunks += [rows(part, dim, 0, at), rows(part, dim, at, part.lengths[dim] - at)]
    case = Case(shape, chunks, draw(st.integers(0, 9)), draw(st.integers(1, 40)))
    return case, [Want("t", draw(regions_in(shape)), draw(st.booleans())) for _ in range(draw(st.integers(1, 4)))]


@st.composite
def regions_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    lengths = [draw(st.integers(1, length)) for length in shape]
    offsets = [draw(st.integers(0, length - taken)) for length, taken in zip(shape, lengths, strict=True)]
    return Region(tuple(offsets), tuple(lengths))


@given(cases(), st.integers(1, 200), st.integers(0, 50), st.booleans(), st.integers(0, 4), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_what_ranks_read_and_pass_on_is_what_was_stored(
    drawn: tuple[Case, list[Want]], unit_bytes: int, max_gap_bytes: int, verify: bool, holder: int, num_hosts: int
) -> None:
    case, wants = drawn
    extents = Extents(case.manifest.files)
    plans = [
        plan_load(case.manifest, [want], verify=verify, max_gap_bytes=max_gap_bytes, max_fetch_bytes=100)
        for want in wants
    ]
    held = [[0] if rank == holder else [] for rank in range(len(wants))]  # nobody, or one who alone can read
    sharable = [[fetch for fetch in plan if can_share(fetch, extents)] for plan in plans]
    by_host = [[*range(number, len(wants), num_hosts)] for number in range(num_hosts)]
    hosts = Hosts([ranks for ranks in by_host if ranks])
    shares = assign_readers([wanted_runs(plan, extents) for plan in sharable], extents, held, hosts)
    for want, fetches, mine, share in zip(wants, plans, sharable, shares, strict=True):
        plan = divide_plan(mine, share, extents, unit_bytes=unit_bytes)
        check_units(plan, share, extents, unit_bytes)
        loaded = carry_out(case, want, plan, [fetch for fetch in fetches if not can_share(fetch, extents)])
        np.testing.assert_array_equal(loaded, cut(case.values, want.region))


def check_units(plan: DividedPlan, share: ReaderShare, extents: Extents, unit_bytes: int) -> None:
    longest = max(np.diff(extents.bounds(0)))
    assert sum(fetch.byte_length for fetch in plan.shared) == sum(map(extents.num_bytes, share.reads))
    assert all(fetch.byte_length <= max(unit_bytes, longest) for fetch in plan.shared)
    assert all(fetch.parts for of_reader in plan.received.values() for fetch in of_reader)


def carry_out(case: Case, want: Want, plan: DividedPlan, unsharable: Sequence[Fetch]) -> np.ndarray:
    target = np.zeros(want.region.lengths, np.int16)
    for fetch in (*plan.shared, *plan.alone, *unsharable):
        content = case.content[fetch.byte_offset : fetch.end]
        if fetch.is_direct:
            assert fetch.byte_length == fetch.parts[0].byte_length
        for part in fetch.parts:
            place(part, content[part.byte_offset - fetch.byte_offset :], want, target)
    for fetch in (*chain(*plan.received.values()), *chain(*plan.relayed.values())):
        content = memoryview(bytearray(case.content[fetch.byte_offset : fetch.end]))
        image = bytearray(fetch.byte_length)
        for piece in pieces_of(fetch):  # as they come from another host
            (sent,), (placed,) = (
                view_pieces(each, fetch.byte_offset, [piece]) for each in (content, memoryview(image))
            )
            assert sent.size == piece.byte_length
            placed[...] = sent
        for part in fetch.parts:
            place(part, bytes(image[part.byte_offset - fetch.byte_offset :]), want, target)
    return target


def place(part: Part, content: bytes, want: Want, target: np.ndarray) -> None:
    if isinstance(part, FlatPart):
        flat = target.reshape(-1).view(np.uint8)
        flat[part.target_byte_offset :][: part.byte_length] = np.frombuffer(content, np.uint8)[: part.byte_length]
        return
    lengths, strides = box_layout(part)
    source = np.frombuffer(content, np.int16, count=part.byte_length // ITEM_BYTES)
    box = np.lib.stride_tricks.as_strided(source, lengths, [stride * ITEM_BYTES for stride in strides])
    cut(target, relative(part.region, want.region))[...] = box


def test_a_box_whose_elements_lie_across_extents_is_not_shared() -> None:
    case = Case((4, 4), [whole((4, 4))], lead_bytes=1, extent=8)
    extents = Extents(case.manifest.files)
    columns = Want("t", Region((0, 0), (4, 2)), is_flat=True)
    everything = Want("t", whole((4, 4)), is_flat=True)
    box, flat = (
        plan_load(case.manifest, [want], verify=True, max_gap_bytes=0, max_fetch_bytes=100)[0]
        for want in (columns, everything)
    )
    assert not can_share(box, extents)
    assert can_share(flat, extents)


def test_of_a_box_only_its_rows_are_asked_for() -> None:
    chunk = Chunk(whole((6, 4, 8)), 0, 100, 6 * 4 * 8 * 2)
    columns = BoxPart(0, 100 + 6, 1000, Region((0, 0, 3), (6, 4, 2)), chunk)
    assert piece_of(columns) == ByteRange(106, (24, 4), (16, 1))
    planes = BoxPart(0, 100, 1000, Region((1, 0, 0), (2, 4, 8)), chunk)
    assert piece_of(planes) == ByteRange(100, (128,), (1,))
    corner = BoxPart(0, 100, 1000, Region((0, 1, 2), (3, 2, 4)), chunk)
    assert piece_of(corner) == ByteRange(100, (3, 2, 8), (64, 16, 1))
    assert piece_of(corner).byte_length == 48
    assert piece_of(corner).end == 100 + 2 * 64 + 16 + 8
