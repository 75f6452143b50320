"""Steps that are saved again: their metrics, pins, leases and copies, and what an earlier manager commits too late."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from manager.steps import read_steps, step_info

import bytecheckpoint as bcp
from bytecheckpoint import api, keep_policies, save_policies
from bytecheckpoint.errors import CheckpointExistsError, CheckpointNotFoundError, CheckpointSaveError, StorageError
from bytecheckpoint.manager import retention, step_records
from bytecheckpoint.manager.after_commit import background, save_pauses
from bytecheckpoint.manager.after_commit.known_steps import KnownSteps, StepChange
from bytecheckpoint.manager.ownership import Generation
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.saving import commit
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.layout import step_folder
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store
from bytecheckpoint.tools.main import cli

EVERY = save_policies.EverySteps(1)
ALL, NEWEST = keep_policies.All(), keep_policies.Latest(1)
OVERWRITE = bcp.SaveOptions(overwrite=True)


@pytest.fixture(autouse=True)
def _end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails is an error at once."""
    monkeypatch.setattr(background, "_FAILING_S", 0.2)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def manager_at(path: Path, *, keep: Any = ALL, **options: Any) -> bcp.CheckpointManager:
    options = {"async_save": False, "signals": (), **options}
    return bcp.CheckpointManager(path, save=EVERY, keep=keep, options=bcp.ManagerOptions(**options))


def value_of(root: Path, step: int) -> float:
    state = state_at(-1)
    bcp.load(root, state, step=step)
    return float(state["weight"][0])


def replace_by_hand(path: Path, step: int, *, loss: float) -> None:
    bcp.save(path, state_at(step + 0.5), step=step, metadata={"metrics": {"loss": loss}}, options=OVERWRITE)


def losses_of(path: Path) -> list[float]:
    store = open_store(str(path), storage_options=None, writer_threads=1)
    return [info.metrics["loss"] for info in read_steps(store)]


def best_of(path: Path) -> tuple[int | None, dict[str, float]]:
    with manager_at(path, read_only=True) as manager:
        best = manager.best("loss")
        assert best is not None
        return best.step, dict(best.metrics)


def save_three(path: Path) -> None:
    with manager_at(path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step), metrics={"loss": float(step)})
        manager.report(1, {"bleu": 7.0})


def test_a_checkpoint_that_a_plain_save_replaced_has_its_own_metrics(tmp_path: Path) -> None:
    save_three(tmp_path)
    replace_by_hand(tmp_path, 1, loss=9.0)
    assert losses_of(tmp_path) == [9.0, 2.0, 3.0]
    assert best_of(tmp_path) == (2, {"loss": 2.0})
    shown = CliRunner().invoke(cli, ["ls", str(tmp_path), "--json"]).output
    assert "bleu" not in shown
    assert '"loss": 9.0' in shown
    with manager_at(tmp_path, keep=keep_policies.Best(1, "loss")) as manager:
        manager.save(4, state_at(4))
    assert bcp.steps(tmp_path) == [2, 4]


def test_a_record_that_a_crash_left_of_a_replaced_checkpoint_makes_it_not_the_best(tmp_path: Path) -> None:
    save_three(tmp_path)
    shutil.copytree(tmp_path / step_folder(1) / "metrics", tmp_path / "old")
    replace_by_hand(tmp_path, 1, loss=9.0)
    shutil.copytree(tmp_path / "old", tmp_path / step_folder(1) / "metrics", dirs_exist_ok=True)
    assert best_of(tmp_path) == (2, {"loss": 2.0})


def test_an_open_manager_keeps_a_step_that_became_the_best_when_another_program_replaced_it(tmp_path: Path) -> None:
    worse = [False]
    keep = keep_policies.Best(1, "loss") | keep_policies.When(lambda _: not worse[0])
    with manager_at(tmp_path, keep=keep) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step), metrics={"loss": 10.0 - step})
        manager.wait()
        replace_by_hand(tmp_path, 1, loss=0.5)
        worse[0] = True
        for step in (4, 5):
            manager.save(step, state_at(step), metrics={"loss": 20.0})
            manager.wait()
    assert bcp.steps(tmp_path) == [1, 5]
    assert value_of(tmp_path, 1) == 1.5


