"""Random number generators: a process that is resumed draws what it would have drawn."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

HAS_CUDA = torch.cuda.is_available()


def drawn() -> list[float]:
    """Numbers of every generator, one of them normal: numpy keeps the second of each pair."""
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]  # noqa: NPY002
    numbers += [float(torch.rand(())), float(torch.randn(()))]
    return numbers + ([float(torch.rand((), device="cuda"))] if HAS_CUDA else [])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    state = bcp.RngState().state_dict()
    yield
    bcp.RngState().load_state_dict(state)


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_drawn_after_a_load_is_what_was_drawn_after_the_save(tmp_path: Path, async_save: bool) -> None:
    seed(5)
    drawn()
    handle = bcp.save(tmp_path, {"rng": bcp.RngState()}, async_save=async_save)
    expected = [drawn() for _ in range(3)]
    handle.result()
    seed(6)
    bcp.load(tmp_path, {"rng": bcp.RngState()})
    assert [drawn() for _ in range(3)] == expected


def test_a_save_draws_nothing(tmp_path: Path) -> None:
    seed(5)
    expected = drawn()
    seed(5)
    bcp.save(tmp_path, {"rng": bcp.RngState(), "x": torch.ones(3)})
    assert drawn() == expected


def test_a_generator_that_is_excluded_draws_on(tmp_path: Path) -> None:
    seed(5)
    bcp.save(tmp_path, {"rng": bcp.RngState()})
    saved = drawn()
    seed(6)
    own = drawn()
    seed(6)
    bcp.load(tmp_path, {"rng": bcp.RngState()}, exclude="rng.numpy*")
    assert drawn() == [*saved[:2], *own[2:4], *saved[4:]]


def test_the_generators_stand_anywhere_in_the_state(tmp_path: Path) -> None:
    seed(5)
    bcp.save(tmp_path, {"loop": {"step": 3, "rng": bcp.RngState()}})
    expected = drawn()
    state = {"loop": {"step": 0, "rng": bcp.RngState()}}
    bcp.load(tmp_path, state)
    assert drawn() == expected
    assert state["loop"]["step"] == 3


def test_devices_that_are_missing_are_left_out_with_a_warning(tmp_path: Path) -> None:
    num_devices = torch.cuda.device_count()
    state = bcp.RngState().state_dict()
    state["cuda"] = {"current": 0, "devices": [torch.zeros(16, dtype=torch.uint8)] * (num_devices + 1)}
    with pytest.warns(UserWarning, match=f"{num_devices + 1} CUDA devices were saved"):
        bcp.RngState().load_state_dict(state)


@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_a_cuda_device_draws_what_it_would_have_drawn() -> None:
    torch.rand((), device="cuda")
    state = bcp.RngState().state_dict()
    expected = torch.rand(5, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bcp.RngState().load_state_dict(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def save_own(rank: int, world_size: int, path: str) -> list[float]:
    seed(100 + rank)
    drawn()
    bcp.save(path, {"rng": bcp.RngState()})
    return drawn()


def load_own(rank: int, world_size: int, path: str) -> tuple[list[float], list[float]]:
    """What is drawn after a load, and what would have been drawn without."""
    seed(200 + rank)
    unloaded = drawn()
    seed(200 + rank)
    bcp.load(path, {"rng": bcp.RngState()})
    return drawn(), unloaded


@pytest.mark.parametrize("num_loading", [1, 2, 4])
def test_a_rank_gets_its_own_back_and_one_that_had_none_keeps_what_it_has(
    workers: WorkerPool, tmp_path: Path, num_loading: int
) -> None:
    saved = workers.run(save_own, str(tmp_path), world_size=2)
    loaded = workers.run(load_own, str(tmp_path), world_size=num_loading)
    for rank, (after, unloaded) in enumerate(loaded):
        assert after == (saved[rank] if rank < 2 else unloaded)
