"""A loop of the Trainer of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

from bytecheckpoint.integrations.transformers import BcpTrainerMixin
from trainers.digests import digests
from trainers.meter import Meter, by_age
from trainers.model import BATCH, Blocks, Rows

OWN = ("own",)
CANDIDATES = {
    "own": "transformers, Trainer",
    "bcp": "bytecheckpoint, Trainer",
    "bcp-async": "bytecheckpoint, Trainer, async",
}

checkpoints = by_age


class BcpTrainer(BcpTrainerMixin, Trainer):
    """Saves while it waits."""

    bcp_async_save = False


class AsyncBcpTrainer(BcpTrainerMixin, Trainer):
    """Saves in the background."""

    bcp_async_save = True


TRAINERS = {"own": Trainer, "bcp": BcpTrainer, "bcp-async": AsyncBcpTrainer}


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    trainer = new_trainer(candidate, folder, mb=mb, num_steps=num_steps, save_every=save_every)
    meter.watch(trainer.optimizer)
    meter.holds(partial(digests, trainer.model, trainer.optimizer))
    trainer._save_checkpoint = meter.timed(trainer._save_checkpoint)
    trainer.train()


def new_trainer(candidate: str, folder: Path, *, mb: float, num_steps: int, save_every: int) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=save_every,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = Blocks(mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = Rows(num_steps, dist.get_world_size() if dist.is_initialized() else arguments.world_size)
    return TRAINERS[candidate](model, arguments, train_dataset=rows, optimizers=(optimizer, scheduler))


class FirstState(TrainerCallback):
    """Keeps the digests of the state that the first step begins with."""

    def __init__(self, trainer: Trainer) -> None:
        self.found: dict[str, str] = {}
        self._digests = partial(digests, trainer.model, trainer.optimizer)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.found = self.found or self._digests()


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    trainer = new_trainer(candidate, folder, mb=mb, num_steps=num_steps, save_every=10 * num_steps)
    trainer.args.save_strategy = "no"
    first = FirstState(trainer)
    trainer.add_callback(first)
    trainer.train(resume_from_checkpoint=True)
    return first.found
