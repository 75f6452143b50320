"""Trains with DeepSpeed, saves in the background, stops at SIGTERM, and goes on on another number of processes.

Run these two, one after the other:

deepspeed --num_gpus 4 examples/deepspeed_resume.py --out run --steps 20 --stage 3
deepspeed --num_gpus 2 examples/deepspeed_resume.py --out run --steps 40 --stage 2
"""

from __future__ import annotations

import argparse
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint.integrations.deepspeed import load_checkpoint, save_checkpoint

GLOBAL_BATCH, NUM_STREAMS = 12, 12


def build_loader() -> tuple[DataLoader[Any], bcp.DataLoaderState]:
    """Returns a shuffled loader, and its state, which any number of ranks goes on from."""
    place = {"rank": dist.get_rank(), "size": dist.get_world_size()}
    samples = torch.randn(NUM_STREAMS, 64, 16, generator=torch.Generator().manual_seed(0))
    sources = {f"part-{n:02d}": bcp.data.ShuffleBuffer(list(part), 16, seed=n) for n, part in enumerate(samples)}
    loader = DataLoader(bcp.data.Streams(sources, **place, endless=True), batch_size=GLOBAL_BATCH // place["size"])
    return loader, bcp.DataLoaderState(loader, **place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
    zero = {"zero_optimization": {"stage": arguments.stage}, "zero_allow_untested_optimizer": True}
    config = {"train_batch_size": GLOBAL_BATCH, "bf16": {"enabled": True}, "steps_per_print": 10**9, **zero}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(1 + dist.get_rank())
    loader, data = build_loader()

    path, client_state = load_checkpoint(engine, arguments.out, data=data)  # was: engine.load_checkpoint(...)
    losses = client_state["losses"] if client_state else []
    first = next(batches := iter(loader))
    if path is not None:
        engine.bcp_load_report.restore_rng()  # the loader draws a seed with its first batch

    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    for samples in chain([first], batches):
        batch = samples.to(engine.device, torch.bfloat16)
        loss = (engine(batch) - batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        print(f"step {engine.global_steps} rank {dist.get_rank()}: loss {loss.item()!r}", flush=True)
        is_stopping = torch.tensor(float(bool(stopping)), device=engine.device)
        dist.all_reduce(is_stopping)  # all ranks stop at the same step
        is_end = bool(is_stopping) or engine.global_steps >= arguments.steps
        if is_end or engine.global_steps % 5 == 0:
            save_checkpoint(engine, arguments.out, client_state={"losses": losses}, data=data)
        if is_end:
            break  # the process ends when what it began to save is committed


if __name__ == "__main__":
    main()
