"""Ranks that do not agree: about where, about what, about values; values that are meant to differ; and groups that are
not the default one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.seams import SAVE_PHASES, Seen, before, files_under, loads_as, raising, seen, state_of
from torch.distributed.device_mesh import init_device_mesh

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=30)
OVERWRITING = bcp.SaveOptions(timeout_s=30, overwrite=True)


def save_each(rank: int, world_size: int, calls: list[tuple[str, dict[str, Any]]]) -> tuple[Seen | None, bool]:
    """Every rank saves with arguments of its own, and then all with the same."""
    path, arguments = calls[rank]
    error = seen(lambda: bcp.save(path, state_of(rank, 1.0), **{"options": OPTIONS, **arguments}))
    good = f"{calls[0][0]}-good"
    bcp.save(good, state_of(rank, 2.0), options=OPTIONS)
    return error, loads_as(good, rank, 2.0)


@pytest.mark.parametrize(
    ("suffixes", "arguments", "told"),
    [
        (("a", "a", "b"), ({}, {}, {}), ("a (step=None)", "b (step=None)")),
        (("a", "a", "a"), ({"step": 1}, {"step": 1}, {"step": 2}), ("(step=1)", "(step=2)")),
        (("a", "a", "a"), ({"step": 1}, {"step": 1}, {}), ("(step=1)", "(step=None)")),
        (("a", "a", "a"), ({}, {}, {"options": OVERWRITING}), ("(step=None)", "overwriting what is there")),
    ],
    ids=["path", "step", "no step", "overwrite"],
)
def test_ranks_that_save_to_different_places_are_refused(
    workers: WorkerPool, tmp_path: Path, suffixes: tuple[str, ...], arguments: Any, told: tuple[str, str]
) -> None:
    calls = [(str(tmp_path / suffix), of_rank) for suffix, of_rank in zip(suffixes, arguments, strict=True)]
    outcomes = workers.run(save_each, calls, world_size=3)
    assert len({error for error, _ in outcomes}) == 1
    error = outcomes[0][0]
    assert (error.cls, error.kind, error.ranks) == ("CheckpointMismatchError", "conflict", (2,))
    assert all(text in error.message for text in told), error.message
    assert all(loads for _, loads in outcomes)
    assert not [name for name in files_under(tmp_path) if "-good" not in name]


def load_each(rank: int, world_size: int, root: str, steps: list[int]) -> Seen | None:
    for step in (1, 2):
        bcp.save(root, state_of(rank, float(step)), step=step, options=OPTIONS)
    return seen(lambda: bcp.load(root, state_of(rank, 0.0), step=steps[rank], options=bcp.LoadOptions(timeout_s=30)))


def test_ranks_that_load_from_different_places_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(load_each, str(tmp_path), [1, 2], world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind, errors[0].ranks) == ("CheckpointMismatchError", "conflict", (1,))


def bad_argument(rank: int, world_size: int, path: str) -> list[Seen | None]:
    """On rank 1 the path, the step, and the path of a resume are not valid."""
    bad: Any = None if rank == 1 else path
    memory = bcp.SaveOptions(timeout_s=30, memory=bcp.Memory(root=f"{path}-memory"))
    first = seen(lambda: bcp.save(bad, state_of(rank, 1.0), options=OPTIONS))
    second = seen(lambda: bcp.save(path, state_of(rank, 1.0), step=-1 if rank == 1 else 1, options=OPTIONS))
    third = seen(lambda: bcp.resume(bad, state_of(rank, 1.0), options=memory))
    return [first, second, third]


@pytest.mark.filterwarnings("ignore:the memory root")
def test_a_bad_argument_on_one_rank_is_an_error_on_all(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(bad_argument, str(tmp_path), world_size=2)
    assert outcomes[0] == outcomes[1]
    assert [error.ranks for error in outcomes[0]] == [(1,)] * 3


def save_different(rank: int, world_size: int, path: str, values: list[Any]) -> Seen | None:
    return seen(lambda: bcp.save(path, {"model": {"x": values[rank]}}, options=OPTIONS))


@pytest.mark.parametrize(
    "values",
    [
        [torch.zeros(3), torch.zeros(4)],
        [torch.zeros(3, 1), torch.zeros(3)],
        [torch.zeros(3), torch.zeros(3, dtype=torch.float64)],
        [torch.zeros(0), torch.zeros(0, 2)],
    ],
    ids=["shape", "dims", "dtype", "empty"],
)
def test_one_fqn_with_different_shapes_or_dtypes_is_refused(
    workers: WorkerPool, tmp_path: Path, values: list[torch.Tensor]
) -> None:
    errors = workers.run(save_different, str(tmp_path), values, world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind) == ("CheckpointMismatchError", "conflict")
    assert "model.x" in errors[0].message
    assert files_under(tmp_path) == []


@pytest.mark.parametrize(
    "values",
    [[1, 2], [1, 1.0], [1, True], [None, 0], [[1], [1, 2]], [(1,), [1]], ["a", b"a"], [{"k": 1}, {"k": 2}], [{}, 1]],
    ids=repr,
)
def test_plain_values_that_differ_are_refused_and_the_way_out_named(
    workers: WorkerPool, tmp_path: Path, values: list[Any]
) -> None:
    errors = workers.run(save_different, str(tmp_path), values, world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind, errors[0].ranks) == ("CheckpointMismatchError", "conflict", (0, 1))
    assert "model.x" in errors[0].message
    assert "RankLocal" in errors[0].message
    assert files_under(tmp_path) == []


def test_the_ranks_that_really_differ_are_named(workers: WorkerPool, tmp_path: Path) -> None:
    values = [{"a": 1}, {"b": 5}, {"b": 6}]
    errors = workers.run(save_different, str(tmp_path), values, world_size=3)
    assert errors[0].ranks == (1, 2)
    assert "model.x.b: 5 on rank 1, 6 on rank 2" in errors[0].message


def test_a_tensor_here_and_plain_data_there_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(save_different, str(tmp_path), [torch.zeros(2), 1], world_size=2)
    assert errors[0] == errors[1]
    assert errors[0] is not None
    assert errors[0].kind in {"conflict", "unsupported_value"}
    assert "model.x" in errors[0].message


def save_at_the_top(rank: int, world_size: int, path: str, values: list[Any]) -> Seen | None:
    return seen(lambda: bcp.save(path, {"x": values[rank]}, options=OPTIONS))


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (None, "None"),
        (1, "1"),
        ([], "[]"),
        ({}, "{}"),
        (bcp.RankLocal(torch.ones(2)), "tensor([1., 1.])"),
        (bcp.RankLocal({"a": 1}), "a RankLocal"),
    ],
    ids=["None", "int", "list", "dict", "RankLocal", "RankLocal of a dict"],
)
def test_a_tensor_here_and_plain_data_there_is_refused_at_the_top(
    workers: WorkerPool, tmp_path: Path, other: Any, shown: str
) -> None:
    errors = workers.run(save_at_the_top, str(tmp_path), [other, torch.zeros(2)], world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind, errors[0].ranks) == ("CheckpointMismatchError", "conflict", (0, 1))
    assert f"x: a tensor on rank 1, {shown} on rank 0" in errors[0].message
    assert files_under(tmp_path) == []


def save_at_the_top_with_a_known_plan(rank: int, world_size: int, root: str) -> Seen | None:
    tensor = torch.zeros(2)
    bcp.save(f"{root}/first", {"x": tensor} if rank else {"n": 5}, options=OPTIONS)
    return seen(lambda: bcp.save(f"{root}/second", {"x": tensor if rank else 5}, options=OPTIONS))


def test_a_tensor_here_and_plain_data_there_is_refused_also_with_a_known_plan(
    workers: WorkerPool, tmp_path: Path
) -> None:
    errors = workers.run(save_at_the_top_with_a_known_plan, str(tmp_path), world_size=2)
    assert errors[0] == errors[1]
    assert errors[0] is not None, "the number of rank 0 is lost: a load finds the tensor alone"
    assert (errors[0].kind, errors[0].ranks) == ("conflict", (0, 1))
    assert "x: a tensor on rank 1, 5 on rank 0" in errors[0].message
    assert files_under(tmp_path / "second") == []


def save_and_load_own(rank: int, world_size: int, path: str, values: list[Any]) -> Any:
    """Saves a value, which may be in a RankLocal; returns what a state of the same form gets back."""
    bcp.save(path, {"x": values[rank]}, options=OPTIONS)
    state = {"x": bcp.RankLocal(None) if isinstance(values[rank], bcp.RankLocal) else None}
    bcp.load(path, state)
    return unwrapped(state["x"])


def unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, bcp.RankLocal) else value


@pytest.mark.parametrize(
    "values",
    [[bcp.RankLocal(1), 2], [2, bcp.RankLocal(1)], [1, bcp.RankLocal(1)], [None, bcp.RankLocal({"a": 1})]],
    ids=["first", "second", "equal", "none and dict"],
)
def test_a_value_that_any_rank_wraps_in_rank_local_is_kept_for_each_rank(
    workers: WorkerPool, tmp_path: Path, values: list[Any]
) -> None:
    found = workers.run(save_and_load_own, str(tmp_path), values, world_size=2)
    own = list(map(unwrapped, values))
    assert found == own
    assert bcp.open(tmp_path).rank_values("x") == dict(enumerate(own))


def extra(rank: int) -> dict[str, Any]:
    return {"seed": 100 + rank, "epoch": 3, "state": torch.arange(5) + rank, "nested": {"cursor": [rank, "x"]}}


def save_extra(rank: int, world_size: int, path: str) -> bool:
    bcp.save(path, {"extra_state": extra(rank)}, options=OPTIONS)
    return is_extra_back(rank, world_size, path)


def is_extra_back(rank: int, world_size: int, path: str) -> bool:
    state = {
        "extra_state": {"seed": 0, "epoch": 0, "state": torch.zeros(5, dtype=torch.int64), "nested": {"cursor": []}}
    }
    bcp.load(path, state)
    found = state["extra_state"]
    expected = extra(rank)
    return torch.equal(found.pop("state"), expected.pop("state")) and found == expected


def test_extra_state_is_kept_for_each_rank(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_extra, str(tmp_path), world_size=3) == [True] * 3
    assert workers.run(is_extra_back, str(tmp_path), world_size=2) == [True] * 2


def large_extra(rank: int) -> dict[str, Any]:
    """Large tensors: of each rank its own, of its own shape, and the same on all."""
    own = torch.full((20_000 + rank,), float(rank))
    return {"own": torch.full((30_000,), float(rank)), "shape": own, "same": torch.ones(20_000), "nested": {"l": [own]}}


def blank_extra(rank: int) -> dict[str, Any]:
    extra = large_extra(rank)
    return {
        **{name: torch.zeros_like(extra[name]) for name in ("own", "shape", "same")},
        "nested": {"l": [torch.zeros_like(extra["shape"])]},
    }


def is_large_extra(found: dict[str, Any], rank: int) -> bool:
    expected = large_extra(rank)
    names_agree = found.keys() == expected.keys() and torch.equal(found["nested"]["l"][0], expected["nested"]["l"][0])
    return names_agree and all(torch.equal(found[name], expected[name]) for name in ("own", "shape", "same"))


def save_large_extra(rank: int, world_size: int, path: str, async_save: bool) -> list[bool]:
    state = large_extra(rank)
    handle = bcp.save(path, {"extra_state": state}, options=OPTIONS, async_save=async_save)
    state["own"].fill_(-1.0)
    handle.result()
    return load_large_extra(rank, world_size, path)


def load_large_extra(rank: int, world_size: int, path: str) -> list[bool]:
    outcomes = []
    for target in (blank_extra(rank), {}):
        bcp.load(path, {"extra_state": target}, options=bcp.LoadOptions(timeout_s=30))
        outcomes.append(is_large_extra(target, rank))
    return outcomes


@pytest.mark.parametrize("async_save", [False, True])
def test_large_tensors_of_extra_state_are_kept_for_each_rank(
    workers: WorkerPool, tmp_path: Path, async_save: bool
) -> None:
    assert workers.run(save_large_extra, str(tmp_path), async_save, world_size=3) == [[True] * 2] * 3
    assert workers.run(load_large_extra, str(tmp_path), world_size=2) == [[True] * 2] * 2
    opened = bcp.open(tmp_path)
    assert len([fqn for fqn in opened.keys() if fqn.startswith("extra_state.same@")]) == 1
    values = opened.rank_values("extra_state")
    assert [is_large_extra(values[rank], rank) for rank in range(3)] == [True] * 3


def load_on_new_rank(rank: int, world_size: int, path: str) -> tuple[list[Seen | None], bool]:
    targets = [blank_extra(rank), {}]
    errors = [
        seen(lambda target=target: bcp.load(path, {"extra_state": target}, options=bcp.LoadOptions(timeout_s=30)))
        for target in targets
    ]
    untouched = targets[1] == {} and not any(targets[0][name].any() for name in ("own", "shape", "same"))
    found: dict[str, Any] = {}
    bcp.load(path, {"extra_state": found}, strict=False, options=bcp.LoadOptions(timeout_s=30))
    expected = is_large_extra(found, rank) if rank < 2 else list(found) == ["same"] and bool(found["same"].all())
    return errors, untouched and expected


def test_extra_state_that_a_new_rank_never_had_is_named_for_every_kind_of_target(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_large_extra, str(tmp_path), False, world_size=2)
    outcomes = workers.run(load_on_new_rank, str(tmp_path), world_size=3)
    assert [is_right for _, is_right in outcomes] == [True] * 3
    for errors, _ in outcomes:
        for error in errors:
            assert error is not None
            assert (error.cls, error.kind) == ("CheckpointMismatchError", "missing_key")
            assert "extra_state.own: differed between the 2 ranks that saved it" in error.message
            assert "extra_state.nested.l" in error.message
            assert "unexpected_key" not in error.message
            assert "extra_state.same" not in error.message


class Store:
    """Any object with a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def save_objects_in_extra_state(rank: int, world_size: int, path: str, is_bare: bool) -> bool:
    def state(store: Store) -> dict[str, Any]:
        return {"extra_state": store if is_bare else {"o": store, "n": 1}}

    saved = {"n": rank, "small": torch.full((2,), rank), "large": torch.full((20_000,), rank), str(rank): 1}
    bcp.save(path, state(Store(saved)), options=OPTIONS)
    target = Store({})
    bcp.load(path, state(target), options=bcp.LoadOptions(timeout_s=30))
    return repr(target.state) == repr(saved)


