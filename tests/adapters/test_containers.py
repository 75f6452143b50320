"""Nested containers of tensors and plain data come back as they were, or are refused by name."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training import same_value

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.merge_plain import merge_plain
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain, encode_refs
from bytecheckpoint.adapters.plain.plain_tree import leaves


def equal(a: Any, b: Any) -> bool:
    """Equal in type, in order of keys and in every bit that Python shows."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b and repr(a) == repr(b)


def blank(value: Any) -> Any:
    """The same containers with other leaves."""
    if isinstance(value, dict):
        return type(value)({key: blank(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(blank, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "blank"


PLAIN = {
    "none": None,
    "true": True,
    "int": -5,
    "large_int": 2**64 - 1,
    "larger_int": 2**64,
    "huge_int": -(10**40),
    "float": 0.1,
    "negative_zero": -0.0,
    "infinity": -math.inf,
    "not_a_number": math.nan,
    "tiny": 5e-324,
    "complex": complex(-0.0, math.inf),
    "text": "a\0b\n\u00fc\U0001f600",
    "empty_text": "",
    "bytes": b"\x00\xff",
    "empty_list": [],
    "empty_tuple": (),
    "list": [1, [2.0, [None]], ("a", b"b")],
    "tuple": (1, (2,), []),
    "size": torch.Size([2, 3]),
    "empty_size": torch.Size([]),
    "dtype": torch.bfloat16,
    "ordered": OrderedDict([("z", 1), ("a", 2)]),
    "counter": Counter({"a": 2, "b": 1}),
    "int_keys": {3: "c", 1: "a", -1: "z"},
    "mixed_keys": {"a": 1, 2: "b"},
    "nested": {"a": {"b": {"c": {1: {"d": [1]}}}}},
    "list_of_dicts": [{"a": 1}, {"b": [{}, ()]}],
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "array_t": np.arange(6, dtype=">f4").reshape(2, 3).T,
    "empty_array": np.zeros((0, 3)),
    "array_0d": np.array(7),
    "array_text": np.array(["ab", "c"]),
    "array_bytes": np.array([b"ab", b"c"]),
    "array_bool": np.array([True, False]),
    "array_complex": np.array([1j], dtype=np.complex64),
    "scalar_f4": np.float32(1.5),
    "scalar_i1": np.int8(-3),
    "scalar_bool": np.bool_(True),
    "scalar_text": np.str_("ab"),
}


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN.keys())
@pytest.mark.parametrize("name", ["state", "extra_state"])
def test_plain_data_comes_back_as_it_was(tmp_path: Path, value: Any, name: str) -> None:
    state = {name: {"value": copy.deepcopy(value), "beside": torch.ones(2)}}
    target = {name: {"value": blank(value), "beside": torch.zeros(2)}}
    bcp.save(tmp_path, state)
    bcp.load(tmp_path, target)
    assert equal(target, state)
    assert equal(state[name]["value"], value)


@pytest.mark.parametrize("value", PLAIN.values(), ids=PLAIN.keys())
def test_plain_data_comes_back_at_the_top_in_rank_local_and_in_an_empty_dict(tmp_path: Path, value: Any) -> None:
    bcp.save(tmp_path, {"top": value, "local": bcp.RankLocal(value), "open": {"value": value, "t": torch.ones(2)}})
    target: dict[str, Any] = {"top": blank(value), "local": bcp.RankLocal(None), "open": {}}
    bcp.load(tmp_path, target)
    assert equal(target["top"], value)
    assert equal(target["local"].value, value)
    assert equal(target["open"], {"value": value, "t": torch.ones(2)})


keys = st.one_of(
    st.text(max_size=5),
    st.sampled_from([".", "a.b", "0", "[0:1]", "a/b", "a\nb", "é", "*", "x@0"]),
    st.integers(-(2**63), 2**63),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
)
tensors = st.integers(0, 5).map(lambda length: torch.arange(float(length)))
trees = st.recursive(
    st.one_of(scalars, tensors),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
    ),
    max_leaves=8,
)


@given(state=st.dictionaries(keys, trees, max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_comes_back_as_it_was_or_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, state: dict[Any, Any]
) -> None:
    path = tmp_path_factory.mktemp("tree")
    with contextlib.suppress(bcp.CheckpointSaveError):
        bcp.save(path, copy.deepcopy(state))
    if list(path.iterdir()):
        target = blank(state)
        bcp.load(path, target)
        assert equal(target, state)
    else:
        with pytest.raises(
            bcp.CheckpointSaveError, match=r"the name of two values|more than 64 bits|empty dict"
        ) as error:
            bcp.save(path, state)
        assert error.value.kind == "unsupported_value"


def test_an_empty_dict_takes_nothing_of_another_dict_whose_key_has_dots(tmp_path: Path) -> None:
    state = {"a": {"0": {}}, "a.0": {"b": 3}}
    bcp.save(tmp_path / "c", state)
    target: dict[str, Any] = {"a": {"0": {}}, "a.0": {"b": None}}
    bcp.load(tmp_path / "c", target)
    assert target == state


@pytest.mark.parametrize("inner", [{"c": 2}, {"c": torch.arange(300.0)}, [torch.ones(3)]])
@pytest.mark.parametrize("leaf", [1, torch.ones(300)])
def test_a_container_with_the_name_of_a_leaf_comes_back(tmp_path: Path, leaf: Any, inner: Any) -> None:
    state = {"x": {"a.b": leaf, "a": {"b": inner}, 1: leaf, "1": inner}}
    bcp.save(tmp_path, copy.deepcopy(state))
    target = blank(state)
    bcp.load(tmp_path, target)
    assert equal(target, state)


COLLISIONS = {
    "dot and nesting": ({"a": {"b": 1}, "a.b": 2}, "a.b"),
    "dot and nesting, tensors": ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, "a.b"),
    "int and str": ({"s": {0: 1, "0": 2}}, "s.0"),
    "int and str at the top": ({0: 1, "0": 2}, "0"),
    "a value and a dict at the top": ({0: 1, "0": {"a": 2}}, "0"),
    "two dicts at the top": ({0: {"b": 1}, "0": {"a": 2}}, "0"),
    "a RankLocal and a dict": ({"m": {0: bcp.RankLocal(1), "0": {"a": 2}}}, "m.0"),
    "list and str": ({"s": [torch.ones(1)], "s.0": 1}, "s.0"),
    "deep": ({"s": {"a.b": {"c": 1}, "a": {"b.c": 2}}}, "s.a.b.c"),
    "tensor and data": ({"s": {"a.b": torch.ones(1), "a": {"b": 2}}}, "s.a.b"),
    "module and data": ({"m": torch.nn.Linear(1, 1), "m.weight": 1}, "m.weight"),
}


@pytest.mark.parametrize(("state", "fqn"), COLLISIONS.values(), ids=COLLISIONS.keys())
def test_two_values_of_one_name_are_refused_by_name(tmp_path: Path, state: dict[Any, Any], fqn: str) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=f"^{fqn} is the name of two values") as error:
        bcp.save(tmp_path, state)
    assert error.value.kind == "unsupported_value"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key", ["a.b", "w[0:2]", "a/b", "../a", "a\nb", "\u00fc\U0001f600", "a b", "__metadata__", "*", "x@0", "0"]
)
def test_odd_keys_of_tensors_and_data(tmp_path: Path, key: str) -> None:
    bcp.save(tmp_path, {key: {key: torch.arange(3.0), "plain": {key: key}}, f"{key}-": torch.ones(1)})
    target: dict[str, Any] = {key: {key: torch.zeros(3), "plain": {key: ""}}, f"{key}-": torch.zeros(1)}
    bcp.load(tmp_path, target)
    assert equal(target, {key: {key: torch.arange(3.0), "plain": {key: key}}, f"{key}-": torch.ones(1)})
    assert torch.equal(bcp.open(tmp_path)[f"{key}.{key}"][1:], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("keys", [["a"], ["a", "b.c"], ["é", "b"], ["", "x"], ["1", "a.1"]])
def test_tensors_alone_in_a_dict_are_described_as_beside_plain_data(keys: list[str]) -> None:
    tensors = {key: torch.zeros(2) for key in keys}
    seen: dict[str, torch.Tensor] = {}
    encoded = encode_plain(tensors, "model", lambda fqn, tensor: seen.update({fqn: tensor}))
    fqns, names, refs = encode_refs("model", tuple(keys))
    assert names == set(fqns)
    assert refs == encoded
    assert fqns == tuple(seen) == tuple(leaves(tensors, "model"))


def test_a_key_that_no_text_can_hold_is_refused_where_tensors_are_alone(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match="surrogate"):
        bcp.save(tmp_path, {"model": {"\ud800": torch.zeros(2)}})


def test_an_error_about_a_key_shows_no_values_of_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError) as error:
        bcp.save(tmp_path, {"a": {torch.ones(3, 3): 1}})
    assert "a dict with a key of type Tensor, which is not supported" in error.value.message


