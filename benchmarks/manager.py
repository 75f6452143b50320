"""The checkpoint manager, in one process: `save` of a step that is not due, `latest` of a root with many steps, and
saves beside the deletion of many steps in the background, which pauses for them.

    python benchmarks/run.py manager
    python benchmarks/run.py manager --steps 1000 --deleted 100 --saves 20

Steps are copies of one small checkpoint, and lie in a temporary folder, whose disk counts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import bytecheckpoint as bcp
from bytecheckpoint.storage.layout import step_folder
from shared.machine import facts_line, machine_facts

STATE = {"w": torch.zeros(1000)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the root that `latest` is asked for")
    parser.add_argument("--deleted", type=int, default=1000, help="steps that are deleted while saves go on")
    parser.add_argument("--saves", type=int, default=100, help="saves beside the deletion, and without one")
    parser.add_argument("--calls", type=int, default=100_000, help="calls of `save` that are not due")


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(Path(tempfile.gettempdir()))))
    print("\n| measure | number | value |\n| --- | --- | --- |", flush=True)
    print(f"| `save` of a step that is not due, us | {arguments.calls:,} calls | {_not_due_us(arguments.calls):.1f} |")
    seconds, processor_s = _latest_s(arguments.steps)
    print(f"| `latest`, s (of processor time) | {arguments.steps:,} steps | {seconds:.2f} ({processor_s:.2f}) |")
    alone_ms = _save_ms(arguments.deleted, arguments.saves, is_beside=False)
    beside_ms = _save_ms(arguments.deleted, arguments.saves, is_beside=True)
    print(f"| save to a root of as many steps, ms | {arguments.saves} saves | {alone_ms:.1f} |")
    ratio = f"{beside_ms:.1f} ({beside_ms / alone_ms:.2f} of alone)"
    print(f"| save beside the deletion of steps, ms | {arguments.deleted:,} steps | {ratio} |")


def _not_due_us(num_calls: int) -> float:
    with tempfile.TemporaryDirectory() as root, _manager(root, bcp.save_policies.EverySteps(1 << 40)) as manager:
        began = time.perf_counter()
        for step in range(1, num_calls + 1):
            manager.save(step, STATE)
        return (time.perf_counter() - began) / num_calls * 1e6


def _latest_s(num_steps: int) -> tuple[float, float]:
    """Returns the seconds of one call, and those of processor time."""
    with tempfile.TemporaryDirectory() as root:
        _fill(Path(root), num_steps)
        with _manager(root, bcp.save_policies.EverySteps(1 << 40)) as manager:
            began, began_processor = time.perf_counter(), time.process_time()
            if manager.latest() != num_steps:
                raise RuntimeError("the root has another newest step")
            return time.perf_counter() - began, time.process_time() - began_processor


def _save_ms(num_steps: int, num_saves: int, *, is_beside: bool) -> float:
    """Returns the median of saves that are made to a root of so many older steps, while these are deleted or stay."""
    with tempfile.TemporaryDirectory() as root:
        _fill(Path(root), num_steps)
        options = bcp.ManagerOptions(async_save=False)
        keep = bcp.keep_policies.Latest(1) if is_beside else bcp.keep_policies.All()
        times = []
        save = bcp.save_policies.EverySteps(1)
        with bcp.CheckpointManager(root, save=save, keep=keep, options=options) as manager:
            manager.save(num_steps + 1, STATE)  # its commit begins the deletion
            if not is_beside:
                manager.wait()
            for step in range(num_steps + 2, num_steps + num_saves + 2):
                began = time.perf_counter()
                manager.save(step, STATE)
                times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e3


def _manager(root: str, save: bcp.save_policies.EverySteps) -> bcp.CheckpointManager:
    return bcp.CheckpointManager(root, save=save)


def _fill(root: Path, num_steps: int) -> None:
    bcp.save(root, STATE, step=1)
    for step in range(2, num_steps + 1):
        shutil.copytree(root / step_folder(1), root / step_folder(step))
