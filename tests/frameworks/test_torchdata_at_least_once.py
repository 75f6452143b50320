"""torchdata's own loader and sampler under `elastic="at_least_once"`: what their state counts is what they took."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

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
def test_nothing_is_lost(kind: str, saved_size: int, size: int, batch_sizes: tuple[int, int], num_batches: int) -> None:
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
        if found.state is not None:
            loader.load_state_dict(found.state)
        after += samples_of(list(loader))
        repeated = found.repeated_at_most
    assert set(before) | set(after) == set(range(NUM_SAMPLES))
    assert len(after) == len(set(after))
    assert len(set(before) & set(after)) == repeated


@pytest.mark.parametrize("kind", ["stateful", "of torch"])
def test_an_epoch_that_has_ended_is_the_start_of_the_next(kind: str) -> None:
    loaders = [loader_of(kind, rank, 2, 4) for rank in range(2)]
    for loader in loaders:
        list(loader)
    states = [loader.state_dict() for loader in loaders]
    assert consumed_prefix(states, loader_of(kind, 0, 3, 4), size=3) == (None, 0)


def test_a_state_of_random_numbers_is_refused() -> None:
    loader = stateful_dataloader.StatefulDataLoader(list(range(NUM_SAMPLES)), batch_size=4, shuffle=True)
    next(iter(loader))
    found = consumed_prefix([loader.state_dict()], loader_of("stateful", 0, 2, 4), size=2)
    assert isinstance(found, str)
    assert "that of a dataset or of random numbers" in found
