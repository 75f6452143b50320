"""A manager that copies its checkpoints to a second root: which, when, and in spite of what."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import forked_python
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint import keep_policies, save_policies
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
)
from bytecheckpoint.manager.after_commit import background, retried_work, second_root

EVERY = save_policies.EverySteps(1)
NEWEST = keep_policies.Latest(1)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def manager_at(path: Path, *, keep: Any = NEWEST, timeout_s: float = 600, **options: Any) -> bcp.CheckpointManager:
    options = {"cool_down": path / "there", "save": bcp.SaveOptions(timeout_s=timeout_s), **options}
    return bcp.CheckpointManager(path / "here", save=EVERY, keep=keep, options=bcp.ManagerOptions(**options))


def save_steps(manager: bcp.CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state_at(step), metrics={"loss": 10.0 - step})


def value_of(root: Path, step: Any = "latest") -> float:
    state = state_at(-1)
    bcp.load(root, state, step=step)
    return float(state["weight"][0])


def test_each_checkpoint_is_copied_and_only_the_newest_stays_at_the_first_root(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        save_steps(manager, 1, 2, 3)
        manager.wait()
        assert bcp.steps(tmp_path / "here") == [3]
        assert bcp.steps(tmp_path / "there") == [1, 2, 3]
        save_steps(manager, 4)
    assert (bcp.steps(tmp_path / "here"), bcp.steps(tmp_path / "there")) == ([4], [1, 2, 3, 4])
    assert [value_of(tmp_path / "there", step) for step in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert bcp.load(tmp_path / "there", state_at(0)).step == 4


def test_a_policy_decides_what_is_copied_and_what_stays_there(tmp_path: Path) -> None:
    keep = keep_policies.EverySteps(4) | NEWEST
    with manager_at(tmp_path, keep=keep_policies.All(), cool_down_keep=keep) as manager:
        for step in range(1, 7):
            save_steps(manager, step)
            manager.wait()
            assert bcp.latest(tmp_path / "there") == step
    assert (bcp.steps(tmp_path / "here"), bcp.steps(tmp_path / "there")) == ([1, 2, 3, 4, 5, 6], [4, 6])


def test_a_role_has_a_folder_of_its_own_there(tmp_path: Path) -> None:
    options = bcp.ManagerOptions(cool_down=tmp_path / "there")
    with bcp.CheckpointManager(tmp_path / "here", save=EVERY, role="actor", options=options) as manager:
        save_steps(manager, 1)
    assert bcp.steps(tmp_path / "there" / "actor") == [1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_the_second_root_may_be_on_s3(s3: S3Service, s3_prefix: str, tmp_path: Path) -> None:
    root = f"s3://{s3.bucket}/{s3_prefix}"
    keep = keep_policies.Latest(2)
    with manager_at(tmp_path, cool_down=root, cool_down_keep=keep, cool_down_options=s3.options) as manager:
        save_steps(manager, 1, 2, 3)
    assert bcp.steps(tmp_path / "here") == [3]
    assert bcp.steps(root, storage_options=s3.options)[-1] == 3
    state = state_at(0)
    assert bcp.load(root, state, storage_options=s3.options).step == 3
    assert state["weight"][0] == 3


def test_metrics_that_are_reported_later_are_copied_too(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep=keep_policies.All(), cool_down_keep=keep_policies.Best(1, "loss")) as manager:
        save_steps(manager, 1, 2)
        manager.wait()
        manager.report(1, {"loss": 0.0})
        save_steps(manager, 3)
    assert bcp.steps(tmp_path / "there") == [1, 3]
    with bcp.CheckpointManager(tmp_path / "there", save=EVERY, options=bcp.ManagerOptions(read_only=True)) as manager:
        best = manager.best("loss")
        assert best is not None
        assert (best.step, best.metrics) == (1, {"loss": 0.0})


def test_a_step_that_waits_for_its_copy_is_not_deleted_and_the_next_attempt_copies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> bool:
        raise StorageError("the network is down", kind="unavailable")

    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    monkeypatch.setattr(retried_work, "_SHORTEST_PAUSE_S", 0.01)
    with manager_at(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(second_root, "copy_step", refuse)
            save_steps(manager, 1, 2)
            with pytest.raises(StorageError, match="network is down"):
                manager.wait()
            assert manager.steps() == [1, 2]
        manager.wait()
        assert manager.steps() == [2]
    assert bcp.steps(tmp_path / "there") == [1, 2]
    assert caplog.text.count("is tried again") == 1


def test_a_step_is_deleted_that_was_copied_while_the_first_work_after_a_commit_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bcp.save(tmp_path / "here", state_at(1), step=1)
    real = background.Background._record_earlier

    def record(self: background.Background) -> None:
        while self._second is not None and self._second.waiting():
            time.sleep(0.01)
        real(self)

    monkeypatch.setattr(background.Background, "_record_earlier", record)
    with manager_at(tmp_path) as manager:
        save_steps(manager, 2)
        manager.wait()
        assert manager.steps() == [2]
    assert bcp.steps(tmp_path / "there") == [1, 2]


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_damaged_step_is_named_and_the_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    with bcp.CheckpointManager(tmp_path / "here", save=EVERY) as manager:
        save_steps(manager, 1)
    for file in (tmp_path / "here" / "step_00000001" / "data").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        if is_missing:
            file.unlink()
    manager = manager_at(tmp_path, keep=keep_policies.All())
    save_steps(manager, 2)
    with pytest.raises(CheckpointNotFoundError if is_missing else CheckpointCorruptError, match="step_00000001"):
        manager.close()
    assert bcp.steps(tmp_path / "there") == [2]


def test_a_copy_that_hangs_is_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    monkeypatch.setattr(second_root, "copy_step", lambda *_, **__: released.wait())
    manager = manager_at(tmp_path, timeout_s=1.0)
    save_steps(manager, 1, 2)
    with pytest.raises(StorageError, match="no progress for 1 s"):
        manager.wait()
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 60, "of a copy that never ends"
    assert "no progress for 1 s" in caplog.text
    released.set()
    assert bcp.steps(tmp_path / "here") == [1, 2]


KILLED = """
import os, pathlib, signal, sys
import torch
import bytecheckpoint as bcp
from bytecheckpoint.manager.after_commit import second_root
second_root.copy_step = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
options = bcp.ManagerOptions(cool_down=sys.argv[2])
manager = bcp.CheckpointManager(
    sys.argv[1], save=bcp.save_policies.EverySteps(1), keep=bcp.keep_policies.Latest(1), options=options
)
manager.save(1, {"weight": torch.full((8,), 1.0)})
manager.close()
"""


def test_a_restart_goes_on_with_the_copies_that_are_missing(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    killed = subprocess.run([forked_python(), "-c", KILLED, str(here), str(there)], check=False, timeout=120)
    assert killed.returncode < 0
    assert (bcp.steps(here), bcp.steps(there) if there.exists() else []) == ([1], [])
    with manager_at(tmp_path) as manager:
        state = state_at(0)
        assert manager.restore(state) is not None
        manager.wait()  # nothing was saved yet
        assert bcp.steps(there) == [1]
        save_steps(manager, 2, 3)
    assert (bcp.steps(here), bcp.steps(there)) == ([1, 3], [1, 2, 3])  # 1 was restored
    assert value_of(there, 1) == 1


def test_a_branch_that_training_left_is_replaced_there_too(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        save_steps(manager, 1, 2, 3)
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        manager.restore(state_at(0), step=1)
        manager.save(2, state_at(20))
    assert bcp.steps(tmp_path / "there") == [1, 2, 3]
    assert value_of(tmp_path / "there", 2) == 20


def go_on_there(tmp_path: Path) -> tuple[int | None, float]:
    """Returns the step that a run which goes on in the second root restores, and its value."""
    state = state_at(-1)
    with bcp.CheckpointManager(tmp_path / "there", save=EVERY) as manager:
        report = manager.restore(state)
    assert report is not None
    return report.step, float(state["weight"][0])


def test_copies_of_a_left_branch_are_replaced_where_the_first_root_has_deleted_their_steps(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep=keep_policies.Latest(2)) as manager:
        manager.save(1, state_at(1), pin=True)
        save_steps(manager, 2, 3, 4, 5, 6)
    assert (bcp.steps(tmp_path / "here"), bcp.steps(tmp_path / "there")) == ([1, 5, 6], [1, 2, 3, 4, 5, 6])
    with manager_at(tmp_path, keep=keep_policies.Latest(2)) as manager:
        manager.restore(state_at(0), step=1)
        for step in (2, 3):
            manager.save(step, state_at(step * 10))
    assert [value_of(tmp_path / "there", step) for step in range(1, 7)] == [1, 20, 30, 4, 5, 6]
    assert go_on_there(tmp_path) == (3, 30)


def test_copies_of_a_left_branch_are_replaced_by_a_later_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("the network is down", kind="unavailable")

    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        save_steps(manager, 1, 2, 3, 4, 5)
    bcp.delete(tmp_path / "here", step=3)
    with monkeypatch.context() as patch:
        patch.setattr(second_root, "write_branch", refuse)
        for back_to, step in ((1, 2), (2, 3)):
            manager = manager_at(tmp_path, cool_down_keep=keep_policies.All())
            manager.restore(state_at(0), step=back_to)
            manager.save(step, state_at(step * 10))
            with pytest.raises(StorageError, match="network is down"):
                manager.close()
            assert {back_to, step} <= set(bcp.steps(tmp_path / "here")), "neither restored nor copied yet"
        assert [value_of(tmp_path / "there", step) for step in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 5]
    with manager_at(tmp_path, cool_down_keep=keep_policies.Latest(2)) as manager:
        report = manager.restore(state_at(0))
        assert report is not None
        assert report.step == 3
        manager.save(4, state_at(40))
    assert bcp.steps(tmp_path / "there") == [3, 4]
    assert [value_of(tmp_path / "there", step) for step in (3, 4)] == [30, 40]
    assert go_on_there(tmp_path) == (4, 40)


def test_the_copy_of_a_left_step_from_which_training_goes_on_after_all_is_no_longer_left(tmp_path: Path) -> None:
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        save_steps(manager, 1, 2, 3)
    for back_to, step in ((1, 5), (3, 4)):
        with manager_at(tmp_path, keep=keep_policies.All()) as manager:
            manager.restore(state_at(0), step=back_to)
            save_steps(manager, step)
    bcp.delete(tmp_path / "there", step=4)
    assert go_on_there(tmp_path) == (3, 3)


def test_copies_of_another_run_are_not_of_a_branch_that_training_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        save_steps(manager, 4, 5, 6)
    (tmp_path / "here").rename(tmp_path / "other")
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        save_steps(manager, 1, 2, 3)
    manager = manager_at(tmp_path, keep=keep_policies.All())
    manager.restore(state_at(0), step=1)
    save_steps(manager, 2, 4)
    with pytest.raises(CheckpointExistsError, match="another checkpoint"):
        manager.close()
    assert [value_of(tmp_path / "there", step) for step in (4, 5, 6)] == [4, 5, 6]


def test_copies_are_not_taken_for_left_after_another_run_has_used_the_second_root(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        save_steps(manager, 1, 2, 3)
    with manager_at(tmp_path) as manager:
        manager.restore(state_at(0))
        save_steps(manager, 4, 5, 6)
    (tmp_path / "here").rename(tmp_path / "other")
    with manager_at(tmp_path) as manager:
        save_steps(manager, 11)
    (tmp_path / "here").rename(tmp_path / "another")
    (tmp_path / "other").rename(tmp_path / "here")
    with manager_at(tmp_path) as manager:
        manager.restore(state_at(0))
        save_steps(manager, 7)
    for step in (6, 7, 11):
        bcp.delete(tmp_path / "there", step=step)
    assert go_on_there(tmp_path) == (5, 5)


def test_a_step_that_another_program_deleted_before_its_copy_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = second_root.copy_step

    def delete_before(*arguments: Any, **options: Any) -> bool:
        if arguments[1] == "step_00000001":
            bcp.delete(tmp_path / "here", step=1)
        return real(*arguments, **options)

    monkeypatch.setattr(second_root, "copy_step", delete_before)
    with manager_at(tmp_path, keep=keep_policies.All()) as manager:
        save_steps(manager, 1, 2)
    assert bcp.steps(tmp_path / "there") == [2]


def test_the_first_root_is_no_second_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    (tmp_path / "alias").symlink_to(tmp_path / "here")
    manager = manager_at(tmp_path, keep=keep_policies.All(), cool_down=tmp_path / "alias", cool_down_keep=NEWEST)
    save_steps(manager, 1, 2)
    with pytest.raises(StorageError, match="root of the manager itself"):
        manager.close()
    assert bcp.steps(tmp_path / "here") == [1, 2]


def test_two_runs_do_not_copy_to_one_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    there = tmp_path / "there"
    first = manager_at(tmp_path / "first", cool_down=there)
    first.wait()
    with manager_at(tmp_path / "second", cool_down=there) as second:
        save_steps(second, 5)
    save_steps(first, 9)
    with pytest.raises(CheckpointSaveError, match="another manager"):
        first.close()
    assert bcp.steps(there) == [5]


def test_an_older_manager_copies_and_deletes_nothing(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path / "here", save=EVERY) as manager:
        save_steps(manager, 1, 2)
    older = manager_at(tmp_path, cool_down_keep=NEWEST)
    older.wait()
    assert bcp.steps(tmp_path / "there") == [2]
    newer = manager_at(tmp_path, keep=keep_policies.All(), cool_down=None)
    save_steps(newer, 3)
    newer.close()
    older.report(2, {"loss": 1.0})
    older.close()
    assert bcp.steps(tmp_path / "there") == [2]


KILLED_IN_A_FILE = """
import os, signal, sys
import torch
import bytecheckpoint as bcp
from bytecheckpoint.storage.backends import local_store
def kill(temporary, path, *, replace, real=local_store.publish):
    if "/there/" in path and "/data/" in path:
        os.kill(os.getpid(), signal.SIGKILL)
    real(temporary, path, replace=replace)
