"""Deletions and copies in the background: many objects with one request, at a bounded rate, and not beside a save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults.seams import files_under
from manager.steps import read_steps
from manager.test_retention import Ending, Killed, fill
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint import keep_policies, save_policies
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manager import retention
from bytecheckpoint.manager.after_commit import save_pauses
from bytecheckpoint.manager.after_commit.save_pauses import OngoingSaves
from bytecheckpoint.manager.retention import DeletionPace, delete_steps, finish_deletions
from bytecheckpoint.saving import commit
from bytecheckpoint.storage.layout import step_folder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto

EVERY = save_policies.EverySteps(1)
NEWEST = keep_policies.Latest(1)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def manager_at(path: Path, **options: Any) -> bcp.CheckpointManager:
    options = {"async_save": False, "signals": (), **options}
    return bcp.CheckpointManager(path, save=EVERY, keep=NEWEST, options=bcp.ManagerOptions(**options))


def saves_of(manager: bcp.CheckpointManager) -> OngoingSaves:
    assert manager._owned is not None
    return manager._owned.background.saves


def soon(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not is_true() and time.monotonic() < end:
        time.sleep(0.005)
    return is_true()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when background work waits for the end of a save."""
    seen, real = threading.Event(), OngoingSaves.wait_for_end

    def wait(saves: OngoingSaves, timeout_s: float) -> None:
        if saves.is_any:
            seen.set()
        real(saves, timeout_s)

    monkeypatch.setattr(OngoingSaves, "wait_for_end", wait)
    return seen


def test_on_s3_many_objects_go_with_one_request_after_the_manifest(s3: S3Service, s3_prefix: str) -> None:
    if s3.faults is None:
        pytest.skip("a real service does not count requests")
    store = fill(f"s3://{s3.bucket}/{s3_prefix}", (1, 2), options=s3.options)
    for number in range(300):
        key = f"{s3_prefix}/{step_folder(1)}/leases/5-{number:08x}"
        s3.client().put_object(Bucket=s3.bucket, Key=key, Body=b"\n")
    info = read_steps(store)[0]
    s3.faults.requests.clear()
    assert delete_steps(store, [info], now=10.0) == {}
    deletions = [line for line in s3.faults.requests if line.endswith("?delete") or line.startswith("DELETE")]
    root = f"DELETE /{s3.bucket}/{s3_prefix}"
    journal = f"{root}/manager/deleting/{step_folder(1)}-{info.save_id}.json"
    many = f"POST /{s3.bucket}?delete"
    assert deletions == [f"{root}/{step_folder(1)}/manifest.bcp", many, many, journal]
    assert sorted(store.list("")) == [step_folder(2)]


def test_the_rate_holds_over_requests_of_many_objects_and_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(retention, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    pace = DeletionPace()
    for _ in range(4):
        pace.wait(250)
    assert slept == [0.5, 0.5, 0.5]


def test_a_deletion_waits_for_the_save_in_flight_and_goes_on_after_it(tmp_path: Path, paused: threading.Event) -> None:
    bcp.save(tmp_path, state_at(1), step=1)
    with manager_at(tmp_path) as manager:
        saves_of(manager).begin()
        manager.save(2, state_at(2))
        assert paused.wait(60)
        assert manager.steps() == [1, 2]
        saves_of(manager).end()
        manager.wait()
        assert manager.steps() == [2]


def test_a_deletion_stops_between_two_objects_while_a_save_is_in_flight(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    left: list[int] = []
    pace = DeletionPace(lambda: left.append(len([name for name in files_under(tmp_path) if step_folder(1) in name])))
    assert delete_steps(store, [read_steps(store)[0]], now=10.0, pace=pace) == {}
    assert len(left) >= 4
    assert f"{step_folder(1)}/manifest.bcp" not in files_under(tmp_path)


def test_the_record_of_a_commit_does_not_wait_for_a_deletion_that_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: threading.Event
) -> None:
    monkeypatch.setattr(save_pauses, "_LONGEST_S", 1e6)
    bcp.save(tmp_path, state_at(1), step=1)
    with manager_at(tmp_path) as manager:
        saves_of(manager).begin()
        manager.save(2, state_at(2))
        assert paused.wait(60)
        manager.save(3, state_at(3))
        records = tmp_path / step_folder(3) / "metrics"
        assert soon(lambda: records.exists() and bool(list(records.glob("*.json"))))
        assert manager.steps() == [1, 2, 3]
        saves_of(manager).end()
    assert bcp.steps(tmp_path) == [3]


def test_saves_without_a_break_hold_deletions_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: threading.Event
) -> None:
    monkeypatch.setattr(save_pauses, "_LONGEST_S", 0.3)
    bcp.save(tmp_path, state_at(1), step=1)
    manager = manager_at(tmp_path)
    saves_of(manager).begin()  # and it never ends
    for step in (2, 3):
        paused.clear()
        manager.save(step, state_at(step))
        manager.wait()
        assert paused.is_set()
        assert manager.steps() == [step]
    manager.close()


