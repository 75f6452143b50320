"""What the campaigns of managers look for: each check is seen to find what it is there for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults import managed_run, manager_kills, stopped_ranks
from faults.launcher import Ended, Launcher
from faults.managed_run import NEVER, SCENES, Scene
from faults.manager_kills import Root, go_on, run_life
from faults.seams import state_of


def root_at(path: Path, scene: Scene) -> Root:
    managed_run.build(scene, path)
    return Root(scene, path)


def gone_on(path: Path, scene: Scene) -> Root:
    root = root_at(path, scene)
    root.keep_files()
    assert go_on(root) is None
    return root


def test_a_step_that_is_gone_or_was_not_deleted_is_found(tmp_path: Path) -> None:
    root = gone_on(tmp_path / "run", SCENES["old steps"])
    assert bcp.steps(root.first) == [2, 3, 7, 8]
    bcp.save(root.first, state_of(0, 5.0), step=5)
    assert "are left, not [2, 3, 7, 8]" in str(root.wrong_after_restart())
    bcp.delete(root.first, 5)
    shutil.rmtree(root.first / "step_00000007")
    assert "steps [7] are gone" in str(root.wrong_before_restart())


def test_a_step_of_another_process_and_a_file_of_nobody_are_found(tmp_path: Path) -> None:
    root = gone_on(tmp_path / "run", SCENES["old steps"])
    root.values[7] = {1007.0}
    assert "step 7 of run is that of 7, none of [1007.0]" in str(root.wrong_before_restart())
    stranger = root.first / "step_00000001" / "metrics" / "mine.json"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("{}")
    assert root.wrong_after_restart() == "left in run: step_00000001/metrics/mine.json"


def test_a_copy_with_other_bytes_is_found(tmp_path: Path) -> None:
    root = gone_on(tmp_path / "run", SCENES["all steps copied"])
    assert bcp.steps(root.second) == [1, 2, 3, 4]
    (telemetry,) = (root.second / "step_00000003" / "telemetry").iterdir()
    telemetry.write_bytes(telemetry.read_bytes()[:-1])
    assert f"['telemetry/{telemetry.name}'] differ" in str(root.wrong_before_restart())
    shutil.rmtree(root.second / "step_00000003")
    bcp.save(root.second, state_of(0, 3.0), step=3)
    assert "which no checkpoint had" in str(root.wrong_before_restart())


def test_a_step_that_is_in_neither_root_is_found(tmp_path: Path) -> None:
    root = gone_on(tmp_path / "run", SCENES["what a killed copy left"])
    assert root.wrong_before_restart() is None
    bcp.delete(root.second, 1)
    assert "steps [1] are in neither root" in str(root.wrong_before_restart())


def test_a_process_that_is_not_killed_counts_its_calls_and_one_that_is_dies_at_them(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The manifest of the step that is deleted first goes at one of them, so there are roots with and without it."""
    scene, found = SCENES["old steps"], set()
    template = tmp_path / "template"
    managed_run.build(scene, template)
    root = Root(scene, tmp_path / "counted")
    num_calls = manager_kills.count_calls(launcher, template, root)
    for last in (0, num_calls * 2 // 3):
        root = Root(scene, tmp_path / str(last))
        shutil.copytree(template, root.first)
        ended = run_life(launcher, root, 1, last)
        assert ended.exit_code == -9
        found.add(tuple(bcp.steps(root.first)))
    assert len(found) == 2
    assert (1, 2, 3, 4, 5, 6, 7, 8) in found
    shutil.rmtree(root.first)
    shutil.copytree(template, root.first)
    assert run_life(launcher, root, 1, NEVER).exit_code == 0


def test_a_process_that_ended_by_itself_is_found(tmp_path: Path) -> None:
    root = Root(SCENES["old steps"], tmp_path / "run")
    assert "otherwise than by the kill: no room" in str(root.note(Ended(1, "no room")))


@pytest.mark.parametrize(
    ("steps", "newest", "expected"),
    [
        ((7, 12), 12, None),
        ((6,), 6, None),
        ((7, 14), 12, "there are steps [7, 14], not [7, 12]"),
        ((7,), 12, "there are steps [7], not [7, 12]"),
    ],
)
def test_a_stop_after_another_step_than_the_saved_one_is_found(
    tmp_path: Path, steps: tuple[int, ...], newest: int, expected: str | None
) -> None:
    way = stopped_ranks.Way("steps", is_async=False, is_in_step=True)
    for step in steps:
        state = state_of(0, float(step))
        state["own"] = {f"rank{rank}": state_of(rank, float(step))["own"][f"rank{rank}"] for rank in range(4)}
        bcp.save(tmp_path, state, step=step)
    found = stopped_ranks.wrong_steps(tmp_path, newest, way)
    assert found == (None if expected is None else f"{expected} ({way})")
