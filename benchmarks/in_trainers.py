"""Saves of the same job by a framework itself and through this library's integration for it, in turn, on gloo ranks.

    make bench-framework-accelerate
    python benchmarks/run.py in_trainers --framework accelerate --ranks 2 --mb 50 --rounds 5

The framework's own loop trains and saves; processes live on from round to round, one set for each candidate, and run in
the environment that `make test-framework-NAME` makes. The first run of each does not count. `stall` is the time of the
call that saves, `durable` until the last file is written, `lost` what the steps meanwhile took longer than undisturbed
ones, stall included; of all ranks the slowest. Asynchronous saves stand beside the framework's own asynchronous one, if
it has one. Memory is what the first save of a process takes at its peak: during the call beyond what the process has
then, and until the next save beyond the most that undisturbed steps take; of the rank that takes most. Processes of
their own measure it, whose allocator gives memory back at once: what malloc keeps of a training step is no part of a
save. Beside it stands that rank's part of what is written.

Two limits stand below, of the same rounds: one copy of a rank's part of the state into memory that is there already,
which no asynchronous save can stall less for, and its raw write and fsync, which no save that is durable can beat.

Then each candidate saves once more, and resumes on other numbers of ranks, in the framework's own way. `yes` says that
all parameters and all of the optimizer's state are equal to what was saved, bit for bit; else there is the error.
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from shared.machine import facts_line, machine_facts
from shared.process_pool import PoolError, ProcessPool
from shared.rank_process import Obey
from trainers import limits
from trainers.meter import Meter, num_bytes

ROOT = Path(__file__).parents[1]
FRAMEWORKS = sorted(file.stem.removesuffix("_job") for file in (Path(__file__).parent / "trainers").glob("*_job.py"))
MEASURES = ("stall", "durable", "lost")
SAVES = 2
"""Saves of a run."""
STEPS_BETWEEN = 12
STEPS_RESUMED = 4
"""Steps of the run that is resumed."""
TIMEOUT_S = 300.0
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Environment in which glibc keeps no freed memory above 128 KiB."""
WIDEST = 200
"""Characters of an error that are shown."""


