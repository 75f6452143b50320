"""What counts as left by an abandoned save, and what never does: on a folder, on memory, and on S3 as moto plays it."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
from faults.seams import files_under, loads_as, raising, state_of
from fsspec.implementations.memory import MemoryFileSystem

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage import garbage as garbage_module
from bytecheckpoint.storage.garbage import MIN_AGE_S, Garbage, Leftover, find_leftovers, remove, sweep
from bytecheckpoint.storage.inventory import StoredObject, clock_of, inventory_of
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store

from .faulty_store import FaultyStore
from .s3_service import Refuse, always

DEAD, YOUNG = "00000000deadbeef", "00000000aaaaaaaa"
OVERWRITING = bcp.SaveOptions(overwrite=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries


class Place(NamedTuple):
    """Where a run is, in a store of any kind."""

    url: str
    options: dict[str, Any] | None

    def store(self) -> Store:
        return open_store(self.url, storage_options=self.options, writer_threads=1)

    def put(self, name: str, content: bytes = b"12345") -> None:
        view = memoryview(content)
        self.store().write(name, [Block(0, view.nbytes, lambda: nullcontext(view))], replace=True)

    def save(self, step: int, value: float = 1.0, **options: Any) -> str:
        handle = bcp.save(self.url, state_of(0, value), step=step, storage_options=self.options, **options)
        return handle.result().save_id

    def find(self) -> Garbage:
        return find_leftovers(self.store(), "")


PLACES = ["folder", "memory", "s3"]


@pytest.fixture(params=PLACES[:2])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "folder":
        yield Place(str(tmp_path / "run"), None)
    elif request.param == "memory":
        yield Place(f"memory://test-{uuid.uuid4().hex}", None)
        MemoryFileSystem.store.clear()
    else:
        service, prefix = request.getfixturevalue("s3"), request.getfixturevalue("s3_prefix")
        yield Place(f"s3://{service.bucket}/{prefix}", service.options)


def names_of(leftovers: Garbage) -> dict[tuple[str, str], list[str]]:
    return {(item.folder, item.save_id): sorted(item.names) for item in leftovers.found}


def test_a_save_that_died_is_found_by_its_id(place: Place) -> None:
    place.save(1)
    place.put(f"step_00000002/data/{DEAD}-00000-0.safetensors")
    place.put(f"step_00000002/data/{DEAD}-00001-0.safetensors")
    place.put(f"step_00000002/telemetry/{DEAD}-00000.json")
    found = place.find()
    assert names_of(found) == {
        ("step_00000002", DEAD): [
            f"step_00000002/data/{DEAD}-00000-0.safetensors",
            f"step_00000002/data/{DEAD}-00001-0.safetensors",
            f"step_00000002/telemetry/{DEAD}-00000.json",
        ]
    }
    (leftover,) = found.found
    assert leftover.num_bytes == 15
    assert abs((leftover.newest_s or 0) - time.time()) < 60


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_what_is_beside_a_committed_checkpoint_is_told_from_it(place: Place) -> None:
    place.save(1)
    old = place.save(1, 2.0, options=OVERWRITING)
    place.put(f"step_00000001/data/{DEAD}-00000-0.safetensors")
    assert list(names_of(place.find())) == [("step_00000001", DEAD)]
    (leftover,) = place.find().found
    remove(place.store(), leftover)
    assert place.find().found == []
    assert bcp.open(place.url, storage_options=place.options).info.save_id == old
    assert loads_as(place.url, 0, 2.0, storage_options=place.options)


def test_records_of_a_copy_that_died_are_found_and_those_of_a_checkpoint_are_not(place: Place) -> None:
    own = place.save(1)
    for name in (f"{own}.json", f"{own}-0a1b2c3d.json", f"{DEAD}.json", f"{DEAD}-0a1b2c3d.json", "mine.json"):
        place.put(f"step_00000001/metrics/{name}")
        place.put(f"step_00000002/metrics/{name}")
    place.store().delete(f"step_00000002/metrics/{own}.json")
    place.store().delete(f"step_00000002/metrics/{own}-0a1b2c3d.json")
    found = place.find()
    dead = [f"metrics/{DEAD}-0a1b2c3d.json", f"metrics/{DEAD}.json"]
    assert names_of(found) == {
        (folder, DEAD): [f"{folder}/{name}" for name in dead] for folder in ("step_00000001", "step_00000002")
    }
    for leftover in found.found:
        remove(place.store(), leftover)
    assert place.find().found == []
    left = place.store().list("step_00000001/metrics")
    assert sorted(left) == sorted([f"{own}.json", f"{own}-0a1b2c3d.json", "mine.json"])


class ManySteps:
    """A store with this number of committed steps, of which nothing is read."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def inventory(self, _folder: str) -> Iterator[StoredObject]:
        for step in range(self._num_steps):
            yield StoredObject(f"step_{step:08d}/manifest.bcp", 1, 1.0)
            yield StoredObject(f"step_{step:08d}/data/{step:016x}-00000-0.safetensors", 1, 1.0)


