"""Saves of a training job through torch.distributed.checkpoint and through `bytecheckpoint.integrations.dcp`, in turn:
an AppState of a fully_shard model and its AdamW, on gloo ranks.

    python benchmarks/run.py dcp_drop_in
    python benchmarks/run.py dcp_drop_in --mb 50 --ranks 2 --rounds 10

The same program saves with either module. Each candidate has processes of its own, which train while they save. The
first save of each does not count. `stall` is the time of the call with the state_dict() in it, `staged` what the first
step afterwards waits, `lost` both and what steps beside the save took longer; of all ranks the slowest. Memory is what
the first save of a fresh process takes at its peak until it is durable, without training beside it, of the rank that
takes most. The limits are the state_dict() and one copy of its tensors into memory that is there already; the
state_dict(), and its bytes written past the page cache and synced. DCP syncs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bytecheckpoint.integrations import dcp as drop_in
from saves.limits import MIB, random_memory, write
from saves.timing import Pending, time_async, time_sync
from shared.machine import facts_line, machine_facts
from shared.memory import PeakMemory, own_memory
from shared.process_pool import ProcessPool
from shared.rank_process import Obey, join

WIDTH, BATCH = 1024, 8
MEMORY_PERIOD_S = 0.004
LIMIT, WRITE_LIMIT = "limit", "limit-write"
LIMITS = {LIMIT, WRITE_LIMIT}
SYNCHRONOUS = {"dcp", "bcp", WRITE_LIMIT}
WRITE_WAY = 16 * MIB, 2
TIMEOUT_S = 300.0
TITLES = {
    "dcp": "torch DCP, save",
    "bcp": "drop-in, save",
    "dcp-async": "torch DCP, async_save",
    "dcp-cached": "torch DCP, async_save, kept staging memory",
    "bcp-async": "drop-in, async_save",
    "bcp-stager": "drop-in, async_save, a stager",
    "bcp-live": "drop-in, async_save, live module and optimizer",
    "bcp-live-stager": "the same, a stager",
    LIMIT: "limit: one copy",
    WRITE_LIMIT: "limit: raw writes and fsync",
}
MEASURES = ("stall", "staged", "durable", "lost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mb", type=float, default=50, help="size of the model; its optimizer has twice as much")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--candidates", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--folder", type=Path, help="folder to save to; a temporary one by default")


def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(facts_line(machine_facts(Path(folder))), flush=True)
        state_mb = 3 * arguments.mb
        print(f"{arguments.ranks} ranks, {state_mb:.0f} MB of model and optimizer, {arguments.rounds} rounds\n")
        timings, written = measure_times(arguments, Path(folder))
        savers = [name for name in arguments.candidates if name not in LIMITS]
        memory = {name: measure_memory(name, arguments, Path(folder)) for name in savers}
    names = " | ".join(f"{name}, s" for name in MEASURES)
    print(f"| candidate | {names} | stall beside torch | written, MB | memory, MB (of a part) |\n{'| --- ' * 8}|")
    for name in arguments.candidates:
        found = timings[name]
        cells = [spread([timing[measure] for timing in found]) for measure in MEASURES]
        taken = "-"
        if name in memory:
            taken = f"{memory[name] / 1e6:.0f} ({memory[name] * arguments.ranks / written[name]:.2f})"
        print(
            f"| {TITLES[name]} | {' | '.join(cells)} | {beside_torch(name, timings)} | {written[name] / 1e6:.1f} "
            f"| {taken} |"
        )


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} - {max(seconds):.3f})"


def beside_torch(name: str, timings: dict[str, list[dict[str, float]]]) -> str:
    """Returns the stall as a part of the shortest that torch has in the same way."""
    ways = ["dcp"] if name in SYNCHRONOUS else ["dcp-async", "dcp-cached"]
    stalls = [statistics.median(timing["stall"] for timing in timings[way]) for way in ways if way in timings]
    own = statistics.median(timing["stall"] for timing in timings[name])
    return f"{own / min(stalls):.2f}x" if stalls else "-"


def measure_times(
    arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[dict[str, float]]], dict[str, int]]:
    """Returns the slowest rank's seconds of each round, and the bytes of a checkpoint, by candidate."""
    timings: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.candidates}
    written: dict[str, int] = {}
    rng = random.Random(0)
    with ExitStack() as stack:
        pools = {name: stack.enter_context(new_pool(arguments)) for name in arguments.candidates}
        for number in range(arguments.rounds + 1):
            for name in rng.sample(arguments.candidates, len(arguments.candidates)):
                answers, written[name] = save_once(pools[name], name, folder)
                slowest = {measure: max(answer[measure] for answer in answers) for measure in MEASURES}
                print(f"  {name}: {slowest}", file=sys.stderr, flush=True)
                if number:
                    timings[name].append(slowest)
    return timings, written


def measure_memory(name: str, arguments: argparse.Namespace, folder: Path) -> int:
    with new_pool(arguments) as pool:
        answers, _ = save_once(pool, name, folder, is_for_memory=1)
    return max(answer["memory"] for answer in answers)


