"""What goes wrong around a manager: failed saves, deletions that fail, policies that raise, clocks that differ."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_python import forked_python

import bytecheckpoint as bcp
from bytecheckpoint import api, keep_policies, save_policies
from bytecheckpoint.distributed import ranks
from bytecheckpoint.errors import CheckpointError, CheckpointSaveError, StorageError
from bytecheckpoint.manager.after_commit import background
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.agreement import decisions
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.manager.restore import count_open_restores, note_restore
from bytecheckpoint.saving import commit
from bytecheckpoint.saving.handle import has_failed
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends import local_store
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.layout import step_folder
from distributed.workers import WorkerPool

EVERY = save_policies.EverySteps(1)
NEWEST = keep_policies.Latest(1)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def fail_commits(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    real = commit._create_manifest

    def create(call: Any, files: Any, *rest: Any) -> Any:
        if files.target.step in steps:
            raise CheckpointSaveError("the disk is on fire", kind="storage")
        return real(call, files, *rest)

    monkeypatch.setattr(commit, "_create_manifest", create)


def test_a_failed_save_is_raised_by_the_next_due_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_commits(monkeypatch, {2})
    with bcp.CheckpointManager(tmp_path, save=save_policies.EverySteps(2)) as manager:
        manager.save(2, state_at(2))
        assert manager.save(3, state_at(3)) is None
        with pytest.raises(CheckpointSaveError, match="on fire"):
            manager.save(4, state_at(4))
        manager.save(6, state_at(6))
        manager.wait()
        assert (manager.steps(), manager.stats().num_failed_saves) == ([6], 1)


def test_a_save_that_fails_in_its_call_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_commits(monkeypatch, {1})
    options = bcp.ManagerOptions(on_failed_save="warn", async_save=False)
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=options) as manager:
        assert manager.save(1, state_at(1)) is None
        assert manager.save(2, state_at(2)) is not None
        assert (manager.stats().num_failed_saves, manager.stats().num_saves) == (1, 1)


def test_failed_saves_only_warn_until_there_are_too_many_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_commits(monkeypatch, {1, 2, 4, 5, 6})
    options = bcp.ManagerOptions(on_failed_save="warn", max_failed_saves=3)
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=options) as manager:
        for step in range(1, 7):
            manager.save(step, state_at(step))
        with pytest.raises(CheckpointSaveError, match="on fire"):
            manager.wait()
        assert manager.steps() == [3]
    assert "a save failed, 2 in a row" in caplog.text


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_failed_save_that_only_warns_is_logged_when_it_fails_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_at_once: bool
) -> None:
    if not is_at_once:
        fail_commits(monkeypatch, {1})
    save = bcp.SaveOptions(check_finite="refuse" if is_at_once else "off")
    options = bcp.ManagerOptions(on_failed_save="warn", save=save, signals=())
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=options) as manager:
        handle = manager.save(1, state_at(math.nan))
        assert handle is not None
        has_failed(handle)
        assert manager._saves.begun is not None
        assert manager._saves.begun.is_noted.wait(60)
        assert caplog.text.count("a save failed, 1 in a row, and training goes on") == 1
        manager.save(2, state_at(2))
        manager.wait()
    assert caplog.text.count("a save failed") == 1


def test_a_failure_that_the_handle_raised_is_not_raised_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_commits(monkeypatch, {1, 2, 3})
    manager = bcp.CheckpointManager(tmp_path, save=EVERY)
    for end in (manager.wait, manager.close):
        handle = manager.save(1, state_at(1))
        assert handle is not None
        with pytest.raises(CheckpointSaveError, match="on fire"):
            handle.result()
        end()
    manager = bcp.CheckpointManager(tmp_path, save=EVERY)
    manager.save(3, state_at(3))
    with pytest.raises(CheckpointSaveError, match="on fire"):
        manager.close()
    manager.close()


def test_a_deletion_that_hangs_is_left_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    monkeypatch.setattr(background, "delete_steps", lambda *_, **__: {} if released.wait() else None)
    options = bcp.ManagerOptions(save=bcp.SaveOptions(timeout_s=1.0))
    manager = bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep_policies.Latest(1), options=options)
    for step in (1, 2):
        manager.save(step, state_at(step))
    began = time.monotonic()
    manager.wait()
    manager.close()
    assert time.monotonic() - began < 60, "of a deletion that never ends"
    assert caplog.text.count("not finished (no progress for 1 s)") == 2
    released.set()
    assert manager._owned is not None
    assert manager._owned.background._work._thread is not None
    manager._owned.background._work._thread.join(60)  # what it logs is not for the next test


@pytest.mark.parametrize(
    ("outcomes", "moments"),
    [
        ([TimeoutError(), TimeoutError()], ["begun", "begun"]),
        ([None, TimeoutError(), TimeoutError()], ["begun", "begun", "begun"]),
        ([None, None, None], ["begun", "begun", "later"]),  # the last copy has just made deletions due
    ],
)
def test_the_time_that_close_gives_to_what_hangs_counts_once_for_deletions_and_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[Exception | None], moments: list[str]
) -> None:
    began: list[float] = []

    def wait(work: RetriedWork, *, began: float, moments: list[float] = began, **limits: float) -> Exception | None:
        if work._name == "bcp-data-log":
            return None
        moments.append(began)
        return outcomes[len(moments) - 1]

    options = bcp.ManagerOptions(cool_down=tmp_path / "there")
    manager = bcp.CheckpointManager(tmp_path / "here", save=EVERY, options=options)
    with monkeypatch.context() as patch:
        patch.setattr(RetriedWork, "wait", wait)
        manager.close()
    assert ["begun" if moment == began[0] else "later" for moment in began] == moments


def test_a_deletion_that_fails_for_ever_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("not yours", kind="permission")

    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    monkeypatch.setattr(background, "delete_steps", refuse)
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep_policies.Latest(1)) as manager:
        for step in range(1, 5):
            manager.save(step, state_at(step))
    assert bcp.steps(tmp_path) == [1, 2, 3, 4]
    assert caplog.text.count("is tried again") == 1
    assert "the next manager finishes them" in caplog.text
    monkeypatch.undo()
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep_policies.Latest(1)) as manager:
        manager.save(5, state_at(5))
    assert bcp.steps(tmp_path) == [5]


def refuse_deletes(monkeypatch: pytest.MonkeyPatch, *folders: str) -> list[str]:
    """Lets deletes below these folders fail; returns the names, which grow."""
    real, refused = LocalStore.delete_many, []

    def delete_many(store: LocalStore, names: Sequence[str]) -> None:
        for name in names:
            if name.startswith(folders):
                refused.append(name)
                raise StorageError("not yours", kind="permission", path=name)
        real(store, names)

    monkeypatch.setattr(LocalStore, "delete_many", delete_many)
    return refused


def test_a_store_that_never_deletes_stops_no_save_and_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
    refused = refuse_deletes(monkeypatch, "step_", "manager/")
    manager = bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep_policies.Latest(1))
    assert manager.restore(state_at(0)) is not None
    for step in range(2, 32):
        manager.save(step, state_at(step))
    assert len(refused) < 30, "each save tries again at once"
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 60, "of SaveOptions.timeout_s, which is longer"
    assert bcp.steps(tmp_path) == [*range(1, 32)]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warning.count("not yours") for warning in warnings] == [1, 1], warnings
    assert "the background work in" in warnings[0]
    assert "the next manager finishes them" in warnings[1]


def test_a_store_that_may_not_delete_at_all_is_opened_and_restored_from_as_often_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    refused = refuse_deletes(monkeypatch, "")
    for _ in range(5):
        with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
            report = manager.restore(state_at(0))
            assert report is not None
            assert (report.step, report.passed_over) == (1, {})
    assert refused


def test_a_second_root_that_may_not_delete_gets_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = LocalStore.delete_many

    def delete_many(store: LocalStore, names: Sequence[str]) -> None:
        if str(store).endswith("there"):
            raise StorageError("not yours", kind="permission", path=names[0])
        real(store, names)

    monkeypatch.setattr(LocalStore, "delete_many", delete_many)
    options = bcp.ManagerOptions(cool_down=tmp_path / "there", cool_down_keep=keep_policies.Latest(1))
    for step in (1, 2, 3):
        with bcp.CheckpointManager(tmp_path / "here", save=EVERY, keep=NEWEST, options=options) as manager:
            manager.restore(state_at(0))
            manager.save(step, state_at(step))
    assert (bcp.steps(tmp_path / "here"), bcp.steps(tmp_path / "there")) == ([2, 3], [1, 2, 3])  # 2 was restored
    assert "may not delete in" in caplog.text


def restore_without_deletes(rank: int, world_size: int, path: str) -> tuple[int | None, int]:
    with pytest.MonkeyPatch.context() as patch:
        refuse_deletes(patch, "manager/restores/")
        manager = bcp.CheckpointManager(path, save=EVERY)
        report = manager.restore(state_at(0))
    manager.save(manager.next_step, state_at(2))
    manager.close()
    return report.step if report is not None else None, manager.next_step


def test_a_restore_whose_note_cannot_be_deleted_goes_on_on_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    """The error was rank 0's alone, and the others waited for it."""
    bcp.save(tmp_path, state_at(1), step=1)
    assert workers.run(restore_without_deletes, str(tmp_path), world_size=2) == [(1, 2)] * 2
    assert not list(tmp_path.glob("manager/restores/*"))


