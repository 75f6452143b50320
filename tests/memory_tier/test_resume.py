"""Saves to memory and resumes from it, in one process and in programs that are killed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import forked_python

import bytecheckpoint as bcp
from bytecheckpoint.manifest import envelope
from bytecheckpoint.memory_tier import hold
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.local_stage import LocalStage
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs, open_job
from bytecheckpoint.storage.store import Store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def options(tmp_path: Path, **others: Any) -> bcp.SaveOptions:
    return bcp.SaveOptions(memory=bcp.Memory(copies=1, root=tmp_path / "memory"), **others)


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.arange(100_000, dtype=torch.float32) + step, "step": step}


def empty() -> dict[str, Any]:
    return {"x": torch.zeros(100_000), "step": -1}


def check(state: dict[str, Any], step: int) -> None:
    assert state["step"] == step
    torch.testing.assert_close(state["x"], state_of(step)["x"], rtol=0, atol=0)


def check_resumed(tmp_path: Path, root: Path, step: int) -> None:
    """Checks that a resume finds this step, and its values."""
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    assert report.step == step
    check(state, step)


pytestmark = pytest.mark.filterwarnings("ignore:the memory root")


def test_what_memory_holds_is_resumed_and_load_never_sees_it(tmp_path: Path, root: Path) -> None:
    for step in range(4):
        handle = bcp.save(root, state_of(step), step=step, async_save=True, options=options(tmp_path), to="memory")
        assert handle.held("process").tier == handle.result().tier == "memory"
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    assert (report.step, report.sources) == (3, {"memory": 1, "peer": 0, "parity": 0, "local": 0, "storage": 0})
    check(state, 3)
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.load(root, empty())


def test_a_branch_that_was_left_is_not_resumed_from_storage_however_many_steps_it_has(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(10, 80, 10):
        bcp.save(root, state_of(step), step=step, options=options(tmp_path))
    bcp.load(root, empty(), step=10)
    bcp.save(root, state_of(15), step=15, options=options(tmp_path))
    shutil.rmtree(tmp_path / "memory")
    monkeypatch.setattr(process_state(), "memories", {})
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    assert (report.step, report.sources["storage"]) == (15, 1)
    check(state, 15)


@pytest.mark.parametrize("again", [bcp.resume, bcp.load])
def test_what_memory_holds_since_a_loss_of_memory_is_newer_than_the_checkpoint_that_training_went_on_from(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[..., Any]
) -> None:
    for step in (10, 90):  # the second one is of a branch that training leaves: its generation stays the first
        bcp.save(root, state_of(step), step=step, options=options(tmp_path))
    for _ in range(3):
        bcp.load(root, empty(), step=10)
        bcp.save(root, state_of(15), step=15, options=options(tmp_path, overwrite=True))
    shutil.rmtree(tmp_path / "memory")
    monkeypatch.setattr(process_state(), "memories", {})
    monkeypatch.setattr(process_state(), "loaded_generation", 0)
    again(root, empty(), **({"step": 15} if again is bcp.load else {"options": options(tmp_path)}))
    bcp.save(root, state_of(16), step=16, options=options(tmp_path), to="memory")
    check_resumed(tmp_path, root, 16)


def test_nothing_is_none_and_leaves_the_state(tmp_path: Path, root: Path) -> None:
    state = empty()
    assert bcp.resume(root, state, options=options(tmp_path)) is None
    assert state["step"] == -1


def test_storage_wins_where_it_is_newer(tmp_path: Path, root: Path) -> None:
    bcp.save(root, state_of(1), step=1, options=options(tmp_path), to="memory")
    bcp.save(root, state_of(2), step=2)  # without a memory tier
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    assert (report.step, report.sources["storage"], report.sources["memory"]) == (2, 1, 0)
    check(state, 2)


def test_an_older_step_is_not_resumed_where_the_storage_fails_to_read_the_newest(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        bcp.save(root, state_of(step), step=step)
    read = layout.read_manifest_bytes

    def fail_for_step_2(store: Store, folder: str) -> bytes:
        if folder == layout.step_folder(2):
            raise bcp.StorageError("the storage does not answer", kind="unavailable")
        return read(store, folder)

    monkeypatch.setattr(layout, "read_manifest_bytes", fail_for_step_2)
    state = empty()
    with pytest.raises(bcp.StorageError, match="does not answer"):
        bcp.resume(root, state, options=options(tmp_path))
    assert state["step"] == -1


def test_an_older_step_is_not_resumed_where_a_later_release_has_saved_the_newest(tmp_path: Path, root: Path) -> None:
    for step in (1, 2):
        bcp.save(root, state_of(step), step=step)
    manifest = root / layout.step_folder(2) / layout.MANIFEST_NAME
    manifest.write_bytes(envelope.seal(envelope.unseal(manifest.read_bytes()), version=(99, 0)))
    state = empty()
    with pytest.raises(bcp.CheckpointCorruptError, match=r"format version 99\.0") as raised:
        bcp.resume(root, state, options=options(tmp_path))
    assert raised.value.kind == "unsupported_version"
    assert state["step"] == -1


def test_a_save_to_storage_is_resumed_from_memory(tmp_path: Path, root: Path) -> None:
    handle = bcp.save(root, state_of(5), step=5, async_save=True, options=options(tmp_path))
    assert handle.held("storage").tier == "storage"
    assert handle.held("process").save_id == handle.result().save_id
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    assert (report.step, report.sources["memory"]) == (5, 1)
    bcp.load(root, empty(), step=5)


def test_an_abandoned_branch_is_never_resumed(tmp_path: Path, root: Path) -> None:
    bcp.save(root, state_of(10), step=10, options=options(tmp_path))
    bcp.save(root, state_of(90), step=90, options=options(tmp_path))
    bcp.save(root, state_of(100), step=100, options=options(tmp_path), to="memory")
    bcp.load(root, empty(), step=10)
    bcp.save(root, state_of(11), step=11, options=options(tmp_path), to="memory")
    check_resumed(tmp_path, root, 11)


def test_a_save_in_flight_during_a_load_is_of_the_branch_that_is_left(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_begun, may_end = hold._holding, threading.Event(), threading.Event()

    def wait(*args: Any) -> hold.RankHolding:
        holding = real(*args)
        is_begun.set()
        assert may_end.wait(60)
        return holding

    bcp.save(root, state_of(10), step=10, options=options(tmp_path))
    monkeypatch.setattr(hold, "_holding", wait)
    left = bcp.save(root, state_of(100), step=100, async_save=True, options=options(tmp_path), to="memory")
    assert is_begun.wait(60)
    bcp.load(root, empty(), step=10)
    may_end.set()
    assert left.result().step == 100
    bcp.save(root, state_of(11), step=11, options=options(tmp_path), to="memory")
    check_resumed(tmp_path, root, 11)


def damage(tmp_path: Path, save_id: str) -> int:
    """Flips a bit in the image of each slot of the save, and returns their number."""
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    places = [
        place for slot in slot_file.scan(job.slots) if slot.save_id == save_id for place in slot.places().values()
    ]
    for place in places:
        damage_at(place)
    return len(places)


def damage_at(place: slot_file.FilePlace) -> None:
    with open(place.path, "r+b") as file:
        file.seek(place.byte_offset + place.byte_length - 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))


def test_a_damaged_version_gives_way_to_the_one_before(tmp_path: Path, root: Path) -> None:
    for step in (1, 2):
        info = bcp.save(root, state_of(step), step=step, options=options(tmp_path), to="memory").result()
    assert damage(tmp_path, info.save_id) == 1
    check_resumed(tmp_path, root, 1)


@pytest.mark.parametrize("restarts", [False, True])
def test_the_next_save_leaves_what_training_went_on_from_until_it_is_complete(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """It takes the slot of the damaged version, although that one is newer."""
    first, second = (
        bcp.save(root, state_of(step), step=step, options=options(tmp_path), to="memory").result() for step in (1, 2)
    )
    assert damage(tmp_path, second.save_id) == 1
    if restarts:
        for memory in process_state().memories.values():
            memory.close()
        monkeypatch.setattr(process_state(), "memories", {})
    check_resumed(tmp_path, root, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobMemory, "mark_whole", fail)
        with pytest.raises(bcp.CheckpointError):
            bcp.save(root, state_of(3), step=3, options=options(tmp_path), to="memory")
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    assert first.save_id in {slot.save_id for slot in slot_file.scan(job.slots)}
    check_resumed(tmp_path, root, 1)


def fail(*_: object, **__: object) -> None:
    raise OSError(5, "the test")


@pytest.mark.parametrize("name", ["0" * 16, "f" * 16])
def test_the_good_one_of_two_slots_of_a_host_with_the_same_file_is_read(tmp_path: Path, root: Path, name: str) -> None:
    for step in (1, 2):
        info = bcp.save(root, state_of(step), step=step, options=options(tmp_path), to="memory").result()
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    (slot,) = [slot for slot in slot_file.scan(job.slots) if slot.save_id == info.save_id]
    (place,) = slot.places().values()
    twin = shutil.copy(slot.path, Path(job.slots, name))
    damage_at(place._replace(path=str(twin)))
    check_resumed(tmp_path, root, 2)


def test_a_damaged_slot_is_read_from_storage_instead(tmp_path: Path, root: Path) -> None:
    bcp.save(root, state_of(1), step=1, options=options(tmp_path), to="memory")
    info = bcp.save(root, state_of(2), step=2, options=options(tmp_path)).result()
    assert damage(tmp_path, info.save_id) == 1
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    assert (report.step, report.sources["storage"]) == (2, 1)
    check(state, 2)


def test_damage_everywhere_is_an_error_that_lists_it(tmp_path: Path, root: Path) -> None:
    info = bcp.save(root, state_of(7), step=7, options=options(tmp_path), to="memory").result()
    damage(tmp_path, info.save_id)
    with pytest.raises(bcp.CheckpointCorruptError, match=f"step 7.*{info.save_id}.*state is undefined"):
        bcp.resume(root, empty(), options=options(tmp_path))


_PROGRAM = """
import os, sys, torch, warnings
import bytecheckpoint as bcp
warnings.simplefilter("ignore")
root, memory, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=memory))
for step in range(first, last):
    state = {"x": torch.arange(100_000, dtype=torch.float32) + step, "step": step}
    bcp.save(root, state, step=step, async_save=True, options=options, to="memory").held("process")
