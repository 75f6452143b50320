"""Tensor subclasses: saved as their inner tensors and what else is known of them, filled in place, or built anew."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from low_bit import (
    Corrected,
    Flattened,
    Int8Weight,
    LowBit,
    LowBitAdamW,
    Opaque,
    Recipe,
    Rounding,
    Sealed,
    corrected,
    int8,
    parts,
    same,
)
from torch import Tensor, nn

import bytecheckpoint as bcp
from bytecheckpoint.adapters import stateful
from bytecheckpoint.adapters.native.subclass_flatten import enclosing


def all_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def memory(tensor: Tensor) -> dict[str, int]:
    return {name: part.data_ptr() for name, part in parts(tensor).items()}


SAVES = {
    "synchronous": {},
    "copy": {"async_save": True, "options": bcp.SaveOptions(snapshot="copy")},
    "lazy": {"async_save": True, "options": bcp.SaveOptions(snapshot="lazy")},
    "compressed": {"options": bcp.SaveOptions(codec="zstd")},
}


@pytest.mark.parametrize("how", SAVES)
def test_a_module_is_filled_in_place(tmp_path: Path, how: str) -> None:
    source, target = LowBit(1), LowBit(50)
    before = {name: (id(tensor), memory(tensor)) for name, tensor in target.named().items()}
    bcp.save(tmp_path, {"model": source}, **SAVES[how]).result()
    bcp.load(tmp_path, {"model": target})
    assert all_same(target.named(), source.named())
    assert {name: (id(tensor), memory(tensor)) for name, tensor in target.named().items()} == before


def test_a_module_and_a_dict_of_its_tensors_have_the_same_names(tmp_path: Path) -> None:
    source, target = LowBit(1), LowBit(50)
    bcp.save(tmp_path / "dict", {"model": source.state_dict()})
    bcp.load(tmp_path / "dict", {"model": target})
    assert all_same(target.named(), source.named())
    bcp.save(tmp_path / "module", {"model": source})
    tensors = LowBit(50).state_dict()
    bcp.load(tmp_path / "module", {"model": tensors})
    assert all_same(tensors, source.state_dict())


def test_a_checkpoint_shows_inner_tensors_and_facts(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": LowBit(1)})
    checkpoint = bcp.open(tmp_path)
    assert sorted(name for name in checkpoint.keys() if "first" in name or "second" in name) == [
        "model.first.bias",
        "model.first.weight.scale",
        "model.first.weight.values",
        "model.second.weight.coarse.scale",
        "model.second.weight.coarse.values",
        "model.second.weight.rest",
    ]
    assert torch.equal(checkpoint["model.first.weight.values"][2:4], int8(1).values[2:4])
    (facts,) = checkpoint.objects["model"]["first.weight.@subclass"]
    assert facts == {
        "class": "low_bit.Int8Weight",
        "context": {
            "block": 4,
            "recipe": {
                "@dataclass": "low_bit.Recipe",
                "fields": {"rounding": {"@enum": "low_bit.Rounding", "name": "NEAREST"}, "target": (1, 2)},
            },
            "shape": {"@shape": "Size"},
        },
        "shape": [6, 8],
        "stride": [8, 1],
        "dtype": "float32",
    }
    assert checkpoint.objects["model"]["second.weight.coarse.@subclass"][0]["class"] == "low_bit.Int8Weight"
    assert checkpoint.objects["model"]["second.weight.@subclass"][0]["class"] == "low_bit.Corrected"


def on_meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Corrected):
        return Corrected(on_meta(tensor.coarse), tensor.rest.to("meta"))
    return Int8Weight(tensor.values.to("meta"), tensor.scale.to("meta"), tensor.block)


def test_a_module_on_the_meta_device_is_given_memory(tmp_path: Path) -> None:
    source, target = LowBit(1), LowBit(50)
    for module in target.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_plain = type(parameter.data) in (Tensor, nn.Parameter)
            meta = parameter.to("meta") if is_plain else on_meta(parameter)
            setattr(module, name, nn.Parameter(meta, requires_grad=parameter.requires_grad))
    target.tied.weight = target.second.weight
    target.table = on_meta(target.table)
    optimizer = torch.optim.SGD(target.parameters())
    bcp.save(tmp_path, {"model": source})
    bcp.load(tmp_path, {"model": target})
    assert all_same(target.named(), source.named())
    assert target.tied.weight is target.second.weight
    assert {id(parameter) for parameter in optimizer.param_groups[0]["params"]} == set(map(id, target.parameters()))
    assert not target.first.weight.requires_grad
    assert target.first.bias.requires_grad


def model_and_optimizer(seed: int, state: Any) -> dict[str, Any]:
    model = nn.Linear(8, 6)
    nn.init.constant_(model.weight, seed)
    optimizer = LowBitAdamW(model.parameters(), lr=0.1)
    if state is not None:
        optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": state}
        optimizer.state[model.bias] = {"step": torch.tensor(3.0), "exp_avg": torch.full((6,), float(seed))}
    return {"model": model, "optimizer": optimizer}


def state_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return state["optimizer"].state[state["model"].weight]


@pytest.mark.parametrize("make", [int8, corrected])
@pytest.mark.parametrize("how", SAVES)
def test_optimizer_state_in_place_and_in_a_fresh_optimizer(tmp_path: Path, how: str, make: Any) -> None:
    source = model_and_optimizer(1, make(1))
    bcp.save(tmp_path, source, **SAVES[how]).result()
    assert any(name.startswith("optimizer.state.weight.exp_avg.") for name in bcp.open(tmp_path).keys())
    for own in (make(50), None):
        target = model_and_optimizer(2, own)
        before = own is not None and memory(own)
        bcp.load(tmp_path, target)
        found = state_of(target)
        assert found.keys() == {"step", "exp_avg"}
        assert same(found["exp_avg"], make(1))
        assert found["step"] == 3
        assert own is None or (found["exp_avg"] is own and memory(own) == before)


def test_a_load_removes_optimizer_state_of_a_parameter_that_had_none(tmp_path: Path) -> None:
    bcp.save(tmp_path, model_and_optimizer(1, None))
    target = model_and_optimizer(2, int8(50))
    bcp.load(tmp_path, target)
    assert not target["optimizer"].state


def test_plain_state_of_a_parameter_that_is_a_subclass_in_a_fresh_optimizer(tmp_path: Path) -> None:
    weight = LowBit(1).first.weight
    source = torch.optim.SGD([("weight", weight)])
    source.state[weight] = {"momentum_buffer": torch.arange(48.0).view(6, 8)}
    bcp.save(tmp_path, {"optimizer": source})
    for parameter in (weight, nn.Parameter(on_meta(weight), requires_grad=False)):
        target = torch.optim.SGD([("weight", parameter)])
        bcp.load(tmp_path, {"optimizer": target})
        state = target.state[parameter]["momentum_buffer"]
        assert type(state) is Tensor
        assert torch.equal(state, source.state[weight]["momentum_buffer"])


def tree(make: Any, seed: int) -> dict[str, Any]:
    return {"a": make(seed), "list": [torch.full((2,), float(seed)), make(seed + 1)], "pair": (make(seed + 2), seed)}


@pytest.mark.parametrize("make", [int8, corrected])
@pytest.mark.parametrize("name", ["tensors", "extra_state"])
def test_plain_containers(tmp_path: Path, make: Any, name: str) -> None:
    bcp.save(tmp_path, {name: tree(make, 1), "alone": make(7)})
    expected, target = tree(make, 1), tree(make, 50)
    before = memory(target["a"])
    alone = make(8)
    bcp.load(tmp_path, {name: target, "alone": alone})
    assert same(alone, make(7))
    empty: dict[str, Any] = {name: {}, "alone": {}}
    bcp.load(tmp_path, empty)
    assert same(empty["alone"], make(7))
    assert memory(target["a"]) == before
    for loaded in (target, empty[name]):
        assert same(loaded["a"], expected["a"])
        assert same(loaded["list"][1], expected["list"][1])
        assert torch.equal(loaded["list"][0], expected["list"][0])
        assert same(loaded["pair"][0], expected["pair"][0])
        assert loaded["pair"][1] == 1


class Holder:
    """An object with a state of its own."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tensor is None else {"tensor": self.tensor, "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state.get("tensor")


