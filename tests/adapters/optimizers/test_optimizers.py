"""Optimizers and schedulers go on, bit for bit, as if they had never stopped, however their parameters are grouped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import low_bit
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from training import Tied, mlp, same_module, same_optimizer, same_value, train

import bytecheckpoint as bcp
from bytecheckpoint.adapters.optimizers import optimizer as optimizer_entry

# Schedulers warn where they are stepped in another order than torch's tutorial has.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")

Optimizer = torch.optim.Optimizer
Build = Callable[[nn.Module], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adam_foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "adam_fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "adam_tensor_lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "adam_maximize": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, maximize=True, weight_decay=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "adamw_amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "sgd_momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "sgd_nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, lr_decay=0.1),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.01),
    "adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "rmsprop_centered": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True, momentum=0.9),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01, t0=2),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4),
}


def shifted(model: nn.Module, build: Build) -> tuple[nn.Module, Optimizer]:
    return model, build(model)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
def test_training_goes_on_with_the_same_bits(tmp_path: Path, build: Build, is_fresh: bool) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = build(model), build(other)
    train(model, [optimizer], 3)
    if not is_fresh:
        train(other, [restored], 2, seed=5)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert same_optimizer(optimizer, restored)
    assert same_module(model, other)
    train(model, [optimizer], 2, seed=1)
    train(other, [restored], 2, seed=1)
    assert same_module(model, other)
    assert same_optimizer(optimizer, restored)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_that_has_not_stepped(tmp_path: Path, build: Build) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = build(model), build(other)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    train(model, [optimizer], 2)
    train(other, [restored], 2)
    assert same_module(model, other)
    assert same_optimizer(optimizer, restored)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_load_removes_the_state_of_parameters_that_had_none(tmp_path: Path, build: Build) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = build(model), build(other)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    train(other, [restored], 2, seed=5)
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert same_optimizer(optimizer, restored)
    train(model, [optimizer], 2)
    train(other, [restored], 2)
    assert same_module(model, other)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_beside_adamw_as_a_list(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, list[Optimizer]]:
        model = mlp(seed)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
        return model, [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]

    (model, optimizers), (other, restored) = build(0), build(1)
    train(model, optimizers, 3)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizers})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    train(model, optimizers, 2)
    train(other, restored, 2)
    assert same_module(model, other)
    assert all(map(same_optimizer, optimizers, restored))


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}


def rates_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: (group["lr"], group["betas"]) for group in groups for parameter in group["params"]}


def grouped(model: nn.Module, groups: Sequence[tuple[Sequence[int], float]]) -> Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": [parameters[index] for index in indices], "lr": lr} for indices, lr in groups])


REGROUPED = {
    "same": [([0, 1, 2], 0.1), ([3, 4, 5], 0.2)],
    "other order": [([5, 3, 4], 0.0), ([2, 0, 1], 0.0)],
    "split": [([0], 0.0), ([1, 2], 0.0), ([3, 5], 0.0), ([4], 0.0)],
    "first parameter elsewhere": [([1, 2], 0.0), ([4, 5, 3], 0.0), ([0], 0.0)],
}


@pytest.mark.parametrize("groups", REGROUPED.values(), ids=REGROUPED.keys())
def test_state_follows_the_parameter_into_other_groups(tmp_path: Path, groups: Any) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = grouped(model, REGROUPED["same"]), grouped(other, groups)
    train(model, [optimizer], 3)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert same_value(state_by_name(model, optimizer), state_by_name(other, restored))
    assert rates_by_name(model, optimizer) == rates_by_name(other, restored)


def test_groups_that_were_one_share_no_hyperparameters(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    bcp.save(tmp_path, {"model": model, "optimizer": Optimizer(model.parameters(), {"milestones": [1, 2]})})
    groups = [{"params": other[0].parameters()}, {"params": [*other[1].parameters(), *other[3].parameters()]}]
    restored = Optimizer(groups, {"milestones": [0]})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    first, second = (group["milestones"] for group in restored.param_groups)
    assert first == second == [1, 2]
    assert first is not second


def test_a_group_of_parameters_with_different_hyperparameters_is_a_conflict(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    bcp.save(tmp_path, {"model": model, "optimizer": grouped(model, REGROUPED["same"])})
    restored = grouped(other, [(range(6), 0.5)])
    with pytest.raises(bcp.CheckpointMismatchError, match="different values of 'lr'") as error:
        bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert error.value.kind == "conflict"
    assert restored.param_groups[0]["lr"] == 0.5
    bcp.load(tmp_path, {"model": other, "optimizer": restored}, strict=False)
    assert restored.param_groups[0]["lr"] == 0.5


def test_merged_groups_with_the_same_hyperparameters(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = grouped(model, [([0, 1, 2], 0.1), ([3, 4, 5], 0.1)]), grouped(other, [(range(6), 0.5)])
    train(model, [optimizer], 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert restored.param_groups[0]["lr"] == 0.1
    assert same_value(state_by_name(model, optimizer), state_by_name(other, restored))


def test_parameters_without_state_and_frozen_ones(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, Optimizer]:
        model = mlp(seed)
        model[0].requires_grad_(False)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    (model, optimizer), (other, restored) = build(0), build(1)
    model.append(nn.Linear(3, 3))  # in the model, in no optimizer
    other.append(nn.Linear(3, 3))
    train(model, [optimizer], 2)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert same_optimizer(optimizer, restored)
    assert len(restored.state) == 4
    assert same_module(model, other)


def test_a_tensor_learning_rate_keeps_its_tensor_and_a_number_stays_a_number(tmp_path: Path) -> None:
    model = mlp()
    bcp.save(
        tmp_path / "tensor", {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))}
    )
    bcp.save(tmp_path / "number", {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.25)})
    rate = torch.tensor(0.1)
    with_tensor, with_number = (
        torch.optim.Adam(model.parameters(), lr=rate),
        torch.optim.Adam(model.parameters(), lr=0.1),
    )
    for name, expected in (("tensor", 0.5), ("number", 0.25)):
        bcp.load(tmp_path / name, {"model": model, "optimizer": with_tensor})
        bcp.load(tmp_path / name, {"model": model, "optimizer": with_number})
        assert with_tensor.param_groups[0]["lr"] is rate
        assert rate.item() == expected
        assert with_number.param_groups[0]["lr"] == expected
        assert type(with_number.param_groups[0]["lr"]) is float


class Estimating(torch.optim.Optimizer):
    """Estimates a distance in its group, in float32 after the first step, as Prodigy does under FSDP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"d": 1e-6})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        group = self.param_groups[0]
        for parameter in group["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)
        group["d"] = (1 + group["d"] * 0.1) * torch.tensor(0.3)


def test_a_number_that_steps_of_an_unknown_optimizer_made_a_tensor_comes_back_as_one(tmp_path: Path) -> None:
    states = [{"model": model, "optimizer": Estimating(model)} for model in (mlp(0), mlp(1))]
    train(states[0]["model"], [states[0]["optimizer"]], 2)
    bcp.save(tmp_path, states[0])
    bcp.load(tmp_path, states[1])
    groups = [state["optimizer"].param_groups[0] for state in states]
    assert type(groups[1]["d"]) is torch.Tensor
    assert torch.equal(groups[1]["d"], groups[0]["d"])
    groups[0]["d"].zero_()
    assert groups[1]["d"]


@pytest.mark.parametrize("rates", [(0.5, 0.25), (torch.tensor(0.5), torch.tensor(0.25))], ids=["numbers", "tensors"])
def test_a_tensor_that_is_the_rate_of_two_groups_becomes_two_where_they_differ(tmp_path: Path, rates: Any) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [each], "lr": rate} for each, rate in zip(model.parameters(), rates, strict=True)]
    bcp.save(tmp_path, {"model": model, "optimizer": torch.optim.Adam(groups)})
    own = torch.tensor(0.1)
    optimizer = torch.optim.Adam([{"params": [each]} for each in model.parameters()], lr=own)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] is own
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_a_learning_rate_that_is_learned_is_filled_in_place(tmp_path: Path, rate: Any) -> None:
    model = nn.Linear(2, 2)
    bcp.save(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=rate)})
    learned = torch.tensor(0.1, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=learned, differentiable=True)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] is learned
    assert learned.requires_grad
    assert learned.item() == 0.5


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("betas", [(0.5, 0.75), (torch.tensor(0.5), torch.tensor([0.75]))], ids=["numbers", "tensors"])
def test_tensors_in_a_tuple_are_filled_in_place(tmp_path: Path, betas: Any, kind: Any) -> None:
    model = nn.Linear(2, 2)
    saved = torch.optim.Adam(model.parameters(), betas=betas, foreach=False)
    saved.param_groups[0]["betas"] = kind(betas)
    bcp.save(tmp_path, {"model": model, "optimizer": saved})
    own = torch.tensor(0.1), torch.tensor(0.2)
    optimizer = torch.optim.Adam(model.parameters(), betas=own, foreach=False)
    numbers = torch.optim.Adam(model.parameters())
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": model, "optimizer": numbers})
    assert all(after is before for after, before in zip(optimizer.param_groups[0]["betas"], own, strict=True))
    assert own == (0.5, 0.75)
    assert numbers.param_groups[0]["betas"] == kind([0.5, 0.75])
    assert {type(beta) for beta in numbers.param_groups[0]["betas"]} == {float}