def test_a_key_that_starts_like_another_key(tmp_path: Path) -> None:
    state = {"a": {"c": 1}, "a.b": {"x": torch.ones(2), "y": 3}, "ab": {"c": 4}}
    target: dict[str, Any] = {"a": {"c": 0}, "a.b": {}, "ab": {}}
    bcp.save(tmp_path, state)
    bcp.load(tmp_path, target)
    assert equal(target, state)


def test_containers_and_tensors_stay_the_objects_that_they_are(tmp_path: Path) -> None:
    bcp.save(
        tmp_path, {"d": {"n": 1, "t": torch.ones(2)}, "l": [torch.ones(2), {"n": 2}], "h": [1, 2, 3], "a": np.ones(2)}
    )
    tensors, inner, history, array = [torch.zeros(2), torch.zeros(2)], {"n": 0}, [0], np.zeros(2)
    dictionary, listing = {"n": 0, "t": tensors[0]}, [tensors[1], inner]
    bcp.load(tmp_path, {"d": dictionary, "l": listing, "h": history, "a": array})
    assert dictionary["t"] is tensors[0]
    assert listing[0] is tensors[1]
    assert listing[1] is inner
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0]] * 2
    assert (dictionary["n"], inner["n"], history, array.tolist()) == (1, 2, [1, 2, 3], [1.0, 1.0])


