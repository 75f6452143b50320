"""A save that goes through a local disk: both states can be seen, the next save need not wait for the upload, and
whatever fails or dies on the way, nothing that was durable is lost. Ranks on several hosts are in distributed/.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from faults.seams import Seam, before, files_under, loads_as, raising, state_of
from fsspec.implementations.memory import MemoryFileSystem

import bytecheckpoint as bcp
from bytecheckpoint.saving import local_stage as local_stage_module
from bytecheckpoint.saving import recover as recover_module
from bytecheckpoint.saving import upload
from bytecheckpoint.staging import file_image
from bytecheckpoint.storage import layout, stage_folder
from bytecheckpoint.storage.backends import direct_io, file_lock
from bytecheckpoint.storage.backends.file_lock import ProcessLock
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.store import one_block

UPLOADING = Seam(local_stage_module, "copy_file")


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def options(stage: Path) -> bcp.SaveOptions:
    return bcp.SaveOptions(local_stage=stage, timeout_s=20)


@contextmanager
def held_back(seam: Seam) -> Iterator[threading.Event]:
    """Within the block, calls of the function wait for the event, which is set in the end."""
    go = threading.Event()
    with before(seam, lambda: go.wait(20)):
        try:
            yield go
        finally:
            go.set()


def outcomes(saves: list[bcp.RecoveredSave]) -> list[tuple[int | None, str]]:
    return [(save.step, save.outcome) for save in saves]


def test_both_states_can_be_seen(tmp_path: Path, stage: Path, options: bcp.SaveOptions) -> None:
    root = tmp_path / "run"
    with held_back(UPLOADING) as go:
        handle = bcp.save(root, state_of(0, 1.0), step=7, async_save=True, options=options)
        local = handle.local(20)
        assert not handle.done()
        assert bcp.steps(root) == []
        assert local.step == 7
        assert local.path == str(root / "step_00000007")
        assert local.direct_ranks == ()
        assert local.folder
        assert files_under(local.folder)[0] == f"data/{local.save_id}-00000-0.safetensors"
        go.set()
        info = handle.result(20)
    assert info.save_id == local.save_id
    assert info.num_bytes == local.num_bytes
    assert {"write", "upload", "commit"} <= info.seconds.keys()
    assert handle.local() == local
    assert loads_as(root, 0, 1.0)
    assert files_under(stage) == []


def test_the_next_save_need_not_wait_for_the_upload(tmp_path: Path, options: bcp.SaveOptions) -> None:
    there: list[list[int]] = []
    note = before(Seam(layout, "commit"), lambda: there.append(bcp.steps(tmp_path / "run")))
    with note, held_back(UPLOADING) as go:
        first = bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        first.local(20)
        second = bcp.save(tmp_path / "run", state_of(0, 2.0), step=2, async_save=True, options=options)
        second.local(20)
        assert not first.done()
        assert not second.done()
        go.set()
        second.result(20)
        first.result(20)
    assert there == [[], [1]]  # uploads come in the order of the saves
    assert loads_as(tmp_path / "run", 0, 1.0, step=1)
    assert loads_as(tmp_path / "run", 0, 2.0, step=2)


def test_saves_to_one_place_are_committed_in_their_order(tmp_path: Path, stage: Path) -> None:
    options = bcp.SaveOptions(local_stage=stage, overwrite=True)
    handles = [
        bcp.save(tmp_path / "run", state_of(0, float(value)), async_save=True, options=options) for value in range(4)
    ]
    assert [handle.result(20).save_id for handle in handles] == [handle.local().save_id for handle in handles]
    assert loads_as(tmp_path / "run", 0, 3.0)
    assert len(files_under(tmp_path / "run" / "data")) == 1


def test_a_save_without_a_stage_waits_for_the_upload_of_one_that_has_it(
    tmp_path: Path, options: bcp.SaveOptions
) -> None:
    with held_back(UPLOADING) as go:
        first = bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        first.local(20)
        threading.Timer(0.1, go.set).start()
        bcp.save(tmp_path / "run", state_of(0, 2.0), step=2)
        assert bcp.steps(tmp_path / "run") == [1, 2]


def test_a_synchronous_save_gives_a_finished_handle(tmp_path: Path, stage: Path, options: bcp.SaveOptions) -> None:
    handle = bcp.save(tmp_path / "run", state_of(0, 1.0), options=options)
    assert handle.done()
    assert handle.local().num_bytes == handle.result().num_bytes
    assert loads_as(tmp_path / "run", 0, 1.0)
    assert files_under(stage) == []


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_every_snapshot_goes_through_it(tmp_path: Path, stage: Path, snapshot: Any) -> None:
    options = bcp.SaveOptions(local_stage=stage, snapshot=snapshot, codec="zstd", staging_bytes=32 << 20)
    for step in range(3):
        bcp.save(tmp_path / "run", state_of(0, float(step)), step=step, async_save=True, options=options).staged()
    bcp.save(tmp_path / "run", state_of(0, 9.0), step=9)
    assert all(loads_as(tmp_path / "run", 0, float(step), step=step) for step in range(3))


def test_a_save_without_a_stage_has_nothing_local(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="has no local stage"):
        bcp.save(tmp_path, state_of(0, 1.0)).local()


def test_a_stage_that_cannot_be_used_is_refused_before_anything_is_staged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    options = bcp.SaveOptions(local_stage=tmp_path / "file" / "stage")
    is_staged = before(Seam(file_image.LiveFile, "gather"), raising(RuntimeError("it was staged")))
    with is_staged, pytest.raises(bcp.CheckpointError, match="the local stage cannot be used"):
        bcp.save(tmp_path / "run", state_of(0, 1.0), options=options)


@pytest.mark.parametrize("value", ["s3://bucket/stage", "", 7, "a\0b"])
def test_a_stage_is_a_folder(value: Any) -> None:
    with pytest.raises(ValueError, match=r"SaveOptions\.local_stage takes a folder"):
        bcp.SaveOptions(local_stage=value)


def test_a_stage_is_kept_as_text(tmp_path: Path) -> None:
    assert bcp.SaveOptions(local_stage=tmp_path) == bcp.SaveOptions(local_stage=str(tmp_path))


def test_a_save_is_found_in_a_relative_stage_after_the_process_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = bcp.SaveOptions(local_stage="stage")
    with before(UPLOADING, raising(bcp.StorageError("gone", kind="unavailable"))), pytest.raises(bcp.StorageError):
        bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, options=options)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]


# What the disk has no room for goes to the path.


def no_room(monkeypatch: pytest.MonkeyPatch, *, bytes_taken: int) -> None:
    """Of a disk that can hold so many bytes of data files."""
    monkeypatch.setattr(local_stage_module.LocalStage, "_has_room", lambda _self, num_bytes: num_bytes <= bytes_taken)


def no_preallocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct_io, "preallocate", refuse)


def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise bcp.CheckpointSaveError("the disk is full", kind="no_space")

    monkeypatch.setattr(stage_folder, "create", refuse)


FULL: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no room": lambda patch: no_room(patch, bytes_taken=0),
    "found out by preallocation": no_preallocation,
    "not even for a folder": no_folder,
}


@pytest.fixture
def memory_url() -> Iterator[str]:
    yield f"memory://test-{uuid.uuid4().hex}"
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("how", FULL)
def test_a_full_disk_costs_no_checkpoint(
    memory_url: str, options: bcp.SaveOptions, monkeypatch: pytest.MonkeyPatch, how: str, caplog: Any
) -> None:
    FULL[how](monkeypatch)
    handle = bcp.save(memory_url, state_of(0, 1.0), step=1, async_save=True, options=options)
    local = handle.local(20)
    handle.result(20)
    monkeypatch.undo()
    assert local.direct_ranks == (0,)
    (warning,) = (text for text in caplog.messages if "has no room for all of this save" in text)
    assert f"is written to {memory_url}/step_00000001 directly" in warning
    assert loads_as(memory_url, 0, 1.0)


def test_a_file_system_without_a_limit_has_room(
    memory_url: str, options: bcp.SaveOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs_result((4096, 4096, *[0] * 7, 255))  # of a tmpfs with size=0
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    handle = bcp.save(memory_url, state_of(0, 1.0), step=1, async_save=True, options=options)
    assert handle.local(20).direct_ranks == ()
    handle.result(20)
    assert loads_as(memory_url, 0, 1.0)


def test_what_the_disk_takes_still_goes_through_it(
    tmp_path: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch, bytes_taken=3 << 20)
    options = bcp.SaveOptions(local_stage=stage, max_file_bytes=2 << 20)
    state = {"large": torch.ones(1 << 20), "small": torch.ones(1 << 18)}
    with held_back(UPLOADING) as go:
        handle = bcp.save(tmp_path / "run", state, async_save=True, options=options)
        local = handle.local(20)
        assert local.folder
        assert len(files_under(Path(local.folder) / "data")) == 1
        assert len(files_under(tmp_path / "run" / "data")) == 1
        go.set()
        handle.result(20)
    assert local.direct_ranks == (0,)


def test_a_disk_that_fills_up_while_it_is_written_fails_the_save(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(direct_io, "write_fully", refuse)
    with pytest.raises(bcp.CheckpointSaveError) as failure:
        bcp.save(tmp_path / "run", state_of(0, 1.0), options=options)
    assert failure.value.kind == "no_space"
    assert files_under(stage) == []


# What fails.


def test_a_save_that_fails_before_all_is_durable_leaves_nothing(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions
) -> None:
    handle_error = RuntimeError("boom")
    with before(Seam(upload, "encode_report"), raising(handle_error)):
        handle = bcp.save(tmp_path / "run", state_of(0, 1.0), async_save=True, options=options)
        with pytest.raises(bcp.CheckpointSaveError, match="boom"):
            handle.local(20)
        assert handle.exception(20) is not None
    assert files_under(stage) == []
    assert files_under(tmp_path / "run") == []
    bcp.save(tmp_path / "run", state_of(0, 1.0), options=options)


def test_an_upload_that_fails_keeps_the_data_and_recovery_finishes_it(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions
) -> None:
    with before(UPLOADING, raising(bcp.StorageError("the network is gone", kind="unavailable"))):
        handle = bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        handle.local(20)
        with pytest.raises(bcp.StorageError, match=r"the network is gone.*bcp.recover"):
            handle.result(20)
    assert bcp.steps(tmp_path / "run") == []
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 1.0)
    assert files_under(stage) == []
    assert bcp.recover(tmp_path / "run", options=options) == []


def test_recovery_replaces_what_a_broken_off_upload_has_left_at_the_path(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions
) -> None:
    with before(UPLOADING, raising(bcp.StorageError("gone", kind="unavailable"))), pytest.raises(bcp.StorageError):
        bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, options=options)
    (folder,) = stage.iterdir()
    (staged,) = (folder / "data").iterdir()
    left = tmp_path / "run" / "step_00000001" / "data" / staged.name
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(staged.read_bytes()[:-1])
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 1.0)


def test_an_upload_that_fails_unseen_is_told_by_the_next_save(tmp_path: Path, options: bcp.SaveOptions) -> None:
    is_over = threading.Event()
    with before(UPLOADING, raising(bcp.StorageError("the network is gone", kind="unavailable"))):
        first = bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        first.add_done_callback(lambda _: is_over.set())
        first.local(20)
        assert is_over.wait(20)
    with pytest.raises(bcp.StorageError, match="the network is gone"):
        bcp.save(tmp_path / "run", state_of(0, 2.0), step=2, async_save=True, options=options)
    bcp.save(tmp_path / "run", state_of(0, 2.0), step=2, options=options)


@pytest.mark.parametrize("async_save", [False, True])
def test_who_waits_for_an_upload_that_fails_is_told_so(
    tmp_path: Path, options: bcp.SaveOptions, async_save: bool
) -> None:
    """The upload is over, and that it failed is not known yet: the next save still waits."""
    told: list[BaseException | None] = []

    def save_next() -> None:
        try:
            told.append(bcp.save(tmp_path / "run", state_of(0, 2.0), step=2, async_save=async_save).exception(20))
        except bcp.CheckpointError as error:
            told.append(error)

    waiting = threading.Thread(target=save_next)
    is_started = threading.Event()

    def hold_up() -> None:
        if not is_started.is_set():
            waiting.start()
            is_started.set()
            waiting.join(0.3)  # what does not wait is through by then

    failing = before(UPLOADING, raising(bcp.StorageError("the network is gone", kind="unavailable")))
    with failing, before(Seam(local_stage_module.LocalStage, "close"), hold_up):
        bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        assert is_started.wait(20)
        waiting.join(20)
    (error,) = told
    assert "the network is gone" in str(error)
    assert bcp.steps(tmp_path / "run") == []


def test_a_commit_that_fails_is_finished_without_another_upload(tmp_path: Path, options: bcp.SaveOptions) -> None:
    with before(Seam(layout, "commit"), raising(bcp.StorageError("gone", kind="unavailable"))):
        handle = bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        assert isinstance(handle.exception(20), bcp.StorageError)
    with before(UPLOADING, raising(RuntimeError("uploaded again"))):
        assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 1.0)


def test_a_commit_whose_answer_was_lost_is_known_again(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = layout.commit

    def lose_answer(*arguments: Any, **keywords: Any) -> None:
        commit(*arguments, **keywords)
        raise bcp.StorageError("no answer", kind="unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(layout, "commit", lose_answer)
        handle = bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, async_save=True, options=options)
        assert "bcp ls" in str(handle.exception(20))
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "removed")]
    assert loads_as(tmp_path / "run", 0, 1.0)
    assert files_under(stage) == []


def failed_upload(root: Path | str, step: int, value: float, options: bcp.SaveOptions) -> bcp.SaveHandle:
    with before(UPLOADING, raising(bcp.StorageError("gone", kind="unavailable"))):
        handle = bcp.save(root, state_of(0, value), step=step, async_save=True, options=options)
        assert handle.exception(20) is not None
    return handle


def test_what_a_recovery_uses_is_not_taken_for_dead(tmp_path: Path, options: bcp.SaveOptions) -> None:
    """A clean-up goes by age, and data that an upload brought to the path may be older than a day."""
    failed_upload(tmp_path / "run", 1, 1.0, options)
    data = tmp_path / "run" / "step_00000001" / "data"
    found: list[list[str]] = []

    def look() -> None:
        found.append([path.name for path in data.iterdir()])

    with before(Seam(recover_module, "_upload_all"), look):
        (save,) = bcp.recover(tmp_path / "run", options=options)
    assert found == [[f"{save.save_id}-recovering"]]
    assert [path.suffix for path in data.iterdir()] == [".safetensors"]


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_a_disk_has_damaged_is_kept_back(tmp_path: Path, stage: Path, options: bcp.SaveOptions) -> None:
    handle = failed_upload(tmp_path / "run", 1, 1.0, options)
    failed_upload(tmp_path / "run", 2, 2.0, options)
    (data,) = (Path(handle.local().folder or "") / "data").iterdir()
    damage(data)
    first, second = bcp.recover(tmp_path / "run", options=options)
    assert (first.step, first.outcome) == (1, "kept")
    assert "checksum" in first.what
    assert second.outcome == "committed"
    assert bcp.steps(tmp_path / "run") == [2]
    assert len(list(stage.iterdir())) == 1


def test_one_damaged_manifest_does_not_keep_other_saves_from_being_finished(
    tmp_path: Path, options: bcp.SaveOptions
) -> None:
    folder = failed_upload(tmp_path / "run", 1, 1.0, options).local().folder or ""
    failed_upload(tmp_path / "run", 2, 2.0, options)
    damage(Path(folder) / "pending.manifest")
    first, second = bcp.recover(tmp_path / "run", options=options)
    assert (first.outcome, second.outcome) == ("kept", "committed")
    assert f"{folder}/pending.manifest cannot be read" in first.what
    assert bcp.steps(tmp_path / "run") == [2]
    assert files_under(folder)


def test_a_data_file_that_the_disk_cannot_read_is_kept_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    options = bcp.SaveOptions(local_stage=tmp_path / "link", timeout_s=20)
    folder = failed_upload(tmp_path / "run", 1, 1.0, options).local().folder or ""
    failed_upload(tmp_path / "run", 2, 2.0, options)
    read_into = LocalStore.read_into

    def fail(store: LocalStore, name: str, *arguments: Any, **keywords: Any) -> None:
        if str(store) == folder and name.startswith("data/"):
            path = str((Path(folder) / name).resolve())
            raise bcp.StorageError("input/output error", kind="unavailable", path=path)
        read_into(store, name, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read_into", fail)
        first, second = bcp.recover(tmp_path / "run", options=options)
    assert (first.outcome, first.what, second.outcome) == ("kept", "input/output error", "committed")
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 1.0, step=1)


def test_a_save_is_not_removed_in_favour_of_a_damaged_one(tmp_path: Path, stage: Path) -> None:
    options = bcp.SaveOptions(local_stage=stage, overwrite=True)
    failed_upload(tmp_path / "run", 1, 1.0, options)
    later = failed_upload(tmp_path / "run", 1, 2.0, options).local()
    (data,) = (Path(later.folder or "") / "data").iterdir()
    damage(data)
    first, second = bcp.recover(tmp_path / "run", options=options)
    assert (first.outcome, second.outcome) == ("kept", "kept")
    assert f"--save-id {later.save_id} --delete" in first.what
    assert "checksum" in second.what
    stage_folder.remove_all(str(stage), [Path(later.folder or "").name])
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 1.0)


def test_a_look_into_the_stage_does_not_disturb_a_save_that_begins(
    stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others look, and take over what nobody has, just before the new folder is locked."""
    seen: list[object] = []

    def look_and_take(path: str) -> ProcessLock:
        monkeypatch.undo()
        seen.extend(stage_folder.scan(str(stage)))
        seen.append(stage_folder.take_over(str(stage), Path(path).parent.name, writer_threads=1))
        return ProcessLock(path)

    monkeypatch.setattr(file_lock, "ProcessLock", look_and_take)
    journal = stage_folder.Journal(
        save_id="0" * 16, rank=0, num_ranks=1, root="/run", folder="", step=None, overwrite=False
    )
    folder = stage_folder.create(str(stage), journal, writer_threads=1)
    assert seen == [None]
    assert [found.is_alive for found in stage_folder.scan(str(stage))] == [True]
    folder.remove()
    assert files_under(stage) == []


