"""Small runs of Hugging Face's Trainer with dropout and shuffled data, and what they leave: losses and parameters."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from bytecheckpoint.integrations.transformers import BcpTrainerMixin

NUM_SAMPLES = 48
"""With a global batch of 8: an epoch has 6 steps."""


class BcpTrainer(BcpTrainerMixin, Trainer):
    """The Trainer with the mixin, as users write it."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same in each run."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.tokens = torch.randint(0, 40, (num_samples, 6), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Masked(Tokens):
    """Tokens of which each of the three default generators replaces one."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index].clone()
        places = (random.randrange(6), np.random.randint(6), int(torch.randint(6, ())))  # noqa: NPY002
        tokens[list(places)] = torch.randint(0, 40, (3,))
        return {"input_ids": tokens, "labels": tokens}


class AtStep(TrainerCallback):
    """Does something at the end of one step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def small_model(*, dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.set_num_threads(1)  # sums of other numbers of threads differ in their last bit
    set_seed(0)
    config = GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def arguments(out: Path, **changed: Any) -> TrainingArguments:
    """Three epochs of 6 steps, a save every 2 steps."""
    given: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 10,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**given | changed)


def trainer(
    out: Path,
    *,
    model: Any = None,
    kind: type[Any] = BcpTrainer,
    dropout: float = 0.1,
    at_step: Mapping[int, Callable[[], object]] | None = None,
    **changed: Any,
) -> Any:
    """A trainer; `at_step` has what to do at the end of which step."""
    model = small_model(dropout=dropout) if model is None else model
    callbacks = [AtStep(step, act) for step, act in (at_step or {}).items()]
    evaluated = Tokens(16) if "eval_strategy" in changed else None
    return kind(
        model, arguments(out, **changed), train_dataset=Tokens(), eval_dataset=evaluated, callbacks=callbacks or None
    )


def losses(of: Any) -> dict[int, float]:
    """The loss of each step, as logged."""
    return {each["step"]: each["loss"] for each in of.state.log_history if "loss" in each}


def parameters(of: Any) -> dict[str, torch.Tensor]:
    """Whole copies of all parameters."""
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in of.model.named_parameters()
    }


def are_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def wait_for_commit(folder: Path) -> None:
    for _ in range(6000):
        if (folder / "manifest.bcp").exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} was not committed")


def kill_after(folder: Path) -> Callable[[], object]:
    """Kills this process without warning, once the folder is committed."""

    def act() -> None:
        wait_for_commit(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def terminate() -> None:
    """Sends this process the signal of a preemption."""
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_and_be_heard(run: Any) -> None:
    """As `terminate`, and returns once the group has heard of it: so short a run may be over before all have agreed."""
    terminate()
    while not run._bcp_stop.reason:
        time.sleep(0.01)


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name.startswith("checkpoint-"))
