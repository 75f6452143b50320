"""Deletions that last: no rank waits for them, and none is taken for lost."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from faults.seams import Seam, before, loads_as, raising, state_of

import bytecheckpoint as bcp
from bytecheckpoint.saving import commit
from bytecheckpoint.storage.backends.local_store import LocalStore
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(overwrite=True, timeout_s=20)
DELETION_S = 60.0
"""Longer than a rank waits for the coordinator."""
HAS_RETURNED = "rank 1 has returned"


def _deleting_slowly() -> Any:
    """Within the block what deletes goes on when the save of rank 1 has returned, which therefore waits for none."""
    limit = timedelta(seconds=DELETION_S)
    return before(Seam(LocalStore, "delete_many"), lambda: _store().wait([HAS_RETURNED], limit))


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _overwrite(rank: int, world_size: int, folder: str) -> str:
    bcp.save(folder, state_of(rank, 1.0))
    with _deleting_slowly():
        info = bcp.save(folder, state_of(rank, 2.0), options=OPTIONS).result()
    if rank == 1:
        _store().set(HAS_RETURNED, "")
    return info.save_id


def test_no_rank_waits_until_the_replaced_data_is_deleted(tmp_path: Path, workers: WorkerPool) -> None:
    first, second = workers.run(_overwrite, str(tmp_path), world_size=2)
    assert first == second == bcp.open(tmp_path).info.save_id
    assert len(list((tmp_path / "data").iterdir())) == 2


def _fail(rank: int, world_size: int, folder: str) -> tuple[str, bool]:
    bcp.save(folder, state_of(rank, 1.0))
    error = bcp.CheckpointSaveError("the disk is full", kind="no_space")
    breaking = before(Seam(commit, "encode_report"), raising(error)) if rank == 1 else nullcontext()
    slow = _deleting_slowly() if rank == 0 else nullcontext()
    with slow, breaking, pytest.raises(bcp.CheckpointSaveError) as raised:
        bcp.save(folder, state_of(rank, 2.0), options=OPTIONS)
    if rank == 1:
        _store().set(HAS_RETURNED, "")
    return raised.value.kind, loads_as(folder, rank, 1.0)


def test_no_rank_waits_until_what_a_failed_save_wrote_is_deleted(tmp_path: Path, workers: WorkerPool) -> None:
    failed = workers.run(_fail, str(tmp_path), world_size=2)
    assert failed == [("no_space", True)] * 2
