"""Compares loads from files that are not in the page cache with the speed of the disk: a load of one checkpoint
beside preadv of that very file, and of a plain copy of it, in an order that is drawn anew in every round. Needs Linux.

    python benchmarks/run.py cold                            # 805 MB, some minutes
    python benchmarks/run.py cold --size 0.1 --rounds 3

The limits of the load benchmark read files of their own instead, which lie elsewhere on the disk and may be cached by
the host of a virtual one.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

import bytecheckpoint as bcp
from shared.machine import facts_line, machine_facts
from shared.page_cache import drop, opened
from shared.tables import spread, table

NUM_TENSORS = 64
TENSOR_NUMEL = 3 << 20
BLOCK_BYTES = 16 << 20
"""Bytes of one preadv: as much as a load reads at once."""
THREADS = (2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=float, default=1.0, help="1.0 is 64 tensors of 12.6 MB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")


def run(arguments: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        facts = machine_facts(folder)
        seconds = measure(folder, max(round(NUM_TENSORS * arguments.size), 1), arguments.rounds)
    finally:
        shutil.rmtree(folder)
    print(facts_line(facts))
    rows = [[f"{what}, {threads} threads", spread(of_way)] for (what, threads), of_way in seconds.items()]
    print("\n".join(["", *table(["from files that are not in the page cache", "s"], rows)]))


def measure(folder: Path, num_tensors: int, rounds: int) -> dict[tuple[str, int], list[float]]:
    """Returns seconds by way and number of threads, after a round that does not count."""
    state = {"model": {f"w{number}": torch.randn(TENSOR_NUMEL) for number in range(num_tensors)}}
    bcp.save(folder / "saved", state)
    (own,) = (folder / "saved").rglob("*.safetensors")
    copied = folder / "copy"
    shutil.copyfile(own, copied)
    memory = np.zeros(own.stat().st_size, np.uint8)
    ways: dict[tuple[str, int], Callable[[], object]] = {}
    for threads in THREADS:
        options = bcp.LoadOptions(reader_threads=threads)
        ways["bytecheckpoint", threads] = partial(bcp.load, folder / "saved", state, options=options)
        ways["preadv of the same file", threads] = partial(read, own, memory, threads)
        ways["preadv of a copy of it", threads] = partial(read, copied, memory, threads)
    seconds: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in random.sample(list(ways), len(ways)):
            drop(folder, everything=False)
            started = time.perf_counter()
            ways[way]()
            if number:
                seconds[way].append(time.perf_counter() - started)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def read(path: Path, memory: np.ndarray, threads: int) -> None:
    """Reads all of a file, by threads that each read a block at a time."""
    with opened(path) as fd, ThreadPoolExecutor(threads) as pool:
        starts = range(0, memory.nbytes, BLOCK_BYTES)
        found = sum(pool.map(lambda start: os.preadv(fd, [memory[start : start + BLOCK_BYTES]], start), starts))
    if found != memory.nbytes:
        raise OSError(f"{found} bytes of {path} were read, which has {memory.nbytes}")
