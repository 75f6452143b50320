"""Trains a sharded model and saves it with the calls of torch.distributed.checkpoint; only the import is another.

    torchrun --nproc-per-node 2 examples/dcp_drop_in.py --out run --steps 20
    torchrun --nproc-per-node 3 examples/dcp_drop_in.py --out run --steps 40

The second command goes on where the first one ended, or was stopped by SIGTERM, on another number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.integrations import dcp  # was: import torch.distributed.checkpoint as dcp


class AppState(Stateful):
    """Model and optimizer, as DCP's tutorial wraps them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer), strict=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        model, optimizer = state_dict["model"], state_dict["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())

    # RngState is kept for each rank. What the checkpoint lacks raises; what nobody asks for is ignored.
    state: dict[str, Any] = {"app": AppState(model, optimizer), "rng": bcp.RngState(), "next_step": 0}
    if bcp.latest(arguments.out) is not None:
        dcp.load(state, checkpoint_id=arguments.out)

    saving = None
    with dcp.AgreedStop(arguments.out) as stop:  # SIGTERM of any process stops all after the same step
        for step in range(state["next_step"], arguments.steps):
            batch = torch.randn(8, 16)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            is_last = stop.end_step()
            if (step + 1) % 10 == 0 or is_last:
                state["next_step"] = step + 1
                saving = dcp.async_save(state, checkpoint_id=arguments.out / f"step_{step + 1:08d}")
                if dist.get_rank() == 0:
                    print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
            if is_last:
                break
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