def test_plain_data_at_the_top_is_written_back_into_the_state(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"epoch": 3, "best": (1, 2.5), "name": "run"})
    state = {"epoch": 0, "best": None, "name": ""}
    bcp.load(tmp_path, state)
    assert state == {"epoch": 3, "best": (1, 2.5), "name": "run"}


def test_tensors_in_tuples_are_filled_in_place(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"pair": (torch.arange(2.0), {"n": 1})})
    tensor = torch.zeros(2)
    state = {"pair": (tensor, {"n": 0})}
    bcp.load(tmp_path, state)
    assert state["pair"][0] is tensor
    assert equal(state, {"pair": (torch.arange(2.0), {"n": 1})})


class MakesKeys(dict[str, Any]):
    """As configurations do that are written `config.model.width = 3`."""

    def __getattr__(self, name: str) -> Any:
        return self.setdefault(name, MakesKeys())


class MakesItems(list[Any]):
    def __getattr__(self, name: str) -> Any:
        self.append(name)
        return name


class MakesAttributes:
    """An object with state that has whatever attribute it is asked for."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            setattr(self, name, MakesAttributes())
        return vars(self).get(name)


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value], lambda value: {"inner": value}])
@pytest.mark.parametrize(
    "value", [MakesKeys(), MakesKeys(a=torch.ones(2), n=MakesKeys(b=1)), MakesItems(), MakesItems([1])]
)
def test_a_save_makes_no_keys_in_a_container_that_makes_what_it_is_asked_for(
    tmp_path: Path, value: Any, wrap: Any
) -> None:
    before = repr(value)
    with contextlib.suppress(bcp.CheckpointSaveError):
        bcp.save(tmp_path, {"value": wrap(value)})
    assert repr(value) == before


def test_a_save_makes_no_attributes_in_an_object_that_makes_what_it_is_asked_for(tmp_path: Path) -> None:
    value = MakesAttributes()
    bcp.save(tmp_path, {"value": value})
    assert vars(value) == {}


def test_an_empty_dict_takes_what_the_checkpoint_has(tmp_path: Path) -> None:
    content = {"n": 1, "t": torch.arange(3.0), "deep": {"l": [torch.ones(2), 1], "u": (torch.zeros(1), None)}, 5: {}}
    bcp.save(tmp_path, {"s": content, "list": [{"a": torch.ones(1)}, torch.ones(2)], "extra_state": {"r": {1: "a"}}})
    target: dict[str, Any] = {"s": {}, "list": [{}, torch.zeros(2)], "extra_state": {"r": {}}}
    taken = target["s"]
    bcp.load(tmp_path, target)
    assert target["s"] is taken
    assert equal(taken, content)
    assert equal(target["list"], [{"a": torch.ones(1)}, torch.ones(2)])
    assert target["extra_state"] == {"r": {1: "a"}}


@pytest.mark.parametrize(("include", "keys"), [("s.*", {"n", "t"}), ("s.t", {"t"})])
def test_an_empty_dict_takes_what_include_names_below_it(tmp_path: Path, include: str, keys: set[str]) -> None:
    bcp.save(tmp_path, {"s": {"n": 1, "t": torch.ones(2)}})
    target: dict[str, Any] = {"s": {}}
    bcp.load(tmp_path, target, include=include)
    assert target["s"].keys() == keys


def test_ordered_dicts_of_ranks_are_united_as_dicts_are() -> None:
    trees = [{"s": OrderedDict(b=1, a={"x": 1})}, {"s": OrderedDict(a={"y": 2}, c=3)}]
    of_ranks = [{"it": ("shared", encode_plain(tree, "it"))} for tree in trees]
    shared, by_rank = merge_plain(of_ranks, [0, 1])  # type: ignore[arg-type]
    assert repr(decode_plain(shared["it"])["s"]) == repr(OrderedDict(b=1, a={"x": 1, "y": 2}, c=3))
    assert not by_rank
    of_ranks[1] = {"it": ("shared", encode_plain({"s": {"b": 1}}, "it"))}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.s: OrderedDict\(.* on rank 0, \{'b': 1\} on rank 1"):
        merge_plain(of_ranks, [0, 1])  # type: ignore[arg-type]


def test_an_empty_dict_under_an_empty_name_takes_what_is_there(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"": {"a": 1, "t": torch.ones(3)}, "b": 2})
    state: dict[str, Any] = {"": {}, "b": 0}
    bcp.load(tmp_path, state)
    assert equal(state, {"": {"a": 1, "t": torch.ones(3)}, "b": 2})


def test_a_default_dict_is_loaded_into_and_kept(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"s": {"a": 1}})
    target: dict[str, int] = defaultdict(int, a=0)
    bcp.load(tmp_path, {"s": target})
    assert target == {"a": 1}
    assert type(target) is defaultdict


class OwnDict(dict[str, int]):
    """A user's own kind of dict."""


