"""Limits that no saving of a job can beat on this machine: one copy of a rank's part of the state into memory that is
there already, and its raw write past the page cache with an fsync. Timed on all ranks at once, beside no training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from saves.limits import MIB, random_memory, write
from shared.rank_process import Obey, join

COPY, WRITE = "limit", "limit-write"
TITLES = {COPY: "limit: one copy of the part", WRITE: "limit: raw write and fsync of the part"}
WRITE_WAY = 16 * MIB, 2
TENSOR_BYTES = 4 * MIB


def begin(rank: int, port: int, *, num_ranks: int, mb: float) -> Obey:
    """Returns what times both for a state of `mb` MB of model and twice as much of its optimizer."""
    join(rank, num_ranks, port)
    part_bytes = int(3 * mb * 1e6) // num_ranks
    lengths = [min(TENSOR_BYTES, part_bytes - start) for start in range(0, part_bytes, TENSOR_BYTES)]
    state, kept = ([torch.ones(length, dtype=torch.uint8) for length in lengths] for _ in range(2))
    memory = random_memory(max(WRITE_WAY[0], 1))

    def copy() -> None:
        for target, tensor in zip(kept, state, strict=True):
            target.copy_(tensor)

    def obey(command: dict[str, str]) -> dict[str, float]:
        path = Path(command["folder"], f"{rank}.raw")
        return {COPY: timed(copy), WRITE: timed(lambda: write(path, part_bytes, memory, WRITE_WAY))}

    return obey


def timed(act: Callable[[], None]) -> float:
    """Returns seconds of this rank, of ranks that begin together."""
    dist.barrier()
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
