"""What does not fit is one error that lists it all and leaves the state as it was, or a report of what was left out."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_tensors import same_bits
from torch import nn
from training import mlp, same_module, same_optimizer, same_value, train

import bytecheckpoint as bcp


def training_state(seed: int, num_steps: int = 2) -> dict[str, Any]:
    model = mlp(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + seed)
    train(model, [optimizer], num_steps, seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + seed)
    plain = {"epoch": seed, "history": [seed], "extra": {"t": torch.full((2,), float(seed))}}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "plain": plain}


def frozen_copy(state: dict[str, Any]) -> Any:
    """What the state holds now, bit for bit."""
    kept = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}
    return copy.deepcopy(
        {name: value.value if isinstance(value, bcp.RankLocal) else value for name, value in kept.items()}
    )


def fails(path: Path, state: dict[str, Any], **arguments: Any) -> bcp.CheckpointMismatchError:
    """The error of a load, after which the state has to be as it was."""
    before = frozen_copy(state)
    with pytest.raises(bcp.CheckpointMismatchError) as error:
        bcp.load(path, state, **arguments)
    assert same_value(frozen_copy(state), before)
    return error.value


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    bcp.save(tmp_path, training_state(0))
    return tmp_path


def test_everything_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    bcp.save(
        tmp_path,
        {"s": {"gone": torch.ones(1), "shape": torch.ones(2, 3), "dtype": torch.ones(4), "n": 1, "ok": torch.ones(2)}},
    )
    state = {
        "s": {
            "shape": torch.zeros(3, 2),
            "dtype": torch.zeros(4).int(),
            "new": torch.zeros(1),
            "m": 1,
            "ok": torch.zeros(2),
        }
    }
    error = fails(tmp_path, state)
    for text in (
        "missing_key: s.new: not in the checkpoint",
        "missing_key: s.m: not in the checkpoint",
        "unexpected_key: s.gone: in the checkpoint, not in the state",
        "unexpected_key: s.n",
        "shape: s.shape: shape [2, 3] in the checkpoint, [3, 2] in the state",
        "dtype: s.dtype: dtype float32 in the checkpoint, int32 in the state",
        "2 missing_key, 2 unexpected_key, 1 shape, 1 dtype",
        "strict=False",
    ):
        assert text in str(error)
    assert error.kind == "missing_key"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda state: state["model"].append(nn.Linear(1, 1)), "missing_key"),
        (lambda state: state["model"].__delitem__(3), "unexpected_key"),
        (lambda state: state["model"].__setitem__(3, nn.Linear(8, 5)), "shape"),
        (lambda state: state["model"][3].half(), "dtype"),
        (lambda state: state["plain"].update(more=1), "missing_key"),
        (lambda state: state["plain"].pop("epoch"), "unexpected_key"),
        (lambda state: state.update(other=torch.ones(1)), "missing_key"),
        (lambda state: state.update(other=torch.optim.lr_scheduler.StepLR(state["optimizer"], 1)), "missing_key"),
        (lambda state: state.update(other=bcp.RankLocal(1)), "missing_key"),
    ],
)
def test_one_misfit_anywhere_leaves_all_of_the_state_unchanged(saved: Path, change: Any, kind: str) -> None:
    state = training_state(1)
    change(state)
    state["optimizer"] = torch.optim.Adam(state["model"].parameters())
    error = fails(saved, state)
    assert error.kind == kind
    assert len(state["optimizer"].state) == 0


def test_the_first_ten_of_a_kind_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"s": {f"old{index:02d}": torch.ones(1) for index in range(25)}})
    error = fails(tmp_path, {"s": {f"new{index:02d}": torch.ones(1) for index in range(12)}})
    assert all(f"s.new{index:02d}" in str(error) for index in range(10))
    assert "s.new10" not in str(error)
    assert "missing_key: and 2 more" in str(error)
    assert "unexpected_key: and 15 more" in str(error)


def test_near_names_are_pointed_out(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"layers.0.attention.weight": torch.ones(1)}})
    error = fails(tmp_path, {"model": {"layers.0.attn.weight": torch.ones(1)}})
    assert "(near: model.layers.0.attention.weight)" in str(error)
    assert "(near: model.layers.0.attn.weight)" in str(error)


class Shows:
    """An object with this state_dict()."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("has_tensors", [True, False])
