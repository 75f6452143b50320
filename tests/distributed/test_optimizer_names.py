"""Optimizers whose ranks hold different modules, or different parameters of one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import bytecheckpoint as bcp
from distributed.workers import WorkerPool


def momentum(rank: int, module: nn.Module, *, is_filled: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5 if is_filled else 0.1, momentum=0.5)
    for index, parameter in enumerate(module.parameters()):
        if is_filled:
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 10.0 * rank + index)
    return optimizer


def a_module_of_each_rank(rank: int, world_size: int, path: str) -> list[float]:
    name = ["encoder", "decoder"][rank]
    module = nn.Linear(2, 2)
    bcp.save(path, {name: module, "optimizer": momentum(rank, module, is_filled=True)})
    restored = momentum(rank, module, is_filled=False)
    bcp.load(path, {name: module, "optimizer": restored})
    return [restored.state[parameter]["momentum_buffer"].max().item() for parameter in module.parameters()]


def test_ranks_with_different_modules_keep_both_their_optimizer_states(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(a_module_of_each_rank, str(tmp_path), world_size=2) == [[0.0, 1.0], [10.0, 11.0]]


def stages_with_a_tied_embedding(rank: int, world_size: int, path: str) -> list[Any]:
    def stage(*, is_filled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleDict({"embedding": nn.Linear(2, 2, bias=False), str(rank): nn.Linear(2, 2)})
        nn.init.ones_(module["embedding"].weight)
        return module, momentum(rank, module[str(rank)], is_filled=is_filled)

    def with_embedding(module: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        optimizer.param_groups[0]["params"].insert(0, module["embedding"].weight)
        return {"model": module, "optimizer": optimizer}

    bcp.save(path, with_embedding(*stage(is_filled=True)))
    module, restored = stage(is_filled=False)
    bcp.load(path, with_embedding(module, restored))
    buffers = [
        restored.state[parameter]["momentum_buffer"].max().item() for parameter in module[str(rank)].parameters()
    ]
    return [restored.param_groups[0]["lr"], *buffers]


def test_groups_that_share_only_their_first_parameter_are_united(workers: WorkerPool, tmp_path: Path) -> None:
    found = workers.run(stages_with_a_tied_embedding, str(tmp_path), world_size=2)
    assert found == [[0.5, 0.0, 1.0], [0.5, 10.0, 11.0]]


def scalar_dtensor_state(rank: int, world_size: int, path: str) -> tuple[bool, bool, float]:
    mesh = init_device_mesh("cpu", (world_size,))

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Module()
        module.gain = nn.Parameter(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]))
        return module, torch.optim.AdamW(module.parameters())

    module, optimizer = build()
    module.gain.grad = torch.ones_like(module.gain)
    optimizer.step()
    bcp.save(path, {"model": module, "optimizer": optimizer})
    module, optimizer = build()
    bcp.load(path, {"model": module, "optimizer": optimizer})
    state = optimizer.state[module.gain]
    return isinstance(state["step"], DTensor), isinstance(state["exp_avg"], DTensor), state["step"].item()


def test_the_step_of_a_parameter_without_dimensions_is_a_plain_tensor(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(scalar_dtensor_state, str(tmp_path), world_size=2) == [(False, True, 1.0)] * 2
