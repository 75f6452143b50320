"""Tensors that are one in the state and several in the checkpoint: each gets the value that was saved of it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from training import same_value

import bytecheckpoint as bcp
from distributed.workers import WorkerPool


def changed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def test_best_weights_that_are_still_those_of_the_model_get_what_was_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    best = copy.deepcopy(model.state_dict())
    bcp.save(tmp_path, {"model": changed(model), "best": best})
    restored = nn.Linear(3, 2)
    state = {"model": restored, "best": restored.state_dict()}
    bcp.load(tmp_path, state)
    assert same_value(restored.state_dict(), model.state_dict())
    assert same_value(state["best"], best)


@pytest.mark.parametrize("nest", [lambda tensor: tensor, lambda tensor: {"in": [tensor, 1]}], ids=["bare", "nested"])
def test_a_tensor_that_stands_twice_in_the_state_becomes_two_where_they_differ(tmp_path: Path, nest: Any) -> None:
    saved = {"now": nest(torch.ones(3)), "before": nest(torch.zeros(3)), "first": nest(torch.ones(3))}
    bcp.save(tmp_path, saved)
    one = torch.full((3,), 7.0)
    state = {"now": nest(one), "before": nest(one), "first": nest(one)}
    bcp.load(tmp_path, state)
    assert same_value(state, saved)
    assert same_value(one, torch.ones(3))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_tensor_that_stands_twice_in_the_state_stays_one_where_both_are_the_same(
    tmp_path: Path, value: float
) -> None:
    model = nn.Linear(3, 2)
    model.weight.data.fill_(value)
    bcp.save(tmp_path, {"model": model, "parameters": dict(model.named_parameters())})
    restored = nn.Linear(3, 2)
    state = {"model": restored, "parameters": dict(restored.named_parameters())}
    bcp.load(tmp_path, state)
    assert state["parameters"]["weight"] is restored.weight
    assert same_value(restored.weight.detach(), model.weight.detach())


def test_a_module_in_a_tuple_keeps_the_tensor_beside_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    bcp.save(tmp_path, {"pair": (model, torch.zeros(2))})
    restored = nn.Linear(3, 2)
    state = {"pair": (restored, restored.bias)}
    bcp.load(tmp_path, state)
    assert same_value(restored.bias.detach(), model.bias.detach())
    assert state["pair"][1] is restored.bias


def test_a_tensor_in_a_tuple_keeps_its_value_and_a_bare_one_tied_to_it_gets_its_own(tmp_path: Path) -> None:
    linear, tied = nn.Linear(2, 2), torch.zeros(3)
    bcp.save(tmp_path, {"w": torch.full((3,), 2.0), "l": (torch.ones(3), linear)})
    state = {"w": tied, "l": (tied, linear)}
    bcp.load(tmp_path, state)
    assert same_value(tied, torch.ones(3))
    assert same_value(state["w"], torch.full((3,), 2.0))


class OneByOne(dict[str, Any]):
    """A dict that notes what is set, and refuses `update`, as transformers' outputs do."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names_set: list[str] = []

    def __setitem__(self, name: str, value: object) -> None:
        self.names_set.append(name)
        super().__setitem__(name, value)

    def update(self, *_values: object) -> None:  # type: ignore[override]
        raise RuntimeError("one by one")


def test_a_subclass_of_dict_gets_only_the_tensors_that_are_others_now(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": torch.ones(3), "b": torch.full((3,), 2.0), "c": torch.ones(1)})
    tied = torch.zeros(3)
    state = OneByOne({"a": tied, "b": tied, "c": torch.zeros(1)})
    bcp.load(tmp_path, state)
    assert state.names_set == ["b"]
    assert same_value(state["b"], torch.full((3,), 2.0))


class Tracker:
    """Has one tensor under two names until `split`."""

    def __init__(self) -> None:
        self.low = self.high = torch.zeros(3)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"low": self.low, "high": self.high}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.low, self.high = state["low"], state["high"]


@pytest.mark.parametrize("is_split", [True, False])
def test_an_object_with_one_tensor_under_two_names_gets_both(tmp_path: Path, is_split: bool) -> None:
    tracker, restored = Tracker(), Tracker()
    tracker.low = torch.full((3,), 2.0)
    tracker.high = torch.full((3,), 3.0) if is_split else tracker.low
    bcp.save(tmp_path, {"tracker": tracker})
    bcp.load(tmp_path, {"tracker": restored})
    assert same_value(restored.state_dict(), tracker.state_dict())
    assert (restored.low is restored.high) != is_split


def test_schedulers_in_a_row_keep_their_own_last_tensor_rate(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        schedulers = [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.5)]
        return model, optimizer, lr_scheduler.SequentialLR(optimizer, schedulers, [2])

    (model, optimizer, scheduler), (other, its_optimizer, restored) = build(), build()
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    bcp.load(tmp_path, {"model": other, "optimizer": its_optimizer, "scheduler": restored})
    assert same_value(restored.state_dict(), scheduler.state_dict())


