"""Trains with Hugging Face accelerate, saves in the background, and goes on from the newest checkpoint.

    accelerate launch --num_processes 2 --cpu examples/accelerate_train.py --out run --steps 20
    accelerate launch --num_processes 1 --cpu examples/accelerate_train.py --out run --steps 40

On SIGTERM all processes save at the same step and end.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bytecheckpoint as bcp
from bytecheckpoint.integrations.accelerate import load_state, save_state


class Progress:
    """A count that is saved with the rest."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    set_seed(1)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=True, use_seedable_sampler=True, split_batches=True
        ),
        project_config=ProjectConfiguration(arguments.out, automatic_checkpoint_naming=True, total_limit=2),
    )
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    try:
        load_state(accelerator)  # was: accelerator.load_state()
    except bcp.CheckpointNotFoundError:
        accelerator.print("a new run")
    signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())
    while progress.step < arguments.steps:
        for (batch,) in loader:
            loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            is_asked = accelerator.check_trigger()
            if is_asked or progress.step % 10 == 0:
                handle = save_state(accelerator)  # was: accelerator.save_state()
                accelerator.print(f"step {progress.step}: loss {loss.item():.4f}")
            if is_asked or progress.step == arguments.steps:
                handle.result()
                return


if __name__ == "__main__":
    main()