@pytest.mark.parametrize("saved", [7.0, [7.0], torch.full((3,), 7.0), torch.full((2, 1), 7.0)], ids=repr)
def test_a_tensor_over_which_a_hyperparameter_spreads_is_filled_in_place(tmp_path: Path, saved: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["own"] = saved
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    optimizer.param_groups[0]["own"] = own = torch.zeros(2, 3)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["own"] is own
    assert torch.equal(own, torch.full((2, 3), 7.0))


@pytest.mark.parametrize("saved", [None, "text", [1.0, 2.0], torch.ones(2), torch.ones(1, 3), {"a": 1}], ids=repr)
def test_a_tensor_that_cannot_hold_a_hyperparameter_is_replaced(tmp_path: Path, saved: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["own"] = saved
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    optimizer.param_groups[0]["own"] = torch.zeros(3)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert repr(optimizer.param_groups[0]["own"]) == repr(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_becomes_a_tensor_of_the_dtype_that_the_group_has(tmp_path: Path, dtype: torch.dtype) -> None:
    """Neither of the default dtype, which would round it, nor on the default device, which may have no memory."""
    model = nn.Linear(2, 2)
    bcp.save(tmp_path, {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.3)})
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1, dtype=dtype))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.3, dtype=dtype))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam_fused", "sgd_momentum", "adafactor", "lbfgs", "rmsprop_centered"])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
def test_state_gets_the_dtype_of_its_parameter_as_torch_does_it(
    tmp_path: Path, name: str, dtypes: Any, is_fresh: bool
) -> None:
    """A fresh optimizer had state in the dtype of the checkpoint, with which the next step failed."""

    def build(dtype: torch.dtype, num_steps: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=dtype)
        model.scale = nn.Parameter(torch.ones((), dtype=dtype))
        optimizer = OPTIMIZERS[name](model)
        step(model, optimizer, num_steps)
        return model, optimizer

    def step(model: nn.Module, optimizer: Optimizer, num_steps: int = 1) -> None:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = (model(torch.ones(2, 3, dtype=model.weight.dtype)) * model.scale).square().mean()
            value.backward()
            return value

        for _ in range(num_steps):
            optimizer.step(loss)

    saved, of_saved = build(dtypes[0], 2)
    bcp.save(tmp_path, {"model": saved, "optimizer": of_saved})
    model, optimizer = build(dtypes[1], 0 if is_fresh else 1)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer}, cast=True)
    if name != "lbfgs":  # torch converts its scalars too
        other, reference = build(dtypes[1], 0)
        other.load_state_dict(saved.state_dict())
        reference.load_state_dict(of_saved.state_dict())
        assert same_optimizer(optimizer, reference)
    step(model, optimizer)


