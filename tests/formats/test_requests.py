"""Requests to find the tensors of foreign checkpoints: several are in flight where a store makes each of them wait."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.formats.file_reader import FileReader
from bytecheckpoint.storage.backends.local_store import LocalStore

NUM_TENSORS = 60
_ALONE = 40
"""Requests before the first that waits for another one: more than a reader makes to see that the store is slow."""


def state() -> dict[str, torch.Tensor]:
    # Pairs of equal length and other shape: archives in DCP's files differ in more than their checksums.
    shapes = [(256, 128), (128, 256)]
    return {f"w{index:02}": torch.full(shapes[index % 2], float(index)) for index in range(NUM_TENSORS)}


def write_torch(folder: Path) -> Path:
    torch.save(state(), folder / "model.pt")
    return folder / "model.pt"


def write_dcp(folder: Path) -> Path:
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    return folder


def write_shards(folder: Path) -> Path:
    weights = {}
    for name, tensor in state().items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
        weights[name] = f"{name}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def write_torch_shards(folder: Path) -> Path:
    weights = {}
    for name, tensor in state().items():
        torch.save({name: tensor}, folder / f"{name}.bin")
        weights[name] = f"{name}.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


class _SlowReads:
    """Reads that take 2 ms. After the first, one waits until another is in flight, and raises if none ever is."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._in_flight = 0
        self._changed = threading.Condition()
        self._was_shared = threading.Event()

    def begin(self) -> None:
        with self._changed:
            self.num_requests += 1
            self._in_flight += 1
            is_alone = self.num_requests <= _ALONE
            if self._in_flight > 1:
                self._was_shared.set()
        time.sleep(0.002)
        if not is_alone and not self._was_shared.wait(timeout=10):
            raise AssertionError("a request waited for 10 seconds, and no other was made")

    def end(self) -> None:
        with self._changed:
            self._in_flight -= 1


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> _SlowReads:
    reads, read_into = _SlowReads(), LocalStore.read_into

    def read_slowly(store: LocalStore, name: str, byte_offset: int, buffer: memoryview) -> None:
        reads.begin()
        try:
            read_into(store, name, byte_offset, buffer)
        finally:
            reads.end()

    monkeypatch.setattr(LocalStore, "read_into", read_slowly)
    return reads


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_torch, write_dcp, write_shards, write_torch_shards])
def test_requests_for_many_tensors_are_in_flight_together(write, tmp_path: Path, slow_reads: _SlowReads) -> None:
    checkpoint = bcp.open(write(tmp_path))
    num_files = len(list(tmp_path.iterdir()))
    assert NUM_TENSORS <= slow_reads.num_requests <= NUM_TENSORS + 5 * num_files
    assert {name: checkpoint[name].shape for name in checkpoint} == {
        name: tuple(tensor.shape) for name, tensor in state().items()
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_inside_the_objects_of_dcp_take_no_requests_of_their_own(
    tmp_path: Path, slow_reads: _SlowReads
) -> None:
    states = {f"o{index:02}": (torch.full((3000,), float(index)), "plain") for index in range(NUM_TENSORS)}
    dcp.save(states, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = bcp.open(tmp_path)
    assert slow_reads.num_requests < NUM_TENSORS
    assert len(checkpoint) == NUM_TENSORS


def test_files_that_are_held_together_keep_no_blocks_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FileReader] = []
    create = FileReader.__init__

    def note(reader: FileReader, *args: Any) -> None:
        create(reader, *args)
        made.append(reader)

    monkeypatch.setattr(FileReader, "__init__", note)
    bcp.open(write_torch_shards(tmp_path))
    assert len(made) > NUM_TENSORS
    assert not any(reader._blocks for reader in made if reader.name.endswith(".bin"))
