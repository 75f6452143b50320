"""A loop with an engine of DeepSpeed at stage 2 of ZeRO."""

from __future__ import annotations

import logging
import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint
from trainers.digests import digest
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
    engine = new_engine(mb)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    meter.holds(partial(digests_of, engine))
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


def new_engine(mb: float) -> Any:
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Blocks(mb)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    del num_steps
    engine = new_engine(mb)
    if candidate == "own":
        engine.load_checkpoint(str(folder))
    else:
        load_checkpoint(engine, str(folder))
    return digests_of(engine)


def digests_of(engine: Any) -> dict[str, str]:
    """Returns those of what ranks hold together: parameters, their fp32 masters and the states of the optimizer."""
    engine.optimizer._lazy_init_hp_params_optimizer_state()  # which a step does else, and none follows a load here
    found = {"steps": digest(engine.global_steps)}
    for name, parameter in engine.module.named_parameters():
        found[name] = digest(parameter)
        found[f"{name}, master"] = digest(safe_get_full_fp32_param(parameter))
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}, {key}"] = digest(safe_get_full_optimizer_state(parameter, key))
    (state,) = engine.optimizer.optimizer.state.values()
    return found | {"step": digest(state["step"])}
