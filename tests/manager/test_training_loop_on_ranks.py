"""The training loop on two ranks, before a deadline, beside forked workers, and on S3."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint import keep_policies, save_policies
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manager import checkpoint_manager, step_records
from bytecheckpoint.manager.ownership import claim
from bytecheckpoint.saving import commit
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto, and of fork beside threads

EVERY_2 = save_policies.EverySteps(2)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def save_under_another_owner(rank: int, world_size: int, path: str) -> tuple[str, list[int]]:
    older = bcp.CheckpointManager(path, save=EVERY_2)
    newer = bcp.CheckpointManager(path, save=EVERY_2)
    older.save(2, state_at(2))
    with pytest.raises(CheckpointSaveError, match="another manager") as raised:
        older.wait()
    older.close()
    newer.save(4, state_at(4))
    newer.close()
    return raised.value.kind, bcp.steps(path)


def test_an_older_manager_is_refused_on_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_under_another_owner, str(tmp_path), world_size=2) == [("superseded", [4])] * 2


def lose_the_root(rank: int, world_size: int, path: str, when: str, is_async: bool) -> tuple[str, str, str]:
    """Returns the error of a save whose root another process claims meanwhile: at the call, before or at the commit."""
    options = bcp.ManagerOptions(async_save=is_async, signals=())
    manager = bcp.CheckpointManager(path, save=EVERY_2, options=options)
    store = open_store(path, storage_options=None, writer_threads=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            place, name = {"before": (commit, "_create_manifest"), "at": (layout, "commit")}.get(when, (None, ""))
            if place is None:
                claim(store, time=1234.0)
            else:
                real = getattr(place, name)

                def claim_first(*arguments: Any, **as_given: Any) -> Any:
                    claim(store, time=1234.0)
                    return real(*arguments, **as_given)

                patch.setattr(place, name, claim_first)
        with pytest.raises(CheckpointSaveError) as raised:
            save_and_wait(manager)
    manager.close()
    return type(raised.value).__name__, raised.value.kind, raised.value.message


def save_and_wait(manager: bcp.CheckpointManager) -> None:
    manager.save(2, state_at(2))
    manager.wait()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("when", "outcome", "steps"),
    [
        ("at the call", "Nothing of this save was committed", []),
        ("before", "Nothing of this save was committed", []),
        ("at", "committed all the same, and is complete", [2]),
    ],
)
def test_all_ranks_raise_the_same_error_when_another_process_has_claimed_the_root(
    workers: WorkerPool, tmp_path: Path, is_async: bool, when: str, outcome: str, steps: list[int]
) -> None:
    errors = workers.run(lose_the_root, str(tmp_path), when, is_async, world_size=2)
    assert len(set(errors)) == 1
    assert errors[0][:2] == ("CheckpointSaveError", "superseded")
    assert outcome in errors[0][2]
    assert f"pid {os.getpid()}" not in errors[0][2]
    assert (bcp.steps(tmp_path) if steps else []) == steps


def save_by_the_clock_of_the_storage(rank: int, world_size: int, path: str, ahead_s: list[float], step: int) -> bool:
    """Returns if the step was due by time; leases step 1 for 100 s."""
    real = time.time
    keep = keep_policies.Latest(1) | keep_policies.Within(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + ahead_s[rank])
        policy = save_policies.EverySeconds(1000) | save_policies.AtSteps([1])
        with bcp.CheckpointManager(path, save=policy, keep=keep, options=bcp.ManagerOptions(signals=())) as manager:
            was_due = manager.save(step, state_at(step)) is not None
            manager.wait()
            manager.lease(1, 100)
    return was_due


def test_hosts_whose_clocks_differ_by_hours_agree_and_go_by_the_clock_of_the_storage(
    workers: WorkerPool, tmp_path: Path
) -> None:
    store, due, began = open_store(tmp_path, storage_options=None, writer_threads=1), [], time.time()
    for step, ahead_s in ((1, [3600.0, -3600.0]), (2, [-3600.0, 3600.0]), (3, [3600.0, 3600.0])):
        found = workers.run(save_by_the_clock_of_the_storage, str(tmp_path), ahead_s, step, world_size=2)
        assert len(set(found)) == 1
        due.append(found[0])
        (info,) = step_records.list_steps(store)
        assert began - 2 <= info.info.time <= time.time() + 2
        assert began + 98 <= info.leased_until <= time.time() + 103
    assert due == [True, False, False]


def walk_back(rank: int, world_size: int, path: str) -> tuple[int, dict[int, bool], float, int]:
    options = bcp.ManagerOptions(walk_back=True)
    with bcp.CheckpointManager(path, save=EVERY_2, options=options) as manager:
        state = state_at(0)
        report = manager.restore(state)
        assert report is not None
        named = {step: "checksum" in why for step, why in report.passed_over.items()}
        return report.step or 0, named, state["weight"][0].item(), manager.next_step


def test_all_ranks_walk_back_to_the_same_step_and_name_the_damaged_one(workers: WorkerPool, tmp_path: Path) -> None:
    for step in (2, 4):
        bcp.save(tmp_path, state_at(step), step=step)
    for file in (tmp_path / "step_00000004" / "data").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert workers.run(walk_back, str(tmp_path), world_size=2) == [(2, {4: True}, 2.0, 3)] * 2


MARGIN_S = 60.0


def train_to_deadline(rank: int, world_size: int, path: str, at: float) -> tuple[int, int | None]:
    policy = save_policies.EverySteps(100_000) | save_policies.Deadline(at, margin_s=MARGIN_S)
    with bcp.CheckpointManager(path, save=policy) as manager:
        for step in range(1, 3000):
            time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            manager.save(step, state_at(step))
            if manager.should_stop():
                dist.barrier()
                return step, manager.latest()
    return 0, None


def test_a_deadline_stops_all_ranks_at_one_step_before_it(workers: WorkerPool, tmp_path: Path) -> None:
    at = time.time() + MARGIN_S + 2  # training could go on for 30 s
    found = workers.run(train_to_deadline, str(tmp_path), at, world_size=2)
    assert len(set(found)) == 1
    assert found[0][0] == found[0][1]
    saved = bcp.open(tmp_path).info.created_at
    assert saved is not None
    assert saved.timestamp() < at


def stop_by_the_record_of_an_earlier_manager(rank: int, world_size: int, path: str) -> tuple[int, int | None]:
    """Only rank 1 knows of the deadline, and only the record of step 1 says that a save takes so long."""
    with bcp.CheckpointManager(path, save=save_policies.EverySteps(100_000)) as manager:
        if rank == 1:
            manager.request_stop("spot", deadline_s=LONG_SAVE_S - 100)
        for step in range(2, 3000):
            time.sleep(0.01)
            dist.all_reduce(torch.ones(1))
            manager.save(step, state_at(step))
            if manager.should_stop():
                return step, manager.latest()
    return 0, None


LONG_SAVE_S = 5000.0


def test_a_deadline_knows_after_a_restart_how_long_the_last_save_took(workers: WorkerPool, tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY_2) as manager:
        manager.save(2, state_at(2))
    (record,) = (tmp_path / "step_00000002" / "metrics").iterdir()
    content = json.loads(record.read_text())
    record.write_text(json.dumps({**content, "seconds": {**content["seconds"], "total": LONG_SAVE_S}}))
    found = workers.run(stop_by_the_record_of_an_earlier_manager, str(tmp_path), world_size=2)
    assert len(set(found)) == 1
    assert found[0][0] == found[0][1]


def test_a_deadline_joined_by_and_is_asked_the_time_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_manager, "offset_of", lambda _: 7200.0)  # the clock of the storage is ahead
    policy = save_policies.EverySteps(1) & save_policies.Deadline(time.time() + 3600, margin_s=0)
    with bcp.CheckpointManager(tmp_path, save=policy) as manager:
        assert not manager.due(1)


def test_a_deadline_beside_another_condition_stops_nothing_and_is_asked_the_time(tmp_path: Path) -> None:
    past = save_policies.Deadline(time.time(), margin_s=0)
    far = save_policies.Deadline(time.time() + 10_000, margin_s=0)
    assert save_policies.deadlines_of(EVERY_2 | (past & EVERY_2)) == []
    with bcp.CheckpointManager(tmp_path, save=(EVERY_2 & past) | (save_policies.EverySteps(1) & far)) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_at(step))
            assert not manager.should_stop()
        manager.wait()
        assert manager.steps() == [2, 4]


def test_a_signal_to_a_forked_worker_stops_no_training(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save=EVERY_2) as manager:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        manager.save(1, state_at(1))
        assert not manager.should_stop()
    assert bcp.steps(tmp_path) == []


def test_a_run_on_s3_saves_keeps_stops_and_resumes(s3: S3Service, s3_prefix: str, tmp_path: Path) -> None:
    root = f"s3://{s3.bucket}/{s3_prefix}/run"
    keep = keep_policies.Latest(2) | keep_policies.Best(1, "loss")
    options = bcp.ManagerOptions(cool_down=tmp_path, cool_down_keep=keep_policies.Latest(1))
    trained = []
    for num_steps, stop_at in ((9, 7), (12, None)):
        state = state_at(0)
        with bcp.CheckpointManager(
            root, save=EVERY_2, keep=keep, storage_options=s3.options, options=options
        ) as manager:
            manager.restore(state)
            for step in range(manager.next_step, num_steps):
                state["weight"] += 1
                trained.append(step)
                if step == stop_at:
                    manager.request_stop("maintenance")
                manager.save(step, state, metrics={"loss": float(abs(step - 2))})
                if manager.should_stop():
                    break
    assert trained == list(range(12))
    assert bcp.steps(root, storage_options=s3.options) == [2, 7, 8, 10]  # best, restored, the latest two
    left = {name.split("step_")[1][:8] for name in s3.objects(s3_prefix) if "step_" in name}
    assert left == {"00000002", "00000007", "00000008", "00000010"}
    assert bcp.steps(tmp_path) == [10]
    assert bcp.load(tmp_path, state_at(0)).step == 10
