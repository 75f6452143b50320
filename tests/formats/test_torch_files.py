"""Files that torch.save wrote: views, shared storages, plain data, optimizers; and that none of them runs anything."""

from __future__ import annotations

import argparse
import contextlib
import pickle
import struct
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import Touch, assert_same
from hand_pickles import BUILD, NEW, encoded, named
from hand_pickles import write as write_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_leaves import plain_leaves
from training import same_value

import bytecheckpoint as bcp
from bytecheckpoint.region import find_tiling_fault

MIB = 1 << 20
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def save(value: Any, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.pt"
    torch.save(value, path)
    return path


def test_tensors_of_every_dtype_are_read_by_name(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(12).to(torch.float32).to(dtype).reshape(3, 4) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    checkpoint = bcp.open(save(tensors, tmp_path))
    assert_same(checkpoint.state_dict(), tensors)
    assert checkpoint.info.format == "torch.save"


def test_a_state_dict_alone_is_loaded_into_the_module(tmp_path: Path) -> None:
    saved, loaded = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    path = save(saved.state_dict(), tmp_path)
    bcp.load(path, {"model": loaded})
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()))


def test_views_of_one_storage_are_each_what_they_were(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    tensors = {
        "whole": base,
        "same": base,
        "rows": base[1:3],
        "columns": base[:, 3:7],
        "every_other": base[::2, 1::3],
        "transposed": base.t(),
        "expanded": base[0].expand(4, 12),
        "one": base[2, 5],
        "overlapping": base.flatten().unfold(0, 5, 2),
        "none_of_it": base[5:],
    }
    checkpoint = bcp.open(save(tensors, tmp_path))
    assert_same(checkpoint.state_dict(), tensors)
    assert checkpoint.manifest.aliases == {"same": "whole"}
    assert torch.equal(checkpoint["transposed"][2:9:3, 1:4], base.t()[2:9:3, 1:4])


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    tensor = torch.arange(400, dtype=torch.int32)
    shape = draw(shapes)
    strides = [draw(st.integers(0, 9)) for _ in shape]
    return tensor.as_strided(shape, strides, draw(st.integers(0, 40)))


@given(st.lists(views(), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_any_strides_are_read_exactly(tmp_path_factory: pytest.TempPathFactory, tensors: list[torch.Tensor]) -> None:
    named = {f"t{index}": tensor for index, tensor in enumerate(tensors)}
    checkpoint = bcp.open(save(named, tmp_path_factory.mktemp("views")))
    assert_same(checkpoint.state_dict(), named)
    for record in checkpoint.manifest.tensors.values():
        assert find_tiling_fault(record.shape, [chunk.region for chunk in record.chunks]) is None


def test_a_large_transposed_matrix_is_refused_by_name(tmp_path: Path) -> None:
    path = save({"model": {"weight": torch.empty(300, 300).t()}}, tmp_path)
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        bcp.open(path)
    assert caught.value.kind == "unsupported_version"
    assert "model.weight" in caught.value.message
    assert ".contiguous()" in caught.value.message


def test_texts_of_numpy_come_back_also_empty_ones(tmp_path: Path) -> None:
    texts = {"empty": np.str_(""), "bytes": np.bytes_(b""), "text": np.str_("日本"), "some": np.bytes_(b"ab")}
    objects = plain_leaves(bcp.open(save(texts, tmp_path)))
    assert objects == texts
    assert all(type(objects[name]) is type(text) for name, text in texts.items())


def test_plain_data_comes_back_beside_the_tensors(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "losses": [0.5, 0.25],
        "nested": {"tuple": (1, "two", None), "tensor": torch.ones(2), "list": [torch.zeros(1), {"a": 1}]},
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {"x": [1]}),
        "counter": Counter("aab"),
        "array": np.arange(6, dtype=">f4").reshape(2, 3),
        "scalar": np.float64(2.5),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "large": 1 << 70,
        "set": {1},
        "path": Path("/a/b"),
        "here": Path(),
        "numpy_dtype": np.dtype(">f4"),
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "more": types.SimpleNamespace(name="x"),
        "none": None,
        7: "number",
    }
    objects = plain_leaves(bcp.open(save(state, tmp_path)))
    assert objects["epoch"] == 3
    assert objects["losses"] == [0.5, 0.25]
    assert objects["nested.tuple"] == (1, "two", None)
    assert objects["nested.list.1.a"] == 1
    assert (objects["ordered.b"], objects["default.x"], objects["counter.a"]) == (1, [1], 2)
    assert np.array_equal(objects["array"], state["array"])
    assert np.array_equal(objects["fortran"], state["fortran"])
    assert (objects["scalar"], type(objects["scalar"])) == (2.5, np.float64)
    assert (objects["size"], objects["dtype"], objects["device"]) == (torch.Size([2, 3]), torch.bfloat16, "cuda:1")
    assert (objects["complex"], objects["bytes"], objects["large"]) == (1 + 2j, b"\x00\xff", 1 << 70)
    assert (objects["set"], objects["path"], objects["here"], objects["none"]) == ([1], "/a/b", ".", None)
    assert (objects["args.lr"], objects["args.layers"], objects["more.name"]) == (0.1, [1, 2], "x")
    assert (objects["7"], objects["numpy_dtype"]) == ("number", ">f4")
    loaded = {"epoch": 0, "nested": {"tuple": (0, "", 1), "tensor": torch.zeros(2), "list": [torch.ones(1), {"a": 0}]}}
    bcp.load(tmp_path / "checkpoint.pt", loaded)
    assert loaded["epoch"] == 3
    assert loaded["nested"]["tuple"] == (1, "two", None)
    assert torch.equal(loaded["nested"]["tensor"], torch.ones(2))
    assert loaded["nested"]["list"][1] == {"a": 1}


@pytest.mark.parametrize(
    "value",
    [
        {"param_groups": 5},
        {"state": 3, "param_groups": []},
        {"state": {}, "param_groups": [{"lr": 1.0}]},
        {"state": {0: 1}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": [1.5]}]},
        {"state": {}, "param_groups": [{"params": [0]}, {"params": ["0"]}]},
        {"state.w": 1, "param_groups.w.lr": 0.1},
    ],
)
def test_what_only_resembles_the_state_of_an_optimizer_is_plain_data(tmp_path: Path, value: dict[str, Any]) -> None:
    assert bcp.load_tree(save({"like": value}, tmp_path))["like"] == value


@pytest.mark.parametrize("state", [({"a": 1, "b": 2}, None), ({"a": 1}, {"b": 2}), (None, {"a": 1, "b": 2})])
def test_attributes_in_slots_and_beside_them_are_read(tmp_path: Path, state: tuple[Any, Any]) -> None:
    made = named("argparse", "Namespace") + b")" + NEW + encoded(state) + BUILD
    write_by_hand(tmp_path / "checkpoint.pt", encoded({"args": made}), num_items=1)
    objects = plain_leaves(bcp.open(tmp_path / "checkpoint.pt"))
    assert (objects["args.a"], objects["args.b"]) == (1, 2)


def test_a_schedule_goes_on_with_the_counter_of_its_milestones(tmp_path: Path) -> None:
    def schedule() -> torch.optim.lr_scheduler.SequentialLR:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, steps], milestones=[2])

    alone, loaded = schedule(), schedule()
    path = save({"schedule": alone.state_dict()}, tmp_path)
    bcp.load(path, {"schedule": loaded})
    assert bcp.load_tree(path)["schedule"]["_schedulers"][1]["milestones"] == Counter([1, 1, 3])
    for _ in range(6):  # SequentialLR begins the second one with an explicit step, for which that asks its Counter
        alone.optimizer.step(), loaded.optimizer.step()
        alone.step(), loaded.step()
        assert loaded.get_last_lr() == alone.get_last_lr()


def test_a_value_that_is_no_dict_has_a_name(tmp_path: Path) -> None:
    checkpoint = bcp.open(save([torch.ones(2), 5], tmp_path))
    assert torch.equal(checkpoint["value.0"][:], torch.ones(2))
    assert plain_leaves(checkpoint) == {"value.1": 5}
    assert list(bcp.open(save(torch.ones(2), tmp_path))) == ["value"]


def trained(*, names: bool = False, width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
    decayed = [(name, each) for name, each in model.named_parameters() if each.ndim == 2]
    others = [(name, each) for name, each in model.named_parameters() if each.ndim != 2]
    groups = [decayed, others] if names else [[each for _, each in group] for group in (decayed, others)]
    optimizer = torch.optim.AdamW([{"params": group, "lr": 0.1 + at} for at, group in enumerate(groups)])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_an_optimizer_is_restored_as_torch_itself_would(tmp_path: Path, *, names: bool, fresh: bool) -> None:
    model, optimizer = trained(names=names)
    optimizer.param_groups[0]["lr"] = 0.625
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other, loaded = trained()
    if fresh:
        loaded = torch.optim.AdamW([{"params": group["params"]} for group in loaded.param_groups])
    bcp.load(path, {"model": other, "optimizer": loaded})
    reference = torch.optim.AdamW([{"params": group["params"]} for group in loaded.param_groups])
    reference.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    assert len(loaded.state) == 4
    for mine, theirs in zip(loaded.state.values(), reference.state.values(), strict=True):
        assert_same(mine, theirs)
    assert [group["lr"] for group in loaded.param_groups] == [0.625, 1.1]


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_learning_rate_that_is_a_tensor_is_restored(tmp_path: Path, kind: Any, *, names: bool) -> None:
    """The group got the reference to it."""
    model, optimizer = trained(names=names)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"] + 0.5)
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other, loaded = trained()
    for group in loaded.param_groups:
        group["lr"] = kind(0.5)
    bcp.load(path, {"model": other, "optimizer": loaded})
    assert [float(group["lr"]) for group in loaded.param_groups] == pytest.approx([0.6, 1.6])
    assert all(type(group["lr"]) is type(kind(0.5)) for group in loaded.param_groups)
    found = bcp.load_tree(path)["optimizer"]
    assert [float(group["lr"]) for group in found["param_groups"]] == pytest.approx([0.6, 1.6])
    assert found.keys() == {"state", "param_groups"}


def test_optimizers_and_schedulers_in_a_dict_are_restored(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.last_epoch = 5
    parts = {"optimizer": {"adam": optimizer.state_dict()}, "scheduler": scheduler.state_dict(), "epoch": 3}
    path = save({"model": model.state_dict(), "train": parts}, tmp_path)
    other, loaded = trained()
    steps = torch.optim.lr_scheduler.StepLR(loaded, 1)
    state = {"model": other, "train": {"optimizer": {"adam": loaded}, "scheduler": steps, "epoch": 0}}
    bcp.load(path, state, exclude="train.scheduler.*")
    assert same_value(loaded.state_dict(), optimizer.state_dict())
    assert state["train"]["epoch"] == 3
    assert steps.last_epoch == 0
    bcp.load(path, state)
    assert steps.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("names", [False, True])
def test_state_of_adafactor_is_restored(tmp_path: Path, *, names: bool) -> None:
    """Its rows and columns have as many dimensions as the parameter, and were taken for those of another parameter."""

    def build(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(4, width)
        return model, torch.optim.Adafactor(model.named_parameters() if names else model.parameters())

    model, optimizer = build(6)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other, loaded = build(6)
    bcp.load(path, {"model": other, "optimizer": loaded})
    assert same_value(loaded.state_dict(), optimizer.state_dict())
    wider, refused = build(7)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"row_var: .* in the checkpoint, \[7, 4\] in the state"):
        bcp.load(path, {"model": wider, "optimizer": refused})


def test_a_learning_rate_that_is_a_tensor_is_read_into_a_state_dict(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    path = save({"optimizer": optimizer.state_dict()}, tmp_path)
    state = {"optimizer": optimizer.state_dict()}
    state["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.1)
    bcp.load(path, state)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("names", [False, True])
def test_state_that_parameters_share_is_restored_for_each(tmp_path: Path, *, names: bool) -> None:
    model, optimizer = trained(names=names)
    shared = torch.tensor(7.0)
    for values in optimizer.state.values():
        values["step"] = shared
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    other, loaded = trained()
    bcp.load(path, {"model": other, "optimizer": loaded})
    steps = [values["step"] for values in loaded.state.values()]
    assert steps == [shared] * 4
    assert len(set(map(id, steps))) == 4


@pytest.mark.parametrize("names", [False, True])
def test_an_optimizer_alone_is_restored(tmp_path: Path, *, names: bool) -> None:
    _, optimizer = trained(names=names)
    path = save(optimizer.state_dict(), tmp_path)
    _, loaded = trained(names=True)
    bcp.load(path, {"optimizer": loaded})
    for mine, theirs in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert_same(mine, theirs)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    fewer = torch.optim.AdamW(list(model.parameters())[:3])
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(path, {"model": model, "optimizer": fewer})
    assert "it has 4 parameters without names in the checkpoint and 3 in the state" in caught.value.message
    wider, other = trained(width=6)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"of a parameter of shape \[4, 4\] in the ch.*, \[6, 4\]"):
        bcp.load(path, {"optimizer": other, "model": wider}, include="optimizer*")
    with pytest.raises(bcp.CheckpointMismatchError):
        bcp.load(path, {"optimizer": other, "model": wider})


@pytest.mark.parametrize("exclude", [[], ["actor.scheduler.*"], ["actor.optimizer.*"]], ids=str)
def test_an_optimizer_and_a_scheduler_inside_a_dict_are_restored(tmp_path: Path, exclude: list[str]) -> None:
    def actor(step_size: int, num_steps: int) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
        for _ in range(num_steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    saved, live, before = actor(4, 2), actor(5, 1), actor(5, 1)
    path = save({"actor": {key: value.state_dict() for key, value in saved.items()}}, tmp_path)
    bcp.load(path, {"actor": live}, exclude=exclude)
    for key, value in live.items():
        expected = before if f"actor.{key}.*" in exclude else saved
        torch.testing.assert_close(value.state_dict(), expected[key].state_dict(), rtol=0, atol=0)


def test_a_dict_that_only_looks_like_an_optimizer_is_plain_data(tmp_path: Path) -> None:
    odd = {"state": {}, "param_groups": [{"params": [[1], {}]}]}
    assert plain_leaves(bcp.open(save({"x": odd}, tmp_path)))["x.param_groups"] == [{"params": [[1], {}]}]
    assert plain_leaves(bcp.open(save({"x": {"state.weight": 1, "state.bias": 2}}, tmp_path)))["x.state.bias"] == 2


def test_values_of_a_flattened_optimizer_that_would_lie_in_one_another_all_stay(tmp_path: Path) -> None:
    """One was lost, or the file was a TypeError."""
    for names in (["x", "x.y"], ["x.y", "x"]):
        state = {f"state.a.{name}": torch.full((2,), number) for number, name in enumerate(names)}
        found = bcp.open(save({**state, "param_groups.a.lr": 0.1}, tmp_path)).state_dict()
        assert_same(found, state)


def test_state_of_an_optimizer_whose_keys_come_to_one_name_stays(tmp_path: Path) -> None:
    """That of one key was lost."""
    groups = [{"params": [0], "param_names": ["w"], "lr": 0.1}]
    state = {"state": {0: {"step": 1}, "w": {"step": 2}}, "param_groups": groups}
    found = plain_leaves(bcp.open(save(state, tmp_path)))
    assert (found["state.0.step"], found["state.w.step"]) == (1, 2)


@pytest.mark.parametrize("names", [[["w"]], [{}], [None, "w"]])
def test_names_of_parameters_that_are_no_texts_are_plain_data(tmp_path: Path, names: list[Any]) -> None:
    """The file was a TypeError."""
    groups = [{"params": list(range(len(names))), "param_names": names, "lr": 0.1}]
    state = {"state": {0: {"step": 1}}, "param_groups": groups}
    assert plain_leaves(bcp.open(save(state, tmp_path)))["state.0.step"] == 1


@pytest.mark.parametrize("value", [torch.ones(2), {"w": torch.ones(2)}, "text"], ids=["tensor", "dict", "text"])
def test_a_file_of_pickle_protocol_0_is_not_called_damaged(tmp_path: Path, value: Any) -> None:
    torch.save({"x": value}, tmp_path / "old.pt", pickle_protocol=0)
    with pytest.raises(bcp.CheckpointCorruptError, match="it is of protocol 0, which this release cannot") as caught:
        bcp.open(tmp_path / "old.pt")
    assert "nothing is known to be wrong with the file: save it again" in caught.value.message


class Reduced:
    """Pickled, it is a call of a function with these arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def test_dicts_that_a_pickle_makes_by_a_call_have_their_items(tmp_path: Path) -> None:
    """They came back empty."""
    full = {
        "pairs": Reduced(dict, [("a", 1)]),
        "dict": Reduced(dict, {"a": 1}),
        "default": Reduced(defaultdict, int, {"a": 1}),
    }
    found = bcp.load_tree(save({**full, "empty": Reduced(dict)}, tmp_path))
    assert found == {**{name: {"a": 1} for name in full}, "empty": {}}


def refused(path: Path) -> bcp.CheckpointError:
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(path)
    return caught.value


def test_a_pickle_that_names_anything_else_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    error = refused(save({"weights": torch.ones(2), "x": Touch(marker)}, tmp_path))
    assert (type(error), error.kind) == (bcp.UnsafeCheckpointError, "pickle_refused")
    assert "pathlib.Path.touch" in error.message or "builtins.getattr" in error.message
    assert not marker.exists()


def test_a_whole_module_is_refused_by_the_name_of_its_class(tmp_path: Path) -> None:
    error = refused(save(torch.nn.Linear(2, 2), tmp_path))
    assert error.kind == "pickle_refused"
    assert "torch.nn.modules.linear.Linear" in error.message


@pytest.mark.parametrize(
    "value", [torch.ones(2, 2).to_sparse(), torch.ones(2, 2, device="meta")], ids=["sparse", "meta"]
)
def test_tensors_without_bytes_of_their_own_are_refused_by_name(tmp_path: Path, value: torch.Tensor) -> None:
    error = refused(save({"a": value}, tmp_path))
    assert error.kind == "pickle_refused"
    assert "torch._utils._rebuild_" in error.message


def test_a_conjugated_tensor_is_refused(tmp_path: Path) -> None:
    error = refused(save({"a": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path))
    assert error.kind == "bad_manifest"
    assert "conj" in error.message


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([1, "a"], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        torch.ones(2).untyped_storage(),
    ],
    ids=["conj", "neg", "times", "objects", "records", "storage"],
)
def test_a_sound_file_with_a_value_that_is_not_taken_is_not_called_damaged(tmp_path: Path, value: object) -> None:
    error = refused(save({"a": value}, tmp_path))
    assert error.kind == "bad_manifest"
    assert "nothing is known to be wrong with the file: save " in error.message
    assert "damaged" not in error.message


TIED = torch.zeros(2)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {None: 1, "None": 2}},
        {"a": {True: 1, "True": 2}},
        {1: "x", "1": "y"},
        {1: torch.zeros(2), "1": "y"},
        {"1": "y", 1: torch.zeros(2)},
        {"a": TIED, 1: TIED, "1": "y"},
        {"a": {"b._extra_state": 1, "b": {"_extra_state": 2}}},
        {"a._extra_state": 1, "a": {"_extra_state": 2}},
    ],
)
def test_two_keys_that_come_to_one_name_are_refused(tmp_path: Path, state: dict) -> None:
    """One of the two values was lost."""
    error = refused(save(state, tmp_path))
    assert error.kind == "conflict"
    assert "two values that come to the name" in error.message


@pytest.mark.parametrize("value", [1, {"b": 1}, {"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]}])
def test_a_key_without_a_name_may_stand_beside_others(tmp_path: Path, value: object) -> None:
    """In a tree its value took the place of the others that came before it, or that was a TypeError."""
    state = {"a": 1, "": value, "w": torch.ones(2)}
    path = save(state, tmp_path)
    tree = bcp.load_tree(path)
    assert (tree[""], tree["a"], set(tree)) == (value, 1, {"", "a", "w"})
    loaded = {"a": 0, "w": torch.zeros(2)}
    bcp.load(path, loaded)
    assert (loaded["a"], loaded["w"].tolist()) == (1, [1, 1])
    assert_same(bcp.open(path).state_dict(), {"w": torch.ones(2)})


@pytest.mark.parametrize("value", [{1: 2, "1": 3}, {"b.c": 1, "b": {"c": 2}}])
def test_two_values_of_one_name_in_plain_data_hide_no_tensor(tmp_path: Path, value: dict[Any, Any]) -> None:
    """All of these were CheckpointSaveErrors, which said that nothing was written."""
    path = save({"a": value, "w": torch.ones(2)}, tmp_path)
    checkpoint = bcp.open(path)
    assert_same(checkpoint.state_dict(), {"w": torch.ones(2)})
    assert (checkpoint["w"].shape, checkpoint.objects) == ((2,), {"a": value})
    with pytest.raises(KeyError, match="plain data is in `objects`"):
        checkpoint["a.1" if 1 in value else "a.b.c"]
    assert bcp.load_tree(path)["a"] == value
    with pytest.raises(bcp.CheckpointMismatchError, match=r"'a' of .* two values of one name.* nothing was loaded"):
        bcp.load(path, {"w": torch.zeros(2)})


def test_tensors_of_which_one_has_no_name_are_loaded(tmp_path: Path) -> None:
    state = {"": torch.ones(2), "a": torch.full((2,), 2.0)}
    path = save(state, tmp_path)
    assert_same(bcp.open(path).state_dict(), state)
    loaded = {key: torch.zeros(2) for key in state}
    bcp.load(path, loaded)
    assert_same(loaded, state)


def test_the_format_before_torch_1_6_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    error = refused(path)
    assert error.kind == "unsupported_version"
    assert "before 1.6" in error.message


def test_a_program_of_torchscript_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    write_zip(path, {"archive/data.pkl": pickle.dumps({}, 2), "archive/constants.pkl": b"x"})
    assert "TorchScript" in refused(path).message
    with zipfile.ZipFile(path, "w") as archive:  # code of more than 200 characters is compressed
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/code/__torch__.py", b"x" * 300, zipfile.ZIP_DEFLATED)
    assert "TorchScript" in refused(path).message


def write_zip(path: Path, members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_archive_that_was_packed_again_is_read(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5)}, tmp_path)
    write_zip(path, members_of(path))
    assert_same(bcp.open(path).state_dict(), {"a": torch.arange(5)})


def test_a_compressed_archive_is_refused_and_never_unpacked(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(MIB)}, tmp_path)
    write_zip(path, members_of(path), compression=zipfile.ZIP_DEFLATED)
    error = refused(path)
    assert error.kind == "unsupported_version"
    assert "compressed" in error.message


def with_pickle(tmp_path: Path, content: bytes) -> Path:
    path = save({"a": torch.arange(5)}, tmp_path)
    members = members_of(path)
    name = next(name for name in members if name.endswith("data.pkl"))
    write_zip(path, {**members, name: content})
    return path


@pytest.mark.parametrize("folder", ["model-10:30", "..", "a b\\c"])
def test_names_in_an_archive_are_no_paths(tmp_path: Path, folder: str) -> None:
    """The folder in it is named after the file by torch."""
    path = save({"a": torch.arange(5)}, tmp_path)
    members = {f"{folder}/{name.partition('/')[2]}": content for name, content in members_of(path).items()}
    write_zip(path, {**members, "../../outside": b"x"})
    assert torch.equal(bcp.open(path)["a"][:], torch.arange(5))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5)}, tmp_path)
    members = members_of(path)
    name = next(iter(members))
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(name, members[name])
    assert "two members" in refused(path).message


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5), "b": torch.arange(5)}, tmp_path)
    content = bytearray(path.read_bytes())
    entries = [at for at in range(len(content)) if content[at : at + 4] == b"PK\x01\x02"]
    storages = [at for at in entries if b"/data/" in content[at + 46 : at + 46 + 64]]
    content[storages[1] + 42 : storages[1] + 46] = content[storages[0] + 42 : storages[0] + 46]
    path.write_bytes(content)
    assert refused(path).kind == "bad_manifest"


def test_big_endian_numbers_are_refused(tmp_path: Path) -> None:
    path = save({"a": torch.arange(5)}, tmp_path)
    members = members_of(path)
    write_zip(path, {name: b"big" if name.endswith("byteorder") else content for name, content in members.items()})
    assert "big-endian" in refused(path).message


PICKLES = {
    "empty": b"",
    "nothing on the stack": b"\x80\x02.",
    "cut short": b"\x80\x02X\xff\xff\xff\x7fabc",
    "bytearray of exabytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "unknown instruction": b"\x80\x02\xff.",
    "no mark": b"\x80\x02t.",
    "calls a list": b"\x80\x02])R.",
    "calls a text": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "builds a number": b"\x80\x02K\x01}b.",
    "appends to a number": b"\x80\x02K\x01K\x02a.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "no Unicode": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "key of tuples in tuples": b"\x80\x02}" + b")" + b"\x85" * 10_000 + b"K\x01s.",
    "wrong storage": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "extension": b"\x80\x02\x82\x01.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "deeper than any data": b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
    "a billion lists": b"\x80\x02]q\x00"
    + b"".join(b"](" + b"h%c" % at * 10 + b"eq%c" % (at + 1) for at in range(12))
    + b".",
    "a path that doubles": b"\x80\x04cpathlib\nPosixPath\nq\x000X\x08\x00\x00\x00xxxxxxxxq\x010"
    + b"h\x00h\x01h\x01\x86Rq\x010" * 26
    + b"}.",
    "lists of lists": b"\x80\x04cbuiltins\nlist\nq\x000(" + b"N" * MIB + b"t\x85q\x010](" + b"h\x00h\x01R" * 16 + b"e.",
    "streams of a text": b"\x80\x04X"
    + struct.pack("<I", 8 * MIB)
    + b"x" * (8 * MIB)
    + b"q\x000]("
    + b"c_io\nBytesIO\n)R(h\x00K\x00Ntb" * 9
    + b"e.",
    "a shape again and again": b"\x80\x04ctorch\nSize\nq\x000("
    + b"K\x01" * MIB
    + b"t\x85q\x010]("
    + b"h\x00h\x01R" * 65
    + b"e.",
    "bytes again and again": b"\x80\x04](B" + struct.pack("<I", MIB) + b"y" * MIB + b"q\x00" + b"h\x00" * 300 + b"e.",
    "a stream again and again": b"\x80\x04](c_io\nBytesIO\nB"
    + struct.pack("<I", MIB)
    + b"y" * MIB
    + b"\x85Rq\x00"
    + b"h\x00" * 300
    + b"e.",
    "a key of many keys": b"\x80\x04}(" + b"N" * 3000 + b"tq\x000(" + b"h\x00" * 3000 + b"tK\x01s.",
    "an integer of 2500 bytes": b"\x80\x04}X\x01\x00\x00\x00a\x8b" + struct.pack("<i", 2500) + b"\x01" * 2500 + b"s.",
    "many values at once": b"\x80\x02(" + b"N" * (MIB + MIB // 8) + b"t.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_a_damaged_or_hostile_pickle_is_one_clear_error(tmp_path: Path, case: str) -> None:
    error = refused(with_pickle(tmp_path, PICKLES[case]))
    assert error.kind in {"bad_manifest", "limits_exceeded"}
    assert "checkpoint.pt" in error.message


def test_an_object_is_made_without_keywords_and_refused_with_them(tmp_path: Path) -> None:
    made = b"\x80\x04}X\x01\x00\x00\x00accollections\nOrderedDict\n)%b\x92s."
    assert bcp.load_tree(with_pickle(tmp_path, made % b"}")) == {"a": {}}
    error = refused(with_pickle(tmp_path, made % b"}X\x01\x00\x00\x00bK\x01s"))
    assert error.kind == "bad_manifest"
    assert "makes an object from keywords" in error.message


def test_large_integers_and_keys_come_back(tmp_path: Path) -> None:
    objects = plain_leaves(bcp.open(save({"a": {1 << 70: 2, -5: 3}, "b": 1 << 8000}, tmp_path)))
    assert objects == {f"a.{1 << 70}": 2, "a.-5": 3, "b": 1 << 8000}


@pytest.mark.parametrize("num_bits", [8193, 8200])
def test_an_integer_that_is_refused_is_given_by_its_length_in_bytes(tmp_path: Path, num_bits: int) -> None:
    path = save({"a": 1 << (num_bits - 1)}, tmp_path)
    with pytest.raises(bcp.CheckpointError, match="an integer of 1025 bytes, at most 1024 are read"):
        bcp.open(path)


def test_a_memo_of_billions_costs_nothing(tmp_path: Path) -> None:
    path = with_pickle(tmp_path, b"\x80\x02]r\xff\xff\xff\xff.")
    with pytest.raises(bcp.CheckpointCorruptError, match="at most 4194304 are read"):
        bcp.open(path)


@pytest.mark.parametrize("module", ["os", "builtins", "torch", "posix", "numpy"])
@pytest.mark.parametrize("name", ["system", "eval", "load", "exec", "__import__"])
def test_no_global_but_the_known_ones_is_found(tmp_path: Path, module: str, name: str) -> None:
    error = refused(with_pickle(tmp_path, f"c{module}\n{name}\n.".encode()))
    assert error.kind == "pickle_refused"
    assert f"{module}.{name}" in error.message


def test_a_file_cut_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    path = save({"a": torch.arange(300), "b": {"c": torch.ones(40), "d": 1}}, tmp_path)
    content = path.read_bytes()
    for length in [0, 1, 3, 4, *range(16, len(content) - 1, 211), len(content) - 1]:
        path.write_bytes(content[:length])
        assert refused(path).kind in {"truncated", "bad_manifest", "not_found"}


def test_no_flipped_bit_is_more_than_an_error_or_another_value(tmp_path: Path) -> None:
    path = save({"a": torch.arange(20), "b": {"c": torch.ones(4), "d": [1, "x"]}}, tmp_path)
    content = path.read_bytes()
    for at in range(0, len(content), 29):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with contextlib.suppress(bcp.CheckpointError):
            bcp.open(path).state_dict()


def test_a_file_of_another_kind_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello, this is not a checkpoint")
    error = refused(path)
    assert (type(error), error.kind) == (bcp.CheckpointNotFoundError, "not_found")


def test_the_names_of_python_2_that_torch_writes_are_those_of_today(tmp_path: Path) -> None:
    """Its pickles call `int` `long` and `range` `xrange`."""
    counts: defaultdict[str, int] = defaultdict(int, {"a": 3})
    checkpoint = bcp.open(save({"counts": counts, "w": torch.ones(2)}, tmp_path))
    assert checkpoint.objects == {"counts": {"a": 3}}
    with pytest.raises(bcp.UnsafeCheckpointError) as caught:
        bcp.open(save({"numbers": range(3)}, tmp_path))
    assert "'builtins.range'" in caught.value.message
