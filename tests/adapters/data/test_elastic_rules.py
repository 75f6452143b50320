"""The choices of `elastic`: what a save refuses, and what a load does on another number of ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stream_loaders import StreamLoader, state_of
from torch.utils.data import DistributedSampler

import bytecheckpoint as bcp
from bytecheckpoint.adapters.data.rank_states import consumed_prefix
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=30)
NUM_SAMPLES = 120
"""What all of these numbers of ranks divide: a sampler repeats samples by itself where they do not."""


class CountingSampler(DistributedSampler):  # type: ignore[type-arg]
    """Counts as torchdata's StatefulDistributedSampler does."""

    def __init__(self, rank: int, size: int, num_samples: int = NUM_SAMPLES) -> None:
        super().__init__(range(num_samples), num_replicas=size, rank=rank, shuffle=True, seed=3)  # type: ignore[arg-type]
        self.yielded = 0

    def __iter__(self) -> Iterator[int]:
        for number, sample in enumerate(super().__iter__()):
            if number >= self.yielded:
                self.yielded = number + 1
                yield sample

    def take(self, count: int) -> list[int]:
        samples = iter(self)
        return [next(samples) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.yielded = state["yielded"]


class InexactLoader(StreamLoader):
    """A loader of streams that says why it is not exact."""

    def refuse_inexact(self) -> str:
        return "its shuffle buffer is filled anew"


def save_samples(rank: int, world_size: int, path: str, elastic: Any, counts: list[int]) -> list[int]:
    sampler = CountingSampler(rank, world_size)
    taken = sampler.take(counts[rank])
    state = bcp.DataLoaderState(sampler, rank=rank, size=world_size, elastic=elastic)
    bcp.save(path, {"data": state}, options=OPTIONS)
    return taken


def load_samples(
    rank: int, world_size: int, path: str, elastic: Any, num_read: int = 0
) -> tuple[list[int], bcp.DataReport, list[str]]:
    sampler = CountingSampler(rank, world_size)
    sampler.take(num_read)
    state = bcp.DataLoaderState(sampler, rank=rank, size=world_size, elastic=elastic)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report = bcp.load(path, {"data": state})
    return list(sampler), report.data["data"], [str(each.message) for each in seen]


@pytest.mark.parametrize("elastic", ["same", "at_least_once", "restart"])
def test_as_many_ranks_go_on_exactly(workers: WorkerPool, tmp_path: Path, elastic: str) -> None:
    taken = workers.run(save_samples, str(tmp_path), elastic, [7, 7], world_size=2)
    loaded = workers.run(load_samples, str(tmp_path), elastic, world_size=2)
    for before, (rest, report, messages) in zip(taken, loaded, strict=True):
        assert not set(before) & set(rest)
        assert report == bcp.DataReport(num_streams=2, saved_size=2, size=2, elastic=elastic)
        assert messages == []
    assert sorted([*taken[0], *taken[1], *loaded[0][0], *loaded[1][0]]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(("counts", "size"), [([7, 7], 1), ([7, 7], 3), ([9, 8, 8, 9], 2), ([0, 3], 3), ([6] * 4, 8)])
def test_at_least_once_loses_nothing_on_another_number(
    workers: WorkerPool, tmp_path: Path, counts: list[int], size: int
) -> None:
    taken = workers.run(save_samples, str(tmp_path), "at_least_once", counts, world_size=len(counts))
    loaded = workers.run(load_samples, str(tmp_path), "at_least_once", world_size=size)
    before = [sample for of_rank in taken for sample in of_rank]
    after = [sample for rest, *_ in loaded for sample in rest]
    assert set(before) | set(after) == set(range(NUM_SAMPLES))
    assert len(after) == len(set(after))
    for _, report, _ in loaded:
        assert report.repeated_at_most == len(set(before) & set(after))
        assert report.repeated_at_most < max(counts) * len(counts) - min(counts) * len(counts) + size


def test_the_same_number_is_all_that_same_takes(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_samples, str(tmp_path), "same", [7, 7], world_size=2)
    sampler = CountingSampler(0, 1)
    for elastic, message in [("same", 'elastic="same" refuses any change'), ("exact", "load it on as many, or choose")]:
        state = bcp.DataLoaderState(sampler, rank=0, size=1, elastic=elastic)  # type: ignore[arg-type]
        with pytest.raises(bcp.CheckpointMismatchError, match=message) as caught:
            bcp.load(tmp_path, {"data": state})
        assert "data: saved by 2 data-parallel ranks, to be loaded by 1" in str(caught.value)
        assert caught.value.kind == "conflict"
    assert sampler.yielded == 0


def test_restart_warns_and_leaves_the_loader_at_its_start(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_samples, str(tmp_path), "restart", [7, 7], world_size=2)
    loaded = workers.run(load_samples, str(tmp_path), "restart", world_size=4)
    assert sorted(sample for rest, *_ in loaded for sample in rest) == list(range(NUM_SAMPLES))
    assert all(report.restarted for _, report, _ in loaded)
    assert [len(messages) for *_, messages in loaded] == [1, 0, 0, 0]
    place = "from its first sample of the epoch that it is in"
    assert f"data: the data loader starts anew, {place}: saved by 2" in loaded[0][2][0]


@pytest.mark.parametrize(("elastic", "counts"), [("restart", [7, 7]), ("at_least_once", [0, 7])])
def test_a_sampler_that_was_read_goes_back_to_its_start(
    workers: WorkerPool, tmp_path: Path, elastic: str, counts: list[int]
) -> None:
    workers.run(save_samples, str(tmp_path), elastic, counts, world_size=2)
    loaded = workers.run(load_samples, str(tmp_path), elastic, 5, world_size=4)
    assert sorted(sample for rest, *_ in loaded for sample in rest) == list(range(NUM_SAMPLES))


def test_a_sampler_in_a_later_epoch_goes_back_to_the_start_of_that_epoch_and_the_warning_says_so(
    tmp_path: Path,
) -> None:
    class InEpoch(CountingSampler):
        epoch = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "epoch": self.epoch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.epoch = state["epoch"]

    bcp.save(tmp_path, {"data": bcp.DataLoaderState(InEpoch(0, 1), rank=0, size=1, elastic="restart")})
    sampler = InEpoch(0, 2)
    sampler.take(3)
    sampler.epoch = 4
    with pytest.warns(UserWarning, match="starts anew, from its first sample of the epoch that it is in: saved by 1"):
        bcp.load(tmp_path, {"data": bcp.DataLoaderState(sampler, rank=0, size=2, elastic="restart")})
    assert sampler.state_dict() == {"yielded": 0, "epoch": 4}


def test_streams_that_were_read_restart_at_their_start(tmp_path: Path) -> None:
    class Inexact(bcp.data.Streams):
        def refuse_inexact(self) -> str:
            return "its shuffle buffer is filled anew"

    def data_of(size: int) -> tuple[Inexact, bcp.DataLoaderState]:
        streams = Inexact({each: [f"{each}{number}" for number in range(3)] for each in "abcd"}, rank=0, size=size)
        next(iter(streams))
        return streams, bcp.DataLoaderState(streams, rank=0, size=size, elastic="restart")

    bcp.save(tmp_path, {"data": data_of(1)[1]})
    streams, state = data_of(2)
    with pytest.warns(UserWarning, match="starts anew, from its first sample: saved by"):
        bcp.load(tmp_path, {"data": state})
    assert list(streams) == ["a0", "c0", "a1", "c1", "a2", "c2"]


def test_a_loader_that_starts_without_streams_gives_up_those_that_it_has(tmp_path: Path) -> None:
    class Starting(InexactLoader):
        def start_states(self) -> dict[str, Any]:
            return {}

    bcp.save(tmp_path, {"data": bcp.DataLoaderState(Starting({"a": 1}), rank=0, size=1, elastic="restart")})
    loader = Starting({"b": 5})
    with pytest.warns(UserWarning, match="starts anew, from its first sample"):
        bcp.load(tmp_path, {"data": bcp.DataLoaderState(loader, rank=0, size=2, elastic="restart")})
    assert loader.streams == {}


def test_a_loader_that_was_saved_and_cannot_go_back_is_not_restarted(tmp_path: Path) -> None:
    class Opaque:
        def state_dict(self) -> dict[str, Any]:
            return {"cursor": "x"}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {"cursor": "x"}

    bcp.save(tmp_path / "1", {"data": bcp.DataLoaderState(Opaque(), rank=0, size=1, elastic="restart")})
    used = bcp.DataLoaderState(Opaque(), rank=0, size=1, elastic="restart")
    bcp.save(tmp_path / "2", {"data": used})
    used.size = 2
    with pytest.raises(bcp.CheckpointMismatchError, match="make the loader and its DataLoaderState anew"):
        bcp.load(tmp_path / "1", {"data": used})
    new = bcp.DataLoaderState(Opaque(), rank=0, size=2, elastic="restart")
    with pytest.warns(UserWarning, match="starts anew, and must not have been read"):
        bcp.load(tmp_path / "1", {"data": new})


def test_streams_are_exact_whatever_is_allowed(tmp_path: Path) -> None:
    for elastic in ("at_least_once", "restart"):
        path = tmp_path / elastic
        state = bcp.DataLoaderState(StreamLoader({"a": state_of("a")}), rank=0, size=1, elastic=elastic)  # type: ignore[arg-type]
        bcp.save(path, {"data": state})
        loader = StreamLoader()
        report = bcp.load(path, {"data": bcp.DataLoaderState(loader, rank=0, size=2, elastic=elastic)})  # type: ignore[arg-type]
        assert loader.streams == {"a": state_of("a")}
        assert (report.data["data"].restarted, report.data["data"].repeated_at_most) == (False, 0)


def test_streams_under_same_refuse_another_number(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"data": bcp.DataLoaderState(StreamLoader({"a": 1}), rank=0, size=1, elastic="same")})
    loader = StreamLoader()
    with pytest.raises(bcp.CheckpointMismatchError, match='elastic="same" refuses any change'):
        bcp.load(tmp_path, {"data": bcp.DataLoaderState(loader, rank=0, size=2, elastic="same")})
    assert loader.num_loads == 0


def test_streams_that_are_not_exact(tmp_path: Path) -> None:
    for elastic in ("exact", "at_least_once"):
        state = bcp.DataLoaderState(InexactLoader({"a": 1}), rank=0, size=1, elastic=elastic)  # type: ignore[arg-type]
        with pytest.raises(bcp.CheckpointSaveError, match="its shuffle buffer is filled anew"):
            bcp.save(tmp_path, {"data": state})
    bcp.save(tmp_path, {"data": bcp.DataLoaderState(InexactLoader({"a": 1}), rank=0, size=1, elastic="restart")})
    loader = InexactLoader()
    with pytest.warns(UserWarning, match="its shuffle buffer is filled anew"):
        bcp.load(tmp_path, {"data": bcp.DataLoaderState(loader, rank=0, size=2, elastic="restart")})
    assert loader.num_loads == 0
    bcp.load(tmp_path, {"data": bcp.DataLoaderState(loader, rank=0, size=1, elastic="restart")})
    assert loader.streams == {"a": 1}


def test_a_loader_of_streams_takes_no_state_of_ranks(tmp_path: Path) -> None:
    sampler = CountingSampler(0, 1)
    bcp.save(tmp_path / "r", {"data": bcp.DataLoaderState(sampler, rank=0, size=1, elastic="same")})
    with pytest.raises(
        bcp.CheckpointMismatchError, match="has a state for each rank, and this loader takes a state for"
    ):
        bcp.load(tmp_path / "r", {"data": bcp.DataLoaderState(StreamLoader(), rank=0, size=1)})
    bcp.save(tmp_path / "s", {"data": bcp.DataLoaderState(StreamLoader({"a": 1}), rank=0, size=1)})
    with pytest.raises(bcp.CheckpointMismatchError, match="has a state for each stream, and this loader takes a"):
        bcp.load(tmp_path / "s", {"data": bcp.DataLoaderState(sampler, rank=0, size=1, elastic="same")})


def torchdata_state(samples: int, batch_size: int, **changed: Any) -> dict[str, Any]:
    """The state of a StatefulDataLoader of torchdata 0.11 over a StatefulDistributedSampler, as it gives it."""
    return {
        "_index_sampler_state": None,
        "_sampler_iter_state": {"samples_yielded": samples, "sampler_state": {"yielded": samples}},
        "_sampler_iter_yielded": -(-samples // batch_size),
        "_num_yielded": -(-samples // batch_size),
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
        "fetcher_state": None,
        "dataset_state": None,
        "_iterator_finished": False,
        **changed,
    }


class Loader:
    """The looks of a loader."""

    def __init__(self, batch_size: int, num_replicas: int) -> None:
        self.batch_size = batch_size
        self.sampler = CountingSampler(0, num_replicas)


def test_the_state_of_torchdatas_loader_is_cut_to_whole_batches() -> None:
    states, start = [torchdata_state(12, 3), torchdata_state(9, 3)], torchdata_state(0, 1)
    found = consumed_prefix(states, Loader(4, 3), size=3)
    assert found == (torchdata_state(4, 4), 21 - 12)
    assert consumed_prefix(states, Loader(5, 5), size=5) == (start, 21)
    unseen_end = consumed_prefix([torchdata_state(60, 4)] * 2, Loader(3, 3), size=3)
    assert unseen_end == (torchdata_state(40, 3), 0)
    finished = torchdata_state(50, 3, _iterator_finished=True)
    assert consumed_prefix([finished, finished], Loader(4, 3), size=3) == (start, 0)
    assert consumed_prefix([finished, torchdata_state(48, 3)], Loader(4, 1), size=1) == (torchdata_state(96, 4), 2)


def test_the_end_of_an_epoch_is_found_where_the_ranks_do_not_divide_it() -> None:
    loader = Loader(3, 3)
    loader.sampler = CountingSampler(0, 3, NUM_SAMPLES + 1)
    found = consumed_prefix([torchdata_state(61, 4)] * 2, loader, size=3)  # with one sample twice
    assert found == (torchdata_state(41, 3), 0)


@pytest.mark.parametrize(("num_samples", "taken"), [(NUM_SAMPLES, 60), (NUM_SAMPLES + 1, 61)])
def test_a_sampler_alone_whose_epoch_may_have_ended_deals_out_an_epoch(num_samples: int, taken: int) -> None:
    found = consumed_prefix([{"yielded": taken}] * 2, CountingSampler(0, 3, num_samples), size=3)
    assert found == ({"yielded": 0}, 2 * taken)  # they come again if the trainer was still in that epoch


REFUSED: dict[str, tuple[list[Any], str]] = {
    "workers": ([{"_snapshot": {}, "_steps_since_snapshot": 0}], "num_workers=0"),
    "a dataset of its own": ([torchdata_state(3, 3, dataset_state={"n": 3})], "more than a number of samples"),
    "random numbers": (
        [torchdata_state(3, 3, _sampler_iter_state={"samples_yielded": 3, "sampler_iter_state": {"generator": 0}})],
        "more than a number of samples",
    ),
    "other keys": ([{"yielded": 3, "buffer": torch.ones(3)}], "does not count the samples"),
    "no dict": ([3], "its state is a int"),
    "epochs": ([{"yielded": 3, "epoch": 1}, {"yielded": 3, "epoch": 2}], r"different epochs, \[1, 2\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_at_least_once_is_refused_where_the_state_does_not_count(case: str) -> None:
    states, why = REFUSED[case]
    found = consumed_prefix(states, Loader(3, 1), size=1)
    assert isinstance(found, str)
    assert re.search(why, found)


def test_at_least_once_needs_a_distributed_sampler(tmp_path: Path, workers: WorkerPool) -> None:
    workers.run(save_samples, str(tmp_path), "at_least_once", [7, 7], world_size=2)
    sampler = CountingSampler(0, 3)
    with pytest.raises(bcp.CheckpointMismatchError, match="DistributedSampler with num_replicas=1") as caught:
        bcp.load(tmp_path, {"data": bcp.DataLoaderState(sampler, rank=0, size=1, elastic="at_least_once")})
    assert "data: saved by 2 data-parallel ranks, to be loaded by 1" in str(caught.value)
    assert sampler.yielded == 0
