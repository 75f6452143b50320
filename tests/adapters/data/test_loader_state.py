"""`DataLoaderState` in one process: its streams come back, and nothing of a state is in the way of anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_loaders import BUFFER_LENGTH, BlockLoader, ListingLoader, StreamLoader, state_of, stream_names
from training import same_value

import bytecheckpoint as bcp
from bytecheckpoint.saving import global_plan


def data_state(loader: Any, **arguments: Any) -> bcp.DataLoaderState:
    return bcp.DataLoaderState(loader, **{"rank": 0, "size": 1, **arguments})


STATES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "plain data": {"a": state_of("a"), "b": state_of("b", 4)},
    "buffers": {"a": state_of("a", with_buffer=True), "b": state_of("b", with_buffer=True), "c": state_of("c")},
    "nested": {"a": {"source": {"shard": 3, "file": ["x", 1]}, "done": None}, "b": {}, "c": [1, 2], "d": 7},
    "more than msgpack": {"a": {"t": (1, 2), "big": 1 << 70, "number": np.float32(3)}, "b": torch.ones(3), "c": {1: 2}},
    "names with dots": {"c4": {"n": 1}, "c4.en": {"n": 2}, "c4.en.0": {"t": torch.ones(BUFFER_LENGTH)}, "": {"n": 3}},
    "other letters": {"größe": {"ü": "ö"}, "東": {"n": torch.ones(BUFFER_LENGTH)}},
    "a whole tensor": {"a": torch.arange(BUFFER_LENGTH), "b": torch.arange(3)},
}


@pytest.mark.parametrize("streams", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("shared", [None, {"seed": 4, "table": torch.arange(BUFFER_LENGTH)}], ids=["alone", "shared"])
def test_streams_come_back(tmp_path: Path, streams: dict[str, Any], shared: Any) -> None:
    bcp.save(tmp_path, {"data": data_state(StreamLoader(streams, shared))})
    loader = StreamLoader()
    bcp.load(tmp_path, {"data": data_state(loader)})
    assert same_value(loader.streams, streams)
    assert same_value(loader.shared, shared)
    assert loader.num_loads == 1


def test_a_loader_may_have_an_empty_name(tmp_path: Path) -> None:
    streams, shared = {"a": state_of("a", with_buffer=True)}, torch.arange(BUFFER_LENGTH)
    bcp.save(tmp_path, {"": data_state(StreamLoader(streams, shared))})
    loader = StreamLoader()
    bcp.load(tmp_path, {"": data_state(loader)})
    assert same_value((loader.streams, loader.shared), (streams, shared))


def test_a_loader_with_an_empty_name_has_only_its_own_names(tmp_path: Path) -> None:
    streams, other = {"a": state_of("a", with_buffer=True)}, torch.arange(BUFFER_LENGTH)
    bcp.save(tmp_path, {"": data_state(StreamLoader(streams)), "other": other})
    loader = StreamLoader()
    bcp.load(tmp_path, {"": data_state(loader)}, exclude="other")
    assert same_value(loader.streams, streams)
    assert bcp.load(tmp_path, {"": data_state(StreamLoader())}).ignored == ["other"]


def test_each_rank_gets_its_streams_and_all_are_dealt_out(tmp_path: Path) -> None:
    streams = {name: state_of(name, with_buffer=number % 2 == 0) for number, name in enumerate(stream_names(7))}
    bcp.save(tmp_path, {"data": data_state(BlockLoader(streams))})
    found: dict[str, Any] = {}
    for rank in range(3):
        loader = BlockLoader()
        report = bcp.load(tmp_path, {"data": data_state(loader, rank=rank, size=3)})
        assert list(loader.streams) == stream_names(7)[7 * rank // 3 : 7 * (rank + 1) // 3]
        assert report.num_tensors == sum("buffer" in state for state in loader.streams.values())
        assert report.data["data"] == bcp.DataReport(num_streams=7, num_moved=5, saved_size=1, size=3, elastic="exact")
        found |= loader.streams
    assert same_value(found, streams)


def test_beside_a_model_and_another_loader(tmp_path: Path) -> None:
    model, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    train, evaluation = StreamLoader({"a": state_of("a", with_buffer=True)}, {"n": 1}), StreamLoader({"a": {"n": 2}})
    saved = {"model": model, "data": {"train": data_state(train), "eval": [data_state(evaluation)]}, "step": 3}
    bcp.save(tmp_path, saved)
    new, other = StreamLoader(), StreamLoader()
    loaded = {"model": target, "data": {"train": data_state(new), "eval": [data_state(other)]}, "step": 0}
    report = bcp.load(tmp_path, loaded)
    assert sorted(report.data) == ["data.eval.0", "data.train"]
    assert same_value((new.streams, new.shared, other.streams), (train.streams, {"n": 1}, {"a": {"n": 2}}))
    assert torch.equal(model.weight, target.weight)
    assert loaded["step"] == 3


@pytest.mark.parametrize("choice", [{}, {"include": "model*"}, {"exclude": "data*"}, {"exclude": ["data"]}])
def test_a_model_loads_without_the_data(tmp_path: Path, choice: dict[str, Any]) -> None:
    model, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    bcp.save(tmp_path, {"model": model, "data": data_state(StreamLoader({"a": state_of("a", with_buffer=True)}))})
    assert bcp.load(tmp_path, {"model": target}, **choice).unexpected == []
    assert torch.equal(model.weight, target.weight)


@pytest.mark.parametrize("choice", [{"include": "model*"}, {"exclude": "data*"}, {"exclude": ["data", "data.*"]}])
def test_a_loader_that_is_left_out_is_told_nothing(tmp_path: Path, choice: dict[str, Any]) -> None:
    state = {"model": torch.nn.Linear(3, 3), "data": data_state(StreamLoader({"a": state_of("a", with_buffer=True)}))}
    bcp.save(tmp_path, state)
    loader = StreamLoader()
    report = bcp.load(tmp_path, {**state, "data": data_state(loader)}, **choice)
    assert (loader.num_loads, report.data) == (0, {})


@pytest.mark.parametrize("glob", ["data.streams.a.*", "*.buffer.tail", "data.shared*", "*.position"])
def test_a_part_of_a_loader_is_refused(tmp_path: Path, glob: str) -> None:
    bcp.save(tmp_path, {"data": data_state(StreamLoader({"a": state_of("a", with_buffer=True)}, {"n": 1}))})
    loader = StreamLoader()
    with pytest.raises(bcp.CheckpointMismatchError, match="a loader takes all of its state, or none") as caught:
        bcp.load(tmp_path, {"data": data_state(loader)}, exclude=glob)
    assert caught.value.kind == "conflict"
    assert loader.num_loads == 0


def test_a_checkpoint_without_data_names_what_is_missing(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    bcp.save(tmp_path, {"model": model})
    loader = StreamLoader()
    with pytest.raises(bcp.CheckpointMismatchError, match="missing_key: data: not in the checkpoint"):
        bcp.load(tmp_path, {"model": model, "data": data_state(loader)})
    report = bcp.load(tmp_path, {"model": model, "data": data_state(loader)}, strict=False)
    assert (report.missing, loader.num_loads) == (["data"], 0)


def test_a_loader_under_another_name(tmp_path: Path) -> None:
    streams = {"a": state_of("a", with_buffer=True), "b": state_of("b")}
    bcp.save(tmp_path, {"data": data_state(StreamLoader(streams))})
    loader = StreamLoader()
    bcp.load(tmp_path, {"train": data_state(loader)}, key_map=[("^data", "train")])
    assert same_value(loader.streams, streams)


@pytest.mark.parametrize("saved", [{"n": 1}, bcp.RankLocal({"n": 1})], ids=["plain", "rank local"])
def test_what_was_no_loader_is_refused(tmp_path: Path, saved: Any) -> None:
    bcp.save(tmp_path, {"data": saved})
    with pytest.raises(bcp.CheckpointMismatchError, match="saved as another value than a DataLoaderState"):
        bcp.load(tmp_path, {"data": data_state(StreamLoader())})


def test_streams_that_only_one_side_has_are_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"data": data_state(StreamLoader({"a": state_of("a"), "b": state_of("b"), "c": state_of("c")}))})
    loader = ListingLoader(["b", "c", "d"], {"b": 0, "c": 0, "d": state_of("d", 0)})
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path, {"data": data_state(loader)})
    assert "conflict: data.streams: stream 'a' are in the checkpoint" in str(caught.value)
    assert "missing_key: data.streams: stream 'd' of the loader" in str(caught.value)
    assert loader.num_loads == 0
    report = bcp.load(tmp_path, {"data": data_state(loader)}, strict=False)
    assert same_value(loader.streams, {"b": state_of("b"), "c": state_of("c"), "d": state_of("d", 0)})
    assert report.missing == ["data.streams"]
    assert report.data["data"].num_streams == 2
    bcp.save(tmp_path / "again", {"data": data_state(loader)})


def test_streams_of_the_last_load_need_an_owner(tmp_path: Path) -> None:
    state = data_state(StreamLoader({"a": state_of("a"), "b": state_of("b")}))
    bcp.save(tmp_path / "1", {"data": state})
    bcp.load(tmp_path / "1", {"data": state})
    del state.loader.streams["b"]
    with pytest.raises(bcp.CheckpointMismatchError, match="data: stream 'b' have no owner"):
        bcp.save(tmp_path / "2", {"data": state})


INEXACT: dict[str, tuple[dict[Any, Any], str]] = {
    "an object with a key of no name": ({"a": {1.5: 2}}, "data.streams.a"),
    "an object": ({"a": {"x": object()}}, "data.streams.a.x"),
    "half a letter": ({"a": {"x": "\ud800"}}, "data.streams.a.x"),
    "half a letter in an id": ({"\ud800": 1}, "data.streams"),
    "a number as an id": ({1: 1}, "data.streams.1"),
    "a text and a number as ids": ({"a": 1, 2: 1}, "data.streams.2"),
    "a sparse tensor": ({"a": torch.eye(3).to_sparse()}, "data.streams.a"),
}


@pytest.mark.parametrize("case", INEXACT)
def test_what_cannot_be_saved_is_named(tmp_path: Path, case: str) -> None:
    streams, name = INEXACT[case]
    with pytest.raises(bcp.CheckpointSaveError) as caught:
        bcp.save(tmp_path, {"data": data_state(StreamLoader(streams))})
    assert caught.value.kind == "unsupported_value"
    assert str(caught.value).startswith(f"{name} ") or f"{name}, in its id" in str(caught.value)


def test_streams_whose_values_have_one_name_are_refused(tmp_path: Path) -> None:
    streams = {"c4": {"en": {"n": 1}}, "c4.en": {"n": 2}}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"'c4' and 'c4\.en' have values of one name"):
        bcp.save(tmp_path, {"data": data_state(StreamLoader(streams))})


def test_a_stream_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    class Twice(StreamLoader):
        def stream_ids(self) -> list[str]:
            return ["a", "b", "a"]

    with pytest.raises(bcp.CheckpointSaveError, match=r"data\.streams\.a is a stream that stream_ids\(\) names twice"):
        bcp.save(tmp_path, {"data": data_state(Twice({"a": 1, "b": 1}))})


class Inexact(StreamLoader):
    """One that says why its state is not exact."""

    def refuse_inexact(self) -> str:
        return "its shuffle buffer is filled anew; use bcp.data.ShuffleBuffer"


class Stateful:
    """Any loader with a state of its own process."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("loader", "why"), [(Inexact(), "shuffle buffer is filled anew"), (Stateful(), "belongs to one process")]
)
def test_what_cannot_be_exact_is_refused_with_the_reason(tmp_path: Path, loader: Any, why: str) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=why) as caught:
        bcp.save(tmp_path, {"data": data_state(loader)})
    assert caught.value.kind == "unsupported_value"
    assert "nothing was written" in str(caught.value)


