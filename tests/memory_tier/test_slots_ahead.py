"""The slots that a warm-up takes ahead of the first save to memory, and what a save does only once."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier import hold
from bytecheckpoint.memory_tier.flush import jobs_in_memory, remove_job
from bytecheckpoint.storage import object_io
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from bytecheckpoint.storage.memory_root.version_files import read_versions
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:the memory root")
NUMEL = 300_000


def options(tmp_path: Path, **others: Any) -> bcp.SaveOptions:
    return bcp.SaveOptions(memory=bcp.Memory(copies=1, root=tmp_path / "memory"), **others)


def slots_of(tmp_path: Path) -> dict[str, int]:
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    return {slot.path: slot.capacity for slot in slot_file.scan(job.slots)}


def test_a_warm_up_allocates_both_slots_and_saves_take_no_others(tmp_path: Path) -> None:
    state = {"x": torch.ones(NUMEL)}
    bcp.warm_up(state, path=tmp_path / "ckpt", options=options(tmp_path))
    ahead = slots_of(tmp_path)
    assert len(ahead) == 2
    assert min(ahead.values()) > 4 * NUMEL
    for step in (1, 2, 3):
        bcp.save(tmp_path / "ckpt", state, step=step, options=options(tmp_path), to="memory")
    assert slots_of(tmp_path) == ahead
    assert not (tmp_path / "ckpt").exists()


def test_slots_that_a_warm_up_has_allocated_are_not_freed_as_an_ended_jobs(tmp_path: Path) -> None:
    """`bcp gc --memory` took them, and then no save to memory succeeded in this process."""
    state = {"x": torch.ones(NUMEL)}
    bcp.warm_up(state, path=tmp_path / "ckpt", options=options(tmp_path))
    (job,) = jobs_in_memory([str(tmp_path / "memory")], None)
    assert (job.num_living, remove_job(str(tmp_path / "memory"), job.path)) == (1, "lives")
    bcp.save(tmp_path / "ckpt", state, step=1, options=options(tmp_path), to="memory")
    assert len(slots_of(tmp_path)) == 2


@pytest.mark.parametrize("deleted", ["*", "*/*", "*/slots/*"])
def test_saves_go_on_in_new_slots_after_somebody_has_emptied_the_memory_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deleted: str
) -> None:
    """All saves failed from then on, those to storage as well, as after a logout with RemoveIPC of systemd."""
    state = {"x": torch.ones(NUMEL)}
    bcp.save(tmp_path / "ckpt", state, step=1, options=options(tmp_path))
    for path in (tmp_path / "memory").glob(deleted):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for step in (2, 3, 4):
        bcp.save(tmp_path / "ckpt", state, step=step, options=options(tmp_path))
    assert bcp.steps(tmp_path / "ckpt") == [1, 2, 3, 4]
    assert len(slots_of(tmp_path)) == 2
    (job,) = jobs_in_memory([str(tmp_path / "memory")], None)
    assert job.num_living == 1
    assert "(1 of 1), which this process did not delete" in caplog.text


def test_slots_do_not_pile_up_while_saves_fail_after_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kept another slot, until memory was full: on all hosts, where one of them had no room for a manifest."""

    def refuse(*_: object) -> None:
        raise OSError("no room")

    state = {"x": torch.ones(NUMEL)}
    bcp.save(tmp_path / "ckpt", state, step=0, options=options(tmp_path), to="memory")
    with monkeypatch.context() as patch:
        patch.setattr(hold, "_warn_of_all", refuse)
        for step in range(1, 6):
            with pytest.raises(bcp.CheckpointSaveError, match="no room"):
                bcp.save(tmp_path / "ckpt", state, step=step, options=options(tmp_path), to="memory")
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    assert (len(slots_of(tmp_path)), len(read_versions(job))) == (3, 2)
    bcp.save(tmp_path / "ckpt", state, step=6, options=options(tmp_path), to="memory")
    assert len(slots_of(tmp_path)) == 2


def test_a_warm_up_allocates_new_slots_after_somebody_has_emptied_the_memory_root(tmp_path: Path) -> None:
    """It failed with FileNotFoundError, and `bcp gc --memory` would have freed what a later one allocated."""
    for _ in range(2):
        bcp.warm_up({"x": torch.ones(NUMEL)}, path=tmp_path / "ckpt", options=options(tmp_path))
        (job,) = jobs_in_memory([str(tmp_path / "memory")], None)
        assert (job.num_living, len(slots_of(tmp_path))) == (1, 2)
        shutil.rmtree(job.path)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_saves_go_on_where_memory_has_no_room_for_another_slot_than_that_of_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """With room for two slots, as the documentation says, every save was refused from then on, to storage as well."""

    def refuse(*_: object) -> None:
        raise OSError("no room")

    state, memory = {"x": torch.ones(NUMEL)}, {"max_bytes": num_slots * (4 * NUMEL + (64 << 10))}
    given = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=tmp_path / "memory", **memory))
    bcp.save(tmp_path / "ckpt", state, step=0, options=given, to="memory")
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    (complete,) = (slot.save_id for slot in slot_file.scan(job.slots))
    with monkeypatch.context() as patch:
        patch.setattr(hold, "_warn_of_all", refuse)
        for step in (1, 2, 3):
            with pytest.raises(bcp.CheckpointSaveError, match="no room"):
                bcp.save(tmp_path / "ckpt", state, step=step, options=given, to="memory")
            assert complete in {slot.save_id for slot in slot_file.scan(job.slots)}
    bcp.save(tmp_path / "ckpt", state, step=4, options=given, to="memory")
    assert len(slots_of(tmp_path)) == 2


