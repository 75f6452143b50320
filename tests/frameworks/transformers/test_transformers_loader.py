"""Hugging Face's Trainer with a train loader that has a state: it goes on where it was, and nothing is skipped."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
from rank_programs import run_ranks

import bytecheckpoint as bcp

transformers = pytest.importorskip("transformers")

from frameworks.transformers.loader_runs import run  # noqa: E402
from frameworks.transformers.trainer_runs import are_equal, losses, parameters, trainer  # noqa: E402

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("default"),  # of the packages
    pytest.mark.timeout(600),
]
PROGRAM = Path(__file__).with_name("loader_runs.py")
ENVIRONMENT = {"PYTHONPATH": "tests"}
KINDS = ["torchdata", "streams"]


def is_same_run(resumed: Any, whole: Any) -> bool:
    return are_equal(parameters(resumed), parameters(whole)) and losses(resumed) == losses(whole)


@pytest.mark.parametrize("step", [4, 6, 8], ids=["mid-epoch", "at the end of an epoch", "in the second epoch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_goes_on_exactly_and_reads_nothing_twice(tmp_path: Path, kind: str, step: int) -> None:
    whole = run(kind, tmp_path)
    whole.train()
    resumed = run(kind, tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert is_same_run(resumed, whole)
    assert resumed.seen == whole.seen[step:]
    if kind == "torchdata":
        assert resumed.train_dataset.num_read == 8 * (10 - step)


def test_accumulated_batches_go_on(tmp_path: Path) -> None:
    given = {"gradient_accumulation_steps": 4, "max_steps": 6, "save_steps": 1}  # two of three have four batches
    whole = run("torchdata", tmp_path, **given)
    whole.train()
    for step in (1, 2, 3):
        resumed = run("torchdata", tmp_path, **given)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert is_same_run(resumed, whole)
        assert resumed.state.log_history[:-1] == whole.state.log_history[:-1]


def test_a_killed_run_of_one_rank_goes_on_with_two(tmp_path: Path) -> None:
    whole = run("streams", tmp_path / "whole")
    whole.train()
    out = tmp_path / "run"
    run_ranks(PROGRAM, ["killed", "streams", out], exit_codes=[-signal.SIGKILL], environment=ENVIRONMENT)
    run_ranks(PROGRAM, ["resumed", "streams", out], world_size=2, environment=ENVIRONMENT)
    assert json.loads((out / "seen.json").read_text()) == [sorted(each) for each in whole.seen[4:]]


def test_a_killed_run_of_two_ranks_goes_on_with_two(tmp_path: Path) -> None:
    whole = run("streams", tmp_path / "whole")
    whole.train()
    out = tmp_path / "run"
    killed = [-signal.SIGKILL] * 2
    run_ranks(PROGRAM, ["killed", "streams", out], world_size=2, exit_codes=killed, environment=ENVIRONMENT)
    run_ranks(PROGRAM, ["resumed", "streams", out], world_size=2, environment=ENVIRONMENT)
    assert json.loads((out / "seen.json").read_text()) == [sorted(each) for each in whole.seen[4:]]


def test_a_checkpoint_without_the_loader_goes_on_by_skipping(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, max_steps=4).train()
    assert "data" not in bcp.open(tmp_path / "checkpoint-4").metadata["trainer"]["entries"]
    resumed = run("torchdata", tmp_path)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 10
    assert sorted(losses(resumed)) == list(range(1, 11))
    assert "the checkpoint has no" not in caplog.text
