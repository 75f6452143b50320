"""Values of single ranks that an earlier version saved load for ever: tests/golden_ranks was written by two ranks of
8c87fb8, before random numbers could be folded and generators stood in a RankLocal, and is never written again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

GOLDEN = Path(__file__).parent / "golden_ranks" / "v1.0"


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    state = bcp.RngState().state_dict()
    yield
    bcp.RngState().load_state_dict(state)


def load_values(rank: int, _world_size: int) -> dict[str, Any]:
    """The state of tests/golden_ranks on one of as many ranks, or on one of more: then with what to do about it."""
    seed(7 + rank)
    generator = torch.Generator()
    state = {
        "rng": bcp.RngState(elastic="fold"),
        "counters": bcp.RankLocal({}, merge="sum"),
        "generator": bcp.RankLocal(generator, missing="keep"),
        "local": bcp.RankLocal(None, missing="keep"),
        "alike": bcp.RankLocal({}, missing="keep"),
    }
    report = bcp.load(GOLDEN, state)
    numbers = drawn()
    drawn()
    report.restore_rng()
    assert drawn() == numbers
    counters = state["counters"].value
    return {
        "drawn": numbers,
        "samples": counters["samples"],
        "losses": counters["losses"].tolist(),
        "generator": float(torch.rand((), generator=generator)),
        "local": state["local"].value,
        "alike": state["alike"].value,
    }


def test_random_numbers_of_an_earlier_version_go_on_on_as_many_ranks(workers: WorkerPool) -> None:
    for rank, found in enumerate(workers.run(load_values, world_size=2)):
        seed(100 + rank)
        assert found["drawn"] == drawn()
        assert found["generator"] == float(torch.rand((), generator=torch.Generator().manual_seed(100 + rank)))


def test_values_of_an_earlier_version_come_back_to_their_ranks(workers: WorkerPool) -> None:
    for rank, found in enumerate(workers.run(load_values, world_size=2)):
        assert (found["samples"], found["losses"], found["alike"]) == (10 + rank, [0.5, 1.0 + rank], {"epoch": 3})
        number, data, tensors = found["local"]
        assert (number, data) == (rank, b"x")
        assert torch.equal(tensors["mask"], torch.full((70_000,), rank, dtype=torch.uint8))


def test_values_of_an_earlier_version_are_folded_and_summed_on_more_ranks(workers: WorkerPool) -> None:
    found = workers.run(load_values, world_size=3)
    for rank in range(2):
        seed(100 + rank)
        assert found[rank]["drawn"] == drawn()
    others = [*(of_rank["drawn"] for of_rank in found[:2])]
    seed(7 + 2)
    assert found[2]["drawn"] not in [*others, drawn()]
    assert workers.run(load_values, world_size=3)[2]["drawn"] == found[2]["drawn"]
    assert [of_rank["samples"] for of_rank in found] == [10 + 11, 0, 0]
    assert [of_rank["losses"] for of_rank in found] == [[1.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
    assert (found[2]["local"], found[2]["alike"]) == (None, {})


def test_values_of_all_ranks_of_an_earlier_version_can_be_read() -> None:
    opened = bcp.open(GOLDEN)
    assert {rank: value["samples"] for rank, value in opened.rank_values("counters").items()} == {0: 10, 1: 11}
    assert {rank: value[2]["mask"][0].item() for rank, value in opened.rank_values("local").items()} == {0: 0, 1: 1}
