"""One rank of the load benchmark: holds one side of a workload, and saves or loads it on command."""

from __future__ import annotations

import gc
import importlib
import time
from pathlib import Path
from typing import Any

import fsspec
import torch

from loads.candidate import LoadFunctions, StoredAt
from loads.read_counts import read_counts
from loads.slow_files import SlowFiles
from shared.rank_process import Obey, join
from shared.rounds import AGAINST
from shared.states import HeldState, held_by
from shared.workloads import SLOW, WORKLOADS

MODULES = {"own": ("library", "torch_candidates", "limits"), "peers": ("peers",), "against": ("library",)}


def begin(rank: int, port: int, *, pool: str, workload: str, side: str, size: float) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of this rank, and what obeys."""
    described = WORKLOADS[workload]
    num_ranks = (described.source if side == "source" else described.target).num_ranks
    if num_ranks > 1:
        torch.set_num_threads(1)
    if num_ranks > 1 or pool == "peers":
        join(rank, num_ranks, port)
    fsspec.register_implementation("slow", SlowFiles)
    held = held_by(described, side, size)
    held.fill()
    candidates: dict[str, LoadFunctions] = {}
    for module in MODULES[pool]:
        candidates |= importlib.import_module(f"loads.{module}").candidates()

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        candidate, folder = candidates[command["candidate"].removesuffix(AGAINST)], Path(command["folder"])
        stored = StoredAt(folder, f"slow://{folder}" if described.storage == "slow" else None, SLOW)
        if command["task"] == "save":
            candidate.save(folder, held)
            held.barrier()
            return {}
        if command["task"] == "check":
            check(candidate, stored, held)
            return {}
        return timed(candidate, stored, held, port)

    return {"state_bytes": held.num_bytes}, obey


def check(candidate: LoadFunctions, stored: StoredAt, held: HeldState) -> None:
    """Loads without timing, and compares every value that the load is for."""
    if candidate.brings_values:
        held.spoil()
    candidate.prepare(stored, held)
    held.barrier()
    candidate.load(stored, held)
    if candidate.brings_values:
        held.check()


def timed(candidate: LoadFunctions, stored: StoredAt, held: HeldState, port: int) -> dict[str, Any]:
    candidate.prepare(stored, held)
    gc.collect()
    counts, requests = read_counts(port), SlowFiles.tally.total
    held.barrier()
    started = time.perf_counter()
    candidate.load(stored, held)
    seconds = time.perf_counter() - started
    read, requested = read_counts(port).since(counts), SlowFiles.tally.total
    return {
        "seconds": seconds,
        "called_bytes": requested.num_bytes - requests.num_bytes if stored.url else read.called_bytes,
        "disk_bytes": read.disk_bytes,
        "requests": requested.num - requests.num,
    }