class Wrapper:
    """Gives out a module's tensors, and copies what it loads into them, as wrappers for DCP do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


@pytest.mark.parametrize("names", [["app", "best"], ["best", "app"]], ids="-".join)
def test_best_weights_beside_an_object_that_copies_what_it_loads_are_not_overwritten(
    tmp_path: Path, names: list[str]
) -> None:
    model = nn.Linear(3, 2)
    best = copy.deepcopy(model.state_dict())
    saved = {"app": Wrapper(changed(model)), "best": best}
    bcp.save(tmp_path, {name: saved[name] for name in names})
    restored = nn.Linear(3, 2)
    state = {"app": Wrapper(restored), "best": restored.state_dict()}
    bcp.load(tmp_path, {name: state[name] for name in names})
    assert same_value(restored.state_dict(), model.state_dict())
    assert same_value(state["best"], best)


@pytest.mark.parametrize("names", [["best", "now"], ["now", "best"]], ids="-".join)
@pytest.mark.parametrize("is_nested", [True, False], ids=["one entry", "two entries"])
def test_an_optimizer_goes_on_to_train_the_tensor_that_it_trained(
    tmp_path: Path, names: list[str], is_nested: bool
) -> None:
    def build(now: torch.Tensor, best: torch.Tensor) -> dict[str, Any]:
        tensors = {"best": {"weight": best}, "now": {"weight": now}}
        tensors = {name: tensors[name] for name in names}
        optimizer = torch.optim.Adam([now])
        now.sum().backward()
        optimizer.step()
        return {**({"tensors": tensors} if is_nested else tensors), "optimizer": optimizer}

    now, restored = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    bcp.save(tmp_path, build(now, torch.full((3,), 9.0)))
    state = build(restored, restored)
    bcp.load(tmp_path, state)
    tensors = state["tensors"] if is_nested else state
    assert tensors["now"]["weight"] is restored
    assert same_value(restored.detach(), now.detach())
    assert same_value(tensors["best"]["weight"].detach(), torch.full((3,), 9.0))


def test_a_tensor_of_which_the_optimizer_trains_a_part_is_filled_whole(tmp_path: Path) -> None:
    def build(flat: torch.Tensor) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
        model[0].weight.data = flat[:4].view(2, 2)
        model[0].weight.grad = torch.ones(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        return {"flat": flat, "model": model, "encoder": model[0], "optimizer": optimizer}

    saved, restored = torch.arange(8.0), torch.zeros(8)
    bcp.save(tmp_path, build(saved))
    bcp.load(tmp_path, build(restored))
    assert same_value(restored, saved)


def test_tensors_of_a_dtype_that_torch_cannot_copy_become_two(tmp_path: Path) -> None:
    one, other, target = (torch.tensor([number], dtype=torch.uint8).view(torch.uint4) for number in range(3))
    bcp.save(tmp_path, {"one": one, "other": other})
    state = {"one": target, "other": target}
    bcp.load(tmp_path, state)
    assert [tensor.view(torch.uint8).item() for tensor in state.values()] == [0, 1]


class Copies(TorchDispatchMode):
    """Counts copies of tensors with more than 1000 elements."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func is torch.ops.aten.clone.default and args[0].numel() > 1000
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_refused", [True, False])
def test_new_memory_is_made_once_and_for_no_load_that_is_refused(tmp_path: Path, is_refused: bool) -> None:
    bcp.save(tmp_path, {"one": torch.ones(2000), "other": torch.zeros(2000), "third": torch.ones(3)})
    target = torch.zeros(2000)
    state = {"one": target, "other": target, "third": torch.zeros(4 if is_refused else 3)}
    with Copies() as copies, pytest.raises(bcp.CheckpointMismatchError) if is_refused else nullcontext():
        bcp.load(tmp_path, state)
    assert copies.num_copies == (0 if is_refused else 1)


def resume_with_best(rank: int, world_size: int, path: str, num_changed: int) -> None:
    model = fully_shard(nn.Linear(8, 6))
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bcp.save(path, {"model": changed(model) if rank < num_changed else model, "best": best})
    restored = fully_shard(nn.Linear(8, 6))
    state = {"model": restored, "best": restored.state_dict()}
    bcp.load(path, state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(restored.state_dict()[name].to_local(), tensor.to_local())
    changed(restored)
    for name, tensor in best.items():
        is_apart = torch.equal(state["best"][name].to_local(), tensor.to_local())
        assert is_apart == (num_changed > 0)


@pytest.mark.parametrize("num_changed", [0, 1, 2])
def test_best_weights_of_a_sharded_model_part_from_it_on_all_ranks_or_none(
    workers: WorkerPool, tmp_path: Path, num_changed: int
) -> None:
    workers.run(resume_with_best, str(tmp_path), num_changed, world_size=2)
