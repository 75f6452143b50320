"""Trains a small GPT on the source text of Python's standard library. After a kill it goes on from the last save; after
SIGTERM to any of its processes all of them save the same step and end, and the next start goes on from there.

The next start may have another number of processes and another layout:

    torchrun --nproc-per-node 4 examples/train_gpt.py --layout fsdp --out run
    torchrun --nproc-per-node 2 examples/train_gpt.py --layout tp --out run
    python examples/train_gpt.py --layout single --out run

All that this takes is in `train`: a dict that names what is saved, `manager.restore` before the loop, and in it
`manager.save` and `manager.should_stop`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, draw_batch, read_corpus, shard_fsdp, shard_tensor_parallel
from run_log import RunLog, state_digests
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import bytecheckpoint as bcp


def train(args: argparse.Namespace, *, rank: int, world_size: int) -> None:
    model = build_model(args, world_size=world_size)
    optimizer = build_optimizer(model, args)
    scheduler = build_scheduler(optimizer, args)
    progress: dict[str, Any] = {"recent_losses": []}
    torch.manual_seed(args.seed + 1 + rank)

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "extra_state": progress,
        "rng": bcp.RankLocal(RandomState(), missing="keep"),  # ranks that the save did not have go on as they are
    }
    log = RunLog(args.out / "log.jsonl", rank=rank)
    log.write("started", layout=args.layout, pids=gather_pids(world_size))
    corpus = read_corpus()

    save = bcp.save_policies.EverySteps(args.save_every) | bcp.save_policies.Last(args.steps)
    # Between saves to disk, steps are held in the memory of the host; `restore` takes the newest of both.
    memory = bcp.Memory(copies=1, root=args.memory_root.resolve()) if args.memory_root else None
    root = args.checkpoints or args.out / "checkpoints"
    memory_every = args.memory_every if memory else 1
    with bcp.CheckpointManager(root, save=save, memory=memory, memory_every=memory_every) as manager:
        report = manager.restore(state)
        if report is not None:
            digests = logged_digests(args, model, optimizer)
            log.write("loaded", step=report.step, load_s=report.seconds, from_memory=is_from_memory(report), **digests)

        for step in range(manager.next_step, args.steps):
            started = time.perf_counter()
            loss = train_step(model, optimizer, scheduler, next_batch(corpus, args, step, rank, world_size))
            progress["recent_losses"] = [*progress["recent_losses"], loss][-10:]
            log.write("step", step=step, loss=loss, hex=loss.hex(), step_s=time.perf_counter() - started)

            started = time.perf_counter()
            # Returns once the state may change again; the writing goes on beside the training.
            handle = manager.save(step, state, metadata={"layout": args.layout})
            if handle is not None:
                stall_s = time.perf_counter() - started
                log.write("saving", step=step, stall_s=stall_s, **logged_digests(args, model, optimizer))
            if manager.should_stop():  # the same answer on all processes; this step is durable
                log.write("stopping", step=step)
                break

    # The manager is closed: all saves are durable and committed, or it has raised an error.
    log.write("finished", step=manager.latest())


class RandomState:
    """State of this process's random numbers, to be saved. With GPUs, add torch.cuda's here."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["torch"])


def build_model(args: argparse.Namespace, *, world_size: int) -> GPT:
    """Makes the same weights on every process, then each keeps its part."""
    torch.manual_seed(args.seed)
    model = GPT(width=args.width, depth=args.depth, dropout=args.dropout)
    if args.layout != "single":
        mesh = init_device_mesh("cpu", (world_size,))
        shard = {"fsdp": shard_fsdp, "tp": shard_tensor_parallel}[args.layout]
        shard(model, mesh)
    return model


def build_optimizer(model: GPT, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Matrices decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), foreach=True)


def build_scheduler(optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> torch.optim.lr_scheduler.LambdaLR:
    """Returns a linear warm-up, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < args.warmup_steps:
            return (step + 1) / args.warmup_steps
        done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def next_batch(
    corpus: Tensor, args: argparse.Namespace, step: int, rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Returns this process's part of the global batch: its rows under data parallelism, else all of it."""
    tokens, targets = draw_batch(corpus, seed=args.seed, step=step, batch=args.batch, length=args.length)
    if args.layout == "fsdp":
        rows = slice(rank * args.batch // world_size, (rank + 1) * args.batch // world_size)
        return tokens[rows], targets[rows]
    return tokens, targets


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    batch: tuple[Tensor, Tensor],
) -> float:
    """Makes one update; returns the mean loss of the global batch, in nats per byte."""
    tokens, targets = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    mean = loss.detach().clone()
    if dist.is_initialized():  # under tensor parallelism all losses are equal, and their mean is the same number
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


def gather_pids(world_size: int) -> list[int]:
    pids: list[Any] = [os.getpid()] * world_size
    if dist.is_initialized():
        dist.all_gather_object(pids, os.getpid())
    return pids


def is_from_memory(report: bcp.LoadReport) -> bool:
    return bool(report.sources) and report.sources["memory"] > 0


def logged_digests(args: argparse.Namespace, model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"digests": state_digests(model, optimizer)} if args.digests else {}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the source text of Python's standard library.")
    parser.add_argument("--layout", choices=["fsdp", "tp", "single"], default="single")
    parser.add_argument("--out", type=Path, required=True, help="folder of the log and the checkpoints")
    parser.add_argument("--steps", type=int, default=60, help="the schedule ends here; steps count from 0")
    parser.add_argument("--save-every", type=int, default=20, help="in steps")
    parser.add_argument("--checkpoints", type=Path, help="folder of the checkpoints, if it is not one in --out")
    parser.add_argument("--memory-root", type=Path, help="folder in tmpfs that holds steps in memory; none without it")
    parser.add_argument("--memory-every", type=int, default=5, help="in steps")
    parser.add_argument("--digests", action="store_true", help="log digests of the state at every save and load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--length", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.layout == "single":
        train(args, rank=0, world_size=1)
        return
    dist.init_process_group("gloo")
    train(args, rank=dist.get_rank(), world_size=dist.get_world_size())
    dist.barrier()  # a process that leaves while another still talks to it makes that one fail
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