class WithTable(torch.optim.SGD):
    """Keeps state that is float32 whatever the parameters are, as 8-bit optimizers do."""

    def step(self, _closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": torch.ones(1), "table": torch.linspace(0, 1, 5)}

    def load_state_dict(self, _state_dict: Any) -> None:
        raise NotImplementedError


def test_state_with_a_dtype_of_its_own_keeps_it_beside_parameters_of_another(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer, fresh = WithTable(model.parameters()), WithTable(other.parameters())
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh}, cast=True)
    for saved, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert same_value(optimizer.state[saved], fresh.state[loaded])


def test_tied_weights_have_one_state(tmp_path: Path) -> None:
    tokens = torch.arange(6)

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model(tokens).square().sum().backward()
        optimizer.step()

    model, other = Tied(), Tied()
    optimizer, restored = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    step(model, optimizer)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert same_optimizer(optimizer, restored)
    step(model, optimizer)
    step(other, restored)
    assert same_module(model, other)


@pytest.mark.parametrize("is_earlier", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_an_optimizer_may_have_an_empty_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_earlier: bool, num_steps: int
) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    train(model, [optimizer], 2)
    train(other, [restored], num_steps)
    with monkeypatch.context() as of_earlier_version:
        if is_earlier:
            of_earlier_version.setattr(optimizer_entry, "join_fqn", lambda fqn, key: f"{fqn}.{key}")
        bcp.save(tmp_path, {"model": model, "": optimizer})
    assert any(name.startswith(".state." if is_earlier else "state.") for name in bcp.open(tmp_path))
    bcp.load(tmp_path, {"model": other, "": restored})
    assert same_optimizer(optimizer, restored)


