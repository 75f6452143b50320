"""The state of data loaders, in one process: a save and a load of many streams, part by part, and of token buffers
beside weights of as many bytes.

    python benchmarks/run.py data_state
    python benchmarks/run.py data_state --streams 1000 --gib 0.1

Seconds of the first table are processor time, so a busy machine changes them little. Those of the second are the least
of some rounds, buffers and weights by turns, in a temporary folder, whose disk counts. A load fills the weights where
they are, and makes memory for the buffers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint as bcp
from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.collect import collect_all, entries_of, finish_all
from bytecheckpoint.adapters.plain.merge_plain import merge_plain
from shared.machine import facts_line, machine_facts

BUFFER_BYTES = 4 << 20


class Loader:
    """A loader that keeps the states of its streams."""

    def __init__(self, streams: Mapping[str, Any]) -> None:
        self.streams = dict(streams)

    def stream_ids(self) -> Sequence[str]:
        return list(self.streams)

    def stream_state(self, stream_id: str) -> Any:
        return self.streams[stream_id]

    def shared_state(self) -> Any:
        return {"seed": 4}

    def load_streams(self, streams: Mapping[str, Any], _shared: Any) -> None:
        self.streams = dict(streams)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=100_000, help="streams of the first table")
    parser.add_argument("--gib", type=float, default=1.0, help="token buffers of the second table, and weights")
    parser.add_argument("--rounds", type=int, default=5, help="saves and loads of each kind")


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(Path(tempfile.gettempdir()))))
    print("\n| streams | collect s | merge s | assign and match s | finish s | all s | whole save s | whole load s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    parts = _seconds_of_parts(arguments.streams)
    whole = _seconds_of_whole(arguments.streams)
    print(
        f"| {arguments.streams:,} | {' | '.join(f'{each:.2f}' for each in (*parts, sum(parts), *whole))} |", flush=True
    )
    print("\n| GiB | what | save s | load s |\n| --- | --- | --- | --- |", flush=True)
    least = _least_seconds(arguments.gib, arguments.rounds)
    for name, (save_s, load_s) in least.items():
        print(f"| {arguments.gib:g} | {name} | {save_s:.3f} | {load_s:.3f} |")
    ratios = [buffers / weights for buffers, weights in zip(least["token buffers"], least["weights"], strict=True)]
    print(f"| {arguments.gib:g} | ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |")


def _states(num_streams: int) -> dict[str, Any]:
    return {
        f"web-{number:06d}": {"epoch": 1, "position": number, "samples": number, "source": "web", "skip": 0}
        for number in range(num_streams)
    }


def _data(streams: Mapping[str, Any]) -> dict[str, Any]:
    return {"data": bcp.DataLoaderState(Loader(streams), rank=0, size=1)}


def _seconds_of_parts(num_streams: int) -> list[float]:
    """Returns the processor time of what a save and a load do about streams, each part once."""
    state, target = _data(_states(num_streams)), _data({})
    collected, collect_s = _timed(lambda: collect_all(entries_of(state, "auto")))
    _, merge_s = _timed(lambda: merge_plain([contents.plain for contents in collected], [0]))
    with tempfile.TemporaryDirectory() as folder:
        bcp.save(folder, state)
        manifest = bcp.open(folder).manifest
    entries = entries_of(target, "auto")
    view = CheckpointView(manifest, rank=0, num_ranks=1, key_map=None, include=None, exclude=None, trees_at=())

    def match() -> None:
        for entry in entries:
            entry.expect(view)
        view.all_names()

    _, match_s = _timed(match)
    _, finish_s = _timed(lambda: finish_all(entries, view, nullcontext))
    if target["data"].loader.streams != state["data"].loader.streams:
        raise RuntimeError("a load has given other states than were saved")
    return [collect_s, merge_s, match_s, finish_s]


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


def _seconds_of_whole(num_streams: int) -> list[float]:
    state, target = _data(_states(num_streams)), _data({})
    with tempfile.TemporaryDirectory() as folder:
        _, save_s = _timed(lambda: bcp.save(folder, state))
        _, load_s = _timed(lambda: bcp.load(folder, target))
    return [save_s, load_s]


def _least_seconds(gib: float, num_rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the least seconds of a save and of a load, of token buffers and of weights."""
    count = max(int(gib * (1 << 30)) // BUFFER_BYTES, 1)
    tensors = {f"{number:05d}": torch.full((BUFFER_BYTES // 4,), number, dtype=torch.int32) for number in range(count)}
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    buffers = {name: {"tail": tensor, "length": 7} for name, tensor in tensors.items()}
    states: dict[str, Callable[[], tuple[Any, Any]]] = {
        "token buffers": lambda: (_data(buffers), _data({})),
        "weights": lambda: ({"model": tensors}, {"model": empty}),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in states}
    for number in range(num_rounds):
        for name in list(states) if number % 2 else reversed(states):
            state, target = states[name]()
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                bcp.save(folder, state)
                saved = time.perf_counter()
                bcp.load(folder, target)
                found[name].append((saved - began, time.perf_counter() - saved))
    return {name: (min(save for save, _ in each), min(load for _, load in each)) for name, each in found.items()}
