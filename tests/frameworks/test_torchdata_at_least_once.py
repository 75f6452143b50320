"""torchdata's own loader and sampler under `elastic="at_least_once"`: what their state counts is what they took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import bytecheckpoint as bcp
from bytecheckpoint.adapters.data.rank_states import consumed_prefix

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
sampler_module = pytest.importorskip("torchdata.stateful_dataloader.sampler")

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
NUM_SAMPLES = 240


def loader_of(kind: str, rank: int, size: int, batch_size: int) -> Any:
    samplers = {"stateful": sampler_module.StatefulDistributedSampler, "of torch": DistributedSampler}
    sampler = samplers[kind](range(NUM_SAMPLES), num_replicas=size, rank=rank, shuffle=True, seed=3)
    return stateful_dataloader.StatefulDataLoader(list(range(NUM_SAMPLES)), batch_size=batch_size, sampler=sampler)


def samples_of(batches: list[torch.Tensor]) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


@pytest.mark.parametrize("kind", ["stateful", "of torch"])
@pytest.mark.parametrize(
    ("saved_size", "size", "batch_sizes", "num_batches"), [(2, 3, (4, 4), 7), (4, 2, (3, 5), 6), (2, 4, (5, 3), 0)]
)
@pytest.mark.parametrize("was_read", [False, True])
def test_nothing_is_lost(
    kind: str, saved_size: int, size: int, batch_sizes: tuple[int, int], num_batches: int, *, was_read: bool
) -> None:
    before: list[int] = []
    states: list[Any] = []
    for rank in range(saved_size):
        loader = loader_of(kind, rank, saved_size, batch_sizes[0])
        batches = iter(loader)
        before += samples_of([next(batches) for _ in range(num_batches)])
        states.append(loader.state_dict())
    after: list[int] = []
    repeated = -1
    for rank in range(size):
        loader = loader_of(kind, rank, size, batch_sizes[1])
        found = consumed_prefix(states, loader, size=size)
        assert not isinstance(found, str), found
        if was_read:
            next(iter(loader))
        loader.load_state_dict(found.state)
        after += samples_of(list(loader))
        repeated = found.repeated_at_most
    assert set(before) | set(after) == set(range(NUM_SAMPLES))
    assert len(after) == len(set(after))
    assert len(set(before) & set(after)) == repeated


@pytest.mark.parametrize("kind", ["stateful", "of torch"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_pass_whose_end_the_trainer_has_not_seen_ends_at_once(kind: str, size: int) -> None:
    loaders = [loader_of(kind, rank, 2, 7) for rank in range(2)]
    passes = [iter(loader) for loader in loaders]
    assert sum(len(next(each)) for each in passes for _ in range(18)) == NUM_SAMPLES
    states = [loader.state_dict() for loader in loaders]
    following: list[int] = []
    for rank in range(size):
        loader = loader_of(kind, rank, size, 3)
        found = consumed_prefix(states, loader, size=size)
        assert not isinstance(found, str), found
        assert found.repeated_at_most == 0
        loader.load_state_dict(found.state)
        assert list(loader) == []
        following += samples_of(list(loader))
    assert sorted(following) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", ["stateful", "of torch"])
def test_an_epoch_that_has_ended_is_the_start_of_the_next(kind: str) -> None:
    loaders = [loader_of(kind, rank, 2, 4) for rank in range(2)]
    for loader in loaders:
        list(loader)
    states = [loader.state_dict() for loader in loaders]
    after: list[int] = []
    for rank in range(3):
        loader = loader_of(kind, rank, 3, 4)
        next(iter(loader))
        found = consumed_prefix(states, loader, size=3)
        assert not isinstance(found, str), found
        assert found.repeated_at_most == 0
        loader.load_state_dict(found.state)
        after += samples_of(list(loader))
    assert sorted(after) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("kind", ["stateful", "of torch"])
def test_a_loader_that_was_read_restarts(kind: str, tmp_path: Path) -> None:
    saved = loader_of(kind, 0, 1, 4)
    next(iter(saved))
    bcp.save(tmp_path, {"data": bcp.DataLoaderState(saved, rank=0, size=1, elastic="restart")})
    loader = loader_of(kind, 0, 2, 4)
    uninterrupted = samples_of(list(loader_of(kind, 0, 2, 4)))
    next(iter(loader))
    state = bcp.DataLoaderState(loader, rank=0, size=2, elastic="restart")
    with pytest.warns(UserWarning, match="starts anew, from its first sample of the epoch that it is in"):
        bcp.load(tmp_path, {"data": state})
    assert samples_of(list(loader)) == uninterrupted


def test_a_state_of_random_numbers_is_refused() -> None:
    loader = stateful_dataloader.StatefulDataLoader(list(range(NUM_SAMPLES)), batch_size=4, shuffle=True)
    next(iter(loader))
    found = consumed_prefix([loader.state_dict()], loader_of("stateful", 0, 2, 4), size=2)
    assert isinstance(found, str)
    assert "that of a dataset or of random numbers" in found