def test_a_clock_an_hour_behind_does_not_delay_or_repeat_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
    real = time.time
    for offset_s in (-3600, 3600):
        monkeypatch.setattr(decisions.time, "time", lambda offset_s=offset_s: real() + offset_s)
        with bcp.CheckpointManager(tmp_path, save=save_policies.EverySeconds(1000)) as manager:
            assert not manager.due(2)
        monkeypatch.undo()


def test_a_checkpoint_of_an_hour_ahead_counts_as_made_when_the_manager_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager, monkeypatch.context() as patch:
        patch.setattr(decisions.StorageClock, "now", lambda _: time.time() + 3600)
        manager.save(1, state_at(1))
        manager.wait()
    with bcp.CheckpointManager(tmp_path, save=save_policies.EverySeconds(1000)) as manager:
        assert not manager.due(2)
        began = time.monotonic()
        monkeypatch.setattr(decisions.time, "monotonic", lambda: began + 1001)
        assert manager.due(2)
        monkeypatch.undo()


def test_the_clock_of_the_storage_neither_runs_backwards_nor_stands_still_when_the_host_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, real = decisions.StorageClock(100.0), time.time
    first = clock.now()
    for set_by_s in (-3600, 3600):
        monkeypatch.setattr(decisions.time, "time", lambda set_by_s=set_by_s: real() + set_by_s)
        assert first <= clock.now() < first + 1000
        monkeypatch.undo()
    clock.keep_after(first - 50)
    assert clock.now() < first + 1000
    clock.keep_after(first + 3600)
    ahead = clock.now()
    assert ahead >= first + 3600
    began = time.monotonic()
    monkeypatch.setattr(decisions.time, "monotonic", lambda: began + 60)
    assert ahead + 59 < clock.now() < ahead + 1000
    monkeypatch.undo()


