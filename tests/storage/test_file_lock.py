"""Locks of living processes, beside processes that only look."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from bytecheckpoint.storage import stage_folder
from bytecheckpoint.storage.backends import file_lock
from bytecheckpoint.storage.backends.file_lock import ProcessLock, is_locked
from bytecheckpoint.storage.stage_folder import Journal


def opened(path: Path, kind: int) -> int:
    """Opens and locks a file as another process does: a lock is of an open file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, kind | fcntl.LOCK_NB)
    return fd


def test_a_look_at_a_dead_process_does_not_keep_its_folder_from_being_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(save_id="0" * 16, rank=0, num_ranks=1, root="/run", folder="", step=None, overwrite=False)
    left = stage_folder.create(str(tmp_path), journal, writer_threads=1)
    left.close()
    looking = opened(Path(left.path) / "lock", fcntl.LOCK_SH)
    monkeypatch.setattr(file_lock.time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    try:
        taken = stage_folder.take_over(str(tmp_path), Path(left.path).name, writer_threads=1)
    finally:
        os.close(looking)
    assert taken is not None
    assert is_locked(f"{left.path}/lock")
    taken.close()


def test_a_lock_that_is_held_is_refused_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seconds: float) -> None:
        raise AssertionError(seconds)

    path = tmp_path / "lock"
    held = opened(path, fcntl.LOCK_EX)
    monkeypatch.setattr(file_lock.time, "sleep", refuse)
    with pytest.raises(BlockingIOError):
        ProcessLock(str(path))
    assert is_locked(str(path))
    os.close(held)
    ProcessLock(str(path)).release()


def test_a_child_that_was_forked_during_a_look_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    copies = []
    flock = fcntl.flock

    def fork_before(fd: int, kind: int) -> None:
        copies.append(os.dup(fd))  # as a child has one
        flock(fd, kind)

    monkeypatch.setattr(file_lock.fcntl, "flock", fork_before)
    assert not is_locked(str(path))
    monkeypatch.undo()
    ProcessLock(str(path)).release()
    for fd in copies:
        os.close(fd)
