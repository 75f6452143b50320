"""Optimizers that hold others over sharded modules: what ranks save together, other ranks and bare optimizers load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_shapes import FLAT, Container, MuonAndAdamW, Wrapped
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from distributed.workers import WorkerPool


def layers(seed: int, *, is_sharded: bool) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 5), nn.Linear(5, 3))
    if is_sharded:
        fully_shard(model[0])
        fully_shard(model)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(6, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def whole_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def wrapped(name: str, model: nn.Module) -> tuple[Any, list[torch.optim.Optimizer]]:
    if name == "attributes":
        both = MuonAndAdamW(model)
        return both, [both.muon, both.adam]
    container = Container([model], has_names=name == "names")
    return container, container.optimizers


def save_and_load(rank: int, world_size: int, path: str, name: str) -> list[bool]:
    def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return {"model": Wrapped(model), "optimizer": optimizer}

    model = layers(0, is_sharded=True)
    optimizer, inner = wrapped(name, model)
    steps(model, optimizer, 2)
    bcp.save(path, state(model, optimizer))
    expected = whole_state(model, inner)
    other = layers(1, is_sharded=True)
    restored, restored_inner = wrapped(name, other)
    bcp.load(path, state(other, restored))
    found = whole_state(other, restored_inner)
    if rank == 0:
        torch.save(expected, f"{path}.pt")
    return [found.keys() == expected.keys(), all(torch.equal(found[key], expected[key]) for key in expected)]


@pytest.mark.parametrize("name", ["names", "no names", "attributes"])
def test_sharded_state_goes_through_wrappers_and_into_bare_optimizers(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "run"
    assert workers.run(save_and_load, str(path), name, world_size=2) == [[True, True]] * 2
    model = layers(1, is_sharded=False)
    _, inner = wrapped(name, model)
    bcp.load(path, {"model": model, "optimizer": inner})
    expected, found = torch.load(f"{path}.pt"), whole_state(model, inner)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def flat_and_bare(rank: int, world_size: int, path: str) -> list[bool]:
    """Flat as a dict of DTensors, from a bare optimizer's checkpoint, and back."""
    model = layers(0, is_sharded=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 2)
    expected = whole_state(model, [optimizer])
    bcp.save(f"{path}/bare", {"model": model, "optimizer": optimizer})
    other = layers(1, is_sharded=True)
    restored = torch.optim.AdamW(other.parameters(), lr=0.3)
    flat = torch_state.get_optimizer_state_dict(other, restored, options=FLAT)
    bcp.load(f"{path}/bare", {"model": other, "optimizer": flat})
    bcp.save(f"{path}/flat", {"model": other, "optimizer": flat})
    last = layers(2, is_sharded=True)
    again = torch.optim.AdamW(last.parameters(), lr=0.5)
    bcp.load(f"{path}/flat", {"model": last, "optimizer": again})
    found = whole_state(last, [again])
    return [all(torch.equal(found[key], expected[key]) for key in expected), again.param_groups[0]["lr"] == 0.1]


def test_sharded_state_goes_from_bare_to_flat_and_back(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(flat_and_bare, str(tmp_path), world_size=2) == [[True, True]] * 2
