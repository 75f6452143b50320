"""How long a save takes, and how long it holds the training thread, beside torch's DCP, torch.save, safetensors and
the machine's own limit, interleaved in one run so that a change of the machine's speed hits all alike.

    python benchmarks/save.py                        # W1 and W3 in one process, W2 and W4 on 4 ranks
    python benchmarks/save.py --workloads W1 --size 0.25 --rounds 3

Prints medians with minimum and maximum, and each contestant's ratio to DCP's synchronous save. A checkpoint counts as
saved when it is durable: contestants that do not sync their files are synced by the benchmark, inside the clock.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import bytecheckpoint as bcp

GIB = 1 << 30
State = dict[str, torch.Tensor]


class Timing(NamedTuple):
    """Seconds of one save."""

    stall: float
    """Until the call gave the thread back."""
    durable: float
    """Until the checkpoint was durable."""


class Run(NamedTuple):
    """How often, and where."""

    rounds: int
    folder: Path


Contestant = Callable[[Path, State], Timing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--size", type=float, default=1.0, help="1.0 is the full size of every workload")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that is not")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder if not given")
    parser.add_argument("--json", type=Path, default=None, help="write all figures there as well")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    figures = {}
    try:
        for name in arguments.workloads:
            figures[name] = measure(name, arguments.size, arguments.rounds, folder)
            print(table(name, figures[name]), flush=True)
    finally:
        shutil.rmtree(folder)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))


def measure(name: str, size: float, rounds: int, folder: Path) -> dict[str, list[Timing]]:
    """Timings by contestant. Every round runs each contestant once; the first round is for warming up."""
    workload, run = WORKLOADS[name], Run(rounds, folder / name)
    if workload.num_ranks == 1:
        return run_rounds(workload.make(size), contestants(is_group=False), run)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(run_rank, (workload, size, run, results), workload.num_ranks)
        return dict(results)


def run_rank(rank: int, workload: Workload, size: float, run: Run, results: dict[str, list[Timing]]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{run.folder}.store", workload.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workload.num_ranks)
    timings = run_rounds(workload.make(size), contestants(is_group=True), run)
    if rank == 0:
        results.update(timings)
    dist.barrier()
    dist.destroy_process_group()


def run_rounds(state: State, entrants: Mapping[str, Contestant], run: Run) -> dict[str, list[Timing]]:
    timings: dict[str, list[Timing]] = {name: [] for name in entrants}
    for number in range(run.rounds + 1):
        for name, save in entrants.items():
            target = run.folder / f"{number}-{list(entrants).index(name)}"
            if rank() == 0:
                target.mkdir(parents=True)
            barrier()
            timing = save(target, state)
            barrier()
            if number > 0:
                timings[name].append(timing)
            if rank() == 0:
                shutil.rmtree(target)
                os.sync()
            barrier()
    return timings


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def contestants(*, is_group: bool) -> dict[str, Contestant]:
    """By name. DCP's synchronous save is what the others are compared with."""
    entrants: dict[str, Contestant] = {
        "DCP": dcp_save(1),
        "DCP, 2 threads": dcp_save(2),
        "bytecheckpoint": bcp_save,
        "bytecheckpoint, async": bcp_async,
    }
    if is_group:  # DCP 2.13 cannot stage these DTensors for an asynchronous save
        return entrants
    alone = {"torch.save": torch_save, "safetensors": safetensors_save, "limit": limit}
    return {**entrants, "DCP, async": dcp_async, **alone}


def timed(save: Callable[[], object]) -> Timing:
    started = time.perf_counter()
    save()
    seconds = time.perf_counter() - started
    return Timing(seconds, seconds)


def bcp_save(folder: Path, state: State) -> Timing:
    return timed(lambda: bcp.save(folder, {"state": state}))


def bcp_async(folder: Path, state: State) -> Timing:
    started = time.perf_counter()
    handle = bcp.save(folder, {"state": state}, async_save=True)
    stall = time.perf_counter() - started
    handle.result()
    return Timing(stall, time.perf_counter() - started)


