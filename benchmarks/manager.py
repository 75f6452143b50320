"""The checkpoint manager: `save` of a step that is not due, in one process and on ranks; questions about a root of
many steps, and saves beside the deletion of many steps in the background, which pauses for them; in a folder and on S3.

    python benchmarks/run.py manager
    python benchmarks/run.py manager --steps 1000 --deleted 100 --saves 20

Steps are copies of one small checkpoint, and lie in a temporary folder, whose disk counts, or on moto's S3, which is a
process on this machine. Processor time is that of this process, and of `bcp ls`,
without moto.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bytecheckpoint as bcp
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.inventory import inventory_of
from bytecheckpoint.storage.layout import step_folder
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import one_block, read_whole
from managed.s3 import serving_moto
from shared.machine import facts_line, machine_facts
from shared.process_pool import ProcessPool

STATE = {"w": torch.zeros(1000)}
NEVER = bcp.save_policies.EverySteps(1 << 40)


class Root(NamedTuple):
    """Where steps lie."""

    path: str
    options: Mapping[str, Any] | None = None


class SavesBeside(NamedTuple):
    """Saves that were made while older steps were deleted."""

    median_ms: float
    num_deleted: int
    """Steps that were gone when the last save returned; the first one began when some were gone."""
    all_gone_s: float
    """Seconds from the first commit on until all were."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the folder that is asked about")
    parser.add_argument("--deleted", type=int, default=1000, help="steps that are deleted while saves go on")
    parser.add_argument("--saves", type=int, default=100, help="saves beside the deletion, and without one")
    parser.add_argument("--calls", type=int, default=100_000, help="calls of `save` that are not due")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that make these calls together")
    parser.add_argument("--s3-steps", type=int, default=2000, help="steps on S3 that `latest` is asked for")


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(Path(tempfile.gettempdir()))))
    print("\n| measure | number | value |\n| --- | --- | --- |", flush=True)
    print(f"| `save` of a step that is not due, us | {arguments.calls:,} calls | {_not_due_us(arguments.calls):.1f} |")
    slowest = _not_due_on_ranks(arguments.ranks, arguments.calls)
    print(
        f"| the same on {arguments.ranks} ranks, the slowest, us (of processor time) | {arguments.calls:,} calls each "
        f"| {slowest['us']:.1f} ({slowest['processor_us']:.1f}) |",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        _print_root("a folder", Root(f"{folder}/latest"), arguments.steps)
        _print_saves("a folder", Root(f"{folder}/alone"), Root(f"{folder}/beside"), arguments)
    with serving_moto() as place:
        _print_root("S3", Root(place.root, place.options), arguments.s3_steps)
    with serving_moto() as alone, serving_moto() as beside:  # each request to moto takes longer the more objects it has
        _print_saves("S3", Root(alone.root, alone.options), Root(beside.root, beside.options), arguments)


def _print_root(where: str, root: Root, num_steps: int) -> None:
    """Prints what questions about a root of many steps take."""
    _fill(root, num_steps)
    questions: dict[str, Callable[[], object]] = {
        "`latest`": lambda: bcp.latest(root.path, root.options),
        "`steps`": lambda: len(bcp.steps(root.path, root.options)),
        "`open` of a missing step": lambda: _missing(root, num_steps + 1),
    }
    if root.options is None:
        questions["`bcp ls`"] = lambda: _list(root)
    for what, ask in questions.items():
        began, began_processor = time.perf_counter(), _processor_s()
        if ask() != num_steps:
            raise RuntimeError(f"the root does not have {num_steps} steps")
        seconds, processor_s = time.perf_counter() - began, _processor_s() - began_processor
        value = f"{seconds:.2f} ({processor_s:.2f})"
        print(f"| {what} of {where}, s (of processor time) | {num_steps:,} steps | {value} |", flush=True)


def _processor_s() -> float:
    """Returns the processor time of this process and of those that it has run."""
    kinds = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in kinds)


def _missing(root: Root, step: int) -> int:
    """Returns the newest step that the message names."""
    try:
        bcp.open(root.path, step=step, storage_options=root.options)
    except bcp.CheckpointNotFoundError as error:
        return int(error.message.partition("newest first: ")[2].partition(",")[0])
    raise RuntimeError("the step is there")


