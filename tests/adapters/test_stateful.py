"""Objects with state_dict() and load_state_dict(), and RankLocal, in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from early_loader import EarlyLoader
from torch.testing._internal.two_tensor import TwoTensor
from training import same_value

import bytecheckpoint as bcp


class Counter:
    """Any object that brings its state along."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.num_loads = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict
        self.num_loads += 1


STATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "plain": {"step": 3, "history": [1, 2], "nested": {"a": (1, None), 2: b"x"}},
    "tensors": {"a": torch.arange(3), "list": [torch.ones(2), 1], "empty": torch.empty(0)},
    "arrays": {"rng": np.arange(5, dtype=np.uint32), "kind": "MT19937"},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("wrap", [lambda value: value, bcp.RankLocal], ids=["shared", "rank_local"])
def test_an_object_gets_its_state_back(tmp_path: Path, state: dict[str, Any], is_fresh: bool, wrap: Any) -> None:
    target = Counter(**({} if is_fresh else copy.deepcopy(state)))
    bcp.save(tmp_path, {"object": wrap(Counter(**state))})
    bcp.load(tmp_path, {"object": wrap(target)})
    assert repr(target.state) == repr(state)
    assert target.num_loads == 1


LEFT_OUT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "data": ({"a": 1, "b": 2}, {"a": 10, "b": 20}, {"a": 10, "b": 2}),
    "data that is not there": ({"a": 1, "b": 2}, {"b": 20}, {"b": 2}),
    "tensors": ({"a": torch.ones(3), "b": 2}, {"a": torch.full((3,), 7.0)}, {"a": torch.full((3,), 7.0), "b": 2}),
    "tensors that are not there": ({"a": torch.ones(3), "b": 2}, {}, {"b": 2}),
    "inside a dict": ({"a": {"c": 1, "d": [torch.ones(1)]}, "b": 2}, {"a": {"c": 10}}, {"a": {"c": 10}, "b": 2}),
    "a dict that is not there": ({"a": {"c": 1, "d": torch.ones(1)}, "b": 2}, {"b": 20}, {"b": 2}),
    "none": ({"a": 1, "b": None}, {"a": None, "b": 20}, {"a": None, "b": None}),
}
"""What was saved, what an object has before, and what it has when all but its `a` is loaded."""


@pytest.mark.parametrize("case", LEFT_OUT)
@pytest.mark.parametrize("wrap", [lambda value: value, bcp.RankLocal], ids=["shared", "rank_local"])
def test_what_is_excluded_stays_or_is_not_there_at_all(tmp_path: Path, case: str, wrap: Any) -> None:
    saved, before, expected = LEFT_OUT[case]
    bcp.save(tmp_path, {"x": wrap(Counter(**saved))})
    target = Counter(**copy.deepcopy(before))
    has_names_below = any(isinstance(value, dict) and value for value in saved.values())
    bcp.load(tmp_path, {"x": wrap(target)}, exclude="x.a.*" if has_names_below else "x.a")
    assert repr(target.state) == repr(expected)


def test_what_is_excluded_of_a_value_of_a_rank_stays(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"x": bcp.RankLocal({"a": 1, "list": [torch.ones(2), torch.ones(2)], "b": (torch.ones(1), 5)})})
    own = [torch.zeros(2), torch.zeros(2)]
    target = bcp.RankLocal({"a": 10, "list": own, "b": ()})
    bcp.load(tmp_path, {"x": target}, exclude=["x.a", "x.list.1", "x.b.0"])
    assert repr(target.value) == repr({"a": 10, "list": [torch.ones(2), torch.zeros(2)], "b": (None, 5)})
    assert target.value["list"][1] is own[1]
    target = bcp.RankLocal(None)
    bcp.load(tmp_path, {"x": target}, include="x.list.0")
    assert repr(target.value) == repr({"list": [torch.ones(2)]})