def test_tied_names_of_a_module_with_an_empty_name(tmp_path: Path) -> None:
    head, tied = nn.ModuleDict({"head": nn.Linear(4, 6, bias=False)}), Tied()
    optimizer, restored = torch.optim.Adam(head.parameters()), torch.optim.Adam(tied.parameters())
    head["head"](torch.ones(4)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"": head, "optimizer": optimizer})
    bcp.load(tmp_path, {"": tied, "optimizer": restored}, strict=False)
    assert same_value(dict(optimizer.state[head["head"].weight]), dict(restored.state[tied.embedding.weight]))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied to untied", "untied to tied"])
def test_state_of_weights_that_are_tied_on_one_side_only(tmp_path: Path, is_tied: bool) -> None:
    model, other = Tied(is_tied=is_tied), Tied(is_tied=not is_tied)
    optimizer, restored = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    expected, found = optimizer.state[model.embedding.weight], restored.state[other.embedding.weight]
    assert same_value(dict(expected), dict(found))
    if is_tied:
        assert same_value(dict(expected), dict(restored.state[other.head.weight]))
        assert found["exp_avg"].data_ptr() != restored.state[other.head.weight]["exp_avg"].data_ptr()


def test_weights_that_are_no_longer_tied_share_nothing_of_their_state(tmp_path: Path) -> None:
    model, other = Tied(), Tied(is_tied=False)
    optimizer, restored = (Optimizer(each.parameters(), {"lr": 0.1}) for each in (model, other))
    saved = optimizer.state[model.embedding.weight]
    saved |= {"past": [torch.ones(6, 4), torch.zeros(2)], "seen": {"at": [1, 2]}, "low": low_bit.int8(0)}
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    states = [restored.state[weight] for weight in (other.embedding.weight, other.head.weight)]
    for state in states:
        assert same_value(state["past"], saved["past"])
        assert state["seen"] == saved["seen"]
        assert low_bit.same(state["low"], saved["low"])
    first, second = states
    assert first["past"] is not second["past"]
    assert first["seen"] is not second["seen"]
    assert first["seen"]["at"] is not second["seen"]["at"]
    tensors = [[*state["past"], *low_bit.parts(state["low"]).values()] for state in states]
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(*tensors, strict=True))