def lines_run(num_steps: int) -> int:
    """Returns the number of lines of the module that run when a root of so many steps is looked through."""
    counts = [0]

    def count(frame: FrameType, event: str, _argument: object) -> Any:
        counts[0] += event == "line"
        return count if frame.f_code.co_filename == garbage_module.__file__ else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert find_leftovers(ManySteps(num_steps), "").found == []  # type: ignore[arg-type]
    finally:
        sys.settrace(before)
    return counts[0]


def test_the_work_grows_with_the_steps_of_a_root_and_not_with_their_square() -> None:
    assert lines_run(400) < 5 * lines_run(100)


def test_what_no_save_names_so_is_nobodys(place: Place) -> None:
    place.save(1)
    for name in ("notes.txt", "step_00000002/data/mine.safetensors", "data/0123-1.bin", "wandb/data/run.json"):
        place.put(name)
    assert place.find().found == []


def test_a_damaged_manifest_keeps_its_folder_from_being_looked_at(place: Place) -> None:
    place.save(1)
    place.save(2)
    for step in (1, 2):
        place.put(f"step_{step:08d}/data/{DEAD}-00000-0.safetensors")
    place.put("step_00000001/manifest.bcp", b"damaged")
    found = place.find()
    assert list(names_of(found)) == [("step_00000002", DEAD)]
    assert found.unreadable == ["step_00000001"]


def test_probes_and_temporaries_are_found(tmp_path: Path) -> None:
    """Only a folder has them: what is not complete elsewhere is nowhere to be seen."""
    place = Place(str(tmp_path), None)
    place.save(1)
    for name in (
        f"step_00000001/.tmp-{'0' * 16}-manifest.bcp",
        f"step_00000002/data/.tmp-{'1' * 16}-{DEAD}-00000-0.safetensors",
        f".tmp-doctor-{'2' * 16}/large",
        f".tmp-clock-{'3' * 16}/now",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
    (tmp_path / ".tmp-mine").write_text("not ours")
    found = names_of(place.find())
    assert list(found) == [("", ""), ("step_00000001", ""), ("step_00000002", DEAD)]
    for leftover in place.find().found:
        remove(place.store(), leftover)
    assert place.find().found == []
    assert ".tmp-mine" in files_under(tmp_path)
    assert loads_as(tmp_path, 0, 1.0)


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_the_storage_says_what_time_it_is(place: Place) -> None:
    place.put("x")
    assert abs((clock_of(place.store()) or 0) - time.time()) < 60
    assert [item.name for item in inventory_of(place.store(), "")] == ["x"]


def test_a_root_that_does_not_exist_is_empty(place: Place) -> None:
    found = place.find()
    assert found.found == []


def test_age_decides_and_an_unknown_age_is_no_death() -> None:
    leftover = Leftover("", DEAD)
    leftover.add("a", 1, 100.0)
    leftover.add("b", 1, 200.0)
    assert leftover.is_dead(now_s=300.0, min_age_s=100.0)
    assert not leftover.is_dead(now_s=299.0, min_age_s=100.0)
    leftover.add("c", 1, None)
    assert not leftover.is_dead(now_s=1e9, min_age_s=0.0)


class PendingUpload(NamedTuple):
    name: str
    upload_id: str
    started_s: float


class UploadingStore(FaultyStore):
    """A store that knows of unfinished uploads."""

    def __init__(self, store: Store, pending: list[PendingUpload]) -> None:
        super().__init__(store)
        self.pending = pending

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        return inventory_of(self.store, folder)

    def pending_uploads(self, folder: str) -> list[PendingUpload]:
        return [upload for upload in self.pending if upload.name.startswith(folder)]

    def abort_upload(self, upload: PendingUpload) -> None:
        self.pending.remove(upload)


@contextmanager
def before_it_lists_uploads(store: UploadingStore, error: StorageError) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "pending_uploads", lambda _folder: raising(error)())
        yield