@pytest.mark.parametrize("is_bare", [False, True])
def test_objects_under_extra_state_are_kept_for_each_rank(workers: WorkerPool, tmp_path: Path, is_bare: bool) -> None:
    assert workers.run(save_objects_in_extra_state, str(tmp_path), is_bare, world_size=2) == [True] * 2


def save_object_with_own_keys(rank: int, world_size: int, path: str) -> Seen | None:
    return seen(lambda: bcp.save(path, {"o": Store({"a": 1, "d": {str(rank): 1}})}, options=OPTIONS))


def test_an_object_with_other_keys_on_other_ranks_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(save_object_with_own_keys, str(tmp_path), world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind) == ("CheckpointMismatchError", "conflict")
    assert "o.d: {'0': 1} on rank 0, {'1': 1} on rank 1" in errors[0].message
    assert "RankLocal" in errors[0].message


class Loader:
    """A data loader with a position of its own on every rank."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.full((20_000,), self.position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert bool((state_dict["order"] == state_dict["position"]).all())
        self.position = state_dict["position"]


def rank_state(rank: int) -> dict[str, Any]:
    return {"loader": bcp.RankLocal(Loader(rank)), "rng": bcp.RankLocal({"seed": rank}), "same": bcp.RankLocal(5)}


def save_rank_local(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, rank_state(rank), options=OPTIONS)


def load_rank_local(rank: int, world_size: int, path: str, strict: bool) -> tuple[Seen | None, list[Any], list[str]]:
    state, missing = rank_state(1000 + rank), []

    def load() -> None:
        missing.extend(bcp.load(path, state, strict=strict, options=bcp.LoadOptions(timeout_s=30)).missing)

    error = seen(load)
    return error, [state["loader"].value.position, state["rng"].value, state["same"].value], sorted(missing)


@pytest.mark.parametrize("world_size", [3, 2, 1])
def test_rank_local_values_come_back_on_as_many_ranks_or_fewer(
    workers: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    workers.run(save_rank_local, str(tmp_path), world_size=3)
    outcomes = workers.run(load_rank_local, str(tmp_path), True, world_size=world_size)
    assert outcomes == [(None, [rank, {"seed": rank}, 5], []) for rank in range(world_size)]
    assert bcp.open(tmp_path).rank_values("rng") == {rank: {"seed": rank} for rank in range(3)}


def test_rank_local_values_on_more_ranks_are_an_error_that_says_what_to_do(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_rank_local, str(tmp_path), world_size=2)
    outcomes = workers.run(load_rank_local, str(tmp_path), True, world_size=3)
    errors = {error for error, _, _ in outcomes}
    assert len(errors) == 1
    error = errors.pop()
    assert error is not None
    assert (error.cls, error.kind) == ("CheckpointMismatchError", "missing_key")
    assert "rank_values" in error.message
    assert 'missing="keep"' in error.message
    assert [values for _, values, _ in outcomes] == [[1000 + rank, {"seed": 1000 + rank}, 5] for rank in range(3)]


def load_kept_random_state(rank: int, world_size: int, path: str) -> object:
    state = {"rng": bcp.RankLocal({"seed": 1000 + rank}, missing="keep")}
    bcp.load(path, state, options=bcp.LoadOptions(timeout_s=30))
    return state["rng"].value


def test_ranks_that_the_save_did_not_have_keep_their_own_where_that_is_asked_for(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_rank_local, str(tmp_path), world_size=2)
    values = workers.run(load_kept_random_state, str(tmp_path), world_size=3)
    assert values == [{"seed": 0}, {"seed": 1}, {"seed": 1002}]


def test_without_strict_the_ranks_that_are_new_keep_their_own(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_rank_local, str(tmp_path), world_size=2)
    outcomes = workers.run(load_rank_local, str(tmp_path), False, world_size=3)
    assert [values for _, values, _ in outcomes] == [
        [0, {"seed": 0}, 5],
        [1, {"seed": 1}, 5],
        [1002, {"seed": 1002}, 5],
    ]
    assert all({"loader", "rng", "same"} <= set(missing) for _, _, missing in outcomes)


def save_differing_replicas(rank: int, world_size: int, path: str) -> tuple[list[str], Any, Any]:
    state = {"a": torch.full((5,), float(rank)), "b": torch.ones(4), "c": torch.tensor(rank % 2)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bcp.save(path, state, options=OPTIONS)
    target = {"a": torch.zeros(5), "b": torch.zeros(4), "c": torch.tensor(7)}
    bcp.load(path, target)
    # Not what a collection of garbage tells of other tests' files and sockets.
    messages = [str(warning.message) for warning in caught if not issubclass(warning.category, ResourceWarning)]
    return messages, target["a"].tolist(), int(target["c"])


def test_small_replicas_that_differ_warn_once_and_the_lowest_rank_decides(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(save_differing_replicas, str(tmp_path), world_size=3)
    messages = [message for caught, _, _ in outcomes for message in caught]
    assert len(messages) == 1
    assert "2 tensors" in messages[0]
    assert "a, c" in messages[0]
    assert [(a, c) for _, a, c in outcomes] == [([0.0] * 5, 0)] * 3


def save_in_subgroup(rank: int, world_size: int, path: str) -> tuple[Seen | None, Any]:
    """Ranks 1 and 3 save; the others are doing something else, or pass a group that they are not in."""
    group = dist.new_group([1, 3])
    if rank == 0:
        return None, None
    call = lambda: bcp.save(path, state_of(rank, 1.0), options=OPTIONS, process_group=group)  # noqa: E731
    error = seen(call)
    return error, error is None and loads_as(path, rank, 1.0, process_group=group)


def test_a_subgroup_saves_on_its_own(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(save_in_subgroup, str(tmp_path), world_size=4)
    assert [outcomes[rank] for rank in (0, 1, 3)] == [(None, None), (None, True), (None, True)]
    error, _ = outcomes[2]
    assert (error.cls, error.kind, error.ranks) == ("CheckpointMismatchError", "conflict", (2,))
    assert "not a member" in error.message
    assert bcp.open(tmp_path).info.world_size == 2


def pass_a_mesh(rank: int, world_size: int, path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    calls: list[Callable[[Any], Any]] = [
        lambda group: bcp.save(path, {"a": 1}, process_group=group),
        lambda group: bcp.load(path, {"a": 1}, process_group=group),
        lambda group: bcp.CheckpointManager(path, process_group=group),
    ]
    errors = []
    for call, group in product(calls, (mesh, mesh["shard"], [0, 1])):
        with pytest.raises(TypeError) as raised:
            call(group)
        errors.append(str(raised.value))
    bcp.save(path, {"a": 1}, process_group=mesh.get_group("shard"))
    return errors


def test_a_mesh_in_place_of_a_process_group_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    for errors in workers.run(pass_a_mesh, str(tmp_path), world_size=2):
        kinds = [error.partition("not a value of type ")[2].partition(";")[0] for error in errors]
        assert kinds == ["DeviceMesh", "DeviceMesh", "list"] * 3
        assert all("pass mesh.get_group()" in error for error in errors)


def save_in_two_groups(rank: int, world_size: int, root: str) -> list[bool]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, path = groups[rank // 2], f"{root}/{rank // 2}"
    results = []
    for value in range(3):
        options = bcp.SaveOptions(timeout_s=30, overwrite=True)
        bcp.save(path, state_of(rank, float(value)), options=options, process_group=group, async_save=value == 1)
        bcp.save(f"{root}/all", state_of(rank, float(value)), options=options)
        results.append(loads_as(path, rank, float(value), process_group=group))
        results.append(loads_as(f"{root}/all", rank, float(value)))
    return results


def test_two_groups_save_at_the_same_time(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_in_two_groups, str(tmp_path), world_size=4) == [[True] * 6] * 4


def conflict_in_subgroup(rank: int, world_size: int, path: str) -> Seen | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    return seen(lambda: bcp.save(path, {"x": rank}, options=OPTIONS, process_group=group))


def test_errors_in_a_subgroup_name_global_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    _, first, second = workers.run(conflict_in_subgroup, str(tmp_path), world_size=3)
    assert first == second
    assert first.ranks == (1, 2)
    assert "1 on rank 1, 2 on rank 2" in first.message


def load_without_a_key(rank: int, world_size: int, path: str) -> tuple[str, str]:
    """Saves keys that differ from rank to rank, and loads with one of this rank's left out on rank 1 only."""
    named = {f"key{number}": number for number in range(rank + 3)}
    bcp.save(path, {"extra_state": named, "x": torch.ones(2)}, options=OPTIONS)
    wanted = {name: 0 for name in named if rank == 0 or name != "key2"}
    try:
        bcp.load(path, {"extra_state": wanted, "x": torch.zeros(2)}, options=bcp.LoadOptions(timeout_s=30))
    except bcp.CheckpointMismatchError as error:
        return error.kind, error.message
    return "loaded", ""