@pytest.mark.parametrize("wrap", [lambda value: value, bcp.RankLocal], ids=["stateful", "rank local"])
def test_objects_with_a_state_of_their_own(tmp_path: Path, wrap: Any) -> None:
    bcp.save(tmp_path, {"it": wrap(Holder(corrected(1)))})
    for own in (corrected(2), None, int8(3)):
        holder = Holder(own)
        bcp.load(tmp_path, {"it": wrap(holder)})
        assert same(holder.given, corrected(1))
    holder = Holder(int8(4, block=2))
    bcp.save(tmp_path / "int8", {"it": wrap(Holder(int8(1)))})
    bcp.load(tmp_path / "int8", {"it": wrap(holder)})
    assert same(holder.given, int8(1))
    assert same(holder.tensor, int8(4, block=2))


def test_a_renamed_object_is_given_its_own_tensor_back(tmp_path: Path) -> None:
    unfindable = type("Unfindable", (Int8Weight,), {"__module__": "elsewhere"})
    bcp.save(tmp_path, {"old": Holder(int8(1, cls=unfindable))})
    holder = Holder(int8(2, cls=unfindable))
    bcp.load(tmp_path, {"new": holder}, key_map=[(r"^old\b", "new")])
    assert holder.given is holder.tensor
    assert same(holder.tensor, int8(1, cls=unfindable))


