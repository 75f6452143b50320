"""What planning a save takes, the first time and when the plan is known: the `plan` seconds that bytecheckpoint itself
reports, for many tiny tensors, in one process and on 4 ranks.

    python benchmarks/plan_cache.py
    python benchmarks/plan_cache.py --tensors 200 2000 --saves 5

Later saves are the median of --saves, of the slowest rank. On 4 ranks a dict holds tensors that are cut over all of
them, and the model is the same on each.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import zeros as zeros_dtensor

import bytecheckpoint as bcp

SHAPE = (4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[200, 2000, 20_000])
    parser.add_argument("--saves", type=int, default=20, help="after the first one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    print("| state | tensors | ranks | first plan, ms | later plans, ms (min - max) |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for num_ranks in arguments.ranks:
        folder = Path(tempfile.mkdtemp())
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            mp.spawn(measure, (Run(num_ranks, server.port, folder, arguments.tensors, arguments.saves),), num_ranks)
        finally:
            shutil.rmtree(folder)


class Run(NamedTuple):
    """What all ranks are told."""

    num_ranks: int
    port: int
    """Of the store through which the ranks find one another."""
    folder: Path
    sizes: list[int]
    """In tensors."""
    num_saves: int
    """After the first one."""


def measure(rank: int, run: Run) -> None:
    """Prints the lines of all states. Runs on every rank; the first one prints."""
    torch.set_num_threads(1)
    if run.num_ranks > 1:
        store = dist.TCPStore("127.0.0.1", run.port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=run.num_ranks)
    for title, make in STATES.items():
        for num_tensors in run.sizes:
            first, *later = plan_seconds(make(num_tensors), run.folder / f"{title}-{num_tensors}", run.num_saves)
            if rank == 0:
                middle = f"{statistics.median(later) * 1e3:.2f} ({min(later) * 1e3:.2f} - {max(later) * 1e3:.2f})"
                print(f"| {title} | {num_tensors} | {run.num_ranks} | {first * 1e3:.1f} | {middle} |", flush=True)
    if run.num_ranks > 1:
        dist.destroy_process_group()


def plan_seconds(state: dict[str, Any], folder: Path, num_saves: int) -> list[float]:
    """Of one save and `num_saves` more, the slowest rank's."""
    seconds = []
    for step in range(num_saves + 1):
        if dist.is_initialized():
            dist.barrier()  # waiting for a rank that comes late is no planning
        seconds.append(bcp.save(folder, state, step=step).result().seconds["plan"])
    slowest = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def plain_dict(num_tensors: int) -> dict[str, Any]:
    names = [f"blocks.{number // 10}.{number % 10}" for number in range(num_tensors)]
    if not dist.is_initialized():
        return {"model": {name: torch.zeros(SHAPE) for name in names}}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"model": {name: zeros_dtensor(*SHAPE, device_mesh=mesh, placements=[Shard(0)]) for name in names}}


def model_and_optimizer(num_tensors: int) -> dict[str, Any]:
    """A parameter counts as four tensors: itself, two Adam states and a step."""
    model = nn.ParameterList(torch.zeros(SHAPE) for _ in range(num_tensors // 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones(SHAPE)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


STATES: dict[str, Callable[[int], dict[str, Any]]] = {"dict": plain_dict, "model and AdamW": model_and_optimizer}


if __name__ == "__main__":
    main()
