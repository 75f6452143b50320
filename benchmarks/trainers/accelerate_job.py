"""A loop with accelerate, as its examples write it."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from bytecheckpoint.integrations.accelerate import load_state, save_state
from trainers.digests import digests
from trainers.meter import Meter, by_age
from trainers.model import BATCH, Blocks, Rows

OWN = ("own",)
CANDIDATES = {
    "own": "accelerate, save_state",
    "bcp": "bytecheckpoint, save_state",
    "bcp-async": "bytecheckpoint, save_state, async",
}

checkpoints = by_age


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    accelerator = Accelerator(cpu=True)
    model = Blocks(mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    meter.watch(optimizer)
    meter.holds(partial(digests, model, optimizer))
    loader = DataLoader(Rows(num_steps, accelerator.num_processes), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ways = {
        "own": accelerator.save_state,
        "bcp": lambda path: save_state(accelerator, path, async_save=False),
        "bcp-async": lambda path: save_state(accelerator, path, async_save=True),
    }
    save, handle = meter.timed(ways[candidate]), None
    for step, batch in enumerate(islice(loader, num_steps), 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step % save_every == 0:
            handle = save(str(folder / f"step_{step}"))
    if candidate == "bcp-async" and handle is not None:
        handle.result()
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    model = Blocks(mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Rows(num_steps, accelerator.num_processes), batch_size=BATCH, shuffle=True)
    accelerator.prepare(model, optimizer, loader)
    path = str(checkpoints(folder)[-1])
    if candidate == "own":
        accelerator.load_state(path)
    else:
        load_state(accelerator, path)
    accelerator.free_memory()
    return digests(model, optimizer)
