"""How torchsnapshot and the open-source ByteCheckpoint save in benchmarks/save.py. Runs in an environment of their own,
because the latter is imported by the same name as this project, and always in a process group, which it needs.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import torch
from save_timing import Pending, Save
from save_workloads import Job

STEPS = itertools.count(1)


def contestants() -> dict[str, Save]:
    return {
        "torchsnapshot": snapshot_save,
        "torchsnapshot-async": snapshot_async,
        "oss": oss_save,
        "oss-async": oss_async,
    }


def snapshot_save(folder: Path, job: Job) -> None:
    from torchsnapshot import Snapshot  # noqa: PLC0415  may be missing: that is the error of this contestant alone

    Snapshot.take(str(folder), snapshot_state(job), replicated=replicated(job))
    sync_file_system(folder)


def snapshot_async(folder: Path, job: Job) -> Pending:
    from torchsnapshot import Snapshot  # noqa: PLC0415  as above

    pending = Snapshot.async_take(str(folder), snapshot_state(job), replicated=replicated(job))
    return Pending(lambda: (pending.wait(), sync_file_system(folder)))


def snapshot_state(job: Job) -> dict[str, Any]:
    """Local tensors: torchsnapshot knows FSDP2's only by what a rank holds of them."""
    from torchsnapshot import StateDict  # noqa: PLC0415  as above

    return {"state": StateDict(**job.local_tensors)}


def replicated(job: Job) -> list[str]:
    return ["**"] if job.workload.layout == "replicated" else []


def sync_file_system(folder: Path) -> None:
    """For torchsnapshot: it syncs none of its files, and a file for each tensor is too many to sync one by one."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed")
    finally:
        os.close(fd)


class Holder:
    """What the open-source ByteCheckpoint takes for a model: it asks for its state_dict only."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)


def oss_save(folder: Path, job: Job) -> None:
    _oss(folder, job, fast_saving=False)


def oss_async(folder: Path, job: Job) -> Pending:
    """Its only sign of completion is a callback on the first rank, in saves that have a step."""
    written = threading.Event()
    step = next(STEPS)
    _oss(folder, job, fast_saving=True, global_steps=step, callback=written.set)
    return Pending(written.wait if job.rank == 0 else lambda: None)


def _oss(folder: Path, job: Job, **options: Any) -> None:
    # Not this project: the environment that runs this file holds the other package of this name.
    oss = importlib.import_module("bytecheckpoint")
    framework = "fsdp2" if job.workload.layout == "sharded" else "ddp"
    state = {"model": Holder(job.tensors)}
    oss.save(str(folder), state, framework=framework, ignore_append_global_steps_to_folder=True, **options)