def test_an_object_of_another_form_than_the_optimizer_that_was_saved_is_one_conflict(
    tmp_path: Path, has_tensors: bool
) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, [optimizer], 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    state = {"0.weight": {"step": torch.tensor(1.0)}} if has_tensors else {}
    shown = Shows({"state": state, "num_steps": 1})
    with pytest.raises(bcp.CheckpointMismatchError, match="pass the optimizer itself") as error:
        bcp.load(tmp_path, {"optimizer": shown})
    assert error.value.kind == "conflict"
    assert "near" not in str(error.value)
    assert shown.state["num_steps"] == 1


def test_a_hint_is_never_the_name_itself(tmp_path: Path) -> None:
    """Where a tensor is in the checkpoint, and not in the tree of the object that was saved under its name."""
    bcp.save(tmp_path, {"s": Shows({"a": 1}), "t": torch.ones(1)})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"missing_key: s\.t: not in the checkpoint") as error:
        bcp.load(tmp_path, {"s": Shows({"t": torch.ones(1)})}, key_map={"t": "s.t"})
    assert "near: s.t)" not in str(error.value)


def test_not_strict_loads_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    bcp.save(
        tmp_path,
        {"s": {"gone": torch.ones(1), "shape": torch.ones(2), "dtype": torch.ones(4), "ok": torch.ones(2), "n": 1}},
    )
    state = {
        "s": {
            "shape": torch.zeros(3),
            "dtype": torch.zeros(4).int(),
            "new": torch.zeros(1),
            "ok": torch.zeros(2),
            "n": 0,
            "m": 5,
        }
    }
    report = bcp.load(tmp_path, state, strict=False)
    assert state["s"]["ok"].tolist() == [1.0, 1.0]
    assert (state["s"]["n"], state["s"]["m"]) == (1, 5)
    assert not any(state["s"][name].any() for name in ("shape", "dtype", "new"))
    assert set(report.missing) == {"s.new", "s.m"}
    assert report.unexpected == ["s.gone"]
    assert [text.split(":")[0] for text in report.mismatched] == ["s.shape", "s.dtype"]
    assert report.num_tensors == 1


@pytest.mark.parametrize("name", ["s", "extra_state"])
def test_tensor_here_and_data_there(tmp_path: Path, name: str) -> None:
    big = torch.ones(20_000)  # too large to travel with plain data
    bcp.save(tmp_path, {name: {"a": big, "b": 5, "beside": big}})
    state = {name: {"a": 5, "b": torch.zeros(2), "beside": torch.zeros(20_000)}}
    error = fails(tmp_path, state)
    assert f"{name}.a: a tensor in the checkpoint, plain data in the state" in str(error)
    assert f"{name}.b: plain data in the checkpoint, a tensor in the state" in str(error)


def test_a_list_with_a_tensor_where_the_state_has_numbers_alone(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"optimizer": {"param_groups": [{"lr": torch.ones(2), "eps": 1e-8}]}})
    error = fails(tmp_path, {"optimizer": {"param_groups": [{"lr": 0.5, "eps": 1e-8}]}})
    assert "optimizer.param_groups: has names below it in the checkpoint, as a list with a tensor" in str(error)
    assert "(near: optimizer.param_groups.0.lr)" in str(error)


