"""One rank of the save benchmark: builds a workload, and saves it on command."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import torch

from saves.registry import CANDIDATES
from saves.timing import Save, time_async, time_limit, time_sync
from saves.training import Job
from shared.rank_process import Obey, join
from shared.rounds import AGAINST
from shared.workloads import WORKLOADS

MODULES = {"own": ("library", "torch_candidates", "limits"), "peers": ("peers",), "against": ("library",)}
TIMERS = {"sync": time_sync, "async": time_async, "limit": time_limit}


def begin(rank: int, port: int, *, pool: str, workload: str, size: float) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of this rank, and what obeys."""
    num_ranks = WORKLOADS[workload].source.num_ranks
    if num_ranks > 1:
        torch.set_num_threads(1)
    if num_ranks > 1 or pool == "peers":
        join(rank, num_ranks, port)
    saves: dict[str, Save] = {}
    for module in MODULES[pool]:
        saves |= importlib.import_module(f"saves.{module}").candidates()
    job = Job(WORKLOADS[workload], size)

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        name = command["candidate"].removesuffix(AGAINST)
        timer = TIMERS[CANDIDATES[name].kind]
        return dataclasses.asdict(timer(saves[name], Path(command["folder"]), job))

    return {"share_bytes": job.share_bytes}, obey
