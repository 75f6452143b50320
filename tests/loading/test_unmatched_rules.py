"""A glob or a rule that matches nothing, and a load that would fill nothing, are misspelt names: errors under strict,
one warning else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from training import mlp, same_value, train

import bytecheckpoint as bcp
from bytecheckpoint.loading import mismatches
from distributed.workers import WorkerPool


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "epoch": 3, "rank": bcp.RankLocal({"seed": 5})}
    bcp.save(tmp_path, state)
    return tmp_path


def fresh() -> dict[str, Any]:
    model = mlp(1)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"include": "modle.*"}, "include 'modle.*'"),
    ({"include": ["model.*", "optimiser.*"]}, "include 'optimiser.*'"),
    ({"exclude": "modle.*"}, "exclude 'modle.*'"),
    ({"key_map": {"nothing": "model.0.weight"}}, "key_map 'nothing'"),
    ({"key_map": [("^modle", "model")]}, r"key_map ('^modle', 'model')"),
]


@pytest.mark.parametrize(("arguments", "rule"), UNUSED, ids=[rule for _, rule in UNUSED])
def test_a_rule_that_matches_nothing_is_an_error(saved: Path, arguments: dict[str, Any], rule: str) -> None:
    state = {"model": mlp(1)}
    before = [parameter.clone() for parameter in state["model"].parameters()]
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(saved, state, **arguments)
    assert caught.value.kind == "conflict"
    assert f"{rule} matches nothing in the checkpoint" in str(caught.value)
    assert "nothing was loaded" in str(caught.value)
    assert all(map(torch.equal, before, state["model"].parameters()))


def test_a_near_name_is_told(saved: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=r"include 'modle\.\*' .*\(near: model\)"):
        bcp.load(saved, {"model": mlp(1)}, include="modle.*")


@pytest.mark.parametrize("read", [bcp.load_tree, lambda path, **rules: bcp.load(path, {"model": mlp(1)}, **rules)])
def test_near_names_are_sought_for_the_rules_that_the_error_shows(saved: Path, read: Callable[..., Any]) -> None:
    sought = mock.Mock(return_value=[])
    with (
        mock.patch.object(mismatches, "get_close_matches", sought),
        pytest.raises(bcp.CheckpointMismatchError, match="and 20 more"),
    ):
        read(saved, exclude=[f"modle.{number}" for number in range(30)])
    assert sought.call_count == 10


@pytest.mark.parametrize(("arguments", "rule"), UNUSED, ids=[rule for _, rule in UNUSED])
def test_without_strict_it_is_one_warning_and_in_the_report(saved: Path, arguments: dict[str, Any], rule: str) -> None:
    with pytest.warns(UserWarning, match="matches nothing in the checkpoint") as told:
        report = bcp.load(saved, {"model": mlp(1)}, strict=False, **arguments)
    assert len(told) == 1
    assert list(report.unused) == [rule]


USED: list[dict[str, Any]] = [
    {"include": ["model.*", "optimizer.*"]},  # entries that the state does not name
    {"include": "model.*", "exclude": "optimizer.*"},  # one leaves out what the other one would
    {"include": ["model.*", "model.0.*"]},
    {"include": ["model.*", "rank.seed"]},
    {"exclude": "epoch"},
    {"key_map": {"epoch": "number"}},
    {"key_map": [("^optimizer", "optimizer"), ("nothing|model", "model")]},
    {"key_map": lambda fqn: fqn},
]


@pytest.mark.parametrize("arguments", USED, ids=range(len(USED)))
def test_a_rule_that_matches_anything_in_the_checkpoint_is_none(saved: Path, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = bcp.load(saved, {"model": mlp(1)}, **arguments)
    assert report.num_tensors
    assert not report.unused


def test_what_the_state_has_and_the_checkpoint_lacks_may_be_excluded(saved: Path) -> None:
    """A new head, as for a fine-tuning: the glob is of use, though nothing in the checkpoint has such a name."""
    model = mlp(1)
    model.add_module("head", torch.nn.Linear(2, 2))
    report = bcp.load(saved, {"model": model}, exclude="model.head.*")
    assert {"model.head.weight", "model.head.bias"} <= set(report.skipped)


def test_the_parameters_of_an_optimizer_alone_are_names(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    bcp.save(tmp_path, {"optimizer": optimizer})
    other = mlp(1)
    bcp.load(tmp_path, {"optimizer": torch.optim.AdamW(other.named_parameters())}, exclude="optimizer.state.0.*")


@pytest.mark.parametrize("arguments", [{"include": "optimizer.*"}, {"exclude": "model.*"}], ids=str)
def test_a_load_that_would_fill_nothing_is_an_error(saved: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="nothing would be loaded; it names model") as caught:
        bcp.load(saved, {"model": mlp(1)}, **arguments)
    assert caught.value.kind == "conflict"
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        report = bcp.load(saved, {"model": mlp(1)}, strict=False, **arguments)
    assert report.num_tensors == 0


def test_an_empty_state_is_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match="the state is an empty dict") as caught:
        bcp.save(tmp_path / "empty", {})
    assert caught.value.kind == "unsupported_value"
    assert not (tmp_path / "empty").exists()
    with pytest.raises(bcp.CheckpointMismatchError, match="the state names nothing"):
        bcp.load(saved, {})


@pytest.mark.parametrize("value", [2, torch.zeros(2)], ids=["plain", "tensor"])
def test_a_value_that_include_leaves_out_is_skipped_also_where_nothing_is_stored(saved: Path, value: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="nothing would be loaded"):
        bcp.load(saved, {"new": value}, include="epoch")
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        assert bcp.load(saved, {"new": value}, include="epoch", strict=False).skipped == ["new"]


def test_a_rank_may_have_nothing_where_another_one_has(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_on_one_rank, str(tmp_path), world_size=2)
    assert float(bcp.open(tmp_path)["x"][0]) == 1.0


def save_on_one_rank(rank: int, world_size: int, path: str) -> None:
    state = {} if rank else {"x": torch.ones(2)}
    bcp.save(path, state)
    bcp.load(path, state)


def test_modules_without_tensors_are_no_empty_state(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"loss": torch.nn.ReLU()})
    bcp.load(tmp_path, {"loss": torch.nn.ReLU()})


def test_a_glob_that_names_a_container_is_told_of_the_names_below(saved: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=r"has names below it, as model\.0\.bias"):
        bcp.load(saved, {"model": mlp(1)}, exclude="model.0")


@pytest.mark.parametrize("name", ["optimizer", "progress", "rows"])
def test_the_name_of_an_entry_takes_nothing_of_what_is_below_it(tmp_path: Path, name: str) -> None:
    """Else exclude="optimizer" would load the optimizer, and include="optimizer" nothing of it, without a word."""

    def state(seed: int) -> dict[str, Any]:
        model = mlp(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=seed + 1)
        return {"model": model, "optimizer": optimizer, "progress": {"epoch": seed}, "rows": [torch.ones(2), seed]}

    bcp.save(tmp_path, state(1))
    for target in (state(0), {**state(0), "progress": {}}):
        for globs in ({"exclude": name}, {"include": ["model.*", name]}):
            with pytest.raises(
                bcp.CheckpointMismatchError, match=rf"'{name}' .* below it.*: '{name}\.\*' matches them"
            ):
                bcp.load(tmp_path, target, **globs)
        bcp.load(tmp_path, target, exclude=[name, f"{name}.*"])
        bcp.load(tmp_path, target, include=["model.*", name, f"{name}.*"])
        bcp.load(tmp_path, {"model": target["model"]}, include=["model.*", name])


def test_a_glob_that_matches_containers_alone_is_told_what_matches_the_names_below(tmp_path: Path) -> None:
    """As `*._extra_state`, where the extra state of modules is a dict."""

    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            self.loaded = state

    bcp.save(tmp_path, {"model": torch.nn.Sequential(Counting(2, 2))})
    model = torch.nn.Sequential(Counting(2, 2))
    advised = r"has names below it, as model\.0\._extra_state\.calls: '\*\._extra_state\.\*' matches them"
    with pytest.raises(bcp.CheckpointMismatchError, match=advised):
        bcp.load(tmp_path, {"model": model}, exclude="*._extra_state")
    bcp.load(tmp_path, {"model": model}, exclude="*._extra_state.*")
    assert not hasattr(model[0], "loaded")


def test_plain_data_alone_fills_something(saved: Path) -> None:
    extra = {"epoch": 0}
    bcp.load(saved, extra)
    assert extra == {"epoch": 3}


def test_a_wrong_entry_name_says_which_entries_there_are(saved: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(saved, {"net": mlp(1)})
    assert "no entry 'net': it has the entries epoch, model, optimizer" in str(caught.value)


@pytest.mark.parametrize(
    "key_map",
    [
        "x",
        3,
        pytest.param(lambda fqn: None if fqn == "model.0.bias" else fqn, id="function of None"),
        ["ab"],
        [("a", 1)],
        {"a": 1},
        {1: "a"},
        [("(", "a")],
        [("a", r"\1")],
    ],
    ids=str,
)
def test_what_is_no_key_map_is_a_conflict(saved: Path, key_map: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="key_map") as caught:
        bcp.load(saved, {"model": mlp(1)}, key_map=key_map)
    assert caught.value.kind == "conflict"


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("globs", [3, [3]], ids=str)
def test_what_is_no_glob_is_a_conflict(saved: Path, option: str, globs: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=f"{option} takes a glob") as caught:
        bcp.load(saved, {"model": mlp(1)}, **{option: globs})
    assert caught.value.kind == "conflict"


def load_a_stage(rank: int, world_size: int, path: str, arguments: dict[str, Any]) -> list[str]:
    """Each rank has one layer, as a stage of a pipeline has."""
    state = {"model": {f"layer{rank}": {"weight": torch.zeros(3)}}, **({"new": {"w": torch.zeros(1)}} if rank else {})}
    report = bcp.load(path, state, **arguments)
    return list(report.skipped)


@pytest.mark.parametrize(
    ("arguments", "is_unused"),
    [
        ({"include": ["model.layer0.*", "model.layer1.*"], "exclude": "new.*"}, False),
        ({"exclude": ["model.layer1.*", "new.*"]}, False),
        ({"exclude": ["new.*", "model.layer2.*"]}, True),
        ({"key_map": {"model.layer1.weight": "model.layer1.weight"}, "exclude": "new.w"}, False),
    ],
    ids=str,
)
def test_ranks_agree_about_what_matches(
    tmp_path: Path, workers: WorkerPool, arguments: dict[str, Any], is_unused: bool
) -> None:
    """What only one rank has a place for is matched all the same; `new` is in the state of one rank only."""
    bcp.save(tmp_path, {"model": {f"layer{number}": {"weight": torch.ones(3)} for number in range(2)}})
    outcomes = workers.run_each(load_a_stage, str(tmp_path), arguments, world_size=2)
    if is_unused:
        assert all("exclude 'model.layer2.*' matches nothing" in str(outcome) for outcome in outcomes)
    else:
        assert [outcome.error for outcome in outcomes] == [None, None]


@pytest.mark.parametrize("exclude", ["model.*", "model*"])
def test_the_model_may_be_excluded_with_its_optimizer_in_the_state(saved: Path, exclude: str) -> None:
    """The optimizer's tensors go with the model. The names of the checkpoint are not put below `model` for them."""
    model = mlp(1)
    before = [parameter.clone() for parameter in model.parameters()]
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}
    report = bcp.load(saved, state, exclude=exclude)
    assert all(map(torch.equal, before, model.parameters()))
    assert state["epoch"] == 3
    assert not state["optimizer"].state
    assert not report.missing
    assert {"model.0.weight", "model.0.bias"} <= set(report.skipped)


