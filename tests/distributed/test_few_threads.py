"""A rank whose process can have no more threads: what it says to the others it says on the caller's thread."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from faults.seams import Seam, Seen, before, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from bytecheckpoint.runtime import threads
from bytecheckpoint.saving import write
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
STARTING = Seam(threads.ThreadPool, "begin")
WRITING = Seam(write, "write_image")


def save_and_load(rank: int, world_size: int, path: str, short_rank: int, is_async: bool) -> tuple[Seen | None, bool]:
    """Of a save that fails on a rank, and of one that does not."""
    no_more = RuntimeError("can't start new thread")
    with before(STARTING, raising(no_more)) if rank == short_rank else nullcontext():
        with before(WRITING, raising(OSError(5, "boom"))) if rank == 1 else nullcontext():
            error = seen(lambda: bcp.save(path, state_of(rank, 1.0), async_save=is_async, options=OPTIONS).result())
        dist.barrier()
        bcp.save(path, state_of(rank, 2.0), async_save=is_async, options=OPTIONS).result()
        return error, loads_as(path, rank, 2.0)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("short_rank", [0, 1])
def test_a_rank_that_can_have_no_more_threads_saves_loads_and_hears_of_failures(
    workers: WorkerPool, tmp_path: Path, short_rank: int, is_async: bool
) -> None:
    outcomes = workers.run(save_and_load, str(tmp_path), short_rank, is_async, world_size=2)
    assert [has_loaded for _, has_loaded in outcomes] == [True, True]
    errors = [error for error, _ in outcomes]
    assert errors[0] == errors[1]
    assert (errors[0].kind, errors[0].ranks) == ("rank_failed", (1,))
    assert "boom" in errors[0].message
