"""Extra state of modules, which may differ from rank to rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool


class WithExtraState(torch.nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def save_and_load(rank: int, world_size: int, path: str, numel: int) -> tuple[float, int]:
    torch.manual_seed(0)
    bcp.save(path, {"model": WithExtraState(torch.full((numel,), float(rank)))})
    model = WithExtraState(torch.zeros(3))
    bcp.load(path, {"model": model})
    return model.value.unique().item(), model.value.numel()


@pytest.mark.parametrize("numel", [5, 100_000])
def test_every_rank_gets_back_its_own(workers: WorkerPool, tmp_path: Path, numel: int) -> None:
    assert workers.run(save_and_load, str(tmp_path), numel, world_size=2) == [(0.0, numel), (1.0, numel)]


def load_on_more(rank: int, world_size: int, path: str) -> str:
    try:
        bcp.load(path, {"model": WithExtraState(torch.zeros(3))})
    except bcp.CheckpointMismatchError as error:
        return error.message
    return "loaded"


def test_a_rank_that_has_none_is_told(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_and_load, str(tmp_path), 5, world_size=2)
    messages = workers.run(load_on_more, str(tmp_path), world_size=3)
    assert all("model._extra_state" in message for message in messages)