os.kill(os.getpid(), 9)
"""


def killed_run(root: Path, tmp_path: Path, first: int, last: int) -> None:
    done = subprocess.run(
        [forked_python(), "-c", _PROGRAM, str(root), str(tmp_path / "memory"), str(first), str(last)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr


def test_a_killed_process_leaves_its_last_step_and_slots_are_used_again(tmp_path: Path, root: Path) -> None:
    killed_run(root, tmp_path, 0, 3)
    killed_run(root, tmp_path, 3, 4)  # without a look at what there was: it must not take the slot of step 2 first
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    assert len(list(slot_file.scan(job.slots))) == 2
    state = empty()
    report = bcp.resume(root, state, options=options(tmp_path))
    assert report is not None
    check(state, 3)
    bcp.save(root, state_of(4), step=4, options=options(tmp_path), to="memory")
    assert len(list(slot_file.scan(job.slots))) == 2


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (lambda: bcp.Memory(copies=0), "copies"),
        (lambda: bcp.Memory(copies=2, parity=1), "parity takes the place"),
        (lambda: bcp.Memory(parity=2), "parity"),
        (lambda: bcp.Memory(root="relative"), "absolute"),
        (lambda: bcp.Memory(failure_domain=""), "label"),
        (lambda: bcp.Memory(max_bytes=1), "max_bytes"),
        (lambda: bcp.SaveOptions(memory=bcp.Memory(), codec="zstd"), "codec"),
        (lambda: bcp.SaveOptions(memory=True), "bcp.Memory"),  # type: ignore[arg-type]
    ],
)
def test_bad_values_are_refused_by_name(make: Callable[[], object], needs: str) -> None:
    with pytest.raises(ValueError, match=needs):
        make()


def test_refusals_before_anything_is_staged(tmp_path: Path, root: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="step="):
        bcp.save(root, state_of(1), options=options(tmp_path))
    with pytest.raises(bcp.CheckpointMismatchError, match="memory=bcp"):
        bcp.save(root, state_of(1), step=1, to="memory")
    with pytest.raises(bcp.CheckpointMismatchError, match="'storage' or 'memory'"):
        bcp.save(root, state_of(1), step=1, to="disk")  # type: ignore[arg-type]
    big = {"x": torch.zeros(10_000_000)}
    with pytest.raises(bcp.CheckpointSaveError, match="staging_bytes=33554432 is less than the 4000"):
        bcp.save(root, big, step=1, async_save=True, options=options(tmp_path, staging_bytes=32 << 20))
    small = bcp.SaveOptions(memory=bcp.Memory(copies=1, root=tmp_path / "memory", max_bytes=1 << 20))
    with pytest.raises(bcp.CheckpointSaveError, match="max_bytes=1048576") as caught:
        bcp.save(root, big, step=1, options=small, to="memory")
    assert caught.value.kind == "no_space"
    bcp.save(root, state_of(1), step=1)
    with pytest.raises(bcp.CheckpointExistsError):
        bcp.save(root, state_of(1), step=1, options=options(tmp_path), to="memory")


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_root_that_fills_up_while_a_slot_grows_gets_the_room_back(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    real, steps = os.posix_fallocate, list[int]()

    def allocate(fd: int, start: int, num_bytes: int) -> None:
        steps.append(start)
        if len(steps) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, start, num_bytes)

    def num_bytes_held() -> int:
        return sum(
            slot.capacity for job, _ in find_jobs(str(tmp_path / "memory")) for slot in slot_file.scan(job.slots)
        )

    for step in range(num_before):
        bcp.save(root, {"x": torch.zeros(10)}, step=step, options=options(tmp_path), to="memory")
    before = num_bytes_held()
    monkeypatch.setattr(slot_file, "_STEP_BYTES", 1 << 16)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(bcp.CheckpointSaveError, match="no room for a slot"):
        bcp.save(root, state_of(9), step=9, options=options(tmp_path), to="memory")
    assert num_bytes_held() == before
    monkeypatch.undo()
    assert (bcp.resume(root, {"x": torch.ones(10)}, options=options(tmp_path)) is not None) == bool(num_before)


def test_a_save_without_memory_is_never_held(tmp_path: Path, root: Path) -> None:
    handle = bcp.save(root, state_of(1), step=1)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"SaveOptions\.memory"):
        handle.held("process")
    only = bcp.save(root, state_of(2), step=2, options=options(tmp_path), to="memory")
    with pytest.raises(bcp.CheckpointMismatchError, match="never committed"):
        only.held("storage")
    with pytest.raises(bcp.CheckpointMismatchError, match="copies=1"):
        only.held("host")
    with pytest.raises(ValueError, match="'process', 'host', 'storage'"):
        only.held("disk")  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["versions", "slots", "alive", ".", ".."])
def test_what_a_killed_process_was_writing_is_removed_by_the_run_that_goes_on(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    bcp.save(root, state_of(1), step=1, options=options(tmp_path), to="memory")
    ((job, _),) = find_jobs(str(tmp_path / "memory"))
    left = Path(job.path, folder, ".tmp-0123456789abcdef")
    left.write_bytes(b"half of it")
    os.utime(left, (time.time() - 60,) * 2)
    for memory in process_state().memories.values():  # as the death of the process does
        memory.close()
    monkeypatch.setattr(process_state(), "memories", {})
    assert bcp.resume(root, empty(), options=options(tmp_path)) is not None
    bcp.save(root, state_of(2), step=2, options=options(tmp_path), to="memory")
    assert not left.exists()


@pytest.mark.parametrize("name", [".tmp-0123456789abcdef", "0123456789abcdef"], ids=["being made", "of an old save"])
def test_what_a_killed_process_was_copying_is_removed_when_the_next_copies_are_whole(tmp_path: Path, name: str) -> None:
    memory = JobMemory(open_job(str(tmp_path / "memory"), str(tmp_path / "ckpt")))
    memory.copies.take(1, [100], max_bytes=None)
    left = Path(memory.job.path, "copies", name)
    left.write_bytes(b"half of it")
    memory.copies.mark_whole(1, "fedcba9876543210", 3, [100])
    memory.copies.settle("fedcba9876543210")
    assert not left.exists()


def test_copies_that_are_held_for_others_count_into_the_limit_when_slots_are_taken(tmp_path: Path) -> None:
    memory = JobMemory(open_job(str(tmp_path / "memory"), str(tmp_path / "ckpt")))
    memory.copies.take(1, [3 << 20], max_bytes=8 << 20)
    with pytest.raises(bcp.CheckpointSaveError, match="max_bytes=8388608"):
        memory.take([3 << 20], max_bytes=8 << 20)  # two slots


def test_what_only_the_local_stage_has_is_resumed_from_there(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload had failed, and the memory went with the host; the disk came back."""
    staged = options(tmp_path, local_stage=tmp_path / "stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStage, "upload", refuse)
        handle = bcp.save(root, state_of(7), step=7, async_save=True, options=staged)
        handle.local()
        with pytest.raises(bcp.StorageError):
            handle.result()
    for memory in process_state().memories.values():
        memory.close()
    monkeypatch.setattr(process_state(), "memories", {})
    shutil.rmtree(tmp_path / "memory")
    state = empty()
    report = bcp.resume(root, state, options=staged)
    assert report is not None
    assert (report.step, report.sources) == (7, {"memory": 0, "peer": 0, "parity": 0, "local": 1, "storage": 0})
    check(state, 7)
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.load(root, empty())


def test_what_a_local_stage_has_for_one_endpoint_is_not_resumed_at_another(tmp_path: Path) -> None:
    """One URL at two services is two places."""
    url = f"memory://test-{uuid.uuid4().hex}"
    here, there = {"endpoint_url": "http://here:9000"}, {"endpoint_url": "http://there:9000/"}
    staged = bcp.SaveOptions(local_stage=tmp_path / "stage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStage, "upload", refuse)
        assert bcp.save(url, state_of(7), step=7, async_save=True, storage_options=here, options=staged).exception()
    with_memory = options(tmp_path, local_stage=tmp_path / "stage")
    state = empty()
    assert bcp.resume(url, state, storage_options=there, options=with_memory) is None
    assert state["step"] == -1
    report = bcp.resume(url, state, storage_options=here, options=with_memory)
    assert report is not None
    check(state, 7)


def refuse(*_: object, **__: object) -> None:
    raise bcp.StorageError("the store is away", kind="unavailable")


def test_names_are_mapped_as_by_a_load(tmp_path: Path, root: Path) -> None:
    bcp.save(root, {"old": {"x": torch.arange(10.0)}}, step=1, options=options(tmp_path), to="memory")
    state = {"new": {"y": torch.zeros(10)}}
    report = bcp.resume(root, state, options=options(tmp_path), key_map={"old.x": "new.y"})
    assert report is not None
    assert torch.equal(state["new"]["y"], torch.arange(10.0))
