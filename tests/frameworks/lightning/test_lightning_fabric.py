"""Fabric, saving and loading with this library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning import (
    BcpFabricDDPStrategy,
    BcpFabricFSDPStrategy,
    BcpFabricMixin,
    BcpStrategyMixin,
)
from frameworks.going_on import go_on

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class OneProcess(BcpFabricMixin, SingleDeviceStrategy):
    """A strategy of a user's own."""


def started(seed: int, **options: Any) -> tuple[Fabric, dict[str, Any]]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=OneProcess(**options))
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    return fabric, {"model": model, "optimizer": optimizer, "step": 0, "rng": bcp.RngState()}


def train(fabric: Fabric, state: dict[str, Any], num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = state["model"](torch.full((2, 4), 0.1 * state["step"])).square().sum()
        fabric.backward(loss)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] += 1
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("async_save", [True, False])
def test_a_loop_of_fabric_goes_on_bit_for_bit(tmp_path: Path, *, async_save: bool) -> None:
    fabric, state = started(1, async_save=async_save)
    train(fabric, state, 3)
    fabric.save(tmp_path / "three", state)
    expected = train(fabric, state, 3)
    _settled(fabric, tmp_path / "three")
    other, fresh = started(2)
    assert other.load(tmp_path / "three", fresh) == {}
    assert fresh["step"] == 3
    assert train(other, fresh, 3) == expected
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    bcp.load(tmp_path / "three", {"model": net})


def test_a_save_at_the_same_path_replaces_what_is_there(tmp_path: Path) -> None:
    fabric, state = started(1)
    for step in (1, 2):
        state["step"] = step
        fabric.save(tmp_path / "x", state)
    _, fresh = started(1)
    fabric.load(tmp_path / "x", fresh)
    assert fresh["step"] == 2


def test_a_load_returns_plain_data_that_was_not_asked_for(tmp_path: Path) -> None:
    fabric, state = started(1)
    fabric.save(tmp_path / "x", state)
    rest = fabric.load(tmp_path / "x", {"model": state["model"]})
    assert rest["step"] == 0
    whole = fabric.load(tmp_path / "x")
    assert torch.equal(whole["model"]["0.weight"], state["model"].module[0].weight)


def test_a_filter_leaves_tensors_out(tmp_path: Path) -> None:
    fabric, state = started(1)
    fabric.save(tmp_path / "x", {"model": state["model"]}, filter={"model": lambda name, _: "bias" not in name})
    assert list(_settled(fabric, tmp_path / "x")) == ["model.0.weight", "model.2.weight"]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model.0.bias"):
        fabric.load(tmp_path / "x", {"model": state["model"]})
    fabric.load(tmp_path / "x", {"model": state["model"]}, strict=False)
    with pytest.raises(bcp.CheckpointMismatchError, match="filter"):
        fabric.save(tmp_path / "y", state, filter={"optimizer": lambda *_: True})


def test_an_optimizer_may_have_parameters_that_a_filter_leaves_out(tmp_path: Path) -> None:
    fabric, state = started(2)
    train(fabric, state, 2)
    groups = [set(group) for group in state["optimizer"].param_groups]
    fabric.save(tmp_path / "x", state, filter={"model": lambda name, _: "bias" not in name})
    found = _settled(fabric, tmp_path / "x")
    assert "model.0.bias" not in found
    assert "optimizer.state.0.bias.exp_avg" in found
    assert [set(group) for group in state["optimizer"].param_groups] == groups
    _, other = started(0)
    fabric.load(tmp_path / "x", other, strict=False)
    for ours, theirs in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
        stored, loaded = state["optimizer"].state[ours], other["optimizer"].state[theirs]
        assert torch.equal(stored["exp_avg"], loaded["exp_avg"])


def test_a_filter_lets_optimizers_stand_anywhere_in_the_state(tmp_path: Path) -> None:
    fabric, state = started(2)
    train(fabric, state, 1)
    model, optimizer = state["model"], state["optimizer"]
    state = {"model": model, "all": [optimizer], "phase": {"first": optimizer}, "again": optimizer}
    fabric.save(tmp_path / "x", state, filter={"model": lambda name, _: "bias" not in name})
    found = _settled(fabric, tmp_path / "x")
    assert {f"{fqn}.state.0.bias.exp_avg" for fqn in ("all", "phase.first", "again")} <= set(found)
    assert "param_names" not in optimizer.param_groups[0]


class Quantized(nn.Linear):
    """A layer with extra state, as quantized and float8 layers have."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def test_a_filter_keeps_extra_state(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=OneProcess())
    model, other = (fabric.setup(nn.Sequential(Quantized(2, 2), nn.Linear(2, 2))) for _ in range(2))
    model.module[0].scale = {"amax": [3.0], "history": torch.ones(2)}
    fabric.save(tmp_path / "x", {"model": model}, filter={"model": lambda name, _: not name.startswith("1.")})
    assert list(_settled(fabric, tmp_path / "x")) == ["model.0.weight", "model.0.bias"]
    fabric.load(tmp_path / "x", {"model": other}, strict=False)
    assert other.module[0].scale["amax"] == [3.0]
    assert torch.equal(other.module[0].scale["history"], torch.ones(2))
    assert torch.equal(other.module[0].weight, model.module[0].weight)


def _settled(fabric: Fabric, path: Path) -> bcp.Checkpoint:
    fabric.strategy._bcp_saves.settle(timeout_s=60)
    return bcp.open(path)


def test_a_single_object_has_no_name(tmp_path: Path) -> None:
    fabric, state = started(1)
    fabric.save(tmp_path / "x", state)
    with pytest.raises(bcp.CheckpointMismatchError, match="has no name"):
        fabric.load_raw(tmp_path / "x", state["model"])


def test_ready_strategies_are_fabrics_own() -> None:
    for strategy in (BcpFabricDDPStrategy(async_save=False), BcpFabricFSDPStrategy(state_dict_type="full")):
        assert isinstance(strategy, BcpFabricMixin)
        assert strategy.bcp_options.overwrite


@pytest.mark.parametrize(
    ("mixin", "theirs"),
    [
        (BcpStrategyMixin, lightning.pytorch.strategies.DeepSpeedStrategy),
        (BcpFabricMixin, lightning.fabric.strategies.DeepSpeedStrategy),
    ],
)
def test_the_strategy_of_deepspeed_is_refused(mixin: type, theirs: type) -> None:
    mixed = type("Mine", (mixin, theirs), {})
    with pytest.raises(bcp.CheckpointMismatchError, match="Mine is DeepSpeed's strategy"):
        mixed()


def test_doctor_says_what_a_folder_of_fabric_is_and_its_line_loads_it(tmp_path: Path) -> None:
    fabric, state = started(1, async_save=False)
    train(fabric, state, 2)
    fabric.save(tmp_path, state)
    other, empty = started(2)
    go_on(tmp_path, "Lightning's Fabric", fabric=other, state=empty)
    assert empty["step"] == 2
    assert torch.equal(empty["model"].state_dict()["0.weight"], state["model"].state_dict()["0.weight"])