@pytest.mark.parametrize(
    "value",
    [
        defaultdict(int, a=1),
        OwnDict(a=1),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.ones((2, 2)).view(np.matrix),
        np.rec.array([1, 2]),
    ],
    ids=["defaultdict", "own dict", "masked array", "matrix", "recarray"],
)
@pytest.mark.parametrize("wrap", [lambda value: value, bcp.RankLocal], ids=["shared", "rank_local"])
def test_a_type_that_would_come_back_as_another_is_refused(tmp_path: Path, value: Any, wrap: Any) -> None:
    with pytest.raises(
        bcp.CheckpointSaveError, match=r"a\.b is an object of type .*would come back as another"
    ) as error:
        bcp.save(tmp_path, {"a": wrap({"b": value})})
    assert error.value.kind == "unsupported_value"


@pytest.mark.parametrize(
    "empty", [{}, OrderedDict(), Counter(), defaultdict(int)], ids=lambda value: type(value).__name__
)
def test_every_kind_of_empty_dict_takes_what_the_checkpoint_has(tmp_path: Path, empty: Any) -> None:
    bcp.save(tmp_path, {"s": {"n": 1, "t": torch.ones(2)}})
    bcp.load(tmp_path, {"s": empty})
    assert empty["n"] == 1
    assert empty["t"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "key_map",
    [[("^old", "new")], {f"old.d.{name}": f"new.d.{name}" for name in ("n", "t", "u.v")}],
    ids=["rules", "names"],
)
def test_an_empty_dict_takes_what_key_map_gives_it(tmp_path: Path, key_map: Any) -> None:
    content = {"n": 1, "t": torch.arange(3.0), "u": {"v": torch.ones(1)}}
    bcp.save(tmp_path, {"old": {"d": content}, "other": {"d": {"n": 2}}})
    target: dict[str, Any] = {"new": {"d": {}}}
    bcp.load(tmp_path, target, key_map=key_map)
    assert equal(target, {"new": {"d": content}})


