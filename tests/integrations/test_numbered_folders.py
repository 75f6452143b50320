"""Checkpoints in folders that a framework numbers: their order, and the deletion of the oldest."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.integrations.shared import numbered_folders
from bytecheckpoint.integrations.shared.agreed_folders import on_rank_0, record_together
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolders
from bytecheckpoint.manager import retention
from bytecheckpoint.manager.agreement.decisions import Decisions
from distributed.workers import WorkerPool


def save_of(folders: NumberedFolders, number: int, metadata: dict[str, Any] | None = None) -> bcp.SaveHandle:
    options = bcp.SaveOptions(overwrite=True)
    return bcp.save(folders.path_of(number), {"model": {"w": torch.ones(4)}}, metadata=metadata, options=options)


def save(folders: NumberedFolders, number: int, *, num_kept: int = 0) -> bcp.SaveHandle:
    handle = save_of(folders, number, folders.record(number).as_metadata())
    folders.keep_newest(handle, number, num_kept)
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
    again.begin(resumed=handles[1].result().path)
    assert numbers(again) == [2, 3, 1]
    save(again, 4, num_kept=2)
    again.close(60)
    assert numbers(again) == [1, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-4"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_forked_child_waits_for_no_save_of_its_parent_when_it_exits(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    folders.record(1)
    ends: list[Callable[[Any], None]] = []
    under_way: Any = SimpleNamespace(add_done_callback=ends.append)
    folders.retire_after(under_way, 1, None)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends the child, with another code, where it waits
        folders.close(3600)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ends[0](under_way)  # else the process of the tests waits for it when it exits
    folders.close(60)


@pytest.mark.parametrize("deletes_before", [False, True], ids=["noted at once", "noted after the deletions"])
def test_the_choice_of_the_newest_save_counts_whichever_is_noted_last(tmp_path: Path, *, deletes_before: bool) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    notes: list[Callable[[], None]] = []

    def noted_later(handle: bcp.SaveHandle) -> Any:
        return SimpleNamespace(add_done_callback=lambda after: notes.append(lambda: after(handle)))

    for number in (4, 8, 10):
        handle = save_of(folders, number, folders.record(number).as_metadata())
        held = {4, number}
        folders.retire_after(
            noted_later(handle),
            number,
            lambda held=held: [each for each in folders.committed() if each.number not in held],
        )
    notes[0]()
    notes[2]()
    if deletes_before:  # the folder of 8 is skipped: its save is not known to have ended
        assert folders._work.wait(began=time.monotonic(), failing_s=60, hanging_s=60) is None
        assert numbers(folders) == [4, 8, 10]
    notes[1]()
    folders.close(60)
    assert numbers(folders) == [4, 10]


def test_a_killed_deletion_is_finished_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    save(folders, 1)
    folders.wait(60)  # the thread that `begin` has asked must not meet the kill

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_delete_all", killed)
        save(folders, 2)
        folders._choose = lambda: folders.committed()[:-1]
        with pytest.raises(KeyboardInterrupt):
            folders._delete_due()
    assert numbers(folders) == [2]
    assert (tmp_path / "step-1/data").is_dir()
    again = NumberedFolders(tmp_path, "step-", storage_options=None)
    again.begin()
    again.close(60)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_deletion_that_failed_in_the_middle_is_finished_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    save(folders, 1)
    delete_all, failures = retention._delete_all, [OSError("the disk is gone")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        delete_all(*arguments)

    monkeypatch.setattr(retention, "_delete_all", fail_once)
    save(folders, 2, num_kept=1)
    folders.close(60)
    assert not failures
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_what_is_being_saved_again_is_not_deleted_meanwhile(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2):
        save(folders, number)
    folders.record(1)
    folders.retire(lambda: folders.committed()[:-1])
    folders.close(60)
    assert numbers(folders) == [1, 2]


def test_a_save_that_raised_at_once_holds_the_checkpoint_there_only_until_the_next_save(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2):
        save(folders, number)
    folders.record(1)
    with pytest.raises(bcp.CheckpointError):
        bcp.save(folders.path_of(1), {"model": object()})
    save(folders, 3, num_kept=1)
    folders.close(60)
    assert numbers(folders) == [3]


def test_a_save_that_raised_at_once_lets_no_deletion_into_one_in_flight_at_its_number(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2):
        save(folders, number)
    folders.wait(60)  # what `begin` has asked for is done
    ends: list[Callable[[bcp.SaveHandle], None]] = []
    folders.record(1)
    folders.keep_newest(SimpleNamespace(add_done_callback=ends.append), 1, 0)  # type: ignore[arg-type]
    folders.record(1)  # the save of this one raises
    handle = save(folders, 3)
    folders._choose = lambda: folders.committed()[:-1]
    folders._delete_due()
    assert numbers(folders) == [1, 3]
    ends[0](handle)
    folders._delete_due()
    assert numbers(folders) == [3]


def test_a_deletion_that_hangs_holds_no_save_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2):
        save(folders, number)
    begun, released = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        released.wait(60)

    monkeypatch.setattr(numbered_folders, "_delete", hang)
    monkeypatch.setattr(numbered_folders, "_HANGING_S", 0.2)
    folders.retire(lambda: folders.committed()[:-1])
    assert begun.wait(60)
    folders.record(3)  # another one need not wait
    with pytest.raises(bcp.StorageError, match=r"deletion of .*step-1.* has not ended .*nothing was written"):
        folders.record(1)
    folders.retire_after(save_of(folders, 3), 3, None)
    folders.wait(3600)
    released.set()
    monkeypatch.undo()
    folders.close(60)


def record_while_a_deletion_hangs(rank: int, world_size: int, folder: Path) -> tuple[str, tuple[int, ...]]:
    def begun() -> NumberedFolders:
        folders = NumberedFolders(folder, "step-", storage_options=None)
        folders._deleting = 1
        return folders

    decisions = Decisions(None, str(folder), timeout_s=60)
    folders = on_rank_0(decisions, begun)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbered_folders, "_HANGING_S", 0.2)
        with pytest.raises(bcp.StorageError) as raised:
            record_together(decisions, folders, 1)
    assert record_together(decisions, folders, 2).sequence == 0
    return raised.value.kind, raised.value.ranks


def test_all_ranks_raise_that_a_deletion_hangs(workers: WorkerPool, tmp_path: Path) -> None:
    """Rank 0 alone did, and the others waited for it in the save that it never began."""
    assert workers.run(record_while_a_deletion_hangs, tmp_path, world_size=2) == [("unavailable", (0,))] * 2


def test_a_folder_for_a_save_is_made_after_a_deletion_at_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion removed it: verl's tracker file could then name a step that lacked this role."""
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2):
        save(folders, number)
    begun, delete = threading.Event(), numbered_folders._delete

    def delete_late(*arguments: Any) -> None:
        begun.set()
        deadline = time.monotonic() + 60
        while 1 not in folders._saving and time.monotonic() < deadline:
            time.sleep(0.01)
        delete(*arguments)

    monkeypatch.setattr(numbered_folders, "_delete", delete_late)
    folders.retire(lambda: folders.committed()[:-1])
    assert begun.wait(60)
    place, decisions = Path(folders.path_of(1)), Decisions(None, str(tmp_path), timeout_s=60)
    make = partial(place.mkdir, exist_ok=True)
    record_together(decisions, folders, 1, then=make)
    assert list(place.iterdir()) == []
    folders.close(60)


