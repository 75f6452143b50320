"""Which processes work on a job, and what those leave that were killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.storage.memory_root import job_folder
from bytecheckpoint.storage.memory_root.job_folder import open_job


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
