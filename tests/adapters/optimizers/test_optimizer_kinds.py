"""State that another kind of optimizer has saved is a mismatch; a name of a class alone is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from low_bit import int8, same
from optimizer_shapes import Accelerated
from test_optimizers import OPTIMIZERS
from torch import nn
from training import mlp, same_module, same_optimizer, train

import bytecheckpoint as bcp
from bytecheckpoint.adapters.optimizers.hyperparameters import kind_of

Optimizer = torch.optim.Optimizer
Build = Callable[[nn.Module], Optimizer]

BUILDS: dict[str, Build] = dict(OPTIMIZERS)
if hasattr(torch.optim, "Muon"):
    BUILDS["muon"] = lambda model: torch.optim.Muon([each for each in model.parameters() if each.dim() == 2])


class Lion(Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def step(self, _closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                parameter.data.sub_(state["exp_avg"].sign(), alpha=0.01)


class Adam8bit(Optimizer):
    """The keys of 8-bit optimizers of bitsandbytes, which are known by the module and the class of their step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0})

    def step(self, _closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "state1": torch.zeros_like(parameter), "state2": torch.zeros_like(parameter)}
            state["step"] += 1
            state["state1"].add_(1)

    step.__module__, step.__qualname__ = "bitsandbytes.optim.optimizer", "Optimizer8bit.step"


class AdamOfSubclasses(torch.optim.AdamW):
    """Keeps moments as tensor subclasses for matrices, as the low-bit optimizers of torchao do."""

    def step(self, _closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(parameter)}
            self.state[parameter] |= {"exp_avg_sq": self.moment_of(parameter)}

    def moment_of(self, parameter: torch.Tensor) -> torch.Tensor:
        is_matrix = parameter.dim() == 2
        return int8(1, tuple(parameter.shape), block=parameter.shape[1]) if is_matrix else torch.ones_like(parameter)


class AdamOfTorchao(AdamOfSubclasses):
    """The same, known to be an optimizer of torchao."""

    def step(self, _closure: Any = None) -> None:
        AdamOfSubclasses.step(self)

    step.__module__, step.__qualname__ = "torchao.optim.adam", "_AdamBase.step"


BUILDS["lion"] = Lion
WITHOUT_STAND_INS = list(BUILDS)
BUILDS["bitsandbytes"] = Adam8bit
BUILDS["subclasses"] = lambda model: AdamOfSubclasses(model.parameters(), lr=0.01)
BUILDS["torchao"] = lambda model: AdamOfTorchao(model.parameters(), lr=0.01)


def saved(path: Path, name: str, num_steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = mlp(0)
    optimizer = BUILDS[name](model)
    train(model, [optimizer], num_steps)
    bcp.save(path, {"model": model, "optimizer": optimizer})
    return model, optimizer


@pytest.mark.parametrize("name", WITHOUT_STAND_INS)
def test_what_torch_keeps_is_what_is_expected_of_it(name: str) -> None:
    model = mlp()
    optimizer = BUILDS[name](model)
    train(model, [optimizer], 3)
    kind = kind_of(optimizer)
    if kind is None:
        assert isinstance(optimizer, Lion)
        return
    for state in filter(None, optimizer.state.values()):
        assert kind.needed <= state.keys() <= kind.needed | kind.others


OTHERS = [
    ("sgd", "adamw"),
    ("sgd", "rmsprop"),
    ("sgd_momentum", "adamw"),
    ("adamw", "sgd"),
    ("adamw", "sgd_momentum"),
    ("rmsprop", "sgd_momentum"),
    ("sgd_momentum", "rmsprop"),
    ("adamw", "adamax"),
    ("adam", "nadam"),
    ("nadam", "adam"),
    ("adagrad", "adadelta"),
    ("adafactor", "adamw"),
    ("adamw", "adafactor"),
    ("lion", "adamw"),
    ("sgd", "lion"),
    ("lbfgs", "sgd"),
    ("adamw", "bitsandbytes"),
    ("bitsandbytes", "adamw"),
    ("bitsandbytes", "torchao"),
    ("torchao", "bitsandbytes"),
    ("torchao", "adamw"),
    ("subclasses", "adamw"),
]


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize(("source", "target"), OTHERS)
def test_another_kind_of_optimizer_is_refused(tmp_path: Path, source: str, target: str, is_fresh: bool) -> None:
    saved(tmp_path, source)
    model = mlp(1)
    optimizer = BUILDS[target](model)
    if not is_fresh:
        train(model, [optimizer], 1)
    before, groups = len(optimizer.state), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"another kind of optimizer.*strict=False") as error:
        bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert error.value.kind == "conflict"
    assert len(optimizer.state) == before
    assert [dict(group).keys() for group in optimizer.param_groups] == [group.keys() for group in groups]
    report = bcp.load(tmp_path, {"model": model, "optimizer": optimizer}, strict=False)
    assert any("another kind" in text for text in report.mismatched)
    assert [dict(group).keys() for group in optimizer.param_groups] == [group.keys() for group in groups]
    train(model, [optimizer], 1)


