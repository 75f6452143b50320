"""torchtitan's own Trainer with BcpCheckpointManager: killed, stopped and resumed, on the same and on other ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("torchtitan")

from rank_programs import Ended, run_ranks

import bytecheckpoint as bcp
from frameworks.torchtitan import titan_runs

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1800)]

TESTS = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("titan_program.py")
KILLED, STOPPED = -9, 143


def run(folder: Path, world_size: int, trainings: list[dict[str, Any]], *, ends: int = 0) -> list[Ended]:
    arguments = [folder, *(msgspec.json.encode(training).decode() for training in trainings)]
    environment = {"PYTHONPATH": str(TESTS), "HF_HOME": str(folder / "hf")}
    return run_ranks(
        PROGRAM,
        arguments,
        world_size=world_size,
        environment=environment,
        exit_codes=[ends] * world_size,
        timeout_s=600,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks: whole, killed after `step-3`, and stopped by a signal; then the killed one goes on."""
    folder = tmp_path_factory.mktemp("titan")
    titan_runs.make_assets(folder)
    whole = [{"name": "whole"}, {"name": "streams", "streams": True, "dropout": 0.0}]
    run(folder, 2, [*whole, {"name": "killed", "kill_at": 5}], ends=KILLED)
    shuffled = {"name": "shuffled", "streams": True}
    run(folder, 2, [shuffled, {**shuffled, "name": "shuffled_again", "kill_at": 5}], ends=KILLED)
    for name in ("again", "replicated", "refused"):
        shutil.copytree(folder / "killed", folder / name)
    own = {"name": "stopped", "streams": True, "dropout": 0.0, "term_at": 1, "checkpoint": {"interval": 100}}
    resumed = [{"name": "again"}, {"name": "replicated", "replicate": 2}, {**shuffled, "name": "shuffled_again"}]
    run(folder, 2, [*resumed, own], ends=STOPPED)
    return folder


def test_the_example_runs_by_torchtitans_own_command(folder: Path) -> None:
    environment = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "TITAN_FOLDER": str(folder), "HF_HOME": str(folder / "hf")}
    command = ["--module", "frameworks.torchtitan.titan_runs", "--config", "example", "--checkpoint.interval", 1]
    for steps in (3, 5):
        arguments = [*command, "--training.steps", steps, "--checkpoint.keep_latest_k", 2]
        ended = run_ranks(PROGRAM, arguments, environment=environment, timeout_s=600)
        assert f"step: {steps:2d}" in ended[0].output + ended[0].errors
    found = sorted(path.name for path in (folder / "example/checkpoint").iterdir())
    assert found == ["step-4", "step-5"]
    assert len((TESTS.parent / "examples/torchtitan_config.py").read_text().splitlines()) <= 80


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / f"{name}.losses").read_text().splitlines()
    return {int(step): float.fromhex(loss) for step, loss in map(str.split, lines)}


def same_tensors(first: Path, second: Path) -> bool:
    trees = [bcp.open(path).state_dict() for path in (first, second)]
    return trees[0].keys() == trees[1].keys() and all(torch.equal(trees[0][key], trees[1][key]) for key in trees[0])


def test_a_killed_run_goes_on_bit_for_bit(folder: Path) -> None:
    whole, again = losses(folder, "whole"), losses(folder, "again")
    assert list(losses(folder, "killed")) == [1, 2, 3, 4, 5]
    assert again == {step: whole[step] for step in (4, 5, 6)}
    assert same_tensors(folder / "whole/checkpoint/step-6", folder / "again/checkpoint/step-6")


def test_a_killed_run_with_dropout_over_shuffled_streams_goes_on_bit_for_bit(folder: Path) -> None:
    lines = (folder / "shuffled_again.losses").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2, 3, 4, 5, 4, 5, 6]
    assert losses(folder, "shuffled_again") == losses(folder, "shuffled")
    assert losses(folder, "shuffled") != losses(folder, "streams")
    ends = (folder / name / "checkpoint/step-6" for name in ("shuffled", "shuffled_again"))
    assert same_tensors(*ends)


def test_it_goes_on_without_sharding(folder: Path) -> None:
    whole = losses(folder, "whole")
    assert losses(folder, "replicated") == pytest.approx({step: whole[step] for step in (4, 5, 6)}, rel=1e-6)


def test_a_signal_saves_the_step_and_ends_the_run_and_three_ranks_go_on(folder: Path) -> None:
    stopped, streams = losses(folder, "stopped"), losses(folder, "streams")
    last = max(stopped)
    assert last < 6
    assert [path.name for path in (folder / "stopped/checkpoint").glob("step-*")] == [f"step-{last}"]
    ended = run(folder, 3, [{"name": "stopped", "streams": True, "dropout": 0.0}, {"name": "refused"}], ends=1)
    together = losses(folder, "stopped")
    assert list(together) == [1, 2, 3, 4, 5, 6]
    assert together == pytest.approx(streams, rel=1e-5)
    assert "saved by 2 data-parallel ranks, to be loaded by 3" in ended[0].errors
    assert not (folder / "refused.losses").exists()


def test_a_plain_load_takes_the_model(folder: Path) -> None:
    config = titan_runs.config_of(folder, titan_runs.Training(name="plain"), world_size=1)
    model = config.model_spec.model.build()
    path = folder / "whole/checkpoint/step-6"
    report = bcp.load(path, {"model": model})
    assert report.num_tensors == len(model.state_dict())
    saved = bcp.open(path)
    assert set(saved.objects) >= {"optimizer", "scheduler", "data", "extra_state"}
    assert all(torch.equal(value, saved[f"model.{name}"][...]) for name, value in model.state_dict().items())
