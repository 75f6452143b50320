"""A load changes tensors in place, and torch's autograd notices it as after `copy_`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import bytecheckpoint as bcp

CHANGED = "modified by an inplace operation|has been modified inplace"


def squared(tensor: torch.Tensor) -> torch.Tensor:
    """Its backward pass needs the values of the forward pass."""
    return (tensor * tensor).sum()


def targets() -> dict[str, torch.Tensor]:
    base = torch.zeros(8)
    return {
        "plain": torch.zeros(8, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(8)),
        "view": torch.nn.Parameter(base).detach()[2:6].requires_grad_(),
        "strided": torch.zeros(8, 3, requires_grad=True).detach()[:, 1].requires_grad_(),
        "transposed": torch.zeros(3, 5).T.requires_grad_(),
    }


@pytest.mark.parametrize("name", targets())
@pytest.mark.parametrize("options", [bcp.LoadOptions(), bcp.LoadOptions(verify=False)], ids=["verified", "straight"])
def test_a_backward_pass_over_values_of_before_is_refused(tmp_path: Path, name: str, options: bcp.LoadOptions) -> None:
    tensor = targets()[name]
    bcp.save(tmp_path, {name: torch.full(tensor.shape, 7.0)})
    loss = squared(tensor)
    bcp.load(tmp_path, {name: tensor}, options=options)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    squared(tensor).backward()
    assert tensor.grad is not None
    assert tensor.grad.unique().tolist() == [14.0]


def test_many_small_parameters_and_a_buffer_of_a_module(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in range(100)))
    bcp.save(tmp_path, {"model": model})
    before = {name: tensor._version for name, tensor in model.state_dict().items()}
    bcp.load(tmp_path, {"model": model})
    assert [name for name, tensor in model.state_dict().items() if tensor._version <= before[name]] == []


def test_a_load_into_inference_tensors_among_others(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"inference": torch.ones(3), "other": torch.ones(3)})
    with torch.inference_mode():
        state = {"inference": torch.zeros(3)}
    state["other"] = torch.zeros(3)
    bcp.load(tmp_path, state)
    assert [tensor.tolist() for tensor in state.values()] == [[1.0] * 3] * 2
    assert state["other"]._version > 0


@pytest.mark.usefixtures("group")
def test_a_dtensor(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor: Any = distribute_tensor(torch.zeros(4), mesh, [Replicate()]).requires_grad_()
    bcp.save(tmp_path, {"t": torch.full((4,), 7.0)})
    whole, local = squared(tensor), squared(tensor.to_local())
    bcp.load(tmp_path, {"t": tensor})
    for loss in (whole, local):
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def test_a_load_that_changes_nothing_counts_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"t": torch.ones(3), "other": torch.ones(2)})
    tensor = torch.zeros(3)
    with pytest.raises(bcp.CheckpointMismatchError):
        bcp.load(tmp_path, {"t": tensor, "other": torch.zeros(5)})
    assert tensor._version == 0
