"""Passes of Hugging Face's Trainer over data that is drawn at random, has no length, or is read by rank 0 for all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_programs import run_ranks
from torch.utils.data import IterableDataset

transformers = pytest.importorskip("transformers")

from frameworks.transformers.trainer_runs import Masked, Tokens, are_equal, losses, parameters, trainer  # noqa: E402

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("default"),  # of the packages
    pytest.mark.timeout(600),  # each start of a program imports torch and transformers on both ranks
]
PROGRAM = Path(__file__).with_name("trainer_on_ranks.py")


class WithoutLength(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        tokens = Tokens()
        return (tokens[index] for index in range(len(tokens)))


def goes_on(folder: Path, dataset: Any, step: int, **changed: Any) -> bool:
    """Returns True if a run from the checkpoint of the step has the losses and parameters of the whole run."""
    whole, resumed = (trainer(folder, **changed) for _ in range(2))
    whole.train_dataset = resumed.train_dataset = dataset
    whole.train()
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002  states that no run has begun with
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return are_equal(parameters(resumed), parameters(whole)) and losses(resumed) == losses(whole)


@pytest.mark.parametrize("step", [2, 6, 8, 10], ids=["first epoch", "between", "second epoch", "one batch is left"])
def test_samples_that_are_drawn_at_random_go_on(tmp_path: Path, step: int) -> None:
    assert goes_on(tmp_path, Masked(44), step, max_steps=11)  # an epoch has 6 steps, the last with 4 samples


def test_samples_that_are_drawn_at_random_go_on_where_gradients_accumulate(tmp_path: Path) -> None:
    changed = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    assert goes_on(tmp_path, Masked(), 2, max_steps=6, **changed)


def test_samples_that_are_drawn_at_random_go_on_twice_in_one_epoch(tmp_path: Path) -> None:
    whole, first, second = (trainer(tmp_path, max_steps=6) for _ in range(3))
    whole.train_dataset = first.train_dataset = second.train_dataset = Masked()
    whole.train()
    first.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(second) == losses(whole)


@pytest.mark.parametrize("step", [4, 6, 8], ids=["first pass", "between", "second pass"])
def test_data_without_a_length_goes_on_in_a_later_pass(tmp_path: Path, step: int) -> None:
    assert goes_on(tmp_path, WithoutLength(), step)


def test_batches_that_rank_0_reads_for_all_go_on(tmp_path: Path) -> None:
    run_ranks(PROGRAM, ["dispatched", tmp_path], world_size=2, environment={"PYTHONPATH": "tests"})
