"""Costs of opening a checkpoint that another program wrote: seconds until its tensors are known, processor time, and
peak memory above that of the imports.

    python benchmarks/run.py foreign                      2 GiB of each format, in folders under /tmp
    python benchmarks/run.py foreign --gib 0.5 --folder /data

The targets, for 2 GB: under 2 s and under 300 MB.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import bytecheckpoint as bcp
from shared.child_process import in_a_process

LAYER_BYTES = 1 << 24
PARTS_OF_LAYER = 12
"""Number of tensors of a layer: 2 GiB are about 1,500 of them."""
NUM_RANKS = 2
"""Number of ranks of formats in which each has files of its own."""
ROUNDS = 5
SECONDS_TARGET, MB_TARGET = 2.0, 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=2.0, help="of each checkpoint")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where there is room for them")


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each format."""
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="bcp-foreign-"))
    print(f"{'format':>30}{'tensors':>9}{'open s':>9}{'spread':>14}{'cpu s':>8}{'peak MB':>9}")
    try:
        for name, write in WRITERS.items():
            path = folder / name
            in_a_process(write, path, arguments.gib)
            measure(name, path)
            (shutil.rmtree if path.is_dir() else Path.unlink)(path)
    finally:
        shutil.rmtree(folder)


def state(gib: float) -> dict[str, torch.Tensor]:
    num_layers = max(1, round(gib * (1 << 30) / LAYER_BYTES))
    numel = LAYER_BYTES // PARTS_OF_LAYER // 2
    return {
        f"layers.{layer}.part{part}.weight": torch.zeros(numel, dtype=torch.bfloat16)
        for layer in range(num_layers)
        for part in range(PARTS_OF_LAYER)
    }


def write_safetensors(path: Path, gib: float) -> None:
    path.mkdir()
    save_file(state(gib), path / "model.safetensors")


def write_torch_file(path: Path, gib: float) -> None:
    torch.save(state(gib), path)


def write_dcp(path: Path, gib: float) -> None:
    warnings.simplefilter("ignore")  # that it is one process is meant
    dcp.save(state(gib), checkpoint_id=path, no_dist=True)


def write_megatron(path: Path, gib: float) -> None:
    """Writes half of it by each of two ranks of tensor parallelism: rows of one kind, columns of another."""
    names = ("linear_qkv.weight", "linear_proj.weight")
    for rank in range(NUM_RANKS):
        (path / f"mp_rank_0{rank}").mkdir(parents=True)
        model = {
            f"decoder.layers.{index}.self_attention.{names[index % 2]}": tensor.reshape(-1, 1 << 10)
            for index, tensor in enumerate(halves(gib))
        }
        torch.save({"model": model, "checkpoint_version": 3.0}, path / f"mp_rank_0{rank}" / "model_optim_rng.pt")


def write_files_of_ranks(path: Path, gib: float) -> None:
    """Writes DTensors, half of each by each of two ranks."""
    path.mkdir()
    for rank in range(NUM_RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        model = {
            f"layers.{index}.weight": DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            for index, tensor in enumerate(halves(gib))
        }
        torch.save(model, path / f"rank_{rank}.pt")
        dist.destroy_process_group()


def halves(gib: float) -> list[torch.Tensor]:
    num_items = LAYER_BYTES // PARTS_OF_LAYER // 2 // NUM_RANKS // (1 << 10) * (1 << 10)
    return [torch.zeros(num_items, dtype=torch.bfloat16) for _ in state(gib)]


WRITERS: dict[str, Callable[[Path, float], None]] = {
    "safetensors": write_safetensors,
    "torch.save": write_torch_file,
    "torch.distributed.checkpoint": write_dcp,
    "megatron": write_megatron,
    "torch.save of ranks": write_files_of_ranks,
}


def measure(name: str, path: Path) -> None:
    found = [in_a_process(open_once, path) for _ in range(ROUNDS)]
    seconds = [of_round[1] for of_round in found]
    cpu, peak = statistics.median(of_round[2] for of_round in found), max(of_round[3] for of_round in found)
    spread = f"{min(seconds):.3f}-{max(seconds):.3f}"
    verdict = "" if statistics.median(seconds) < SECONDS_TARGET and peak < MB_TARGET else "  MISSED"
    times = f"{statistics.median(seconds):>9.3f}{spread:>14}{cpu:>8.3f}"
    print(f"{name:>30}{found[0][0]:>9}{times}{peak:>9.1f}{verdict}", flush=True)


def open_once(path: Path) -> tuple[int, float, float, float]:
    open_checkpoint = bcp.open  # which imports torch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu_started = time.perf_counter(), time.process_time()
    num_tensors = len(open_checkpoint(path))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return num_tensors, seconds, cpu_seconds, (peak - before) / 1024
