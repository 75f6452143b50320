"""A loop of Lightning's Trainer with its ModelCheckpoint."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from bytecheckpoint.integrations.lightning import BcpDDPStrategy
from trainers.meter import Meter, by_age
from trainers.model import BATCH, Blocks, Rows

OWN = ("own",)
CANDIDATES = {
    "own": "Lightning, DDPStrategy",
    "bcp": "bytecheckpoint, BcpDDPStrategy",
    "bcp-async": "bytecheckpoint, BcpDDPStrategy, async",
}

PLACE = {name: os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}

checkpoints = by_age
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    """The model, and the optimizer that is watched."""

    def __init__(self, mb: float, meter: Meter) -> None:
        super().__init__()
        self.blocks = Blocks(mb)
        self._meter = meter

    def training_step(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.blocks(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        self._meter.watch(optimizer)
        return optimizer


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    os.environ |= PLACE  # Lightning takes some of it away at the end of a training
    num_ranks = int(PLACE["WORLD_SIZE"])
    strategy = {
        "own": lambda: DDPStrategy(process_group_backend="gloo"),
        "bcp": lambda: BcpDDPStrategy(process_group_backend="gloo", async_save=False),
        "bcp-async": lambda: BcpDDPStrategy(process_group_backend="gloo", async_save=True),
    }[candidate]()
    saver = ModelCheckpoint(folder, every_n_train_steps=save_every, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=num_steps,
        callbacks=saver,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.save_checkpoint = meter.timed(trainer.save_checkpoint)
    trainer.fit(Module(mb, meter), DataLoader(Rows(num_steps, num_ranks), batch_size=BATCH, shuffle=True))