def test_files_of_others_stay_with_their_folder(tmp_path: Path) -> None:
    removed: list[str] = []
    folders = NumberedFolders(tmp_path, "step-", storage_options=None, remove_beside=removed.append)
    folders.begin()
    save(folders, 1)
    (tmp_path / "step-1/note").write_text("mine")
    (tmp_path / "step-1/data/note").write_text("mine")
    save(folders, 2, num_kept=1)
    folders.close(60)
    left = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "step-1").rglob("*"))
    assert left == ["step-1/data", "step-1/data/note", "step-1/note"]
    assert removed == [str(tmp_path / "step-1")]


@pytest.mark.parametrize("damaged", [1, 3], ids=["the oldest", "the newest"])
def test_a_damaged_one_is_named_and_neither_counts_nor_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: int
) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2, 3):
        save(folders, number)
    (tmp_path / f"step-{damaged}/manifest.bcp").write_bytes(b"damaged")
    others = [number for number in (1, 2, 3) if number != damaged]
    again = NumberedFolders(tmp_path, "step-", storage_options=None)
    again.begin()
    assert [folder.number for folder in again.committed(to_load=True)] == others
    assert caplog.text.count("is passed over") == 1
    assert f"step-{damaged}" in caplog.text
    save(again, 4, num_kept=2)
    again.close(60)
    assert numbers(again) == [others[-1], 4]
    assert (tmp_path / f"step-{damaged}/manifest.bcp").exists()
    with pytest.raises(CheckpointCorruptError):
        again.read(damaged)


