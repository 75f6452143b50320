"""Checkpoints in a folder with a file that names the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.integrations.shared.tracked_folder import TrackedFolder
from bytecheckpoint.storage.backends.local_store import LocalStore

DIRECT = bcp.SaveOptions()


def save(folder: TrackedFolder, name: str, before: list[str | None], *, options: bcp.SaveOptions = DIRECT) -> None:
    """Saves, and adds what the file held before."""
    folder.save(
        name,
        {"model": {"w": torch.ones(4)}},
        tracked_as=name,
        async_save=False,
        metadata={},
        options=options,
        on_tracked=before.append,
    ).result()


def test_nothing_counts_as_replaced_where_the_file_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TrackedFolder(str(tmp_path), "latest", None, 60)
    before: list[str | None] = []
    save(folder, "a", before)
    save(folder, "b", before)
    write = LocalStore.write

    def refuse(self: LocalStore, name: str, *arguments: Any, **others: Any) -> Any:
        if name == "latest":
            raise StorageError("the disk is full", kind="storage", path=name)
        return write(self, name, *arguments, **others)

    monkeypatch.setattr(LocalStore, "write", refuse)
    with pytest.raises(StorageError, match="could not be written"):
        save(folder, "c", before)
    assert (before, folder.read(content="the name")) == ([None, "a"], "b")


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_save_that_failed_before_its_commit_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_staged: bool
) -> None:
    folder = TrackedFolder(str(tmp_path / "run"), "latest", None, 60)
    before: list[str | None] = []
    options = bcp.SaveOptions(local_stage=str(tmp_path / "stage") if is_staged else None)
    save(folder, "a", before, options=options)
    write = LocalStore.write

    def refuse(self: LocalStore, name: str, *arguments: Any, **others: Any) -> Any:
        if name.endswith(".safetensors"):
            raise StorageError("the disk is full", kind="no_space", path=name)
        return write(self, name, *arguments, **others)

    monkeypatch.setattr(LocalStore, "write", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        save(folder, "b", before, options=options)
    assert (before, folder.read(content="the name"), folder.committed()) == ([None], "a", ["a"])
