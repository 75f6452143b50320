"""One rank of benchmarks/save.py: a process that builds a workload and saves it when it is told to. Knows nothing of
rounds, tables or other ranks' answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch
from rank_process import Obey, join, serve
from save_catalogue import CONTESTANTS, WORKLOADS
from save_timing import Save, time_async, time_limit, time_sync
from save_workloads import Job

MODULES = {"own": ("save_own", "save_torch", "save_limits"), "peers": ("save_peers",)}
TIMERS = {"sync": time_sync, "async": time_async, "limit": time_limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crew", choices=list(MODULES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), required=True)
    parser.add_argument("--size", type=float, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    serve(lambda: begin(arguments))


def begin(arguments: argparse.Namespace) -> tuple[dict[str, Any], Obey]:
    """The rank, its state, and the contestants that its Python has."""
    workload = WORKLOADS[arguments.workload]
    if workload.num_ranks > 1:
        torch.set_num_threads(1)
    if workload.num_ranks > 1 or arguments.crew == "peers":
        join(arguments.rank, workload.num_ranks, arguments.port)
    saves: dict[str, Save] = {}
    for module in MODULES[arguments.crew]:
        saves |= importlib.import_module(module).contestants()
    job = Job(workload, arguments.size)

    def obey(command: dict[str, str]) -> dict[str, Any]:
        name = command["contestant"]
        timer = TIMERS[CONTESTANTS[name].kind]
        return dataclasses.asdict(timer(saves[name], Path(command["folder"]), job))

    return {"share_bytes": job.share_bytes}, obey


if __name__ == "__main__":
    main()
