"""Saves of a fully_shard model by the checkpoint manager of verl's FSDP workers, and by the one of its integration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from bytecheckpoint.integrations.verl import BcpFSDPCheckpointManager
from trainers.digests import digests
from trainers.meter import Meter, newest_file

OWN = ("own",)
WITHOUT_STATE = ("own-files",)
CANDIDATES = {
    "own": "verl, FSDPCheckpointManager",
    "own-files": "verl, its files of configuration and barriers alone",
    "bcp": "bytecheckpoint, BcpFSDPCheckpointManager",
    "bcp-async": "bytecheckpoint, BcpFSDPCheckpointManager, async",
}
BYTES_A_LAYER = 4 * (4 * 512 * 512 + 3 * 512 * 1024)


def checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=newest_file)


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    manager = new_manager(candidate, mb)
    model, optimizer = manager.model, manager.optimizer
    meter.watch(optimizer)
    meter.holds(partial(digests, model, optimizer))
    save = meter.timed(manager.save_checkpoint)
    for step in range(1, num_steps + 1):
        tokens = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % save_every == 0:
            save(str(folder / f"global_step_{step}" / "actor"), global_step=step)
            if dist.get_rank() == 0:
                torch.save({}, folder / f"global_step_{step}" / "data.pt")  # as the driver does
    if isinstance(manager, BcpFSDPCheckpointManager):
        manager.wait()
    dist.barrier()


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    del num_steps
    manager = new_manager(candidate, mb)
    manager.load_checkpoint(str(checkpoints(folder)[-1] / "actor"))
    return digests(manager.model, manager.optimizer)


def new_manager(candidate: str, mb: float) -> FSDPCheckpointManager:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sharded_llama(mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    kind = BcpFSDPCheckpointManager if candidate.startswith("bcp") else FSDPCheckpointManager
    contents = {"save_contents": []} if candidate in WITHOUT_STATE else {}
    config = CheckpointConfig(async_save=candidate == "bcp-async", **contents)
    return kind(model=model, optimizer=optimizer, lr_scheduler=scheduler, checkpoint_config=config)


def sharded_llama(mb: float) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=max(1, round(mb * 1e6 / BYTES_A_LAYER)),
            num_attention_heads=8,
        )
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
