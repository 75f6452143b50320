"""Saves of torchsnapshot and the open-source ByteCheckpoint."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from pathlib import Path

from saves.timing import Pending, Save
from saves.training import Job
from shared.peers import oss_save, replicated, snapshot_state, torchsnapshot

STEPS = itertools.count(1)


def candidates() -> dict[str, Save]:
    return {
        "torchsnapshot": snapshot_save,
        "torchsnapshot-async": snapshot_async,
        "oss": lambda folder, job: oss_save(folder, job.held, fast_saving=False),
        "oss-async": oss_async,
    }


def snapshot_save(folder: Path, job: Job) -> None:
    torchsnapshot().Snapshot.take(str(folder), snapshot_state(job.held), replicated=replicated(job.held))
    sync_file_system(folder)


def snapshot_async(folder: Path, job: Job) -> Pending:
    pending = torchsnapshot().Snapshot.async_take(
        str(folder), snapshot_state(job.held), replicated=replicated(job.held)
    )
    return Pending(lambda: (pending.wait(), sync_file_system(folder)))


def sync_file_system(folder: Path) -> None:
    """Syncs for torchsnapshot, which syncs none of its files: one for each tensor is too many to sync one by one."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(fd)


def oss_async(folder: Path, job: Job) -> Pending:
    """Begins a save; its only sign of completion is a callback on the first rank, in saves that have a step."""
    written = threading.Event()
    oss_save(folder, job.held, fast_saving=True, global_steps=next(STEPS), callback=written.set)
    return Pending(written.wait if job.held.rank == 0 else lambda: None)
