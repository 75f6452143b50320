"""A state of many small tensors: calls that a save and a load make for each, and what no shortcut may miss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.adapters.shard_columns import ShardColumns

FEW, MANY = 300, 900
KINDS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "copy": {"async_save": True, "options": bcp.SaveOptions(snapshot="copy")},
    "lazy": {"async_save": True, "options": bcp.SaveOptions(snapshot="lazy")},
}
State = dict[str, dict[str, torch.Tensor]]


def state_of(num_tensors: int) -> State:
    return {
        "model": {f"layer.{number}": torch.full((number % 7 + 1, 3), float(number)) for number in range(num_tensors)}
    }


def num_calls(work: Callable[[], object]) -> int:
    """Calls that this thread makes meanwhile, of Python functions and, from these, of C functions."""
    found = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def calls_per_tensor(work: Callable[[State, Path], Callable[[], object]], folder: Path) -> float:
    few, many = (num_calls(work(state_of(number), folder / str(number))) for number in (FEW, MANY))
    return (many - few) / (MANY - FEW)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_save_makes_no_call_for_a_tensor(tmp_path: Path, kind: str) -> None:
    def second_save(state: State, folder: Path) -> Callable[[], object]:
        bcp.save(folder / "first", state, **KINDS[kind]).result()
        handles.append(bcp.save(folder / "second", state, **KINDS[kind]))
        handles.pop().result()
        return lambda: handles.append(bcp.save(folder / "third", state, **KINDS[kind]))

    handles: list[bcp.SaveHandle] = []
    assert calls_per_tensor(second_save, tmp_path) < 0.2
    for number, handle in zip((FEW, MANY), handles, strict=True):
        handle.result()
        assert_saved(tmp_path / str(number) / "third", state_of(number))


def test_a_load_makes_few_calls_for_a_tensor(tmp_path: Path) -> None:
    def load(state: State, folder: Path) -> Callable[[], object]:
        bcp.save(folder, state)
        return lambda: bcp.load(folder, state)

    assert calls_per_tensor(load, tmp_path) < 5


def test_tensors_that_are_the_state_take_as_many_calls_each_as_those_of_a_dict_in_it(tmp_path: Path) -> None:
    """As in `bcp.save(path, module.state_dict())`."""

    def flat_save(state: State, folder: Path) -> Callable[[], object]:
        return lambda: bcp.save(folder / "flat", state["model"])

    def save(state: State, folder: Path) -> Callable[[], object]:
        return lambda: bcp.save(folder / "nested", {"nested": state["model"]})  # names of no other test: no known plan

    def flat_load(state: State, folder: Path) -> Callable[[], object]:
        return lambda: bcp.load(folder / "flat", state["model"])

    assert calls_per_tensor(flat_save, tmp_path) < 1.1 * calls_per_tensor(save, tmp_path)
    assert calls_per_tensor(flat_load, tmp_path) < 10


def test_a_first_save_plans_without_a_tensor_for_each_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    memory_of = ShardColumns._memory_of
    monkeypatch.setattr(
        ShardColumns, "_memory_of", lambda columns, index: built.append(index) or memory_of(columns, index)
    )
    names = [f"first.{number}" for number in range(40)]  # of no other test: a known plan is not made again
    bcp.save(tmp_path, {"model": {name: torch.ones(3) for name in names}})
    assert not built


def test_a_load_into_many_modules_takes_as_many_calls_for_each_as_into_few(tmp_path: Path) -> None:
    def calls(num_modules: int) -> float:
        state = {f"block{number}": torch.nn.Linear(2, 2) for number in range(num_modules)}
        bcp.save(tmp_path / str(num_modules), state)
        return num_calls(lambda: bcp.load(tmp_path / str(num_modules), state)) / num_modules

    calls(10)
    assert calls(400) < 1.2 * calls(100)


def assert_saved(path: Path, state: State) -> None:
    stored = bcp.open(path)
    tensors = {f"{entry}.{name}": tensor for entry, part in state.items() for name, tensor in part.items()}
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name][...], tensor.detach()), name


def in_the_same_memory(tensor: torch.Tensor, new: torch.Tensor) -> None:
    address = tensor.data_ptr()
    tensor.data = new
    assert tensor.data_ptr() == address


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "another shape": lambda tensor: in_the_same_memory(tensor, tensor.data.view(-1)),
    "transposed": lambda tensor: in_the_same_memory(tensor, tensor.data.t()),
    "another dtype": lambda tensor: in_the_same_memory(tensor, tensor.data.view(torch.int32)),
    "a part of it": lambda tensor: in_the_same_memory(tensor, tensor.data[:1]),
    "other memory": lambda tensor: setattr(tensor, "data", tensor.data + 1),
    "memory of another": lambda tensor: setattr(tensor, "data", torch.arange(40.0)[9:24].view(5, 3)),
    "resized": lambda tensor: tensor.resize_(9, 3).fill_(2),
    "negated": lambda tensor: setattr(tensor, "data", torch._neg_view(tensor.data)),
    "conjugated": lambda tensor: setattr(tensor, "data", torch.ones(5, 3, dtype=torch.complex64).mul(1j).conj()),
    "grad": lambda tensor: tensor.requires_grad_(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_became_of_a_tensor_since_the_last_save_is_seen(tmp_path: Path, kind: str, change: str) -> None:
    state = state_of(40)
    for path in ("first", "second"):
        bcp.save(tmp_path / path, state, **KINDS[kind]).result()
    CHANGES[change](state["model"]["layer.4"])
    bcp.save(tmp_path / "third", state, **KINDS[kind]).result()
    assert_saved(tmp_path / "third", state)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_gone_since_the_last_save_is_refused(tmp_path: Path, kind: str) -> None:
    state = state_of(40)
    bcp.save(tmp_path / "first", state, **KINDS[kind]).result()
    state["model"]["layer.4"].untyped_storage().resize_(8)
    with pytest.raises(bcp.CheckpointSaveError, match=r"model\.layer\.4 is .* was made smaller"):
        bcp.save(tmp_path / "second", state, **KINDS[kind])


class Moving:
    """An object whose state_dict() moves the memory of tensors of other entries."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        for tensor in self._tensors.values():
            tensor.share_memory_()
        return {"moved": True}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Has nothing to take back."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_may_move_the_memory_of_tensors_while_it_is_collected(tmp_path: Path, kind: str) -> None:
    state: dict[str, Any] = state_of(40)
    bcp.save(tmp_path / "first", state, **KINDS[kind]).result()
    expected = {name: tensor.clone() for name, tensor in state["model"].items()}
    bcp.save(tmp_path / "second", {**state, "moving": Moving(state["model"])}, **KINDS[kind]).result()
    stored = bcp.open(tmp_path / "second")
    assert all(torch.equal(stored[f"model.{name}"][...], tensor) for name, tensor in expected.items())


def test_a_lazy_save_keeps_the_memory_that_tensors_had_in_the_call(tmp_path: Path) -> None:
    state = state_of(40)
    bcp.save(tmp_path / "first", state, **KINDS["lazy"]).result()
    expected = {"model": {name: tensor.clone() for name, tensor in state["model"].items()}}
    handle = bcp.save(tmp_path / "second", state, **KINDS["lazy"])
    for tensor in state["model"].values():
        tensor.data = torch.zeros_like(tensor)
    handle.result()
    assert_saved(tmp_path / "second", expected)


def test_a_lazy_save_copies_tensors_in_the_memory_of_a_buffer(tmp_path: Path) -> None:
    state: dict[str, Any] = state_of(40)
    model = torch.nn.BatchNorm1d(3)
    state["model"]["layer.4"] = model.running_mean
    state["module"] = model
    bcp.save(tmp_path / "first", state, **KINDS["lazy"]).result()
    expected = model.running_mean.clone()
    handle = bcp.save(tmp_path / "second", state, **KINDS["lazy"])
    model(torch.randn(8, 3))
    handle.result()
    assert not torch.equal(model.running_mean, expected)
    assert torch.equal(bcp.open(tmp_path / "second")["model.layer.4"][...], expected)
