"""Saves of the same job by a framework itself and through this library's integration for it, in turn, on gloo ranks.

    make bench-framework-accelerate
    python benchmarks/run.py in_trainers --framework accelerate --ranks 2 --mb 50 --rounds 5

The framework's own loop trains and saves; processes live on from round to round, one set for each candidate, and run in
the environment that `make test-framework-NAME` makes. The first run of each does not count. `stall` is the time of the
call that saves, `durable` until the last file is written, `lost` what the steps meanwhile took longer than undisturbed
ones, stall included; of all ranks the slowest. Memory is what the first save of a process takes at its peak during the
call, beyond what the process has then, of the rank that takes most; beside it that rank's part of what is written.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import os
import random
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from shared.machine import facts_line, machine_facts
from shared.process_pool import PoolError, ProcessPool
from shared.rank_process import Obey
from trainers.meter import Meter, num_bytes

ROOT = Path(__file__).parents[1]
FRAMEWORKS = sorted(file.stem.removesuffix("_job") for file in (Path(__file__).parent / "trainers").glob("*_job.py"))
MEASURES = ("stall", "durable", "lost")
SAVES = 2
"""Saves of a run."""
STEPS_BETWEEN = 12
TIMEOUT_S = 300.0


class TrainerModule(Protocol):
    """One module of `trainers`."""

    CANDIDATES: dict[str, str]
    """Titles by name."""
    OWN: tuple[str, ...]
    """Names of those that are the framework's own."""

    def train(self, candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
        """Trains with the framework's loop, and saves below `folder` after each `save_every` steps.

        Each optimizer is given to `meter.watch`, the framework's function that saves to `meter.timed`. On return all is
        durable. Called several times in a process.
        """

    def checkpoints(self, folder: Path) -> list[Path]:
        """Returns what the saves wrote, the oldest first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--framework", required=True, choices=FRAMEWORKS)
    parser.add_argument("--mb", type=float, default=50, help="size of the model; its optimizer has twice as much")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--candidates", nargs="+", help="names of some; all by default")
    parser.add_argument("--python", help="interpreter that has the framework; that of its tests by default")
    parser.add_argument("--folder", type=Path, help="folder to save to; a temporary one by default")


def run(arguments: argparse.Namespace) -> None:
    python = arguments.python or str(ROOT / f".venv-{arguments.framework}" / "bin" / "python")
    new_pool = partial(
        ProcessPool,
        "in_trainers",
        {"num_ranks": arguments.ranks, "framework": arguments.framework, "mb": arguments.mb},
        num_ranks=arguments.ranks,
        timeout_s=TIMEOUT_S,
        python=python,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        print(facts_line(machine_facts(folder)), flush=True)
        with new_pool() as pool:  # the framework is imported in its own environment only
            facts = pool.facts[0]
        names = arguments.candidates or list(facts["candidates"])
        print(
            f"{arguments.framework} {facts['version']}, {arguments.ranks} ranks, {3 * arguments.mb:.0f} MB of model "
            f"and optimizer, {arguments.rounds} rounds of {SAVES} saves\n"
        )
        pools = {name: stack.enter_context(new_pool()) for name in names}
        found = measure(pools, arguments.rounds, folder)
    print(table(facts, names, found, num_ranks=arguments.ranks))


def measure(pools: dict[str, ProcessPool], rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Returns the slowest rank's seconds, and the bytes, of each save by candidate; the memory of the first one."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pools}
    memory: dict[str, float] = {}
    rng = random.Random(0)
    for number in range(rounds + 1):
        for name in rng.sample(list(pools), len(pools)):
            saves = train_once(pools[name], name, folder)
            print(f"  {name}: {saves}", file=sys.stderr, flush=True)
            if number:
                found[name] += saves
            else:
                memory[name] = saves[0]["memory"]
    for name, saves in found.items():
        for save in saves:
            save["memory"] = memory[name]
    return found


def train_once(pool: ProcessPool, name: str, folder: Path) -> list[dict[str, float]]:
    target = folder / name
    target.mkdir()
    try:
        answers = pool.run(candidate=name, folder=str(target))
    except PoolError:
        print(pool.log_tail(), file=sys.stderr)
        raise
    finally:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()  # so that no save pays for the one before it
    each = zip(*(answer["saves"] for answer in answers), strict=True)
    return [{measure: max(rank[measure] for rank in ranks) for measure in ranks[0]} for ranks in each]


def table(
    facts: dict[str, Any],
    names: list[str],
    found: dict[str, list[dict[str, float]]],
    *,
    num_ranks: int,
) -> str:
    stalls = {name: statistics.median(save["stall"] for save in found[name]) for name in names}
    own = [stalls[name] for name in names if name in facts["own"]]
    heads = " | ".join(f"{measure}, s" for measure in MEASURES)
    lines = [
        f"| saved by | {heads} | stall beside its own | written, MB | memory, MB (of a part) |",
        f"{'| --- ' * 7}|",
    ]
    for name in names:
        cells = [spread([save[measure] for save in found[name]]) for measure in MEASURES]
        written = statistics.median(save["bytes"] for save in found[name]) / 1e6
        ratio = f"{stalls[name] / min(own):.2f}x" if own else "-"
        memory = found[name][0]["memory"] / 1e6
        cells += [ratio, f"{written:.1f}", f"{memory:.0f} ({memory * num_ranks / written:.2f})"]
        lines.append(f"| {facts['candidates'][name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} - {max(seconds):.3f})"


def begin(rank: int, port: int, *, num_ranks: int, framework: str, mb: float) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of the framework, and what obeys."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "CUDA_VISIBLE_DEVICES": ""}
    module: TrainerModule = importlib.import_module(f"trainers.{framework}_job")  # type: ignore[assignment]

    is_first = True

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        nonlocal is_first
        folder, meter = Path(command["folder"]), Meter(is_first=is_first)
        is_first = False
        num_steps = SAVES * STEPS_BETWEEN + STEPS_BETWEEN // 2
        gc.collect()  # frameworks keep the models of earlier runs in circles
        module.train(command["candidate"], folder, meter, mb=mb, num_steps=num_steps, save_every=STEPS_BETWEEN)
        checkpoints = module.checkpoints(folder)
        timings = meter.timings(checkpoints)
        return {
            "saves": [
                timing._asdict() | {"bytes": num_bytes(path), "memory": meter.memory}
                for timing, path in zip(timings, checkpoints, strict=True)
            ]
        }

    version = importlib.metadata.version(getattr(module, "DISTRIBUTION", framework))
    return {"candidates": module.CANDIDATES, "own": module.OWN, "version": version}, obey
