"""Saves of torch itself and of safetensors. DCP syncs its files; the others are synced here, within the measured
time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from saves.timing import Pending, Save
from saves.training import Job
from shared.rank_files import is_writer, write_safetensors, write_torch
from shared.states import HeldState


def candidates() -> dict[str, Save]:
    """Returns functions that keep their staging memory from save to save."""
    return {
        "dcp": dcp_save(threads=1),
        "dcp-2": dcp_save(threads=2),
        "dcp-async": dcp_async(None),
        "dcp-cached": dcp_async(caching_stager(is_shared=False)),
        # Memory that the process shares is cached as well: without it each save sends the state through a pipe.
        "dcp-process": dcp_async(caching_stager(is_shared=True), AsyncCheckpointerType.PROCESS),
        "torch.save": synced(write_torch),
        "safetensors": synced(write_safetensors),
    }


def caching_stager(*, is_shared: bool) -> AsyncStager:
    """Returns one that keeps its memory from save to save. The options that are off need CUDA."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=is_shared, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def dcp_save(*, threads: int) -> Save:
    def save(folder: Path, job: Job) -> None:
        writer = dcp.FileSystemWriter(folder, thread_count=threads)
        dcp.save(dict(job.held.tensors), storage_writer=writer)

    return save


def dcp_async(stager: AsyncStager | None, checkpointer: AsyncCheckpointerType = AsyncCheckpointerType.THREAD) -> Save:
    def begin(folder: Path, job: Job) -> Pending:
        options: dict[str, Any] = {"async_checkpointer_type": checkpointer, "async_stager": stager}
        if checkpointer is AsyncCheckpointerType.THREAD:
            return pending(
                dcp.async_save(
                    dict(job.held.tensors), checkpoint_id=folder, process_group=job.background_group, **options
                )
            )
        with group_of_any_size():
            return pending(dcp.async_save(dict(job.held.tensors), checkpoint_id=folder, **options))

    return begin


def pending(response: Any) -> Pending:
    """Wraps what async_save returns, which depends on its stager."""
    if isinstance(response, Future):
        return Pending(response.result)
    return Pending(response.upload_completion.result, response.staging_completion.result)


@contextmanager
def group_of_any_size() -> Iterator[None]:
    """Makes a process group for one process: DCP starts its process only from within a group."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synced(write: Callable[[Path, HeldState], Path]) -> Save:
    def save(folder: Path, job: Job) -> None:
        path = write(folder, job.held)
        if is_writer(job.held):
            sync(path)
        job.held.barrier()

    return save


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