def test_unfinished_uploads_belong_to_their_save(tmp_path: Path) -> None:
    place = Place(str(tmp_path), None)
    place.put(f"step_00000002/data/{DEAD}-00000-0.safetensors")
    name = f"step_00000002/data/{DEAD}-00001-0.safetensors"
    now = time.time()
    uploads = [
        PendingUpload(name, "1", now + 100),
        PendingUpload("mine.bin", "2", 0.0),
        PendingUpload("step_00000003/manifest.bcp", "3", 5.0),
    ]
    store = UploadingStore(place.store(), uploads)
    first, second = find_leftovers(store, "").found
    assert (first.folder, first.save_id, len(first.uploads)) == ("step_00000002", DEAD, 1)
    assert first.newest_s == now + 100
    assert (second.folder, second.save_id, second.newest_s) == ("step_00000003", "", 5.0)
    assert remove(store, first) == 2
    assert remove(store, second) == 1
    assert uploads == [PendingUpload("mine.bin", "2", 0.0)]


@pytest.mark.parametrize("kind", ["permission", "unsupported"])
def test_leftovers_are_found_without_the_right_to_list_uploads(tmp_path: Path, kind: str) -> None:
    place = Place(str(tmp_path), None)
    place.put(f"step_00000002/data/{DEAD}-00000-0.safetensors")
    store = UploadingStore(place.store(), [])
    with before_it_lists_uploads(store, StorageError("you may not list uploads", kind=kind)):
        found = find_leftovers(store, "")
    assert found.not_looked_for == "you may not list uploads"
    (leftover,) = found.found
    assert remove(store, leftover) == 1
    assert files_under(tmp_path) == []
    assert find_leftovers(store, "").not_looked_for == ""


def test_leftovers_are_not_looked_for_where_the_store_does_not_answer(tmp_path: Path) -> None:
    store = UploadingStore(Place(str(tmp_path), None).store(), [])
    error = StorageError("no answer", kind="unavailable")
    with before_it_lists_uploads(store, error), pytest.raises(StorageError, match="no answer"):
        find_leftovers(store, "")


def test_a_store_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        inventory_of(FaultyStore(Place(str(tmp_path), None).store()), "")


def make_old(path: Path) -> None:
    old = time.time() - MIN_AGE_S - 60
    os.utime(path, (old, old))


def test_a_temporary_that_a_committed_save_could_not_remove_is_found(tmp_path: Path) -> None:
    """It is a second name of a data file, whose bytes would outlive the checkpoint."""
    place = Place(str(tmp_path), None)
    own = place.save(1)
    temporary = tmp_path / "step_00000001" / "data" / f".tmp-{'4' * 16}-{own}-00000-0.safetensors"
    os.link(tmp_path / "step_00000001" / "data" / f"{own}-00000-0.safetensors", temporary)
    (leftover,) = place.find().found
    assert list(leftover.names) == [temporary.relative_to(tmp_path).as_posix()]
    remove(place.store(), leftover)
    assert place.find().found == []
    assert loads_as(tmp_path, 0, 1.0)


