"""`bcp.open` as a Mapping, its tensors as arrays, and `load_tree`: a checkpoint without a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import Tied, mlp

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_tree import leaves
from distributed.workers import WorkerPool


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer, scheduler = trained()
    extra = {"epoch": 3, "name": "x", "loss": np.float32(0.5), "history": [torch.ones(2), 1], "pair": (1, None)}
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "plain": extra,
        "half": torch.ones(4).half(),
        "weights": model.state_dict(),
    }
    bcp.save(tmp_path / "r", state, step=7, metadata={"run": "demo"})
    return tmp_path / "r"


def test_it_is_a_mapping(saved: Path) -> None:
    opened = bcp.open(saved)
    assert isinstance(opened, Mapping)
    assert list(opened) == list(opened.keys()) == [name for name, _ in opened.items()]
    assert [view.fqn for view in opened.values()] == list(opened)
    assert opened.get("nothing") is None
    assert opened.get("half") is not None
    assert len(opened) == len(list(opened))
    assert "half" in opened
    assert 3 not in opened
    assert opened != bcp.open(saved)
    assert {opened: 1}[opened] == 1


def test_a_wrong_name_is_told_of_near_ones(saved: Path) -> None:
    opened = bcp.open(saved)
    for wrong, hint in (
        ("model.0.wieght", "near are 'model.0.weight'"),
        ("0.weight", "near are 'model.0.weight'"),
        ("model.0", "there are tensors below it, as 'model.0."),
        ("weights.1.wieght", "near are 'weights.1.weight'"),
        ("weights", "there are tensors below it, as 'weights."),
        ("optimizer.state.0.weight.exp_av", "near are 'optimizer.state.0.weight.exp_avg'"),
        ("optimizer.param_groups.0.lr", "plain data is in `objects`"),
        ("scheduler.last_epoch", "plain data is in `objects`"),
        ("plain.pair", "plain data is in `objects`"),
        ("plain", "plain data is in `objects`"),
    ):
        with pytest.raises(KeyError, match="is not a tensor of") as caught:
            opened[wrong]
        assert hint in str(caught.value)


def test_it_has_what_was_saved_beside_the_tensors(saved: Path) -> None:
    opened = bcp.open(saved)
    assert (opened.step, dict(opened.metadata)) == (7, {"run": "demo"})
    objects = opened.objects
    assert objects["scheduler"]["last_epoch"] == 0
    assert objects["optimizer"]["param_groups"][0]["lr"] == 1e-3
    plain = objects["plain"]
    assert (plain["epoch"], plain["name"], plain["pair"]) == (3, "x", (1, None))
    assert torch.equal(torch.as_tensor(plain["history"][0]), torch.ones(2))
    assert "model" not in objects
    assert "half" not in objects


def test_it_is_closed_by_with(saved: Path) -> None:
    with bcp.open(saved) as opened:
        view = opened["half"]
        assert view[0] == 1
    for ask in (
        lambda: opened["half"],
        lambda: len(opened),
        lambda: view[0],
        lambda: opened.info,
        lambda: opened.objects,
    ):
        with pytest.raises(ValueError, match="was closed"):
            ask()
    assert "closed" in repr(opened)
    opened.close()


def test_notebooks_complete_names_and_show_a_table(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"<b>": torch.ones(2), **{f"t{number}": torch.ones(1) for number in range(80)}})
    opened = bcp.open(tmp_path)
    assert opened._ipython_key_completions_() == list(opened)
    html = opened._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "and 31 more" in html


def test_a_view_is_an_array(saved: Path) -> None:
    view = bcp.open(saved)["model.0.weight"]
    expected = mlp_weight(saved)
    assert (view.ndim, view.numel(), view.nbytes, len(view)) == (
        2,
        expected.numel(),
        4 * expected.numel(),
        len(expected),
    )
    assert np.array_equal(view.numpy(), expected.numpy())
    assert np.array_equal(np.array(view), expected.numpy())
    assert np.asarray(view, dtype=np.float64).dtype == np.float64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(torch.as_tensor(view), expected)
        assert torch.equal(torch.tensor(np.asarray(view)), expected)
    assert torch.equal(torch.from_dlpack(view), expected)
    assert np.array_equal(np.from_dlpack(view), expected.numpy())
    assert torch.equal(torch.stack(list(view)), expected)
    assert np.add(view, 1.0).shape == tuple(expected.shape)
    with pytest.raises(ValueError, match="only be had as a copy"):
        np.array(view, copy=False)


def mlp_weight(path: Path) -> torch.Tensor:
    weight: torch.Tensor = bcp.open(path).state_dict("model.")["0.weight"]
    return weight


def test_a_tensor_without_dimensions_has_no_length(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"x": torch.tensor(3.0)})
    view = bcp.open(tmp_path)["x"]
    assert (view.ndim, view.numel(), float(view.numpy())) == (0, 1, 3.0)
    with pytest.raises(TypeError):
        len(view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_numpy_has_no_dtype_for_is_a_type_error_that_says_how(tmp_path: Path, dtype: torch.dtype) -> None:
    bcp.save(tmp_path, {"x": torch.ones(4).to(dtype)})
    view = bcp.open(tmp_path)["x"]
    for ask in (view.numpy, lambda: np.array(view)):
        with pytest.raises(TypeError, match=r"numpy has no dtype for .*view\[\.\.\.\]\.float\(\)\.numpy\(\)"):
            ask()
    assert np.array_equal(view[...].float().numpy(), np.ones(4, np.float32))


def test_a_tree_is_the_state_as_it_was_given(saved: Path) -> None:
    tree = bcp.load_tree(saved)
    model, _, scheduler = trained()
    assert set(tree) == {"model", "optimizer", "scheduler", "plain", "half", "weights"}
    fresh = mlp(1)
    fresh.load_state_dict(tree["model"])
    assert all(map(torch.equal, fresh.parameters(), model.parameters()))
    fresh_optimizer = torch.optim.AdamW(fresh.named_parameters())
    fresh_optimizer.load_state_dict(tree["optimizer"])
    assert tree["scheduler"] == scheduler.state_dict()
    plain = tree["plain"]
    assert (plain["epoch"], plain["pair"]) == (3, (1, None))
    assert plain["loss"] == np.float32(0.5)
    assert type(plain["loss"]) is np.float32
    assert torch.equal(plain["history"][0], torch.ones(2))
    assert tree["half"].dtype == torch.float16


def test_a_tree_is_what_a_conversion_to_torch_writes(saved: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from bytecheckpoint.tools.main import cli

    ended = CliRunner().invoke(cli, ["convert", str(saved), str(tmp_path / "x.pt"), "--to", "torch"])
    assert ended.exit_code == 0, ended.output
    assert same(torch.load(tmp_path / "x.pt"), bcp.load_tree(saved))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, torch.as_tensor(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_tree_takes_globs_and_a_device(saved: Path) -> None:
    assert set(bcp.load_tree(saved, include="model.*")) == {"model"}
    assert bcp.load_tree(saved, include="plain.epoch") == {"plain": {"epoch": 3}}
    assert "optimizer" not in bcp.load_tree(saved, exclude=["optimizer.*"])
    assert bcp.load_tree(saved, include="half", device="meta")["half"].is_meta
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"include 'modle\.\*' matches nothing.*near: model"
    ) as caught:
        bcp.load_tree(saved, include="modle.*")
    assert caught.value.kind == "conflict"


WHOLE = ["optimizer.*", "optimizer.state.*", "optimizer.groups.*", "*.exp_avg", "optimizer.state.0.weight.step"]


@pytest.mark.parametrize("glob", WHOLE)
def test_an_optimizer_of_which_a_glob_includes_a_part_comes_as_a_whole(saved: Path, glob: str) -> None:
    assert same(bcp.load_tree(saved, include=glob), {"optimizer": bcp.load_tree(saved)["optimizer"]})


@pytest.mark.parametrize("exclude", ["*.exp_avg_sq", "optimizer.state.*", ["model.*", "*.0.weight.*"]], ids=str)
def test_a_part_of_the_tensors_of_an_optimizer_cannot_be_left_out_of_a_tree(saved: Path, exclude: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="tensors of the optimizer 'optimizer'") as caught:
        bcp.load_tree(saved, exclude=exclude)
    assert caught.value.kind == "conflict"


def state_dicts(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], str]]:
    state = optimizer.state_dict()
    flat = {f"state.{key}.{name}": each for key, values in state["state"].items() for name, each in values.items()}
    return [
        ({"optimizer": state}, "optimizer.state.*.exp_avg"),
        ({"optimizer": flat | {"param_groups.0.lr": 0.1}}, "optimizer.state.*.exp_avg"),
        ({"both": {"a": state, "b": state}}, "both.a.state.*.exp_avg"),
        ({"optimizer": bcp.RankLocal(state)}, "optimizer.state.*.exp_avg"),
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_state_dict_that_was_saved_is_a_dict_of_which_globs_take_any_part(tmp_path: Path, case: int) -> None:
    state, glob = state_dicts(trained()[1])[case]
    bcp.save(tmp_path, state)
    whole, part, rest = (bcp.load_tree(tmp_path, **each) for each in ({}, {"include": glob}, {"exclude": glob}))
    of_whole, of_part, of_rest = (set(leaves(tree, "")) for tree in (whole, part, rest))
    assert of_part
    assert all(name.endswith(".exp_avg") for name in of_part)
    assert (of_part | of_rest, of_part & of_rest) == (of_whole, set())


def test_what_is_excluded_of_an_optimizer_that_is_not_included_is_no_part_of_a_tree(saved: Path) -> None:
    assert set(bcp.load_tree(saved, include="model.*", exclude="*.exp_avg_sq")) == {"model"}


def test_two_optimizers_whose_tensors_are_the_same_both_have_their_state_in_a_tree(tmp_path: Path) -> None:
    state = trained()[1].state_dict()
    torch.save({"model": mlp().state_dict(), "a": state, "b": state}, tmp_path / "x.pt")
    tree = bcp.load_tree(tmp_path / "x.pt")
    assert set(tree) == {"model", "a", "b"}
    assert tree["a"]["state"].keys() == tree["b"]["state"].keys() != set()
    assert all(same(each, tree["b"]["state"][name]) for name, each in tree["a"]["state"].items())
    assert all(each.keys() == {"step", "exp_avg", "exp_avg_sq"} for each in tree["a"]["state"].values())


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "plain", "plain.history"])
def test_the_name_of_what_has_names_below_it_takes_nothing_of_a_tree(saved: Path, option: str, name: str) -> None:
    message = rf"{option} '{name}' matches nothing in the checkpoint, which has names below it"
    with pytest.raises(bcp.CheckpointMismatchError, match=message) as caught:
        bcp.load_tree(saved, **{option: [name, "half"]})
    assert caught.value.kind == "conflict"


def test_a_list_of_which_a_glob_takes_a_part_is_refused_and_nothing_is_read(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"both": [torch.ones(1), torch.zeros(1)]})
    with pytest.raises(bcp.CheckpointMismatchError, match="take only a part; nothing was read") as caught:
        bcp.load_tree(tmp_path, include="both.0")
    assert caught.value.kind == "conflict"


def test_a_tree_of_a_step_at_a_url(tmp_path: Path) -> None:
    for step in (1, 2):
        bcp.save("memory://trees/run", {"n": step, "x": torch.full((2,), float(step))}, step=step)
    assert bcp.load_tree("memory://trees/run")["n"] == 2
    assert bcp.load_tree("memory://trees/run", 1)["x"].tolist() == [1.0, 1.0]
    assert bcp.load_tree("memory://trees/run/step_00000001", step=None)["n"] == 1


def test_tied_tensors_are_one_in_a_tree(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": Tied()})
    model = bcp.load_tree(tmp_path)["model"]
    pointers = {tensor.data_ptr() for tensor in model.values()}
    assert len(pointers) < len(model)


def save_of_ranks(rank: int, world_size: int, path: str) -> None:
    local = {"seed": rank, "large": torch.full((30_000,), float(rank)), "small": torch.full((2,), float(rank))}
    bcp.save(path, {"rng": bcp.RankLocal(local), "train": {"own": bcp.RankLocal(rank)}, "n": 1})


def test_what_differs_between_ranks_is_a_dict_by_rank(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_of_ranks, str(tmp_path), world_size=2)
    tree = bcp.load_tree(tmp_path)
    assert (tree["n"], tree["train"]["own"]) == (1, {0: 0, 1: 1})
    assert [tree["rng"][rank]["seed"] for rank in (0, 1)] == [0, 1]
    assert [float(tree["rng"][rank]["large"][5]) for rank in (0, 1)] == [0.0, 1.0]
    assert [tree["rng"][rank]["small"].tolist() for rank in (0, 1)] == [[0.0, 0.0], [1.0, 1.0]]
    assert set(tree) == {"n", "train", "rng"}


def test_a_tree_of_what_others_wrote(tmp_path: Path) -> None:
    state = {"model": mlp().state_dict(), "epoch": 3, "nested": {"a": [torch.ones(2), {"b": 1}]}}
    torch.save(state, tmp_path / "x.pt")
    assert same(state, bcp.load_tree(tmp_path / "x.pt"))
    import safetensors.torch

    safetensors.torch.save_file(mlp().state_dict(), tmp_path / "model.safetensors")
    assert same(dict(mlp().state_dict()), bcp.load_tree(tmp_path / "model.safetensors"))


def test_the_state_of_random_numbers_says_what_it_is() -> None:
    assert "torch" in repr(bcp.RngState())
    assert " at 0x" not in repr(bcp.RngState())
