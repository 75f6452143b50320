"""Optimizers that hold others, or keep state elsewhere than in `.state`: all of it is saved, or they are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_shapes import (
    Accelerated,
    Container,
    Hidden,
    InADict,
    Joined,
    Lookahead,
    Merged,
    MuonAndAdamW,
    Sharpness,
)
from torch import nn
from training import mlp, same_module, same_value, train

import bytecheckpoint as bcp
from bytecheckpoint.adapters.optimizers.inner_optimizers import held_optimizers

Optimizer = torch.optim.Optimizer


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


SHAPES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "a container of named parameters": lambda model: Container([model]),
    "a container without names": lambda model: Container([model], has_names=False),
    "attributes": MuonAndAdamW,
    "a dict of lists": InADict,
    "accelerate": lambda model: Accelerated(adam(model)),
    "accelerate around a container": lambda model: Accelerated(Container([model], has_names=False)),
    "state is a property": Joined,
    "state of its own beside that of the inner one": lambda model: Lookahead(adam(model)),
    "state of its own in one dict with that of the inner one": lambda model: Merged(adam(model)),
    "moments in an attribute": Hidden,
}
NAMED = [name for name in SHAPES if "its own" not in name and "moments" not in name]


def state_tensors(value: Any) -> int:
    """How many tensors a state_dict has, by another count than the library's."""
    if isinstance(value, torch.Tensor):
        return 1
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return sum(state_tensors(item) for _, item in items)


def stepped(build: Callable[[nn.Module], Optimizer], seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = mlp(seed)
    optimizer = build(model)
    train(model, [optimizer], 3, seed=seed)
    return model, optimizer


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
def test_no_state_of_an_optimizer_is_left_out(tmp_path: Path, name: str, is_fresh: bool) -> None:
    model, optimizer = stepped(SHAPES[name])
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    saved = [fqn for fqn in bcp.open(tmp_path).keys() if fqn.startswith("optimizer.")]
    assert len(saved) == state_tensors(optimizer.state_dict())
    other, restored = (mlp(1), None) if is_fresh else stepped(SHAPES[name], seed=1)
    restored = restored or SHAPES[name](other)
    report = bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert not report.missing
    assert not report.unexpected
    assert same_value(optimizer.state_dict(), restored.state_dict())
    train(model, [optimizer], 2, seed=7)
    train(other, [restored], 2, seed=7)
    assert same_module(model, other)


@pytest.mark.parametrize("name", NAMED)
def test_what_optimizers_inside_hold_goes_by_parameter(tmp_path: Path, name: str) -> None:
    """And into another wrapper, or into the optimizers themselves."""
    model, optimizer = stepped(SHAPES[name])
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    assert "optimizer.state.3.bias.exp_avg" in bcp.open(tmp_path).keys()
    other = mlp(1)
    restored = MuonAndAdamW(other) if name in {"attributes", "a dict of lists"} else Container([other])
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    train(model, [optimizer], 2, seed=7)
    train(other, [restored], 2, seed=7)
    assert same_module(model, other)


@pytest.mark.parametrize("name", SHAPES)
def test_a_save_before_the_first_step_makes_no_state(tmp_path: Path, name: str) -> None:
    model = mlp()
    optimizer = SHAPES[name](model)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    assert not any(each.state for each in [*held_optimizers(optimizer).inner, optimizer])
    assert all(parameter.grad is None for parameter in model.parameters())
    other = mlp(1)
    restored = SHAPES[name](other)
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    train(model, [optimizer], 2)
    train(other, [restored], 2)
    assert same_module(model, other)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in {"a dict of lists", "state is a property"}])
def test_a_state_dict_that_torch_saved_loads_into_a_wrapper(tmp_path: Path, name: str) -> None:
    """As it would be loaded by load_state_dict()."""
    model, optimizer = stepped(SHAPES[name])
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict(), "epoch": 3}, tmp_path / "all.pt")
    other = mlp(1)
    state: dict[str, Any] = {"model": other, "optimizer": SHAPES[name](other), "epoch": 0}
    bcp.load(tmp_path / "all.pt", state)
    assert same_value(optimizer.state_dict(), state["optimizer"].state_dict())
    train(model, [optimizer], 2, seed=7)
    train(other, [state["optimizer"]], 2, seed=7)
    assert same_module(model, other)


def test_a_state_dict_in_a_dict_that_torch_saved_loads_into_a_wrapper(tmp_path: Path) -> None:
    build = SHAPES["moments in an attribute"]
    (model, optimizer), other = stepped(build), mlp(1)
    torch.save({"model": model.state_dict(), "train": {"optimizer": optimizer.state_dict()}}, tmp_path / "all.pt")
    restored = build(other)
    bcp.load(tmp_path / "all.pt", {"model": other, "train": {"optimizer": restored}})
    assert same_value(optimizer.state_dict(), restored.state_dict())


class Pair:
    """Two optimizers as an object that is none itself."""

    def __init__(self, model: nn.Module) -> None:
        self.inside = MuonAndAdamW(model)

    def state_dict(self) -> dict[str, Any]:
        return self.inside.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inside.load_state_dict(state_dict)


