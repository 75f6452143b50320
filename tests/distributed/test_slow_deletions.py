"""Deletions that take longer than the timeout of a save: no rank waits for them, and none is taken for lost."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from faults.seams import Seam, before, loads_as, raising, state_of

import bytecheckpoint as bcp
from bytecheckpoint.saving import commit
from bytecheckpoint.storage.backends.local_store import LocalStore
from distributed.workers import WorkerPool

TIMEOUT_S = 2.0
DELETION_S = 8.0
"""Longer than a rank waits for the coordinator."""


def _deleting_slowly() -> Any:
    return before(Seam(LocalStore, "delete_many"), lambda: time.sleep(DELETION_S))


def _overwrite(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    bcp.save(folder, state_of(rank, 1.0))
    with _deleting_slowly():
        started = time.monotonic()
        info = bcp.save(
            folder, state_of(rank, 2.0), options=bcp.SaveOptions(overwrite=True, timeout_s=TIMEOUT_S)
        ).result()
        seconds = time.monotonic() - started
    return info.save_id, seconds


def test_no_rank_waits_until_the_replaced_data_is_deleted(tmp_path: Path, workers: WorkerPool) -> None:
    (first, _), (second, seconds) = workers.run(_overwrite, str(tmp_path), world_size=2, timeout_s=90)
    assert first == second == bcp.open(tmp_path).info.save_id
    assert seconds < DELETION_S
    assert len(list((tmp_path / "data").iterdir())) == 2


def _fail(rank: int, world_size: int, folder: str) -> tuple[str, float, bool]:
    bcp.save(folder, state_of(rank, 1.0))
    error = bcp.CheckpointSaveError("the disk is full", kind="no_space")
    breaking = before(Seam(commit, "encode_report"), raising(error)) if rank == 1 else nullcontext()
    slow = _deleting_slowly() if rank == 0 else nullcontext()
    started = time.monotonic()
    with slow, breaking, pytest.raises(bcp.CheckpointSaveError) as raised:
        bcp.save(folder, state_of(rank, 2.0), options=bcp.SaveOptions(overwrite=True, timeout_s=DELETION_S))
    seconds = time.monotonic() - started
    return raised.value.kind, seconds, loads_as(folder, rank, 1.0)


def test_no_rank_waits_until_what_a_failed_save_wrote_is_deleted(tmp_path: Path, workers: WorkerPool) -> None:
    failed = workers.run(_fail, str(tmp_path), world_size=2, timeout_s=90)
    assert [kind for kind, _, _ in failed] == ["no_space", "no_space"], failed
    assert [loads for _, _, loads in failed] == [True, True]
    assert failed[1][1] < DELETION_S