def test_a_folder_whose_files_cannot_be_removed_yet_is_found_again(
    stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = stage_folder.Journal(
        save_id="0" * 16, rank=0, num_ranks=1, root="/run", folder="", step=None, overwrite=False
    )
    folder = stage_folder.create(str(stage), journal, writer_threads=1)
    folder.store.write("data/x", one_block(b"1"), replace=False)
    unlink = os.unlink

    def fail(path: str, **keywords: Any) -> None:
        if path == "x":
            raise OSError(errno.EIO, "input/output error")
        unlink(path, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        folder.remove()
    (found,) = stage_folder.scan(str(stage))
    assert (found.is_alive, found.journal, found.sizes) == (False, None, {"data/x": 1})
    assert stage_folder.remove_all(str(stage), [found.name]) == [found.name]
    assert files_under(stage) == []


def test_a_later_commit_removes_what_it_supersedes(tmp_path: Path, stage: Path, options: bcp.SaveOptions) -> None:
    for step in (3, 8):
        failed_upload(tmp_path / "run", step, 1.0, options)
    failed_upload(tmp_path / "another", 1, 1.0, options)
    bcp.save(tmp_path / "run", state_of(0, 2.0), step=5, options=options)
    left = {(found.journal.path, found.journal.step) for found in stage_folder.scan(str(stage)) if found.journal}
    assert left == {
        (str(tmp_path / "run" / "step_00000008"), 8),
        (str(tmp_path / "another" / "step_00000001"), 1),
    }


def rewrite(journal: Path) -> None:
    of_a_later_version = msgspec.msgpack.decode(journal.read_bytes()) | {"version": 2}
    journal.write_bytes(msgspec.msgpack.encode(of_a_later_version))


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "damaged": lambda journal: journal.write_bytes(b"\xff" + journal.read_bytes()[1:]),
    "empty": lambda journal: journal.write_bytes(b""),
    "of a later version": rewrite,
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_what_has_a_journal_that_cannot_be_read_is_left_alone(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    folder = Path(failed_upload(tmp_path / "run", 1, 1.0, options).local().folder or "")
    content = (folder / "journal").read_bytes()
    UNREADABLE[how](folder / "journal")
    bcp.save(tmp_path / "another", state_of(0, 2.0), step=5, options=options)
    assert f"{folder}, which a save has left, is left alone" in caplog.text
    assert bcp.recover(tmp_path / "run", options=options) == []
    (folder / "journal").write_bytes(content)
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 1.0)


@pytest.mark.parametrize("operation", ["list", "read_whole"])
def test_what_cannot_be_read_at_this_moment_is_left_alone(
    tmp_path: Path, options: bcp.SaveOptions, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    folder = failed_upload(tmp_path / "run", 1, 1.0, options).local().folder or ""
    original = getattr(LocalStore, operation)

    def fail(store: LocalStore, *arguments: Any, **keywords: Any) -> Any:
        if str(store) == folder:
            raise bcp.StorageError("input/output error", kind="unavailable", path=folder)
        return original(store, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, operation, fail)
        assert bcp.recover(tmp_path / "run", options=options) == []
        bcp.save(tmp_path / "another", state_of(0, 2.0), step=5, options=options)
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]


def test_a_recovery_does_not_replace_what_was_committed_meanwhile(
    tmp_path: Path, stage: Path, options: bcp.SaveOptions
) -> None:
    failed_upload(tmp_path / "run", 1, 1.0, options)
    bcp.save(tmp_path / "run", state_of(0, 2.0), step=1)
    (save,) = bcp.recover(tmp_path / "run", options=options)
    assert save.outcome == "removed"
    assert "another checkpoint" in save.what
    assert loads_as(tmp_path / "run", 0, 2.0)
    assert files_under(stage) == []


def test_a_recovery_replaces_only_what_the_save_was_to_replace(tmp_path: Path, stage: Path) -> None:
    options = bcp.SaveOptions(local_stage=stage, overwrite=True)
    bcp.save(tmp_path / "run", state_of(0, 1.0), step=1)
    failed_upload(tmp_path / "run", 1, 2.0, options)
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "committed")]
    assert loads_as(tmp_path / "run", 0, 2.0)
    assert len(files_under(tmp_path / "run" / "step_00000001" / "data")) == 1
    failed_upload(tmp_path / "run", 1, 3.0, options)
    bcp.save(tmp_path / "run", state_of(0, 4.0), step=1, options=bcp.SaveOptions(overwrite=True))
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "removed")]
    assert loads_as(tmp_path / "run", 0, 4.0)