class TrainerModule(Protocol):
    """One module of `trainers`."""

    CANDIDATES: dict[str, str]
    """Titles by name."""
    OWN: tuple[str, ...]
    """Names of those that are the framework's own. A module may also have WITHOUT_STATE: names of those that write
    only what stands beside the state, of which none resumes.
    """

    def train(self, candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
        """Trains with the framework's loop, and saves below `folder` after each `save_every` steps.

        Each optimizer is given to `meter.watch`, the framework's function that saves to `meter.timed`. On return all is
        durable. Called several times in a process.
        """

    def resume(self, candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
        """Makes the job anew, on any number of ranks, lets it go on from the newest checkpoint below `folder`, and
        returns the digests of the state that it goes on with. Called once in a process for each candidate.
        """

    def checkpoints(self, folder: Path) -> list[Path]:
        """Returns what the saves wrote, the oldest first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--framework", required=True, choices=FRAMEWORKS)
    parser.add_argument("--mb", type=float, default=50, help="size of the model; its optimizer has twice as much")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resume-ranks", type=int, nargs="*", default=[1, 3], help="numbers of ranks to resume on")
    parser.add_argument("--candidates", nargs="+", help="names of some; all by default")
    parser.add_argument("--python", help="interpreter that has the framework; that of its tests by default")
    parser.add_argument("--folder", type=Path, help="folder to save to; a temporary one by default")


def run(arguments: argparse.Namespace) -> None:
    python = arguments.python or str(ROOT / f".venv-{arguments.framework}" / "bin" / "python")
    settings = {"framework": arguments.framework, "mb": arguments.mb}

    def new_pool(num_ranks: int, *, samples_memory: bool = False) -> ProcessPool:
        given = {"num_ranks": num_ranks, "samples_memory": samples_memory, **settings}
        environment = GIVES_BACK if samples_memory else None
        return ProcessPool(
            "in_trainers", given, num_ranks=num_ranks, timeout_s=TIMEOUT_S, python=python, environment=environment
        )

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        print(facts_line(machine_facts(folder)), flush=True)
        with new_pool(1) as pool:  # the framework is imported in its own environment only
            facts = pool.facts[0]
        names = arguments.candidates or list(facts["candidates"])
        print(
            f"{arguments.framework} {facts['version']}, {arguments.ranks} ranks, {3 * arguments.mb:.0f} MB of model "
            f"and optimizer, {arguments.rounds} rounds of {SAVES} saves\n"
        )
        memory = {}
        for name in names:
            with new_pool(arguments.ranks, samples_memory=True) as pool:
                memory[name] = train_once(pool, name, folder)[0]["memory"]
        with ExitStack() as saving:
            pools = {name: saving.enter_context(new_pool(arguments.ranks)) for name in names}
            settings["framework"] = ""
            bare = saving.enter_context(new_pool(arguments.ranks))
            settings["framework"] = arguments.framework
            found, of_machine = measure(pools, bare, arguments.rounds, folder)
            print(table(facts, names, found, memory, num_ranks=arguments.ranks), flush=True)
            print(limit_rows(facts, names, found, of_machine), flush=True)
            complete = [name for name in names if arguments.resume_ranks and name not in facts["without_state"]]
            saved = {name: save_to_resume(pools[name], name, folder) for name in complete}
        if saved:
            ways = {number: partial(new_pool, number) for number in arguments.resume_ranks}
            outcomes = {number: resume_on(way, saved, folder) for number, way in ways.items()}
            print(f"\n{resume_table(facts, outcomes)}")


def measure(
    pools: dict[str, ProcessPool], bare: ProcessPool, rounds: int, folder: Path
) -> tuple[dict[str, list[dict[str, float]]], dict[str, list[float]]]:
    """Returns the slowest rank's seconds, and the bytes, of each save by candidate, and the seconds of the limits,
    which the `bare` ranks take in each round.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pools}
    of_machine: dict[str, list[float]] = {name: [] for name in limits.TITLES}
    rng = random.Random(0)
    for number in range(rounds + 1):
        for name in rng.sample(list(pools), len(pools)):
            saves = train_once(pools[name], name, folder)
            print(f"  {name}: {saves}", file=sys.stderr, flush=True)
            if number:
                found[name] += saves
        answers = bare.run(folder=str(folder))
        for name, times in of_machine.items():
            if number:
                times.append(max(answer[name] for answer in answers))
        os.sync()
    return found, of_machine


def train_once(pool: ProcessPool, name: str, folder: Path) -> list[dict[str, float]]:
    target = folder / name
    target.mkdir()
    try:
        answers = pool.run(does="train", candidate=name, folder=str(target))
    except PoolError:
        print(pool.log_tail(), file=sys.stderr)
        raise
    finally:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()  # so that no save pays for the one before it
    each = zip(*(answer["saves"] for answer in answers), strict=True)
    return [{measure: max(rank[measure] for rank in ranks) for measure in ranks[0]} for ranks in each]


def save_to_resume(pool: ProcessPool, name: str, folder: Path) -> dict[str, str]:
    """Saves once, and returns the digests of what was saved."""
    target = folder / name
    target.mkdir()
    digests: list[dict[str, str]] = [
        answer["digests"] for answer in pool.run(does="save", candidate=name, folder=str(target))
    ]
    if not digests[0] or any(each != digests[0] for each in digests):
        raise ValueError(f"{name}: ranks do not agree on the state that was saved")
    return digests[0]


def resume_on(new_pool: Callable[[], ProcessPool], saved: Mapping[str, dict[str, str]], folder: Path) -> dict[str, str]:
    """Returns what comes of it when each candidate resumes from what it has saved, on the ranks of a new pool."""
    outcomes = {}
    with ExitStack() as stack:
        pool = None
        for name, digests in saved.items():
            pool = pool or stack.enter_context(new_pool())
            try:
                answers = pool.run(does="resume", candidate=name, folder=str(folder / name))
            except PoolError as error:
                print(pool.log_tail(), file=sys.stderr)
                stack.close()
                pool, outcomes[name] = None, str(error).replace(f"{folder}/", "")
            else:
                outcomes[name] = compared(digests, [answer["digests"] for answer in answers])
            print(f"  {name}: {outcomes[name]}", file=sys.stderr, flush=True)
    return outcomes


def compared(saved: dict[str, str], of_ranks: list[dict[str, str]]) -> str:
    """Returns `yes` if all ranks go on with what was saved."""
    names = saved.keys() | {name for each in of_ranks for name in each}
    other = [name for name in names if any(each.get(name) != saved.get(name) for each in of_ranks)]
    return f"no: {len(other)} of {len(names)} values differ" if other else "yes"


def resume_table(facts: dict[str, Any], outcomes: dict[int, dict[str, str]]) -> str:
    heads = " | ".join(f"{number} rank{'s' * (number > 1)}" for number in outcomes)
    lines = [f"| resumed on | {heads} |", f"{'| --- ' * (1 + len(outcomes))}|"]
    for name in next(iter(outcomes.values())):
        cells = [outcome[name].replace("|", "/")[:WIDEST] for outcome in outcomes.values()]
        lines.append(f"| {facts['candidates'][name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(
    facts: dict[str, Any],
    names: list[str],
    found: dict[str, list[dict[str, float]]],
    memory: Mapping[str, float],
    *,
    num_ranks: int,
) -> str:
    stalls = stalls_of(found)
    own = own_stalls(facts, stalls)
    heads = " | ".join(f"{measure}, s" for measure in MEASURES)
    lines = [
        f"| saved by | {heads} | stall beside its own | written, MB | memory, MB (of a part) |",
        f"{'| --- ' * 7}|",
    ]
    for name in names:
        cells = [spread([save[measure] for save in found[name]]) for measure in MEASURES]
        written = statistics.median(save["bytes"] for save in found[name]) / 1e6
        way = "own-async" if name.endswith("async") and "own-async" in own else "own"
        ratio = f"{stalls[name] / own[way]:.2f}x" if way in own else "-"
        taken = memory[name] / 1e6
        part = "" if name in facts["without_state"] else f" ({taken * num_ranks / written:.2f})"
        cells += [ratio, f"{written:.1f}", f"{taken:.0f}{part}"]
        lines.append(f"| {facts['candidates'][name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def limit_rows(
    facts: dict[str, Any],
    names: list[str],
    found: dict[str, list[dict[str, float]]],
    of_machine: dict[str, list[float]],
) -> str:
    """Returns rows of the table: a copy beside what stalls least in the framework's own way, a write beside `own`."""
    own = own_stalls(facts, stalls_of({name: found[name] for name in names}))
    beside = {limits.COPY: own.get("own-async", own.get("own")), limits.WRITE: own.get("own")}
    lines = []
    for name, times in of_machine.items():
        ratio = f"{statistics.median(times) / beside[name]:.2f}x" if beside[name] else "-"
        durable = spread(times) if name == limits.WRITE else "-"
        lines.append(f"| {limits.TITLES[name]} | {spread(times)} | {durable} | - | {ratio} | - | - |")
    return "\n".join(lines)


def stalls_of(found: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    return {name: statistics.median(save["stall"] for save in saves) for name, saves in found.items()}


def own_stalls(facts: dict[str, Any], stalls: Mapping[str, float]) -> dict[str, float]:
    """Returns the stalls of the framework's own ways."""
    return {way: stalls[way] for way in facts["own"] if way in stalls}


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} - {max(seconds):.3f})"


