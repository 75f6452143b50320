"""Thousands of forked snapshots under everything that could hold a lock at the fork: threads that take and free memory
of torch, numpy and Python, that log, import and multiply, and collectives of other ranks. Whoever hangs is named with
the stacks of its threads.

    python tests/faults/fork_stress.py --forks 2000 --ranks 2
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from snapshot_cases import running

from bytecheckpoint.adapters.tensors import LocalShards
from bytecheckpoint.forking import ForkedState
from bytecheckpoint.planner.offers import Offer, Write
from bytecheckpoint.staging import LiveFile, plan_files
from bytecheckpoint.storage.scratch import Scratch
from distributed.workers import WorkerPool

SWITCH_INTERVAL_S = 1e-4
"""Threads take turns that often, so that forks come at more different moments, and sooner."""


class Stressed(NamedTuple):
    """What one rank did."""

    num_forks: int
    num_threads: int
    longest_s: float
    """From the start of a fork to the end of its child."""
    total_s: float
    rounds: dict[str, int]
    """How often each loop went round meanwhile."""
    num_wrong: int


def busy_loops(stop: threading.Event) -> dict[str, Callable[[], object]]:
    """What each thread does again and again, by name."""
    logger = logging.getLogger("fork_stress")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.setLevel(logging.INFO)
    matrix = np.random.default_rng(0).random((192, 192))
    weights = torch.randn(96, 96)
    return {
        "torch memory": lambda: [torch.empty(size).fill_(1) for size in (10, 1000, 100_000, 3_000_000)],
        "torch work": lambda: (weights @ weights).relu().sum(),
        "numpy memory": lambda: [np.ones(size) for size in (10, 1000, 1_000_000)],
        "numpy work": lambda: matrix @ matrix,
        "objects": lambda: json.loads(json.dumps([{str(number): [number] * 3} for number in range(200)])),
        "logging": lambda: [logger.info("message %d", number) for number in range(20)],
        "importing": lambda: importlib.reload(importlib.import_module("colorsys")),
        "threads": _start_and_join,
        "waiting": lambda: stop.wait(0.001),
    }


def _start_and_join() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def fork_under_load(rank: int, world_size: int, num_forks: int, blas_threads: int) -> Stressed:
    """Forks that often, and reads each snapshot back after its memory was changed."""
    torch.set_num_threads(blas_threads)
    stop = threading.Event()
    loops = busy_loops(stop)
    if world_size > 1:
        total, enough = torch.zeros(1000), torch.zeros(1)
        group = dist.new_group(backend="gloo")

        def collect() -> None:
            dist.all_reduce(total, group=group)
            enough.fill_(float(stop.is_set()))
            dist.all_reduce(enough, group=group)  # all ranks leave after the same one

        loops["collectives"] = collect
    rounds = dict.fromkeys(loops, 0)

    def turn(name: str) -> Callable[[], None]:
        def loop() -> None:
            while not stop.is_set() if name != "collectives" else enough.item() < world_size:
                loops[name]()
                rounds[name] += 1

        return loop

    started, interval_s = time.monotonic(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with running([turn(name) for name in loops], stop):
            longest_s, num_wrong = fork_and_read(num_forks, seed=rank)
    finally:
        sys.setswitchinterval(interval_s)
    return Stressed(num_forks, len(loops), longest_s, time.monotonic() - started, rounds, num_wrong)


def fork_and_read(num_forks: int, seed: int) -> tuple[float, int]:
    """The longest time that a fork took, and how many snapshots were not as they were at their fork."""
    generator = torch.Generator().manual_seed(seed)
    state = {"flat": torch.zeros(30_000), "strided": torch.zeros(300, 40)[:, ::3], "scalar": torch.tensor(0.0)}
    shared = Scratch(1 << 20, 2, is_shared=True)
    longest_s, num_wrong = 0.0, 0
    for _ in range(num_forks):
        value = float(torch.randint(1, 1000, (), generator=generator))
        for tensor in state.values():
            tensor.fill_(value)
        started = time.monotonic()
        files = files_of(state)
        forked = ForkedState(files, shared)
        for tensor in state.values():
            tensor.fill_(-1)
        num_wrong += not is_filled_with(forked, files[0], value)
        forked.close()
        longest_s = max(longest_s, time.monotonic() - started)
    return longest_s, num_wrong


def files_of(state: dict[str, torch.Tensor]) -> list[LiveFile]:
    """All of the state in one file."""
    found = LocalShards()
    for fqn, tensor in state.items():
        found.add(fqn, tensor)
    shards = found.found
    offers = [Offer(shard.fqn, shard.dtype, shard.global_shape, *shard.region) for shard in shards]
    writes = [Write(number, shard.region) for number, shard in enumerate(shards)]
    return [LiveFile(planned, shards) for planned in plan_files(offers, writes, max_file_bytes=1 << 30, codec="none")]


def is_filled_with(forked: ForkedState, file: LiveFile, value: float) -> bool:
    (block,) = file.planned.blocks
    with forked.content(0, *block) as content:
        values = np.frombuffer(bytes(content[len(file.planned.header) :]), np.float32)
    return bool(len(values)) and bool((values == value).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forks", type=int, default=2000, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="after which a rank counts as hung, in seconds")
    parser.add_argument("--threads", type=int, default=1, help="that torch uses for one operation")
    arguments = parser.parse_args()
    pool = WorkerPool()
    try:
        for rank, stressed in enumerate(
            pool.run(
                fork_under_load,
                arguments.forks,
                arguments.threads,
                world_size=arguments.ranks,
                timeout_s=arguments.timeout,
            )
        ):
            sys.stdout.write(f"rank {rank}: {stressed}\n")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