def _list(root: Root) -> int:
    """Returns the number of checkpoints that a process of `bcp ls` lists."""
    command = [sys.executable, "-m", "bytecheckpoint.tools", "ls", root.path]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return sum(line.endswith("committed") for line in listed.splitlines())


def _print_saves(where: str, alone: Root, beside: Root, arguments: argparse.Namespace) -> None:
    alone_ms = _saves_beside(alone, arguments.deleted, arguments.saves, are_deleted=False).median_ms
    what = f"save to {where} with as many older steps, ms"
    print(f"| {what} | {arguments.saves} saves | {alone_ms:.1f} |", flush=True)
    found = _saves_beside(beside, arguments.deleted, arguments.saves, are_deleted=True)
    progress = f"{found.num_deleted:,} gone at the last save, all after {found.all_gone_s:.0f} s"
    ratio = f"{found.median_ms:.1f} ({found.median_ms / alone_ms:.2f} of alone)"
    what = f"save to {where} beside the deletion of steps, ms"
    print(f"| {what} | {arguments.deleted:,} steps, {progress} | {ratio} |", flush=True)


def _not_due_us(num_calls: int) -> float:
    with tempfile.TemporaryDirectory() as root, bcp.CheckpointManager(root, save=NEVER) as manager:
        began = time.perf_counter()
        for step in range(1, num_calls + 1):
            manager.save(step, STATE)
        return (time.perf_counter() - began) / num_calls * 1e6


def _not_due_on_ranks(num_ranks: int, num_calls: int) -> dict[str, float]:
    """Returns the microseconds of a call on the slowest rank: of the clock, and of its processor time."""
    with tempfile.TemporaryDirectory() as root:
        settings = {"num_ranks": num_ranks, "root": root}
        with ProcessPool("managed.ranks", settings, num_ranks=num_ranks, timeout_s=300) as pool:
            pool.run(calls=100)
            return max(pool.run(calls=num_calls), key=lambda answer: answer["us"])


def _saves_beside(root: Root, num_older: int, num_saves: int, *, are_deleted: bool) -> SavesBeside:
    """Makes saves to a root of so many older steps, while these are deleted or stay."""
    _fill(root, num_older)
    keep = bcp.keep_policies.Latest(1) if are_deleted else bcp.keep_policies.All()
    times = []
    with _manager(root, bcp.save_policies.EverySteps(1), keep) as manager:
        first = num_older + 1
        manager.save(first, STATE)  # its commit begins the deletion, after a look at each step
        if not are_deleted:
            manager.wait()
        committed = time.perf_counter()
        while are_deleted and len(manager.steps()) > num_older:
            time.sleep(0.1)
        for step in range(first + 1, first + num_saves + 1):
            began = time.perf_counter()
            manager.save(step, STATE)
            times.append(time.perf_counter() - began)
        num_left = sum(step <= num_older for step in manager.steps())
        manager.wait()
        all_gone_s = time.perf_counter() - committed
    return SavesBeside(statistics.median(times) * 1e3, num_older - num_left, all_gone_s)


def _manager(
    root: Root, save: bcp.save_policies.EverySteps, keep: bcp.keep_policies.KeepPolicy | None = None
) -> bcp.CheckpointManager:
    options = bcp.ManagerOptions(async_save=False)
    keep = keep or bcp.keep_policies.All()
    return bcp.CheckpointManager(root.path, save=save, keep=keep, storage_options=root.options, options=options)


def _fill(root: Root, num_steps: int) -> None:
    """Saves step 1, and writes its files once more for each further step."""
    bcp.save(root.path, STATE, step=1, storage_options=root.options)
    if root.options is None:
        for step in range(2, num_steps + 1):
            shutil.copytree(Path(root.path, step_folder(1)), Path(root.path, step_folder(step)))
        return
    store = open_store(root.path, storage_options=root.options, writer_threads=1)
    prefix = f"{step_folder(1)}/"
    names = [item.name.removeprefix(prefix) for item in inventory_of(store, step_folder(1))]
    contents = {name: read_whole(store, prefix + name, max_bytes=1 << 30) for name in names}

    def write(step: int) -> None:
        for name, content in contents.items():
            store.write(f"{step_folder(step)}/{name}", one_block(content), replace=False)

    run_jobs(write, range(2, num_steps + 1), num_threads=16)