@pytest.mark.parametrize("name", ["it", ""])
def test_an_object_is_given_its_own_tensor_back(tmp_path: Path, name: str) -> None:
    bcp.save(tmp_path, {name: Holder(int8(1))})
    holder = Holder(int8(2))
    bcp.load(tmp_path, {name: holder})
    assert holder.given is holder.tensor
    assert same(holder.tensor, int8(1))


def as_module(tensor: Any) -> Any:
    model = nn.Linear(8, 6)
    model.weight = nn.Parameter(tensor, requires_grad=False)
    nn.init.zeros_(model.bias)
    return {"it": model}


def as_tree(tensor: Any) -> Any:
    return {"it": {"weight": tensor, "bias": torch.zeros(6)}}


@pytest.mark.parametrize("place", [as_module, as_tree])
@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: int8(2, block=2), "context block 4 in the checkpoint, 2 in the state"),
        (
            lambda: int8(2, recipe=Recipe(Rounding.DOWN)),
            "rounding name 'NEAREST' in the checkpoint, 'DOWN'",
        ),
        (lambda: int8(2, (8, 6), block=2), r"shape \[6, 8\] in the checkpoint, \[8, 6\] in the state"),
        (lambda: corrected(2), "low_bit.Int8Weight' in the checkpoint, 'low_bit.Corrected' in the state"),
    ],
    ids=["block", "recipe", "shape", "class"],
)
def test_what_differs_is_an_error_before_anything_is_changed(tmp_path: Path, place: Any, other: Any, what: str) -> None:
    source, target = place(int8(1)), place(other())
    if place is as_module:
        nn.init.constant_(source["it"].bias, 1.0)
    else:
        source["it"]["bias"].fill_(1.0)
    bcp.save(tmp_path, source)
    with pytest.raises(bcp.CheckpointMismatchError, match=what) as error:
        bcp.load(tmp_path, target)
    assert "it.weight" in str(error.value)
    held = target["it"].state_dict() if place is as_module else target["it"]
    assert same(held["weight"], other())
    assert not held["bias"].any()
    report = bcp.load(tmp_path, target, strict=False)
    assert report.mismatched or report.missing
    assert same(held["weight"], other())
    assert held["bias"].all()


def test_optimizer_state_that_differs_is_an_error(tmp_path: Path) -> None:
    bcp.save(tmp_path, model_and_optimizer(1, int8(1)))
    of_another_recipe = int8(2, recipe=Recipe(Rounding.DOWN))
    for own in (int8(2, block=2), of_another_recipe, corrected(2), torch.zeros(6, 8)):
        target = model_and_optimizer(2, own)
        with pytest.raises(bcp.CheckpointMismatchError, match=r"optimizer\.state\.weight\.exp_avg") as error:
            bcp.load(tmp_path, target)
        assert "conflict" in str(error.value)
        assert state_of(target)["exp_avg"] is own
        report = bcp.load(tmp_path, target, strict=False)
        assert report.mismatched
        assert state_of(target)["exp_avg"] is own
        assert state_of(target)["step"] == 3
        assert torch.equal(target["model"].weight, torch.ones(6, 8))
    bcp.save(tmp_path / "plain", model_and_optimizer(1, torch.zeros(6, 8)))
    target = model_and_optimizer(2, int8(2))
    with pytest.raises(bcp.CheckpointMismatchError, match=r"subclass in the state, and none in the checkpoint"):
        bcp.load(tmp_path / "plain", target)
    bcp.load(tmp_path / "plain", target, strict=False)
    assert same(state_of(target)["exp_avg"], int8(2))


