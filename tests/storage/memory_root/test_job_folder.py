"""Which processes work on a job, and what those leave that were killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.storage.memory_root import job_folder, slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs, open_job


def test_a_process_that_looks_for_others_does_not_keep_one_from_joining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look came between the making of the other's file and its lock, and had locked the file itself just then."""
    job = open_job(str(tmp_path), "/ckpt")
    looked: list[str] = []
    is_locked = job_folder.is_locked

    def looks_at(path: str) -> bool:
        looked.append(Path(path).name)
        return is_locked(path)

    monkeypatch.setattr(job_folder, "is_locked", looks_at)
    Path(job.path, "alive", ".tmp-0123456789abcdef").touch()
    lock, process = job.join()
    assert [each.name for each in job.living()] == [process.name]
    assert looked == [process.name]
    lock.release()


def test_a_job_whose_folder_is_removed_meanwhile_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = open_job(str(tmp_path), "/ckpt")
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [*listdir(folder), "0123456789abcdef"])
    assert [found for found, _ in find_jobs(str(tmp_path))] == [job]


def test_nobody_else_reads_what_memory_holds(tmp_path: Path) -> None:
    job = open_job(str(tmp_path), "/ckpt")
    slot_file.create(job.slots)
    found = [Path(job.path), *Path(job.path).rglob("*")]
    assert len(found) > 4
    assert [str(path) for path in found if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("mode", [0o750, 0o707, 0o720])
def test_a_folder_that_others_can_open_is_not_trusted(tmp_path: Path, mode: int) -> None:
    job = open_job(str(tmp_path), "/ckpt")
    Path(job.path).chmod(mode)
    with pytest.raises(bcp.StorageError, match="not trusted") as caught:
        open_job(str(tmp_path), "/ckpt")
    assert caught.value.kind == "permission"


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name it would be this user's own."""
    location, euid = "/ckpt", job_folder.os.geteuid()
    open_job(str(tmp_path), location)
    monkeypatch.setattr(job_folder, "job_name", lambda _: job_name)
    job_name = Path(find_jobs(str(tmp_path))[0][0].path).name
    monkeypatch.setattr(job_folder.os, "geteuid", lambda: euid + 1)
    with pytest.raises(bcp.StorageError, match="not trusted"):
        open_job(str(tmp_path), location)
    assert find_jobs(str(tmp_path)) == []