def test_a_recovery_at_the_path_of_a_step_replaces_it_too(tmp_path: Path, stage: Path) -> None:
    """The checkpoint of the step is not one in the folder above it."""
    options = bcp.SaveOptions(local_stage=stage, overwrite=True)
    bcp.save(tmp_path / "run", state_of(0, 1.0), step=1)
    failed_upload(tmp_path / "run", 1, 2.0, options)
    (save,) = bcp.recover(tmp_path / "run" / "step_00000001", options=options)
    assert (save.outcome, save.what) == ("committed", "every rank's data was there")
    assert loads_as(tmp_path / "run", 0, 2.0)


def test_a_recovery_leaves_the_place_of_a_living_save_to_it(tmp_path: Path, stage: Path) -> None:
    options = bcp.SaveOptions(local_stage=stage, overwrite=True)
    failed_upload(tmp_path / "run", 1, 1.0, options)
    with held_back(UPLOADING) as go:
        newer = bcp.save(tmp_path / "run", state_of(0, 2.0), step=1, async_save=True, options=options)
        newer.local(20)
        assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "kept"), (1, "under_way")]
        go.set()
        newer.result(20)
    assert loads_as(tmp_path / "run", 0, 2.0)


def test_a_recovery_looks_again_before_it_replaces(tmp_path: Path, stage: Path) -> None:
    options = bcp.SaveOptions(local_stage=stage, overwrite=True)
    failed_upload(tmp_path / "run", 1, 1.0, options)
    elsewhere = bcp.SaveOptions(overwrite=True)

    def commit_another() -> None:
        bcp.save(tmp_path / "run", state_of(0, 2.0), step=1, options=elsewhere)

    with (
        before(Seam(recover_module, "_upload_all"), commit_another),
        pytest.raises(bcp.CheckpointSaveError, match=r"nothing was replaced.*call recover again"),
    ):
        bcp.recover(tmp_path / "run", options=options)
    assert loads_as(tmp_path / "run", 0, 2.0)
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "removed")]
    assert loads_as(tmp_path / "run", 0, 2.0)
    assert files_under(stage) == []