def test_a_plain_tensor_is_not_filled_from_a_subclass_nor_the_other_way_round(tmp_path: Path) -> None:
    bcp.save(tmp_path / "low", as_module(int8(1)))
    bcp.save(tmp_path / "plain", {"it": nn.Linear(8, 6)})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.weight: not in the checkpoint") as error:
        bcp.load(tmp_path / "low", {"it": nn.Linear(8, 6)})
    assert "it.weight.values" in str(error.value)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.weight\.values: not in the checkpoint"):
        bcp.load(tmp_path / "plain", as_module(int8(1)))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: int8(1, cls=Opaque),
            r"weight.* is a tensor subclass, low_bit\.Opaque, whose context .* builtins",
        ),
        (lambda: Sealed(torch.ones(6, 8)), r"weight.* is a tensor subclass, low_bit\.Sealed"),
        (lambda: nn.Parameter(Sealed(torch.ones(6, 8))), r"weight.* is a tensor subclass, low_bit\.Sealed"),
    ],
    ids=["context", "sealed", "sealed parameter"],
)
@pytest.mark.parametrize("place", [as_tree, lambda tensor: model_and_optimizer(1, tensor)], ids=["tree", "optimizer"])
def test_what_cannot_be_said_is_refused_by_name(tmp_path: Path, place: Any, make: Any, what: str) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=what) as error:
        bcp.save(tmp_path, place(make()))
    assert error.value.kind == "unsupported_value"
    assert bcp.latest(tmp_path) is None


def test_a_module_whose_weight_cannot_be_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"it\.weight is a tensor subclass, low_bit\.Opaque"):
        bcp.save(tmp_path, as_module(int8(1, cls=Opaque)))
    model = nn.Linear(8, 6)
    model.weight = nn.Parameter(Sealed(torch.ones(6, 8)))
    with pytest.raises(bcp.CheckpointSaveError, match=r"it\.weight is a tensor subclass, low_bit\.Sealed"):
        bcp.save(tmp_path, {"it": model})


def test_names_never_collide_silently(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"it\.w\.values is the name of two values"):
        bcp.save(tmp_path, {"it": {"w": int8(1), "w.values": torch.ones(2)}})
    with pytest.raises(bcp.CheckpointSaveError, match="the name of two values"):
        bcp.save(tmp_path, {"it": {"w": int8(1), "w.@subclass": 3}})
    with pytest.raises(bcp.CheckpointSaveError, match=r"it\.w\.values is the name of two values"):
        bcp.save(tmp_path, {"it": {"w": int8(1)}, "it.w.values": torch.ones(2)})
    optimizer = torch.optim.SGD([("a", nn.Parameter(torch.ones(6, 8))), ("a.b", nn.Parameter(torch.ones(6, 8)))])
    first, second = optimizer.param_groups[0]["params"]
    optimizer.state[first], optimizer.state[second] = {"b": int8(1)}, {"values": torch.ones(2)}
    with pytest.raises(bcp.CheckpointSaveError, match=r"optimizer\.state\.a\.b\.values is the name of two values"):
        bcp.save(tmp_path, {"optimizer": optimizer})


def test_a_class_that_is_not_there_is_an_error_that_says_to_import_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Int8Weight, "__module__", "elsewhere")
    bcp.save(tmp_path, {"it": {"w": int8(1), "n": 1}})
    empty: dict[str, Any] = {"it": {}}
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"it\.w: .* elsewhere\.Int8Weight .* import the module"
    ) as error:
        bcp.load(tmp_path, empty)
    assert error.value.kind == "conflict"
    assert empty == {"it": {}}
    target = int8(2)
    bcp.load(tmp_path, {"it": {"w": target, "n": 0}})
    assert same(target, int8(1))


@pytest.mark.parametrize("name", ["os.system", "pathlib.Path", "subprocess.Popen", "torch.nn.Linear", "low_bit.Sealed"])
def test_a_checkpoint_cannot_have_anything_else_built(tmp_path: Path, name: str) -> None:
    module, _, qualname = name.rpartition(".")
    cls = type(qualname, (Int8Weight,), {"__module__": module})
    bcp.save(tmp_path, {"it": {"w": int8(1, cls=cls)}})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.w: a tensor subclass that cannot be built"):
        bcp.load(tmp_path, {"it": {}})