def test_the_callback_gets_stats_after_each_commit_and_its_errors_are_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bcp.ManagerStats] = []

    def on_save(stats: bcp.ManagerStats) -> None:
        seen.append(stats)
        raise OSError("no exporter")

    options = bcp.ManagerOptions(on_save=on_save)
    with caplog.at_level("INFO"), bcp.CheckpointManager(tmp_path, save=EVERY, options=options) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert [(stats.step, stats.num_saves) for stats in seen] == [(1, 1), (2, 2)]
    assert "on_save of the manager failed" in caplog.text
    assert "step 2: 0.0 MB committed" in caplog.text


def test_a_metric_that_is_no_number_and_metadata_in_its_place_are_refused(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        with pytest.raises(ValueError, match="loss"):
            manager.save(1, state_at(1), metrics={"loss": "low"})
        with pytest.raises(ValueError, match="pass metrics"):
            manager.save(1, state_at(1), metadata={"metrics": 1})
        assert manager.steps() == []


def test_a_closed_manager_refuses_and_can_be_closed_again(tmp_path: Path) -> None:
    manager = bcp.CheckpointManager(tmp_path, save=EVERY)
    manager.close()
    manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        manager.save(1, state_at(1))


def calls_of_steps_that_are_not_due(rank: int, world_size: int, path: str) -> int:
    """Returns the number of calls that ranks made to agree."""
    with bcp.CheckpointManager(path, save=save_policies.EverySteps(10_000)) as manager:
        calls: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decisions, "join_ranks", lambda *_, **__: calls.append(1))
            patch.setattr(ranks, "_next_call", lambda *_: calls.append(1))
            for step in range(1, 1000):
                manager.save(step, state_at(0))
                manager.should_stop()
        return len(calls)


