"""State of an optimizer is loaded from any of its forms into any other: flat and nested as torch.distributed.checkpoint
gives it, in an object or as a dict, an optimizer that holds others, and the optimizer itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from counted_looks import CountedName
from optimizer_shapes import FLAT, Container
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state
from training import mlp, same_module, same_value, train

import bytecheckpoint as bcp
from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.optimizers.forms import Form, Reshaping
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.formats.torch_optimizer import as_saved_here
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef
from bytecheckpoint.manifest.records import tensor_record

Optimizer = torch.optim.Optimizer
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Shown:
    """An object that shows an optimizer in a form of torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: Any) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options

    def state_dict(self) -> dict[str, Any]:
        return torch_state.get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch_state.set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


class Held(NamedTuple):
    """What stands in the state for an optimizer, and what is to be done when it was loaded."""

    value: Any
    finish: Callable[[], None] = lambda: None


def bare(_: nn.Module, optimizer: Optimizer) -> Held:
    return Held(optimizer)


def flat_object(model: nn.Module, optimizer: Optimizer) -> Held:
    return Held(Shown(model, optimizer, FLAT))


def nested_object(model: nn.Module, optimizer: Optimizer) -> Held:
    return Held(Shown(model, optimizer, None))


def flat_dict(model: nn.Module, optimizer: Optimizer) -> Held:
    value = torch_state.get_optimizer_state_dict(model, optimizer, options=FLAT)
    return Held(value, lambda: torch_state.set_optimizer_state_dict(model, optimizer, value, options=FLAT))


def nested_dict(model: nn.Module, optimizer: Optimizer) -> Held:
    value = torch_state.get_optimizer_state_dict(model, optimizer)
    return Held(value, lambda: torch_state.set_optimizer_state_dict(model, optimizer, value))


def container(model: nn.Module, optimizer: Optimizer) -> Held:
    held = Container([model])
    held.optimizers = [optimizer]
    return Held(held)


FORMS = {each.__name__: each for each in (bare, flat_object, nested_object, flat_dict, nested_dict, container)}
IN_DCP = [name for name in FORMS if name != "bare"]


def two_groups(model: nn.Module, rate: Any = float) -> Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": rate(0.02)}, {"params": parameters[2:], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=rate(0.01))


def with_tensors(model: nn.Module) -> Optimizer:
    return two_groups(model, torch.tensor)


def loaded(path: Path, form: str, build: Callable[[nn.Module], Optimizer], **arguments: Any) -> tuple[Any, Any]:
    model = mlp(1)
    optimizer = build(model)
    held = FORMS[form](model, optimizer)
    report = bcp.load(path, {"model": model, "optimizer": held.value}, **arguments)
    assert not report.missing
    assert not report.unexpected
    held.finish()
    return model, optimizer


def goes_on(model: nn.Module, optimizer: Optimizer, other: nn.Module, restored: Optimizer) -> bool:
    train(model, [optimizer], 2, seed=3)
    train(other, [restored], 2, seed=3)
    return same_module(model, other) and same_value(optimizer.state_dict(), restored.state_dict())


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_form_loads_from_every_other(tmp_path: Path, source: str, target: str) -> None:
    model = mlp(0)
    optimizer = two_groups(model)
    train(model, [optimizer], 3)
    bcp.save(tmp_path, {"model": model, "optimizer": FORMS[source](model, optimizer).value})
    other, restored = loaded(tmp_path, target, two_groups)
    assert goes_on(model, optimizer, other, restored)


