"""Saves that take files of the newest checkpoint, in one process: bytes written beside bytes changed, for an adapter on
a frozen base, and the cost where everything changes, beside saves without it and torch's DCP.

    python benchmarks/run.py reuse
    python benchmarks/run.py reuse --mib 64 --rounds 3

`written` is what the file system allocated for a save. Seconds are from the call to the commit, synchronous, the median
of the rounds, by turns; ratios are medians of those of single rounds. The save before the first round is not counted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import bytecheckpoint as bcp
from shared.machine import facts_line, machine_facts

WIDTH = 1024
LAYER_BYTES = 4 * WIDTH * WIDTH


class FrozenOrTrained(torch.nn.Module):
    """Linear layers, each with an adapter of rank 8 if the base is frozen."""

    def __init__(self, num_layers: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.base = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        if is_frozen:
            self.base.requires_grad_(False)
            self.down = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 8, bias=False) for _ in range(num_layers))
            self.up = torch.nn.ModuleList(torch.nn.Linear(8, WIDTH, bias=False) for _ in range(num_layers))
        self.trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained)

    def train_step(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()

    @property
    def changed_bytes(self) -> int:
        state = sum(tensor.nbytes for each in self.optimizer.state.values() for tensor in each.values())
        return state + sum(parameter.nbytes for parameter in self.trained)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=512, help="weights of the base")
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure"
    )


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(arguments.folder)))
    print("\n| state | saved by | changed MiB | written MiB | written / changed | s | of bcp without reuse |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    num_layers = max((arguments.mib << 20) // LAYER_BYTES, 1)
    for state, is_frozen, layers in (
        ("frozen base, LoRA", True, num_layers),
        ("full AdamW", False, num_layers // 3 or 1),
    ):
        model = FrozenOrTrained(layers, is_frozen=is_frozen)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            _print_rows(state, model, Path(folder), arguments.rounds)


def _print_rows(state: str, model: FrozenOrTrained, folder: Path, num_rounds: int) -> None:
    savers: dict[str, Callable[[Path, int], object]] = {
        "bcp": lambda path, step: bcp.save(path, _state(model), step=step),
        "bcp, reuse": lambda path, step: bcp.save(path, _state(model), step=step, options=bcp.SaveOptions(reuse=True)),
        "DCP": lambda path, step: _save_by_dcp(model, path / str(step)),
    }
    written: dict[str, list[int]] = {name: [] for name in savers}
    seconds: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(num_rounds + 1):
        model.train_step()
        for name in list(savers) if number % 2 else reversed(savers):
            path = folder / name
            before, began = _allocated_bytes(path), time.perf_counter()
            savers[name](path, number)
            seconds[name].append(time.perf_counter() - began)
            written[name].append(_allocated_bytes(path) - before)
            _drop_old(path, number)
    for name in savers:
        num_bytes = statistics.median(written[name][1:])
        ratios = [own / bare for own, bare in zip(seconds[name][1:], seconds["bcp"][1:], strict=True)]
        print(
            f"| {state} | {name} | {model.changed_bytes / 2**20:.2f} | {num_bytes / 2**20:.2f} | "
            f"{num_bytes / model.changed_bytes:.3f} | {statistics.median(seconds[name][1:]):.3f} | "
            f"{statistics.median(ratios):.2f} |",
            flush=True,
        )


def _state(model: FrozenOrTrained) -> dict[str, Any]:
    return {"model": model, "optimizer": model.optimizer}


def _save_by_dcp(model: FrozenOrTrained, path: Path) -> None:
    weights, optimizer = get_state_dict(model, model.optimizer)
    dcp.save({"model": weights, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)


def _allocated_bytes(folder: Path) -> int:
    """Returns the bytes of the files below a folder, each counted once however many names it has."""
    files = [path.stat() for path in folder.glob("**/*") if path.is_file()]
    return sum({status.st_ino: status.st_size for status in files}.values())


def _drop_old(path: Path, number: int) -> None:
    """Keeps the newest two checkpoints, so that the disk does not fill."""
    for old in (path / str(number - 2), path / f"step_{number - 2:08d}"):
        shutil.rmtree(old, ignore_errors=True)
