"""Groups so large that messages go through the leaders of blocks: played with blocks of two ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from faults.seams import SAVE_PHASES, Seen, before, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=20)
SHORT = bcp.SaveOptions(timeout_s=2)


def save_in_blocks(rank: int, world_size: int, path: str, failing_rank: int, phase: str) -> tuple[Seen | None, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytecheckpoint.ranks.BLOCK_RANKS", 2)
        bcp.save(path, state_of(rank, 1.0), step=1, options=OPTIONS)
        with before(phase, raising(RuntimeError("boom"))) if rank == failing_rank else nullcontext():
            error = seen(lambda: bcp.save(path, state_of(rank, 2.0), step=2, options=OPTIONS))
        dist.barrier()
        bcp.save(path, state_of(rank, 3.0), step=3, async_save=True, options=OPTIONS).result()
        return error, loads_as(path, rank, 3.0)


@pytest.mark.parametrize("phase", ["planning", "writing"])
@pytest.mark.parametrize("failing_rank", [0, 2, 3])
def test_a_failure_in_a_block_fails_all_and_the_next_save_works(
    workers: WorkerPool, tmp_path: Path, failing_rank: int, phase: str
) -> None:
    outcomes = workers.run(save_in_blocks, str(tmp_path), failing_rank, SAVE_PHASES[phase], world_size=4)
    assert len({error for error, _ in outcomes}) == 1
    error, _ = outcomes[0]
    assert error is not None
    assert (error.kind, error.ranks) == ("rank_failed", (failing_rank,))
    assert all(is_loaded for _, is_loaded in outcomes)
    assert bcp.steps(tmp_path) == [1, 3]


def save_without_one(rank: int, world_size: int, path: str, absent: int) -> Seen | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytecheckpoint.ranks.BLOCK_RANKS", 2)
        error = None
        if rank != absent:
            error = seen(lambda: bcp.save(path, state_of(rank, 1.0), step=1, options=SHORT))
        dist.barrier()
        bcp.save(path, state_of(rank, 2.0), step=2, options=OPTIONS)
        return error


@pytest.mark.parametrize("absent", [2, 3])
def test_a_rank_of_a_block_that_misses_a_save_is_named(workers: WorkerPool, tmp_path: Path, absent: int) -> None:
    errors = workers.run(save_without_one, str(tmp_path), absent, world_size=4)
    assert errors[absent] is None
    for error in (error for rank, error in enumerate(errors) if rank != absent):
        assert error is not None
        assert (error.kind, error.ranks) == ("rank_missing", (absent,))
    assert bcp.steps(tmp_path) == [2]
