"""Every framework saves, every framework loads, and what arrives is bit-equal. Frameworks lay parameters and optimizer
state out in their own ways, of which the truth of each is made without the library under test. Each source is saved
once, and a destination loads all sources in one call to the workers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import deepspeed_like
import pytest

import bytecheckpoint as bcp
from distributed import layouts, megatron
from distributed.layouts import FRAMEWORK_LAYOUTS, LAYOUTS, Builder, State
from distributed.ragged import RaggedBuilder
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerPool
from distributed.zero import ZeroBuilder


class FrameworkBuilder(Protocol):
    """What a framework holds on one rank. `optimizer` is one of truth.STATE_TENSORS."""

    def truth(self, optimizer: str) -> State:
        """The true state."""

    def noise(self, optimizer: str) -> State:
        """Other values everywhere."""

    def stateless(self, optimizer: str) -> State:
        """The same before the first step of the optimizer."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A layout in the matrix."""

    world_size: int
    build: Callable[[int], FrameworkBuilder]
    """Gives the builder of a rank. May make process groups."""
    differences: Callable[[State, State], list[str]] = layouts.differences
    """What is wrong with a state that should be another, a line each."""
    is_even: bool = False
    """Whether several parameters have one count of steps and one group."""


def of_layout(name: str) -> Framework:
    layout = (LAYOUTS | FRAMEWORK_LAYOUTS)[name]
    return Framework(world_size=layout.world_size, build=partial(Builder, name), is_even=layout.is_flat)


def of_zero(world_size: int, wrap: Callable[..., deepspeed_like.Wrapper]) -> Framework:
    build = partial(ZeroBuilder, wrap)
    return Framework(world_size=world_size, build=build, differences=deepspeed_like.differences, is_even=True)


FRAMEWORKS: Mapping[str, Framework] = {
    **{name: of_layout(name) for name in (*FRAMEWORK_LAYOUTS, "fsdp3", "single")},
    "ragged4": Framework(world_size=4, build=RaggedBuilder),
    "megatron_tp2_pp2_dp2": Framework(
        world_size=megatron.GRID.world_size, build=megatron.MegatronBuilder, differences=megatron.differences
    ),
    "zero1_2": of_zero(2, deepspeed_like.zero_1),
    "zero3_4": of_zero(4, deepspeed_like.zero_3),
}
NAMES = [*FRAMEWORKS]


def optimizer_between(source: str, destination: str) -> str:
    is_even = FRAMEWORKS[source].is_even or FRAMEWORKS[destination].is_even
    return "adamw_even" if is_even else "adamw"


def save_each(rank: int, world_size: int, name: str, paths: dict[str, str]) -> None:
    """The truth with every optimizer, by which `paths` are."""
    builder = FRAMEWORKS[name].build(rank)
    for optimizer, path in paths.items():
        with small_pieces():
            bcp.save(path, builder.truth(optimizer))


def load_each(rank: int, world_size: int, name: str, paths: dict[str, tuple[str, str]]) -> dict[str, list[str]]:
    """What is wrong, by source, of which each has an optimizer and a path. Every second source is loaded before the
    optimizer's first step, the others over other values; the next destination does it the other way round.
    """
    builder = FRAMEWORKS[name].build(rank)
    expected = {optimizer: builder.truth(optimizer) for optimizer, _ in paths.values()}
    wrong: dict[str, list[str]] = {}
    for source, (optimizer, path) in paths.items():
        wrong[source] = []
        is_new = (NAMES.index(source) + NAMES.index(name)) % 2 == 0
        state = (builder.stateless if is_new else builder.noise)(optimizer)
        try:
            with small_pieces():
                bcp.load(path, state, options=bcp.LoadOptions(timeout_s=60))
        except bcp.CheckpointError:
            wrong[source].append(traceback.format_exc())
        wrong[source] += FRAMEWORKS[name].differences(state, expected[optimizer])
    return wrong


class Matrix:
    """Saves and loads when a cell first asks, and remembers what came of it."""

    def __init__(self, workers: WorkerPool, folder: Path) -> None:
        self._workers = workers
        self._folder = folder
        self._saved: dict[str, dict[str, str] | Exception] = {}
        self._loaded: dict[str, list[dict[str, list[str]]] | Exception] = {}

    def cell(self, source: str, destination: str) -> list[list[str]]:
        """What is wrong, by rank. Raises what the save or the load raised."""
        _raised(self._save(source))
        if destination not in self._loaded:
            saved = {name: self._save(name) for name in FRAMEWORKS}
            paths = {
                name: (optimizer_between(name, destination), of_one[optimizer_between(name, destination)])
                for name, of_one in saved.items()
                if not isinstance(of_one, Exception)
            }
            self._loaded[destination] = self._run(load_each, destination, paths)
        return [by_source[source] for by_source in _raised(self._loaded[destination])]

    def _save(self, name: str) -> dict[str, str] | Exception:
        if name not in self._saved:
            optimizers = dict.fromkeys(optimizer_between(name, destination) for destination in FRAMEWORKS)
            paths = {optimizer: str(self._folder / f"{name}-{optimizer}") for optimizer in optimizers}
            outcome = self._run(save_each, name, paths)
            self._saved[name] = outcome if isinstance(outcome, Exception) else paths
        return self._saved[name]

    def _run(self, function: Callable[..., Any], name: str, *args: Any) -> Any:
        world_size = FRAMEWORKS[name].world_size
        ranks = {"world_size": world_size, "process_group": world_size > 1, "timeout_s": 120}
        try:
            return self._workers.run(function, name, *args, **ranks)
        except Exception as error:  # noqa: BLE001  # kept for every cell of this framework
            return error


def _raised(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@pytest.fixture(scope="session")
def frameworks_matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("frameworks"))


@pytest.mark.parametrize("destination", FRAMEWORKS)
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_what_another_framework_saved_is_bit_equal(frameworks_matrix: Matrix, source: str, destination: str) -> None:
    by_rank = frameworks_matrix.cell(source, destination)
    assert len(by_rank) == FRAMEWORKS[destination].world_size
    for rank, wrong in enumerate(by_rank):
        assert not wrong, "\n".join([f"rank {rank}:", *wrong[:20]])