def leased(path: Path, step: int) -> None:
    with manager_at(path) as manager:
        manager.lease(step, 10_000)


def pinned(path: Path, step: int) -> None:
    with manager_at(path) as manager:
        manager.pin(step)


@pytest.mark.parametrize(("protect", "match"), [(leased, "is leased until .*leases"), (pinned, "is pinned.*unpin it")])
@pytest.mark.parametrize("is_left", [True, False], ids=["of a left branch", "overwrite"])
def test_a_protected_step_is_not_replaced(
    tmp_path: Path, protect: Callable[[Path, int], None], match: str, is_left: bool
) -> None:
    save_three(tmp_path)
    protect(tmp_path, 2)
    with manager_at(tmp_path, save=bcp.SaveOptions(overwrite=not is_left)) as manager:
        manager.restore(state_at(0), step=1 if is_left else 3)
        with pytest.raises(CheckpointExistsError, match=match):
            manager.save(2, state_at(20), force=True)
        assert value_of(tmp_path, 2) == 2
        assert len(list((tmp_path / step_folder(2) / "data").iterdir())) == 1
        assert manager._owned is not None
        if protect is pinned:
            manager.unpin(2)
        else:
            manager._owned.clock._offset_s += 20_000
        manager.save(2, state_at(20), force=True)
    assert value_of(tmp_path, 2) == 20


def test_a_step_that_is_leased_while_its_replacement_is_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_three(tmp_path)
    store = open_store(str(tmp_path), storage_options=None, writer_threads=1)
    real = commit._create_manifest

    def create(*arguments: Any) -> Any:
        step_records.lease(store, step_folder(3), until=9e9)
        return real(*arguments)

    monkeypatch.setattr(commit, "_create_manifest", create)
    with manager_at(tmp_path, save=OVERWRITE) as manager, pytest.raises(CheckpointExistsError, match="leased until"):
        manager.save(3, state_at(30))
    assert value_of(tmp_path, 3) == 3
    assert len(list((tmp_path / step_folder(3) / "data").iterdir())) == 1


