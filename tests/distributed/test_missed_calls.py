"""A rank that misses a call is named, and is not one behind for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from distributed.workers import WorkerPool


def save_but_once(rank: int, world_size: int, path: str, absent: int) -> list[str]:
    outcomes = []
    for step in range(3):
        if step == 1 and rank == absent:
            outcomes.append("absent")
        else:
            try:
                # Short only where a rank is waited for in vain: a busy machine takes seconds for a save.
                options = bcp.SaveOptions(timeout_s=2 if step == 1 else 60)
                bcp.save(path, {"x": torch.ones(3)}, step=step, options=options)
                outcomes.append("saved")
            except bcp.CheckpointSaveError as error:
                outcomes.append(error.kind)
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("absent", [0, 1])
def test_later_saves_work_after_a_rank_has_missed_one(workers: WorkerPool, tmp_path: Path, absent: int) -> None:
    outcomes = workers.run(save_but_once, str(tmp_path), absent, world_size=2)
    assert outcomes[absent] == ["saved", "absent", "saved"]
    assert outcomes[1 - absent] == ["saved", "rank_missing", "saved"]
    assert bcp.steps(tmp_path) == [0, 2]
