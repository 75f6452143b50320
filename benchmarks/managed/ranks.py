"""A rank with a manager, which is asked for steps that are not due."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from shared.rank_process import Obey, join

STATE = {"w": torch.zeros(1000)}


def begin(rank: int, port: int, *, num_ranks: int, root: str) -> tuple[dict[str, Any], Obey]:
    torch.set_num_threads(1)
    join(rank, num_ranks, port)
    manager = bcp.CheckpointManager(root, save=bcp.save_policies.EverySteps(1 << 40))
    num_saved = 0

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        """Saves so many steps that are not due, all ranks from one moment on."""
        nonlocal num_saved
        dist.barrier()
        began, began_processor = time.perf_counter(), time.thread_time()
        for step in range(num_saved + 1, num_saved + command["calls"] + 1):
            manager.save(step, STATE)
        seconds, processor_s = time.perf_counter() - began, time.thread_time() - began_processor
        num_saved += command["calls"]
        return {"us": seconds / command["calls"] * 1e6, "processor_us": processor_s / command["calls"] * 1e6}

    return {}, obey
