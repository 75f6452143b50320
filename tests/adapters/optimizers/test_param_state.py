"""Values of optimizer state that a parameter has one of, as numbers and as tensors, across optimizers and layouts."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed_like
import pytest
import torch
from megatron_like import ShardedTensor, sharded
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import same_value

import bytecheckpoint as bcp
from bytecheckpoint.adapters import shards
from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.frameworks import flat_optimizer_state
from bytecheckpoint.adapters.native.subclass_match import SubclassState
from bytecheckpoint.adapters.optimizers import param_state
from bytecheckpoint.adapters.optimizers.param_state import scalar_device

Value = int | Tensor


class Steps(torch.optim.Optimizer):
    """Counts its steps in what it is told to."""

    def __init__(self, parameters: Any, lr: float = 0.1, *, start: Callable[[], Value] = lambda: 0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.start = start

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": self.start()}
                    state |= {key: torch.full_like(parameter, 0.5).detach() for key in ("exp_avg", "exp_avg_sq")}
                state["step"] += 1


def training(num_steps: int, make: Callable[..., torch.optim.Optimizer] = Steps) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    state = {"model": model, "optimizer": make(model.parameters(), lr=0.01)}
    for _ in range(num_steps):
        train(state)
    return state


def train(state: Mapping[str, Any]) -> None:
    state["model"](torch.ones(4, 3)).sum().backward()
    state["optimizer"].step()


def steps(state: Mapping[str, Any]) -> list[Any]:
    optimizer = getattr(state["optimizer"], "optimizer", state["optimizer"])
    return [of_one["step"] for of_one in optimizer.state.values()]


def partitioned(num_steps: int, make: Callable[..., torch.optim.Optimizer] = Steps) -> dict[str, Any]:
    """With one flat parameter, as DeepSpeed has it."""
    return deepspeed_like.engine_state(training(num_steps, make), deepspeed_like.zero_1)


LAYOUTS = [training, partitioned]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_becomes_a_tensor_where_torch_keeps_one(tmp_path: Path, layout: Any) -> None:
    bcp.save(tmp_path, training(3))
    for num_steps in (0, 5):
        loaded = layout(num_steps, torch.optim.AdamW)
        bcp.load(tmp_path, loaded)
        for step in steps(loaded):
            assert (step.item(), step.shape, step.dtype, step.device.type) == (3, (), torch.float32, "cpu")
        if layout is training:
            train(loaded)
            assert {step.item() for step in steps(loaded)} == {4}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_becomes_a_number_where_the_optimizer_has_one(tmp_path: Path, layout: Any) -> None:
    bcp.save(tmp_path, training(3, torch.optim.AdamW))
    loaded = layout(5)
    bcp.load(tmp_path, loaded)
    assert {(type(step), step) for step in steps(loaded)} == {(int, 3)}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_stays_one_where_nobody_says_otherwise(tmp_path: Path, layout: Any) -> None:
    bcp.save(tmp_path, training(3))
    for make in (Steps, torch.optim.SparseAdam):
        loaded = layout(0, make)
        bcp.load(tmp_path, loaded)
        assert {(type(step), step) for step in steps(loaded)} == {(int, 3)}


@pytest.mark.usefixtures("group")
def test_one_value_may_have_dimensions(tmp_path: Path) -> None:
    def make(*args: Any, **kwargs: Any) -> Steps:
        return Steps(*args, **kwargs, start=lambda: torch.zeros(1))

    bcp.save(tmp_path, partitioned(3, make))
    for layout in LAYOUTS:
        loaded = layout(5, make)
        bcp.load(tmp_path, loaded)
        assert all(torch.equal(step, torch.tensor([3.0])) for step in steps(loaded))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_parameter_without_dimensions_has_scalars_of_its_own(tmp_path: Path, num_steps: int) -> None:
    def nadam(num_steps: int, value: float) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        model.scale = nn.Parameter(torch.tensor(value))
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
        for _ in range(num_steps):
            (model(torch.ones(4, 3)).sum() * model.scale).backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = nadam(3, 2.0)
    bcp.save(tmp_path, saved)
    loaded = deepspeed_like.engine_state(nadam(num_steps, 1.0), deepspeed_like.zero_1)
    bcp.load(tmp_path, loaded)
    [state] = loaded["optimizer"].optimizer.state.values()
    for key in ("step", "mu_product"):
        assert torch.equal(state[key], saved["optimizer"].state[saved["model"].scale][key])


@pytest.mark.parametrize("is_capturable", [False, True])
def test_scalars_are_made_where_the_group_says(is_capturable: bool) -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [parameter], "capturable": is_capturable}])
    assert scalar_device(optimizer.param_groups[0], parameter).type == ("meta" if is_capturable else "cpu")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", [torch.optim.AdamW, Steps], ids=["tensors", "numbers"])
def test_scalars_are_made_where_the_loaded_group_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any, source: Any
) -> None:
    """The next step reads the flags of the checkpoint: a fused one cannot take a count that is on the host."""
    asked: list[bool] = []

    def device(group: Mapping[str, Any], _: Tensor) -> torch.device:
        asked.append(group["fused"])
        return torch.device("cpu")

    monkeypatch.setattr(param_state, "scalar_device", device)
    monkeypatch.setattr(flat_optimizer_state, "scalar_device", device)
    saved = training(3, source)
    saved["optimizer"].param_groups[0]["fused"] = True
    bcp.save(tmp_path, saved)
    bcp.load(tmp_path, layout(0, torch.optim.AdamW))
    assert asked
    assert all(asked)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_number_that_the_checkpoint_lacks_is_missed(tmp_path: Path, layout: Any) -> None:
    saved = training(1)
    for of_one in saved["optimizer"].state.values():
        del of_one["step"]
    bcp.save(tmp_path, saved)
    loaded = layout(0)
    optimizer = getattr(loaded["optimizer"], "optimizer", loaded["optimizer"])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] = 5
    with pytest.raises(bcp.CheckpointMismatchError, match=r"optimizer\.state\.weight\.step: not in the checkpoint"):
        bcp.load(tmp_path, loaded)
    bcp.load(tmp_path, loaded, exclude="optimizer.state.*.step")
    report = bcp.load(tmp_path, loaded, strict=False)
    assert sorted(report.missing) == ["optimizer.state.bias.step", "optimizer.state.weight.step"]
    assert set(steps(loaded)) == {5}


def of_norms(layout: Callable[..., dict[str, Any]], value: Callable[[Tensor], Any]) -> dict[str, Any]:
    state = layout(0)
    optimizer = getattr(state["optimizer"], "optimizer", state["optimizer"])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["norm"] = value(parameter)
    return state


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stored", [2, 2.0, torch.tensor(2.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_value_is_no_tensor_like_the_parameters(tmp_path: Path, layout: Any, stored: Any) -> None:
    bcp.save(tmp_path, of_norms(training, lambda _: stored))
    loaded = of_norms(layout, lambda parameter: torch.ones_like(parameter).detach())
    with pytest.raises(bcp.CheckpointMismatchError, match=r"optimizer\.state\.weight\.norm"):
        bcp.load(tmp_path, loaded)
    bcp.load(tmp_path, loaded, strict=False)
    optimizer = getattr(loaded["optimizer"], "optimizer", loaded["optimizer"])
    assert all(state["norm"].eq(1).all() for state in optimizer.state.values())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_like_the_parameters_is_no_one_value(tmp_path: Path, layout: Any) -> None:
    bcp.save(tmp_path, of_norms(training, lambda parameter: torch.ones_like(parameter).detach()))
    loaded = of_norms(layout, lambda _: torch.tensor(2.0))
    shapes = r"optimizer\.state\.weight\.norm: shape \[2, 3\] in the checkpoint, \[\] in the state"
    with pytest.raises(bcp.CheckpointMismatchError, match=shapes):
        bcp.load(tmp_path, loaded)
    report = bcp.load(tmp_path, loaded, strict=False)
    assert report.num_tensors == 2
    optimizer = getattr(loaded["optimizer"], "optimizer", loaded["optimizer"])
    assert all(torch.equal(state["norm"], torch.tensor(2.0)) for state in optimizer.state.values())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("own", [torch.zeros_like, lambda _: torch.tensor(2.0)], ids=["like the parameter", "one"])
@pytest.mark.parametrize("stored", [None, [1, 2], "much"], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_stays_where_the_checkpoint_has_plain_data(tmp_path: Path, layout: Any, stored: Any, own: Any) -> None:
    bcp.save(tmp_path, of_norms(training, lambda _: stored))
    loaded = of_norms(layout, lambda parameter: own(parameter).detach())
    optimizer = getattr(loaded["optimizer"], "optimizer", loaded["optimizer"])
    before = [state["norm"].clone() for state in optimizer.state.values()]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"optimizer\.state\.weight\.norm: "):
        bcp.load(tmp_path, loaded)
    bcp.load(tmp_path, loaded, strict=False)
    after = [state["norm"] for state in optimizer.state.values()]
    assert all(map(torch.equal, before, after))


@pytest.mark.usefixtures("group")
def test_all_but_the_values_that_differ_is_loaded(tmp_path: Path) -> None:
    saved = training(3) | {"epoch": 7}
    saved["optimizer"].state[saved["model"].bias]["step"] = 9
    saved["optimizer"].param_groups[0]["lr"] = 0.5
    bcp.save(tmp_path, saved)
    loaded = partitioned(1) | {"epoch": 0}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"bias\.step is 9 .*weight\.step is 3.*partly overwritten"):
        bcp.load(tmp_path, loaded)
    optimizer = loaded["optimizer"].optimizer
    assert steps(loaded) == [1]
    assert loaded["epoch"] == 7
    assert optimizer.param_groups[0]["lr"] == 0.5
    wanted = saved["model"].state_dict()
    for name, own in loaded["model"].module.named_parameters():
        assert torch.equal(own, wanted[name].to(own.dtype))


class Layers(nn.Module):
    """Of which two are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3), torch.ones(3)])

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        whole: dict[str, Any] = {"global_shape": (2, 3), "prepend_axis_num": 1}
        return {
            str(layer): sharded("w", weight, global_offset=(layer, 0), **whole)
            for layer, weight in enumerate(self.weights)
        }