def test_a_bare_tensor_at_the_top_where_the_state_has_data(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": torch.ones(2)})
    error = fails(tmp_path, {"a": 5})
    assert "a: a tensor in the checkpoint, plain data in the state" in str(error)


def test_small_tensors_of_extra_state_are_checked_as_all_are(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"extra_state": {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}})
    state = {"extra_state": {"a": torch.zeros(3), "b": torch.zeros(2).int(), "c": torch.zeros(2)}}
    error = fails(tmp_path, state)
    assert "extra_state.a: shape [2] in the checkpoint, [3] in the state" in str(error)
    assert "extra_state.b: dtype float32 in the checkpoint, int32 in the state" in str(error)
    bcp.load(tmp_path, state, strict=False)
    assert not state["extra_state"]["a"].any()
    assert not state["extra_state"]["b"].any()
    assert state["extra_state"]["c"].all()


@pytest.mark.parametrize("names", [["model"], ["optimizer", "model"], ["plain"], ["scheduler"]])
def test_a_part_of_the_state_loads_and_the_rest_is_left_alone(saved: Path, names: list[str]) -> None:
    state = training_state(1)
    before, expected = frozen_copy(state), frozen_copy(training_state(0))
    report = bcp.load(saved, {name: state[name] for name in names})
    after = frozen_copy(state)
    assert all(same_value(after[name], expected[name]) for name in names)
    assert all(same_value(after[name], before[name]) for name in state if name not in names)
    assert not report.unexpected