def test_an_optimizer_of_named_parameters_needs_no_model(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(0)
    optimizer = torch.optim.Adam(model.named_parameters())
    restored = torch.optim.Adam(reversed(list(other.named_parameters())))
    train(model, [optimizer], 2)
    bcp.save(tmp_path, {"optimizer": optimizer})
    bcp.load(tmp_path, {"optimizer": restored})
    assert same_value(state_by_name(model, optimizer), state_by_name(other, restored))


@pytest.mark.parametrize("call", [bcp.save, bcp.load])
def test_parameters_of_no_module_are_refused_with_advice(tmp_path: Path, call: Any) -> None:
    model = mlp()
    bcp.save(tmp_path / "there", {"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(7))])
    path = tmp_path / ("there" if call is bcp.load else "new")
    with pytest.raises(
        bcp.CheckpointSaveError, match=r"optimizer .*shape \[7\].*pass the model.*named_parameters"
    ) as error:
        call(path, {"model": model, "optimizer": optimizer})
    assert error.value.kind == "unsupported_value"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["temperature", "model"])
@pytest.mark.parametrize("beside", ["nothing", "a module"])
def test_an_optimizer_of_tensors_of_the_state_needs_no_module(tmp_path: Path, name: str, beside: str) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        alone, nested = nn.Parameter(torch.randn(())), torch.randn(2, requires_grad=True)
        net = mlp(seed)
        parameters = [alone, nested, *(net.parameters() if beside == "a module" else [])]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        sum(parameter.square().sum() for parameter in parameters).backward()
        optimizer.step()
        tensors = {"alone": alone, "in": [nested], "again": alone}
        return {name: tensors, "optimizer": optimizer} | ({"net": net} if beside == "a module" else {})

    source, target = build(0), build(1)
    alone = target[name]["alone"]
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert target[name]["alone"] is alone
    assert same_value(target[name], source[name])
    assert same_optimizer(source["optimizer"], target["optimizer"])


def test_adapters_alone_go_on_in_the_module_that_has_them(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    adapters = {key: parameter for key, parameter in model.named_parameters() if key.startswith("3.")}
    optimizer = torch.optim.Adam(adapters.values())
    train(model, [optimizer], 2)
    bcp.save(tmp_path, {"model": adapters, "optimizer": optimizer})
    restored = torch.optim.Adam(other[3].parameters())
    bcp.load(tmp_path, {"model": other, "optimizer": restored}, exclude=["model.0.*", "model.1.*"])
    assert same_module(model[3], other[3])
    assert same_optimizer(optimizer, restored)


def test_several_optimizers_over_several_modules(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        generator, critic = mlp(seed), mlp(seed + 10)
        joint = torch.optim.SGD([*generator.parameters(), *critic.parameters()], lr=0.1, momentum=0.5)
        return {
            "generator": generator,
            "critic": critic,
            "optimizers": {
                "generator": torch.optim.Adam(generator.parameters()),
                "critic": torch.optim.RMSprop(critic.parameters()),
            },
            "joint": joint,
        }

    source, target = build(0), build(1)
    for name in ("generator", "critic"):
        train(source[name], [source["optimizers"][name], source["joint"]], 2)
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert same_module(source["generator"], target["generator"])
    assert same_module(source["critic"], target["critic"])
    assert same_optimizer(source["joint"], target["joint"])
    assert all(same_optimizer(source["optimizers"][name], target["optimizers"][name]) for name in target["optimizers"])


def test_a_list_of_modules_with_a_list_of_optimizers(tmp_path: Path) -> None:
    """Pipeline stages of one process: layers have the names of the whole model."""

    def build(seed: int) -> tuple[list[nn.Module], list[Optimizer]]:
        layers = mlp(seed)
        stages: list[nn.Module] = [nn.ModuleDict({"0": layers[0], "1": layers[1]}), nn.ModuleDict({"3": layers[3]})]
        return stages, [torch.optim.Adam(stage.parameters(), lr=0.1 + index) for index, stage in enumerate(stages)]

    (stages, optimizers), (others, restored) = build(0), build(1)
    train(nn.Sequential(stages[0]["0"], stages[0]["1"], stages[1]["3"]), optimizers, 2)
    bcp.save(tmp_path, {"model": stages, "optimizer": optimizers})
    bcp.load(tmp_path, {"model": others, "optimizer": restored})
    assert all(map(same_module, stages, others))
    assert all(map(same_optimizer, optimizers, restored))
    whole = mlp(2)
    one = torch.optim.Adam([{"params": whole[:2].parameters()}, {"params": whole[3].parameters()}])
    bcp.load(tmp_path, {"model": whole, "optimizer": one})
    assert [group["lr"] for group in one.param_groups] == [0.1, 1.1]
    assert same_value(one.state[whole[3].weight], optimizers[1].state[stages[1]["3"].weight])


def test_state_that_does_not_fit_is_refused_and_nothing_is_created(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters(), lr=7.0)
    train(model, [optimizer], 1)
    bcp.save(tmp_path, {"model": mlp(3), "optimizer": torch.optim.Adam(mlp(3).named_parameters()), "n": 1})
    bcp.save(tmp_path / "narrow", {"model": model, "optimizer": optimizer})
    other[3] = nn.Linear(8, 4)
    restored = torch.optim.Adam(other.parameters(), lr=7.0)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.3\.weight: shape"):
        bcp.load(tmp_path / "narrow", {"model": other, "optimizer": restored})
    assert len(restored.state) == 0
    assert restored.param_groups[0]["lr"] == 7.0


def test_what_is_no_optimizer_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    model = mlp()
    bcp.save(tmp_path, {"model": model, "data": {"optimizer": 1}})
    with pytest.raises(bcp.CheckpointMismatchError, match="holds no optimizer") as error:
        bcp.load(tmp_path, {"model": model, "data": torch.optim.Adam(model.parameters())})
    assert error.value.kind == "missing_key"


def adam_over(*modules: nn.Module) -> Optimizer:
    return torch.optim.Adam([parameter for module in modules for parameter in module.parameters()])


def test_one_of_two_modules_is_loaded_with_its_part_of_the_optimizer(tmp_path: Path) -> None:
    encoder, decoder = mlp(0), mlp(1)
    optimizer = adam_over(encoder, decoder)
    for module in (encoder, decoder):
        train(module, [optimizer], 2)
    bcp.save(tmp_path, {"encoder": encoder, "decoder": decoder, "optimizer": optimizer})
    other = mlp(2)
    restored = adam_over(other)
    with pytest.raises(bcp.CheckpointMismatchError) as error:
        bcp.load(tmp_path, {"encoder": other, "optimizer": restored})
    assert error.value.kind == "unexpected_key"
    lines = str(error.value).splitlines()[1:]
    assert all("optimizer.state.decoder." in line or "more" in line for line in lines)
    bcp.load(tmp_path, {"encoder": other, "optimizer": restored}, strict=False)
    assert same_value(state_by_name(encoder, optimizer), state_by_name(other, restored))


def test_names_of_parameters_do_not_depend_on_what_else_is_in_the_state(tmp_path: Path) -> None:
    model, head = mlp(0), mlp(1)
    optimizer = adam_over(model, head)
    for module in (model, head):
        train(module, [optimizer], 1)
    bcp.save(tmp_path, {"model": model, "head": head, "optimizer": optimizer})
    names = set(bcp.open(tmp_path).keys())
    assert {"optimizer.state.0.weight.exp_avg", "optimizer.state.head.0.weight.exp_avg"} <= names


@pytest.mark.parametrize("names", [("encoder",), ("decoder",), ("decoder", "encoder")], ids="+".join)
def test_a_parameter_of_two_modules_is_found_through_either(tmp_path: Path, names: tuple[str, ...]) -> None:
    def build(seed: int) -> dict[str, Any]:
        encoder, decoder = mlp(seed), mlp(seed + 5)
        decoder[0].weight = encoder[0].weight
        return {"encoder": encoder, "decoder": decoder}

    source, target = build(0), build(1)
    shared = source["encoder"][0].weight
    optimizer, restored = torch.optim.Adam([shared]), torch.optim.Adam([target["encoder"][0].weight])
    train(source["encoder"], [optimizer], 2)
    bcp.save(tmp_path, {**source, "optimizer": optimizer})
    bcp.load(tmp_path, {name: target[name] for name in names} | {"optimizer": restored})
    assert same_optimizer(optimizer, restored)
    bcp.save(tmp_path / "part", {name: source[name] for name in names} | {"optimizer": optimizer})
    fresh = build(2)
    again = torch.optim.Adam([fresh["encoder"][0].weight])
    bcp.load(tmp_path / "part", {**{name: fresh[name] for name in names}, "optimizer": again})
    assert same_optimizer(optimizer, again)


def critics(seed: int, num_steps: int) -> dict[str, Any]:
    """A model with a critic in it, another critic beside it, and an optimizer for each."""
    torch.manual_seed(seed)
    model, critic = nn.ModuleDict({"critic": nn.Linear(4, 3)}), nn.Linear(4, 2)
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.1 + seed) for module in (model, critic)]
    for module, optimizer in zip((model["critic"], critic), optimizers, strict=True):
        train(module, [optimizer], num_steps, seed)
    return {"model": model, "critic": critic, "of_model": optimizers[0], "of_critic": optimizers[1]}


@pytest.mark.parametrize("names", [("model", "critic"), ("critic", "model"), ("critic",), ("model",)], ids="+".join)
def test_a_module_may_be_called_as_a_part_of_the_model_is(tmp_path: Path, names: tuple[str, ...]) -> None:
    saved, loaded = critics(0, 2), critics(1, 0)
    bcp.save(tmp_path, saved)
    bcp.load(tmp_path, {key: loaded[key] for name in names for key in (name, f"of_{name}")})
    for name in names:
        assert same_module(saved[name], loaded[name])
        assert same_optimizer(saved[f"of_{name}"], loaded[f"of_{name}"])


def test_two_parameters_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    model, encoder = nn.ModuleDict({"encoder": nn.Linear(2, 2)}), nn.Linear(2, 2)
    state = {"model": model, "encoder": encoder, "optimizer": adam_over(model, encoder)}
    with pytest.raises(bcp.CheckpointSaveError, match=r"model\.encoder\.weight and encoder\.weight") as error:
        bcp.save(tmp_path, state)
    assert error.value.kind == "unsupported_value"


@pytest.mark.parametrize("call", [bcp.save, bcp.load])
def test_a_parameter_that_two_optimizers_of_a_list_hold_is_refused(tmp_path: Path, call: Any) -> None:
    model = mlp()
    bcp.save(tmp_path / "there", {"model": model, "optimizer": adam_over(model)})
    path = tmp_path / ("there" if call is bcp.load else "new")
    with pytest.raises(bcp.CheckpointSaveError, match=r"two hold the parameter 0\.weight") as error:
        call(path, {"model": model, "optimizer": [adam_over(model), adam_over(model)]})
    assert error.value.kind == "unsupported_value"


@pytest.mark.parametrize("key", ["a.b", 7, ""])
def test_state_under_keys_that_no_name_can_hold_is_refused(tmp_path: Path, key: Any) -> None:
    model = mlp()
    optimizer = adam_over(model)
    optimizer.state[model[0].weight] = {key: torch.ones(2)}
    with pytest.raises(bcp.CheckpointSaveError, match=r"optimizer\.state\.0\.weight\..* with the key") as error:
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    assert error.value.kind == "unsupported_value"


class Projector:
    """What low-rank optimizers such as GaLore keep for a parameter: an object that has tensors."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix


class Projecting(torch.optim.SGD):
    """An optimizer with an object in its state."""

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"projector": Projector(torch.rand(2, 2))}


class ProjectingAsAdvised(Projecting):
    """The same, as the error advises it."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"state": {key: {"projector": each["projector"].matrix} for key, each in state["state"].items()}}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for each in self.state.values():
            each["projector"] = Projector(each["projector"])


def test_the_advice_for_an_object_in_the_state_of_an_optimizer_makes_it_loadable(tmp_path: Path) -> None:
    model = mlp()
    optimizer = Projecting(model.parameters())
    optimizer.step()
    with pytest.raises(bcp.CheckpointSaveError, match=r"0\.weight\.projector .*give the optimizer's class a") as error:
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    assert error.value.kind == "unsupported_value"
    saved, target = ProjectingAsAdvised(model.parameters()), ProjectingAsAdvised(model.parameters())
    saved.step()
    bcp.save(tmp_path, {"model": model, "optimizer": saved})
    bcp.load(tmp_path, {"model": model, "optimizer": target})
    for parameter in model.parameters():
        assert torch.equal(target.state[parameter]["projector"].matrix, saved.state[parameter]["projector"].matrix)


@pytest.mark.parametrize("value", [float("nan"), np.ones(3), np.float32(0.5), torch.tensor(float("nan"))], ids=str)
def test_hyperparameters_that_are_the_same_are_no_conflict(tmp_path: Path, value: Any) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = grouped(model, [([0, 1], 0.1), ([2, 3, 4, 5], 0.1)]), grouped(other, [(range(6), 0.5)])
    for group in optimizer.param_groups:
        group["mine"] = value
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    found = restored.param_groups[0]["mine"]
    assert type(found) is type(value)
    assert np.array_equal(found, value, equal_nan=True)


SAME_OR_NOT: list[tuple[Any, Any, bool]] = [
    (0.1, torch.tensor(0.1), True),
    (0.1, torch.tensor(0.1, dtype=torch.float64), True),
    (0.1, torch.tensor(0.2, dtype=torch.float64), False),
    (1, torch.tensor(1.0), True),
    (1.5, torch.tensor(1), False),
    ((0.9, 0.99), torch.tensor([0.9, 0.99], dtype=torch.float64), True),
    (None, torch.tensor(0.1), False),
    ("0.1", torch.tensor(0.1), False),
    ({}, torch.tensor(0.1), False),
    (2**70, torch.tensor(0), False),
    (10**400, torch.tensor(0.1), False),
]


@pytest.mark.parametrize("swaps", [False, True], ids=["tensor last", "tensor first"])
@pytest.mark.parametrize(("value", "tensor", "is_same"), SAME_OR_NOT, ids=str)
def test_a_number_and_a_tensor_of_it_are_no_conflict(
    tmp_path: Path, value: Any, tensor: torch.Tensor, is_same: bool, swaps: bool
) -> None:
    model, other = mlp(0), mlp(1)
    optimizer, restored = grouped(model, [([0, 1], 0.1), ([2, 3, 4, 5], 0.1)]), grouped(other, [(range(6), 0.5)])
    first, second = optimizer.param_groups
    first["mine"], second["mine"] = (tensor, value) if swaps else (value, tensor)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    if not is_same:
        with pytest.raises(bcp.CheckpointMismatchError, match="different values of 'mine'"):
            bcp.load(tmp_path, {"model": other, "optimizer": restored})
        return
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert restored.param_groups[0]["mine"] is not None


def test_a_number_fills_a_tensor_of_double_precision_exactly(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    restored = grouped(other, [(range(6), 0.5)])
    own = restored.param_groups[0]["lr"] = torch.tensor(0.5, dtype=torch.float64)
    bcp.save(tmp_path, {"model": model, "optimizer": grouped(model, [(range(6), 0.1)])})
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    assert restored.param_groups[0]["lr"] is own
    assert own.item() == 0.1


def test_an_optimizer_that_has_the_state_of_some_parameters_only_is_refused(tmp_path: Path) -> None:
    model = mlp()
    bcp.save(tmp_path / "fresh", {"model": model, "optimizer": adam_over(model)})
    zero = type("ZeroRedundancyOptimizer", (torch.optim.Adam,), {})(model.parameters())
    for call, name in ((bcp.save, "new"), (bcp.load, "fresh")):
        with pytest.raises(bcp.CheckpointSaveError, match="ZeroRedundancyOptimizer") as error:
            call(tmp_path / name, {"model": model, "optimizer": zero})
        assert error.value.kind == "unsupported_value"


def test_the_optimizer_inside_a_zero_redundancy_optimizer_that_a_scheduler_steps_is_refused(tmp_path: Path) -> None:
    model = mlp()
    zero = type("ZeroRedundancyOptimizer", (torch.optim.Adam,), {})(model.parameters())
    zero.optim = adam_over(model)
    state = {"model": model, "optimizer": zero.optim, "scheduler": lr_scheduler.ExponentialLR(zero, 0.5)}
    with pytest.raises(bcp.CheckpointSaveError, match="optimizer is a ZeroRedundancyOptimizer") as error:
        bcp.save(tmp_path, state)
    assert error.value.kind == "unsupported_value"


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.9),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "multi_step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=6),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "cosine_restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 10),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 10)], [3]
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "swa": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05),
}


