"""Saves of several ranks through local stages, on hosts that have a disk each: all ranks see both states, and what is
left on the disks is finished by other ranks than those that wrote it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from faults.seams import Seam, Seen, before, files_under, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from bytecheckpoint.saving import local_stage as local_stage_module
from distributed.workers import WorkerDied, WorkerError, WorkerPool

UPLOADING = Seam(local_stage_module, "copy_file")


def disk_of(rank: int, folder: Path) -> Path:
    """Two ranks a host."""
    return folder / f"nvme{rank // 2}"


def options_of(rank: int, folder: Path) -> bcp.SaveOptions:
    return bcp.SaveOptions(local_stage=disk_of(rank, folder), timeout_s=60)


def save_twice(rank: int, world_size: int, folder: Path) -> list[bool]:
    options = options_of(rank, folder)
    handles = [
        bcp.save(folder / "run", state_of(rank, float(step)), step=step, async_save=True, options=options)
        for step in (1, 2)
    ]
    locals_ = [handle.local(60) for handle in handles]
    infos = [handle.result(60) for handle in handles]
    assert [local.num_bytes for local in locals_] == [info.num_bytes for info in infos]
    return [loads_as(folder / "run", rank, float(step), step=step) for step in (1, 2)]


def test_all_ranks_see_both_states(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_twice, tmp_path) == [[True, True]] * 4
    assert files_under(tmp_path / "nvme0") == files_under(tmp_path / "nvme1") == []


def save_with_a_failing_upload(rank: int, world_size: int, folder: Path, failing: int) -> Seen | None:
    action = raising(bcp.StorageError("gone", kind="unavailable")) if rank == failing else lambda: None
    with before(UPLOADING, action):
        handle = bcp.save(
            folder / "run", state_of(rank, 1.0), step=1, async_save=True, options=options_of(rank, folder)
        )
        handle.local(60)
        return seen(handle.result)


def recover(rank: int, world_size: int, folder: Path, disks: list[int]) -> list[tuple[str, str]]:
    options = bcp.SaveOptions(local_stage=folder / f"nvme{disks[rank]}", timeout_s=60)
    return [(save.outcome, save.what) for save in bcp.recover(folder / "run", options=options)]


def load(rank: int, world_size: int, folder: Path, value: float) -> bool:
    return loads_as(folder / "run", rank, value)


@pytest.mark.parametrize("failing", [0, 3])
def test_an_upload_that_fails_on_one_rank_is_finished_by_fewer(
    workers: WorkerPool, tmp_path: Path, failing: int
) -> None:
    errors = workers.run(save_with_a_failing_upload, tmp_path, failing)
    assert len(set(errors)) == 1
    assert errors[0] is not None
    assert errors[0].ranks == (failing,)
    assert "bcp.recover" in errors[0].message
    assert workers.run(recover, tmp_path, [1, 0], world_size=2) == [[("committed", "every rank's data was there")]] * 2
    assert workers.run(load, tmp_path, 1.0) == [True] * 4
    assert files_under(tmp_path / "nvme0") == files_under(tmp_path / "nvme1") == []


def die_while_uploading(rank: int, world_size: int, folder: Path) -> None:
    with before(UPLOADING, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        bcp.save(folder / "run", state_of(rank, 1.0), step=1, options=options_of(rank, folder))


def test_without_the_disk_of_one_host_all_is_kept_until_it_is_back(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as died:
        workers.run(die_while_uploading, tmp_path)
    assert all(isinstance(error, WorkerDied) for error in died.value.errors.values())
    ((outcome, what),) = workers.run(recover, tmp_path, [0, 0], world_size=2)[1]
    assert outcome == "kept"
    assert "the parts of ranks 0, 1 of 4" in what
    ((outcome, what),) = workers.run(recover, tmp_path, [1], world_size=1)[0]
    assert outcome == "kept"
    assert "the local stage of rank 0 of 4" in what
    outcomes = workers.run(recover, tmp_path, [0, 1, 1], world_size=3)
    assert outcomes == [[("committed", "every rank's data was there")]] * 3
    assert workers.run(load, tmp_path, 1.0) == [True] * 4


def fail_to_upload_to_s3(rank: int, world_size: int, folder: Path, url: str, access: dict[str, Any]) -> str:
    with before(UPLOADING, raising(bcp.StorageError("gone", kind="unavailable"))):
        options = options_of(rank, folder)
        handle = bcp.save(url, state_of(rank, 1.0), step=1, async_save=True, storage_options=access, options=options)
        handle.local(60)
        return str(handle.exception(60))


def recover_to_s3(rank: int, world_size: int, folder: Path, url: str, access: dict[str, Any]) -> list[bool | str]:
    saves = bcp.recover(url, options=options_of(0, folder), storage_options=access)
    return [*(save.outcome for save in saves), loads_as(url, rank, 1.0, storage_options=access)]


def test_what_is_left_on_a_disk_reaches_s3(workers: WorkerPool, tmp_path: Path, s3, s3_prefix: str) -> None:
    url = f"s3://{s3.bucket}/{s3_prefix}"
    told = workers.run(fail_to_upload_to_s3, tmp_path, url, s3.options, world_size=2)
    kept = [path.read_bytes() for path in (tmp_path / "nvme0").rglob("*") if path.is_file()]
    assert len(kept) >= 5
    assert all(s3.secret.encode() not in content for content in kept)
    assert workers.run(recover_to_s3, tmp_path, url, s3.options, world_size=2) == [["committed", True]] * 2
    assert all(s3.secret not in text for text in told)
    assert files_under(tmp_path / "nvme0") == []


def save_in_two_ways(rank: int, world_size: int, folder: Path) -> Seen | None:
    options = options_of(rank, folder) if rank else bcp.SaveOptions(timeout_s=60)
    return seen(lambda: bcp.save(folder / "run", state_of(rank, 1.0), options=options))


def test_ranks_that_do_not_all_have_a_stage_are_told(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(save_in_two_ways, tmp_path, world_size=2)
    assert {error.kind for error in errors if error} == {"conflict"}
    assert all(error and "through a local stage" in error.message for error in errors)


def save_with_one_full_disk(rank: int, world_size: int, folder: Path) -> list[int]:
    from bytecheckpoint.saving.local_stage import LocalStage

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(LocalStage, "_has_room", lambda _self, _num_bytes: False)
        handle = bcp.save(
            folder / "run", state_of(rank, 1.0), step=1, async_save=True, options=options_of(rank, folder)
        )
        local = handle.local(60)
        handle.result(60)
    return list(local.direct_ranks)


def test_a_rank_whose_disk_is_full_writes_to_the_path(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_with_one_full_disk, tmp_path, world_size=2) == [[1], [1]]
    assert workers.run(load, tmp_path, 1.0, world_size=2) == [True, True]


def fail_after_a_direct_write(rank: int, world_size: int, folder: Path) -> None:
    from bytecheckpoint.saving.local_stage import LocalStage

    gone = raising(bcp.StorageError("gone", kind="unavailable"))
    with pytest.MonkeyPatch.context() as patch, before(Seam(local_stage_module.LocalStage, "upload"), gone):
        if rank == 1:
            patch.setattr(LocalStage, "_has_room", lambda _self, _num_bytes: False)
        seen(lambda: bcp.save(folder / "run", state_of(rank, 1.0), step=1, options=options_of(rank, folder)))


def test_what_went_past_a_full_disk_is_found_at_the_path(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(fail_after_a_direct_write, tmp_path, world_size=2)
    assert [save for ((save, _),) in workers.run(recover, tmp_path, [0, 0], world_size=2)] == ["committed"] * 2
    assert workers.run(load, tmp_path, 1.0, world_size=2) == [True, True]