def test_a_pinned_save_that_failed_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_three(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointSaveError("the disk is on fire", kind="storage")

    with manager_at(tmp_path, save=OVERWRITE) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(commit.layout, "commit", refuse)
            with pytest.raises(CheckpointSaveError, match="on fire"):
                manager.save(3, state_at(30), pin=True)
        manager.save(3, state_at(31), pin=True)
        with pytest.raises(CheckpointExistsError, match="pinned"):
            manager.save(3, state_at(32), force=True)
    assert value_of(tmp_path, 3) == 31


def fail_pinned(monkeypatch: pytest.MonkeyPatch, manager: bcp.CheckpointManager, step: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckpointSaveError("the disk is on fire", kind="storage")

    with monkeypatch.context() as patch:
        patch.setattr(commit.layout, "commit", refuse)
        with pytest.raises(CheckpointSaveError, match="on fire"):
            manager.save(step, state_at(30), pin=True)


def test_a_pin_of_a_save_that_failed_is_not_that_of_the_checkpoint_which_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_three(tmp_path)
    pin = tmp_path / step_folder(3) / "pin.json"
    manager = manager_at(tmp_path)
    manager.restore(state_at(0), step=2)
    fail_pinned(monkeypatch, manager, 3)
    manager.close()
    assert pin.exists()
    with manager_at(tmp_path) as manager:
        assert not pin.exists()
        manager.restore(state_at(0), step=2)
        fail_pinned(monkeypatch, manager, 3)
        manager.save(3, state_at(31))
    assert value_of(tmp_path, 3) == 31
    assert not pin.exists()


def test_a_pin_of_the_checkpoint_that_was_to_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_three(tmp_path)
    manager = manager_at(tmp_path)
    manager.restore(state_at(0), step=2)
    fail_pinned(monkeypatch, manager, 3)
    manager.pin(3)
    with pytest.raises(CheckpointExistsError, match="pinned"):
        manager.save(3, state_at(3))
    manager.close()
    manager_at(tmp_path).close()
    assert (tmp_path / step_folder(3) / "pin.json").exists()


def commit_late(monkeypatch: pytest.MonkeyPatch, manager: bcp.CheckpointManager, step: int, then: Any) -> str:
    """Saves a step of a manager that loses its root between its last look and its commit; returns the error."""
    real = layout.commit

    def claim_first(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(layout, "commit", real)
        then()
        real(*arguments, **options)

    monkeypatch.setattr(layout, "commit", claim_first)
    with pytest.raises(CheckpointSaveError) as raised:
        manager.save(step, state_at(step))
    assert raised.value.kind == "superseded"
    return raised.value.message


def test_a_step_that_an_earlier_manager_committed_after_the_claim_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bytecheckpoint")
    older, newer = manager_at(tmp_path), list[bcp.CheckpointManager]()
    older.save(1, state_at(1))

    def claim() -> None:
        newer.append(manager_at(tmp_path))
        newer[0].restore(state_at(0))

    message = commit_late(monkeypatch, older, 2, claim)
    assert "committed all the same, and is complete" in message
    assert "Nothing" not in message
    assert bcp.steps(tmp_path) == [1, 2]
    newer[0].save(2, state_at(20))
    newer[0].close()
    assert value_of(tmp_path, 2) == 20
    assert "step 2, which an earlier manager committed late, is replaced" in caplog.text
    with pytest.raises(CheckpointSaveError, match="Nothing of this save was committed"):
        older.save(3, state_at(3))
    older.close()


def test_a_step_that_was_there_at_the_claim_is_not_replaced(tmp_path: Path) -> None:
    older = manager_at(tmp_path)
    older.save(1, state_at(1))
    with manager_at(tmp_path) as manager:  # which restores nothing
        with pytest.raises(CheckpointExistsError):
            manager.save(1, state_at(10))
        bcp.save(tmp_path, state_at(5), step=5)  # of a program without a manager
        with pytest.raises(CheckpointExistsError):
            manager.save(5, state_at(50))
    older.close()
    assert (value_of(tmp_path, 1), value_of(tmp_path, 5)) == (1, 5)


def test_a_late_commit_that_was_copied_is_replaced_at_the_second_root_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    older, newer = manager_at(here), list[bcp.CheckpointManager]()
    older.save(1, state_at(1))
    commit_late(monkeypatch, older, 2, lambda: newer.append(manager_at(here)))
    older.close()
    newer[0].close()
    copying = manager_at(here, cool_down=there)
    copying.wait()
    assert bcp.steps(there) == [1, 2]
    assert copying._owned is not None
    copying._saves.newest_seen = 1  # as if 2 had been committed after the claim
    older_prefix = layout.committed_save_id(
        open_store(str(here), storage_options=None, writer_threads=1), step_folder(2)
    )
    generation: Generation = copying._owned.generation._replace(earlier_prefixes=(older_prefix[:8],))
    copying._saves._owned = copying._owned._replace(generation=generation)
    copying.save(2, state_at(20))
    copying.close()
    assert (value_of(here, 2), value_of(there, 2)) == (20, 20)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_copy_of_a_replaced_step_is_replaced_at_the_second_root(tmp_path: Path, is_restarted: bool) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    manager = manager_at(here, cool_down=there, save=OVERWRITE)
    for step in (1, 2):
        manager.save(step, state_at(step))
    manager.wait()
    if is_restarted:
        manager.close()
        with manager_at(here, save=OVERWRITE) as other:  # the process ended before it copied
            other.save(2, state_at(20))
        manager = manager_at(here, cool_down=there, save=OVERWRITE)
    else:
        manager.save(2, state_at(20), force=True)
    manager.wait()
    assert (value_of(here, 2), value_of(there, 2), value_of(there, 1)) == (20, 20, 1)
    assert len(list((there / step_folder(2) / "data").iterdir())) == 1
    manager.close()


def test_a_pinned_copy_is_not_replaced(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    manager = manager_at(here, cool_down=there, save=OVERWRITE)
    manager.save(2, state_at(2))
    manager.wait()
    (there / step_folder(2) / "pin.json").write_text("{}")
    manager.save(2, state_at(20), force=True)
    with pytest.raises(CheckpointExistsError, match="stands at"):
        manager.wait()
    assert value_of(there, 2) == 2
    (there / step_folder(2) / "pin.json").unlink()
    manager.close()
    assert value_of(there, 2) == 20


def test_metrics_that_are_reported_while_a_replaced_copy_waits_do_not_hide_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with manager_at(here, cool_down=there, save=OVERWRITE) as manager:
        manager.save(2, state_at(2))
        manager.wait()
        assert manager._owned is not None
        manager._owned.background.saves.begin()  # holds the copy up
        manager.save(2, state_at(20), force=True)
        manager.report(2, {"loss": 0.25})
        manager._owned.background.saves.end()
    assert value_of(there, 2) == 20
    assert losses_of(there) == [0.25]


def test_marks_of_a_step_before_it_was_replaced_are_not_those_of_the_new_one(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_at(3), step=3)
    steps = KnownSteps(open_store(tmp_path, storage_options=None, writer_threads=1))
    steps.note_change(StepChange(3, metrics={"loss": 1.0}, leased_until=9e9))
    new = step_info(3, metrics={"loss": 2.0}, save_id="of the new one")
    steps.note_commit(new)
    assert steps.all() == [StoredStep(new, False, 0.0, False)]


def test_a_step_that_another_program_deletes_is_known_if_it_is_saved_again_before_that_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_three(tmp_path)
    store = open_store(tmp_path, storage_options=None, writer_threads=1)
    steps, real = KnownSteps(store), LocalStore.list
    (before,) = [step.info for step in steps.all() if step.info.step == 2]
    bcp.delete(tmp_path, step=2)

    def list_and_save(store: LocalStore, folder: str) -> Any:
        found = real(store, folder)
        steps.note_commit(step_info(2, save_id="another"))
        return found

    monkeypatch.setattr(LocalStore, "list", list_and_save)
    steps.drop_deleted()
    assert [step.info.save_id for step in steps.all() if step.info.step == 2] == ["another"] != [before.save_id]


def test_an_abandoned_step_that_is_deleted_while_it_is_looked_at_is_not_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_three(tmp_path)
    real = layout.committed_save_id

    def read(store: Store, folder: str) -> str:
        if folder == step_folder(3):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        return real(store, folder)

    with manager_at(tmp_path) as manager:
        manager.restore(state_at(0), step=1)
        monkeypatch.setattr(layout, "committed_save_id", read)
        assert manager.latest() == 1


@pytest.fixture
def deletion_of_2(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the deletion of step 2 has read the manifest; the deletion goes on half a second later."""
    begun, real = threading.Event(), retention._write_journal

    def write(store: Store, name: str, journal: retention.DeletionJournal) -> None:
        real(store, name, journal)
        if journal.folder == step_folder(2):
            begun.set()
            threading.Event().wait(0.5)

    monkeypatch.setattr(retention, "_write_journal", write)
    return begun


@pytest.mark.parametrize("is_async", [False, True])
def test_the_deletion_of_a_step_takes_nothing_of_the_next_save_of_it(
    tmp_path: Path, deletion_of_2: threading.Event, is_async: bool
) -> None:
    with manager_at(tmp_path, keep=NEWEST, async_save=is_async) as manager:
        manager.save(1, state_at(1), pin=True)
        for step in (2, 3):
            manager.save(step, state_at(step))
        assert deletion_of_2.wait(60)
        manager.restore(state_at(0), step=1)
        manager.save(2, state_at(2.5))
        manager.wait()
        assert manager.latest() == 2
    assert value_of(tmp_path, 2) == 2.5


@pytest.mark.parametrize("is_async", [False, True])
def test_a_deletion_that_a_save_of_its_step_held_up_is_made_when_that_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    is_saving, is_skipped = threading.Event(), threading.Event()
    real_look, real_delete = Generation.is_newest, background.Background._delete

    def look(generation: Generation) -> bool:
        assert is_saving.wait(60)
        return real_look(generation)

    def delete(work: background.Background, *args: Any) -> None:
        real_delete(work, *args)
        is_skipped.set()

    def fail(*_: Any) -> None:
        is_saving.set()
        assert is_skipped.wait(60)
        raise CheckpointSaveError("the disk is on fire", kind="storage")

    def save_and_wait() -> None:
        manager.save(1, state_at(1.5))
        manager.wait()

    monkeypatch.setattr(save_pauses, "_LONGEST_S", 0.0)
    with manager_at(tmp_path, keep=NEWEST, async_save=is_async, save=OVERWRITE) as manager:
        manager.save(1, state_at(1))
        monkeypatch.setattr(Generation, "is_newest", look)
        monkeypatch.setattr(background.Background, "_delete", delete)
        second = manager.save(2, state_at(2))
        assert second is not None
        second.result()
        with monkeypatch.context() as patch:
            patch.setattr(commit, "_create_manifest", fail)
            with pytest.raises(CheckpointSaveError, match="on fire"):
                save_and_wait()
        manager.wait()
        assert manager.steps() == [2]


def test_a_restore_waits_for_the_deletion_of_its_step_and_then_changes_nothing(
    tmp_path: Path, deletion_of_2: threading.Event
) -> None:
    state = state_at(0)
    with manager_at(tmp_path, keep=NEWEST) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
        assert deletion_of_2.wait(60)
        with pytest.raises(CheckpointNotFoundError, match="there is no step 2"):
            manager.restore(state, step=2)
        assert manager.latest() == 3
    assert not state["weight"].any()


def test_a_save_and_a_restore_wait_no_longer_than_half_their_timeout_for_a_deletion_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end, real = threading.Event(), threading.Event(), background.delete_steps

    def delete(*args: Any, **options: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(background, "delete_steps", delete)
    with manager_at(tmp_path, keep=NEWEST, save=bcp.SaveOptions(overwrite=True, timeout_s=2)) as manager:
        for step in (2, 3):
            manager.save(step, state_at(step))
        assert has_begun.wait(60)
        with pytest.raises(StorageError, match="is being deleted"):
            manager.restore(state_at(0), step=2)
        with pytest.raises(StorageError, match="is being deleted"):
            manager.save(2, state_at(2.5))
        may_end.set()
        manager.save(2, state_at(2.75))
        manager.wait()
        manager.save(4, state_at(4))
    assert bcp.steps(tmp_path) == [4]


def test_a_step_whose_deletion_was_decided_stays_if_it_is_restored_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_decided, is_loading, is_deleted = threading.Event(), threading.Event(), threading.Event()
    real_look, real_load, real_delete = Generation.is_newest, api.load, background.delete_steps

    def look(generation: Generation) -> bool:
        is_decided.set()
        assert is_loading.wait(60)
        return real_look(generation)

    def load(*args: Any, **options: Any) -> Any:
        is_loading.set()
        is_deleted.wait(0.5)  # before a file is read
        return real_load(*args, **options)

    def delete(*args: Any, **options: Any) -> Any:
        found = real_delete(*args, **options)
        is_deleted.set()
        return found

    with manager_at(tmp_path, keep=NEWEST) as manager:
        manager.save(1, state_at(1))
        monkeypatch.setattr(Generation, "is_newest", look)
        monkeypatch.setattr(api, "load", load)
        monkeypatch.setattr(background, "delete_steps", delete)
        manager.save(2, state_at(2))
        assert is_decided.wait(60)
        assert manager.restore(state_at(0), step=1) is not None
        manager.wait()
        assert manager.steps() == [1, 2]
