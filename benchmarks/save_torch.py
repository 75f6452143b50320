"""How torch's own means and safetensors save in benchmarks/save.py. DCP syncs its files; the others are synced here,
inside the clock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from save_timing import Pending, Save
from save_workloads import Job
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def contestants() -> dict[str, Save]:
    """Staging memory is kept for as long as the returned functions."""
    return {
        "dcp": dcp_save(threads=1),
        "dcp-2": dcp_save(threads=2),
        "dcp-async": dcp_async(None),
        "dcp-cached": dcp_async(stager(is_shared=False)),
        # Memory that the process shares is kept as well: without it each save sends the state through a pipe.
        "dcp-process": dcp_async(stager(is_shared=True), AsyncCheckpointerType.PROCESS),
        "torch.save": torch_save,
        "safetensors": safetensors_save,
    }


def stager(*, is_shared: bool) -> AsyncStager:
    """One that keeps its memory from save to save. What it leaves out needs CUDA."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=is_shared, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def dcp_save(*, threads: int) -> Save:
    def save(folder: Path, job: Job) -> None:
        writer = dcp.FileSystemWriter(folder, thread_count=threads)
        dcp.save(dict(job.tensors), storage_writer=writer)

    return save


def dcp_async(kept: AsyncStager | None, checkpointer: AsyncCheckpointerType = AsyncCheckpointerType.THREAD) -> Save:
    def begin(folder: Path, job: Job) -> Pending:
        options: dict[str, Any] = {"async_checkpointer_type": checkpointer, "async_stager": kept}
        if checkpointer is AsyncCheckpointerType.THREAD:
            return pending(
                dcp.async_save(dict(job.tensors), checkpoint_id=folder, process_group=job.background_group, **options)
            )
        with group_of_any_size():
            return pending(dcp.async_save(dict(job.tensors), checkpoint_id=folder, **options))

    return begin


def pending(response: Any) -> Pending:
    """What async_save returns depends on its stager."""
    if isinstance(response, Future):
        return Pending(response.result)
    return Pending(response.upload_completion.result, response.staging_completion.result)


@contextmanager
def group_of_any_size() -> Iterator[None]:
    """DCP starts its process from within a process group only."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_save(folder: Path, job: Job) -> None:
    """Each rank what it holds; where all hold the same, one for all."""
    if is_writer(job):
        path = folder / f"{job.rank}.pt"
        torch.save(job.local_tensors, path)
        sync(path)
    job.barrier()


def safetensors_save(folder: Path, job: Job) -> None:
    """As torch_save."""
    if is_writer(job):
        path = folder / f"{job.rank}.safetensors"
        save_file(job.local_tensors, path)
        sync(path)
    job.barrier()


def is_writer(job: Job) -> bool:
    return job.rank == 0 or job.workload.layout != "replicated"


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
