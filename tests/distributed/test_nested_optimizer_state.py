"""Tensors in dicts and lists of an optimizer's state, where parameters are DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
SHAPE = (5, 4)


def spread(tensor: Tensor, world_size: int) -> Tensor:
    if world_size == 1:
        return tensor
    return distribute_tensor(tensor, init_device_mesh("cpu", (world_size,)), [Shard(0)], src_data_rank=None)


def optimizer_of(world_size: int, value: float | None) -> torch.optim.Optimizer:
    """With nested state where there is a value."""
    weight = nn.Parameter(spread(torch.zeros(SHAPE), world_size))
    optimizer = torch.optim.SGD([("weight", weight)])
    if value is not None:
        optimizer.state[weight] = state_of(world_size, value)
    return optimizer


def state_of(world_size: int, value: float) -> dict[str, Any]:
    moment = torch.arange(20.0).view(SHAPE) + value
    factors = [torch.full((3,), value), spread(moment + 1, world_size)]
    return {"graft": {"moment": spread(moment, world_size), "factors": factors}, "count": int(value)}


def save_nested(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"optimizer": optimizer_of(world_size, 1)}, options=OPTIONS)


def load_nested(rank: int, world_size: int, path: str, own: float | None) -> bool:
    """Returns True if all tensors come back, cut as the parameter is where they have its shape."""
    optimizer = optimizer_of(world_size, own)
    bcp.load(path, {"optimizer": optimizer})
    (state,) = optimizer.state.values()
    expected = state_of(world_size, 1)
    pairs = [(state["graft"]["moment"], expected["graft"]["moment"])]
    pairs += zip(state["graft"]["factors"], expected["graft"]["factors"], strict=True)
    return state["count"] == 1 and all(is_alike(found, of_saved) for found, of_saved in pairs)


def is_alike(found: Tensor, expected: Tensor) -> bool:
    if isinstance(found, DTensor) and isinstance(expected, DTensor):
        return found.placements == expected.placements and torch.equal(found._local_tensor, expected._local_tensor)
    return type(found) is type(expected) and torch.equal(found, expected)


@pytest.mark.parametrize("own", [None, 7.0])
@pytest.mark.parametrize(("source", "target"), [(2, 2), (2, 3), (1, 2), (2, 1)])
def test_nested_state_of_the_parameters_shape_is_cut_as_the_parameter(
    workers: WorkerPool, tmp_path: Path, source: int, target: int, own: float | None
) -> None:
    workers.run(save_nested, str(tmp_path), world_size=source)
    assert workers.run(load_nested, str(tmp_path), own, world_size=target) == [True] * target


def load_beside_whole(rank: int, world_size: int, path: str) -> bool:
    optimizer = optimizer_of(world_size, None)
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.state[weight] = state_of(1, 7)
    bcp.load(path, {"optimizer": optimizer})
    found = optimizer.state[weight]["graft"]["moment"]
    return is_alike(found, state_of(1, 1)["graft"]["moment"])


def test_nested_state_that_the_optimizer_has_whole_stays_whole(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_nested, str(tmp_path), world_size=2)
    assert workers.run(load_beside_whole, str(tmp_path), world_size=2) == [True, True]


def load_into_meta(rank: int, world_size: int, path: str) -> bool:
    optimizer = optimizer_of(world_size, None)
    (weight,) = optimizer.param_groups[0]["params"]
    on_meta = nn.Parameter(DTensor(weight._local_tensor.to("meta"), weight._spec, requires_grad=True))
    target = torch.optim.SGD([("weight", on_meta)])
    bcp.load(path, {"optimizer": target})
    found = target.state[on_meta]["graft"]["moment"]
    return is_alike(found, state_of(world_size, 1)["graft"]["moment"])


def test_nested_state_of_a_parameter_on_the_meta_device_gets_memory(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_nested, str(tmp_path), world_size=2)
    assert workers.run(load_into_meta, str(tmp_path), world_size=2) == [True, True]


def cut_otherwise(rank: int, world_size: int, value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    moment, factor = torch.arange(20.0).view(SHAPE) + value, torch.arange(3.0) + value
    replicated = DTensor.from_local(moment, mesh, [Replicate()], run_check=False)
    return {"graft": {"moment": replicated, "factor": distribute_tensor(factor, mesh, [Shard(0)], src_data_rank=None)}}


def resume_cut_otherwise(rank: int, world_size: int, path: str) -> list[bool]:
    optimizer = optimizer_of(world_size, None)
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.state[weight] = cut_otherwise(rank, world_size, 1)
    bcp.save(path, {"optimizer": optimizer}, options=OPTIONS)
    optimizer.state[weight] = cut_otherwise(rank, world_size, 7)
    bcp.load(path, {"optimizer": optimizer})
    found, expected = optimizer.state[weight]["graft"], cut_otherwise(rank, world_size, 1)["graft"]
    return [is_alike(found[key], expected[key]) for key in expected]


def test_nested_state_that_the_optimizer_has_cut_otherwise_stays_cut_so(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(resume_cut_otherwise, str(tmp_path), world_size=2) == [[True, True]] * 2


def resume_factors(rank: int, world_size: int, path: str, is_saved: bool) -> bool:
    """Returns True if the factors of a fresh optimizer are whole, also those of a square matrix."""
    model = nn.Module()
    for name, shape in (("square", (4, 4)), ("other", (6, 4))):
        model.register_parameter(name, nn.Parameter(spread(torch.ones(shape), world_size)))
    optimizer = torch.optim.SGD(model.parameters())
    factors = {each: [torch.full((length, length), 2.0) for length in each.shape] for each in model.parameters()}
    if is_saved:
        optimizer.state |= {each: {"factors": of_each} for each, of_each in factors.items()}
        bcp.save(path, {"model": model, "optimizer": optimizer}, options=OPTIONS)
        optimizer.state.clear()
    bcp.load(path, {"model": model, "optimizer": optimizer})
    pairs = ((optimizer.state[each]["factors"], of_each) for each, of_each in factors.items())
    return all(is_alike(a, b) for found, of_each in pairs for a, b in zip(found, of_each, strict=True))


@pytest.mark.parametrize("source", [1, 2])
def test_factors_of_a_square_matrix_are_whole_as_those_of_others(
    workers: WorkerPool, tmp_path: Path, source: int
) -> None:
    workers.run(resume_factors, str(tmp_path), True, world_size=source)
    assert workers.run(resume_factors, str(tmp_path), False, world_size=2) == [True, True]


def resume_factored_matrices(rank: int, world_size: int, path: str) -> list[bool]:
    """Returns whether a fresh optimizer has the moment cut, of a matrix where it is factored, and of a vector."""
    model = nn.Module()
    for name, shape in (("matrix", (6, 4)), ("vector", (4,))):
        model.register_parameter(name, nn.Parameter(spread(torch.ones(shape), world_size)))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.matrix] = {"moment": [torch.ones(6), torch.ones(4)]}
    optimizer.state[model.vector] = {"moment": [torch.ones_like(model.vector.detach())]}
    bcp.save(path, {"model": model, "optimizer": optimizer}, options=OPTIONS)
    optimizer.state.clear()
    bcp.load(path, {"model": model, "optimizer": optimizer})
    return [isinstance(optimizer.state[each]["moment"][0], DTensor) for each in model.parameters()]


def test_moments_of_vectors_are_cut_where_those_of_matrices_are_factored(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(resume_factored_matrices, str(tmp_path), world_size=2) == [[False, True]] * 2