def test_large_tensors_of_extra_state_are_filled_in_place_and_chosen_by_their_name(tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        return {"extra_state": {"a": torch.full((20_000,), fill), "l": [torch.full((20_000,), fill), 1]}}

    bcp.save(tmp_path, state(1.0))
    target = state(0.0)
    tensors = target["extra_state"]["a"], target["extra_state"]["l"][0]
    bcp.load(tmp_path, target)
    assert all(bool(tensor.all()) for tensor in tensors)
    assert (target["extra_state"]["a"], target["extra_state"]["l"][0]) == tensors
    for choice in ({"include": "extra_state.a"}, {"exclude": "extra_state.l*"}):
        target = state(0.0)
        report = bcp.load(tmp_path, target, **choice)
        assert bool(target["extra_state"]["a"].all())
        assert not target["extra_state"]["l"][0].any()
        assert report.skipped == ["extra_state.l.0", "extra_state.l.1"]
    assert torch.equal(bcp.open(tmp_path)["extra_state.l.0"][...], torch.ones(20_000))
    empty: dict[str, Any] = {"moved": {}}
    bcp.load(tmp_path, empty, key_map=[("^extra_state", "moved")])
    assert equal(empty["moved"], state(1.0)["extra_state"])


@pytest.mark.parametrize("memory", ["meta", "expanded", "freed"])
def test_a_small_tensor_of_extra_state_without_memory_of_its_own_is_refused_before_anything_changes(
    tmp_path: Path, memory: str
) -> None:
    target = torch.zeros(1).expand(3) if memory == "expanded" else torch.zeros(3)
    if memory == "freed":
        target.untyped_storage().resize_(0)
    target = target.to("meta") if memory == "meta" else target
    bcp.save(tmp_path, {"extra_state": {"t": torch.ones(3)}, "x": torch.ones(3)})
    x = torch.zeros(3)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"extra_state\.t: the state's tensor is on"):
        bcp.load(tmp_path, {"extra_state": {"t": target}, "x": x})
    assert not x.any()


@pytest.mark.parametrize("layout", ["bare", "nested", "strided", "conj", "bfloat16", "uint4"])
def test_large_tensors_of_extra_state_of_every_layout(tmp_path: Path, layout: str) -> None:
    content = {
        "bare": torch.arange(20_000.0),
        "nested": torch.arange(20_000.0).reshape(10, 20, 100),
        "strided": torch.arange(40_000.0).reshape(200, 200).t()[:, ::2],
        "conj": torch.complex(torch.ones(20_000), torch.arange(20_000.0)).conj(),
        "bfloat16": torch.arange(50_000).bfloat16(),
        "uint4": torch.arange(80_000).to(torch.uint8).view(torch.uint4),
    }[layout]
    bcp.save(tmp_path, {"extra_state": content if layout == "bare" else {"t": content}})
    memory = torch.empty(content.shape, dtype=content.dtype)
    bcp.load(tmp_path, {"extra_state": memory if layout == "bare" else {"t": memory}})
    if layout == "uint4":
        content, memory = content.view(torch.uint8), memory.view(torch.uint8)
    assert torch.equal(memory, content)


def test_asynchronous_saves_of_large_extra_state_take_the_values_as_at_the_call(tmp_path: Path) -> None:
    tensor = torch.ones(20_000)
    handle = bcp.save(tmp_path, {"extra_state": {"t": tensor}, "r": bcp.RankLocal(tensor)}, async_save=True)
    tensor.zero_()
    handle.result()
    target = {"extra_state": {"t": torch.zeros(20_000)}, "r": bcp.RankLocal(None)}
    bcp.load(tmp_path, target)
    assert bool(target["extra_state"]["t"].all())
    assert bool(target["r"].value.all())


def circle(kind: str) -> Any:
    value: Any = {"ring": {}} if kind == "dict" else [[]]
    inner = value["ring"] if kind == "dict" else value[0]
    if kind == "dict":
        inner["back"] = value
    else:
        inner.extend([value, value])
    return value


