"""Tensors that are columns: the chunks of a region are the same as those of the records, and none is used unchecked."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product
from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointMismatchError
from bytecheckpoint.manifest import (
    Chunk,
    DataFile,
    Manifest,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    open_manifest,
    table,
    tensor_record,
)
from bytecheckpoint.manifest.envelope import seal, unseal
from bytecheckpoint.planner.load_plan import Want, plan_load
from bytecheckpoint.region import Region, find_tiling_fault, grid_regions, part_of_grid, whole


def manifest_of(tensors: dict[str, tuple[tuple[int, ...], list[Region]]]) -> Manifest:
    """uint16 tensors, one chunk after the other in two files by turns."""
    ends = [0, 0]
    records = {}
    for fqn, (shape, regions) in tensors.items():
        chunks = []
        for number, region in enumerate(regions):
            num_bytes = region.numel * itemsize("uint16")
            chunks.append(Chunk(region, number % 2, ends[number % 2], num_bytes))
            ends[number % 2] += num_bytes
        records[fqn] = tensor_record("uint16", shape, chunks)
    return Manifest(save_id="x", files=[DataFile(f"f{index}", end) for index, end in enumerate(ends)], tensors=records)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape cut at random along every dimension: often a regular grid, often not."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    spans = []
    for length in shape:
        part = draw(st.integers(1, length))
        cuts = draw(st.just(range(part, length, part)) | st.sets(st.integers(1, length)).map(sorted))
        bounds = sorted({0, *cuts, length})
        spans.append(list(pairwise(bounds)))
    regions = [
        Region(tuple(start for start, _ in box), tuple(end - start for start, end in box)) for box in product(*spans)
    ]
    return shape, draw(st.just(regions) | st.permutations(regions))


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Region]:
    spans = [st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted) for length in shape]
    return st.tuples(*spans).map(lambda box: Region(tuple(a for a, _ in box), tuple(b - a for a, b in box)))


@given(layouts(), st.data())
def test_the_chunks_that_meet_a_region_are_those_of_the_record(
    layout: tuple[tuple[int, ...], list[Region]], data: st.DataObject
) -> None:
    manifest = manifest_of({"before": ((3,), [Region((0,), (1,)), Region((1,), (2,))]), "t": layout})
    region = data.draw(boxes(layout[0]))
    opened = open_manifest(encode_manifest(manifest))
    assert opened.table.chunks_meeting("t", region) == manifest.table.chunks_meeting("t", region)
    assert opened.table.chunks_meeting("t", whole(layout[0])) == manifest.tensors["t"].chunks
    assert opened.tensors["t"].chunks == manifest.tensors["t"].chunks
    assert opened.table.find_fault("t") is None


@given(st.lists(st.integers(1, 9), max_size=3).map(tuple), st.data())
def test_a_grid_is_recognised(shape: tuple[int, ...], data: st.DataObject) -> None:
    part = tuple(data.draw(st.integers(1, length)) for length in shape)
    regions = grid_regions(shape, part)
    assert find_tiling_fault(shape, regions) is None
    numbers = [number for region in regions for number in (*region.offsets, *region.lengths)]
    assert part_of_grid(shape, numbers, len(regions)) == part
    swapped = [*numbers[2 * len(shape) :], *numbers[: 2 * len(shape)]]
    assert len(regions) == 1 or part_of_grid(shape, swapped, len(regions)) is None


def test_a_grid_costs_a_few_integers() -> None:
    rows = [Region((row, 0), (1, 8)) for row in range(1000)]
    sizes = [len(unseal(encode_manifest(manifest_of({"t": ((1000, 8), order)})))) for order in (rows, rows[::-1])]
    assert sizes[1] - sizes[0] > 4 * 1000


def tampered(manifest: Manifest, **changes: object) -> bytes:
    body = msgspec.msgpack.decode(unseal(encode_manifest(manifest)))
    return seal(msgspec.msgpack.encode(body | changes))


def halves(fqns: str, *, turned: bool = False) -> Manifest:
    """Tensors of two chunks of 8 bytes each, as grids or as they are listed."""
    regions = [Region((0,), (4,)), Region((4,), (4,))]
    return manifest_of(dict.fromkeys(fqns, ((8,), regions[::-1] if turned else regions)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "change", [{"chunk_files": bytes([0, 1, 0, 9])}, {"chunk_byte_offsets": bytes([0, 0, 8, 9])}], ids=str
)
def test_a_chunk_that_cannot_be_right_is_found_when_it_is_used(*, turned: bool, change: dict[str, bytes]) -> None:
    data = tampered(halves("ab", turned=turned), **change)
    with pytest.raises(CheckpointCorruptError):
        decode_manifest(data)
    opened = open_manifest(data)
    assert len(opened.tensors["a"].chunks) == 2
    assert len(opened.table.chunks_meeting("a", whole((8,)))) == 2
    for use in (
        lambda: opened.tensors["b"],
        lambda: opened.table.chunks_meeting("b", whole((8,))),
        lambda: plan(opened, "ab"),
    ):
        with pytest.raises(CheckpointCorruptError) as caught:
            use()
        assert caught.value.kind == "bad_manifest"


@pytest.mark.parametrize("turned", [False, True])
def test_bytes_that_two_tensors_share_are_found_also_after_each_was_looked_at_alone(*, turned: bool) -> None:
    opened = open_manifest(tampered(halves("ab", turned=turned), chunk_byte_offsets=bytes(4)))
    assert all(len(opened.tensors[fqn].chunks) == 2 for fqn in "ab")
    with pytest.raises(CheckpointCorruptError, match="share"):
        opened.table.check_all()


def wholes(fqns: str) -> Manifest:
    """Tensors of one chunk of 16 bytes each."""
    return manifest_of(dict.fromkeys(fqns, ((8,), [whole((8,))])))


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_files": bytes([0, 9])},
        {"chunk_files": struct.pack("<QQ", 0, (1 << 64) - 3)},
        {"chunk_files": struct.pack("<QQ", 0, 1 << 63)},
        {"chunk_byte_offsets": bytes([0, 17])},
        {"chunk_byte_offsets": struct.pack("<QQ", 0, (1 << 64) - 16)},
    ],
    ids=str,
)
def test_a_chunk_of_a_whole_tensor_that_cannot_be_right_is_found_when_it_is_used(change: dict[str, bytes]) -> None:
    opened = open_manifest(tampered(wholes("ab"), **change))
    plan(opened, "a")
    for use in (lambda: opened.table.chunks_meeting("b", whole((8,))), lambda: plan(opened, "ab")):
        with pytest.raises(CheckpointCorruptError, match="a chunk of 'b'"):
            use()


def test_whole_tensors_that_share_bytes_are_not_read_together() -> None:
    opened = open_manifest(tampered(wholes("abc"), chunk_byte_offsets=bytes([0, 16, 15])))
    plan(opened, "ab")
    with pytest.raises(CheckpointCorruptError, match="'a' and one of 'c' share bytes of file 'f0', at 15"):
        plan(opened, "abca")
    # Memory that takes no raw bytes is planned in another way.
    part = [Want("a", whole((8,)), is_flat=True), Want("c", Region((0,), (1,)), is_flat=False)]
    with pytest.raises(CheckpointCorruptError, match="'a' and one of 'c' share bytes"):
        plan_load(opened, part, verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)


def test_a_whole_and_a_part_of_a_chunk_may_be_wanted() -> None:
    wants = [Want("a", whole((8,)), is_flat=True), Want("a", Region((2,), (3,)), is_flat=True)]
    opened = open_manifest(encode_manifest(wholes("ab")))
    (fetch,) = plan_load(opened, wants, verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)
    assert [part[:3] for part in fetch.parts] == [(0, 0, 16), (1, 4, 6)]


def plan(manifest: Manifest, fqns: str) -> object:
    wants = [Want(fqn, whole((8,)), is_flat=True) for fqn in fqns]
    return plan_load(manifest, wants, verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)


@pytest.mark.parametrize("turned", [False, True])
def test_tensors_that_share_bytes_are_not_read_together(*, turned: bool) -> None:
    data = tampered(halves("abc", turned=turned), chunk_byte_offsets=bytes([0, 0, 7, 8, 16, 16]))
    with pytest.raises(CheckpointCorruptError, match="'a' and one of 'b' share bytes of file 'f0', at 7"):
        decode_manifest(data)
    opened = open_manifest(data)
    plan(opened, "ac")
    with pytest.raises(CheckpointCorruptError, match="'a' and one of 'b' share bytes of file 'f0', at 7"):
        plan(opened, "ab")


def test_the_same_chunk_may_be_wanted_twice() -> None:
    opened = open_manifest(encode_manifest(halves("a")))
    plan(opened, "aa")
    plan_load(opened, as_it_is_and_converted("a"), verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)


def test_two_chunks_of_a_tensor_that_claim_one_place_are_not_read() -> None:
    opened = open_manifest(tampered(halves("a"), chunk_files=bytes(2), chunk_byte_offsets=bytes(2)))
    first_half, *_ = as_it_is_and_converted("a")
    wants = [first_half._replace(region=Region((0,), (4,))), Want("a", whole((8,)), is_flat=False)]
    with pytest.raises(CheckpointCorruptError, match="'a' and one of 'a' share bytes"):
        plan_load(opened, wants, verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)


def as_it_is_and_converted(fqn: str) -> list[Want]:
    """Both have the same chunks, and are planned in two ways."""
    return [Want(fqn, whole((8,)), is_flat=is_flat) for is_flat in (True, False)]


@pytest.mark.parametrize("part", [(2, 2), (3, 2), (4, 2)])
def test_wants_of_whole_rows_are_planned_without_a_look_at_each_chunk(
    monkeypatch: pytest.MonkeyPatch, part: tuple[int, int]
) -> None:
    manifest = manifest_of({"t": ((8, 2), grid_regions((8, 2), part)), "s": ((), [whole(())])})
    opened = open_manifest(encode_manifest(manifest))
    monkeypatch.setattr(table.TensorTable, "chunks_meeting", None)
    wants = [Want("t", Region((1, 0), (6, 2)), is_flat=True), Want("s", whole(()), is_flat=True)]
    fetches = plan_load(opened, wants, verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)
    rows = sorted((row.want, row.target_byte_offset, row.byte_length) for fetch in fetches for row in fetch.parts)
    lengths = [length for want, _, length in rows if want == 0]
    assert rows == [*((0, sum(lengths[:number]), length) for number, length in enumerate(lengths)), (1, 0, 2)]
    assert sum(lengths) == 6 * 2 * 2


@pytest.mark.parametrize("region", [Region((6,), (4,)), Region((0,), (12,))], ids=str)
def test_rows_behind_the_last_are_not_taken_from_the_next_tensor(region: Region) -> None:
    opened = open_manifest(encode_manifest(halves("ab")))
    with pytest.raises(CheckpointMismatchError, match="does not hold every element"):
        plan_load(opened, [Want("a", region, is_flat=True)], verify=True, max_gap_bytes=0, max_fetch_bytes=1 << 20)


def test_many_chunks_that_share_bytes_are_refused_before_they_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_CHUNKS_ONE_BY_ONE", 1)
    monkeypatch.setattr(table.TensorTable, "places_of", None)
    opened = open_manifest(tampered(halves("a"), chunk_files=bytes(2), chunk_byte_offsets=bytes(2)))
    with pytest.raises(CheckpointCorruptError, match="'a' and one of 'a' share bytes"):
        plan(opened, "a")


def test_many_chunks_are_checked_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = halves("abcdefg")
    monkeypatch.setattr(table, "_CHUNKS_AT_ONCE", 3)
    assert len(decode_manifest(encode_manifest(manifest)).tensors) == 7
    offsets = [chunk.byte_offset for record in manifest.tensors.values() for chunk in record.chunks]
    for bad in ([*offsets[:-1], offsets[-1] + 1], [*offsets[:6], *offsets[:2], *offsets[8:]]):
        with pytest.raises(CheckpointCorruptError):
            decode_manifest(tampered(manifest, chunk_byte_offsets=bytes(bad)))


@st.composite
def saves_by_many(draw: st.DrawFn) -> dict[str, TensorRecord]:
    """uint16 tensors of 64 chunks or more, each in the file of another rank, mostly in one order in all files, mostly
    without shared bytes.
    """
    num_files = draw(st.integers(64, 70))
    lengths = draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    ends, places = [0] * num_files, {}
    for number in draw(st.permutations(range(len(lengths)))):
        files = draw(st.just(list(range(num_files))) | st.permutations(range(num_files)))
        if draw(st.integers(0, 4)) == 0:
            files[draw(st.integers(0, num_files - 1))] = draw(st.integers(0, num_files - 1))
        offsets = [ends[file] for file in files]
        for file, offset in zip(files, offsets, strict=True):
            ends[file] = max(ends[file], offset + 2 * lengths[number])
        places[number] = list(zip(files, offsets, strict=True))
    if draw(st.booleans()):
        number, chunk = draw(st.integers(0, len(lengths) - 1)), draw(st.integers(0, num_files - 1))
        file, offset = places[number][chunk]
        places[number][chunk] = file, max(0, offset - draw(st.integers(1, 12)))
    records = {}
    for number, length in enumerate(lengths):
        regions = grid_regions((length * num_files,), (length,))
        chunks = [Chunk(region, *place, 2 * length) for region, place in zip(regions, places[number], strict=True)]
        records[f"t{number}"] = tensor_record("uint16", (length * num_files,), chunks)
    return records


@given(records=saves_by_many())
def test_bytes_that_chunks_of_many_ranks_share_are_found_in_any_order(records: dict[str, TensorRecord]) -> None:
    spans = sorted(
        (chunk.file, chunk.byte_offset, chunk.byte_offset + chunk.byte_length)
        for record in records.values()
        for chunk in record.chunks
    )
    is_shared = any(first[0] == second[0] and second[1] < first[2] for first, second in pairwise(spans))
    files = [DataFile(f"f{number}", 1 << 10) for number in range(70)]
    data = encode_manifest(Manifest(save_id="x", files=files, tensors=records))
    with pytest.raises(CheckpointCorruptError, match="share bytes") if is_shared else nullcontext():
        decode_manifest(data)


def test_tensors_that_lie_in_one_order_in_the_files_of_many_ranks_are_not_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = {}
    for place, fqn in ((2, "b"), (4, "c"), (0, "a")):
        chunks = [Chunk(region, file, place, 2) for file, region in enumerate(grid_regions((64,), (1,)))]
        records[fqn] = tensor_record("uint16", (64,), chunks)
    files = [DataFile(f"f{number}", 6) for number in range(64)]
    data = encode_manifest(Manifest(save_id="x", files=files, tensors=records))
    monkeypatch.setattr(table, "find_shared_bytes", None)
    assert len(decode_manifest(data).tensors) == 3


def test_a_tensor_without_elements_has_no_chunk_to_offer() -> None:
    manifest = manifest_of({"t": ((0, 3), [Region((0, 0), (0, 3))]), "u": ((2,), [whole((2,))])})
    opened = open_manifest(encode_manifest(manifest))
    assert opened.table.chunks_meeting("t", whole((0, 3))) == []
    assert prod(opened.tensors["t"].shape) == 0
    assert replace(opened, tensors={}).tensors == {}
