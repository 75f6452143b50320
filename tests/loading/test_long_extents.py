"""Loads of checkpoints whose extents are as long as those of a checkpoint of many terabytes."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import bytecheckpoint as bcp
from bytecheckpoint.options import MIN_SCRATCH_BYTES
from bytecheckpoint.planner import file_layout

MiB = 1 << 20


@pytest.fixture(params=["a folder", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "a folder":
        yield str(tmp_path / "c")
        return
    yield f"memory://long-{uuid.uuid4().hex}"
    MemoryFileSystem.store.clear()


def test_extents_of_4_mib_load_with_the_least_scratch_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_layout, "_MAX_EXTENTS", 1)
    state = {"large": torch.arange(6 * MiB, dtype=torch.int32)}
    state |= {f"small.{number}": torch.full((7 * 1024,), float(number)) for number in range(300)}
    bcp.save(path, {"model": state})
    with bcp.open(path) as checkpoint:
        lengths = [length for file in checkpoint.manifest.files for length in file.extent_lengths]
        part = checkpoint["model.large"][3 * MiB - 5 : 3 * MiB + 5]
    assert 2 * MiB < max(lengths) <= 4 * MiB
    assert part.tolist() == list(range(3 * MiB - 5, 3 * MiB + 5))
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    options = bcp.LoadOptions(scratch_bytes=MIN_SCRATCH_BYTES, reader_threads=4)
    bcp.load(path, {"model": found}, options=options)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