def test_a_step_that_is_not_due_sends_no_message(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(calls_of_steps_that_are_not_due, str(tmp_path), world_size=2) == [0, 0]


def decide_badly(rank: int, world_size: int, path: str) -> str:
    def fail(*_: Any) -> bool:
        raise KeyError("no such metric")

    with bcp.CheckpointManager(path, save=save_policies.When(fail)) as manager:
        with pytest.raises(bcp.CheckpointError) as raised:
            manager.save(1, state_at(1))
        return str(raised.value)


def test_a_policy_that_raises_on_rank_0_raises_on_all(workers: WorkerPool, tmp_path: Path) -> None:
    assert all("no such metric" in message for message in workers.run(decide_badly, str(tmp_path), world_size=2))


class _FailsToLoad:
    """State of the user that raises when it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.zeros(4)}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise RuntimeError("a mistake of the program")


def test_restores_that_the_program_itself_fails_never_lose_the_newest_step(tmp_path: Path) -> None:
    options = bcp.ManagerOptions(async_save=False, signals=())
    every = bcp.save_policies.EverySteps(1)
    with bcp.CheckpointManager(tmp_path, save=every, options=options) as manager:
        for step in (2, 4):
            manager.save(step, {"x": _FailsToLoad()})
    for _ in range(4):
        with (
            bcp.CheckpointManager(tmp_path, save=every, options=options) as manager,
            pytest.raises(bcp.CheckpointError, match="a mistake of the program"),
        ):
            manager.restore({"x": _FailsToLoad()})
    assert bcp.steps(tmp_path) == [2, 4]


def test_a_step_that_three_times_crashed_a_rank_other_than_0_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        bcp.save(tmp_path, state_at(step), step=step)

    def load(*_: object, **__: object) -> None:
        raise CheckpointError("rank 1 is missing: dead or stopped", kind="rank_missing", ranks=(1,))

    with monkeypatch.context() as patch:
        patch.setattr(api, "load", load)
        for _ in range(3):
            with bcp.CheckpointManager(tmp_path, save=EVERY) as manager, pytest.raises(CheckpointError):
                manager.restore(state_at(0))
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        report = manager.restore(state_at(0))
        assert report is not None
        assert (report.step, list(report.passed_over)) == (1, [2])


def test_a_stop_waits_for_a_save_that_began_after_it(tmp_path: Path) -> None:
    """A loop that calls `save` at some steps only must not end with an old step as its last."""
    options = bcp.ManagerOptions(async_save=False, signals=())
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(5), options=options) as manager:
        assert manager.save(5, {"w": torch.zeros(4)})
        manager.request_stop("test")
        assert not manager.should_stop()
        assert manager.save(7, {"w": torch.zeros(4)})
        assert manager.should_stop()


def test_training_does_not_begin_anew_where_a_checkpoint_stands_at_the_root(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"w": torch.zeros(4)})
    with (
        bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(5)) as manager,
        pytest.raises(bcp.CheckpointMismatchError, match="another root, and this path to restore") as refused,
    ):
        manager.restore({"w": torch.zeros(4)})
    assert refused.value.kind == "conflict"
    with bcp.CheckpointManager(tmp_path / "run", save=bcp.save_policies.EverySteps(5)) as manager:
        assert manager.restore({"w": torch.zeros(4)}, initial=tmp_path) is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["step-", "checkpoint-"])
def test_a_fresh_start_beside_the_steps_of_another_program_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for step in (9, 10):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / f"{name}{step}", no_dist=True)
    state = {"w": torch.zeros(4)}
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        assert manager.restore(state) is None
        assert f"the folders {name}10, {name}9 may be steps of another program" in caplog.text
        caplog.clear()
        assert manager.restore(state, initial=tmp_path / f"{name}10") is not None
        assert caplog.text == ""
    assert torch.equal(state["w"], torch.ones(4))


def test_what_others_put_beside_the_notes_of_restores_stays_and_stops_no_deletion(tmp_path: Path) -> None:
    folder = tmp_path / "manager" / "restores"
    (folder / "of the user").mkdir(parents=True)
    (folder / "00000001-notes.txt").touch()
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=NEWEST) as manager:
        manager.save(1, state_at(1))
        assert manager.restore(state_at(0)) is not None
        note_restore(manager._store, 1, time=0.0)
        assert count_open_restores(manager._store) == {1: 1}
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=NEWEST) as manager:
        manager.save(3, state_at(3))
    assert bcp.steps(tmp_path) == [3]
    assert sorted(path.name for path in folder.iterdir()) == ["00000001-notes.txt", "of the user"]


def test_a_restore_may_begin_while_the_work_after_the_first_commit_forgets_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, has_cleared, has_forgotten = threading.Event(), threading.Event(), threading.Event()
    real_sync, real_clear, real_forget = local_store.sync_folder, Generation.clear_earlier, background.forget_restores

    def sync(folder: str) -> None:
        if folder.endswith("restores") and threading.current_thread() is threading.main_thread():
            is_writing.set()
            assert has_cleared.wait(60)
            has_forgotten.wait(0.5)  # the file is there: a deletion now would take it and its folder
        real_sync(folder)

    def clear(*args: Any, **options: Any) -> None:
        real_clear(*args, **options)
        assert is_writing.wait(60)
        has_cleared.set()

    def forget(*args: Any) -> None:
        real_forget(*args)
        has_forgotten.set()

    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        monkeypatch.setattr(local_store, "sync_folder", sync)
        monkeypatch.setattr(Generation, "clear_earlier", clear)
        monkeypatch.setattr(background, "forget_restores", forget)
        manager.save(1, state_at(1))
        assert manager.restore(state_at(0)) is not None
    assert has_forgotten.is_set()


def test_work_that_is_tried_again_after_the_first_commit_forgets_no_restore_that_has_begun_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("the policy of the user fails")

    monkeypatch.setattr(background, "_FAILING_S", 0.0)
    monkeypatch.setattr(background, "decide", refuse)
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
        manager.wait()
        note_restore(manager._store, 1, time=0.0)
        manager.wait()
        assert count_open_restores(manager._store) == {1: 1}


def test_what_a_manager_committed_last_stays_beside_higher_steps(tmp_path: Path) -> None:
    for step in (998, 1000):
        bcp.save(tmp_path, {"w": torch.zeros(4)}, step=step)
    options = bcp.ManagerOptions(async_save=False, signals=())
    keep = bcp.keep_policies.Latest(2)
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1), keep=keep, options=options) as manager:
        for step in (2, 3, 4):
            manager.save(step, {"w": torch.zeros(4)})
    assert bcp.steps(tmp_path) == [4, 998, 1000]


def test_retention_does_not_count_what_another_program_has_deleted(tmp_path: Path) -> None:
    options = bcp.ManagerOptions(async_save=False, signals=())
    keep = bcp.keep_policies.Latest(2)
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1), keep=keep, options=options) as manager:
        for step in (6, 8, 10):
            manager.save(step, {"w": torch.zeros(4)})
            manager.wait()
            if step == 8:
                bcp.delete(tmp_path, step=8)
    assert bcp.steps(tmp_path) == [6, 10]


def test_the_best_of_a_policy_is_none_that_another_program_has_deleted_long_ago(tmp_path: Path) -> None:
    options = bcp.ManagerOptions(async_save=False, signals=())
    keep = keep_policies.Best(1, "loss") | keep_policies.Latest(20)
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep, options=options) as manager:
        for step in range(1, 27):
            manager.save(step, state_at(step), metrics={"loss": {1: 0.0, 2: 0.5}.get(step, 9.0)})
            if step == 19:  # beyond the newest ones, which are looked at
                manager.wait()
                bcp.delete(tmp_path, step=1)
    assert bcp.steps(tmp_path) == [2, *range(7, 27)]


def test_the_best_checkpoint_is_found_beside_deletions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step), metrics={"loss": float(step)})
        manager.wait()
        real = layout.read_manifest

        def delete_first(store: Any, folder: str) -> Any:
            if step_folder(1) == folder and 1 in bcp.steps(tmp_path):
                shutil.rmtree(tmp_path / folder)
            return real(store, folder)

        with monkeypatch.context() as patch:
            patch.setattr(layout, "read_manifest", delete_first)
            best = manager.best("loss")
        assert best is not None
        assert (best.step, best.metrics) == (2, {"loss": 2.0})


KILLED_WITH_A_PIN = """
import os, signal, sys, torch
import bytecheckpoint as bcp
from bytecheckpoint.storage import layout
layout.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
manager = bcp.CheckpointManager(sys.argv[1], save=bcp.save_policies.EverySteps(1))
manager.save(int(sys.argv[2]), {"weight": torch.zeros(8)}, pin=True)
manager.wait()
"""


def test_a_pin_of_a_save_that_was_killed_before_its_commit_protects_no_later_one(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(1, state_at(1))
    pin = tmp_path / step_folder(2) / "pin.json"
    done = subprocess.run([forked_python(), "-c", KILLED_WITH_A_PIN, str(tmp_path), "2"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert pin.exists()
    assert bcp.steps(tmp_path) == [1]
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=NEWEST) as manager:
        assert not pin.exists()
        for step in (2, 3):
            manager.save(step, state_at(step))
    assert bcp.steps(tmp_path) == [3]
    assert not (tmp_path / step_folder(2)).exists()
    assert not (tmp_path / "manager" / "pins_ahead").exists()


def test_a_pin_of_a_save_that_failed_is_not_that_of_the_next_save_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointSaveError("the disk is full", kind="no_space")

    options = bcp.ManagerOptions(on_failed_save="warn", async_save=False)
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=options) as manager:
        for step, pin in ((1, False), (2, True)):
            with monkeypatch.context() as patch:
                patch.setattr(layout, "commit", refuse)
                manager.save(step, state_at(step), pin=True)
            assert (tmp_path / step_folder(step) / "pin.json").exists()
            manager.save(step, state_at(step), pin=pin)
    assert [(tmp_path / step_folder(step) / "pin.json").exists() for step in (1, 2)] == [False, True]
    assert not (tmp_path / "manager" / "pins_ahead").exists()


def test_a_pinned_save_is_pinned_when_it_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends right after the commit has written neither a record nor anything else."""
    monkeypatch.setattr(background.Background, "add", lambda *_: None)
    options = bcp.ManagerOptions(async_save=False)
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=options) as manager:
        manager.save(1, state_at(1), pin=True)
        manager.save(2, state_at(2))
    assert [(tmp_path / f"step_{step:08}" / "pin.json").exists() for step in (1, 2)] == [True, False]