def test_parts_of_a_parameter_have_one_count_of_steps_also_as_a_number(tmp_path: Path) -> None:
    model = Layers()
    optimizer = Steps(model.parameters())
    optimizer.step()
    bcp.save(tmp_path / "same", {"model": model, "optimizer": optimizer})
    optimizer.state[model.weights[1]]["step"] = 6
    with pytest.raises(bcp.CheckpointSaveError, match="6 for one part of a parameter and 1 for another"):
        bcp.save(tmp_path / "other", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("value", [OrderedDict(b=1, a=2), [Counter("aab")], {"o": OrderedDict(t=torch.ones(2))}])
def test_a_dict_of_another_type_stays_one(tmp_path: Path, value: Any) -> None:
    saved, loaded = training(1), training(0)
    saved["optimizer"].state[saved["model"].weight]["own"] = value
    bcp.save(tmp_path, saved)
    bcp.load(tmp_path, loaded)
    assert repr(loaded["optimizer"].state[loaded["model"].weight]["own"]) == repr(value)


class Named(dict[str, Any]):
    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize("value", [defaultdict(list, a=[1], t=torch.ones(2)), Named("n", a=[1], t=torch.ones(2))])
def test_a_dict_of_a_type_that_a_checkpoint_does_not_have_comes_back_as_a_dict(tmp_path: Path, value: Any) -> None:
    saved, loaded = training(1), training(0)
    for parameter in saved["model"].parameters():
        saved["optimizer"].state[parameter]["own"] = value
    with pytest.warns(UserWarning, match="in an optimizer's state is saved as a dict") as warned:
        bcp.save(tmp_path, saved)
    assert len({str(each.message) for each in warned}) == 1
    bcp.load(tmp_path, loaded)
    own = loaded["optimizer"].state[loaded["model"].weight]["own"]
    assert type(own) is dict
    assert same_value(own, {"a": [1], "t": torch.ones(2)})
    assert type(saved["optimizer"].state[saved["model"].weight]["own"]) is type(value)


def test_state_that_does_not_fit_by_its_dtype_is_left_out_whole_and_the_next_step_runs(tmp_path: Path) -> None:
    """A fresh optimizer had float32 moments for bfloat16 parameters then, with which the next step failed."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.weight = nn.Parameter(other.weight.detach().bfloat16())
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    report = bcp.load(tmp_path, {"model": other, "optimizer": fresh}, strict=False)
    assert any("optimizer.state.weight.exp_avg:" in text for text in report.mismatched)
    assert list(fresh.state) == [other.bias]
    assert same_value(fresh.state[other.bias], optimizer.state[model.bias])
    other.weight.grad = torch.ones_like(other.weight)
    fresh.step()


@pytest.mark.parametrize(("shape", "device"), [((3, 3), "cuda"), ((), "cpu")])
def test_factors_in_a_list_of_a_fresh_optimizer_lie_where_their_parameter_does(shape: Any, device: str) -> None:
    with FakeTensorMode():  # this machine need not have the device
        state = SubclassState(nn.Parameter(torch.empty(3, 2, device="cuda")), {}, {}, {})
        made = state.new_part("Q.0", StoredTensor("state.weight.Q.0", "float32", shape), None, is_factor=True)
    assert made.device.type == device


def test_factors_in_a_list_lie_in_memory_as_those_that_the_optimizer_has(tmp_path: Path) -> None:
    """As for SOAP, which steps to other bits with a row-major copy of a column-major Q."""
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.SGD([("weight", weight)])
    optimizer.state[weight]["Q"] = [torch.arange(9.0).view(3, 3).T, torch.arange(4.0)]
    bcp.save(tmp_path, {"optimizer": optimizer})
    optimizer.state[weight]["Q"] = [torch.zeros(3, 3).T, torch.zeros(2, 2)]
    bcp.load(tmp_path, {"optimizer": optimizer})
    first, second = optimizer.state[weight]["Q"]
    assert first.stride() == (1, 3)
    assert torch.equal(first, torch.arange(9.0).view(3, 3).T)
    assert torch.equal(second, torch.arange(4.0))


def test_a_load_looks_at_the_state_of_many_parameters_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ParameterList([torch.ones(2) for _ in range(100)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(2)
    optimizer.step()
    bcp.save(tmp_path / "1", {"model": model, "optimizer": optimizer})
    optimizer.step()
    looks, look_at = [], shards.look_at

    def noted(tensors: Any, **options: Any) -> Any:
        looks.append(len(tensors))
        return look_at(tensors, **options)

    monkeypatch.setattr(shards, "look_at", noted)
    bcp.load(tmp_path / "1", {"model": model, "optimizer": optimizer})
    assert sum(looks) == 400  # a parameter, its step and two moments
    assert len(looks) <= 3  # 256 at once stay in the processor's cache
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


class Factored(torch.optim.Optimizer):
    """Has a square factor for each dimension of a parameter, in a list, as SOAP has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, _closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            factors = [torch.eye(length) for length in parameter.shape]
            self.state[parameter] = {"exp_avg": torch.ones_like(parameter.detach()), "GG": factors}


def test_an_optimizer_with_factors_that_torch_saved_is_loaded_by_position(tmp_path: Path) -> None:
    model = nn.Linear(3, 5, bias=False)
    optimizer, restored = Factored(model.parameters()), Factored(model.parameters())
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    bcp.load(tmp_path / "a.pt", {"model": model, "optimizer": restored})
    assert same_value(restored.state[model.weight], optimizer.state[model.weight])


def test_factors_that_look_like_the_parameter_do_not_stand_for_state_of_its_shape(tmp_path: Path) -> None:
    model, other = nn.Linear(8, 4, bias=False), nn.Linear(8, 1, bias=False)
    optimizer, restored = Factored(model.parameters()), Factored(other.parameters())
    optimizer.step()
    optimizer.state[model.weight]["GG"] = [torch.ones(4, 1), torch.ones(1, 8)]  # as Adafactor's
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    bcp.load(tmp_path / "a.pt", {"model": other, "optimizer": restored}, strict=False)
    assert not restored.state[other.weight]
