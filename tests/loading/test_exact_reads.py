"""What a load reads, whatever lies how: the right bytes, only those that are wanted, never a damaged one, and through
no more memory than it may take.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import packed_checkpoints
import pytest
import torch
from fake_url_store import Elsewhere, url_of
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import contents_of, write_checkpoint
from sample_tensors import random_bits, same_bits
from storage.s3_service import Faults, S3Service
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.adapters.shards import LocalShard, dtype_name
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.region import Region, whole
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.layout import read_manifest

MiB = 1 << 20
SHAPES = [(), (0, 3), (7,), (6, 5), (3, 4, 5), (2, 3, 4, 5), (50, 60), (9, 700), (7, 11, 40)]
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]


class Tuning(NamedTuple):
    """LoadOptions, but without their lower limits."""

    verify: bool = True
    reader_threads: int = 1
    max_gap_bytes: int | None = None
    scratch_bytes: int = 8 * MiB
    direct: str = "off"


@st.composite
def cuts(draw: st.DrawFn, region: Region, depth: int = 3) -> list[Region]:
    """The region, cut across any dimensions into uneven parts."""
    dims = [dim for dim, length in enumerate(region.lengths) if length > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [region]
    dim = draw(st.sampled_from(dims))
    first = draw(st.integers(1, region.lengths[dim] - 1))
    parts = []
    for offset, length in ((0, first), (first, region.lengths[dim] - first)):
        offsets, lengths = list(region.offsets), list(region.lengths)
        offsets[dim] += offset
        lengths[dim] = length
        parts += draw(cuts(Region(tuple(offsets), tuple(lengths)), depth - 1))
    return parts


@st.composite
def parts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    bounds = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(map(slice, region.offsets, region.ends))]


def compressible(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    bits = random_bits(dtype, shape, seed)
    bits.view(-1)[: bits.numel() // 2] = 0
    return bits


def memory_for(dtype: torch.dtype, lengths: tuple[int, ...], kind: str) -> torch.Tensor:
    if kind == "flat" or not lengths:
        return torch.zeros(lengths, dtype=dtype)
    if kind == "transposed":
        return torch.zeros(lengths[::-1], dtype=dtype).permute(*reversed(range(len(lengths))))
    return torch.zeros((*lengths[:-1], 2 * lengths[-1] + 1), dtype=dtype)[..., 1::2]


def opened(folder: Path, tuning: Tuning) -> Source:
    store = LocalStore(str(folder), writer_threads=1)
    return Source(store, "", read_manifest(store, ""), tuning, is_exchanged=False)  # type: ignore[arg-type]


def fill(source: Source, wants: Sequence[tuple[str, tuple[int, ...], Region, torch.Tensor]]) -> list[Fetch]:
    shards = [LocalShard(fqn, dtype_name(tensor.dtype), shape, region, tensor) for fqn, shape, region, tensor in wants]
    fqns = [shard.fqn for shard in shards]
    fetches = source.plan(shards, fqns)
    source.read(fetches, shards, fqns)
    return fetches


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_layout_is_read_exactly_with_any_memory_and_any_gaps(data: st.DataObject) -> None:
    is_compressed = data.draw(st.booleans())
    tensors, files = {}, [[], []]
    for number in range(data.draw(st.integers(1, 3))):
        shape, dtype = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES))
        tensor = tensors[f"t{number}"] = compressible(dtype, shape, number)
        codec = data.draw(st.sampled_from(["none", "zstd"])) if is_compressed else "none"
        for content in contents_of(f"t{number}", tensor, data.draw(cuts(whole(shape))), codec):
            files[data.draw(st.integers(0, 1))].append(content)
    files = [sorted(contents, key=lambda content: content.codec != "none") for contents in files]
    wants = []
    for _ in range(data.draw(st.integers(1, 4))):
        fqn = data.draw(st.sampled_from(sorted(tensors)))
        shape = tuple(tensors[fqn].shape)
        region = data.draw(parts_of(shape) | st.just(whole(shape)))
        kind = data.draw(st.sampled_from(["flat", "transposed", "strided"]))
        wants.append((fqn, shape, region, memory_for(tensors[fqn].dtype, region.lengths, kind)))
    tuning = Tuning(
        verify=data.draw(st.booleans()),
        reader_threads=data.draw(st.sampled_from([1, 3])),
        max_gap_bytes=data.draw(st.sampled_from([None, 0, 9, 300, MiB])),
        scratch_bytes=data.draw(st.sampled_from([4, 500, 10_000, 8 * MiB])),
    )
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_checkpoints, "EXTENT_BYTES", data.draw(st.sampled_from([16, 100, 4096])))
        write_checkpoint(Path(folder) / "c", files)
        fetches = fill(opened(Path(folder) / "c", tuning), wants)
    for fqn, _, region, found in wants:
        assert same_bits(found, cut(tensors[fqn], region))
    if not tuning.verify and tuning.max_gap_bytes == 0 and not is_compressed and len(wants) == 1:
        assert sum(fetch.byte_length for fetch in fetches) == wants[0][3].nbytes


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_flipped_bit_anywhere_is_found_by_every_read_that_could_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(packed_checkpoints, "EXTENT_BYTES", 200)
    tensor = compressible(torch.int16, (60, 80), 1)
    halves = [Region((0, 0), (60, 30)), Region((0, 30), (60, 50))]
    manifest = write_checkpoint(tmp_path / "c", [contents_of("t", tensor, halves, codec)])
    file = tmp_path / "c" / manifest.files[0].name
    good = file.read_bytes()
    chunks = manifest.tensors["t"].chunks
    indices: list[Any] = [..., 7, (slice(3, 50), slice(2, 4)), (slice(None), 31), (slice(59, 60), slice(70, 80))]
    for position in range(chunks[0].byte_offset, len(good), 61):
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        file.write_bytes(damaged)
        num_found = 0
        for index in indices:
            try:
                assert same_bits(bcp.open(tmp_path / "c")["t"][index], tensor[index])
            except bcp.CheckpointCorruptError as error:
                assert error.kind == "checksum"  # noqa: PT017 - a read that needs none of the extent is right instead
                num_found += 1
        assert num_found > 0


def test_rows_far_apart_are_read_one_by_one_and_close_ones_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_checkpoints, "EXTENT_BYTES", 4096)
    tensor = random_bits(torch.uint8, (8, 1 << 18), 1)
    write_checkpoint(tmp_path / "c", [contents_of("t", tensor, [whole((8, 1 << 18))], "none")])

    def num_bytes(columns: int, **tuning: Any) -> tuple[int, int]:
        target = torch.zeros(8, columns, dtype=torch.uint8)
        source = opened(tmp_path / "c", Tuning(**tuning))
        fetches = fill(source, [("t", (8, 1 << 18), Region((0, 0), (8, columns)), target)])
        assert same_bits(target, tensor[:, :columns])
        return len(fetches), sum(fetch.byte_length for fetch in fetches)

    assert num_bytes(1000, verify=False, max_gap_bytes=0) == (8, 8000)
    assert num_bytes(1000, max_gap_bytes=0) == (8, 8 * 4096)
    assert num_bytes(8192, verify=False) == (8, 8 * 8192)
    assert num_bytes((1 << 18) - 50_000) == (1, (7 << 18) + 52 * 4096)
    assert num_bytes(1000, max_gap_bytes=MiB) == (1, (7 << 18) + 4096)


ROW_BYTES = 100_000
"""Of what is wanted of each row."""


def save_rows(path: str, apart_bytes: int, **storage: Any) -> torch.Tensor:
    """Three rows, between whose wanted bytes lie so many others."""
    rows = random_bits(torch.uint8, (3, ROW_BYTES + apart_bytes), 1)
    bcp.save(path, {"t": rows}, **storage)
    return rows[:, :ROW_BYTES]


@pytest.mark.parametrize(("apart_bytes", "num_requests"), [(1_000_000, 1), (3_000_000, 3)])
def test_rows_at_a_url_come_in_one_request_unless_another_is_faster(
    tmp_path: Path, apart_bytes: int, num_requests: int
) -> None:
    expected = save_rows(str(tmp_path), apart_bytes)
    stored = bcp.open(url_of(tmp_path))["t"]
    Elsewhere.ranges.clear()
    assert same_bits(stored[:, :ROW_BYTES], expected)
    assert sum("/data/" in path for path, _, _ in Elsewhere.ranges) == num_requests


@pytest.mark.parametrize(("apart_bytes", "num_requests"), [(1_000_000, 1), (3_000_000, 3)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_rows_in_s3_come_in_one_request_unless_another_is_faster(
    s3: S3Service, s3_prefix: str, s3_faults: Faults, apart_bytes: int, num_requests: int
) -> None:
    url = f"s3://{s3.bucket}/{s3_prefix}"
    expected = save_rows(url, apart_bytes, storage_options=s3.options)
    stored = bcp.open(url, storage_options=s3.options)["t"]
    s3_faults.reset()
    assert same_bits(stored[:, :ROW_BYTES], expected)
    assert sum("/data/" in line and line.startswith("GET") for line in s3_faults.requests) == num_requests


def peak_of(load: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        load()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_at_a_url", [False, True])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_scratch_memory_stays_within_what_it_may_take(tmp_path: Path, is_at_a_url: bool, codec: Any) -> None:
    """One tensor goes through scratch memory, the other straight into its target."""
    state = {"a": compressible(torch.int16, (1000, 6000), 1), "b": compressible(torch.int16, (8 * MiB,), 2)}
    bcp.save(tmp_path, state, options=bcp.SaveOptions(codec=codec))
    path = url_of(tmp_path) if is_at_a_url else str(tmp_path)
    for threads, verify in ((1, True), (4, False), (4, True), (16, True)):
        target = {"a": torch.zeros(6000, 1000, dtype=torch.int16).t(), "b": torch.zeros(8 * MiB, dtype=torch.int16)}
        options = bcp.LoadOptions(scratch_bytes=8 * MiB, reader_threads=threads, verify=verify)
        load = partial(bcp.load, path, target, options=options)
        load()  # what is kept for the next load is there afterwards
        peak_bytes = peak_of(load)
        assert all(same_bits(target[name], tensor) for name, tensor in state.items())
        assert 1 * MiB < peak_bytes < 9 * MiB, (threads, verify)


def test_half_of_what_was_saved_reads_half_of_the_bytes(tmp_path: Path) -> None:
    """Twice as many ranks as before each read no more than their part, whatever the checksums cover."""
    tensor = random_bits(torch.bfloat16, (600, 1100), 1)
    bcp.save(tmp_path, {"a": tensor})
    source = opened(tmp_path, Tuning())
    for part in (2, 4):
        target = torch.zeros(600 // part, 1100, dtype=torch.bfloat16)
        region = Region((600 // part, 0), (600 // part, 1100))
        fetches = fill(source, [("a", (600, 1100), region, target)])
        assert same_bits(target, cut(tensor, region))
        assert sum(fetch.byte_length for fetch in fetches) == target.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "extent_bytes"),
    [
        ((2100, 2300), torch.float32, MiB // 4),  # 19 MB, of which the longest extents are known
        ((1000, 1100), torch.float32, 1000 * 1100 * 4 // 16 + 16),
        ((600, 1100), torch.bfloat16, MiB // 8 + 16),
        ((20, 30_000), torch.uint8, MiB // 8 + 16),
    ],
)
def test_a_part_costs_at_most_an_extent_at_each_end_of_each_run(
    tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype, extent_bytes: int
) -> None:
    tensor = random_bits(dtype, shape, 1)
    bcp.save(tmp_path, {"a": tensor, "b": torch.zeros(100)})
    source, chooser = opened(tmp_path, Tuning(max_gap_bytes=0)), random.Random(1)
    for number in range(24):
        cuts = [sorted(chooser.sample(range(length + 1), 2)) for length in shape]
        cuts[number % 2] = cuts[number % 2] if number % 3 == 0 else [0, shape[number % 2]]  # rows, columns, or a box
        region = Region(tuple(low for low, _ in cuts), tuple(high - low for low, high in cuts))
        target = torch.zeros(region.lengths, dtype=dtype)
        fetches = fill(source, [("a", shape, region, target)])
        assert same_bits(target, cut(tensor, region))
        num_runs = 1 if region.lengths[1] == shape[1] else region.lengths[0]
        assert sum(fetch.byte_length for fetch in fetches) < target.nbytes + 2 * extent_bytes * num_runs


def test_a_part_of_a_large_tensor_costs_a_few_percent_more_than_it_is(tmp_path: Path) -> None:
    shape = (50, 1_400_000)
    tensor = random_bits(torch.uint8, shape, 1)
    bcp.save(tmp_path, {"a": tensor})
    source = opened(tmp_path, Tuning(max_gap_bytes=0))
    for region in (
        Region((23, 0), (9, shape[1])),
        Region((0, 0), (11, shape[1])),
        Region((23, 999), (9, shape[1] - 999)),
    ):
        target = torch.zeros(region.lengths, dtype=torch.uint8)
        fetches = fill(source, [("a", shape, region, target)])
        assert same_bits(target, cut(tensor, region))
        assert sum(fetch.byte_length for fetch in fetches) < target.nbytes * 1.05


def memory_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell the peak of memory")
def test_a_module_on_the_meta_device_is_read_without_a_second_copy(tmp_path: Path) -> None:
    source = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    num_bytes = 6 * 4 * 2048 * 2048
    bcp.save(tmp_path, {"model": source})
    with torch.device("meta"):
        target = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_bytes("VmRSS")
    bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(scratch_bytes=8 * MiB))
    assert memory_bytes("VmHWM") - before < num_bytes * 3 // 2
    assert all(map(torch.equal, source.parameters(), target.parameters()))