@pytest.mark.parametrize(("source", "target"), [("subclasses", "torchao"), ("torchao", "subclasses")])
def test_low_bit_state_loads_into_a_fresh_optimizer_that_may_keep_it(tmp_path: Path, source: str, target: str) -> None:
    saved(tmp_path, source)
    model = mlp(1)
    optimizer = BUILDS[target](model)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    weight = next(model.parameters())
    assert same(optimizer.state[weight]["exp_avg_sq"], optimizer.moment_of(weight))


def test_low_bit_state_of_a_parameter_that_is_left_out_is_no_clash(tmp_path: Path) -> None:
    saved(tmp_path, "subclasses")
    model = mlp(1)
    optimizer = BUILDS["adamw"](model)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer}, exclude="*.weight*")
    assert all(parameter.dim() == 1 for parameter in optimizer.state)


def test_the_message_says_what_there_is_and_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, "sgd_momentum")
    model = mlp()
    told = (
        r"optimizer: saved by another kind of optimizer: for 0\.weight, 0\.bias, 1\.weight and 3 more the checkpoint "
        r"has dampening, momentum, nesterov, and AdamW has amsgrad, betas\. .*leave it out"
    )
    with pytest.raises(bcp.CheckpointMismatchError, match=told):
        bcp.load(tmp_path, {"model": model, "optimizer": BUILDS["adamw"](model)})
    optimizer = BUILDS["adamw"](model)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer}, exclude="optimizer.*")
    assert not optimizer.state
    assert "momentum" not in optimizer.param_groups[0]


@pytest.mark.parametrize(("source", "target"), [("adam", "nadam"), ("rprop", "rmsprop"), ("sgd_momentum", "rmsprop")])
def test_another_kind_is_refused_also_from_before_its_first_step(tmp_path: Path, source: str, target: str) -> None:
    saved(tmp_path, source, 0)
    state = fresh(target)
    train(state["model"], [state["optimizer"]], 1)
    with pytest.raises(bcp.CheckpointMismatchError, match="another kind of optimizer"):
        bcp.load(tmp_path, state)
    report = bcp.load(tmp_path, state, strict=False)
    assert any("another kind" in text for text in report.mismatched)
    assert state["optimizer"].state


def test_another_kind_is_refused_also_where_include_names_what_is_below_the_optimizer(tmp_path: Path) -> None:
    saved(tmp_path, "sgd_momentum")
    model = mlp()
    state = {"model": model, "optimizer": BUILDS["adamw"](model)}
    with pytest.raises(bcp.CheckpointMismatchError, match="another kind of optimizer"):
        bcp.load(tmp_path, state, include=["model.*", "optimizer.*"])
    report = bcp.load(tmp_path, state, include=["model.*", "optimizer.*"], strict=False)
    assert any("another kind" in text for text in report.mismatched)


class Derived(torch.optim.AdamW):
    """A class of its own that steps as its base does."""


