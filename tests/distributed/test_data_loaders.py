"""The state of data loaders on several ranks: each stream has one owner, whatever their number and their replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from stream_loaders import ListingLoader, StreamLoader, share, state_of, stream_names
from training import same_value

import bytecheckpoint as bcp
from distributed.workers import WorkerError, WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=30)
IDS = stream_names(11)


def saved_state(stream_id: str, step: int) -> dict[str, Any]:
    """Every third stream has a token buffer, and another one with every step."""
    number = int(stream_id[-3:])
    return state_of(stream_id, position=number + 100 * step, with_buffer=number % 3 == 0)


class Loaded(NamedTuple):
    """What a rank found after a load."""

    streams: dict[str, Any]
    shared: Any
    report: bcp.LoadReport


def save_streams(rank: int, world_size: int, path: str, replicas: int, step: int = 0) -> None:
    """Neighbouring ranks are replicas of one another, as those of a tensor-parallel group are."""
    dp_rank, size = rank // replicas, world_size // replicas
    loader = StreamLoader({each: saved_state(each, step) for each in share(IDS, dp_rank, size)}, {"seed": 4})
    state = {"data": bcp.DataLoaderState(loader, rank=dp_rank, size=size)}
    bcp.save(path, state, step=step, options=OPTIONS)


def load_streams(rank: int, world_size: int, path: str, replicas: int) -> Loaded:
    loader = StreamLoader()
    dp_rank, size = rank // replicas, world_size // replicas
    report = bcp.load(path, {"data": bcp.DataLoaderState(loader, rank=dp_rank, size=size)})
    return Loaded(loader.streams, loader.shared, report)


@pytest.mark.parametrize(("num_saving", "of_save"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(("num_loading", "of_load"), [(2, 1), (3, 1), (4, 2)])
def test_streams_come_back_on_any_number_of_ranks(
    workers: WorkerPool, tmp_path: Path, num_saving: int, of_save: int, num_loading: int, of_load: int
) -> None:
    workers.run(save_streams, str(tmp_path), of_save, world_size=num_saving)
    loaded = workers.run(load_streams, str(tmp_path), of_load, world_size=num_loading)
    saved_size, size = num_saving // of_save, num_loading // of_load
    for rank, (streams, shared, report) in enumerate(loaded):
        own = share(IDS, rank // of_load, size)
        assert same_value(streams, {each: saved_state(each, 0) for each in own})
        assert shared == {"seed": 4}
        assert report.num_tensors == sum("buffer" in state for state in streams.values())
        moved = sum(number % saved_size != number % size for number in range(len(IDS)))
        expected = bcp.DataReport(
            num_streams=len(IDS), num_moved=moved, saved_size=saved_size, size=size, elastic="exact"
        )
        assert report.data == {"data": expected}


def reshard(rank: int, world_size: int, path: str, step: int) -> dict[str, Any]:
    """Loads the step before, takes 100 samples of each stream, and saves, as one generation of a job does."""
    loader = ListingLoader(IDS, dict.fromkeys(share(IDS, rank, world_size)))
    if step == 0:
        loader.streams = {each: saved_state(each, 0) for each in loader.streams}
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    state = {"data": bcp.DataLoaderState(loader, rank=rank, size=world_size), "model": model}
    if step:
        bcp.load(path, state, step=step - 1)
        for each in loader.streams.values():
            each["position"] += 100
            each["samples"] += 100
            if "buffer" in each:
                each["buffer"]["length"] += 100
    bcp.save(path, state, step=step, options=OPTIONS)
    return loader.streams


def test_streams_go_on_over_several_generations(workers: WorkerPool, tmp_path: Path) -> None:
    for step, size in enumerate([4, 2, 3, 8]):
        streams = workers.run(reshard, str(tmp_path), step, world_size=size)
        every = {name: state for of_rank in streams for name, state in of_rank.items()}
        assert sum(map(len, streams)) == len(IDS)
        assert same_value(every, {each: saved_state(each, step) for each in IDS})


class Wrong(NamedTuple):
    """A state that ranks do not agree about."""

    owned: list[tuple[int, dict[str, int]]]
    """Data-parallel rank and streams, by rank."""
    message: str
    size: int = 2
    shared: list[Any] | None = None


WRONG = {
    "two owners": Wrong(
        [(0, {"a": 1, "b": 1}), (1, {"b": 1, "c": 1})],
        "data: stream 'b' have two owners: data-parallel rank 0 (rank 0) and data-parallel rank 1 (rank 1)",
    ),
    "no owner": Wrong([(0, {"a": 1}), (1, {"c": 1})], "data: stream 'b' have no owner"),
    "no process": Wrong([(0, {"a": 1}), (1, {"b": 1})], "no process passed rank=2, 3 of size=4", size=4),
    "one number for all": Wrong([(0, {"a": 1, "b": 1, "c": 1})] * 2, "no process passed rank=1 of size=2"),
    "replicas": Wrong(
        [(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 2}), (1, {"c": 1})],
        "data: stream 'b' differ between the replicas rank 0 and rank 1, which both passed rank=0",
    ),
    "replicas with other streams": Wrong(
        [(0, {"a": 1, "b": 1}), (0, {"a": 1}), (1, {"c": 1})],
        "stream 'b' differ between the replicas rank 0 and rank 1",
    ),
    "shared state": Wrong(
        [(0, {"a": 1, "b": 1}), (1, {"c": 1})],
        "data.shared.seed: '4' on rank 0, '5' on rank 1",
        shared=[{"seed": 4}, {"seed": 5}],
    ),
    "shared tensors that look alike": Wrong(
        [(0, {"a": 1, "b": 1}), (1, {"c": 1})],
        "data.shared",
        shared=[{"t": torch.zeros(2000)}, {"t": torch.cat([torch.zeros(1000), torch.ones(1), torch.zeros(999)])}],
    ),
}


def save_wrong(rank: int, _world_size: int, path: str, case: str) -> None:
    wrong = WRONG[case]
    dp_rank, streams = wrong.owned[rank]
    loader = ListingLoader(["a", "b", "c"], streams, wrong.shared and wrong.shared[rank])
    bcp.save(path, {"data": bcp.DataLoaderState(loader, rank=dp_rank, size=wrong.size)}, options=OPTIONS)


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_whole_is_refused_by_name(workers: WorkerPool, tmp_path: Path, case: str) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(save_wrong, str(tmp_path), case, world_size=len(WRONG[case].owned))
    for error in caught.value.errors.values():
        assert isinstance(error, bcp.CheckpointMismatchError)
        assert error.kind == "conflict"
        assert WRONG[case].message in str(error)
        assert "nothing was written" in str(error)
    assert len(caught.value.errors) == len(WRONG[case].owned)
    assert bcp.latest(tmp_path) is None


def save_unlike(rank: int, _world_size: int, path: str, case: str) -> None:
    loader = StreamLoader({str(rank): 1})
    size = 2 + rank if case == "size" else 2
    elastic: Any = "same" if case == "elastic" and rank else "exact"
    made: Any = ListingLoader([], loader.streams) if case == "loader" and rank else loader
    value: Any = bcp.DataLoaderState(made, rank=rank, size=size, elastic=elastic)
    bcp.save(path, {"data": {"n": 1} if case == "value" and rank else value}, options=OPTIONS)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("size", "data: the size: 2 on rank 0, 3 on rank 1"),
        ("elastic", "data: elastic: 'exact' on rank 0, 'same' on rank 1"),
        ("loader", "data: the loader: 'StreamLoader' on rank 0, 'ListingLoader' on rank 1"),
        ("value", "data: a DataLoaderState on rank 0, and something else on rank 1"),
    ],
)
def test_loaders_that_are_not_alike_are_refused(workers: WorkerPool, tmp_path: Path, case: str, message: str) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(save_unlike, str(tmp_path), case, world_size=2)
    assert {type(error) for error in caught.value.errors.values()} == {bcp.CheckpointMismatchError}
    assert all(message in str(error) for error in caught.value.errors.values())


def test_two_owners_of_a_buffer_are_named_whatever_their_shapes(workers: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(save_two_shapes, str(tmp_path), world_size=2)
    assert all("data: stream 'a' have two owners" in str(error) for error in caught.value.errors.values())


def save_two_shapes(rank: int, _world_size: int, path: str) -> None:
    loader = StreamLoader({"a": torch.zeros(20_000 + rank)})
    bcp.save(path, {"data": bcp.DataLoaderState(loader, rank=rank, size=2)}, options=OPTIONS)


def save_beside_a_stage(rank: int, _world_size: int, path: str) -> None:
    """Only the first stages of a pipeline read data, those of data-parallel ranks 0 and 1."""
    state: dict[str, Any] = {"model": {f"layer{rank % 2}": torch.ones(3)}}
    if rank % 2 == 0:
        loader = StreamLoader({each: saved_state(each, 0) for each in share(IDS, rank // 2, 2)})
        state["data"] = bcp.DataLoaderState(loader, rank=rank // 2, size=2)
    bcp.save(path, state, options=OPTIONS)


def test_ranks_without_a_loader_are_none_of_its_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_beside_a_stage, str(tmp_path), world_size=4)
    loaded = workers.run(load_streams, str(tmp_path), 1, world_size=2)
    assert sorted(name for streams, *_ in loaded for name in streams) == IDS