def test_a_key_that_differs_between_ranks_is_unexpected_where_it_has_no_place(
    workers: WorkerPool, tmp_path: Path
) -> None:
    outcomes = workers.run(load_without_a_key, str(tmp_path), world_size=3)
    assert {kind for kind, _ in outcomes} == {"unexpected_key"}
    assert all("1 unexpected_key" in message and "extra_state.key2" in message for _, message in outcomes)


def save_in_a_group_of_its_own(rank: int, world_size: int, path: str) -> tuple[set[int], tuple[int, ...]]:
    own = [dist.new_group([member]) for member in range(world_size)][rank]
    ranks: list[int] = []
    options = bcp.SaveOptions(on_progress=lambda progress: ranks.append(progress.rank))
    bcp.save(f"{path}/{rank}", {"w": torch.ones(3)}, process_group=own, options=options)
    with pytest.raises(bcp.CheckpointSaveError) as raised, before(SAVE_PHASES["writing"], raising(KeyError("x"))):
        bcp.save(f"{path}/bad{rank}", {"w": torch.ones(3)}, process_group=own)
    return {*ranks}, raised.value.ranks


def test_a_rank_in_a_group_of_its_own_goes_by_its_global_rank(workers: WorkerPool, tmp_path: Path) -> None:
    found = workers.run(save_in_a_group_of_its_own, str(tmp_path), world_size=2)
    assert found == [({0}, (0,)), ({1}, (1,))]