ALIKE: list[tuple[str, Build]] = [
    ("adamw", lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
    ("adamw", lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
    ("adamw", lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True)),
    ("adamw_amsgrad", lambda model: torch.optim.AdamW(model.parameters())),
    ("adamw", lambda model: Derived(model.parameters())),
    ("adamw", lambda model: Accelerated(torch.optim.AdamW(model.parameters()))),
    ("adam", lambda model: torch.optim.AdamW(model.parameters())),
    ("adam", lambda model: torch.optim.RAdam(model.parameters())),
    ("sgd", lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    ("sgd_momentum", lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
    ("rmsprop", lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9)),
    ("adamw", Lion),
]


@pytest.mark.parametrize(("source", "build"), ALIKE)
def test_the_same_kind_under_another_name_or_with_other_settings_loads(
    tmp_path: Path, source: str, build: Build
) -> None:
    model, optimizer = saved(tmp_path, source)
    other = mlp(1)
    restored = build(other)
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert len(restored.state) == len(optimizer.state)
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    if isinstance(restored, Derived):
        train(model, [optimizer], 1)
        train(other, [restored], 1)
        assert same_module(model, other)
        assert same_optimizer(optimizer, restored)


@pytest.mark.parametrize("name", WITHOUT_STAND_INS)
def test_a_part_of_a_parameters_state_is_loaded_only_if_the_next_step_runs_with_it(tmp_path: Path, name: str) -> None:
    _, optimizer = saved(tmp_path, name, 3)
    kept = {key: value for state in optimizer.state.values() for key, value in state.items()}
    for key, value in kept.items():
        exclude = f"optimizer.state.*.{key}{'.*' if isinstance(value, list) else ''}"
        state = fresh(name)
        if steps_without(tmp_path, name, key):
            bcp.load(tmp_path, state, exclude=exclude)
            train(state["model"], [state["optimizer"]], 1)
            continue
        before = len(state["optimizer"].state)
        with pytest.raises(bcp.CheckpointMismatchError, match=rf"would lack {key}, without which") as error:
            bcp.load(tmp_path, state, exclude=exclude)
        assert error.value.kind == "conflict"
        report = bcp.load(tmp_path, state, exclude=exclude, strict=False)
        assert any("would lack" in text for text in report.mismatched)
        assert len(state["optimizer"].state) == before
        train(state["model"], [state["optimizer"]], 1)
        bcp.load(tmp_path, state, exclude=exclude)  # with state of its own it keeps what is left out


def fresh(name: str) -> dict[str, Any]:
    model = mlp(1)
    return {"model": model, "optimizer": BUILDS[name](model)}


def steps_without(path: Path, name: str, key: str) -> bool:
    """Returns True if an optimizer makes this key of its state before its first step, where the state lacks it, or does
    without.
    """
    state = fresh(name)
    if any(key in of_parameter for of_parameter in state["optimizer"].state.values()):
        return True
    bcp.load(path, state)
    for of_parameter in state["optimizer"].state.values():
        of_parameter.pop(key, None)
    if key == "H_diag":  # LBFGS makes it in most steps, but not in all
        return False
    try:
        train(state["model"], [state["optimizer"]], 1)
    except (KeyError, AttributeError, TypeError, AssertionError):
        return False
    return True


def test_a_moment_that_the_loaded_hyperparameters_do_without_may_be_left_out(tmp_path: Path) -> None:
    saved(tmp_path, "adamw_amsgrad")
    state = fresh("adamw")
    globs = ["*.max_exp_avg_sq", "*.values.amsgrad"]
    bcp.load(tmp_path, state, exclude=globs)
    train(state["model"], [state["optimizer"]], 1)
    with pytest.raises(bcp.CheckpointMismatchError, match="would lack max_exp_avg_sq"):
        bcp.load(tmp_path, fresh("adamw"), exclude=globs[0])
    saved(tmp_path / "plain", "adamw")
    with pytest.raises(bcp.CheckpointMismatchError, match="would lack max_exp_avg_sq"):
        bcp.load(tmp_path / "plain", fresh("adamw_amsgrad"), exclude="optimizer.groups.*")


def test_state_of_a_parameter_that_is_left_out_is_torn_by_the_hyperparameters_of_its_group(tmp_path: Path) -> None:
    saved(tmp_path, "adamw_amsgrad")
    state = fresh("adamw")
    bcp.load(tmp_path, state, exclude="model.0.*")  # the next step makes all of its state
    train(state["model"], [state["optimizer"]], 1)
    trained = fresh("adamw")
    train(trained["model"], [trained["optimizer"]], 1)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"state of 0\.weight, 0\.bias would lack max_exp_avg_sq"):
        bcp.load(tmp_path, trained, exclude="model.0.*")
    bcp.load(tmp_path, trained, exclude=["model.0.*", "*.values.amsgrad"])
    train(trained["model"], [trained["optimizer"]], 1)


class Decayed(torch.optim.Optimizer):
    """An optimizer that is not torch's, and makes its state once."""

    def step(self, _closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"average": torch.zeros_like(parameter), "old": torch.zeros_like(parameter)}
            state["average"].lerp_(parameter.grad, 0.1)
            parameter.data.sub_(state["average"], alpha=0.01)


def test_an_unknown_optimizer_without_state_takes_all_of_it_or_nothing(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, target = (Decayed(each.parameters(), {"lr": 0.1}) for each in (model, other))
    train(model, [optimizer], 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    state = {"model": other, "optimizer": target}
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"state of 0\.weight, .* and 3 more would lack average, with"
    ):
        bcp.load(tmp_path, state, include=["model.*", "*.old"])
    bcp.load(tmp_path, state, include=["model.*", "*.groups.*"])
    train(other, [target], 1)
    bcp.load(tmp_path, state, exclude="*.old")