class WithExtra(torch.nn.Module):
    """A module whose only state is its extra state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.extra = state
        self.num_loads = 0

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state
        self.num_loads += 1


HOLDERS: dict[str, tuple[Any, Any, str]] = {
    "object": (lambda state: Counter(**state), lambda found: found.state, "x.w"),
    "rank local object": (lambda state: bcp.RankLocal(Counter(**state)), lambda found: found.value.state, "x.w"),
    "rank local": (bcp.RankLocal, lambda found: found.value, "x.w"),
    "extra state": (WithExtra, lambda found: found.extra, "x._extra_state.w"),
    "dict": (dict, dict, "x.w"),
}
"""How to make each, how to read its state, and the FQN of its `w`."""


@pytest.mark.parametrize("case", HOLDERS)
def test_a_holder_of_which_nothing_can_be_built_is_left_alone(tmp_path: Path, case: str) -> None:
    """A tensor subclass of which a part is excluded cannot be built, and the report names all of its parts."""
    make, read, fqn = HOLDERS[case]
    saved = {"x": make({"w": TwoTensor(torch.ones(2), torch.zeros(2))})}
    target = make({})
    bcp.save(tmp_path / "more", {**saved, "y": torch.ones(1)})
    report = bcp.load(tmp_path / "more", {"x": target, "y": torch.zeros(1)}, exclude=f"{fqn}.b")
    assert read(target) == {}
    holder = target.value if isinstance(target, bcp.RankLocal) else target
    assert getattr(holder, "num_loads", 0) == 0
    assert report.skipped == [f"{fqn}.@subclass", f"{fqn}.a", f"{fqn}.b"]
    bcp.save(tmp_path / "alone", saved)
    with pytest.raises(bcp.CheckpointMismatchError, match="include and exclude leave out all of the state"):
        bcp.load(tmp_path / "alone", {"x": make({})}, exclude=f"{fqn}.b")


@pytest.mark.parametrize("saved", [{"w": torch.ones(2)}, {"w": torch.ones(2), "a": 1}], ids=["all", "a part"])
def test_a_fresh_object_of_which_a_part_is_excluded_does_not_take_other_entries(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    bcp.save(tmp_path, {"x": Counter(**saved), "y": torch.ones(1)})
    target = Counter()
    if "a" in saved:
        assert bcp.load(tmp_path, {"x": target}, exclude="x.w").skipped == ["x.w"]
        assert target.state == {"a": 1}
        return
    with pytest.raises(bcp.CheckpointMismatchError, match="include and exclude leave out all of the state"):
        bcp.load(tmp_path, {"x": target}, exclude="x.w")
    assert target.num_loads == 0


def test_an_object_whose_state_is_none_is_given_none(tmp_path: Path) -> None:
    saved, target = Counter(), Counter(a=1)
    saved.state = None  # type: ignore[assignment]
    bcp.save(tmp_path, {"x": saved})
    bcp.load(tmp_path, {"x": target})
    assert (target.state, target.num_loads) == (None, 1)


def test_a_none_among_the_items_of_a_dict_is_the_state_of_an_object_there(tmp_path: Path) -> None:
    target = Counter(a=1)
    bcp.save(tmp_path, {"d": {"x": None, "y": 1}})
    bcp.load(tmp_path, {"d": {"x": target, "y": 0}})
    assert (target.state, target.num_loads) == (None, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"d\.x: None in the checkpoint, and this StepLR takes"):
        bcp.load(tmp_path, {"d": {"x": scheduler, "y": 0}})


def test_a_scheduler_where_the_checkpoint_has_none_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"scheduler": None, "x": torch.ones(2)})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    state = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "x": torch.zeros(2)}
    with pytest.raises(bcp.CheckpointMismatchError, match="scheduler: None in the checkpoint, and this StepLR takes"):
        bcp.load(tmp_path, state)
    assert not state["x"].any()
    bcp.load(tmp_path, state, exclude="scheduler")
    assert state["x"].all()


def test_tensors_that_an_object_shows_are_filled_in_place(tmp_path: Path) -> None:
    shown = torch.zeros(3, 2).t()
    bcp.save(tmp_path, {"object": Counter(a=torch.ones(2, 3), b=torch.ones(2))})
    target = Counter(a=shown)
    bcp.load(tmp_path, {"object": target})
    assert target.state["a"] is shown
    assert shown.all()
    assert target.state["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "shown",
    [torch.zeros(1, 3), torch.zeros(2, 3).double(), torch.zeros(1, 3).expand(2, 3), torch.zeros(2, 3, device="meta")],
    ids=["shape", "dtype", "expanded", "meta"],
)
def test_tensors_that_do_not_fit_what_an_object_shows_are_new(tmp_path: Path, shown: torch.Tensor) -> None:
    """A buffer that grows is small in a fresh object."""
    bcp.save(tmp_path, {"object": Counter(a=torch.ones(2, 3))})
    target = Counter(a=shown)
    bcp.load(tmp_path, {"object": target})
    assert target.state["a"] is not shown
    assert torch.equal(target.state["a"], torch.ones(2, 3))


@pytest.mark.parametrize("size", [2, 20_000])
def test_an_object_under_extra_state_gets_its_state_back(tmp_path: Path, size: int) -> None:
    bcp.save(tmp_path, {"extra_state": {"object": Counter(a=torch.ones(size), n=1)}})
    target = Counter(a=torch.zeros(size), n=0)
    bcp.load(tmp_path, {"extra_state": {"object": target}})
    assert (target.state["n"], bool(target.state["a"].all())) == (1, True)


def test_an_object_is_told_nothing_when_the_load_fails(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"object": Counter(a=torch.ones(2), n=1), "t": torch.ones(2)})
    target = Counter(a=torch.zeros(2), n=0)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"t: shape"):
        bcp.load(tmp_path, {"object": target, "t": torch.zeros(3)})
    assert (target.num_loads, target.state["n"]) == (0, 0)
    assert not target.state["a"].any()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"object\.z: not in the checkpoint"):
        bcp.load(tmp_path, {"object": Counter(z=torch.zeros(3))})


@pytest.mark.parametrize("stored", [7, "text", [7]], ids=repr)
def test_an_object_that_takes_a_dict_is_given_nothing_else(tmp_path: Path, stored: Any) -> None:
    """It failed when the state was already overwritten, and the error did not name it."""
    bcp.save(tmp_path, {"scheduler": stored})
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1)
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"scheduler: a .* in the checkpoint, and this StepLR takes a"
    ):
        bcp.load(tmp_path, {"scheduler": scheduler})


def test_an_object_that_is_not_in_the_checkpoint_is_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": 1})
    target = Counter()
    with pytest.raises(
        bcp.CheckpointMismatchError, match="the state of this Counter is not in the checkpoint"
    ) as error:
        bcp.load(tmp_path, {"object": target})
    assert error.value.kind == "missing_key"
    with pytest.warns(UserWarning, match="nothing of the state was filled"):
        report = bcp.load(tmp_path, {"object": target}, strict=False)
    assert report.missing == ["object"]
    assert target.num_loads == 0


def test_an_object_of_a_list_that_is_plain_data_in_the_checkpoint_is_refused_with_advice(tmp_path: Path) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1)
    torch.save({"it": [scheduler.state_dict()]}, tmp_path / "file.pt")
    told = r"it\.0: the state of this StepLR is not in the checkpoint, which has a list at 'it'; .* \{'it': \[\]\}"
    with pytest.raises(bcp.CheckpointMismatchError, match=told):
        bcp.load(tmp_path / "file.pt", {"it": [scheduler]})
    state: dict[str, Any] = {"it": []}
    bcp.load(tmp_path / "file.pt", state)
    assert state["it"] == [scheduler.state_dict()]


def test_objects_in_nested_containers(tmp_path: Path) -> None:
    source = {"all": [{"a": Counter(n=1)}, (Counter(n=2), [3]), Counter(n=4)]}
    target = {"all": [{"a": Counter(n=0)}, (Counter(n=0), [0]), Counter(n=0)]}
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert target["all"][0]["a"].state == {"n": 1}
    assert target["all"][1][0].state == {"n": 2}
    assert target["all"][1][1] == [3]
    assert target["all"][2].state == {"n": 4}


def test_plain_data_in_a_tuple_beside_an_object_is_refused_up_front(tmp_path: Path) -> None:
    """A load would have nowhere to put it, and would find that out when all else is loaded."""
    with pytest.raises(bcp.CheckpointSaveError, match=r"pair\.1 is plain data in a tuple") as error:
        bcp.save(tmp_path / "new", {"a": 1, "pair": (Counter(n=1), 5)})
    assert error.value.kind == "unsupported_value"
    bcp.save(tmp_path, {"a": 1, "pair": [Counter(n=1), 5]})
    state = {"a": 0, "pair": (Counter(n=0), 6)}
    with pytest.raises(bcp.CheckpointSaveError, match=r"pair\.1 is plain data in a tuple"):
        bcp.load(tmp_path, state)
    assert state["a"] == 0


def test_what_an_object_cannot_save_is_named(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"object\.deep\.0 is an object of type .*Counter") as error:
        bcp.save(tmp_path, {"object": Counter(deep=[Counter()])})
    assert error.value.kind == "unsupported_value"
    assert list(tmp_path.iterdir()) == []


def test_random_number_generators_go_on(tmp_path: Path) -> None:
    def snapshot() -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  the global one is the case
        return {"torch": torch.get_rng_state(), "numpy": (kind, keys, position, has_gauss, gauss)}

    def draw() -> tuple[Any, Any]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist()  # noqa: NPY002

    bcp.save(tmp_path, {"rng": bcp.RankLocal(snapshot()), "extra_state": {"rng": torch.get_rng_state()}})
    expected = draw()
    holder, extra = bcp.RankLocal(None), {"rng": torch.get_rng_state()}
    bcp.load(tmp_path, {"rng": holder, "extra_state": extra})
    torch.set_rng_state(holder.value["torch"])
    np.random.set_state(holder.value["numpy"])  # noqa: NPY002
    assert draw() == expected
    torch.set_rng_state(extra["rng"])
    assert torch.rand(3).tolist() == expected[0]


def test_rank_local_over_a_scheduler(tmp_path: Path) -> None:
    def build() -> torch.optim.lr_scheduler.StepLR:
        return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 3)

    source, target = build(), build()
    source.last_epoch = 17
    bcp.save(tmp_path, {"scheduler": bcp.RankLocal(source)})
    bcp.load(tmp_path, {"scheduler": bcp.RankLocal(target)})
    assert same_value(target.state_dict(), source.state_dict())


def test_a_gradient_scaler(tmp_path: Path) -> None:
    source, target = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    bcp.save(tmp_path, {"scaler": source})
    bcp.load(tmp_path, {"scaler": target})
    assert target.get_scale() == 8.0
    bcp.save(tmp_path / "off", {"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    bcp.load(tmp_path / "off", {"scaler": torch.amp.GradScaler("cpu", enabled=False)})


class Buffer(list[int]):
    """A list with a state_dict() of its own, as replay buffers are."""

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self[:] = state_dict["items"]


def test_a_gradient_scaler_that_was_disabled_is_refused_for_one_that_is_not(tmp_path: Path) -> None:
    disabled, enabled = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=8.0)
    state = {"scaler": enabled, "values": torch.zeros(2)}
    bcp.save(tmp_path, {"scaler": disabled, "values": torch.ones(2)})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"scaler: disabled when it was saved.*exclude='scaler'"):
        bcp.load(tmp_path, state)
    assert not state["values"].any()
    bcp.load(tmp_path, state, exclude="scaler")
    assert state["values"].all()
    assert bcp.load(tmp_path, state, strict=False).mismatched
    assert enabled.get_scale() == 8.0
    bcp.load(tmp_path, {"scaler": disabled})


def test_rank_local_over_a_list_with_a_state_dict_of_its_own(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"buffer": bcp.RankLocal(Buffer([1, 2]))})
    target = Buffer()
    bcp.load(tmp_path, {"buffer": bcp.RankLocal(target)})
    assert target == [1, 2]


class PagedLoader(EarlyLoader):
    """The same with one more number in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "page": self._at}


