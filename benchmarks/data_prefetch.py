"""State of data loaders that is slow to gather: what it adds to the stall of a save, with and without gathering it in
the step before, as a CheckpointManager does.

    python benchmarks/run.py data_prefetch
    python benchmarks/run.py data_prefetch --gather-s 0.5 --saves 5

A loader in worker processes is a DataLoader over bcp.data.Streams, whose sources sleep in state_dict(). The other one
is an ElasticLoader that gathers its state in a thread. Saves are asynchronous, and training sleeps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from shared.machine import facts_line, machine_facts

NUM_STREAMS = 4
STEPS_BETWEEN = 3


class SlowSource:
    """A source without an end, whose state takes long."""

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self._position += 1
            yield self._position

    def state_dict(self) -> dict[str, int]:
        if self._position:  # its first state is asked for when it is opened
            time.sleep(self._gather_s)
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._position = state["position"]


class ThreadedLoader:
    """An ElasticLoader with one stream: a snapshot that a thread gathers, and the samples since."""

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._taken = 0
        self._snapshot: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[int]:
        while True:
            self._taken += 1
            yield self._taken

    def prepare_state(self) -> None:
        self._thread = threading.Thread(target=self._gather, args=(self._taken,))
        self._thread.start()

    def _gather(self, position: int) -> None:
        time.sleep(self._gather_s)
        self._snapshot = {"position": position}

    def stream_ids(self) -> Sequence[str]:
        return ["all"]

    def stream_state(self, _stream_id: str) -> dict[str, Any]:
        if self._thread is None:
            self._gather(self._taken)
        else:
            self._thread.join()
            self._thread = None
        return {"taken": self._taken, "snapshot": self._snapshot}

    def shared_state(self) -> None:
        return None

    def load_streams(self, streams: Mapping[str, Any], _shared: Any) -> None:
        self._taken = streams["all"]["taken"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gather-s", type=float, default=2.0, help="seconds that a loader's state takes")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind")


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(Path(tempfile.gettempdir()))))
    print("\n| loader | state, s | stall, ms (least, most) |\n| --- | --- | --- |", flush=True)
    step_s = arguments.gather_s * 1.5
    for name, make in (
        ("none", None),
        ("workers", _in_workers),
        ("this process", _in_process),
        ("a thread", _threaded),
    ):
        for is_prepared in (False, True) if make is not None else (False,):
            loader = make(arguments.gather_s) if make is not None else None
            times = _stalls_ms(loader, arguments.saves, step_s=step_s, is_prepared=is_prepared)
            shown = "" if make is None else ", prepared" if is_prepared else ", not prepared"
            seconds = 0 if make is None else arguments.gather_s
            values = f"{statistics.median(times):.1f} ({min(times):.1f}, {max(times):.1f})"
            print(f"| {name}{shown} | {seconds:g} | {values} |", flush=True)


def _in_workers(gather_s: float) -> DataLoader[Any]:
    return DataLoader(_streams(gather_s / 2), batch_size=NUM_STREAMS // 2, num_workers=2)  # each has two streams


def _in_process(gather_s: float) -> DataLoader[Any]:
    return DataLoader(_streams(gather_s / NUM_STREAMS), batch_size=NUM_STREAMS)


def _streams(gather_s: float) -> bcp.data.Streams:
    sources = {f"s{number}": SlowSource(gather_s) for number in range(NUM_STREAMS)}
    return bcp.data.Streams(sources, rank=0, size=1, endless=True, snapshot_every=1 << 30)


def _threaded(gather_s: float) -> ThreadedLoader:
    return ThreadedLoader(gather_s)


def _stalls_ms(loader: Any, num_saves: int, *, step_s: float, is_prepared: bool) -> list[float]:
    """Returns the milliseconds of each due call of `save` but for the first, which has no plan yet."""
    state: dict[str, Any] = {"weight": torch.zeros(1 << 20)}
    if loader is not None:
        state["data"] = bcp.DataLoaderState(loader, rank=0, size=1)
    policy = bcp.save_policies.EverySteps(STEPS_BETWEEN)
    if not is_prepared:
        policy = bcp.save_policies.When(lambda now, _: now.step > 0 and now.step % STEPS_BETWEEN == 0)
    batches = iter(loader) if loader is not None else iter(int, 1)
    times = []
    with tempfile.TemporaryDirectory() as root, bcp.CheckpointManager(root, save=policy) as manager:
        for step in range((num_saves + 1) * STEPS_BETWEEN + 1):
            next(batches)
            if step % STEPS_BETWEEN == 0:
                time.sleep(step_s)  # the step that a save comes after
            began = time.perf_counter()
            handle = manager.save(step, state)
            if handle is not None:
                times.append((time.perf_counter() - began) * 1e3)
    return times[1:]