def new_pool(arguments: argparse.Namespace) -> ProcessPool:
    settings = {"num_ranks": arguments.ranks, "mb": arguments.mb}
    return ProcessPool("dcp_drop_in", settings, num_ranks=arguments.ranks, timeout_s=TIMEOUT_S)


def save_once(
    pool: ProcessPool, name: str, folder: Path, *, is_for_memory: int = 0
) -> tuple[list[dict[str, Any]], int]:
    target = folder / name
    try:
        answers = pool.run(candidate=name, folder=str(target), is_for_memory=is_for_memory)
        return answers, sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()  # so that no save pays for the one before it


def begin(rank: int, port: int, *, num_ranks: int, mb: float) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of a rank, of which there are none, and what obeys."""
    torch.set_num_threads(1)
    join(rank, num_ranks, port)
    job = TrainingJob(mb)
    saves = candidates(job, dist.new_group(backend="gloo"))

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        name = command["candidate"]
        if command["is_for_memory"]:
            return {"memory": memory_of_save(saves[name], Path(command["folder"]))}
        timer = time_sync if name in SYNCHRONOUS else time_async
        timing = timer(lambda folder, _: saves[name](folder), Path(command["folder"]), job)
        return dataclasses.asdict(timing)

    return {}, obey


def memory_of_save(save: Callable[[Path], Pending | None], folder: Path) -> int:
    with PeakMemory(own_memory, period_s=MEMORY_PERIOD_S) as peak:
        pending = save(folder)
        if pending is not None:
            pending.wait()
    return peak.bytes


class TrainingJob:
    """A model, its optimizer and training, as saves.timing drives them."""

    def __init__(self, mb: float) -> None:
        self.held = self  # whose barrier ranks come together at
        num_layers = max(1, round(mb * 1e6 / (4 * WIDTH * WIDTH)))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
        for layer in self.model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(BATCH, WIDTH)
        self.train(1)

    def train(self, num_steps: int) -> dict[str, Any]:
        for _ in range(num_steps):
            self.compute(is_done=True)
            self.update()
        return {}

    def barrier(self) -> None:
        dist.barrier()

    def compute(self, *, is_done: bool) -> bool:
        self.model(self._batch).square().mean().backward()
        flag = torch.tensor([float(is_done)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"app": AppState(self.model, self.optimizer)}


class AppState:
    """Model and optimizer as torch's tutorials wrap them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._held = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(*self._held), strict=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(*self._held, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"])


def candidates(job: TrainingJob, group: dist.ProcessGroup) -> dict[str, Callable[[Path], Pending | None]]:
    """Returns the saves by name. `group` is for background threads: training uses the other at the same time."""
    stager = DefaultStager(StagingOptions(False, False, use_async_staging=False, use_non_blocking_copy=False))
    stages_on = DefaultStager(StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False))

    def live() -> dict[str, Any]:
        return {"model": job.model, "optim": job.optimizer}

    kept: list[torch.Tensor] = []

    memory = random_memory(WRITE_WAY[0])

    def local_parts() -> list[torch.Tensor]:
        state = job.state()["app"].state_dict()
        tensors = [
            *state["model"].values(),
            *(part for each in state["optim"]["state"].values() for part in each.values()),
        ]
        return [part.to_local() if isinstance(part, DTensor) else part for part in tensors]

    def write_raw(folder: Path) -> None:
        num_bytes = sum(part.nbytes for part in local_parts())
        folder.mkdir(exist_ok=True)
        write(folder / f"{dist.get_rank()}.raw", num_bytes, memory, WRITE_WAY)

    def copy(_: Path) -> Pending:
        parts = local_parts()
        kept[:] = kept or [torch.empty_like(part) for part in parts]
        for place, part in zip(kept, parts, strict=True):
            place.copy_(part)
        return Pending(bool)

    def begun(module: Any, state: Callable[[], dict[str, Any]], folder: Path, **arguments: Any) -> Pending:
        return pending(module.async_save(state(), checkpoint_id=folder, process_group=group, **arguments))

    return {
        "dcp": lambda folder: torch_dcp.save(job.state(), checkpoint_id=folder) and None,
        "bcp": lambda folder: drop_in.save(job.state(), checkpoint_id=folder) and None,
        "dcp-async": partial(begun, torch_dcp, job.state),
        "dcp-cached": partial(begun, torch_dcp, job.state, async_stager=stager),
        "bcp-async": partial(begun, drop_in, job.state),
        "bcp-stager": partial(begun, drop_in, job.state, async_stager=stages_on),
        "bcp-live": partial(begun, drop_in, live),
        "bcp-live-stager": partial(begun, drop_in, live, async_stager=stages_on),
        LIMIT: copy,
        WRITE_LIMIT: write_raw,
    }


def pending(response: Any) -> Pending:
    """Wraps what async_save returns, which depends on its stager."""
    if isinstance(response, Future):
        return Pending(response.result)
    return Pending(response.upload_completion.result, response.staging_completion.result)
