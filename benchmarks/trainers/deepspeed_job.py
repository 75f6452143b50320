"""A loop with an engine of DeepSpeed at stage 2 of ZeRO."""

from __future__ import annotations

import logging
import os
from itertools import islice
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from bytecheckpoint.integrations.deepspeed import save_checkpoint
from trainers.meter import Meter, newest_file
from trainers.model import BATCH, Blocks, Rows

OWN = ("own",)
CANDIDATES = {
    "own": "DeepSpeed, save_checkpoint",
    "bcp": "bytecheckpoint, save_checkpoint",
    "bcp-async": "bytecheckpoint, save_checkpoint, async",
}

deepspeed.ops.__compatible_ops__.clear()  # a host without a GPU need not compile them
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=newest_file)


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = Blocks(mb)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ways = {
        "own": engine.save_checkpoint,
        "bcp": lambda path: save_checkpoint(engine, path, async_save=False),
        "bcp-async": lambda path: save_checkpoint(engine, path, async_save=True),
    }
    save, handle = meter.timed(ways[candidate]), None
    rows = Rows(num_steps, num_ranks)
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows, num_ranks, rank))
    for step, batch in enumerate(islice(loader, num_steps), 1):
        engine.backward(engine(**batch)["loss"])
        engine.step()
        meter.step()
        if step % save_every == 0:
            handle = save(str(folder))
    if candidate == "bcp-async" and handle is not None:
        handle.result()
    dist.barrier()