@pytest.mark.parametrize("kind", ["dict", "list"])
@pytest.mark.parametrize("wrap", [lambda value: value, bcp.RankLocal], ids=["shared", "rank_local"])
def test_what_contains_itself_is_refused_by_name(tmp_path: Path, kind: str, wrap: Any) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"round\..* is nested more than 64 deep") as error:
        bcp.save(tmp_path / "new", {"round": wrap(circle(kind))})
    assert error.value.kind == "unsupported_value"
    bcp.save(tmp_path, {"round": {"ring": 1}})
    with pytest.raises(bcp.CheckpointSaveError, match=r"round.* is nested more than 64 deep"):
        bcp.load(tmp_path, {"round": circle(kind)})


def test_plain_data_beside_deep_modules_is_as_deep_as_elsewhere(tmp_path: Path) -> None:
    def nested(value: Any, depth: int) -> Any:
        return {"in": nested(value, depth - 1)} if depth else value

    def state(number: int) -> dict[str, Any]:
        plain = nested(number, 60)
        return {"all": nested({"model": torch.nn.Linear(1, 1), "plain": plain, "list": [[[plain]]]}, 10)}

    bcp.save(tmp_path, state(1))
    target = state(0)
    bcp.load(tmp_path, target)
    found = nested_value(target["all"], 10)
    assert (found["plain"], found["list"]) == (nested(1, 60), [[[nested(1, 60)]]])
    with pytest.raises(bcp.CheckpointSaveError, match=r"plain.* is nested more than 64 deep"):
        bcp.save(tmp_path / "deeper", {"all": {"model": torch.nn.Linear(1, 1), "plain": nested(1, 64)}})


def nested_value(value: Any, depth: int) -> Any:
    return nested_value(value["in"], depth - 1) if depth else value


def test_empty_states_and_empty_containers(tmp_path: Path) -> None:
    for index, state in enumerate([{"a": {}}, {"a": []}, {"a": ()}, {"a": {"b": {}, "c": [], "d": ()}}]):
        bcp.save(tmp_path / str(index), copy.deepcopy(state))
        target = copy.deepcopy(state)
        bcp.load(tmp_path / str(index), target)
        assert equal(target, state)


def test_a_state_with_many_small_entries(tmp_path: Path) -> None:
    state = {f"entry {index}": {"n": index, "t": torch.full((index % 5,), index)} for index in range(500)}
    target = blank(state)
    bcp.save(tmp_path, state)
    bcp.load(tmp_path, target)
    assert equal(target, state)


def test_lists_of_other_lengths_do_not_fit(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"l": [torch.ones(1), torch.ones(1)]})
    target = {"l": [torch.zeros(1)]}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"l\.1") as error:
        bcp.load(tmp_path, target)
    assert error.value.kind == "unexpected_key"
    assert target["l"][0].item() == 0.0


def test_rank_local_values_large_and_small(tmp_path: Path) -> None:
    value = {"small": torch.arange(5), "large": torch.arange(20_000.0), "n": [1, (2,)], "array": np.arange(3)}
    bcp.save(tmp_path, {"rng": bcp.RankLocal(copy.deepcopy(value))})
    holder = bcp.RankLocal(None)
    bcp.load(tmp_path, {"rng": holder})
    assert equal(holder.value, value)
    assert equal(bcp.open(tmp_path).rank_values("rng"), {0: value})


def test_a_name_like_that_of_a_large_rank_local_tensor_is_a_name_of_its_own(tmp_path: Path) -> None:
    large = torch.arange(20_000.0)
    bcp.save(tmp_path / "first", {"a": bcp.RankLocal({"t": large})})
    (name,) = bcp.open(tmp_path / "first").keys()
    other = name[:-1] + ("1" if name[-1] == "0" else "0")
    bcp.save(tmp_path, {"a": bcp.RankLocal({"t": large}), "a.t@0": large + 1, other: large + 2})
    target = {"a": bcp.RankLocal(None), "a.t@0": torch.zeros(20_000), other: torch.zeros(20_000)}
    bcp.load(tmp_path, target)
    assert torch.equal(target["a"].value["t"], large)
    assert torch.equal(target["a.t@0"], large + 1)
    assert torch.equal(target[other], large + 2)
    for taken in (name, "a.t"):
        with pytest.raises(bcp.CheckpointSaveError, match="the name of two values"):
            bcp.save(tmp_path / "twice", {"a": bcp.RankLocal({"t": large}), taken: large})


