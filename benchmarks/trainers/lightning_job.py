"""A loop of Lightning's Trainer with its ModelCheckpoint."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from bytecheckpoint.integrations.lightning import BcpDDPStrategy
from trainers.digests import digests
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
    module = Module(mb, meter)
    saver = ModelCheckpoint(folder, every_n_train_steps=save_every, save_top_k=-1)
    trainer, rows = new_trainer(candidate, saver, num_steps)
    trainer.save_checkpoint = meter.timed(trainer.save_checkpoint)
    meter.holds(lambda: digests(module, trainer.optimizers[0]))
    trainer.fit(module, rows)


def new_trainer(candidate: str, callback: Callback, num_steps: int) -> tuple[Trainer, DataLoader[Any]]:
    os.environ |= PLACE  # Lightning takes some of it away at the end of a training
    num_ranks = int(PLACE["WORLD_SIZE"])
    strategy = {
        "own": lambda: DDPStrategy(process_group_backend="gloo"),
        "bcp": lambda: BcpDDPStrategy(process_group_backend="gloo", async_save=False),
        "bcp-async": lambda: BcpDDPStrategy(process_group_backend="gloo", async_save=True),
    }[candidate]()
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=num_steps,
        callbacks=callback,
        enable_checkpointing=isinstance(callback, ModelCheckpoint),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, DataLoader(Rows(num_steps, num_ranks), batch_size=BATCH, shuffle=True)


class FirstState(Callback):
    """Keeps the digests of the state that the first step begins with."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.found = self.found or digests(module, trainer.optimizers[0])


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    first = FirstState()
    trainer, rows = new_trainer(candidate, first, num_steps)
    trainer.fit(Module(mb, Meter()), rows, ckpt_path=str(checkpoints(folder)[-1]))
    return first.found