class LoaderHolder:
    """An object whose state is that of its loader."""

    def __init__(self, loader: EarlyLoader) -> None:
        self.loader = loader
        self.state_dict = loader.state_dict
        self.load_state_dict = loader.load_state_dict


EARLY = {
    "alone": lambda loader: loader,
    "held": LoaderHolder,
    "of a rank": bcp.RankLocal,
    "data": lambda loader: bcp.DataLoaderState(loader, rank=0, size=1, elastic="same"),
}


def test_a_load_begins_no_pass_of_a_loader(tmp_path: Path) -> None:
    source, target = EarlyLoader(), EarlyLoader()
    next(iter(source))
    bcp.save(tmp_path, {"loader": source})
    bcp.load(tmp_path, {"loader": target})
    assert target._it is None


def test_what_is_excluded_of_the_state_of_an_unread_loader_stays(tmp_path: Path) -> None:
    source, target = PagedLoader(), PagedLoader()
    next(iter(source))
    bcp.save(tmp_path, {"loader": source})
    bcp.load(tmp_path, {"loader": target}, exclude="loader.page")
    assert target._next == {"at": 1, "page": 0}


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("case", EARLY)
def test_a_loader_goes_on_though_its_state_dict_makes_an_iterator(tmp_path: Path, case: str, is_asked: bool) -> None:
    source, target = EarlyLoader(), EarlyLoader()
    assert [number for number, _ in zip(source, range(3), strict=False)] == [1, 2, 3]
    taken = source.state_dict()["at"]
    bcp.save(tmp_path, {"loader": EARLY[case](source)})
    if is_asked:
        target.state_dict()
    bcp.load(tmp_path, {"loader": EARLY[case](target)})
    assert next(iter(target)) == taken + 1


class Versioned(Counter):
    """An object that loads a module's state_dict(), on top, in a dict or in a list, as replay buffers of
    TensorDicts and averages of weights do.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inside = state_dict.get("storage", state_dict)
        self.metadata = getattr(inside[0] if isinstance(inside, list | tuple) else inside, "_metadata", None)


@pytest.mark.parametrize("wrap", [lambda value: value, bcp.RankLocal], ids=["shared", "rank_local"])
@pytest.mark.parametrize(
    "state_of",
    [
        lambda own: own,
        lambda own: {"storage": own, "count": 1},
        lambda own: {"storage": [own], "count": 1},
        lambda own: {"storage": (own,), "count": 1},
    ],
    ids=["on_top", "in_dict", "in_list", "in_tuple"],
)
def test_a_state_dict_of_a_module_comes_back_with_versions(tmp_path: Path, wrap: Any, state_of: Any) -> None:
    target = Versioned()
    target.state = state_of(torch.nn.BatchNorm1d(2).state_dict())
    bcp.save(tmp_path, {"object": wrap(target)})
    bcp.load(tmp_path, {"object": wrap(target)})
    assert target.metadata == {"": {"version": 2}}