def test_the_optimizer_state_that_goes_with_an_excluded_parameter_is_reported(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other = mlp(1)
    adam = torch.optim.AdamW(other.parameters())
    report = bcp.load(tmp_path, {"model": other, "optimizer": adam}, exclude="model.0.*")
    names, keys = ("weight", "bias"), ("step", "exp_avg", "exp_avg_sq")
    of_optimizer = {f"optimizer.state.0.{name}.{key}" for name in names for key in keys}
    assert set(report.skipped) == {"model.0.weight", "model.0.bias", *of_optimizer}
    assert not set(adam.state) & set(other[0].parameters())


def test_the_warning_of_many_rules_names_ten(saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"exclude 'gone9' matches nothing in the checkpoint; and 20 more\. Check"):
        bcp.load(saved, fresh(), exclude=[f"gone{number}" for number in range(30)], strict=False)
    with pytest.warns(UserWarning, match=r"nothing of the state was filled; include 'gone0' .* 21 more"):
        bcp.load(saved, fresh(), include=[f"gone{number}" for number in range(30)], strict=False)


@pytest.mark.parametrize("has_head", [False, True])
def test_the_optimizer_state_of_an_excluded_parameter_that_the_optimizer_lacks_goes_with_it(
    tmp_path: Path, has_head: bool
) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, [optimizer], 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other = mlp(1) if has_head else mlp(1)[:3]
    adam = torch.optim.AdamW(other[:3].parameters())
    report = bcp.load(tmp_path, {"model": other, "optimizer": adam}, exclude="model.3.*")
    assert {"optimizer.state.3.weight.exp_avg", "optimizer.state.3.bias.step"} <= set(report.skipped)
    assert report.unexpected == []
    assert same_value(adam.state[other[0].weight], optimizer.state[model[0].weight])


def test_the_optimizer_state_of_a_parameter_excluded_under_one_of_its_names_is_unexpected(tmp_path: Path) -> None:
    model = nn.ModuleDict({"inner": nn.Linear(2, 2), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["a"].weight = model["b"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other = nn.ModuleDict({"inner": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    adam = torch.optim.AdamW(other["inner"].parameters())
    report = bcp.load(tmp_path, {"model": other, "optimizer": adam}, exclude="model.a.*", strict=False)
    states = {fqn.rpartition(".")[0] for fqn in report.unexpected}
    assert states == {"optimizer.state.a.weight", "optimizer.state.b.bias"}


def test_an_optimizer_that_does_not_fit_is_not_said_to_be_absent(tmp_path: Path) -> None:
    """The file has the optimizer in two groups. Its names are not put below `optim`, where nothing would be filled."""
    model = mlp()
    optimizer = torch.optim.AdamW([{"params": each.parameters()} for each in model.children()])
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path / "a.pt", {"optim": torch.optim.AdamW(mlp().named_parameters())})
    assert "holds no optimizer" not in str(caught.value)
    assert "optim.model" not in str(caught.value)


def test_a_tree_of_what_no_glob_matches_is_empty(saved: Path) -> None:
    assert bcp.load_tree(saved, include=[]) == {}
    assert bcp.load_tree(saved, exclude=[]).keys() == {"model", "optimizer", "epoch", "rank"}
