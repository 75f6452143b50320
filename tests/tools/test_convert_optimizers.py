"""`bcp convert` with globs that take a part of an optimizer: none that is written has torn state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import mlp

import bytecheckpoint as bcp


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A checkpoint of a training run; not to be changed."""
    path = tmp_path_factory.mktemp("trained") / "run"
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    bcp.save(path, {"model": model, "optimizer": optimizer, "epoch": 3})
    return path


def moments(path: Path) -> dict[str, list[str]]:
    """Returns the keys of the state of each parameter that has any."""
    return {name: sorted(values) for name, values in bcp.load_tree(path)["optimizer"]["state"].items()}


TARGETS = [("--to", "bcp"), ("--to", "bcp", "--link"), ("--to", "torch"), ("--to", "dcp")]
WHOLE = ["optimizer", "optimizer.groups.*", "*.exp_avg", "optimizer.state.*.step", "*.values.lr"]


@pytest.mark.parametrize("glob", WHOLE)
@pytest.mark.parametrize("to", ["bcp", "torch", "dcp"])
def test_an_optimizer_of_which_a_glob_includes_a_part_is_written_as_a_whole(call, run, tmp_path, to, glob) -> None:
    """`--include optimizer` wrote an optimizer with an empty state, and `*.exp_avg` one that no step can go on from."""
    include = ("--include", glob, "--include", "model.*")
    assert call("convert", run, tmp_path / "target", "--to", to, *include).code == 0
    assert bcp.load_tree(tmp_path / "target").keys() == {"model", "optimizer"}
    assert moments(tmp_path / "target") == moments(run)
    assert len(moments(run)) > 1


@pytest.mark.parametrize("glob", ["*.exp_avg_sq", "optimizer.groups.*", "*.lr", "optimizer.state.*.step"])
@pytest.mark.parametrize("options", TARGETS, ids=" ".join)
def test_a_part_of_what_an_optimizer_holds_of_a_parameter_cannot_be_left_out(
    call, run, tmp_path, options, glob
) -> None:
    ended = call("convert", run, tmp_path / "target", *options, "--exclude", glob)
    assert (ended.code, "values and tensors of the optimizer 'optimizer'" in ended.err) == (2, True)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(("rule", "stays"), [("--exclude *0.weight*", False), ("--include *0.weight*", True)])
def test_a_parameter_that_is_left_out_takes_its_state_along(call, run, tmp_path, rule, stays) -> None:
    """The group has the name of this parameter, and stays with all of its values."""
    assert call("convert", run, tmp_path / "new", "--to", "bcp", *rule.split()).code == 0
    assert moments(tmp_path / "new") == {
        name: keys for name, keys in moments(run).items() if (name == "0.weight") == stays
    }
    groups = bcp.load_tree(tmp_path / "new")["optimizer"]["param_groups"]
    assert groups == bcp.load_tree(run)["optimizer"]["param_groups"]
    assert ("0.weight" in bcp.load_tree(tmp_path / "new")["model"]) == stays


@pytest.mark.parametrize("rule", ["--include *.bias", "--exclude optimizer.*", "--exclude optimizer*"])
def test_an_optimizer_of_which_nothing_is_taken_is_not_written(call, run, tmp_path, rule) -> None:
    """With `--include *.bias` it had an empty state: names of parameters are among what it holds."""
    assert call("convert", run, tmp_path / "target", "--to", "torch", *rule.split()).code == 0
    assert "optimizer" not in torch.load(tmp_path / "target", weights_only=True)


def test_biases_can_be_left_out_beside_an_optimizer(call, run, tmp_path) -> None:
    assert call("convert", run, tmp_path / "target", "--to", "torch", "--exclude", "*.bias").code == 0
    found = torch.load(tmp_path / "target", weights_only=True)
    assert moments(tmp_path / "target") == moments(run)
    assert not any(name.endswith("bias") for name in found["model"])


def test_a_part_of_an_optimizer_can_be_left_out_of_a_comparison_and_of_tensors_for_hugging_face(
    call, run, tmp_path
) -> None:
    call("convert", run, tmp_path / "new", "--to", "torch")
    assert call("diff", run, tmp_path / "new", "--to", "torch", "--exclude", "*.exp_avg_sq").code == 0
    assert call("diff", run, tmp_path / "new", "--to", "torch", "--exclude", "*.lr").code == 0
    include = ("--include", "*.exp_avg", "--keep-names")
    assert call("convert", run, tmp_path / "hf", "--to", "hf", *include).code == 0
    assert all(name.endswith(".exp_avg") for name in bcp.open(tmp_path / "hf"))