def test_data_of_a_user_under_the_name_of_facts_is_data(tmp_path: Path) -> None:
    for number, value in enumerate((3, [{"class": "os.system"}], {"a": [1]}, [])):
        path, state = tmp_path / str(number), {"it": {"w": {"@subclass": value, "t": torch.ones(2)}}}
        bcp.save(path, {**state, "object": Holder(state["it"])})
        target: dict[str, Any] = {"it": {"w": {"@subclass": None, "t": torch.zeros(2)}}, "empty": {}}
        if value == {"a": [1]}:
            target["it"]["w"]["@subclass"] = {"a": None}
        del target["empty"]
        holder = Holder(None)
        bcp.load(path, {**target, "object": holder})
        empty: dict[str, Any] = {"it": {}}
        bcp.load(path, empty)
        assert target["it"]["w"]["@subclass"] == empty["it"]["w"]["@subclass"] == value
        assert holder.given["w"]["@subclass"] == value


def forged(context: Any) -> list[dict[str, Any]]:
    shape = {"shape": [6, 8], "stride": [8, 1], "dtype": "float32"}
    return [{"class": "low_bit.Int8Weight", "context": context, **shape}]


@pytest.mark.parametrize(
    "context",
    [
        {"@enum": 3, "name": "x"},
        {"@enum": "low_bit.Rounding", "name": "mro"},
        {"@enum": "low_bit.Recipe", "name": "NEAREST"},
        {"@dataclass": "pathlib.Path", "fields": {}},
        {"@dataclass": "low_bit.Recipe", "fields": {"rounding": 1}},
        {"@dataclass": "low_bit.Recipe"},
        {"@shape": "dict"},
    ],
)
def test_a_forged_context_is_an_error_before_anything_is_changed(tmp_path: Path, context: Any) -> None:
    tensor = int8(1)
    bcp.save(tmp_path, {"it": {"w": {"values": tensor.values, "scale": tensor.scale, "@subclass": forged(context)}}})
    empty: dict[str, Any] = {"it": {}}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.w: a tensor subclass that cannot be built"):
        bcp.load(tmp_path, empty)
    assert empty == {"it": {}}


def test_a_dict_of_inner_tensors_is_what_a_checkpoint_gives_without_the_class(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"it": {"w": int8(1)}})
    found = bcp.open(tmp_path).state_dict("it.")
    assert found.keys() == {"w.values", "w.scale"}
    assert torch.equal(found["w.values"], int8(1).values)


def test_tied_weights_come_back_into_a_model_where_they_are_not_tied(tmp_path: Path) -> None:
    source, target = LowBit(1), LowBit(50)
    target.tied.weight = nn.Parameter(corrected(60), requires_grad=False)
    assert len(bcp.save(tmp_path, {"model": source}).result().path) > 0
    bcp.load(tmp_path, {"model": target})
    assert all_same(target.named(), source.named())
    opened = bcp.open(tmp_path)
    assert opened.manifest.aliases["model.tied.weight.rest"] == "model.second.weight.rest"


def test_include_exclude_and_key_map_see_inner_tensors(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"it": {"w": int8(1)}})
    target = int8(2)
    bcp.load(tmp_path, {"it": {"w": target}}, exclude="*.scale")
    assert torch.equal(target.values, int8(1).values)
    assert torch.equal(target.scale, int8(2).scale)
    target = int8(2)
    bcp.load(tmp_path, {"it": {"v": target}}, key_map=[(r"^it\.w\.", "it.v.")])
    assert same(target, int8(1))
    other = int8(2, block=2)
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        bcp.load(tmp_path, {"it": {"w": other}}, exclude="it.w.*", strict=False)
    assert same(other, int8(2, block=2))


class Blocks(Flattened):
    """How many elements a scale is for follows from the inner tensors, and is in no context."""

    inner = ("codes", "scale")

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["codes"], inner["scale"])


def blocks(value: int, num_scales: int, dtype: torch.dtype = torch.uint8) -> Any:
    return Blocks(torch.full((6, 8), value, dtype=dtype), torch.full((num_scales,), float(value)))


def corrected_by(block: int, value: float) -> Any:
    return Corrected(int8(int(value), block=block), torch.full((6, 8), value).bfloat16())


