"""Runs of Lightning's Trainer for the tests: a module with dropout, a shuffled loader, and what a run has left."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint as bcp

NUM_SAMPLES, GLOBAL_BATCH = 64, 8
STEPS_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH


class Regression(pl.LightningModule):
    """Fits the sum of a row; notes the loss of each step, and does what `at` says before a step."""

    def __init__(self, at: dict[int, Any] | None = None, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["at"])
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.at = at or {}
        self.losses: dict[int, float] = {}
        self.rows: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        step = self.global_step
        if step in self.at:
            self.at[step](self)
        self.rows += batch[:, 0].tolist()
        loss = self._loss(batch)
        self.losses[step] = loss.item()
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def kill(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def samples() -> list[torch.Tensor]:
    return list(torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(2)))


def train_loader(rank: int = 0, size: int = 1, *, read_ahead: int = 1) -> DataLoader[Any]:
    """Returns a loader of eight shuffled streams, with the same global batches on any number of ranks."""
    sources = {str(k): bcp.data.ShuffleBuffer(samples()[k::8], 4, seed=k) for k in range(8)}
    streams = bcp.data.Streams(sources, rank=rank, size=size, read_ahead=read_ahead)
    return DataLoader(streams, batch_size=GLOBAL_BATCH // size)


def trainer_of(strategy: Any, callbacks: Sequence[Callback], *, max_steps: int = 20, **options: Any) -> pl.Trainer:
    shared: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    shared |= {"enable_model_summary": False, "max_steps": max_steps, "use_distributed_sampler": False, "devices": 1}
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**shared, **options})


def committed(folder: Path) -> dict[str, int]:
    """Returns the names of what is committed in a folder, with global steps."""
    found = {}
    for path in sorted(folder.glob("*.ckpt")):
        try:
            found[path.name] = bcp.open(path).metadata["global_step"]
        except bcp.CheckpointNotFoundError:
            continue
    return found