def save_with_a_late_rank(rank: int, world_size: int, tmp_path: Path) -> tuple[set[int], set[int]]:
    """Rank 1 fails to write the manifest of step 2 when the others have waited in vain; then all ranks fail to hold
    step 3. Returns the steps held before and after that.
    """
    root, max_bytes = tmp_path / f"host{rank}", 2 * (4 * NUMEL + (64 << 10))
    given = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=root, max_bytes=max_bytes), timeout_s=2)
    state = {f"of_rank_{rank}": torch.ones(NUMEL)}

    def save(step: int) -> None:
        bcp.save(tmp_path / "ckpt", state, step=step, options=given, to="memory")

    def refuse(*_: object) -> None:
        raise OSError("no room")

    def refuse_late(*_: object) -> None:
        time.sleep(3)
        refuse()

    def held() -> set[int]:
        ((job, _),) = find_jobs(str(root))
        return {slot.header.step for slot in slot_file.scan(job.slots) if slot.header is not None}

    save(1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(version_files, "add_pending", refuse_late)
        with pytest.raises(bcp.CheckpointSaveError):
            save(2)
    before = held()
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hold, "_holding", refuse)
        with pytest.raises(bcp.CheckpointSaveError):
            save(3)
    return before, held()


def test_ranks_that_wait_in_vain_for_another_keep_the_same_save_as_that_one(
    workers: WorkerPool, tmp_path: Path
) -> None:
    """Without room for a third slot one host gave up the complete save, and the other one the save that failed: while
    the next one was made, no save was whole on both.
    """
    outcomes = workers.run(save_with_a_late_rank, tmp_path, world_size=2)
    assert outcomes == [({1, 2}, {1, 3})] * 2


def test_a_warm_up_for_memory_needs_the_path_of_the_saves(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="path=") as caught:
        bcp.warm_up({"x": torch.ones(3)}, options=options(tmp_path))
    assert caught.value.kind == "conflict"
    assert not (tmp_path / "memory").exists()


def warm_up_and_save(rank: int, world_size: int, tmp_path: Path) -> tuple[dict[str, int], dict[str, int]]:
    state = {"x": torch.ones(NUMEL), "own": bcp.RankLocal(torch.full((NUMEL,), float(rank)))}
    own = tmp_path / f"host{rank}"
    bcp.warm_up(state, path=tmp_path / "ckpt", options=options(own))
    ahead = slots_of(own)
    bcp.save(tmp_path / "ckpt", state, step=1, options=options(own), to="memory")
    return ahead, slots_of(own)


def test_ranks_warm_up_the_slots_of_their_own_hosts(workers: WorkerPool, tmp_path: Path) -> None:
    for ahead, after in workers.run(warm_up_and_save, tmp_path, world_size=2):
        assert len(ahead) == 2
        assert after == ahead


@pytest.mark.parametrize("has_stage", [False, True], ids=["to the path", "through a local stage"])
def test_a_save_to_memory_and_storage_computes_each_checksum_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_stage: bool
) -> None:
    hashed_bytes = 0

    class Counting:
        @staticmethod
        def xxh3_64_intdigest(content: memoryview) -> int:
            nonlocal hashed_bytes
            hashed_bytes += len(content)
            return xxhash.xxh3_64_intdigest(content)

    stage = {"local_stage": tmp_path / "stage"} if has_stage else {}
    num_uploaded_bytes = 0
    monkeypatch.setattr(object_io, "xxhash", Counting)
    handle = bcp.save(
        tmp_path / "ckpt", {"x": torch.ones(NUMEL)}, step=1, async_save=True, options=options(tmp_path, **stage)
    )
    handle.result()
    if has_stage:  # what is uploaded is compared on its way, with or without memory
        num_uploaded_bytes = 4 * NUMEL
    assert 4 * NUMEL <= hashed_bytes - num_uploaded_bytes < 1.1 * 4 * NUMEL
    assert bcp.load(tmp_path / "ckpt", {"x": torch.zeros(NUMEL)}).step == 1
