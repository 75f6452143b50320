"""A loop of the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from bytecheckpoint.integrations.transformers import BcpTrainerMixin
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
    meter.watch(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = Rows(num_steps, dist.get_world_size() if dist.is_initialized() else arguments.world_size)
    trainer = TRAINERS[candidate](model, arguments, train_dataset=rows, optimizers=(optimizer, scheduler))
    trainer._save_checkpoint = meter.timed(trainer._save_checkpoint)
    trainer.train()