def dcp_save(threads: int) -> Contestant:
    def save(folder: Path, state: State) -> Timing:
        writer = dcp.FileSystemWriter(folder, thread_count=threads)
        return timed(lambda: dcp.save({"state": state}, storage_writer=writer))

    return save


def dcp_async(folder: Path, state: State) -> Timing:
    started = time.perf_counter()
    future: Any = dcp.async_save({"state": state}, checkpoint_id=folder)
    stall = time.perf_counter() - started
    (future if isinstance(future, Future) else future.upload_completion).result()
    return Timing(stall, time.perf_counter() - started)


def torch_save(folder: Path, state: State) -> Timing:
    return timed(lambda: (torch.save(state, folder / "state.pt"), sync(folder / "state.pt")))


def safetensors_save(folder: Path, state: State) -> Timing:
    path = folder / "state.safetensors"
    return timed(lambda: (save_file(state, path), sync(path)))


def limit(folder: Path, state: State) -> Timing:
    """The same bytes from memory that is aligned and paged in, past the page cache where the file system lets us."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    block = mmap.mmap(-1, 16 << 20)
    block.write(b"\x01" * len(block))
    return timed(lambda: write_raw(folder / "raw", num_bytes, block))


def write_raw(path: Path, num_bytes: int, block: mmap.mmap) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(2) as pool:
            offsets = range(0, num_bytes, len(block))
            list(pool.map(lambda offset: os.pwritev(fd, [block], offset), offsets))
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


class Workload(NamedTuple):
    """A state to save, and on how many ranks."""

    num_ranks: int
    make: Callable[[float], State]


def transformer(size: float) -> State:
    """bf16 parameters, fp32 master weights and two Adam states: 14 bytes a parameter, 2 GiB at size 1."""
    state: State = {}
    width, num_layers = 2048, max(1, round(36 * size))
    for layer in range(num_layers):
        shape = (width, width)
        state[f"layers.{layer}.weight"] = torch.full(shape, 0.5, dtype=torch.bfloat16)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            state[f"optimizer.layers.{layer}.{name}"] = torch.full(shape, 0.25)
    return state


def sharded(size: float) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distributed(tensor, mesh, Shard(0)) for name, tensor in transformer(size).items()}


def replicated(size: float) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distributed(tensor, mesh, Replicate()) for name, tensor in transformer(size / 2).items()}


def distributed(tensor: torch.Tensor, mesh: Any, placement: Any) -> torch.Tensor:
    parts = tensor.chunk(mesh.size()) if isinstance(placement, Shard) else [tensor] * mesh.size()
    return DTensor.from_local(parts[mesh.get_local_rank()].contiguous(), mesh, [placement], run_check=False)


def many_small(size: float) -> State:
    """20,000 tensors of 1 to 64 KiB, about 0.6 GiB at size 1."""
    numels = [256 * (1 + number % 64) for number in range(round(20_000 * size))]
    return {f"block.{number}.weight": torch.full((numel,), float(number)) for number, numel in enumerate(numels)}


WORKLOADS = {
    "W1": Workload(1, transformer),
    "W2": Workload(4, sharded),
    "W3": Workload(1, many_small),
    "W4": Workload(4, replicated),
}


def table(name: str, timings: Mapping[str, list[Timing]]) -> str:
    reference = statistics.median(timing.durable for timing in timings["DCP"])
    lines = [
        f"\n### {name}",
        "| | stall, s (min - max) | durable, s (min - max) | durable / DCP |",
        "| --- | --- | --- | --- |",
    ]
    for contestant, of_rounds in timings.items():
        stall, durable = ([timing[column] for timing in of_rounds] for column in (0, 1))
        ratio = statistics.median(durable) / reference
        lines.append(f"| {contestant} | {spread(stall)} | {spread(durable)} | {ratio:.2f} |")
    return "\n".join(lines)


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})"


if __name__ == "__main__":
    main()
