"""One rank of benchmarks/load.py: a process that holds one side of a workload, and saves or loads it when told
to. Knows nothing of rounds, tables or other ranks' answers.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from load_catalogue import SLOW, WORKLOADS
from load_contender import Contender, Place
from load_states import Held, held_by
from rank_process import Obey, join, serve
from read_counts import read_counts
from slow_files import SlowFiles

MODULES = {"own": ("load_own", "load_torch", "load_limits"), "peers": ("load_peers",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crew", choices=list(MODULES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--side", choices=["source", "target"], required=True)
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    serve(lambda: begin(arguments))


def begin(arguments: argparse.Namespace) -> tuple[dict[str, Any], Obey]:
    """The rank, what it holds, and the contestants that its Python has."""
    workload = WORKLOADS[arguments.workload]
    num_ranks = (workload.source if arguments.side == "source" else workload.target).num_ranks
    if num_ranks > 1:
        torch.set_num_threads(1)
    if num_ranks > 1 or arguments.crew == "peers":
        join(arguments.rank, num_ranks, arguments.port)
    fsspec.register_implementation("slow", SlowFiles)
    held = held_by(workload, arguments.side, arguments.size)
    held.fill()
    contenders: dict[str, Contender] = {}
    for module in MODULES[arguments.crew]:
        contenders |= importlib.import_module(module).contestants()

    def obey(command: dict[str, str]) -> dict[str, Any]:
        contender, folder = contenders[command["contestant"]], Path(command["folder"])
        place = Place(folder, f"slow://{folder}" if workload.storage == "slow" else None, SLOW)
        if command["task"] == "save":
            contender.save(folder, held)
            return {}
        if command["task"] == "check":
            return checked(contender, place, held)
        return timed(contender, place, held, arguments.port)

    return {"state_bytes": held.num_bytes}, obey


def checked(contender: Contender, place: Place, held: Held) -> dict[str, Any]:
    """A load that is not timed, and must bring every value that it is for."""
    if contender.brings_values:
        held.spoil()
    contender.prepare(place, held)
    held.barrier()
    contender.load(place, held)
    if contender.brings_values:
        held.check()
    return {}


def timed(contender: Contender, place: Place, held: Held, port: int) -> dict[str, Any]:
    contender.prepare(place, held)
    gc.collect()
    counts, requests = read_counts(port), SlowFiles.tally.total
    held.barrier()
    started = time.perf_counter()
    contender.load(place, held)
    seconds = time.perf_counter() - started
    read, requested = read_counts(port).since(counts), SlowFiles.tally.total
    return {
        "seconds": seconds,
        "called_bytes": requested.num_bytes - requests.num_bytes if place.url else read.called_bytes,
        "disk_bytes": read.disk_bytes,
        "requests": requested.num - requests.num,
    }


if __name__ == "__main__":
    main()
