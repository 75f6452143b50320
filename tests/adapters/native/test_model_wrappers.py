"""Objects around modules whose state is that of the modules: saved and loaded as the modules themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_shapes import Container, Wrapped
from torch import nn
from training import Tied, mlp, same_module, same_value, train

import bytecheckpoint as bcp


def staged(seed: int) -> tuple[nn.Module, list[nn.Module]]:
    """A model, and its parts, whose parameters have the names of the whole model."""
    model = mlp(seed)
    return model, [nn.ModuleDict({"0": model[0], "1": model[1]}), nn.ModuleDict({"3": model[3]})]


@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("is_wrapped", [(True, True), (True, False), (False, True)])
def test_the_state_that_torchtitan_has_is_saved_and_loaded_as_it_is(
    tmp_path: Path, has_names: bool, is_wrapped: tuple[bool, bool]
) -> None:
    def state(parts: list[nn.Module], container: Container, *, is_wrapped: bool) -> dict[str, Any]:
        bare = {"model": parts, "optimizer": container.optimizers}
        return {"model": Wrapped(parts), "optimizer": container} if is_wrapped else bare

    (model, parts), (other, other_parts) = staged(0), staged(1)
    container, restored = Container(parts, has_names=has_names), Container(other_parts, has_names=has_names)
    train(model, [container], 3)
    bcp.save(tmp_path, state(parts, container, is_wrapped=is_wrapped[0]))
    assert {"model.3.weight", "optimizer.state.3.weight.exp_avg"} <= set(bcp.open(tmp_path).keys())
    bcp.load(tmp_path, state(other_parts, restored, is_wrapped=is_wrapped[1]))
    assert same_module(model, other)
    assert same_value(container.state_dict(), restored.state_dict())
    train(model, [container], 2, seed=1)
    train(other, [restored], 2, seed=1)
    assert same_module(model, other)


def test_a_wrapper_is_given_the_state_that_its_modules_have_got(tmp_path: Path) -> None:
    """It may keep a copy, as torchtitan's does: of a module on the meta device that has no memory."""
    model = mlp(0)
    bcp.save(tmp_path, {"model": Wrapped(model)})
    with torch.device("meta"):
        other = mlp(1)
    wrapper = Wrapped(other)
    bcp.load(tmp_path, {"model": wrapper})
    assert same_module(model, other)
    assert same_value(dict(model.state_dict()), wrapper.state_dict())


class Scaled(nn.Module):
    """Resets its scale when it loads the state of its first version, as torch's observers do."""

    _version = 2

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = torch.tensor([1.0])
        super()._load_from_state_dict(state, prefix, metadata, *args)


class Trainer:
    """A wrapper that has the state of its module from the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict)


def test_modules_in_a_wrapper_do_not_take_their_state_for_one_of_an_old_version(tmp_path: Path) -> None:
    model, other = Scaled(3.0), Scaled(5.0)
    bcp.save(tmp_path, {"model": Trainer(model)})
    bcp.load(tmp_path, {"model": Trainer(other)})
    assert same_module(model, other)


class Transposed:
    """A wrapper whose state has the weights of its module in another order."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.t() for name, tensor in self.module.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict({name: tensor.t() for name, tensor in state_dict.items()})


def test_a_wrapper_that_shows_another_view_of_the_weights_is_an_object(tmp_path: Path) -> None:
    model, other = (nn.Linear(3, 3, bias=False) for _ in range(2))
    bcp.save(tmp_path, {"model": Transposed(model)})
    bcp.load(tmp_path, {"model": Transposed(other)})
    assert same_module(model, other)
    assert torch.equal(bcp.open(tmp_path)["model.weight"][...], model.weight.t())


def test_ties_inside_a_wrapper_are_stored_once(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    bcp.save(tmp_path, {"model": Wrapped(model), "optimizer": torch.optim.Adam(model.parameters())})
    bcp.load(tmp_path, {"model": Wrapped(other)})
    assert same_module(model, other)
    assert other.head.weight is other.embedding.weight


class WithoutPrefix(Wrapped):
    """One that holds what torch.compile gives, and shows the names of the module that was compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.model: list[Any] = [torch.compile(model, backend="eager")]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.model:
            part._orig_mod.load_state_dict(state_dict)
        self.num_loads += 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_wrapper_gets_the_names_that_it_shows(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    bcp.save(tmp_path, {"model": WithoutPrefix(model)})
    wrapper = WithoutPrefix(other)
    bcp.load(tmp_path, {"model": wrapper})
    assert same_module(model, other)
    assert wrapper.num_loads == 1


class Same(Wrapped):
    """One that shows the names of what it holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.cached_state_dict = {}

    def state_dict(self) -> dict[str, Any]:
        return self._read()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in self.model:
            part.load_state_dict(state_dict)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as above
def test_names_with_a_prefix_that_an_object_shows_are_found(tmp_path: Path) -> None:
    """Earlier versions saved objects under the names that they show, and so does torch."""
    model, other, third = (torch.compile(mlp(seed), backend="eager") for seed in range(3))
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    assert "_orig_mod.0.weight" in model.state_dict()
    bcp.load(tmp_path / "model.pt", {"model": Same(other)})
    assert same_module(model, other)
    bcp.save(tmp_path / "whole", {"model": dict(model.state_dict())})
    report = bcp.load(tmp_path / "whole", {"model": Same(third)}, include="model._orig_mod.*")
    assert same_module(model, third)
    assert not report.unexpected


class Averages:
    """The names of a module's state, and other values: as a moving average of the weights has."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: value.clone() + 1 for name, value in model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow = dict(state_dict)


def test_an_object_with_values_of_its_own_is_not_taken_for_its_modules(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    averages, restored = Averages(model), Averages(other)
    bcp.save(tmp_path, {"model": model, "average": averages})
    bcp.load(tmp_path, {"model": other, "average": restored})
    assert same_value(averages.shadow, restored.shadow)
    assert same_module(model, other)


def test_the_advice_says_what_to_pass(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(bcp.CheckpointSaveError, match=r"the module itself, not its state_dict\(\)"):
        bcp.save(tmp_path, {"model": model.state_dict(), "optimizer": optimizer})