def test_arguments_that_make_no_sense_are_refused() -> None:
    loader = StreamLoader()
    odd: list[tuple[Any, Any]] = [(-1, 2), (2, 2), (0, 0), (0.5, 1), (0, 1.0), ("0", 1), (False, 1)]
    for rank, size in odd:
        with pytest.raises(ValueError, match="a data-parallel rank from 0 to size - 1"):
            bcp.DataLoaderState(loader, rank=rank, size=size)
    with pytest.raises(ValueError, match="takes one of exact, same, at_least_once, restart, not 'never'"):
        bcp.DataLoaderState(loader, rank=0, size=1, elastic="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a list has no state to save.*bytecheckpoint\.data\.Streams"):
        bcp.DataLoaderState([1, 2], rank=0, size=1)


def test_the_rank_may_be_an_integer_of_numpy(tmp_path: Path) -> None:
    rank, size = np.array([0, 1])
    bcp.save(tmp_path, {"data": bcp.DataLoaderState(StreamLoader({"a": 1}), rank=rank, size=size)})
    other = StreamLoader()
    bcp.load(tmp_path, {"data": bcp.DataLoaderState(other, rank=rank, size=size)})
    assert other.streams == {"a": 1}


def test_a_loader_of_no_batches_is_read_by_its_streams(tmp_path: Path) -> None:
    class Empty(StreamLoader):
        def __len__(self) -> int:
            return 0

    bcp.save(tmp_path, {"data": bcp.DataLoaderState(Empty({"a": 1}), rank=0, size=1)})
    other = Empty()
    bcp.load(tmp_path, {"data": bcp.DataLoaderState(other, rank=0, size=1)})
    assert other.streams == {"a": 1}


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_an_asynchronous_save_holds_the_buffers_as_they_were(tmp_path: Path, snapshot: Any) -> None:
    options = bcp.SaveOptions(snapshot=snapshot)
    for step in range(3):  # the second has a plan
        loader = StreamLoader({"a": state_of("a", step, with_buffer=True), "b": state_of("b", with_buffer=True)})
        state = {"data": data_state(loader), "model": torch.nn.Linear(3, 3)}
        handle = bcp.save(tmp_path, state, step=step, async_save=True, options=options)
        loader.streams["a"]["buffer"]["tail"].fill_(-1)
        loader.streams["a"]["position"] = -1
        handle.result()
        loaded = StreamLoader()
        bcp.load(tmp_path, {"data": data_state(loaded)}, step=step)
        assert same_value(loaded.streams["a"], state_of("a", step, with_buffer=True))


