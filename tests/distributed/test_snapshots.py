"""Snapshots of several ranks at once, each of which changes its part of the state as soon as it may, while the ranks
train with collectives of their own.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.seams import seen, state_of
from sample_tensors import bits_of
from snapshot_cases import KINDS, OPTIONS, differing, mutating, running, save, saved_bits, slowed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from distributed.workers import WorkerPool


def save_while_training(rank: int, world_size: int, path: str, kind: str) -> list[bool]:
    """Whether what was saved at each step is what the ranks held at that step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.randn(16, 256)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    saved = []
    for step in range(3):
        expected = {f"model.{name}": bits_of(whole(value)) for name, value in model.state_dict().items()}
        with slowed(0.05):
            handle = bcp.save(
                path, {"model": model, "optimizer": optimizer}, step=step, async_save=True, options=OPTIONS[kind]
            )
            for _ in range(4):
                train()
            handle.result(30)
        found = saved_bits(Path(path, f"step_{step:08}"))
        saved.append(not differing({name: found.get(name, b"") for name in expected}, expected))
        dist.barrier()
    return saved


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize("kind", [*KINDS, "waves"])
def test_a_sharded_model_that_trains_on_is_saved_as_it_was(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    for saved in workers.run(save_while_training, str(tmp_path), kind, world_size=2):
        # Buffers differ from rank to rank once each has seen data of its own: rank 0 decides about those.
        assert saved == [True] * 3


def save_and_mutate(rank: int, world_size: int, path: str, kind: str) -> None:
    state: dict[str, Any] = {f"rank{rank}": torch.full((6 << 20,), float(rank)), "plain": {"step": 1}}
    total = torch.ones(1000)
    stop = threading.Event()
    group = dist.new_group(backend="gloo")

    def collect() -> None:
        for _ in range(200):
            dist.all_reduce(total, group=group)

    with slowed(0.05), running([collect], stop):
        handle = save(path, state, kind)
        with mutating({"x": state[f"rank{rank}"]}):
            handle.result(100)


@pytest.mark.parametrize("kind", OPTIONS)
def test_ranks_change_their_state_at_once_while_collectives_run(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    workers.run(save_and_mutate, str(tmp_path), kind, world_size=3)
    for rank in range(3):
        assert bcp.open(tmp_path)[f"rank{rank}"][:].unique().tolist() == [float(rank)]


def save_with_different_kinds(rank: int, world_size: int, path: str) -> None:
    save(path, state_of(rank, 1.0), ("copy", "lazy", "waves")[rank]).result(30)


def test_ranks_need_not_take_the_same_kind(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_with_different_kinds, str(tmp_path), world_size=3)
    assert sorted(bcp.open(tmp_path).keys())[:4] == ["all", "own.rank0", "own.rank1", "own.rank2"]


class StepsWithoutHooks(torch.optim.SGD):
    """Its step, which a trainer has put in place of the class's, runs no hooks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.step = lambda: None  # type: ignore[method-assign]


def refuse_to_be_lazy(rank: int, world_size: int, path: str) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = (StepsWithoutHooks if rank == 1 else torch.optim.SGD)(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    errors = [seen(lambda: save(path, state, "lazy").result(20)) for _ in range(3)]
    save(path, state, "copy").result(20)
    return errors


def test_an_optimizer_that_cannot_wait_on_one_rank_is_refused_on_all_at_every_save(
    workers: WorkerPool, tmp_path: Path
) -> None:
    for errors in workers.run(refuse_to_be_lazy, str(tmp_path), world_size=2):
        assert [(error.kind, error.ranks) for error in errors] == [("unsupported_value", (1,))] * 3
        assert all("optimizer is an optimizer" in error.message for error in errors)
