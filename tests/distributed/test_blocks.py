"""Groups so large that messages go through the leaders of blocks: played with blocks of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.seams import EXCHANGE_PHASES, SAVE_PHASES, SOCKET_PHASES, Seen, before, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from bytecheckpoint.distributed import ranks as ranks_module
from bytecheckpoint.loading import exchange as exchange_module
from bytecheckpoint.planner import read_division
from distributed.played_hosts import on_host
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
SHORT = bcp.SaveOptions(timeout_s=5)


def save_in_blocks(rank: int, world_size: int, path: str, failing_rank: int, phase: str) -> tuple[Seen | None, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "BLOCK_RANKS", 2)
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
        patch.setattr(ranks_module, "BLOCK_RANKS", 2)
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


ON = bcp.LoadOptions(exchange="on", timeout_s=60)
NUM_TENSORS = 7


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(300, 401, generator=generator) for number in range(NUM_TENSORS)}


@contextmanager
def in_twos(rank: int) -> Iterator[None]:
    """Messages go through blocks of two ranks, each on a host of its own, of which no more than two read together."""
    with pytest.MonkeyPatch.context() as patch, on_host(rank):
        patch.setattr(ranks_module, "BLOCK_RANKS", 2)
        patch.setattr(read_division, "HOSTS_TOGETHER", 2)
        patch.setattr(exchange_module, "GRACE_S", 0.3)
        yield


def load_in_twos(rank: int, world_size: int, path: str) -> tuple[bool, int, int]:
    state = tensors_of(2)
    with in_twos(rank):
        report = bcp.load(path, state, options=ON)
    same = all(torch.equal(state[name], tensor) for name, tensor in tensors_of(1).items())
    return same, report.num_bytes_read, report.num_bytes_received


def test_each_group_that_reads_together_reads_once(workers: WorkerPool, tmp_path: Path) -> None:
    bcp.save(tmp_path, tensors_of(1))
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(1).values())
    results = workers.run(load_in_twos, str(tmp_path), world_size=5)
    assert [same for same, _, _ in results] == [True] * 5
    assert sum(num_read for _, num_read, _ in results) == 3 * num_bytes
    assert sum(num_received for _, _, num_received in results) == 2 * num_bytes
    assert all(num_read + num_received == num_bytes for _, num_read, num_received in results)


def fail_to_load_in_twos(
    rank: int, world_size: int, path: str, failing_rank: int, phase: str
) -> tuple[Seen | None, bool]:
    state = tensors_of(2)
    with in_twos(rank):
        with before(phase, raising(RuntimeError("boom"))) if rank == failing_rank else nullcontext():
            error = seen(lambda: bcp.load(path, state, options=ON))
        dist.barrier()
        bcp.load(path, state, options=ON)
    return error, all(torch.equal(state[name], tensor) for name, tensor in tensors_of(1).items())


@pytest.mark.parametrize(
    ("failing_rank", "phase"),
    [
        *product([1, 2, 4], ["matching", "planning what to exchange", "reading"]),
        *product([1, 2], ["taking in"]),  # rank 4 takes nothing from others
    ],
)
def test_a_load_that_fails_in_a_block_fails_on_all_and_the_next_one_works(
    workers: WorkerPool, tmp_path: Path, failing_rank: int, phase: str
) -> None:
    """Rank 1 is a member of the coordinator's block, 2 the leader of another one, 4 alone in its own."""
    bcp.save(tmp_path, tensors_of(1))
    outcomes = workers.run(
        fail_to_load_in_twos, str(tmp_path), failing_rank, (EXCHANGE_PHASES | SOCKET_PHASES)[phase], world_size=5
    )
    errors = [error for error, _ in outcomes]
    assert errors == [errors[0]] * 5
    assert errors[0] is not None
    assert (errors[0].kind, errors[0].ranks) == ("rank_failed", (failing_rank,))
    assert "boom" in errors[0].message
    assert all(is_loaded for _, is_loaded in outcomes)