def test_a_manager_saves_and_restores_it(tmp_path: Path) -> None:
    loader, model = StreamLoader({"a": state_of("a", 0)}), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "data": data_state(loader)}
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as manager:
        for step in range(1, 4):
            loader.streams["a"] = state_of("a", step)
            manager.save(step, state)
    loader.streams["a"] = state_of("a", 0)
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as manager:
        assert manager.restore(state, step=2) is not None
    assert loader.streams["a"] == state_of("a", 2)


def test_states_that_change_keep_the_plan_and_a_tensor_of_another_shape_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan_save = global_plan.plan_save

    def counted(*arguments: Any, **options: Any) -> Any:
        planned.append(1)
        return plan_save(*arguments, **options)

    monkeypatch.setattr(global_plan, "plan_save", counted)
    loader = StreamLoader({"a": state_of("a"), "b": state_of("b", with_buffer=True)})
    state = {"model": torch.nn.Linear(3, 3), "data": data_state(loader)}
    for step in range(3):
        loader.streams["a"] = state_of("a", step)
        loader.streams["b"]["buffer"]["tail"] += 1
        loader.streams["b"]["buffer"]["length"] += 1
        bcp.save(tmp_path, state, step=step)
    assert len(planned) == 1
    loader.streams["b"]["buffer"]["tail"] = torch.zeros(2 * BUFFER_LENGTH)
    bcp.save(tmp_path, state, step=3)
    assert len(planned) == 2
    loaded = StreamLoader()
    bcp.load(tmp_path, {"data": data_state(loaded)}, step=2)
    assert (loaded.streams["a"]["position"], int(loaded.streams["b"]["buffer"]["length"])) == (2, 6)


def test_a_state_of_a_loader_is_none_for_another_object(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"data": data_state(StreamLoader({"a": state_of("a", with_buffer=True)}))})
    for value in (Stateful(), bcp.RankLocal(Stateful()), bcp.RankLocal(3)):
        with pytest.raises(bcp.CheckpointMismatchError, match="saved by a DataLoaderState; load it into one"):
            bcp.load(tmp_path, {"data": value})
    plain: dict[str, Any] = {}
    bcp.load(tmp_path, {"data": plain})
    assert same_value(plain["streams"], {"a": state_of("a", with_buffer=True)})