def test_a_damaged_one_without_another_is_an_error_where_one_is_to_be_loaded(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    save(folders, 1)
    (tmp_path / "step-1/manifest.bcp").write_bytes(b"damaged")
    assert folders.committed() == []
    with pytest.raises(CheckpointCorruptError):
        folders.committed(to_load=True)


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


def test_a_name_with_zeros_in_front_is_another_folder(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    save(folders, 6)
    shutil.copytree(tmp_path / "step-6", tmp_path / "step-007")
    for number in (7, 8):
        save(folders, number, num_kept=2)
    folders.close(60)
    assert numbers(folders) == [7, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-007", "step-7", "step-8"]
    assert NumberedFolders(tmp_path, "step-", width=3, storage_options=None).numbers() == [7]


def test_a_link_to_a_checkpoint_neither_counts_nor_deletes_it(tmp_path: Path) -> None:
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for name in ("step-0", "step-999"):
        (tmp_path / name).symlink_to("step-7", target_is_directory=True)
    for number in (5, 7):
        save(folders, number, num_kept=1)
    folders.close(60)
    assert numbers(folders) == [7]


def test_a_link_to_another_disk_counts(tmp_path: Path) -> None:
    other, root = tmp_path / "other", tmp_path / "root"
    for path in (other, root):
        path.mkdir()
    folders = NumberedFolders(root, "step-", storage_options=None)
    folders.begin()
    (root / "step-5").symlink_to(other, target_is_directory=True)
    for number in (5, 7):
        save(folders, number)
    assert numbers(folders) == [5, 7]


@pytest.mark.parametrize("metadata", ["mine", {}, {"sequence": "mine"}], ids=str)
def test_metadata_of_others_under_the_key_make_no_checkpoint_of_the_run(tmp_path: Path, metadata: object) -> None:
    bcp.save(tmp_path / "step-1", {"model": {"w": torch.ones(4)}}, metadata={"trainer": metadata})
    folders = NumberedFolders(tmp_path, "step-", own_key="trainer", storage_options=None)
    folders.begin()
    folders.close(60)
    assert numbers(folders) == []


def test_the_one_that_a_restart_goes_on_from_stays(tmp_path: Path) -> None:
    named = [1]
    folders = NumberedFolders(tmp_path, "step-", storage_options=None)
    folders.begin()
    for number in (1, 2, 3):
        handle = save(folders, number)
    folders.retire_after(handle, 3, lambda: [each for each in folders.committed()[:-1] if each.number != named[0]])
    folders.wait(60)
    assert numbers(folders) == [1, 3]
    named[0] = 3
    folders.retire_again()
    folders.close(60)
    assert numbers(folders) == [3]


@pytest.mark.parametrize("root", ["run", "./run", "run/", "run/../run"])
def test_the_folder_of_the_run_stays_when_its_last_checkpoint_goes_however_it_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = NumberedFolders(root, "step-", below="actor", storage_options=None)
    folders.begin()
    save(folders, 1).result()
    folders.retire(folders.committed)
    folders.close(60)
    assert list((tmp_path / "run").iterdir()) == []
