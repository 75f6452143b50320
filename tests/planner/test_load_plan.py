"""The load plan against brute force: chunks at random places in random files, read as the plan says, give the numbers
that numpy gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointMismatchError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, encode_manifest, open_manifest, tensor_record
from bytecheckpoint.manifest import frames as framing
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, Frame, Part
from bytecheckpoint.planner import coalesce as coalescing
from bytecheckpoint.planner import frame_ranges as frame_planning
from bytecheckpoint.planner.coalesce import ExtentIndex, coalesce
from bytecheckpoint.planner.load_plan import Want, box_layout, plan_load, wanted_files
from bytecheckpoint.region import Region, grid_regions, relative, rows, whole


@pytest.fixture(autouse=True)
def _small_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that parts of a few bytes are read straight into their targets as well."""
    monkeypatch.setattr(coalescing, "MIN_DIRECT_BYTES", 16)


@pytest.fixture(autouse=True)
def _small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a chunk of a few bytes has several."""
    monkeypatch.setattr(framing, "FRAME_BYTES", 48)
    monkeypatch.setattr(frame_planning, "FRAME_BYTES", 48)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """The shape cut in two, again and again, at random places; or cut between rows into equal parts."""
    if draw(st.booleans()) and prod(shape):
        return grid_regions(shape, [*(draw(st.integers(1, length)) for length in shape[:1]), *shape[1:]])
    parts = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dims = [dim for dim, length in enumerate(part.lengths) if length > 1]
        if not dims:
            parts.append(part)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, part.lengths[dim] - 1))
        parts += [rows(part, dim, 0, at), rows(part, dim, at, part.lengths[dim] - at)]
    return parts


@st.composite
def regions_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    num_cut = 1 if draw(st.booleans()) else len(shape)
    lengths = [*(draw(st.integers(0, length)) for length in shape[:num_cut]), *shape[num_cut:]]
    offsets = [draw(st.integers(0, length - taken)) for length, taken in zip(shape, lengths, strict=True)]
    return Region(tuple(offsets), tuple(lengths))


def cut(array: np.ndarray, region: Region) -> np.ndarray:
    return array[(*map(slice, region.offsets, region.ends), ...)]


class Stored:
    """Tensors in files that exist in memory only. What stands for a codec here puts three bytes before each frame."""

    def __init__(self, manifest: Manifest, arrays: dict[str, np.ndarray], contents: list[bytes]) -> None:
        self.manifest, self.arrays, self.contents = manifest, arrays, contents


FRAME_HEAD = b"<z>"


@st.composite
def checkpoints(draw: st.DrawFn) -> Stored:
    """With compressed chunks, or as a manifest that was written and read."""
    has_codecs = draw(st.booleans())
    arrays, places = {}, []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(["uint8", "int32", "complex128"]))
        numbers = np.random.default_rng(index).integers(0, 256, prod(shape) * np.dtype(dtype).itemsize, np.uint8)
        arrays[f"t{index}"] = numbers.view(dtype).reshape(shape)
        places += [(f"t{index}", region) for region in draw(tilings(shape))]
    num_files = draw(st.integers(1, 3))
    contents = [bytearray(draw(st.binary(max_size=9))) for _ in range(num_files)]
    frames: list[set[tuple[int, int]]] = [set() for _ in contents]
    chunks: dict[str, list[Chunk]] = {fqn: [] for fqn in arrays}
    for fqn, region in draw(st.permutations(places)):
        file = draw(st.integers(0, num_files - 1))
        content, start = cut(arrays[fqn], region).tobytes(), len(contents[file])
        codec = draw(st.sampled_from(["none", "zstd"])) if content and has_codecs else "none"
        for at in range(0, len(content), 48) if codec == "zstd" else ():
            frames[file].add((len(contents[file]), len(contents[file]) + 3 + len(content[at : at + 48])))
            contents[file] += FRAME_HEAD + content[at : at + 48]
        contents[file] += content if codec == "none" else b""
        chunks[fqn].append(Chunk(region, file, start, len(contents[file]) - start, codec))
        contents[file] += draw(st.binary(max_size=9))
    files = []
    for index, content in enumerate(contents):
        lengths = draw(extents(len(content), frames[index]))
        files.append(DataFile(f"data/{index}", len(content), lengths, [0] * len(lengths)))
    in_order = {fqn: sorted(of_one) if draw(st.booleans()) else of_one for fqn, of_one in chunks.items()}
    tensors = {fqn: tensor_record(str(arrays[fqn].dtype), arrays[fqn].shape, in_order[fqn]) for fqn in arrays}
    manifest = Manifest(save_id="x", files=files, tensors=tensors)
    if not has_codecs:
        manifest = open_manifest(encode_manifest(manifest))
    return Stored(manifest, arrays, [bytes(content) for content in contents])


@st.composite
def extents(draw: st.DrawFn, num_bytes: int, frames: set[tuple[int, int]]) -> list[int]:
    """Anywhere, but a frame is one."""
    if not num_bytes:
        return []
    inside = {at for start, end in frames for at in range(start + 1, end)}
    ends = {*draw(st.lists(st.integers(1, num_bytes), max_size=8)), num_bytes} - inside
    return np.diff(sorted({0, *ends, *(at for frame in frames for at in frame)})).tolist()


def carry_out(stored: Stored, wants: Sequence[Want], fetches: Sequence[Fetch]) -> list[np.ndarray]:
    """What the wants' targets hold after the reads; what nothing wrote stays 0xAA."""
    targets = []
    for want in wants:
        dtype = stored.arrays[want.fqn].dtype
        targets.append(
            np.full(want.region.numel * dtype.itemsize, 0xAA, np.uint8).view(dtype).reshape(want.region.lengths)
        )
    for fetch in fetches:
        content = stored.contents[fetch.file][fetch.byte_offset : fetch.end]
        assert len(content) == fetch.byte_length
        if fetch.is_direct:
            (part,) = fetch.parts
            assert isinstance(part, FlatPart)
            assert (part.byte_offset, part.byte_length) == (fetch.byte_offset, fetch.byte_length)
        for part in fetch.parts:
            place(part, content[part.byte_offset - fetch.byte_offset :][: part.byte_length], wants, targets)
        for frame in fetch.frames:
            raw = content[frame.byte_offset - fetch.byte_offset :][: frame.byte_length].removeprefix(FRAME_HEAD)
            assert len(raw) == frame.raw_bytes == frame.byte_length - len(FRAME_HEAD)
            for part in frame.parts:
                place(part, raw[part.byte_offset :][: part.byte_length], wants, targets)
    return targets