def test_a_manager_that_lost_its_root_deletes_nothing(tmp_path: Path) -> None:
    kept = [True]
    options = bcp.ManagerOptions(async_save=False, signals=())
    keep = keep_policies.When(lambda _: kept[0])
    older = bcp.CheckpointManager(tmp_path, save=EVERY, keep=keep, options=options)
    for step in (2, 4):
        older.save(step, state_at(step))
    older.wait()
    with bcp.CheckpointManager(tmp_path, save=EVERY, options=options):
        kept[0] = False
        assert older._owned is not None
        older._owned.background._work.ask()
        older.wait()
        assert bcp.steps(tmp_path) == [2, 4]
    older.close()


def test_a_restore_waits_for_the_save_in_flight_and_leaves_its_step_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_commit = threading.Event()
    real = commit._create_manifest

    def create(call: Any, files: Any, *rest: Any) -> Any:
        assert files.target.step != 8 or may_commit.wait(60)
        return real(call, files, *rest)

    monkeypatch.setattr(commit, "_create_manifest", create)
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        manager.save(4, state_at(4))
        manager.save(8, state_at(8))
        threading.Timer(0.3, may_commit.set).start()
        manager.restore(state_at(0), step=4)
        assert manager.steps() == [4, 8]
        assert manager.latest() == 4


