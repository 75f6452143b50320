"""Trains with Lightning in this process, is killed, and goes on in the middle of an epoch, with the same losses.

Run it as `python examples/lightning_trainer.py FOLDER`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning import BcpSingleDeviceStrategy

LAST_STEP, KILLED_AT = 40, 29


class Regression(pl.LightningModule):
    def __init__(self, killed_at: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        self.killed_at = killed_at
        self.losses: dict[int, float] = {}

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        if self.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: Path, *, killed_at: int = -1) -> Regression:
    """Trains to the last step, from the newest checkpoint in the folder if there is one."""
    pl.seed_everything(1)
    samples = list(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)))
    sources = {str(k): bcp.data.ShuffleBuffer(samples[k::8], 4, seed=k) for k in range(8)}
    streams = bcp.data.Streams(sources, rank=0, size=1, read_ahead=1)
    module = Regression(killed_at)
    trainer = pl.Trainer(
        strategy=BcpSingleDeviceStrategy(),  # BcpDDPStrategy(), BcpFSDPStrategy(), ... on several ranks
        accelerator="cpu",
        max_steps=LAST_STEP,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=7, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(streams, batch_size=4), ckpt_path="last")
    return module


def main(folder: Path) -> None:
    whole = train(folder / "whole")
    if subprocess.run([sys.executable, __file__, folder, "killed"], check=False).returncode != -signal.SIGKILL:
        sys.exit("the second run was to be killed")
    resumed = train(folder / "killed")
    is_same = all(whole.losses[step] == loss for step, loss in resumed.losses.items())
    print(f"killed at step {KILLED_AT}, went on from step {min(resumed.losses)}: same losses: {is_same}")
    weights = {"model": Regression(-1)}
    bcp.load(folder / "killed" / "last.ckpt", weights)  # without Lightning, on any number of ranks
    print("weights:", sum(each.numel() for each in weights["model"].parameters()), "numbers")


if __name__ == "__main__":
    if sys.argv[2:] == ["killed"]:
        train(Path(sys.argv[1]) / "killed", killed_at=KILLED_AT)
    else:
        main(Path(sys.argv[1]))