class Loader:
    """Moves the tensors that it knows when it is asked for its state, as one does that starts its workers then."""

    def __init__(self, move: Callable[[torch.Tensor], object], tensors: Sequence[torch.Tensor]) -> None:
        self._move, self._tensors = move, tensors

    def state_dict(self) -> dict[str, int]:
        for tensor in self._tensors:
            self._move(tensor)
        return {"epoch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to take."""


def give_other_memory(tensor: torch.Tensor) -> None:
    tensor.data = tensor.detach().clone()


@pytest.mark.parametrize("move", [torch.Tensor.share_memory_, give_other_memory])
def test_tensors_that_are_moved_while_a_load_looks_at_others_are_filled_where_they_are(
    tmp_path: Path, move: Callable[[torch.Tensor], object]
) -> None:
    saved = [torch.randn(8, 8) for _ in range(50)]
    bcp.save(tmp_path, {"replay": saved, "loader": Loader(move, [])})
    loaded = [torch.zeros(8, 8) for _ in saved]
    bcp.load(tmp_path, {"replay": loaded, "loader": Loader(move, loaded)})
    assert all(map(torch.equal, loaded, saved))


def test_numpy_texts_and_bytes_keep_the_nuls_at_their_ends(tmp_path: Path) -> None:
    values = [np.bytes_(b"ab\0\0\0"), np.bytes_(b""), np.str_("ab\0\0"), np.str_(""), np.str_("\U0001f600\0")]
    bcp.save(tmp_path, {"values": values})
    state: dict[str, Any] = {"values": [None] * len(values)}
    bcp.load(tmp_path, state)
    assert [(type(value), len(value), value) for value in state["values"]] == [
        (type(value), len(value), value) for value in values
    ]


@pytest.mark.parametrize("async_save", [False, True])
def test_an_empty_list_takes_a_stored_list_with_tensors_over(tmp_path: Path, async_save: bool) -> None:
    saved = {"losses": [torch.ones(2), {"a": torch.arange(300.0).reshape(3, 100), "b": 5}, (None, torch.zeros(0))]}
    bcp.save(tmp_path, saved, async_save=async_save).result()
    losses: list[Any] = []
    state = {"losses": losses}
    assert not bcp.load(tmp_path, state).missing
    assert state["losses"] is losses
    assert torch.equal(losses[0], saved["losses"][0])
    assert torch.equal(losses[1]["a"], saved["losses"][1]["a"])
    assert losses[1]["b"] == 5
    assert losses[2][0] is None
    assert losses[2][1].shape == (0,)


def test_a_tensor_stays_where_the_checkpoint_has_plain_data(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"group": {"lr": 0.5, "step": 7}})
    rate = torch.tensor(0.25)
    state = {"group": {"lr": rate, "step": 0}}
    report = bcp.load(tmp_path, state, strict=False)
    assert report.missing == ["group.lr"]
    assert state["group"]["lr"] is rate
    assert (rate, state["group"]["step"]) == (0.25, 7)


def test_a_list_of_tensors_that_an_object_cannot_take_is_loaded_as_the_error_says(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"x": [torch.ones(2), 3]})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"load it as plain data, such as \{'x': \[\]\}"):
        bcp.load(tmp_path, {"x": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)]))})
    state: dict[str, Any] = {"x": []}
    bcp.load(tmp_path, state)
    assert torch.equal(state["x"][0], torch.ones(2))
    assert state["x"][1] == 3


def test_an_empty_dict_takes_what_key_map_renames_to_it_and_nothing_beside(tmp_path: Path) -> None:
    """It took all of the dict of which a part was renamed, also what still had its own name."""
    bcp.save(tmp_path, {"y": {"p": torch.ones(2), "q": 3, "sub": {"a": 1, "b": [torch.ones(1), 2]}}})
    state: dict[str, Any] = {"x": {}, "y": {}}
    bcp.load(tmp_path, state, key_map={"y.p": "x.p", "y.sub.a": "x.sub.a"})
    assert same_value(state["x"], {"p": torch.ones(2), "sub": {"a": 1}})
    assert same_value(state["y"], {"q": 3, "sub": {"b": [torch.ones(1), 2]}})
    state = {"x": {}}
    bcp.load(tmp_path, state, key_map=[("^y", "x")])
    assert same_value(state["x"], {"p": torch.ones(2), "q": 3, "sub": {"a": 1, "b": [torch.ones(1), 2]}})
