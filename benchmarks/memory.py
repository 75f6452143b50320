"""Processor time of memory checkpoints, beside what others pay for the same in tmpfs: one process, warm.

    python benchmarks/run.py memory                 # 1 GiB
    python benchmarks/run.py memory --mib 256 --rounds 9
    .venv-peers/bin/python benchmarks/run.py memory --peers    # as benchmarks/requirements-memory-peers.txt says

`call` is what an asynchronous save takes before it returns, `all` with its work in the background until it is held or
written. The best of the rounds counts, in seconds of one core, which a busy machine changes least; torch has one
thread. Loads fill memory that exists; only the memory tier verifies what it reads. Ratios are to a bare copy of the
state. A second table has goals of the memory tier and what was found.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp
from in_memory.goals import Goal, copy_with_digests, goals
from in_memory.peers import peer_works

_TENSORS = 16
_COPY, _LIMIT, _SAVE = "a bare copy", "a bare copy and its digests", "save to memory"
_NVRX, _FOLDER = "LocalCheckpointManager.save", "save of this library to a folder in tmpfs"
_RESUME, _MMAP = "resume from memory, verified", "torch.load(mmap=True) and a copy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="of float32 weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="also nvidia-resiliency-ext and torchft")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")


def run(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # threads that wait for one another in a copy would count three times its work
    folder = Path(tempfile.mkdtemp(prefix="bench-memory-", dir=arguments.tmpfs))
    try:
        bench = Bench(folder, arguments.mib << 20)
        print("| work | call, CPU s | all, CPU s | all, in copies |")
        print("| --- | --- | --- | --- |")
        found: dict[str, tuple[float, float]] = {}
        works = chain(bench.works(), peer_works(folder, bench.state, bench.into) if arguments.peers else [])
        for name, begin, end in works:
            found[name] = call_s, all_s = best(begin, end, arguments.rounds)
            copy_s = max(found[_COPY][1], 1e-9)
            print(f"| {name} | {call_s:.3f} | {all_s:.3f} | {all_s / copy_s:.1f} |", flush=True)
        print("\n| goal | found | target |")
        print("| --- | --- | --- |")
        of_saves = save_goals(found) if min(map(min, found.values())) else []
        for goal in chain(of_saves, goals(folder, bench.state, has_peers=arguments.peers)):
            print(f"| {goal.name} | {goal.found} | {goal.target} |", flush=True)
    finally:
        shutil.rmtree(folder)


def best(begin: Callable[[], Any], end: Callable[[Any], object], rounds: int) -> tuple[float, float]:
    """Returns the least processor time of the call and of all of its work, after two rounds that do not count."""
    calls, alls = [], []
    for number in range(rounds + 2):
        started = time.process_time()
        begun = begin()
        called = time.process_time()
        end(begun)
        if number >= 2:
            calls.append(called - started)
            alls.append(time.process_time() - started)
    return min(calls), min(alls)


def save_goals(found: dict[str, tuple[float, float]]) -> Iterator[Goal]:
    """Yields what a save to memory takes, in that of others and of the limits."""
    (call_s, all_s), copy_s, limit_s = found[_SAVE], found[_COPY][1], found[_LIMIT][1]
    yield Goal("call, in bare copies", f"{call_s / copy_s:.2f}", "1.3")
    yield Goal("all, in copies with digests", f"{all_s / limit_s:.2f}", "")
    yield Goal("all, of a save to a folder in tmpfs", f"{all_s / found[_FOLDER][1]:.2f}", "0.3")
    yield Goal("resume, in copies with digests", f"{found[_RESUME][1] / limit_s:.2f}", "1.5")
    yield Goal("resume, of torch.load(mmap=True)", f"{found[_RESUME][1] / found[_MMAP][1]:.2f}", "1.3")
    for name, (_, nvrx_s) in found.items():
        if name.endswith(_NVRX):
            yield Goal("call, of NVRx's save", f"{call_s / nvrx_s:.2f}", f"0.10; a copy is {copy_s / nvrx_s:.2f}")
            yield Goal("all, of NVRx's save", f"{all_s / nvrx_s:.2f}", f"0.15; the limit is {limit_s / nvrx_s:.2f}")


class Bench:
    """The state, and what each library does with it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        numel = num_bytes // 4 // _TENSORS
        self.state = {str(number): torch.randn(numel) for number in range(_TENSORS)}
        self.into = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=folder / "memory"))
        self.step = 0

    def works(self) -> list[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
        def done(_: Any) -> None:
            """The call has done all."""

        return [
            (_COPY, self.copy, done),
            (_LIMIT, self.copy_with_digests, done),
            (_SAVE, self.save_to_memory, lambda handle: handle.held("process")),
            (f'{_SAVE}, snapshot="lazy"', self.save_lazily, lambda handle: handle.held("process")),
            (_FOLDER, self.save_to_folder, self.end_folder),
            ("torch.save to tmpfs", self.torch_save, done),
            ("DCP to tmpfs", self.dcp_save, done),
            (_RESUME, self.resume, done),
            (_MMAP, self.torch_load, done),
            ("DCP load", self.dcp_load, done),
        ]

    def copy(self) -> None:
        for name, tensor in self.state.items():
            self.into[name].copy_(tensor)

    def copy_with_digests(self) -> None:
        copy_with_digests(self.state, self.into)

    def save_to_memory(self) -> Any:
        return self._save_to_memory(self.options)

    def save_lazily(self) -> Any:
        return self._save_to_memory(replace(self.options, snapshot="lazy"))

    def _save_to_memory(self, options: bcp.SaveOptions) -> Any:
        self.step += 1
        return bcp.save(self.folder / "run", self.state, step=self.step, async_save=True, options=options, to="memory")

    def save_to_folder(self) -> Any:
        self.step += 1
        return bcp.save(self.folder / "files", self.state, step=self.step, async_save=True)

    def end_folder(self, handle: Any) -> None:
        bcp.delete(self.folder / "files", handle.result().step)

    def torch_save(self) -> None:
        torch.save(self.state, self.folder / "state.pt")

    def dcp_save(self) -> None:
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        dcp.save(self.state, checkpoint_id=self.folder / "dcp", no_dist=True)

    def resume(self) -> None:
        bcp.resume(self.folder / "run", self.into, options=self.options)

    def torch_load(self) -> None:
        for name, tensor in torch.load(self.folder / "state.pt", mmap=True).items():
            self.into[name].copy_(tensor)

    def dcp_load(self) -> None:
        dcp.load(self.into, checkpoint_id=self.folder / "dcp", no_dist=True)