def begin(
    rank: int, port: int, *, num_ranks: int, framework: str, mb: float, samples_memory: bool
) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of the framework, and what obeys; without a framework, the limits."""
    torch.set_num_threads(1)
    if not framework:
        return {}, limits.begin(rank, port, num_ranks=num_ranks, mb=mb)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "CUDA_VISIBLE_DEVICES": ""}
    module: TrainerModule = importlib.import_module(f"trainers.{framework}_job")  # type: ignore[assignment]

    def train(name: str, folder: Path) -> dict[str, Any]:
        meter = Meter(samples_memory=samples_memory)
        num_steps = SAVES * STEPS_BETWEEN + STEPS_BETWEEN // 2
        module.train(name, folder, meter, mb=mb, num_steps=num_steps, save_every=STEPS_BETWEEN)
        meter.finish()
        checkpoints = module.checkpoints(folder)
        timings = meter.timings(checkpoints)
        return {
            "saves": [
                timing._asdict() | {"bytes": num_bytes(path), "memory": meter.memory}
                for timing, path in zip(timings, checkpoints, strict=True)
            ]
        }

    def save(name: str, folder: Path) -> dict[str, Any]:
        meter = Meter(notes_state=True)
        module.train(name, folder, meter, mb=mb, num_steps=STEPS_RESUMED, save_every=STEPS_RESUMED - 1)
        return {"digests": meter.digests}

    def resume(name: str, folder: Path) -> dict[str, Any]:
        return {"digests": module.resume(name, folder, mb=mb, num_steps=STEPS_RESUMED + 1)}

    ways = {"train": train, "save": save, "resume": resume}

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        gc.collect()  # frameworks keep the models of earlier runs in circles
        return ways[command["does"]](command["candidate"], Path(command["folder"]))

    version = importlib.metadata.version(getattr(module, "DISTRIBUTION", framework))
    without_state = getattr(module, "WITHOUT_STATE", ())
    return {
        "candidates": module.CANDIDATES,
        "own": module.OWN,
        "without_state": without_state,
        "version": version,
    }, obey