def test_a_state_dict_that_torch_saved_loads_into_an_object_with_several(tmp_path: Path) -> None:
    (model, optimizer), other = stepped(MuonAndAdamW), mlp(1)
    torch.save({"optimizers": optimizer.state_dict(), "model": model.state_dict()}, tmp_path / "all.pt")
    pair = Pair(other)
    bcp.load(tmp_path / "all.pt", {"model": other, "optimizers": pair})
    assert same_value(optimizer.state_dict(), pair.state_dict())


def test_state_that_no_state_dict_has_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = stepped(lambda model: Sharpness(adam(model)))
    with pytest.raises(
        bcp.CheckpointSaveError,
        match=r"optimizer .*a Sharpness.*lacks 18 of the 24.*\(AdamW\).*pass the optimizers inside",
    ) as error:
        bcp.save(tmp_path / "new", {"model": model, "optimizer": optimizer})
    assert error.value.kind == "unsupported_value"
    assert not (tmp_path / "new").exists()


def test_a_wrapper_in_a_list_is_saved_by_what_it_holds(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, list[Optimizer]]:
        model = mlp(seed)
        first, *others = model.parameters()
        return model, [Accelerated(torch.optim.AdamW([first])), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    (model, optimizers), (other, restored) = build(0), build(1)
    train(model, optimizers, 2)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizers})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    train(model, optimizers, 1)
    train(other, restored, 1)
    assert same_module(model, other)
    hidden = Hidden(model)
    train(model, [hidden], 1)
    with pytest.raises(bcp.CheckpointSaveError, match=r"Hidden in a list.*name of its own"):
        bcp.save(tmp_path / "new", {"model": model, "optimizer": [hidden, Hidden(mlp())]})


def test_state_that_belongs_to_no_parameter_is_warned_of(tmp_path: Path) -> None:
    model, optimizer = stepped(adam)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bcp.save(tmp_path / "usual", {"model": model, "optimizer": optimizer})
    optimizer.state["counts"] = {"skipped": 3}
    with pytest.warns(UserWarning, match="AdamW has state under 'counts', which is no parameter; that is not saved"):
        bcp.save(tmp_path / "more", {"model": model, "optimizer": optimizer})
    del optimizer.state["counts"]
    optimizer.state[model] = {"factor": 1}
    with pytest.warns(UserWarning, match="has state under a Sequential, which is no parameter"):
        bcp.save(tmp_path / "by_module", {"model": model, "optimizer": optimizer})
    del optimizer.state[model]
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"more": 1})
    with pytest.warns(UserWarning, match=r"the AdamW has a hook of its state_dict\(\); that is not saved"):
        bcp.save(tmp_path / "hooked", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("is_first", [True, False], ids=["wrapper first", "wrapper last"])
def test_a_wrapper_beside_its_own_inner_optimizer_is_not_innermost(is_first: bool) -> None:
    inner = adam(mlp(0))
    outer, wrapper = Accelerated(inner), Accelerated(inner)
    outer.optimizers = [wrapper, inner] if is_first else [inner, wrapper]
    assert held_optimizers(outer).inner == [inner]


def test_an_inner_optimizer_that_knows_its_owner_is_innermost() -> None:
    inner = adam(mlp(0))
    outer = Accelerated(inner)
    inner.owner = outer
    assert held_optimizers(outer).inner == [inner]


@pytest.mark.parametrize("is_first", [True, False], ids=["wrapper first", "wrapper last"])
def test_state_of_a_wrapper_between_that_nothing_shows_is_not_lost(tmp_path: Path, is_first: bool) -> None:
    model, _ = stepped(adam)
    inner = adam(model)
    wrapper = Lookahead(inner)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrapper.step()
    outer = Accelerated(inner)
    outer.optimizers = [wrapper, inner] if is_first else [inner, wrapper]
    with pytest.raises(bcp.CheckpointSaveError, match="lacks"):
        bcp.save(tmp_path, {"model": model, "optimizer": outer})


def test_a_wrapper_around_one_with_state_of_its_own_is_saved_with_all(tmp_path: Path) -> None:
    model, optimizer = stepped(lambda model: Accelerated(Lookahead(adam(model))))
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, restored = stepped(lambda model: Accelerated(Lookahead(adam(model))), seed=1)
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert same_value(restored.state_dict(), optimizer.state_dict())


class Bare(Optimizer):
    """Holds another one, and never calls super().__init__(), so that it has no `.state`."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups


def test_a_held_wrapper_without_a_state_does_not_hinder_a_save(tmp_path: Path) -> None:
    model, inner = stepped(adam)
    outer = Accelerated(inner)
    outer.optimizers = [Bare(inner)]
    bcp.save(tmp_path, {"model": model, "optimizer": outer})
    assert {name.rpartition(".")[2] for name in bcp.open(tmp_path).keys()} >= {"exp_avg", "exp_avg_sq"}