local_store.publish = kill
options = bcp.ManagerOptions(cool_down=sys.argv[2])
manager = bcp.CheckpointManager(sys.argv[1], save=bcp.save_policies.EverySteps(1), options=options)
manager.save(1, {"weight": torch.full((8,), 1.0)})
manager.close()
"""


def test_a_file_that_a_killed_copy_was_writing_is_removed_by_the_next_manager(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    killed = subprocess.run([forked_python(), "-c", KILLED_IN_A_FILE, str(here), str(there)], check=False, timeout=120)
    assert killed.returncode < 0
    data = there / "step_00000001" / "data"
    assert len(list(data.glob(".tmp-*"))) == 1
    other = data / ".tmp-0123456789abcdef-fedcba9876543210-00000-0.safetensors"  # of a save of another program
    other.write_bytes(b"not ours")
    with manager_at(tmp_path) as manager:
        manager.wait()
        assert list(data.glob(".tmp-*")) == [other]
        assert value_of(there, 1) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_parts_of_a_killed_copy_to_s3_are_removed_by_the_next_manager(
    s3: S3Service, s3_prefix: str, tmp_path: Path
) -> None:
    with bcp.CheckpointManager(tmp_path / "here", save=EVERY) as manager:
        save_steps(manager, 1)
    save_id = bcp.open(tmp_path / "here", step=1).info.save_id
    keys = [f"{s3_prefix}/step_00000001/data/{of}-00000-0.safetensors" for of in (save_id, "fedcba9876543210")]
    for key in keys:
        s3.client().create_multipart_upload(Bucket=s3.bucket, Key=key)
    with manager_at(tmp_path, cool_down=f"s3://{s3.bucket}/{s3_prefix}", cool_down_options=s3.options) as manager:
        manager.wait()
    left = s3.client().list_multipart_uploads(Bucket=s3.bucket, Prefix=s3_prefix).get("Uploads", [])
    assert [upload["Key"] for upload in left] == keys[1:]
