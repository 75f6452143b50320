"""Damage beside what is wanted: bytes that a load reads only because they lie between others fail no load, and an error
names the tensors whose bytes are damaged and no others.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from sample_tensors import random_bits, same_bits

import bytecheckpoint as bcp
from bytecheckpoint.planner import file_layout

MiB = 1 << 20
SIZES = {"a": 200_000, "b": 70_000, "c": 200_000}
GAPS = {"no gap": 0, "the store's": None, "2 MiB": 2 * MiB}


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "c") if request.param == "folder" else f"memory://beside-{uuid.uuid4().hex}"
    MemoryFileSystem.store.clear()


def state_of(codec: str) -> dict[str, torch.Tensor]:
    state = {name: random_bits(torch.float32, (numel,), len(name)) for name, numel in SIZES.items()}
    for tensor in state.values() if codec == "zstd" else ():
        tensor[: tensor.numel() // 2] = 0
    return state


def flip(place: str, tensor: str, position: float) -> None:
    """Another bit in this tensor, that far from its begin to its end."""
    manifest = bcp.open(place)._source.manifest
    chunk = manifest.tensors[tensor].chunks[0]
    fs, path = fsspec.core.url_to_fs(f"{place}/{manifest.files[chunk.file].name}")
    content = bytearray(fs.cat_file(path))
    content[chunk.byte_offset + int(position * (chunk.byte_length - 1))] ^= 4
    fs.pipe_file(path, bytes(content))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("gap", GAPS)
def test_a_tensor_that_is_left_out_may_be_damaged(place: str, gap: str, codec: str) -> None:
    state = state_of(codec)
    bcp.save(place, state, options=bcp.SaveOptions(codec=codec))
    for position in (0.0, 0.5, 1.0):
        flip(place, "b", position)
    target = {name: torch.zeros(SIZES[name]) for name in ("a", "c")}
    options = bcp.LoadOptions(max_gap_bytes=GAPS[gap])
    bcp.load(place, target, exclude="b", options=options)
    assert all(same_bits(target[name], state[name]) for name in target)
    with pytest.raises(bcp.CheckpointCorruptError, match=r"they are part of b\. Copy"):
        bcp.load(place, {name: torch.zeros(size) for name, size in SIZES.items()}, options=options)


@pytest.mark.parametrize("damaged", ["a", "c"])
@pytest.mark.parametrize("gap", GAPS)
def test_only_the_tensor_that_is_damaged_is_named(place: str, gap: str, damaged: str) -> None:
    bcp.save(place, state_of("none"))
    flip(place, damaged, 0.5)
    options = bcp.LoadOptions(max_gap_bytes=GAPS[gap])
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        bcp.load(place, {name: torch.zeros(SIZES[name]) for name in ("a", "c")}, exclude="b", options=options)
    assert caught.value.kind == "checksum"
    assert re.search(rf"are damaged \(checksum .*\); they are part of {damaged}\. Copy", str(caught.value))


def test_tensors_that_share_the_damaged_extent_are_all_named(place: str) -> None:
    bcp.save(place, {f"t{number}": torch.zeros(100) for number in range(5)} | {"w": torch.zeros(200_000)})
    flip(place, "t2", 0.5)
    with pytest.raises(bcp.CheckpointCorruptError, match=r"they are part of t0, t1, t3 and 1 more\. Copy"):
        bcp.load(place, {f"t{number}": torch.ones(100) for number in (0, 1, 3, 4)}, exclude=["t2", "w"])


@pytest.mark.parametrize("gap", GAPS)
def test_damage_between_the_rows_that_are_read_is_none(place: str, gap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_layout, "EXTENT_BYTES", 4096)
    columns = 1 << 16
    tensor = random_bits(torch.uint8, (8, columns), 1)
    bcp.save(place, {"t": tensor})
    options = bcp.LoadOptions(max_gap_bytes=GAPS[gap])
    flip(place, "t", 3.5 / 8)  # half way in the fourth row
    assert same_bits(bcp.open(place, options=options)["t"][:, :5000], tensor[:, :5000])
    flip(place, "t", (5 + 5000 / columns) / 8)  # in the extent where that of the sixth row ends
    with pytest.raises(bcp.CheckpointCorruptError, match=r"they are part of t\. Copy"):
        bcp.open(place, options=options)["t"][:, :5000]