def test_a_disk_that_fails_in_the_sweep_is_no_failure_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is committed is committed; `bcp gc` says what it could not look at."""
    stat = os.stat

    def fail(path: Any, **arguments: Any) -> os.stat_result:
        if str(path).endswith(".safetensors"):
            raise OSError(5, "the disk fell off")
        return stat(path, **arguments)

    monkeypatch.setattr("os.stat", fail)
    place = Place(str(tmp_path), None)
    place.save(1)
    assert bcp.steps(tmp_path) == [1]
    with pytest.raises(StorageError, match="the disk fell off"):
        place.find()


@pytest.mark.filterwarnings("error")
def test_a_folder_that_may_not_be_listed_is_no_failure_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    bcp.save(tmp_path, state_of(0, 1.0))
    assert bcp.load_tree(tmp_path)
    with pytest.raises(UserWarning, match="was not looked into"):
        list(open_store(str(tmp_path), storage_options=None, writer_threads=1).inventory(""))


def test_a_save_that_commits_sweeps_its_own_folder(tmp_path: Path) -> None:
    place = Place(str(tmp_path), None)
    for folder, save_id in (("step_00000001", DEAD), ("step_00000001", YOUNG), ("step_00000002", DEAD)):
        place.put(f"{folder}/data/{save_id}-00000-0.safetensors")
        if save_id == DEAD:
            make_old(tmp_path / folder / "data" / f"{save_id}-00000-0.safetensors")
    own = place.save(1)
    assert [name.split("/")[2][:16] for name in files_under(tmp_path) if "step_00000001/data" in name] == sorted(
        [YOUNG, own]
    )
    assert f"step_00000002/data/{DEAD}-00000-0.safetensors" in files_under(tmp_path)


def test_a_sweep_that_fails_is_no_failure_of_the_save(tmp_path: Path) -> None:
    place = Place(str(tmp_path), None)
    own = place.save(1)
    place.put(f"step_00000001/data/{DEAD}-00000-0.safetensors")
    make_old(tmp_path / "step_00000001" / "data" / f"{DEAD}-00000-0.safetensors")
    sweep(FaultyStore(place.store()), "step_00000001", own)
    assert len(files_under(tmp_path / "step_00000001" / "data")) == 2
    sweep(place.store(), "step_00000001", own)
    assert len(files_under(tmp_path / "step_00000001" / "data")) == 1


def test_what_has_been_committed_since_it_was_found_is_not_removed(tmp_path: Path) -> None:
    place = Place(str(tmp_path), None)
    save_id = place.save(1)
    manifest = tmp_path / "step_00000001" / "manifest.bcp"
    content = manifest.read_bytes()
    manifest.unlink()
    (leftover,) = place.find().found
    assert leftover.save_id == save_id
    manifest.write_bytes(content)
    assert remove(place.store(), leftover) == 0
    assert loads_as(tmp_path, 0, 1.0)


def test_nothing_is_removed_where_the_manifest_cannot_be_read(tmp_path: Path) -> None:
    place = Place(str(tmp_path), None)
    place.save(1)
    manifest = tmp_path / "step_00000001" / "manifest.bcp"
    hidden = manifest.rename(tmp_path / "hidden")
    (leftover,) = place.find().found
    hidden.rename(manifest)
    before = files_under(tmp_path)

    counting = FaultyStore(place.store())
    assert remove(counting, leftover) == 0
    for fail_at in range(1, len(counting.operations) + 1):
        store = FaultyStore(place.store(), fail_at=fail_at)
        with pytest.raises(StorageError):
            remove(store, leftover)
        assert files_under(tmp_path) == before
    assert loads_as(tmp_path, 0, 1.0)


def test_a_save_to_s3_sweeps_without_the_right_to_list_uploads(s3, s3_prefix: str, s3_faults) -> None:
    place = Place(f"s3://{s3.bucket}/{s3_prefix}", s3.options)
    place.put(f"step_00000001/data/{DEAD}-00000-0.safetensors")
    s3_faults.choose = always("^GET .*uploads$", Refuse(403, "AccessDenied"))
    found = place.find()
    assert "not allowed to list" in found.not_looked_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage_module, "MIN_AGE_S", -60.0)
        place.save(1)
    assert place.find().found == []
    assert loads_as(place.url, 0, 1.0, storage_options=place.options)


def test_an_unfinished_upload_to_s3_is_found_and_aborted(s3, s3_prefix: str) -> None:
    """As a process leaves it that is killed in the middle."""
    place = Place(f"s3://{s3.bucket}/{s3_prefix}", s3.options)
    place.save(1)
    name = f"step_00000002/data/{DEAD}-00003-0.safetensors"
    s3.client().create_multipart_upload(Bucket=s3.bucket, Key=f"{s3_prefix}/{name}")
    (leftover,) = place.find().found
    assert (leftover.folder, leftover.save_id, leftover.names) == ("step_00000002", DEAD, {})
    assert leftover.is_dead(now_s=time.time() + 60, min_age_s=30)
    assert remove(place.store(), leftover) == 1
    assert s3.uploads(s3_prefix) == []
    assert loads_as(place.url, 0, 1.0, storage_options=place.options)
