"""Measures saves and loads of a training job on a GPU: the stall of the call, the training that is lost beside it, the
time until the checkpoint is durable, and loads; beside DCP's async_save with pinned staging. The limits are a bare copy
of the same bytes from the device into pinned memory, one back, and a read of the same file.

    python benchmarks/run.py gpu                       # 8 GiB of parameters and AdamW's state, some minutes
    python benchmarks/run.py gpu --gib 1 --rounds 3
    python benchmarks/run.py gpu --device cpu --gib 0.01    # a trial run without a GPU, whose figures mean nothing
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bytecheckpoint as bcp
from shared.machine import facts_line, machine_facts
from shared.page_cache import files, read_through
from shared.tables import spread, table

WIDTH = 4096
"""Of a layer, which has 16.8 million weights, each with a gradient and two numbers of AdamW."""
BATCH = 2048
LIMIT_D2H, LIMIT_H2D, LIMIT_READ = (
    "limit: pinned copy to the host",
    "limit: pinned copy back",
    "limit: reading the file",
)
SAVES = ("bytecheckpoint, copy", "bytecheckpoint, lazy", "torch DCP, async, pinned")
LOADS = ("bytecheckpoint", "torch DCP")
MEASURES = ("stall", "training lost", "durable")


def nothing() -> None:
    """A lazy save of this library makes the optimizer wait by itself."""


class Begun(NamedTuple):
    """A save under way."""

    is_durable: Callable[[], bool]
    wait: Callable[[], object]
    before_update: Callable[[], object] = nothing
    """To be called before the state is changed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=8.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")


def run(arguments: argparse.Namespace) -> None:
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here, so nothing was measured")
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        facts = machine_facts(folder)
        job = Job(torch.device(arguments.device), arguments.gib)
        figures = Figures(job, folder)
        for number in range(arguments.rounds + 1):
            figures.measure(counts=number > 0)
            print(f"round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)
    print(f"{facts_line(facts)}, {job.device_name}, {job.num_bytes / 2**30:.3f} GiB")
    print("\n".join(figures.report()))


class Job:
    """Layers trained by AdamW."""

    def __init__(self, device: torch.device, gib: float) -> None:
        self.device = device
        width = WIDTH if device.type == "cuda" else 256
        num_layers = max(1, round(gib * 2**30 / (3 * 4 * width * width)))
        layers = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(num_layers)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(BATCH if device.type == "cuda" else 8, width, device=device)
        self.step()
        tensors = [*self.model.parameters()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU (a trial run)"

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, before_update: Callable[[], object] = nothing) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step_s(self, num_steps: int = 10) -> float:
        """Seconds of a step without a save."""
        self.finish()
        started = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        self.finish()
        return (time.perf_counter() - started) / num_steps


class Figures:
    """Seconds by way and measure."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self._job, self._folder = job, folder
        self._counts = False
        is_cuda = job.device.type == "cuda"
        self._host = torch.zeros(job.num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        stager = DefaultStager(StagingOptions(is_cuda, False, is_cuda, is_cuda))
        self._saves: dict[str, Callable[[Path], Begun]] = dict(
            zip(
                SAVES,
                (partial(save_own, job, "copy"), partial(save_own, job, "lazy"), partial(save_dcp, job, stager)),
                strict=True,
            )
        )

    def measure(self, *, counts: bool) -> None:
        """One round of everything, saves in an order of its own. The first one counts for nothing: it allocates."""
        self._counts = counts
        shutil.rmtree(self._folder / "round", ignore_errors=True)
        self._measure_limits()
        for way in random.sample(SAVES, len(SAVES)):
            self._measure_save(way, self._folder / "round" / way)
        own, other = self._folder / "round" / SAVES[0], self._folder / "round" / SAVES[2]
        loads = {
            LOADS[0]: (own, partial(bcp.load, own, self._job.state)),
            LOADS[1]: (other, partial(load_dcp, self._job, other)),
        }
        for way, (path, load) in loads.items():
            read_through(path)
            self._note(way, "load", self._timed(load))
        self._note(
            LIMIT_READ,
            "load",
            self._timed(partial(read_file, max(files(own), key=lambda path: path.stat().st_size), self._host)),
        )

    def _measure_limits(self) -> None:
        on_device = torch.empty_like(self._host, device=self._job.device)
        self._note(LIMIT_D2H, "stall", self._timed(lambda: self._host.copy_(on_device, non_blocking=True)))
        self._note(LIMIT_H2D, "load", self._timed(lambda: on_device.copy_(self._host, non_blocking=True)))

    def _measure_save(self, way: str, path: Path) -> None:
        """Training goes on until the save is durable; the time beyond that of as many steps alone is lost."""
        job, step_s = self._job, self._job.step_s()
        started = time.perf_counter()
        begun = self._saves[way](path)
        self._note(way, "stall", time.perf_counter() - started)
        num_steps = 0
        while num_steps < 1 or not begun.is_durable():
            job.step(begun.before_update if num_steps == 0 else nothing)
            job.finish()
            num_steps += 1
        lost = time.perf_counter() - started - num_steps * step_s
        begun.wait()
        self._note(way, "training lost", lost)
        started = time.perf_counter()
        self._saves[way](path.with_name(f"{way} alone")).wait()
        self._note(way, "durable", time.perf_counter() - started)
        shutil.rmtree(path.with_name(f"{way} alone"))

    def _timed(self, do: Callable[[], object]) -> float:
        self._job.finish()
        started = time.perf_counter()
        do()
        self._job.finish()
        return time.perf_counter() - started

    def _note(self, way: str, measure: str, seconds: float) -> None:
        if self._counts:
            self.seconds.setdefault((way, measure), []).append(seconds)

    def report(self) -> list[str]:
        def cell(way: str, measure: str) -> str:
            found = self.seconds.get((way, measure))
            return spread(found) if found else ""

        saves = [[way, *(cell(way, measure) for measure in MEASURES)] for way in (*SAVES, LIMIT_D2H)]
        loads = [[way, cell(way, "load")] for way in (*LOADS, LIMIT_H2D, LIMIT_READ)]
        return [
            "",
            *table(("save", *(f"{measure}, s" for measure in MEASURES)), saves),
            "",
            *table(("load", "s"), loads),
        ]


def save_own(job: Job, snapshot: Any, path: Path) -> Begun:
    handle = bcp.save(path, job.state, async_save=True, options=bcp.SaveOptions(snapshot=snapshot))
    return Begun(handle.done, handle.result)


def save_dcp(job: Job, stager: AsyncStager, path: Path) -> Begun:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    response: Any = dcp.async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path, async_stager=stager)
    if hasattr(response, "staging_completion"):
        uploaded = response.upload_completion
        return Begun(uploaded.done, uploaded.result, response.staging_completion.result)
    return Begun(response.done, response.result)


def load_dcp(job: Job, path: Path) -> None:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def read_file(path: Path, memory: torch.Tensor) -> None:
    with path.open("rb", buffering=0) as file:
        view = memory.numpy().data[: path.stat().st_size]
        while view and (num_bytes := file.readinto(view)):
            view = view[num_bytes:]
