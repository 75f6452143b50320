"""Seconds of planning a save, the first time and with a cached plan: the `plan` seconds that bytecheckpoint reports,
for many tiny tensors, in one process and on 4 ranks.

    python benchmarks/run.py plan_cache
    python benchmarks/run.py plan_cache --tensors 200 2000 --saves 5
    python benchmarks/run.py plan_cache --against PATH       # beside another checkout of the library, save by save

Later saves are the median of --saves, of the slowest rank. On 4 ranks a dict holds tensors that are cut over all of
them, and the model is the same on each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import zeros as zeros_dtensor

import bytecheckpoint as bcp
from shared.comparison import add_against
from shared.process_pool import ProcessPool
from shared.rank_process import Obey, join

SHAPE = (4, 16)
TITLES = ["state", "tensors", "ranks", "first plan, ms", "later plans, ms (min - max)"]
TIMEOUT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, nargs="+", default=[200, 2000, 20_000])
    parser.add_argument("--saves", type=int, default=20, help="after the first one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    add_against(parser)


def run(arguments: argparse.Namespace) -> None:
    checkouts = [None, *([arguments.against.resolve(strict=True)] if arguments.against else [])]
    titles = TITLES + ["against: first, ms", "against: later, ms", "ratio of later plans"] * (len(checkouts) - 1)
    print(f"| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|", flush=True)
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as pools:
            settings = {"num_ranks": num_ranks}
            both = [
                pools.enter_context(
                    ProcessPool("plan_cache", settings, num_ranks=num_ranks, timeout_s=TIMEOUT_S, checkout=checkout)
                )
                for checkout in checkouts
            ]
            for title in STATES:
                for num_tensors in arguments.tensors:
                    seconds = measure(both, title, num_tensors, arguments.saves, Path(folder))
                    print(f"| {title} | {num_tensors} | {num_ranks} | {' | '.join(cells(seconds))} |", flush=True)


def measure(pools: list[ProcessPool], state: str, num_tensors: int, num_saves: int, folder: Path) -> list[list[float]]:
    """Returns the seconds of one save and `num_saves` more, for each pool: the slowest rank's. The pools save one after
    the other, in an order that is drawn for each save.
    """
    seconds: list[list[float]] = [[] for _ in pools]
    rng = random.Random(0)
    for step in range(num_saves + 1):
        for number in rng.sample(range(len(pools)), len(pools)):
            path = folder / f"{state}-{num_tensors}-{number}"
            answers = pools[number].run(state=state, tensors=num_tensors, folder=str(path), step=step)
            seconds[number].append(max(answer["plan"] for answer in answers))
    return seconds


def cells(seconds: list[list[float]]) -> list[str]:
    found: list[str] = []
    for first, *later in seconds:
        spread = f"{statistics.median(later) * 1e3:.2f} ({min(later) * 1e3:.2f} - {max(later) * 1e3:.2f})"
        found += [f"{first * 1e3:.1f}", spread]
    if len(seconds) > 1:
        own, other = (statistics.median(later) for _, *later in seconds)
        found.append(f"{own / other:.3f}x")
    return found


def begin(rank: int, port: int, *, num_ranks: int) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of a rank, of which there are none, and what obeys."""
    torch.set_num_threads(1)
    if num_ranks > 1:
        join(rank, num_ranks, port)
    states: dict[tuple[str, int], dict[str, Any]] = {}

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        key = command["state"], command["tensors"]
        if key not in states:
            states.clear()
            states[key] = STATES[key[0]](key[1])
        if num_ranks > 1:
            dist.barrier()  # waiting for a straggler is no planning
        handle = bcp.save(command["folder"], states[key], step=command["step"])
        return {"plan": handle.result().seconds["plan"]}

    return {}, obey


def plain_dict(num_tensors: int) -> dict[str, Any]:

    fqns = [f"blocks.{number // 10}.{number % 10}" for number in range(num_tensors)]
    if not dist.is_initialized():
        return {"model": {fqn: torch.zeros(SHAPE) for fqn in fqns}}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"model": {fqn: zeros_dtensor(*SHAPE, device_mesh=mesh, placements=[Shard(0)]) for fqn in fqns}}


def model_and_optimizer(num_tensors: int) -> dict[str, Any]:
    """Returns a state in which a parameter counts as four tensors: itself, two Adam states and a step."""
    model = torch.nn.ParameterList(torch.zeros(SHAPE) for _ in range(num_tensors // 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones(SHAPE)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


STATES: dict[str, Callable[[int], dict[str, Any]]] = {"dict": plain_dict, "model and AdamW": model_and_optimizer}