def test_recovery_looks_below_its_path_only(tmp_path: Path, options: bcp.SaveOptions) -> None:
    with before(UPLOADING, raising(bcp.StorageError("gone", kind="unavailable"))):
        bcp.save(tmp_path / "run", state_of(0, 1.0), step=1, role="actor", async_save=True, options=options).exception()
    failed_upload(tmp_path / "run-2", 1, 1.0, options)
    (save,) = bcp.recover(tmp_path / "run", options=options)
    assert save.path == str(tmp_path / "run" / "actor" / "step_00000001")
    assert loads_as(tmp_path / "run", 0, 1.0, role="actor")


def test_what_goes_to_one_endpoint_is_not_recovered_to_another(
    memory_url: str, stage: Path, options: bcp.SaveOptions
) -> None:
    """One URL at two services is two places."""
    here, there = {"endpoint_url": "http://here:9000"}, {"endpoint_url": "http://there:9000/"}
    with before(UPLOADING, raising(bcp.StorageError("gone", kind="unavailable"))):
        lost = bcp.save(memory_url, state_of(0, 1.0), step=1, async_save=True, storage_options=here, options=options)
        assert lost.exception(20) is not None
    bcp.save(memory_url, state_of(0, 2.0), step=2, storage_options=there, options=options)
    assert bcp.recover(memory_url, storage_options=there, options=options) == []
    assert bcp.recover(memory_url, options=options) == []
    assert outcomes(bcp.recover(memory_url, storage_options=here, options=options)) == [(1, "committed")]
    assert files_under(stage) == []


def test_recovery_needs_a_stage(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="local_stage"):
        bcp.recover(tmp_path, options=bcp.SaveOptions())
