from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.manifest import Manifest, TensorTable, decode_manifest, encode_manifest, encoding
from bytecheckpoint.manifest.envelope import RUNS_VERSION
from bytecheckpoint.manifest.records import Columns, DataFile
from bytecheckpoint.manifest.run_column import RunColumn

RUNS = st.lists(st.tuples(st.integers(16, 200), st.integers(0, 3), st.integers(0, 1000)), min_size=1, max_size=8)


def values_of(runs: list[tuple[int, int, int]]) -> np.ndarray:
    """Returns, for each run, as many numbers from the last of the three on, so far apart."""
    return np.concatenate([first + step * np.arange(2 * count) for count, step, first in runs]).astype(np.uint32)


@given(RUNS, st.data())
def test_runs_have_the_values_that_they_stand_for(runs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    values = values_of(runs)
    made = RunColumn.of(values)
    assert made is not None
    column = RunColumn.decode(made.encode(), len(values), "numbers")
    assert len(column) == len(values)
    assert list(column) == values.tolist()
    start, stop = sorted(data.draw(st.integers(0, len(values))) for _ in range(2))
    assert column[start:stop].tolist() == values[start:stop].tolist()
    places = np.array(data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5)), np.int64)
    assert column[places].tolist() == values[places].tolist()
    assert column[len(values) - 1] == values[-1]
    assert column.astype(np.uint32).tolist() == values.tolist()
    assert column == made


def test_irregular_numbers_are_no_runs() -> None:
    assert RunColumn.of(np.random.default_rng(0).integers(0, 1000, 10_000)) is None


@pytest.mark.parametrize(
    "runs",
    [
        [(5, 1)],  # too few
        [(10, -1)],
        [(1, 5), (9, -1)],
        [(0, 3), (10, 1)],
        [(-2, 3), (12, 1)],
        [(10, 1 << 62)],
        [(1, (1 << 60) + 1), (1, -(1 << 60) - 4), (8, 1)],  # below 0 by less than a float shows
        [(1 << 62, 4), (10 - (1 << 62), 1)],
    ],
)
def test_runs_that_cannot_be_right_are_refused(runs: list[tuple[int, int]]) -> None:
    counts, steps = zip(*runs, strict=True)
    data = struct.pack(f"<{2 * len(runs)}q", *counts, *steps)
    with pytest.raises(bcp.CheckpointCorruptError, match="10 numbers from 0 on"):
        RunColumn.decode(memoryview(data), 10, "numbers")
    with pytest.raises(bcp.CheckpointCorruptError, match="are no runs"):
        RunColumn.decode(memoryview(data[:-8]), 10, "numbers")


def of_many_ranks(num_ranks: int) -> Manifest:
    """Returns the manifest of two tensors by rows, one row a rank and 8 bytes a row, each rank's in a file."""
    ranks, count = np.arange(num_ranks), np.array([num_ranks] * 2)
    columns = Columns(
        dtype_names=["float32"],
        dtypes=np.zeros(2, np.uint8),
        num_dims=np.array([2, 2]),
        num_chunks=count,
        shapes=np.array([num_ranks, 2] * 2),
        is_grid=np.ones(2, bool),
        grid_parts=np.array([1, 2] * 2),
        coordinates=np.zeros(0, np.uint8),
        files=np.concatenate([ranks, ranks]),
        byte_offsets=np.concatenate([np.full(num_ranks, 16), np.full(num_ranks, 24)]),
        byte_lengths=np.zeros(0, np.uint8),
        codec_names=[],
        codecs=np.zeros(0, np.uint8),
    )
    files = [DataFile(f"data/{rank}", 32, [32], [7]) for rank in range(num_ranks)]
    return Manifest(save_id="s", files=files, tensors=TensorTable(["a", "b"], columns, files))


def test_places_of_many_regular_chunks_are_written_as_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = of_many_ranks(500)
    as_columns = encode_manifest(manifest)
    monkeypatch.setattr(encoding, "_MANY_CHUNKS", 1000)
    as_runs = encode_manifest(manifest)
    assert struct.unpack_from("<HH", as_runs, 8) == RUNS_VERSION
    decoded = decode_manifest(as_runs)
    assert isinstance(decoded.table.columns.files, RunColumn)
    assert dict(decoded.tensors) == dict(decode_manifest(as_columns).tensors)
    assert encode_manifest(decoded) == as_runs
    monkeypatch.setattr(encoding, "_MANY_CHUNKS", 1001)
    assert encode_manifest(decoded) == as_columns


def test_runs_of_chunks_outside_of_their_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MANY_CHUNKS", 1000)
    manifest = of_many_ranks(500)
    wrong = manifest.table.columns._replace(byte_offsets=np.full(1000, 24))
    shared = Manifest(save_id="s", files=manifest.files, tensors=TensorTable(["a", "b"], wrong, manifest.files))
    with pytest.raises(bcp.CheckpointCorruptError, match="share bytes"):
        decode_manifest(encode_manifest(shared))


@pytest.mark.parametrize("index", [-1, np.array([0, -1]), np.array([True, False, True])])
def test_places_that_a_column_of_runs_does_not_know_are_refused(index: int | np.ndarray) -> None:
    column = RunColumn.of(np.arange(100))
    assert column is not None
    with pytest.raises(IndexError, match="from 0 on"):
        column[index]