@pytest.mark.parametrize("source", IN_DCP)
@pytest.mark.parametrize("target", FORMS)
def test_every_form_loads_from_a_folder_of_torch(tmp_path: Path, source: str, target: str) -> None:
    model = mlp(0)
    optimizer = two_groups(model)
    train(model, [optimizer], 3)
    held = FORMS[source](model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": held.value}, checkpoint_id=tmp_path, no_dist=True)
    other, restored = loaded(tmp_path, target, two_groups)
    assert goes_on(model, optimizer, other, restored)


@pytest.mark.parametrize(
    ("source", "target"),
    [(form, form) for form in IN_DCP]
    + [("flat_dict", "bare"), ("flat_object", "container"), ("nested_dict", "flat_dict"), ("nested_object", "bare")],
)
def test_learning_rates_that_are_tensors_load_from_a_folder_of_torch(tmp_path: Path, source: str, target: str) -> None:
    model = mlp(0)
    optimizer = with_tensors(model)
    train(model, [optimizer], 3)
    held = FORMS[source](model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": held.value}, checkpoint_id=tmp_path, no_dist=True)
    other, restored = loaded(tmp_path, target, with_tensors)
    assert goes_on(model, optimizer, other, restored)


@pytest.mark.parametrize("source", ["flat_object", "nested_object"])
@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.2)], ids=["same", "different"])
def test_groups_become_one_where_their_tensors_in_data_files_are_equal(tmp_path: Path, source: str, rates: Any) -> None:
    model = mlp(0)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": torch.tensor(rates[0])}, {"params": others, "lr": torch.tensor(rates[1])}]
    optimizer = torch.optim.AdamW(groups)
    train(model, [optimizer], 3)
    held = FORMS[source](model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": held.value}, checkpoint_id=tmp_path, no_dist=True)
    merged = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    if rates[0] == rates[1]:
        bcp.load(tmp_path, {"model": model, "optimizer": merged})
        assert merged.param_groups[0]["lr"] == torch.tensor(rates[0])
        return
    with pytest.raises(bcp.CheckpointMismatchError, match=r"different values of 'lr'.*a group for each") as error:
        bcp.load(tmp_path, {"model": model, "optimizer": merged})
    assert error.value.kind == "conflict"
    assert merged.param_groups[0]["lr"] == torch.tensor(0.5)


@pytest.mark.parametrize("has_names", [True, False])
def test_a_state_dict_by_numbers_loads_into_the_optimizer(tmp_path: Path, has_names: bool) -> None:
    def build(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.named_parameters() if has_names else model.parameters(), lr=0.01)

    model = mlp(0)
    optimizer = build(model)
    train(model, [optimizer], 3)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    other, restored = loaded(tmp_path, "bare", build)
    assert goes_on(model, optimizer, other, restored)


@pytest.mark.parametrize("key", ["facts", "elsewhere", "outside_model", "others"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_dict_that_has_more_than_the_keys_of_torch_loads_from_a_file_of_torch(
    tmp_path: Path, key: str, is_named: bool
) -> None:
    model = mlp(0)
    optimizer = two_groups(model)
    train(model, [optimizer], 1)
    state = torch_state.get_optimizer_state_dict(model, optimizer) if is_named else optimizer.state_dict()
    torch.save({"optimizer": {**state, key: {"of": torch.ones(2), "count": 3}}}, tmp_path / "state.pt")
    groups = [{**group, "lr": 0.0} for group in state["param_groups"]]
    zeros = {name: {each: torch.zeros_like(values[each]) for each in values} for name, values in state["state"].items()}
    held = {"state": zeros, "param_groups": groups, key: {"of": torch.zeros(2), "count": 0}}
    bcp.load(tmp_path / "state.pt", {"optimizer": held})
    assert same_value(held, {**state, key: {"of": torch.ones(2), "count": 3}})


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_what_is_excluded_of_a_form_is_left_as_it_is(tmp_path: Path, source: str, target: str) -> None:
    model = mlp(0)
    optimizer = two_groups(model)
    train(model, [optimizer], 3)
    bcp.save(tmp_path, {"model": model, "optimizer": FORMS[source](model, optimizer).value})

    def used(model: nn.Module) -> Optimizer:
        optimizer = two_groups(model)
        train(model, [optimizer], 1)
        return optimizer

    other, restored = loaded(tmp_path, target, used, exclude="*.exp_avg_sq")
    parameter = next(iter(other.parameters()))
    saved = optimizer.state[next(iter(model.parameters()))]
    assert torch.equal(restored.state[parameter]["exp_avg"], saved["exp_avg"])
    assert not torch.equal(restored.state[parameter]["exp_avg_sq"], saved["exp_avg_sq"])


def test_state_that_is_nested_below_its_key_is_taken_apart_and_put_together(tmp_path: Path) -> None:
    """As torchtitan flattens the state of an optimizer such as Shampoo."""
    model, other = mlp(0), mlp(1)
    name, parameter = next(iter(model.named_parameters()))
    flat = {f"state.{name}.factors.left": torch.full((2,), 3.0), f"state.{name}.step": torch.tensor(4.0)}
    flat |= {f"param_groups.{name}.lr": 0.5}
    bcp.save(tmp_path, {"model": model, "optimizer": flat})
    restored = torch.optim.SGD([next(other.parameters())], lr=0.1)
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    (state,) = restored.state.values()
    assert same_value(dict(state), {"factors": {"left": torch.full((2,), 3.0)}, "step": torch.tensor(4.0)})
    assert restored.param_groups[0]["lr"] == 0.5
    again = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0 for key, value in flat.items()}
    bcp.save(tmp_path / "own", {"model": other, "optimizer": restored})
    report = bcp.load(tmp_path / "own", {"model": model, "optimizer": again}, strict=False)
    assert not report.missing
    assert same_value(again, flat)
    assert parameter.shape == (8, 4)


def test_an_array_in_a_parameters_state_loads_from_another_form(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    name = next(iter(dict(model.named_parameters())))
    history = np.arange(3.0)
    nested = {"state": {name: {"history": history}}, "param_groups": [{"params": [name], "lr": 0.5}]}
    bcp.save(tmp_path, {"model": model, "optimizer": nested})
    restored = torch.optim.SGD([next(other.parameters())], lr=0.1)
    bcp.load(tmp_path, {"model": other, "optimizer": restored})
    (state,) = restored.state.values()
    assert np.array_equal(state["history"], history)


def test_exclude_beside_many_optimizers_does_not_judge_all_tensors_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(100))
    optimizers = {str(number): torch.optim.SGD(layer.parameters()) for number, layer in enumerate(model)}
    bcp.save(tmp_path, {"model": model, "optimizers": optimizers})
    judged: list[str] = []
    excludes = CheckpointView.excludes
    monkeypatch.setattr(CheckpointView, "excludes", lambda view, fqn: (judged.append(fqn), excludes(view, fqn))[1])
    bcp.load(tmp_path, {"model": model, "optimizers": optimizers}, exclude="model.0.bias")
    assert len(judged) < 100 * len([*model.parameters()])


def test_many_optimizers_are_put_into_another_form_without_a_look_at_all_tensors_for_each() -> None:
    names = [str(number) for number in range(100)]
    group: dict[str, Any] = {"w": {"params": {"w": None}, "values": {"lr": 0.1}}}
    objects = {name: encode_plain({"state": {}, "groups": group}, name) for name in names}
    tensors = [CountedName(f"{name}.state.w.key{key}") for name in names for key in range(10)]
    manifest = Manifest(
        save_id="1" * 16, tensors=dict.fromkeys(tensors, tensor_record("float32", (2,), ())), objects=objects
    )
    forms = dict.fromkeys(names, Form(groups=[["w"]]))
    CountedName.num_looks = 0
    view = CheckpointView(
        manifest,
        rank=0,
        num_ranks=1,
        key_map=None,
        include=None,
        exclude=None,
        reshape=Reshaping(forms, as_saved_here).reshaped,
    )
    assert view.trees["7"]["state"]["w"] == {f"key{key}": TensorRef(f"7.state.w.key{key}") for key in range(10)}
    assert CountedName.num_looks < 40 * len(tensors)