def test_a_policy_sees_the_save_in_flight_though_it_replaces_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY) as manager:
        for step in (4, 6, 8):
            manager.save(step, state_at(step))
    may_commit = threading.Event()
    real = commit._create_manifest

    def create(call: Any, files: Any, *rest: Any) -> Any:
        assert may_commit.wait(60)
        return real(call, files, *rest)

    monkeypatch.setattr(commit, "_create_manifest", create)
    seen: list[list[tuple[int, bool]]] = []

    def is_due(now: Any, saved: Any) -> bool:
        seen.append([(info.step, info.committed) for info in saved])
        return bool(now.step == 6)

    with bcp.CheckpointManager(tmp_path, save=save_policies.When(is_due)) as manager:
        manager.restore(state_at(0), step=4)
        for step in (5, 6, 7):
            manager.save(step, state_at(step))
        may_commit.set()
        manager.wait()
        manager.save(8, state_at(8))
    assert seen[2:] == [[(8, True), (4, True), (6, False)], [(8, True), (4, True), (6, True)]]


def test_continuous_goes_on_after_a_save_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_commits(monkeypatch, {1})
    options = bcp.ManagerOptions(on_failed_save="warn")
    with bcp.CheckpointManager(tmp_path, save=save_policies.Continuous(), options=options) as manager:
        handle = manager.save(1, state_at(1))
        assert handle is not None
        assert handle.exception(60) is not None
        assert manager.save(2, state_at(2)) is not None
        manager.wait()
    assert bcp.steps(tmp_path) == [2]


