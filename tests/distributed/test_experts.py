"""Experts on parts of the ranks: named by their number in the whole model on the rank that holds them, or DTensors on a
mesh that not all ranks belong to. Any number of groups loads what any other has saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint as bcp
from distributed.truth import value
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
NUM_EXPERTS = 6
WIDTH = 5


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)


class Mixture(nn.Module):
    """A router that all ranks have, experts by number, experts as one tensor, and a head that lies like the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleDict({str(number): Expert() for number in range(NUM_EXPERTS)})
        self.stacked = nn.Parameter(torch.empty(NUM_EXPERTS, 3, WIDTH))
        self.shared = nn.Parameter(torch.empty(7, WIDTH))


class Layout(NamedTuple):
    world_size: int
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each copy of the experts, which are dealt out to them."""
    submesh: tuple[int, ...]
    """The ranks that have the tensor which is a DTensor on a part of them only."""


LAYOUTS = {
    "one": Layout(1, ((0,),), (0,)),
    "three": Layout(3, ((0, 1, 2),), (1, 2)),
    "two of two": Layout(4, ((0, 1), (2, 3)), (2, 3)),
    "four": Layout(4, ((0, 1, 2, 3),), (0,)),
    "two, one idle": Layout(3, ((2, 0),), (2, 1, 0)),
}


def build(layout: Layout, rank: int, prefix: str) -> tuple[Mixture, torch.optim.Optimizer]:
    """What a rank holds, with values made of `prefix` and FQN."""
    model = Mixture()
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(value(prefix + fqn, parameter))
    meshes = [DeviceMesh("cpu", torch.tensor(group)) for group in layout.groups]
    submesh = DeviceMesh("cpu", torch.tensor(layout.submesh))
    own = next((mesh for mesh in meshes if mesh.get_coordinate() is not None), None)
    for number in range(NUM_EXPERTS):
        if own is None or number % own.size() != own.get_local_rank():
            del model.experts[str(number)]
    if own is None:
        del model.stacked
    else:
        model.stacked = spread(model.stacked, own)
    model.shared = spread(model.shared, submesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def spread(tensor: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None))


def true_part(fqn: str, tensor: Tensor) -> Tensor:
    """The true value of what this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return value(fqn, tensor)
    parts = value(fqn, torch.empty(tensor.shape)).chunk(tensor.device_mesh.size())
    coordinate = tensor.device_mesh.get_coordinate()
    is_held = coordinate is not None and coordinate[0] < len(parts)
    return parts[coordinate[0]] if coordinate is not None and is_held else torch.empty(tensor._local_tensor.shape)


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def fill_optimizer(model: Mixture, optimizer: torch.optim.Optimizer, prefix: str) -> None:
    optimizer.param_groups[0]["lr"] = 0.125
    for fqn, parameter in model.named_parameters():
        moment = torch.zeros_like(parameter.detach())
        local(moment).copy_(true_part(f"{prefix}{fqn}.exp_avg", moment))
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment}


def save_mixture(rank: int, world_size: int, path: str, name: str) -> None:
    model, optimizer = build(LAYOUTS[name], rank, "")
    fill_optimizer(model, optimizer, "")
    bcp.save(path, {"model": model, "optimizer": optimizer}, options=OPTIONS)


def load_mixtures(rank: int, world_size: int, root: str, name: str) -> dict[str, list[str]]:
    """By source: what is wrong on this rank, in a fresh optimizer and in one that has state."""
    problems: dict[str, list[str]] = {}
    for source in LAYOUTS:
        model, optimizer = build(LAYOUTS[name], rank, "noise.")
        state = {"model": model, "optimizer": optimizer}
        bcp.load(f"{root}/{source}", state)
        problems[source] = differences(model, optimizer)
        fill_optimizer(model, optimizer, "noise.")
        bcp.load(f"{root}/{source}", state)
        problems[source] += differences(model, optimizer)
    return problems


def differences(model: Mixture, optimizer: torch.optim.Optimizer) -> list[str]:
    tensors: dict[str, Tensor] = {}
    for fqn, parameter in model.named_parameters():
        tensors |= {fqn: parameter, f"{fqn}.exp_avg": optimizer.state[parameter]["exp_avg"]}
    found = [fqn for fqn, tensor in tensors.items() if not torch.equal(local(tensor), true_part(fqn, tensor))]
    found += [fqn for fqn, parameter in model.named_parameters() if optimizer.state[parameter]["step"] != 3]
    return found + (["lr"] if optimizer.param_groups[0]["lr"] != 0.125 else [])


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("experts"))
    for name, layout in LAYOUTS.items():
        workers.run(save_mixture, f"{root}/{name}", name, world_size=layout.world_size)
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_number_of_expert_groups_loads_what_any_other_has_saved(workers: WorkerPool, saved: str, name: str) -> None:
    found = workers.run(load_mixtures, saved, name, world_size=LAYOUTS[name].world_size)
    assert found == [{source: [] for source in LAYOUTS}] * LAYOUTS[name].world_size


def test_all_experts_are_in_every_checkpoint_once(saved: str) -> None:
    expected = {f"model.{fqn}" for fqn in Mixture().state_dict()}
    for name in LAYOUTS:
        checkpoint = bcp.open(f"{saved}/{name}")
        assert {fqn for fqn in checkpoint.keys() if fqn.startswith("model.")} == expected
        for fqn in Mixture().state_dict():
            assert torch.equal(checkpoint[f"model.{fqn}"][...], value(fqn, checkpoint[f"model.{fqn}"][...]))


def load_too_much(rank: int, world_size: int, path: str) -> Any:
    """A model with an expert that nobody has saved."""
    model = Mixture()
    model.experts["6"] = Expert()
    try:
        bcp.load(path, {"model": model})
    except bcp.CheckpointMismatchError as error:
        return str(error)
    return None


def test_an_expert_too_many_is_named(workers: WorkerPool, saved: str, tmp_path: Path) -> None:
    (text,) = workers.run(load_too_much, f"{saved}/four", world_size=1)
    assert "model.experts.6.up.weight: not in the checkpoint" in text
