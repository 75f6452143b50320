"""Whole files in the wrong place, or in none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp

TWO_FILES = bcp.SaveOptions(max_file_bytes=1 << 20)


def state(fill: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((200_000,), fill), "b": torch.full((200_000,), fill + 1)}


def data_files(path: Path) -> list[Path]:
    return sorted((path / "data").iterdir())


def test_two_files_of_one_length_that_were_exchanged_are_found(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(1.0), options=TWO_FILES)
    first, second = data_files(tmp_path)
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    for name in ("a", "b"):
        with pytest.raises(bcp.CheckpointCorruptError, match=rf"{name}\b") as caught:
            bcp.load(tmp_path, state(0.0), include=[name])
        assert caught.value.kind == "checksum"


def test_a_missing_file_is_told_before_the_state_is_touched(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(1.0), options=TWO_FILES)
    data_files(tmp_path)[1].unlink()
    loaded = state(0.0)
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        bcp.load(tmp_path, loaded)
    assert caught.value.kind == "missing_file"
    assert torch.equal(loaded["a"], state(0.0)["a"])
    assert torch.equal(loaded["b"], state(0.0)["b"])


def test_the_manifest_of_another_save_finds_none_of_its_files(tmp_path: Path) -> None:
    """A save's id is part of the names of its files."""
    for name in ("one", "two"):
        bcp.save(tmp_path / name, state(1.0), options=TWO_FILES)
    shutil.copyfile(tmp_path / "two" / "manifest.bcp", tmp_path / "one" / "manifest.bcp")
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        bcp.load(tmp_path / "one", state(0.0))
    assert caught.value.kind == "missing_file"