MISFITS = {
    "an inner shape": (lambda: blocks(1, 4), lambda: blocks(9, 8)),
    "an inner dtype": (lambda: blocks(1, 4), lambda: blocks(9, 4, torch.int8)),
    "nested facts": (lambda: corrected_by(4, 1.0), lambda: corrected_by(2, 9.0)),
    "a missing inner tensor": (lambda: {"codes": blocks(1, 4).codes}, lambda: blocks(9, 4)),
}


@pytest.mark.parametrize("case", ["an inner shape", "an inner dtype", "nested facts"])
def test_an_object_is_never_given_half_a_subclass(tmp_path: Path, case: str) -> None:
    make, make_other = MISFITS[case]
    bcp.save(tmp_path, {"it": Holder(make())})
    holder = Holder(make_other())
    bcp.load(tmp_path, {"it": holder})
    assert same(holder.given, make())
    assert same(holder.tensor, make_other())


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("place", [as_module, as_tree])
@pytest.mark.parametrize("cast", [False, True])
def test_a_subclass_that_does_not_fit_stays_wholly_as_it_is(tmp_path: Path, case: str, place: Any, cast: bool) -> None:
    make, make_other = MISFITS[case]
    bcp.save(tmp_path, as_tree(make()))
    target = place(make_other())
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.weight"):
        bcp.load(tmp_path, target, cast=cast)
    report = bcp.load(tmp_path, target, strict=False, cast=cast)
    assert report.mismatched or report.missing
    held = target["it"].state_dict() if place is as_module else target["it"]
    assert same(held["weight"], make_other())


def test_optimizer_state_that_does_not_fit_inside_stays_wholly_as_it_is(tmp_path: Path) -> None:
    bcp.save(tmp_path, model_and_optimizer(1, blocks(1, 4)))
    target = model_and_optimizer(2, blocks(9, 8))
    with pytest.raises(bcp.CheckpointMismatchError, match=r"exp_avg\.scale: shape \[4\]"):
        bcp.load(tmp_path, target)
    bcp.load(tmp_path, target, strict=False)
    assert same(state_of(target)["exp_avg"], blocks(9, 8))


def test_facts_that_differ_under_a_tied_name_keep_all_its_names(tmp_path: Path) -> None:
    source = nn.ModuleDict({"b": as_module(int8(1, recipe=Recipe(Rounding.DOWN)))["it"]})
    bcp.save(tmp_path, {"it": source})
    target = nn.ModuleDict({"a": as_module(int8(9))["it"], "b": nn.Linear(8, 6)})
    target["b"].weight = target["a"].weight
    bcp.load(tmp_path, {"it": target}, strict=False)
    assert same(target["b"].weight, int8(9))


def test_a_shared_table_ties_no_parameters(tmp_path: Path) -> None:
    def make(value: int) -> tuple[Any, Any]:
        table = torch.full((4,), float(value))
        model = nn.ModuleDict({name: nn.Linear(8, 6, bias=False) for name in "ab"})
        for number, module in enumerate(model.values()):
            codes = torch.full((6, 8), value + number, dtype=torch.uint8)
            module.weight = nn.Parameter(Blocks(codes, table))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(1)
    optimizer.state[model["b"].weight] = {"step": torch.tensor(2.0)}
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    model, optimizer = make(50)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert not optimizer.state[model["a"].weight]
    assert optimizer.state[model["b"].weight]["step"] == 2


@dataclasses.dataclass
class LetsGo:
    a: int = 1

    def __del__(self) -> None:
        raise AssertionError("a checkpoint has run code")