def place(part: Part, content: bytes, wants: Sequence[Want], targets: Sequence[np.ndarray]) -> None:
    assert len(content) == part.byte_length
    target = targets[part.want]
    if isinstance(part, FlatPart):
        flat = target.reshape(-1).view(np.uint8)
        flat[part.target_byte_offset : part.target_byte_offset + part.byte_length] = np.frombuffer(content, np.uint8)
        return
    lengths, strides = box_layout(part)
    size = target.dtype.itemsize
    box = np.lib.stride_tricks.as_strided(
        np.frombuffer(content, np.uint8)[: len(content) // size * size].view(target.dtype),
        lengths,
        [stride * size for stride in strides],
    )
    cut(target, relative(part.region, wants[part.want].region))[...] = box


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_what_the_plan_reads_is_what_was_stored(data: st.DataObject) -> None:
    stored = data.draw(checkpoints())
    wants = []
    for _ in range(data.draw(st.integers(1, 4))):
        fqn = data.draw(st.sampled_from(sorted(stored.arrays)))
        region = data.draw(st.just(whole(stored.arrays[fqn].shape)) | regions_in(stored.arrays[fqn].shape))
        wants.append(Want(fqn, region, data.draw(st.booleans())))
    verify = data.draw(st.booleans())
    limit = data.draw(st.integers(1, 200))
    fetches = plan_load(
        stored.manifest, wants, verify=verify, max_gap_bytes=data.draw(st.integers(0, 50)), max_fetch_bytes=limit
    )
    for want, target in zip(wants, carry_out(stored, wants, fetches), strict=True):
        assert target.tobytes() == cut(stored.arrays[want.fqn], want.region).tobytes()
    check_fetches(stored, fetches, verify=verify, limit=limit)


def check_fetches(stored: Stored, fetches: Sequence[Fetch], *, verify: bool, limit: int) -> None:
    """Each fetch is one of whole extents, and no larger than it may be; no frame is read twice."""
    frames = [(fetch.file, frame.byte_offset) for fetch in fetches for frame in fetch.frames]
    assert len(set(frames)) == len(frames)
    for fetch in fetches:
        assert fetch.byte_length > 0
        largest = 1
        if verify:
            bounds = [0, *np.cumsum(stored.manifest.files[fetch.file].extent_lengths).tolist()]
            assert fetch.byte_offset in bounds
            assert fetch.end in bounds
            largest = max(stored.manifest.files[fetch.file].extent_lengths)
        part_bytes = max((part.byte_length for part in fetch.parts), default=0)
        raw_bytes = max((frame.raw_bytes for frame in fetch.frames if not frame.is_direct), default=0)
        alone = len(fetch.frames) == 1 and not fetch.parts
        assert alone or fetch.byte_length + raw_bytes <= max(limit, part_bytes) + 2 * largest


def test_reads_of_neighbours_are_merged_and_far_ones_are_not() -> None:
    def part(start: int) -> FlatPart:
        return FlatPart(0, start, 10, start)

    index = ExtentIndex(DataFile("f", 1000), verify=False)
    fetches = coalesce(0, [part(start) for start in (30, 0, 12, 500)], [], index, max_gap_bytes=8, max_fetch_bytes=100)
    assert [(fetch.byte_offset, fetch.end, len(fetch.parts)) for fetch in fetches] == [(0, 40, 3), (500, 510, 1)]
    fetches = coalesce(0, [part(start) for start in (0, 12)], [], index, max_gap_bytes=0, max_fetch_bytes=100)
    assert len(fetches) == 2


def test_a_large_flat_part_is_read_in_place_but_for_ends_that_share_extents() -> None:
    file = DataFile("f", 100, (30, 30, 40), (0, 0, 0))
    fetches = coalesce(
        0, [FlatPart(0, 10, 80, 0)], [], ExtentIndex(file, verify=True), max_gap_bytes=0, max_fetch_bytes=1000
    )
    assert [(fetch.byte_offset, fetch.end, fetch.is_direct) for fetch in fetches] == [
        (30, 60, True),
        (0, 30, False),
        (60, 100, False),
    ]
    assert wanted_files(fetches) == {0: 100}


def test_a_hole_in_what_is_stored_is_named_and_only_if_it_is_wanted() -> None:
    chunks = [Chunk(Region((0, 0), (2, 4)), 0, 0, 8), Chunk(Region((3, 0), (1, 4)), 0, 8, 4)]
    manifest = Manifest(save_id="x", files=[DataFile("f", 12)], tensors={"t": tensor_record("uint8", (4, 4), chunks)})

    def load(region: Region) -> list[Fetch]:
        return plan_load(manifest, [Want("t", region, True)], verify=True, max_gap_bytes=0, max_fetch_bytes=100)

    assert load(Region((0, 0), (2, 4)))
    with pytest.raises(CheckpointMismatchError, match=r"t: \[2:3, 0:4\] of \[0:4, 0:4\] lies in no chunk") as error:
        load(whole((4, 4)))
    assert error.value.kind == "coverage"


def test_chunks_that_overlap_are_refused() -> None:
    chunks = [Chunk(Region((0,), (3,)), 0, 0, 3), Chunk(Region((2,), (2,)), 0, 3, 2)]
    manifest = Manifest(save_id="x", files=[DataFile("f", 5)], tensors={"t": tensor_record("uint8", (4,), chunks)})
    with pytest.raises(CheckpointMismatchError, match=r"two chunks hold \[2:3\]") as error:
        plan_load(manifest, [Want("t", whole((4,)), True)], verify=True, max_gap_bytes=0, max_fetch_bytes=100)
    assert error.value.kind == "coverage"


def compressed_manifest(codec: str) -> Manifest:
    """A tensor of 10 x 16 bytes in 4 frames of 20, 10, 30 and 5 bytes, behind 100 bytes of something else."""
    chunk = Chunk(whole((10, 16)), 0, 100, 65, codec)
    file = DataFile("f", 200, (100, 20, 10, 30, 5, 35), (0,) * 6)
    return Manifest(save_id="x", files=[file], tensors={"t": tensor_record("uint8", (10, 16), [chunk])})


def plan_compressed(region: Region, *, is_flat: bool, max_fetch_bytes: int = 1000) -> list[Fetch]:
    wants = [Want("t", region, is_flat)]
    manifest = compressed_manifest("zstd")
    return plan_load(manifest, wants, verify=False, max_gap_bytes=0, max_fetch_bytes=max_fetch_bytes)


def test_of_a_compressed_chunk_only_the_frames_that_are_touched_are_read() -> None:
    (fetch,) = plan_compressed(Region((3, 0), (4, 16)), is_flat=True)
    assert (fetch.byte_offset, fetch.byte_length, fetch.parts) == (120, 40, ())
    assert fetch.frames == (
        Frame(120, 10, 48, "zstd", 1, (FlatPart(0, 0, 48, 0),)),
        Frame(130, 30, 48, "zstd", 1, (FlatPart(0, 0, 16, 48),)),
    )
    assert [frame.is_direct for frame in fetch.frames] == [True, False]
    first, last = plan_compressed(Region((2, 0), (8, 1)), is_flat=False, max_fetch_bytes=138)
    assert [(item.byte_offset, item.byte_length) for item in (first, last)] == [(100, 30), (130, 35)]


def test_decompressing_a_frame_counts_as_memory_of_a_fetch() -> None:
    """Once where its values are put straight into their place, which the codec cannot do, and else twice."""
    everything = whole((10, 16))
    for is_flat, frame_bytes in ((True, 48), (False, 2 * 48)):
        for max_fetch_bytes, expected in ((65 + frame_bytes, [65]), (64 + frame_bytes, [60, 5])):
            fetches = plan_compressed(everything, is_flat=is_flat, max_fetch_bytes=max_fetch_bytes)
            assert [fetch.byte_length for fetch in fetches] == expected
    boxes = plan_compressed(everything, is_flat=False, max_fetch_bytes=1)
    assert [fetch.byte_length for fetch in boxes] == [20, 10, 30, 5]


def test_a_codec_that_is_not_known_is_named_and_only_if_it_is_wanted() -> None:
    manifest = compressed_manifest("lz9")

    def load(length: int) -> list[Fetch]:
        wants = [Want("t", Region((0, 0), (length, 16)), True)]
        return plan_load(manifest, wants, verify=True, max_gap_bytes=0, max_fetch_bytes=100)

    assert load(0) == []
    with pytest.raises(CheckpointCorruptError, match=r"t is stored with the codec 'lz9'.* newer release") as error:
        load(1)
    assert error.value.kind == "unsupported_version"


def test_the_layout_of_a_box_is_that_of_its_chunk() -> None:
    chunk = Chunk(Region((0, 0, 0), (4, 5, 6)), 0, 0, 120)
    assert box_layout(BoxPart(0, 0, 1, Region((1, 1, 1), (2, 3, 4)), chunk)) == ((2, 3, 4), (30, 6, 1))
    assert relative(Region((1, 1, 1), (2, 3, 4)), Region((1, 0, 0), (3, 5, 6))) == Region((0, 1, 1), (2, 3, 4))
