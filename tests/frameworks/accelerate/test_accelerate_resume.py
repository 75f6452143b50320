"""Runs of accelerate in one process: what goes on from a checkpoint gives what a run gives that was not stopped."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
import torch
from rank_programs import run_ranks

import bytecheckpoint as bcp
from frameworks.accelerate.accelerate_program import NUM_EPOCHS, NUM_SAMPLES, network, told

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
PROGRAM = Path(__file__).parent / "accelerate_program.py"
IN_EPOCH = NUM_SAMPLES // 3
LOADERS = {
    "default": [],
    "seedable": ["--seedable"],
    "a generator of its own": ["--generator"],
    "workers": ["--workers", 1],
    "stateful": ["--stateful"],
    "stateful seedable": ["--stateful", "--seedable"],
    "stateful, a generator of its own": ["--stateful", "--generator"],
    "stateful workers": ["--stateful", "--workers", 1],
    "stateful seedable workers": ["--stateful", "--seedable", "--workers", 1],
}


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("save_at", [5, IN_EPOCH, IN_EPOCH + 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, kind: str, save_at: int) -> None:
    given = ["--out", tmp_path, *LOADERS[kind]]
    whole = told(given)
    assert len(whole) == NUM_EPOCHS * IN_EPOCH + 1
    assert told([*given, "--save-at", save_at, "--stop-at", save_at + 1]) == whole[: save_at + 1]
    skip = [] if "--stateful" in given else ["--skip", save_at % IN_EPOCH]
    assert told([*given, "--resume", *skip]) == whole[save_at:]


def test_a_run_that_is_resumed_twice_in_one_epoch_goes_on(tmp_path: Path) -> None:
    given = ["--out", tmp_path]
    whole = told(given)
    told([*given, "--save-at", 10, "--stop-at", 11])
    second = told([*given, "--resume", "--skip", 2, "--save-at", 13, "--stop-at", 14])
    assert second == whole[10:14]
    assert told([*given, "--resume", "--skip", 5]) == whole[13:]


def test_a_seed_that_is_another_does_not_change_the_order_that_was_saved(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--seedable", "--stateful"]
    whole = told(given)
    told([*given, "--save-at", 5, "--stop-at", 5])
    assert told([*given, "--resume", "--seed", 77]) == whole[5:]


def test_gradient_accumulation_goes_on_at_its_step(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--stateful", "--accumulate", 3]
    whole = told(given)
    told([*given, "--save-at", 6, "--stop-at", 6])
    assert told([*given, "--resume"]) == whole[6:]


def test_a_save_between_two_steps_of_the_optimizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        told(["--out", tmp_path, "--accumulate", 3, "--save-at", 4, "--stop-at", 4])
    assert "gradients accumulated so far are not part of it" in caplog.text


def test_without_a_state_the_log_says_how_many_batches_to_skip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told(["--out", tmp_path, "--save-at", 5, "--stop-at", 5])
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        told(["--out", tmp_path, "--resume", "--stop-at", 6])
    assert "accelerator.skip_first_batches(loader, 5)" in caplog.text


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--stateful"]
    whole = told(given)
    (died,) = run_ranks(PROGRAM, [*given, "--save-at", 5, "--die-at", 7], exit_codes=[-signal.SIGKILL])
    assert died.output.splitlines() == whole[:7]
    assert told([*given, "--resume"]) == whole[5:]


def test_a_run_that_is_asked_to_stop_saves_where_it_is(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--stateful"]
    whole = told(given)
    (stopped,) = run_ranks(PROGRAM, [*given, "--signal-at", 5])
    assert stopped.output.splitlines() == [*whole[:5], "stopped 5"]
    assert told([*given, "--resume"]) == whole[5:]


def test_a_plain_model_takes_what_was_saved(tmp_path: Path) -> None:
    told(["--out", tmp_path, "--save-at", 5, "--stop-at", 5])
    model = network()
    bcp.load(tmp_path, {"model": model})
    saved = bcp.open(tmp_path)
    assert torch.equal(model.state_dict()["3.bias"], torch.as_tensor(saved["model.3.bias"]))
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer"}
    assert set(saved.objects) == {"optimizer", "scheduler", "data", "extra_state"}
    assert saved.rank_values("rng")
