"""Saves of a manager that a local stage held when they failed, and that `recover` commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before, raising

import bytecheckpoint as bcp
from bytecheckpoint import save_policies
from bytecheckpoint.manager import abandoned_steps
from bytecheckpoint.saving import local_stage
from bytecheckpoint.storage.open_store import open_store


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def manager_at(tmp_path: Path) -> bcp.CheckpointManager:
    options = bcp.ManagerOptions(async_save=False, signals=(), save=through_stage(tmp_path))
    return bcp.CheckpointManager(tmp_path / "run", save=save_policies.EverySteps(1), options=options)


def through_stage(tmp_path: Path) -> bcp.SaveOptions:
    return bcp.SaveOptions(local_stage=tmp_path / "nvme", timeout_s=20)


def go_back_and_fail(tmp_path: Path, *, back_to: int, steps: tuple[int, ...]) -> None:
    """Restores a step, and saves steps whose uploads fail; the value of a step is ten times its number."""
    failing = before(Seam(local_stage, "copy_file"), raising(bcp.StorageError("gone", kind="unavailable")))
    with failing, manager_at(tmp_path) as manager:
        manager.restore(state_at(0), step=back_to)
        for step in steps:
            with pytest.raises(bcp.StorageError, match="gone"):
                manager.save(step, state_at(10 * step))


def restored(tmp_path: Path) -> tuple[int | None, float]:
    state = state_at(0)
    with manager_at(tmp_path) as manager:
        report = manager.restore(state)
        assert report is not None
        assert manager.latest() == report.step
    return report.step, state["weight"][0].item()


@pytest.fixture
def four_steps(tmp_path: Path) -> Path:
    with manager_at(tmp_path) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_at(step))
    return tmp_path


@pytest.mark.parametrize("place", ["run", ".", "run/step_00000002"])
def test_a_recovered_save_after_a_restore_of_an_earlier_step_leaves_the_later_steps(
    four_steps: Path, place: str
) -> None:
    go_back_and_fail(four_steps, back_to=1, steps=(2,))
    assert restored(four_steps) == (4, 4.0)  # nothing was committed on that branch
    (save,) = bcp.recover(four_steps / place, options=through_stage(four_steps))
    assert (save.step, save.outcome) == (2, "committed")
    assert restored(four_steps) == (2, 20.0)


@pytest.mark.parametrize("place", ["run", ".", "run/step_00000005"])
def test_a_recovered_save_has_the_pin_that_was_asked_for(four_steps: Path, place: str) -> None:
    failing = before(Seam(local_stage, "copy_file"), raising(bcp.StorageError("gone", kind="unavailable")))
    with failing, manager_at(four_steps) as manager:
        for step in (5, 6):
            with pytest.raises(bcp.StorageError, match="gone"):
                manager.save(step, state_at(step), pin=step == 5)
    bcp.recover(four_steps / place, options=through_stage(four_steps))
    bcp.recover(four_steps, options=through_stage(four_steps))
    with manager_at(four_steps) as manager:
        assert manager.steps() == [1, 2, 3, 4, 5, 6]
    assert [path.parent.name for path in (four_steps / "run").glob("*/pin.json")] == ["step_00000005"]


def test_two_recovered_saves_of_a_new_branch_leave_the_later_steps(four_steps: Path) -> None:
    go_back_and_fail(four_steps, back_to=1, steps=(2, 3))
    saves = bcp.recover(four_steps / "run", options=through_stage(four_steps))
    assert [(save.step, save.outcome) for save in saves] == [(2, "committed"), (3, "committed")]
    assert restored(four_steps) == (3, 30.0)


def test_of_two_branches_that_are_recovered_together_the_later_one_counts(four_steps: Path) -> None:
    go_back_and_fail(four_steps, back_to=1, steps=(2,))
    go_back_and_fail(four_steps, back_to=4, steps=(5,))
    bcp.recover(four_steps / "run", options=through_stage(four_steps))
    assert restored(four_steps) == (5, 50.0)
    store = open_store(str(four_steps / "run"), storage_options=None, writer_threads=1)
    assert abandoned_steps.read_branch(store).abandoned == {}


def test_a_recovery_keeps_the_branch_that_a_later_job_has_written(four_steps: Path) -> None:
    go_back_and_fail(four_steps, back_to=2, steps=(3,))
    with manager_at(four_steps) as manager:
        manager.restore(state_at(0), step=1)
        manager.save(2, state_at(20))
    store = open_store(str(four_steps / "run"), storage_options=None, writer_threads=1)
    left = abandoned_steps.read_branch(store).abandoned
    assert sorted(left) == [2, 3, 4]
    bcp.recover(four_steps / "run", options=through_stage(four_steps))
    assert abandoned_steps.read_branch(store).abandoned == left
