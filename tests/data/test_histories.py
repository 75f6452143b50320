"""Runs that are killed and go on with other numbers of ranks and workers lose no sample and repeat none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from data import histories
from data.histories import Ranks, in_memory, play_freely, play_in_step
from data.sample_sources import KINDS

import bytecheckpoint as bcp
from bytecheckpoint.data.elastic_loader import assign_streams
from bytecheckpoint.data.stream_position import StreamPosition
from bytecheckpoint.data.tracked_loader import TrackedLoader

FEW, MANY = 15, 250
"""Histories of each of two kinds."""
MANY_WORKERS = (3, 9)
"""Of the few in step, those that are left to the long tests: others have as many worker processes."""


@pytest.mark.parametrize("seed", range(FEW))
def test_no_sample_is_lost_or_repeated(seed: int) -> None:
    play_freely(seed, in_memory, kind=list(KINDS)[seed % len(KINDS)])


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.long if seed in MANY_WORKERS else ()) for seed in range(FEW)]
)
def test_each_global_batch_is_that_of_the_run_that_was_not_interrupted(seed: int) -> None:
    play_in_step(seed, in_memory, kind=list(KINDS)[seed % len(KINDS)])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(FEW, MANY, 5))
def test_many_histories(first: int) -> None:
    for seed in range(first, first + 5):
        play_freely(seed, in_memory)
        play_in_step(seed, in_memory)


def first_twice(loader: object, ids: Sequence[str], size: int) -> list[list[str]]:
    """An owner map that gives one stream to two ranks, and another to none."""
    parts = assign_streams(loader, ids, size)
    parts[-1] = [*parts[-1][:-1], parts[0][0]]
    return parts


def count_what_was_read(tracked: TrackedLoader, _num_batches: int) -> None:
    hand_over(tracked, len(tracked._waiting))


def stay_at_the_end(position: StreamPosition, *, carries_over: bool) -> StreamPosition:
    return replace(position, epoch=position.epoch + 1, snapshot=position.snapshot if carries_over else None)


hand_over = TrackedLoader._hand_over
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "owner map": (histories, "assign_streams", first_twice),
    "prefetch count": (TrackedLoader, "_hand_over", count_what_was_read),
    "epoch rule": (StreamPosition, "next_epoch", stay_at_the_end),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_shows_in_a_few_histories(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    # A worker's error comes as a RuntimeError.
    with pytest.raises((AssertionError, bcp.CheckpointMismatchError, RuntimeError)):  # noqa: PT012  one is enough
        for seed in range(FEW):
            play_freely(seed, in_memory)


@pytest.mark.parametrize("kind", ["lines", "shuffled records", "packed after shuffling"])
def test_a_history_through_checkpoints(kind: str, tmp_path: Path) -> None:
    play_freely(1000, checkpoints(tmp_path), kind)
    play_in_step(1000, checkpoints(tmp_path), kind)


class AllRanks:
    """The loaders of all ranks of this process as one, which a save and a load of one process take."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def stream_ids(self) -> Sequence[str]:
        return sorted(each for loader in self.ranks.tracked for each in loader.stream_ids())

    def stream_state(self, stream_id: str) -> Any:
        return next(each for each in self.ranks.tracked if stream_id in each.stream_ids()).stream_state(stream_id)

    def shared_state(self) -> Any:
        return self.ranks.tracked[0].shared_state()

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        assert shared == self.shared_state()
        self.ranks.load(dict(streams))


def checkpoints(root: Path) -> Callable[[Ranks], Callable[[Ranks], None]]:
    numbers = count(len(list(root.iterdir())))

    def save(ranks: Ranks) -> Callable[[Ranks], None]:
        path = root / f"history-{next(numbers)}"
        bcp.save(path, {"data": bcp.DataLoaderState(AllRanks(ranks), rank=0, size=1)})

        def load(others: Ranks) -> None:
            bcp.load(path, {"data": bcp.DataLoaderState(AllRanks(others), rank=0, size=1)})

        return load

    return save
