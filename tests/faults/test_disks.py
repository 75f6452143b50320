"""Disks that are full or read-only. The mounts need rights that a plain container may lack."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from faults.seams import Seen, files_under, loads_as, seen, state_of

pytestmark = pytest.mark.privileged
DISK_BYTES = 4 << 20
PAGE_BYTES = 4096


def run(*command: object) -> bool:
    return subprocess.run(list(map(str, command)), check=False, capture_output=True).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if not run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", mounted):
        pytest.skip("a tmpfs cannot be mounted here")
    yield mounted
    run("umount", "-l", mounted)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder with a checkpoint of two ranks, mounted a second time without the right to write."""
    source, mounted = tmp_path / "source", tmp_path / "mounted"
    mounted.mkdir()
    bcp.save(source, state_of(0, 1.0), step=1)
    if not run("mount", "--bind", source, mounted):
        pytest.skip("a folder cannot be mounted here")
    if not run("mount", "-o", "remount,ro,bind", mounted):
        run("umount", "-l", mounted)
        pytest.skip("a folder cannot be mounted read-only here")
    yield mounted
    run("umount", "-l", mounted)


def test_a_full_disk_is_an_error_with_the_bytes_and_leaves_nothing(small_disk: Path) -> None:
    bcp.save(small_disk, state_of(0, 1.0), step=1)
    before = files_under(small_disk)
    for is_async in (False, True):
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            bcp.save(small_disk, {"x": torch.ones(6 << 20)}, step=2, async_save=is_async).result()
        assert raised.value.kind == "no_space"
        free_bytes = shutil.disk_usage(small_disk).free
        assert f"{free_bytes} bytes were free" in str(raised.value)
        assert any(int(word) >= 24 << 20 for word in str(raised.value).split() if word.isdigit())
    assert files_under(small_disk) == before
    assert bcp.steps(small_disk) == [1]
    assert loads_as(small_disk, 0, 1.0)
    bcp.save(small_disk, {"x": torch.ones(100)}, step=3)


def test_a_disk_that_is_full_at_the_commit_leaves_nothing(small_disk: Path) -> None:
    """For the data there is room, down to the last page; for the manifest there is none."""
    for number_of_pages in range(8):
        bcp.save(small_disk, state_of(0, 1.0), options=bcp.SaveOptions(overwrite=True))
        before = files_under(small_disk)
        filler = small_disk / "filler"
        data_bytes = sum(file.stat().st_size for file in (small_disk / "data").iterdir())
        pages = -(-data_bytes // PAGE_BYTES) + number_of_pages
        filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - pages * PAGE_BYTES))
        error = seen(lambda: bcp.save(small_disk, state_of(0, 2.0), options=bcp.SaveOptions(overwrite=True)))
        filler.unlink()
        if error is None:
            assert loads_as(small_disk, 0, 2.0)
            assert number_of_pages > 0
            return
        assert error.kind == "no_space"
        assert files_under(small_disk) == before
        assert loads_as(small_disk, 0, 1.0)
    pytest.fail("a manifest needs more pages than expected")


def save_too_much(rank: int, world_size: int, path: str) -> Seen | None:
    state = {"x": {f"rank{rank}": torch.ones((3 if rank else 1) << 20, dtype=torch.uint8)}, "y": torch.ones(1 << 19)}
    return seen(lambda: bcp.save(path, state, step=2, options=bcp.SaveOptions(timeout_s=30)))


def save_little(rank: int, world_size: int, path: str) -> bool:
    bcp.save(path, state_of(rank, 1.0), step=1)
    return loads_as(path, rank, 1.0)


def test_a_full_disk_fails_all_ranks_alike(workers: WorkerPool, small_disk: Path) -> None:
    assert workers.run(save_little, str(small_disk), world_size=2) == [True, True]
    before = files_under(small_disk)
    errors: list[Any] = workers.run(save_too_much, str(small_disk), world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind) == ("CheckpointSaveError", "no_space")
    assert files_under(small_disk) == before


def test_a_read_only_folder_is_an_error_of_permission(read_only: Path) -> None:
    assert loads_as(read_only, 0, 1.0)
    for path, step in ((read_only, 2), (read_only / "new", None)):
        with pytest.raises(bcp.StorageError) as raised:
            bcp.save(path, state_of(0, 2.0), step=step)
        assert raised.value.kind == "permission"
    assert bcp.steps(read_only) == [1]
    assert loads_as(read_only, 0, 1.0)


def test_a_read_only_folder_fails_all_ranks_alike(workers: WorkerPool, read_only: Path) -> None:
    errors: list[Any] = workers.run(save_too_much, str(read_only), world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind) == ("StorageError", "permission")
