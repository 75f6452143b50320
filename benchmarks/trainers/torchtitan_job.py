"""Saves of a fully_shard model by the checkpoint managers of torchtitan, in its Trainer's order of calls."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager
from trainers.digests import digests
from trainers.meter import Meter, newest_file
from trainers.model import BATCH, WIDTH, Blocks

OWN = ("own", "own-async")
CANDIDATES = {
    "own": "torchtitan, CheckpointManager",
    "own-async": "torchtitan, CheckpointManager, async",
    "bcp": "bytecheckpoint, BcpCheckpointManager",
    "bcp-async": "bytecheckpoint, BcpCheckpointManager, async",
}

logging.disable(logging.INFO)  # a line for each part of a save


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoint").iterdir(), key=newest_file)


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    manager, parts = new_manager(candidate, folder, mb=mb, num_steps=num_steps, save_every=save_every)
    (model,), optimizers, schedulers = parts.values()
    (optimizer,) = optimizers
    meter.watch(optimizer)
    meter.holds(partial(digests, model, optimizer))
    timed = meter.timed(manager.save)
    for step in range(1, num_steps + 1):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        model(inputs)["loss"].backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        save = timed if step % save_every == 0 else manager.save
        save(step)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.barrier()


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    manager, parts = new_manager(candidate, folder, mb=mb, num_steps=num_steps, save_every=num_steps)
    manager.load(step=-1)
    manager.close()
    (model,), (optimizer,), _ = parts.values()
    return digests(model, optimizer)


def new_manager(
    candidate: str, folder: Path, *, mb: float, num_steps: int, save_every: int
) -> tuple[Any, dict[str, Any]]:
    """Returns the manager, and the parts of the trainer that it saves."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = Blocks(mb)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adamw = default_adamw(lr=1e-4)
    adamw.implementation = "for-loop"  # torchtitan fuses it on GPUs only
    optimizers = adamw.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=num_steps)
    parts = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": schedulers}
    manager = config_of(candidate, save_every).build(
        dataloader=None, states={}, sd_adapter=None, base_folder=str(folder), **parts
    )
    return manager, parts


def config_of(candidate: str, save_every: int) -> Any:
    """Returns the configuration of the manager; both keep all checkpoints."""
    common = {"enable": True, "interval": save_every, "keep_latest_k": 0}
    if candidate.startswith("own"):
        return CheckpointManager.Config(async_mode="async" if candidate == "own-async" else "disabled", **common)
    return BcpCheckpointManager.Config(async_save=candidate == "bcp-async", **common)
