"""A manager whose steps are held in memory between those that go to storage."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointSaveError, StorageError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.manager.save_policies import EverySeconds, EverySteps, When
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.memory_tier import part_of_save
from bytecheckpoint.saving import commit
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.prepare import PreparedSave
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:the memory root")


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), float(step))}


def manager_of(tmp_path: Path, **others: Any) -> bcp.CheckpointManager:
    memory = bcp.Memory(copies=1, root=tmp_path / "memory")
    return bcp.CheckpointManager(tmp_path / "run", save=EverySteps(10), memory=memory, **others)


def test_steps_between_go_to_memory_and_the_newest_is_restored(tmp_path: Path) -> None:
    with manager_of(tmp_path, memory_every=2) as manager:
        assert manager.restore(state_of(-1)) is None
        handles = {step: manager.save(step, state_of(step)) for step in range(1, 15)}
        tiers = {step: handle.result().tier for step, handle in handles.items() if handle is not None}
        assert tiers == {2: "memory", 4: "memory", 6: "memory", 8: "memory", 10: "storage", 12: "memory", 14: "memory"}
        assert manager.steps() == [10]
    state = state_of(-1)
    with manager_of(tmp_path) as manager:
        report = manager.restore(state)
        assert report is not None
        assert (report.step, manager.next_step, report.sources["memory"]) == (14, 15, 1)
        assert bool((state["x"] == 14).all())
        manager.save(20, state_of(20))
        manager.wait()
        assert manager.steps() == [10, 20]
        manager.restore(state, step=10)
        assert bool((state["x"] == 10).all())


def test_steps_that_training_left_are_not_restored_when_memory_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bcp.CheckpointManager(tmp_path / "run", save=EverySteps(10)) as manager:  # no generations in its manifests
        manager.restore(state_of(-1))
        for step in (10, 20, 30):
            manager.save(step, state_of(step))
    with manager_of(tmp_path) as manager:
        manager.restore(state_of(-1), step=10)
        for step in (11, 20):
            manager.save(step, state_of(step + 100))
    shutil.rmtree(tmp_path / "memory")
    monkeypatch.setattr(process_state(), "memories", {})
    state = state_of(-1)
    with manager_of(tmp_path) as manager:
        report = manager.restore(state)
    assert report is not None
    assert report.step == 20
    assert bool((state["x"] == 120).all())


def leave_step_20(tmp_path: Path) -> None:
    """Training goes back to step 10, commits step 11, and so abandons step 20; then memory is lost."""
    with manager_of(tmp_path) as manager:
        for step in (10, 20):
            manager.save(step, state_of(step))
    with manager_of(tmp_path) as manager:
        manager.restore(state_of(-1), step=10)
        manager.save(11, state_of(11), force=True)
    shutil.rmtree(tmp_path / "memory")


@pytest.fixture
def memory_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_step_20(tmp_path)
    monkeypatch.setattr(process_state(), "memories", {})


@pytest.mark.usefixtures("memory_is_lost")
@pytest.mark.parametrize("has_memory", [True, False])
def test_an_abandoned_step_is_not_restored_where_no_other_one_can_be_read(tmp_path: Path, has_memory: bool) -> None:
    for step in (10, 11):
        (tmp_path / "run" / f"step_{step:08d}" / "manifest.bcp").write_bytes(b"noise")
    state = state_of(-1)
    manager = manager_of(tmp_path) if has_memory else bcp.CheckpointManager(tmp_path / "run")
    with manager, pytest.raises(bcp.CheckpointCorruptError, match="step_00000011"):
        manager.restore(state)
    assert bool((state["x"] == -1).all())


@pytest.mark.usefixtures("memory_is_lost")
@pytest.mark.parametrize("has_memory", [True, False])
def test_training_does_not_begin_anew_beside_abandoned_steps_alone(tmp_path: Path, has_memory: bool) -> None:
    for step in (10, 11):
        shutil.rmtree(tmp_path / "run" / f"step_{step:08d}")
    state = state_of(-1)
    manager = manager_of(tmp_path) if has_memory else bcp.CheckpointManager(tmp_path / "run")
    with manager, pytest.raises(bcp.CheckpointMismatchError, match="holds the steps 20, which training left") as raised:
        manager.restore(state)
    assert raised.value.kind == "conflict"
    assert bool((state["x"] == -1).all())


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_checkpoint_at_the_root_itself_is_no_step_to_go_on_from(tmp_path: Path, has_memory: bool) -> None:
    """With memory it was loaded as step 0, and the first save to storage was refused, maybe hours later."""
    bcp.save(tmp_path / "run", state_of(5))
    state = state_of(-1)
    manager = manager_of(tmp_path) if has_memory else bcp.CheckpointManager(tmp_path / "run")
    with manager, pytest.raises(bcp.CheckpointMismatchError, match="is a checkpoint itself") as raised:
        manager.restore(state)
    assert raised.value.kind == "conflict"
    assert bool((state["x"] == -1).all())


def restore_on_ranks(rank: int, world_size: int, folder: str) -> str:
    with manager_of(Path(folder)) as manager:
        try:
            report = manager.restore(state_of(-1))
        except bcp.CheckpointError as error:
            return error.kind
        return "none" if report is None else f"step {report.step}"


@pytest.mark.usefixtures("memory_is_lost")
def test_all_ranks_refuse_an_abandoned_step_alike(workers: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "run" / "step_00000010" / "manifest.bcp").write_bytes(b"noise")
    shutil.rmtree(tmp_path / "run" / "step_00000011")
    assert workers.run(restore_on_ranks, str(tmp_path), world_size=2) == ["bad_manifest"] * 2
    shutil.rmtree(tmp_path / "run" / "step_00000010")
    assert workers.run(restore_on_ranks, str(tmp_path), world_size=2) == ["conflict"] * 2


def save_in_memory_alone(manager: bcp.CheckpointManager, step: int, state: dict[str, Any]) -> None:
    """A save to storage that memory holds and whose commit fails, as if the process had been killed there."""

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the storage is away", kind="unavailable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit.layout, "commit", fail)
        handle = manager.save(step, state)
        assert handle is not None
        assert isinstance(handle.exception(), StorageError)
    with suppress(StorageError):
        manager.close()


def test_a_step_in_storage_of_the_branch_left_behind_is_not_taken_for_the_resumed_one(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        for step in (10, 20):
            manager.save(step, state_of(step))
    manager = manager_of(tmp_path)
    manager.restore(state_of(-1), step=10)
    save_in_memory_alone(manager, 20, state_of(120))
    with manager_of(tmp_path) as manager:
        report = manager.restore(state_of(-1))
        assert report is not None
        assert (report.step, manager.latest()) == (20, 10)
        manager.save(20, state_of(120), force=True)
    state = state_of(-1)
    bcp.load(tmp_path / "run", state, step=20)
    assert bool((state["x"] == 120).all())


def test_a_step_that_went_to_storage_is_passed_to_save_again_without_an_error(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(10, state_of(10))
        assert manager.save(10, state_of(10)) is None  # an evaluation asks if training stops
        manager.wait()
        assert manager.save(10, state_of(10)) is None
    with manager_of(tmp_path) as manager:
        manager.restore(state_of(-1), step=10)
        assert manager.save(10, state_of(10)) is None


def test_a_resumed_step_that_memory_alone_holds_goes_to_storage_before_a_stop(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(12, state_of(12))
    state = state_of(-1)
    with manager_of(tmp_path) as manager:
        manager.restore(state)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.should_stop()
        manager.save(12, state)
        assert manager.should_stop()
    assert bcp.steps(tmp_path / "run") == [12]


def test_a_resumed_step_whose_save_to_storage_failed_is_still_due(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save_in_memory_alone(manager, 10, state_of(10))
    state = state_of(-1)
    with manager_of(tmp_path) as manager:
        manager.restore(state)
        assert manager.due(10)
        manager.save(10, state)
    with manager_of(tmp_path) as manager:
        manager.restore(state)
        assert not manager.due(10)
    assert bcp.steps(tmp_path / "run") == [10]


def test_steps_in_memory_that_training_left_are_not_restored_before_the_next_save(tmp_path: Path) -> None:
    state = state_of(-1)

    def restored(manager: bcp.CheckpointManager) -> int | None:
        report = manager.restore(state)
        return None if report is None else report.step

    with manager_of(tmp_path) as manager:
        for step in (10, 20, 21):
            manager.save(step, state_of(step))
        assert restored(manager) == restored(manager) == 21
        manager.restore(state, step=10)
        assert (manager.latest(), restored(manager), restored(manager)) == (10, 10, 10)
        manager.save(11, state_of(111))
        assert (restored(manager), restored(manager), state["x"][0].item()) == (11, 11, 111.0)


def test_time_counts_from_the_start_of_the_manager_before_memory_holds_a_step(tmp_path: Path) -> None:
    with manager_of(tmp_path, memory_every=EverySeconds(1e-9)) as manager:
        assert manager.save(1, state_of(1)) is not None
    with manager_of(tmp_path, memory_every=EverySeconds(3600)) as manager:
        assert manager.save(1, state_of(1)) is None


def test_saves_to_memory_go_on_when_the_clock_of_the_host_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with manager_of(tmp_path, memory_every=EverySeconds(1e-9)) as manager:
        assert manager.save(1, state_of(1)) is not None
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        assert manager.save(2, state_of(2)) is not None


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_to_memory_does_not_count_for_the_policy_and_one_in_flight_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    real, may_end, asked = part_of_save.hold, threading.Event(), list[list[tuple[int, bool]]]()

    def hold(prepared: PreparedSave, *rest: Any) -> CheckpointInfo:
        assert may_end.wait(60)
        if prepared.target.step == 2:
            raise CheckpointSaveError("no room", kind="no_space")
        return real(prepared, *rest)

    def is_due(now: StepInfo, saved: Sequence[StepInfo]) -> bool:
        asked.append([(info.step, info.committed) for info in saved])
        return now.step in {1, 2}

    monkeypatch.setattr(part_of_save, "hold", hold)
    options = bcp.ManagerOptions(on_failed_save="warn", async_save=async_save)
    with manager_of(tmp_path, memory_every=When(is_due), options=options) as manager:
        may_end.set()
        first = manager.save(1, state_of(1))
        assert first is not None
        first.result()
        if async_save:
            may_end.clear()
        failed = manager.save(2, state_of(2))
        assert (failed is None) == (not async_save)
        manager.save(3, state_of(3))
        may_end.set()
        if failed is not None:
            assert failed.exception() is not None
        manager.save(4, state_of(4))
        manager.wait()
        manager.save(5, state_of(5))
    in_flight = [(2, False)] if async_save else [(1, True)]
    assert asked == [[], [(1, True)], in_flight, [(1, True)], [(1, True)]]


def test_without_memory_nothing_is_held(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path / "run", save=EverySteps(10)) as manager:
        assert manager.save(3, state_of(3)) is None
    with pytest.raises(TypeError, match="memory_every"):
        manager_of(tmp_path, memory_every="often")
    with pytest.raises(ValueError, match="memory_every without memory"):
        bcp.CheckpointManager(tmp_path / "run", memory_every=5)


def test_a_budget_says_how_often() -> None:
    saved = [StepInfo(1, 100.0, {}, {"stall": 0.5}, pinned=False, committed=True)]

    def due(policy: Any, after_s: float) -> bool:
        now = StepInfo(2, 100.0 + after_s, {}, {}, pinned=False, committed=False)
        return bool(policy.due(now, saved))

    assert due(bcp.every(budget=0.01), 50.0)
    assert not due(bcp.every(budget=0.01), 49.0)
    assert due(bcp.every(budget=0.5, mtbf_s=10_000.0), 100.0)  # where waiting and lost work are least
    assert not due(bcp.every(budget=0.5, mtbf_s=10_000.0), 99.0)
    with pytest.raises(ValueError, match="budget"):
        bcp.every(budget=0.0)
