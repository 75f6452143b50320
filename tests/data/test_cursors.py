"""Loaders with one position for all ranks, against the way in which Megatron reads from it: its data loaders live in a
part of Megatron that is not in the package.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.data.cursors import megatron_cursor
from bytecheckpoint.data.known_loaders import elastic_loader_of

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 960, 24, 2


def megatron_args(**values: Any) -> Namespace:
    counts = {"consumed_train_samples": 0, "consumed_valid_samples": 0, "skipped_train_samples": 0}
    return Namespace(**{"dataloader_type": "single", "lr": 0.1, **counts, **values})


def micro_batches(args: Namespace, rank: int, size: int) -> Iterator[list[int]]:
    """Samples of a rank in the order of MegatronPretrainingSampler (megatron/legacy/data/data_samplers.py)."""
    batch: list[int] = []
    for number in range(args.consumed_train_samples, NUM_SAMPLES):
        batch.append(number)
        if len(batch) == MICRO_BATCH * size:
            yield batch[rank * MICRO_BATCH : (rank + 1) * MICRO_BATCH]
            batch = []


def train(args: list[Namespace], num_steps: int) -> list[set[int]]:
    """Samples of each step of all ranks together."""
    size = len(args)
    loaders = [micro_batches(each, rank, size) for rank, each in enumerate(args)]
    steps: list[set[int]] = []
    for _ in range(num_steps):
        taken = [
            sample for each in loaders for _ in range(GLOBAL_BATCH // MICRO_BATCH // size) for sample in next(each)
        ]
        assert len(set(taken)) == GLOBAL_BATCH
        steps.append(set(taken))
        for each in args:
            each.consumed_train_samples += GLOBAL_BATCH
    return steps


def test_megatrons_counts_are_exact_on_any_number_of_ranks() -> None:
    expected = train([megatron_args()], 12)
    args = [megatron_args() for _ in range(4)]
    steps = train(args, 3)
    for size in (2, 6, 3):
        shared = [elastic_loader_of(each).shared_state() for each in args]  # type: ignore[union-attr]
        assert all(state == shared[0] for state in shared)
        assert elastic_loader_of(args[0]).stream_ids() == []  # type: ignore[union-attr]
        args = [megatron_args(lr=0.2) for _ in range(size)]
        for each in args:
            elastic_loader_of(each).load_streams({}, shared[0])  # type: ignore[union-attr]
        steps += train(args, 3)
    assert steps == expected
    assert args[0].lr == 0.2, "only the counts are taken"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, None),
        ({"dataloader_type": "cyclic", "data_sharding": False}, None),
        ({"dataloader_type": "cyclic", "data_sharding": True}, "pass --no-data-sharding"),
        ({"dataloader_type": "external"}, "is external"),
    ],
)
def test_megatrons_orders_that_depend_on_the_number_of_ranks_are_told(values: Any, why: str | None) -> None:
    found = megatron_cursor(megatron_args(**values))
    assert found is not None
    assert (found.refuse_inexact() is None) if why is None else (why in str(found.refuse_inexact()))


def test_what_is_none_of_the_known_loaders_is_not_taken_for_one() -> None:
    for value in (object(), {"consumed_train_samples": 3}, SimpleNamespace(consumed_train_samples="3"), [1, 2]):
        assert elastic_loader_of(value) is None


def test_streams_are_refused_by_a_loader_that_has_one_position() -> None:
    args = megatron_args()
    with pytest.raises(bcp.CheckpointMismatchError, match="has 1 streams, and this loader has one position"):
        elastic_loader_of(args).load_streams({"a": 1}, {"consumed_train_samples": 5})  # type: ignore[union-attr]
    assert args.consumed_train_samples == 0


@pytest.mark.parametrize("position", [{"epoch": 1, "sample_in_epoch": 5}, {"kind": "streams"}, None])
def test_a_position_of_another_kind_of_loader_is_refused_and_nothing_changes(position: Any) -> None:
    args = megatron_args()
    before = vars(args).copy()
    found = elastic_loader_of(args)
    assert found is not None
    for take in (found.check_streams, found.load_streams):  # type: ignore[attr-defined]
        with pytest.raises(bcp.CheckpointMismatchError, match="has no consumed_train_samples"):
            take({}, position)
    assert vars(args) == before


def test_megatrons_arguments_take_nothing_but_counts() -> None:
    args = megatron_args()
    elastic_loader_of(args).load_streams({}, {"consumed_train_samples": 24, "lr": 9})  # type: ignore[union-attr]
    assert (args.consumed_train_samples, args.lr) == (24, 0.1)
