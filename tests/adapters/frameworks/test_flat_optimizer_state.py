"""Flat memory and checkpoints that do not hold quite what its optimizer state needs: what fits is loaded, the rest is
refused by name and left as it was. And flat parameters that are tied, or were.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from training import Tied, same_value

import bytecheckpoint as bcp

pytestmark = pytest.mark.usefixtures("group")

State = dict[str, Any]


class Net(nn.Module):
    """A body, and a head that another task has in another size."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def plain(model: nn.Module) -> nn.Module:
    return model


def apart(model: nn.Module) -> nn.Module:
    """Each parameter is flat memory of its own."""
    return flattened(model, use_orig_params=True)


def together(model: nn.Module) -> nn.Module:
    """All parameters lie in one buffer."""
    return flattened(model, use_orig_params=False)


def flattened(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # of FSDP1's old age, and of one rank being few
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def trained(layout: Callable[[nn.Module], nn.Module], *, num_classes: int = 4, num_steps: int = 0) -> State:
    model = layout(Net(num_classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def states(state: State) -> list[dict[str, Any]]:
    """Those of the parameters, or of the one flat tensor, in order."""
    optimizer = state["optimizer"]
    return [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("layout", [plain, apart])
def test_a_parameter_that_is_refused_gets_nothing_of_its_state(tmp_path: Path, layout: Any, num_steps: int) -> None:
    bcp.save(tmp_path, trained(plain, num_classes=5, num_steps=7))
    loaded = trained(layout, num_steps=num_steps)
    before = copy.deepcopy(states(loaded))
    shapes = r"state\.head\.weight\.exp_avg: of a parameter of shape \[5, 3\] in the checkpoint, \[4, 3\] in the state"
    with pytest.raises(bcp.CheckpointMismatchError, match=shapes):
        bcp.load(tmp_path, loaded)
    assert same_value(states(loaded), before)
    bcp.load(tmp_path, loaded, strict=False)
    body, head = states(loaded)
    assert body["step"] == 7
    assert same_value(head, before[1])


@pytest.mark.parametrize("source", [plain, apart, together])
@pytest.mark.parametrize("layout", [plain, apart, together])
def test_state_from_before_the_first_step_is_none_at_all(tmp_path: Path, source: Any, layout: Any) -> None:
    saved, loaded = trained(source), trained(layout, num_steps=2)
    bcp.save(tmp_path, saved)
    bcp.load(tmp_path, loaded)
    assert not any(states(loaded))
    for state in (saved, loaded):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(2, 3)).sum().backward()
        state["optimizer"].step()
    assert saved["model"](torch.ones(2, 3)).equal(loaded["model"](torch.ones(2, 3)))


@pytest.mark.parametrize("layout", [plain, apart])
def test_state_that_include_and_exclude_leave_out_stays_where_the_checkpoint_has_none(
    tmp_path: Path, layout: Any
) -> None:
    bcp.save(tmp_path, trained(plain))
    loaded = trained(layout, num_steps=2)
    bcp.load(tmp_path, loaded, include=["model.*", "optimizer.groups.*"])
    assert [state["step"] for state in states(loaded)] == [2, 2]
    bcp.load(tmp_path, loaded, exclude="model.head.*")
    body, head = states(loaded)
    assert (body, head["step"]) == ({}, 2)


def nested(*, use_orig_params: bool) -> State:
    """The optimizer has the head, which lies in the outer unit, before the body."""
    model = Net(3)
    model.body = flattened(model.body, use_orig_params=use_orig_params)
    model = flattened(model, use_orig_params=use_orig_params)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def save_by_position(path: Path) -> State:
    saved = trained(plain, num_classes=3, num_steps=2)
    torch.save({name: each.state_dict() for name, each in saved.items()}, path)
    return saved


def test_state_by_position_is_refused_where_flat_memory_has_an_order_of_its_own(tmp_path: Path) -> None:
    save_by_position(tmp_path / "x.pt")
    loaded = nested(use_orig_params=False)
    with pytest.raises(bcp.CheckpointMismatchError, match="its parameters have no names in the checkpoint"):
        bcp.load(tmp_path / "x.pt", loaded)
    assert not loaded["optimizer"].state


def test_state_by_position_goes_to_flat_parameters_that_stand_in_their_own_place(tmp_path: Path) -> None:
    saved = save_by_position(tmp_path / "x.pt")
    loaded = nested(use_orig_params=True)
    bcp.load(tmp_path / "x.pt", loaded)
    for of_flat, of_parameter in zip(states(loaded), states(saved), strict=True):
        assert torch.equal(of_flat["exp_avg"], of_parameter["exp_avg"])


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_parameter_that_is_refused_has_no_say_in_what_a_buffer_has_one_of(tmp_path: Path, num_steps: int) -> None:
    saved = trained(plain, num_classes=5, num_steps=7)
    moments = saved["optimizer"].state[saved["model"].body.weight]
    saved["optimizer"].state[saved["model"].head.weight]["step"].fill_(9)
    bcp.save(tmp_path, saved)
    loaded = trained(together, num_steps=num_steps)
    before = states(loaded)[0].get("exp_avg", torch.zeros(21)).clone()
    bcp.load(tmp_path, loaded, strict=False)
    [state] = states(loaded)
    assert state["step"] == 7
    assert torch.equal(state["exp_avg"][:9], moments["exp_avg"].flatten())
    assert torch.equal(state["exp_avg"][9:], before[9:])


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("layout", [apart, together])
def test_tensors_in_lists_have_no_place_in_flat_state(tmp_path: Path, layout: Any, num_steps: int) -> None:
    saved = trained(plain, num_steps=1)
    saved["optimizer"].state[saved["model"].head.weight]["past"] = [torch.ones(4, 3), torch.tensor(2.0)]
    bcp.save(tmp_path, saved)
    loaded = trained(layout, num_steps=num_steps)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"state\.head\.weight\.past\.0: a tensor inside a list"):
        bcp.load(tmp_path, loaded)
    bcp.load(tmp_path, loaded, strict=False)
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in states(loaded))
    assert all(state["step"] == 1 for state in states(loaded))


def test_flat_weights_that_are_no_longer_tied_share_nothing_of_their_state(tmp_path: Path) -> None:
    model, untied = Tied(), apart(Tied(is_tied=False))
    optimizer, restored = (torch.optim.Optimizer(each.parameters(), {"lr": 0.1}) for each in (model, untied))
    optimizer.state[model.embedding.weight]["seen"] = [1, 2]
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": untied, "optimizer": restored})
    first, second = (state["seen"] for state in restored.state.values() if "seen" in state)
    assert first == second == [1, 2]
    assert first is not second


def only_head() -> nn.Module:
    return nn.ModuleDict({"head": nn.Linear(4, 6, bias=False)})


@pytest.mark.parametrize(
    "stages",
    [
        lambda: [apart(Tied()), only_head()],
        lambda: [together(Tied()), only_head()],
        lambda: [Tied(), apart(only_head())],
        lambda: [apart(Tied()), apart(only_head())],
    ],
    ids=["tied and flat", "tied in a buffer", "other one flat", "both flat"],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_stage_may_not_use_the_name_of_a_flat_tied_weight(tmp_path: Path, stages: Any, is_reversed: bool) -> None:
    model = stages()[::-1] if is_reversed else stages()
    with pytest.raises(bcp.CheckpointSaveError, match=r"model\.head\.weight is the name of two tensors"):
        bcp.save(tmp_path, {"model": model})