def test_top_level_names_that_start_alike(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": mlp(0), "model_ema": mlp(1), "mode": {"l": 1}, "model2": [1]})
    model = mlp(2)
    bcp.load(tmp_path, {"model": model})
    assert same_module(model, mlp(0))
    bcp.load(tmp_path, {"model_ema": model})
    assert same_module(model, mlp(1))


def test_nothing_of_the_state_is_in_the_checkpoint(saved: Path) -> None:
    error = fails(saved, {"net": mlp(1)})
    assert error.kind == "missing_key"
    assert "net.0.weight" in str(error)


def test_include_and_exclude(saved: Path) -> None:
    source, state = training_state(0), training_state(1)
    before = frozen_copy(state)
    report = bcp.load(saved, {"model": state["model"]}, include="model.0.*")
    assert same_bits(state["model"][0].weight, source["model"][0].weight)
    assert same_bits(state["model"][3].weight, before["model"]["3.weight"])
    assert {"model.3.weight", "model.3.bias"} <= set(report.skipped)
    assert not {"model.0.weight", "model.0.bias"} & set(report.skipped)

    state = training_state(1)
    report = bcp.load(saved, state, exclude=["optimizer*", "plain.epoch", "model.3.bias"])
    assert same_bits(state["model"][3].weight, source["model"][3].weight)
    assert same_bits(state["model"][3].bias, before["model"]["3.bias"])
    assert same_value(state["optimizer"].state_dict()["state"], before["optimizer"]["state"])
    assert (state["plain"]["epoch"], state["plain"]["history"]) == (1, [0])
    assert "model.3.bias" in report.skipped


def test_exclude_makes_place_for_what_does_not_fit(saved: Path) -> None:
    model = mlp(1)
    model[3] = nn.Linear(8, 10)
    bias = model[3].bias.detach().clone()
    bcp.load(saved, {"model": model}, exclude="model.3.*")
    assert same_bits(model[0].weight, training_state(0)["model"][0].weight)
    assert same_bits(model[3].bias, bias)


def test_an_empty_dict_takes_only_what_is_included(saved: Path) -> None:
    state: dict[str, Any] = {"plain": {}}
    bcp.load(saved, state, exclude=["plain.epoch", "plain.extra.*"])
    assert state == {"plain": {"history": [0]}}
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        bcp.load(saved, state := {"plain": {}}, exclude="plain*", strict=False)
    assert state == {"plain": {}}


@pytest.mark.parametrize("exclude", ["optimizer*", "optimizer.*"])
def test_an_excluded_optimizer_is_left_alone(saved: Path, exclude: str) -> None:
    state = training_state(1)
    before = frozen_copy(state)["optimizer"]
    report = bcp.load(saved, state, exclude=exclude)
    assert same_value(state["optimizer"].state_dict(), before)
    assert {"optimizer.state.0.weight.exp_avg", "optimizer.groups.0.weight.values.lr"} <= set(report.skipped)
    assert same_module(state["model"], training_state(0)["model"])


def test_include_of_what_is_below_an_entry_takes_that_entry(saved: Path) -> None:
    source, state = training_state(0), training_state(1)
    before = frozen_copy(state)
    bcp.load(saved, state, include=["scheduler.*", "optimizer.state.*"])
    assert same_value(state["scheduler"].state_dict(), source["scheduler"].state_dict())
    found = state["optimizer"].state_dict()
    assert same_value(found["state"], source["optimizer"].state_dict()["state"])
    assert same_value(found["param_groups"], before["optimizer"]["param_groups"])
    assert same_value(state["plain"], before["plain"])


def test_one_hyperparameter_can_be_left_out(saved: Path) -> None:
    state = training_state(1)
    bcp.load(saved, state, exclude="optimizer.groups.*.values.lr")
    assert state["optimizer"].param_groups[0]["lr"] == 1.1
    assert same_value(state["optimizer"].state_dict()["state"], training_state(0)["optimizer"].state_dict()["state"])


def test_tied_tensors_that_get_one_name_are_both_named(tmp_path: Path) -> None:
    first, other = nn.Linear(2, 2), nn.Linear(2, 2)
    bcp.save(tmp_path, {"model": nn.ModuleDict({"a": first, "b": first, "c": other, "d": other})})
    key_map = {"model.b.weight": "model.z", "model.d.weight": "model.z"}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.z to both model\.b\.weight and model\.d\.weight"):
        bcp.load(tmp_path, {"model": nn.Linear(2, 2)}, key_map=key_map)


KEY_MAPS = {
    "dict": {f"model.{name}": f"model.net.{name}" for name in mlp().state_dict()},
    "regex": [(r"^model\.", "model.net.")],
    "function": lambda fqn: fqn.replace("model.", "model.net.", 1) if fqn.startswith("model.") else fqn,
}


@pytest.mark.parametrize("key_map", KEY_MAPS.values(), ids=KEY_MAPS.keys())
def test_key_map_renames_parameters_and_the_optimizer_follows(saved: Path, key_map: Any) -> None:
    source, inner = training_state(0), mlp(1)
    model = nn.Module()
    model.net = inner
    optimizer = torch.optim.Adam(model.parameters())
    bcp.load(saved, {"model": model, "optimizer": optimizer}, key_map=key_map)
    assert same_module(inner, source["model"])
    assert same_value(optimizer.state_dict()["state"], source["optimizer"].state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def square_net(num_layers: int, seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, [optimizer], 2, seed)
    return model, optimizer


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [dict(optimizer.state[parameter]) for parameter in model.parameters()]


def next_layer(fqn: str) -> str:
    return re.sub(r"^(model|optimizer\.state)\.(\d)\.", lambda found: f"{found[1]}.{int(found[2]) + 1}.", fqn)


SWAPPED = {
    f"{prefix}.{index}.{name}{key}": f"{prefix}.{1 - index}.{name}{key}"
    for prefix, keys in {"model": [""], "optimizer.state": [".step", ".exp_avg", ".exp_avg_sq"]}.items()
    for index in (0, 1)
    for name in ("weight", "bias")
    for key in keys
}
SWAPS = {
    "of the model": {fqn: new for fqn, new in SWAPPED.items() if fqn.startswith("model.")},
    "of the optimizer too": SWAPPED,
}


@pytest.mark.parametrize("key_map", SWAPS.values(), ids=SWAPS.keys())
def test_key_map_that_swaps_parameters_swaps_their_optimizer_state(tmp_path: Path, key_map: Any) -> None:
    (model, optimizer), (other, restored) = square_net(2, 0), square_net(2, 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": restored}, key_map=key_map)
    assert same_module(other, nn.Sequential(model[1], model[0]))
    assert same_value(states_of(other[0], restored), states_of(model[1], optimizer))
    assert same_value(states_of(other[1], restored), states_of(model[0], optimizer))


def test_key_map_that_shifts_layers_shifts_their_optimizer_state_once(tmp_path: Path) -> None:
    (model, optimizer), (other, _) = square_net(2, 0), square_net(3, 1)
    restored = torch.optim.AdamW(other[1:].parameters())
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.warns(UserWarning, match="matches nothing"):
        bcp.load(
            tmp_path, {"model": other, "optimizer": restored}, key_map=next_layer, exclude="model.2.*", strict=False
        )
    assert same_value(states_of(other[1:], restored), states_of(model, optimizer))


def test_key_map_of_optimizer_state_alone(tmp_path: Path) -> None:
    model, optimizer = square_net(2, 0)
    named = torch.optim.AdamW(model.named_parameters())
    named.load_state_dict(optimizer.state_dict())
    restored = torch.optim.AdamW([(name.replace("0.", "a.", 1), p) for name, p in model.named_parameters()])
    bcp.save(tmp_path, {"optimizer": named})
    bcp.load(tmp_path, {"optimizer": restored}, key_map=[(r"^optimizer\.state\.0\.", "optimizer.state.a.")])
    assert same_value(restored.state_dict()["state"], named.state_dict()["state"])


def with_other_head(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = mlp(seed)
    model[3] = nn.Linear(8, 5)
    return model, torch.optim.Adam(model.parameters())


def test_state_of_a_parameter_with_another_shape_is_a_shape_problem(saved: Path) -> None:
    model, optimizer = with_other_head(1)
    state = {"model": model, "optimizer": optimizer}
    error = fails(saved, state)
    assert error.kind == "shape"
    text = "optimizer.state.3.weight.exp_avg: of a parameter of shape [3, 8] in the checkpoint, [5, 8] in the state"
    assert text in str(error)
    report = bcp.load(saved, state, strict=False)
    assert "optimizer.state.3.weight.exp_avg_sq" in {line.split(":")[0] for line in report.mismatched}
    assert len(optimizer.state) == len(list(model.parameters())) - 2
    train(model, [optimizer], 2)


def test_the_optimizer_state_of_an_excluded_parameter_is_left_out_with_it(saved: Path) -> None:
    model, optimizer = with_other_head(1)
    bcp.load(saved, {"model": model, "optimizer": optimizer}, exclude="model.3.*")
    assert not optimizer.state[model[3].weight]
    expected = training_state(0)
    assert same_value(states_of(model[0], optimizer), states_of(expected["model"][0], expected["optimizer"]))
    train(model, [optimizer], 2)


def test_state_of_parameters_that_the_optimizer_does_not_hold_is_unexpected(saved: Path) -> None:
    model = mlp(1)
    error = fails(saved, {"model": model, "optimizer": torch.optim.Adam(model[0].parameters())})
    assert error.kind == "unexpected_key"
    assert "optimizer.state.3.weight.exp_avg" in str(error)
    assert "optimizer.state.0." not in str(error)


def test_hyperparameters_can_be_excluded_by_the_names_that_errors_print(tmp_path: Path) -> None:
    model, other = mlp(0), mlp(1)
    groups = [{"params": [parameter], "lr": 0.1 + index} for index, parameter in enumerate(model.parameters())]
    bcp.save(tmp_path, {"model": model, "optimizer": torch.optim.Adam(groups, betas=(0.5, 0.5))})
    optimizer = torch.optim.Adam(other.parameters(), lr=7.0)
    error = fails(tmp_path, {"model": other, "optimizer": optimizer})
    assert "optimizer.groups.0.weight.values.lr: the parameters of this group" in str(error)
    bcp.load(tmp_path, {"model": other, "optimizer": optimizer}, exclude="optimizer.groups.*")
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (7.0, (0.9, 0.999))
    bcp.load(tmp_path, {"model": other, "optimizer": optimizer}, exclude="optimizer.groups.*.values.lr")
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (7.0, (0.5, 0.5))


def test_key_map_renames_whole_entries(saved: Path) -> None:
    source = training_state(0)
    model = mlp(1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = {
        "net": model,
        "adam": optimizer,
        "schedule": scheduler,
        "data": {"epoch": 9, "history": [], "extra": {"t": torch.zeros(2)}},
    }
    rules = [(r"^model\.", "net."), (r"^optimizer\b", "adam"), (r"^scheduler\b", "schedule"), (r"^plain\b", "data")]
    bcp.load(saved, state, key_map=rules)
    assert same_module(model, source["model"])
    assert same_optimizer(optimizer, source["optimizer"])
    assert same_value(scheduler.state_dict(), source["scheduler"].state_dict())
    assert same_value(state["data"], source["plain"])


def test_key_map_swaps_names(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"s": {"a": torch.ones(1), "b": torch.zeros(1), "x": 1, "y": 2}})
    state = {"s": {"a": torch.full((1,), 5.0), "b": torch.full((1,), 5.0), "x": 0, "y": 0}}
    bcp.load(tmp_path, state, key_map={"s.a": "s.b", "s.b": "s.a", "s.x": "s.y", "s.y": "s.x"})
    assert (state["s"]["a"].item(), state["s"]["b"].item(), state["s"]["x"], state["s"]["y"]) == (0.0, 1.0, 2, 1)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(("source", "target"), [("a", "z"), ("z", "a")], ids=["forwards", "backwards"])
def test_key_map_onto_a_name_whose_own_entry_is_excluded(tmp_path: Path, source: str, target: str) -> None:
    def state(count: int) -> dict[str, Any]:
        """Each kind of entry."""
        return {
            "counter": Counter(count),
            "rank": bcp.RankLocal({"k": count}),
            "data": {"k": count, "t": torch.full((2,), float(count))},
        }

    bcp.save(tmp_path, {source: state(1), target: state(2)})
    for data in (state(0)["data"], {}):
        loaded = {target: state(0) | {"data": data}}
        report = bcp.load(tmp_path, loaded, key_map=[(rf"^{source}\b", target)], exclude=f"{target}.*")
        assert (loaded[target]["counter"].count, loaded[target]["rank"].value) == (1, {"k": 1})
        assert same_value(data, state(1)["data"])
        assert list(report.skipped) == []


@pytest.mark.parametrize("value", [torch.ones(1), 1], ids=["tensors", "data"])
def test_key_map_that_gives_one_name_to_two_is_refused(tmp_path: Path, value: Any) -> None:
    bcp.save(tmp_path, {"s": {"a": value, "b": value}})
    state = {"s": {"a": value, "b": value}}
    error = fails(tmp_path, state, key_map={"s.a": "s.b"})
    assert error.kind == "conflict"
    assert "s.b" in str(error)


def test_cast_converts_and_reports(tmp_path: Path) -> None:
    values = torch.randn(300, 7)
    bcp.save(tmp_path, {"s": {"a": values, "b": values.bfloat16(), "c": values, "d": torch.arange(5)}})
    state = {
        "s": {
            "a": torch.zeros(300, 7, dtype=torch.bfloat16),
            "b": torch.zeros(7, 300, dtype=torch.float64).t(),
            "c": torch.zeros(300, 7),
            "d": torch.zeros(5),
        }
    }
    assert fails(tmp_path, state).kind == "dtype"
    report = bcp.load(tmp_path, state, cast=True)
    assert same_bits(state["s"]["a"], values.bfloat16())
    assert same_bits(state["s"]["b"], values.bfloat16().double())
    assert same_bits(state["s"]["c"], values)
    assert state["s"]["d"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert report.cast == ["s.a", "s.b", "s.d"]


def test_cast_of_a_model_casts_state_that_has_its_dtype_so_that_steps_go_on(saved: Path) -> None:
    model = mlp(1).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    report = bcp.load(saved, {"model": model, "optimizer": optimizer}, cast=True)
    stored = training_state(0)
    assert same_bits(model[0].weight, stored["model"][0].weight.bfloat16())
    own, saved_state = optimizer.state[model[0].weight], stored["optimizer"].state[stored["model"][0].weight]
    assert same_value(own["step"], saved_state["step"])
    assert same_bits(own["exp_avg_sq"], saved_state["exp_avg_sq"].bfloat16())
    assert "optimizer.state.0.weight.exp_avg_sq" in report.cast
    model(torch.ones(4, model[0].in_features, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


def test_the_report_tells_what_was_loaded(saved: Path) -> None:
    state = training_state(1)
    report = bcp.load(saved, state)
    info = bcp.open(saved).info
    assert (report.path, report.step, report.save_id) == (str(saved), None, info.save_id)
    assert report.num_tensors == info.num_tensors
    assert report.num_bytes_read > 0
    assert not any((report.missing, report.unexpected, report.mismatched, report.cast, report.skipped))


def test_memory_that_was_freed_or_cut_is_not_written_to(tmp_path: Path) -> None:
    """As fully_shard does with what it gathered: the tensor still has its shape."""
    bcp.save(tmp_path, {"t": torch.arange(1000.0), "other": torch.ones(3)})
    for num_bytes in (0, 400, 3996):
        state = {"t": torch.zeros(1000), "other": torch.zeros(3)}
        state["t"].untyped_storage().resize_(num_bytes)
        with pytest.raises(bcp.CheckpointMismatchError, match="t: the memory of the state's tensor has been freed"):
            bcp.load(tmp_path, state)
        assert state["other"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize(("left", "what"), [(0, "whose memory has been freed"), (400, "of 4000 bytes whose storage")])
def test_memory_that_was_freed_or_cut_is_not_saved(tmp_path: Path, async_save: bool, left: int, what: str) -> None:
    state = {"t": torch.arange(1000.0), "other": torch.ones(3)}
    state["t"].untyped_storage().resize_(left)
    with pytest.raises(bcp.CheckpointSaveError, match=f"t is a tensor {what}"):
        bcp.save(tmp_path / "ckpt", state, async_save=async_save)
    assert not (tmp_path / "ckpt").exists()
    bcp.save(tmp_path / "ckpt", {"other": state["other"]}, async_save=async_save).result(60)


@pytest.mark.parametrize("value", [300.0, -1.0, float("nan"), 2.5, float("inf")])
def test_a_cast_of_a_value_that_an_integer_dtype_does_not_have_is_refused(tmp_path: Path, value: float) -> None:
    stored = torch.ones(20, 30)
    stored[7, 9] = value
    bcp.save(tmp_path, {"t": stored, "fits": torch.tensor([0.0, 255.0])})
    with pytest.raises(bcp.CheckpointMismatchError, match=rf"t: {value} and perhaps .* no uint8.*overwritten") as error:
        bcp.load(tmp_path, {"t": torch.zeros(20, 30, dtype=torch.uint8)}, cast=True)
    assert error.value.kind == "dtype"
    state = {"fits": torch.zeros(2, dtype=torch.uint8)}
    bcp.load(tmp_path, state, cast=True)
    assert state["fits"].tolist() == [0, 255]


def test_a_cast_of_integers_to_shorter_ones_keeps_their_values_or_is_refused(tmp_path: Path) -> None:
    bcp.save(
        tmp_path, {"fits": torch.tensor([-128, 127]), "large": torch.tensor([1, 128]), "truth": torch.tensor([0, 1])}
    )
    state = {"fits": torch.zeros(2, dtype=torch.int8), "truth": torch.zeros(2, dtype=torch.bool)}
    bcp.load(tmp_path, state, cast=True)
    assert [state["fits"].tolist(), state["truth"].tolist()] == [[-128, 127], [False, True]]
    with pytest.raises(bcp.CheckpointMismatchError, match="large: 128 and perhaps"):
        bcp.load(tmp_path, {"large": torch.zeros(2, dtype=torch.int8)}, cast=True)
