"""`bcp convert` of states whose values lie in places that torch treats in its own way: tuples, and names with dots."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {"inline": 3, "in data files": 30_000}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_tensors_in_tuples_have_their_values_in_a_folder_of_dcp(call, tmp_path, size) -> None:
    """DCP takes no tuple apart, and pickles it whole."""
    first, second = torch.arange(size, dtype=torch.float32), torch.ones(size, dtype=torch.int64)
    bcp.save(tmp_path / "a", {"ema": (first, 0.5), "deep": {"x": [({"y": second}, first)]}, "w": second})
    assert call("convert", tmp_path / "a", tmp_path / "b", "--to", "dcp").code == 0
    state: dict[str, Any] = {"ema": (), "deep": {"x": [()]}, "w": torch.zeros_like(second)}
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(state["ema"][0], first)
    assert state["ema"][1] == 0.5
    assert torch.equal(state["deep"]["x"][0][0]["y"], second)
    assert torch.equal(state["deep"]["x"][0][1], first)
    assert torch.equal(state["w"], second)
    again = {"ema": (torch.zeros_like(first), 0.0)}
    bcp.load(tmp_path / "b", again)
    assert torch.equal(again["ema"][0], first)


VALUES = {
    "numbers": {"loss": 1.0, "loss.train": 2.0, "loss.train.first": 3.0},
    "tensors": {"a": torch.ones(2), "a.b": torch.zeros(3), "a.c": 4},
    "a tensor last": {"a.b": 1, "a.b.c": torch.ones(1), "a": torch.ones(2)},
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_name_that_is_the_beginning_of_another_name_loses_neither(call, tmp_path, values) -> None:
    for number, items in enumerate(permutations(values.items())):
        bcp.save(tmp_path / f"{number}", dict(items))
        assert call("convert", tmp_path / f"{number}", tmp_path / f"{number}.pt", "--to", "torch").code == 0
        found = torch.load(tmp_path / f"{number}.pt")
        assert found.keys() == values.keys()
        assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(values[name])) for name in values)


def test_entries_of_which_one_begins_with_the_name_of_another_keep_all_values(tmp_path) -> None:
    state = {"model.ema": {"decay": 0.9}, "model": {"depth": 2}}
    bcp.save(tmp_path, state)
    assert bcp.open(tmp_path).objects == {"model": {"depth": 2, "ema": {"decay": 0.9}}}
    again: dict[str, Any] = {"model.ema": {"decay": 0.0}, "model": {"depth": 0}}
    bcp.load(tmp_path, again)
    assert again == state


def test_an_empty_name_is_a_name(tmp_path) -> None:
    bcp.save(tmp_path, {"": 2, "a": 1})
    assert bcp.open(tmp_path).objects == {"": 2, "a": 1}


def lbfgs_run(size: int) -> tuple[torch.nn.Module, torch.optim.LBFGS]:
    module = torch.nn.Linear(size, 1)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (module(torch.linspace(-1, 1, 4 * size).reshape(4, size)) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return module, optimizer


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_tensors_in_lists_of_an_optimizer_stay_in_their_lists(call, tmp_path, size) -> None:
    module, optimizer = lbfgs_run(size)
    bcp.save(tmp_path / "a", {"model": module, "optimizer": optimizer})
    assert call("convert", tmp_path / "a", tmp_path / "b.pt", "--to", "torch").code == 0
    assert call("convert", tmp_path / "a", tmp_path / "c", "--to", "dcp").code == 0
    (expected,) = optimizer.state_dict()["state"].values()
    assert len(expected["old_dirs"]) > 1
    of_dcp = bcp.load_tree(tmp_path / "c")["optimizer"]
    for found in (torch.load(tmp_path / "b.pt"), bcp.load_tree(tmp_path / "a"), {"optimizer": of_dcp}):
        (state,) = (values for name, values in found["optimizer"]["state"].items() if name in {"weight", 0})
        assert state.keys() == expected.keys()
        assert all(map(torch.equal, state["old_dirs"], expected["old_dirs"]))
        assert torch.equal(state["prev_flat_grad"], expected["prev_flat_grad"])


def test_a_tensor_under_an_empty_name_is_read_and_converted(call, tmp_path) -> None:
    bcp.save(tmp_path / "a", {"": torch.ones(2), "n": 1})
    assert bcp.open(tmp_path / "a").objects == {"n": 1}
    assert torch.equal(bcp.load_tree(tmp_path / "a")[""], torch.ones(2))
    assert call("convert", tmp_path / "a", tmp_path / "b.pt", "--to", "torch").code == 0
    assert torch.equal(torch.load(tmp_path / "b.pt")[""], torch.ones(2))


@pytest.mark.parametrize("value", [np.longdouble(1.5), np.ones(2, np.clongdouble)], ids=["number", "array"])
def test_a_number_that_only_numpy_has_is_refused_for_a_file_of_torch(call, tmp_path, value) -> None:
    bcp.save(tmp_path / "a", {"inside": [{"x": value}]})
    ended = call("convert", tmp_path / "a", tmp_path / "b.pt", "--to", "torch")
    assert ended.code != 0
    assert "inside.0.x" in ended.err
    assert not (tmp_path / "b.pt").exists()
