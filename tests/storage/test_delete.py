"""`bcp.delete`: one checkpoint goes, manifest first, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, after, before, files_under, raising
from forked_python import forked_python

import bytecheckpoint as bcp
from bytecheckpoint.loading import open_checkpoint, read
from bytecheckpoint.storage import deletion
from bytecheckpoint.storage.backends import local_store as local_store_module
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.garbage import find_leftovers
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.tools.main import cli
from storage.s3_service import S3Service
from storage.webhdfs_server import running_webhdfs


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), value)}


def test_only_the_files_of_the_checkpoint_go(tmp_path: Path) -> None:
    for step in (1, 2):
        bcp.save(tmp_path, state_of(float(step)), step=step)
    kept = [name for name in files_under(tmp_path) if name.startswith("step_00000002")]
    own = tmp_path / "step_00000001" / "data" / "notes.txt"
    own.write_text("of the user")
    bcp.delete(tmp_path, 1)
    assert bcp.steps(tmp_path) == [2]
    assert sorted(files_under(tmp_path)) == sorted([*kept, "step_00000001/data/notes.txt"])
    assert bcp.open(tmp_path)["w"][0] == 2.0


@pytest.mark.parametrize("place", ["memory", "s3", "webhdfs"])
def test_on_every_store(place: str, request: pytest.FixtureRequest) -> None:
    options = None
    if place == "s3":
        s3: S3Service = request.getfixturevalue("s3")
        url, options = f"s3://{s3.bucket}/{request.getfixturevalue('s3_prefix')}", s3.options
    with running_webhdfs() as server:
        if place != "s3":
            url = f"{'memory:/' if place == 'memory' else server.url}/root-{uuid.uuid4().hex}"
        bcp.save(url, state_of(1.0), step=1, storage_options=options)
        bcp.save(url, state_of(2.0), step=2, storage_options=options)
        bcp.delete(url, 2, storage_options=options)
        assert bcp.steps(url, storage_options=options) == [1]
        assert bcp.open(url, storage_options=options)["w"][0] == 1.0
        store = open_store(url, storage_options=options, writer_threads=1)
        assert not store.list("step_00000002/data")
        assert not find_leftovers(store, "").found


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0), step=1)
    for step in (None, 2):
        with pytest.raises(bcp.CheckpointNotFoundError):
            bcp.delete(tmp_path, step)
    with pytest.raises(bcp.CheckpointMismatchError):
        bcp.delete(tmp_path, "latest")  # type: ignore[arg-type]
    assert bcp.steps(tmp_path) == [1]


def test_a_store_that_refuses_leaves_all_of_it(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))
    found = files_under(tmp_path)
    refusing = before(
        Seam(local_store_module.LocalStore, "delete"),
        raising(bcp.StorageError("no", kind="permission")),
    )
    with refusing, pytest.raises(bcp.StorageError):
        bcp.delete(tmp_path)
    assert files_under(tmp_path) == found


def test_a_killed_deletion_leaves_no_checkpoint_and_leftovers_that_are_found(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0), step=1)
    program = (
        "import os, sys, bytecheckpoint as bcp\n"
        "from bytecheckpoint.storage import deletion\n"
        "deletion.discard = lambda *_: os._exit(9)\n"
        "bcp.delete(sys.argv[1], 1)\n"
    )
    ended = subprocess.run([forked_python(), "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == 9
    assert bcp.steps(tmp_path) == []
    (leftover,) = find_leftovers(LocalStore(str(tmp_path), writer_threads=1), "").found
    assert leftover.folder == "step_00000001"
    assert any(name.startswith("step_00000001/data/") for name in leftover.names)


def test_a_link_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    bcp.save(tmp_path / "source", state_of(1.0))
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "link"), "--to", "bcp", "--link"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    bcp.delete(tmp_path / "link")
    assert bcp.open(tmp_path / "source")["w"][0] == 1.0
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.open(tmp_path / "link")


@pytest.mark.parametrize("moment", ["plan_load", "run_fetches"])
def test_a_load_beside_a_deletion_takes_the_step_that_is_left(tmp_path: Path, moment: str) -> None:
    for step in (1, 2):
        bcp.save(tmp_path, state_of(float(step)), step=step)
    left, state = [2], state_of(-1.0)
    with before(Seam(read, moment), lambda: left and bcp.delete(tmp_path, left.pop())):
        assert bcp.load(tmp_path, state).step == 1
    assert state["w"].unique().tolist() == [1.0]


def test_a_checkpoint_that_is_deleted_after_it_was_found_is_not_found(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))
    left = [1]
    with (
        after(
            Seam(open_checkpoint, "find_checkpoint"),
            lambda: left and left.pop() and bcp.delete(tmp_path),
        ),
        pytest.raises(bcp.CheckpointNotFoundError) as raised,
    ):
        bcp.open(tmp_path)
    assert raised.value.kind == "not_found"


def test_a_view_of_what_was_deleted_says_so(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))
    found = bcp.open(tmp_path)
    bcp.delete(tmp_path)
    with pytest.raises(bcp.CheckpointNotFoundError, match="was deleted while it was read") as raised:
        found.state_dict()
    assert raised.value.kind == "replaced"


def test_readers_beside_saves_and_deletions_never_see_damage(tmp_path: Path) -> None:
    is_over, failures = threading.Event(), []

    def write() -> None:
        while not is_over.is_set():
            bcp.save(tmp_path, state_of(1.0))
            bcp.delete(tmp_path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            state = state_of(-1.0)
            try:
                bcp.load(tmp_path, state)
                assert state["w"].unique().tolist() == [1.0]
            except bcp.CheckpointNotFoundError as error:
                if error.kind not in {"not_found", "not_committed", "replaced"}:
                    failures.append(error)
    finally:
        is_over.set()
        writer.join()
    assert failures == []


def test_a_step_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0), step=1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000007")
    for call in (lambda: bcp.open(tmp_path), lambda: bcp.load(tmp_path, state_of(-1.0), step=7)):
        with pytest.raises(bcp.CheckpointMismatchError, match="step 1 under the name of step 7") as raised:
            call()
        assert raised.value.kind == "conflict"
    assert bcp.open(tmp_path / "step_00000007", None).info.step == 1


def test_a_big_endian_processor_is_refused() -> None:
    program = "import sys; sys.byteorder = 'big'; import bytecheckpoint"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ImportError: bytecheckpoint does not run on big-endian processors" in ended.stderr


class _Refusing(LocalStore):
    """A store that does not delete some of its objects, and counts what it is asked for."""

    def __init__(self, root: Path, refused: Collection[str]) -> None:
        super().__init__(str(root), writer_threads=1)
        self.refused = refused
        self.num_asked = 0

    def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self.num_asked += 1
            if name in self.refused:
                raise bcp.StorageError(f"{name} is kept", kind="permission")
            super().delete_many([name])


def _deleted(root: Path, refused: Collection[int]) -> tuple[list[str], _Refusing]:
    """What is left of 200 files, some of which the store does not delete."""
    names = [f"data/{number:03d}" for number in range(200)]
    (root / "data").mkdir()
    for name in names:
        (root / name).touch()
    store = _Refusing(root, [names[number] for number in refused])
    deletion.discard(store, "", names)
    return sorted(path.name for path in root.rglob("*") if path.is_file()), store


def test_files_that_cannot_be_deleted_keep_no_other_from_deletion(tmp_path: Path, caplog: Any) -> None:
    left, _ = _deleted(tmp_path, [5, 60])
    assert left == ["005", "060"]
    assert "2 of 200 files" in caplog.text
    assert "data/005 is kept" in caplog.text


def test_a_store_that_deletes_nothing_is_not_asked_again_and_again(tmp_path: Path, caplog: Any) -> None:
    left, store = _deleted(tmp_path, range(200))
    assert len(left) == 200
    assert store.num_asked < 50
    assert "200 of 200 files" in caplog.text


def test_deletion_takes_the_pin_and_the_records_of_a_manager_but_not_files_of_others(tmp_path: Path) -> None:
    """A later checkpoint at the same place would have inherited them."""
    options = bcp.ManagerOptions(async_save=False, signals=())
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1), options=options) as manager:
        manager.save(1, {"w": torch.zeros(4)}, metrics={"loss": 1.0}, pin=True)
    folder = tmp_path / "step_00000001"
    (folder / "notes.txt").write_text("mine")
    bcp.delete(tmp_path, step=1)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["notes.txt"]