def test_a_copy_waits_for_the_save_in_flight(tmp_path: Path, paused: threading.Event) -> None:
    bcp.save(tmp_path / "here", state_at(1), step=1)
    with manager_at(tmp_path / "here", cool_down=tmp_path / "there") as manager:
        manager.wait()
        saves_of(manager).begin()
        manager.save(2, state_at(2))
        assert paused.wait(60)
        assert bcp.steps(tmp_path / "there") == [1]
        saves_of(manager).end()
        manager.wait()
        assert bcp.steps(tmp_path / "there") == [1, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    def refuse(*_: Any) -> None:
        raise CheckpointSaveError("the disk is on fire", kind="storage")

    def save_and_wait() -> None:
        manager.save(1, state_at(1))
        manager.wait()

    manager = manager_at(tmp_path, async_save=is_async)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_create_manifest", refuse)
        with pytest.raises(CheckpointSaveError, match="on fire"):
            save_and_wait()
    with pytest.raises(ValueError, match="pass metrics"):
        manager.save(1, state_at(1), metadata={"metrics": 1})
    assert not saves_of(manager).is_any
    manager.close()


def test_a_deletion_that_was_cut_off_is_finished_when_the_next_manager_claims_the_root(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    survivors = [name for name in files_under(tmp_path) if name.startswith(step_folder(2))]
    with suppress(Killed):
        delete_steps(Ending(store, 3, does_it=True), [read_steps(store)[0]], now=10.0)
    assert [name for name in files_under(tmp_path) if name.startswith(step_folder(1))]
    with manager_at(tmp_path) as manager:
        manager.wait()  # nothing was saved
        found = [name for name in files_under(tmp_path) if not name.startswith("manager/generations")]
    assert sorted(found) == sorted(survivors)


def test_a_step_whose_lease_has_ended_goes_at_the_next_wait(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, state_at(1))
        manager.lease(1, 100)
        manager.save(2, state_at(2))
        manager.wait()
        assert manager.steps() == [1, 2]
        assert manager._owned is not None
        manager._owned.clock._offset_s += 200
        manager.wait()
        assert manager.steps() == [2]


def test_a_lease_beyond_all_dates_keeps_its_step_and_no_other(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, state_at(1))
        manager.lease(1, 1e13)
        for step in (2, 3):
            manager.save(step, state_at(step))
        manager.wait()
        assert manager.steps() == [1, 3]


def test_a_step_that_another_program_leased_goes_when_that_lease_has_ended(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.save(1, state_at(1))
        manager.wait()
        assert manager._owned is not None
        lease = tmp_path / step_folder(1) / "leases" / f"{int(manager._owned.clock.now()) + 100}-00000000"
        lease.parent.mkdir()
        lease.write_text("\n")
        manager.save(2, state_at(2))
        manager.wait()
        assert manager.steps() == [1, 2]
        manager._owned.clock._offset_s += 200
    assert bcp.steps(tmp_path) == [2]


def test_a_damaged_manifest_holds_no_other_deletion_up_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        with bcp.CheckpointManager(tmp_path, save=EVERY, options=bcp.ManagerOptions(async_save=False)) as manager:
            manager.save(step, state_at(step))
    manifest = tmp_path / step_folder(1) / "manifest.bcp"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-7])
    with manager_at(tmp_path) as manager:
        for step in (4, 5):
            manager.save(step, state_at(step))
            manager.wait()
            assert manager.steps() == [1, step]
        assert caplog.text.count("step 1 of") == 1
        assert "bcp verify" in caplog.text
        manifest.write_bytes(whole)
        manager.save(6, state_at(6))
    assert bcp.steps(tmp_path) == [6]


def test_a_damaged_manifest_holds_no_other_cut_off_deletion_up(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2, 3))
    for info in read_steps(store)[:2]:
        with suppress(Killed):
            delete_steps(Ending(store, 2, does_it=True), [info], now=10.0)
    (tmp_path / step_folder(1) / "manifest.bcp").write_text("no manifest")
    assert finish_deletions(store, now=10.0) == 1
    assert [name for name in files_under(tmp_path) if name.startswith(step_folder(2))] == []
    assert len(store.list(retention.JOURNAL_FOLDER)) == 1


@pytest.mark.parametrize("content", ["{", '{"x": ' + "[" * 100_000], ids=["cut off", "nested too deep"])
def test_a_damaged_journal_is_named_and_counts_as_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    store = fill(tmp_path, (1,))
    (tmp_path / retention.JOURNAL_FOLDER).mkdir(parents=True)
    (tmp_path / retention.JOURNAL_FOLDER / "a.json").write_text(content)
    assert finish_deletions(store, now=10.0) == 0
    assert "counts as absent" in caplog.text
    assert bcp.steps(tmp_path) == [1]