def test_a_full_disk_on_which_no_record_has_room_is_freed_by_deletions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        bcp.save(tmp_path, state_at(step), step=step)
    real = LocalStore.write

    def write(store: LocalStore, name: str, blocks: Sequence[Any], *, replace: bool) -> None:
        if "/metrics/" in name and bcp.steps(tmp_path) != [3]:
            raise CheckpointSaveError("the disk is full", kind="no_space")
        real(store, name, blocks, replace=replace)

    monkeypatch.setattr(LocalStore, "write", write)
    monkeypatch.setattr(background, "_FAILING_S", 0.2)
    with bcp.CheckpointManager(tmp_path, save=EVERY, keep=NEWEST) as manager:
        manager.save(3, state_at(3))
        manager.wait()
        assert manager.steps() == [3]
    assert list((tmp_path / step_folder(3) / "metrics").iterdir())


ENDS_AFTER_A_FAILED_SAVE = """
import sys, torch, bytecheckpoint as bcp
save = bcp.SaveOptions(check_finite="refuse")
options = bcp.ManagerOptions(save=save, on_failed_save="warn", signals=())
manager = bcp.CheckpointManager(sys.argv[1], save=bcp.save_policies.EverySteps(1), options=options)
print(manager.save(1, {"weight": torch.tensor([float("nan")])}))
"""


def test_a_save_that_failed_at_once_and_was_never_asked_about_is_told_at_the_end_of_the_program(tmp_path: Path) -> None:
    command = [forked_python(), "-c", ENDS_AFTER_A_FAILED_SAVE, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert ": failed>" in done.stdout
    assert "failed and was not committed: the state has values that are not finite" in done.stderr
