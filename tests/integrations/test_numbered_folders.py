"""Checkpoints in folders that a framework numbers: their order, and the deletion of the oldest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolders
from bytecheckpoint.manager import retention


def save(folders: NumberedFolders, number: int, *, num_kept: int = 0) -> bcp.SaveHandle:
    metadata = folders.record().as_metadata()
    options = bcp.SaveOptions(overwrite=True)
    handle = bcp.save(folders.path_of(number), {"model": {"w": torch.ones(4)}}, metadata=metadata, options=options)
    folders.keep_newest(handle, num_kept)
    return handle


def numbers(folders: NumberedFolders) -> list[int]:
    return [folder.number for folder in folders.committed()]


def test_the_order_is_that_of_commits(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (5, 10, 7):
        save(folders, number)
    assert numbers(folders) == [5, 10, 7]
    again = NumberedFolders(tmp_path, "step-", storage_options=None)
    again.begin()
    save(again, 8)
    assert numbers(again) == [5, 10, 7, 8]


def test_what_training_has_left_goes_first(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    handles = {number: save(folders, number) for number in (1, 2, 3)}
    again = NumberedFolders(tmp_path, "step-", storage_options=None)
    again.begin(resumed=handles[1].result().save_id)
    assert numbers(again) == [2, 3, 1]
    save(again, 4, num_kept=2)
    again.close(60)
    assert numbers(again) == [1, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-4"]


def test_a_killed_deletion_is_finished_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    save(folders, 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_delete_all", killed)
        save(folders, 2)
        folders._num_kept = 1
        with pytest.raises(KeyboardInterrupt):
            folders._delete_old()
    assert numbers(folders) == [2]
    assert (tmp_path / "step-1/data").is_dir()
    NumberedFolders(tmp_path, "step-", storage_options=None).begin()
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_other_folders_and_unfinished_saves_stay_and_do_not_count(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    (tmp_path / "my-step-3").mkdir()
    (tmp_path / "step-9/data").mkdir(parents=True)
    (tmp_path / "step-9/data/part").write_text("")
    for number in (1, 2):
        save(folders, number, num_kept=1)
    folders.close(60)
    assert numbers(folders) == [2]
    assert folders.numbers() == [2, 9]
    assert (tmp_path / "my-step-3").exists()


def test_the_one_that_a_restart_goes_on_from_stays(tmp_path: Path) -> None:
    named = [1]
    folders = NumberedFolders(tmp_path, "step-", storage_options=None, resumed_next=lambda: named[0])
    folders.begin()
    for number in (1, 2, 3):
        save(folders, number, num_kept=1)
    folders.wait(60)
    assert numbers(folders) == [1, 3]
    named[0] = 3
    folders.delete_again()
    folders.close(60)
    assert numbers(folders) == [3]