FORGERIES: dict[str, Any] = {
    "no inner tensor": ({"block": 4, "recipe": None, "shape": [6, 8]}, ["values"]),
    "no context": (None, ["values", "scale"]),
    "fields that are none": ({"@dataclass": "low_bit.Recipe", "fields": 3}, ["values", "scale"]),
    "fields of any keys": ({"@dataclass": "low_bit.Recipe", "fields": {1: 2, "a": 3}}, ["values", "scale"]),
    "a name that is none": ({"@enum": "low_bit.Rounding", "name": [1]}, ["values", "scale"]),
    "a shape that is none": ({"@shape": [1]}, ["values", "scale"]),
    "code of a dataclass": ({"@dataclass": f"{LetsGo.__module__}.LetsGo", "fields": {"a": 1}}, ["values", "scale"]),
    "another shape": ({"block": 4, "recipe": None, "shape": [1 << 61, 8]}, ["values", "scale"]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_damaged_subclass_is_refused_before_anything_is_changed(tmp_path: Path, name: str) -> None:
    context, names = FORGERIES[name]
    weight = {**{key: getattr(int8(1), key) for key in names}, "@subclass": forged(context)}
    for place in (as_tree, lambda tensor: {**model_and_optimizer(1, tensor), "it": as_tree(0)["it"]}):
        path = tmp_path / str(place is as_tree)
        bcp.save(path, {**place(weight), "other": torch.ones(3)})
        other = torch.zeros(3)
        target = {"it": {"weight": {}, "bias": torch.ones(6)}} if place is as_tree else model_and_optimizer(2, None)
        with pytest.raises(bcp.CheckpointMismatchError, match=r"conflict: .*weight"):
            bcp.load(path, {"it": as_tree(0)["it"], **target, "other": other})
        assert not other.any()


def test_a_subclass_to_be_built_is_left_out_where_a_part_is_excluded(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"it": {"w": int8(1), "z": torch.ones(2)}, "object": Holder(int8(2))})
    empty: dict[str, Any] = {}
    holder = Holder(None)
    bcp.load(tmp_path, {"it": empty, "object": holder}, exclude="*.scale")
    assert empty.keys() == {"z"}
    assert holder.given is None


@pytest.mark.parametrize("part", ["scale", "@subclass"])
def test_a_subclass_of_a_rank_stays_where_a_part_is_excluded(tmp_path: Path, part: str) -> None:
    bcp.save(tmp_path, {"it": bcp.RankLocal({"w": int8(1), "z": 1})})
    own, target = int8(2), bcp.RankLocal({"w": int8(2), "z": 0})
    before = target.value["w"]
    bcp.load(tmp_path, {"it": target}, exclude=f"it.w.{part}")
    assert target.value["w"] is before
    assert same(before, own)
    assert target.value["z"] == 1
    target = bcp.RankLocal(None)
    bcp.load(tmp_path, {"it": target}, exclude=f"it.w.{part}")
    assert target.value == {"z": 1}


class Mm(NamedTuple):
    """What torchao keeps in a context."""

    emulate: bool = False
    limit: float = math.nan


class Bits(enum.IntFlag):
    A = 1
    B = 2


def test_named_tuples_and_nan_may_be_in_a_context(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"it": {"w": int8(1, recipe=Mm(True))}})
    target, empty = int8(2, recipe=Mm(True)), dict[str, Any]()
    bcp.load(tmp_path, {"it": {"w": target}})
    assert torch.equal(target.values, int8(1).values)
    bcp.load(tmp_path, {"it": empty})
    assert type(empty["w"].recipe) is Mm
    assert empty["w"].recipe.emulate
    with pytest.raises(bcp.CheckpointSaveError, match="Bits"):
        bcp.save(tmp_path / "flags", {"it": {"w": int8(1, recipe=Bits.A | Bits.B)}})


def test_an_object_finds_the_parts_of_each_subclass_without_a_look_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def counted(fqn: str, outer: Collection[str]) -> list[str]:
        looks.append(fqn)
        return enclosing(fqn, outer)

    def num_looks(num_tensors: int) -> int:
        path = tmp_path / str(num_tensors)
        source, holder = (Holder({str(at): int8(at + seed) for at in range(num_tensors)}) for seed in (0, 50))
        bcp.save(path, {"it": source})
        looks.clear()
        bcp.load(path, {"it": holder})
        assert all_same(holder.given, source.tensor)
        return len(looks)

    monkeypatch.setattr(stateful, "enclosing", counted)
    few, more, many = map(num_looks, (5, 10, 15))
    assert many - more == more - few


class Keyed(Holder):
    """An object with a state of several tensors."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


def test_subclasses_that_do_not_fit_are_replaced_where_the_name_of_one_is_below_another(tmp_path: Path) -> None:
    source, target = ({"w": int8(1, shape), "w.x": int8(2, shape)} for shape in ((6, 8), (12, 8)))
    bcp.save(tmp_path, {"it": Keyed(source)})
    holder = Keyed(target)
    bcp.load(tmp_path, {"it": holder})
    assert all(same(holder.given[name], tensor) for name, tensor in source.items())