def schedule(optimizer: Optimizer, scheduler: Any, num_steps: int) -> list[list[float]]:
    rates = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize("build", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("make_rate", [float, torch.tensor], ids=["number", "tensor"])
def test_schedulers_go_on_where_they_stopped(tmp_path: Path, build: Any, make_rate: Any) -> None:
    def both(seed: int) -> dict[str, Any]:
        model = mlp(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=make_rate(0.5))
        return {"model": model, "optimizer": optimizer, "scheduler": build(optimizer)}

    source, target = both(0), both(1)
    schedule(source["optimizer"], source["scheduler"], 3)
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    expected = schedule(source["optimizer"], source["scheduler"], 8)
    assert schedule(target["optimizer"], target["scheduler"], 8) == expected


class Counted(list[nn.Parameter]):
    """Counts how often somebody goes through it."""

    num_walks = 0

    def __iter__(self) -> Iterator[nn.Parameter]:
        self.num_walks += 1
        return super().__iter__()


def num_walks_of_a_load(path: Path, num_parameters: int) -> int:
    def training(num_steps: int) -> dict[str, Any]:
        model = nn.ParameterList([torch.ones(2)] * num_parameters)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(num_steps):
            torch.stack(list(model.parameters())).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    bcp.save(path, training(1))
    loaded = training(0)
    [group] = loaded["optimizer"].param_groups
    group["params"] = Counted(group["params"])
    bcp.load(path, loaded)
    assert all(loaded["optimizer"].state[parameter]["step"] == 1 for parameter in loaded["model"].parameters())
    return group["params"].num_walks


def test_a_load_goes_through_a_group_as_often_however_many_parameters_it_has(tmp_path: Path) -> None:
    assert num_walks_of_a_load(tmp_path / "few", 3) == num_walks_of_a_load(tmp_path / "many", 30)


class Walked(nn.ParameterList):
    """Counts how often somebody asks for its parameters."""

    num_walks = 0

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.num_walks += 1
        return super().named_parameters(*args, **options)


def looks_of_many_optimizers(path: Path, num_optimizers: int) -> tuple[int, int]:
    """How often a save walks through a model with an optimizer for each parameter, and the most often that a load asks
    for the new name of one tensor.
    """

    def training(num_steps: int) -> dict[str, Any]:
        model = Walked([torch.ones(2)] * num_optimizers)
        optimizers = [torch.optim.AdamW([parameter]) for parameter in model]
        for optimizer in optimizers * num_steps:
            torch.stack(list(model)).sum().backward()
            optimizer.step()
        return {"model": model, **{f"optimizer_{number}": each for number, each in enumerate(optimizers)}}

    saved, loaded = training(1), training(0)
    saved["model"].num_walks = 0
    bcp.save(path, saved)
    asked: Counter[str] = Counter()

    def rename(fqn: str) -> str:
        asked[fqn] += 1
        return fqn

    bcp.load(path, loaded, key_map=rename)
    for number, parameter in enumerate(loaded["model"]):
        assert loaded[f"optimizer_{number}"].state[parameter]["step"] == 1
    return saved["model"].num_walks, max(asked[fqn] for fqn in bcp.open(path))


def test_an_optimizer_looks_at_no_tensor_of_the_others(tmp_path: Path) -> None:
    assert looks_of_many_optimizers(tmp_path / "few", 2) == looks_of_many_optimizers(tmp_path / "many", 20)


def test_plain_data_in_the_form_of_an_optimizer_is_read_only_for_its_parameters(tmp_path: Path) -> None:
    group = {"params": {"other": None}, "values": {"lr": 0.5}}
    bcp.save(tmp_path, {"it": {"state": {"other": 3}, "groups": {"other": group}}})
    optimizer = torch.optim.SGD([("weight", nn.Parameter(torch.ones(2)))], lr=0.25)
    bcp.load(tmp_path, {"it": optimizer}, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(bcp.CheckpointMismatchError):
        bcp.load(tmp_path, {"it": optimizer})


def test_a_hyperparameter_without_a_name_may_hold_a_value_without_a_name(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    optimizer.param_groups[0][""] = {"": 1, "a": 2}
    model = torch.nn.ParameterDict({"w": weight})
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    optimizer.param_groups[0][""] = {"": 0, "a": 0}
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0][""] == {"": 1, "a": 2}
