"""The training loop of a user of the manager: it saves, is killed, resumes, keeps, and stops."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint import api, keep_policies, save_policies
from bytecheckpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from distributed.workers import WorkerDied, WorkerPool

EVERY_2 = save_policies.EverySteps(2) | save_policies.Preempted()


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def manager_at(path: Path | str, save: Any = EVERY_2, **arguments: Any) -> bcp.CheckpointManager:
    return bcp.CheckpointManager(path, save=save, **arguments)


def train(path: Path | str, num_steps: int, **arguments: Any) -> list[int]:
    """Returns the steps that were trained."""
    state, trained = state_at(0.0), []
    with manager_at(path, **arguments) as manager:
        manager.restore(state)
        for step in range(manager.next_step, num_steps):
            state["weight"] += 1
            trained.append(step)
            manager.save(step, state)
            if manager.should_stop():
                break
    return trained


def damage(path: Path, step: int) -> None:
    for file in (path / f"step_{step:08}" / "data").iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 255
        file.write_bytes(content)


def test_a_run_resumes_after_its_newest_checkpoint(tmp_path: Path) -> None:
    assert train(tmp_path, 6) == [0, 1, 2, 3, 4, 5]
    assert bcp.steps(tmp_path) == [2, 4]
    assert train(tmp_path, 8) == [5, 6, 7]
    restored = state_at(0.0)
    report = bcp.load(tmp_path, restored)
    assert (report.step, restored["weight"][0].item()) == (6, 7.0)


def test_a_run_keeps_what_its_policy_says_and_after_close_nothing_else(tmp_path: Path) -> None:
    keep = keep_policies.Latest(2) | keep_policies.Steps(4)
    train(tmp_path, 13, keep=keep)
    assert bcp.steps(tmp_path) == [4, 10, 12]
    assert sorted(path.name for path in tmp_path.glob("step_*") if list(path.rglob("*.safetensors"))) == [
        "step_00000004",
        "step_00000010",
        "step_00000012",
    ]


def test_a_step_that_is_not_due_is_not_saved_unless_forced(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        assert (manager.due(1), manager.due(2)) == (False, True)
        assert manager.save(1, state_at(1)) is None
        handle = manager.save(3, state_at(3), force=True)
        assert handle is not None
        assert handle.result().step == 3


def test_a_stop_saves_at_once_and_should_stop_is_true_only_when_that_is_durable(tmp_path: Path) -> None:
    with manager_at(tmp_path, save=save_policies.EverySteps(1000)) as manager:
        manager.save(1, state_at(1))
        manager.request_stop("maintenance")
        assert not manager.should_stop()
        handle = manager.save(2, state_at(2))
        assert handle is not None
        assert handle.done()
        assert manager.should_stop()
        assert manager.latest() == 2


def test_a_signal_stops_and_close_puts_the_handler_back(tmp_path: Path) -> None:
    old = signal.getsignal(signal.SIGTERM)
    with manager_at(tmp_path, save=save_policies.EverySteps(1000)) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        manager.save(5, state_at(5))
        assert manager.should_stop()
        assert manager.save(5, state_at(5)) is None  # an evaluation asks again
        assert manager.should_stop()
    assert signal.getsignal(signal.SIGTERM) == old
    assert bcp.steps(tmp_path) == [5]


def test_an_older_manager_is_refused_before_its_commit(tmp_path: Path) -> None:
    older, newer = manager_at(tmp_path), manager_at(tmp_path)
    with pytest.raises(CheckpointSaveError, match="another manager") as raised:
        older.save(2, state_at(2), force=True).result()
    assert raised.value.kind == "superseded"
    newer.save(4, state_at(4))
    newer.close()
    older.close()
    assert bcp.steps(tmp_path) == [4]


def test_a_manager_that_only_reads_claims_and_writes_nothing(tmp_path: Path) -> None:
    owner = manager_at(tmp_path)
    with manager_at(tmp_path, options=bcp.ManagerOptions(read_only=True)) as reader:
        assert reader.save(2, state_at(2), force=True) is None
        with pytest.raises(CheckpointError, match="read-only"):
            reader.pin(2)
    owner.save(2, state_at(2))
    owner.close()
    assert bcp.steps(tmp_path) == [2]


def test_walk_back_restores_the_one_before_and_says_why(tmp_path: Path) -> None:
    train(tmp_path, 5)
    damage(tmp_path, 4)
    with manager_at(tmp_path) as manager, pytest.raises(CheckpointCorruptError, match="walk_back=True"):
        manager.restore(state_at(0))
    with manager_at(tmp_path, options=bcp.ManagerOptions(walk_back=True)) as manager:
        state = state_at(0)
        report = manager.restore(state)
        assert report is not None
        assert (report.step, list(report.passed_over), manager.next_step) == (2, [4], 3)
        assert "checksum" in report.passed_over[4]
        manager.save(4, state)  # on another branch than the damaged one
    bcp.load(tmp_path, state_at(0), step=4)


def test_a_run_of_which_no_step_loads_does_not_begin_anew(tmp_path: Path) -> None:
    train(tmp_path, 5)
    saved = bcp.steps(tmp_path)
    for step in saved:
        damage(tmp_path, step)
    with manager_at(tmp_path, options=bcp.ManagerOptions(walk_back=True)) as manager:
        with pytest.raises(CheckpointNotFoundError, match=r"can be restored.*Nothing was deleted") as caught:
            manager.restore(state_at(0))
        assert all(f"step {step}: " in caught.value.message for step in saved)
        assert manager.next_step == 0


def test_the_best_step_needs_a_metric_where_no_policy_or_several_have_one(tmp_path: Path) -> None:
    several = keep_policies.Best(1, "a") | keep_policies.Best(1, "b")
    for keep, count in ((keep_policies.All(), 0), (several, 2)):
        with bcp.CheckpointManager(tmp_path, keep=keep) as manager:
            with pytest.raises(ValueError, match=f"keeps by {count} Best policies"):
                manager.best()
            assert manager.best("a") is None


def test_a_step_of_a_newer_release_is_not_walked_back_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 3)

    def refuse(*_: object, **__: object) -> None:
        raise CheckpointCorruptError("the manifest has format version 9.0", kind="unsupported_version")

    for walk_back in (False, True):
        with manager_at(tmp_path, options=bcp.ManagerOptions(walk_back=walk_back)) as manager:
            monkeypatch.setattr(type(manager._run), "load", refuse)
            with pytest.raises(CheckpointCorruptError, match=r"version 9\.0$"):
                manager.restore(state_at(0))
            monkeypatch.undo()


def test_loads_of_a_damaged_step_that_ended_do_not_count_once_it_is_repaired(tmp_path: Path) -> None:
    train(tmp_path, 5)
    damage(tmp_path, 4)
    for walk_back in (False, False, True, False, False):
        with manager_at(tmp_path, options=bcp.ManagerOptions(walk_back=walk_back)) as manager:
            if walk_back:
                report = manager.restore(state_at(0))
                assert report is not None
                assert "checksum" in report.passed_over[4]
            else:
                with pytest.raises(CheckpointCorruptError):
                    manager.restore(state_at(0))
    damage(tmp_path, 4)  # the same bits again
    with manager_at(tmp_path) as manager:
        report = manager.restore(state_at(0))
        assert report is not None
        assert (report.step, report.passed_over) == (4, {})


def test_a_restore_that_the_user_interrupts_three_times_passes_over_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    train(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(api, "load", interrupt)
        for _ in range(3):
            with manager_at(tmp_path) as manager, pytest.raises(KeyboardInterrupt):
                manager.restore(state_at(0))
    with manager_at(tmp_path) as manager:
        report = manager.restore(state_at(0))
        assert report is not None
        assert (report.step, report.passed_over) == (4, {})


@pytest.mark.parametrize("num_bytes", [0, 20, 200])
def test_walk_back_goes_past_a_manifest_that_is_cut_short(tmp_path: Path, num_bytes: int) -> None:
    train(tmp_path, 5)
    os.truncate(tmp_path / "step_00000004" / "manifest.bcp", num_bytes)
    with manager_at(tmp_path, options=bcp.ManagerOptions(walk_back=True)) as manager:
        state = state_at(0)
        report = manager.restore(state)
        assert report is not None
        assert (report.step, list(report.passed_over), manager.next_step, manager.latest()) == (2, [4], 3, 2)
        manager.save(6, state)
    with manager_at(tmp_path) as manager:
        manager.restore(state)
        assert manager.next_step == 7
    with manager_at(tmp_path) as manager:
        manager.restore(state, step=2)
        manager.save(4, state)
    bcp.load(tmp_path, state_at(0), step=4)


def test_damage_on_a_branch_that_training_left_stops_no_run(tmp_path: Path) -> None:
    train(tmp_path, 9)
    with manager_at(tmp_path) as manager:
        manager.restore(state_at(0), step=4)
        manager.save(6, state_at(60))
    os.truncate(tmp_path / "step_00000008" / "manifest.bcp", 20)
    with manager_at(tmp_path) as manager:
        assert manager.restore(state_at(0), step=6) is not None
        manager.save(10, state_at(100))
    with manager_at(tmp_path) as manager:
        assert (manager.latest(), manager.restore(state_at(0)) is not None, manager.next_step) == (10, True, 11)


def test_a_step_that_is_not_there_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(state_at(0), step=7, initial=tmp_path)
        assert manager.restore(state_at(0)) is None
        assert manager.next_step == 0


def test_initial_counts_only_while_the_root_has_no_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path / "pretrained", state_at(9))
    for expected, next_step in ((9.0, 0), (1.0, 3)):
        with manager_at(tmp_path / "run") as manager:
            state = state_at(0)
            manager.restore(state, initial=tmp_path / "pretrained")
            assert (state["weight"][0].item(), manager.next_step) == (expected, next_step)
            if next_step == 0:
                manager.save(2, state_at(1))


def test_an_abandoned_branch_is_passed_over_and_its_steps_are_replaced(tmp_path: Path) -> None:
    train(tmp_path, 9)
    with manager_at(tmp_path) as manager:
        manager.restore(state_at(0), step=4)
        assert manager.next_step == 5
        manager.save(6, state_at(60))
        manager.wait()
        assert (manager.latest(), manager.steps()) == (6, [2, 4, 6, 8])
    with manager_at(tmp_path) as manager:
        state = state_at(0)
        report = manager.restore(state)
        assert report is not None
        assert (report.step, state["weight"][0].item()) == (6, 60.0)


def test_a_restore_takes_the_step_that_latest_tells_also_before_a_branch_has_a_commit(tmp_path: Path) -> None:
    train(tmp_path, 9)
    state = state_at(0)

    def restored(manager: bcp.CheckpointManager) -> int | None:
        report = manager.restore(state)
        return None if report is None else report.step

    with manager_at(tmp_path) as manager:
        manager.restore(state, step=4)
        assert (manager.latest(), restored(manager), manager.next_step) == (4, 4, 5)
        assert (manager.latest(), manager.steps()) == (4, [2, 4, 6, 8])
    with manager_at(tmp_path) as manager:  # nothing was committed on that branch
        assert (manager.latest(), restored(manager)) == (8, 8)
        manager.restore(state, step=4)
        manager.save(6, state_at(60))
        assert (restored(manager), state["weight"][0].item()) == (6, 60.0)


def test_a_manager_that_only_reads_follows_training_to_another_branch(tmp_path: Path) -> None:
    train(tmp_path, 9)
    state = state_at(0)
    with manager_at(tmp_path, options=bcp.ManagerOptions(read_only=True)) as reader:
        for step in (2, "latest"):
            reader.restore(state, step=step)
            assert reader.latest() == 8
        with manager_at(tmp_path) as manager:
            manager.restore(state, step=4)
            manager.save(6, state_at(60))
        report = reader.restore(state)
        assert report is not None
        assert (reader.latest(), report.step) == (6, 6)


def crash_in_restore(rank: int, world_size: int, root: str) -> None:
    api.load = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    bcp.CheckpointManager(root, save=save_policies.EverySteps(2)).restore({"weight": torch.zeros(8)})


def test_a_step_whose_restore_crashed_three_times_is_passed_over_and_named(workers: WorkerPool, tmp_path: Path) -> None:
    train(tmp_path, 5)
    for _ in range(3):
        (ended,) = workers.run_each(crash_in_restore, str(tmp_path), world_size=1, process_group=False)
        assert isinstance(ended.error, WorkerDied)
        assert ended.error.exit_code == -signal.SIGKILL
    with manager_at(tmp_path) as manager:
        report = manager.restore(state_at(0))
        assert report is not None
        assert (report.step, list(report.passed_over)) == (2, [4])


@pytest.mark.parametrize("is_committed", [False, True])
def test_the_best_is_no_step_that_training_left_and_stays_beside_a_better_one_of_those(
    tmp_path: Path, is_committed: bool
) -> None:
    losses = {1: 0.7, 2: 0.5, 3: 0.1}
    with manager_at(tmp_path, save=save_policies.EverySteps(1), keep=keep_policies.Best(1, "loss")) as manager:
        for step, loss in losses.items():
            manager.save(step, state_at(step), metrics={"loss": loss}, pin=step == 2)
        manager.wait()
        best = manager.best()
        assert best is not None
        assert best.step == 3
        manager.restore(state_at(0), step=2)
        manager.unpin(2)
        if is_committed:
            manager.save(4, state_at(4), metrics={"loss": 0.9})
            manager.save(5, state_at(5), metrics={"loss": 0.8})
        manager.wait()
        best = manager.best()
        assert best is not None
        assert best.step == 2
        assert manager.best("bleu") is None
    assert bcp.steps(tmp_path) == ([2, 3, 5] if is_committed else [2, 3])
    with manager_at(tmp_path, keep=keep_policies.Best(1, "loss")) as manager:
        manager.restore(state_at(0), step=2)
        manager.restore(state_at(0), step=3)
        best = manager.best()
        assert best is not None
        assert best.step == 3


def test_nan_is_the_worst_metric_and_a_report_counts(tmp_path: Path) -> None:
    with manager_at(tmp_path, save=save_policies.EverySteps(1), keep=keep_policies.Best(1, "loss")) as manager:
        for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.7)):
            manager.save(step, state_at(step), metrics={"loss": loss})
        manager.wait()
        best = manager.best()
        assert best is not None
        assert (best.step, best.metrics) == (1, {"loss": 0.5})
        manager.report(3, {"loss": 0.1})
        best = manager.best()
        assert best is not None
        assert best.step == 3
    assert bcp.steps(tmp_path) == [1, 3]


def test_a_report_that_comes_before_the_commit_is_noted_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = keep_policies.Best(1, "loss")
    with manager_at(tmp_path, save=save_policies.EverySteps(1), keep=keep) as manager:
        manager.save(1, state_at(1), metrics={"loss": 0.5})
        manager.wait()
        is_waited_for, count = threading.Event(), manager._goodput.committed
        monkeypatch.setattr(manager._goodput, "committed", lambda info: (is_waited_for.wait(60), count(info))[1])
        manager.save(2, state_at(2))
        assert manager._saves.begun is not None
        wait = manager._saves.begun.is_noted.wait
        monkeypatch.setattr(
            manager._saves.begun.is_noted, "wait", lambda seconds: (is_waited_for.set(), wait(seconds))[1]
        )
        manager.report(2, {"loss": 0.1})
        is_waited_for.set()
        manager.wait()
        manager.save(3, state_at(3))
    assert bcp.steps(tmp_path) == [2, 3]


def test_pinned_and_leased_steps_stay(tmp_path: Path) -> None:
    with manager_at(tmp_path, save=save_policies.EverySteps(1), keep=keep_policies.Latest(1)) as manager:
        manager.save(1, state_at(1), pin=True)
        manager.save(2, state_at(2))
        manager.lease(2, 100)
        for step in (3, 4):
            manager.save(step, state_at(step))
        manager.wait()
        assert manager.steps() == [1, 2, 4]
        manager.unpin(1)
        manager.save(5, state_at(5))
    assert bcp.steps(tmp_path) == [2, 5]


def stop_of_one(rank: int, world_size: int, path: str, stopping_rank: int) -> tuple[int, int]:
    """Returns the step at which the rank ended, and the newest one then."""
    with manager_at(path, save=save_policies.EverySteps(100_000)) as manager:
        for step in range(1, 100_000):
            if rank == stopping_rank and step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.all_reduce(torch.ones(1))
            manager.save(step, state_at(step))
            if manager.should_stop():
                dist.barrier()
                return step, manager.latest() or 0
    return 0, 0


@pytest.mark.parametrize(("world_size", "stopping_rank"), [(2, 1), (4, 2)])
def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_end(
    workers: WorkerPool, tmp_path: Path, world_size: int, stopping_rank: int
) -> None:
    found = workers.run(stop_of_one, str(tmp_path), stopping_rank, world_size=world_size)
    assert len(set(found)) == 1
    assert found[0][0] == found[0][1] >= 7


def decide_by_time(rank: int, world_size: int, path: str) -> list[int]:
    """Returns the steps that were saved: rank 0's clock decides."""
    with manager_at(path, save=save_policies.When(lambda now, _: now.step in {3, 5})) as manager:
        return [step for step in range(1, 7) if manager.save(step, state_at(step)) is not None]


def test_a_policy_that_needs_more_than_the_step_is_decided_for_all(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(decide_by_time, str(tmp_path), world_size=2) == [[3, 5]] * 2
