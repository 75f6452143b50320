"""Every layout saves, every layout loads, and what arrives is bit-equal. Each source is saved once, and a destination
loads all sources in one call to the workers; each cell is still a test of its own.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from distributed import truth
from distributed.layouts import LAYOUTS, Builder, State, differences
from distributed.workers import WorkerPool

TIED_LAYOUTS = ("single", "fsdp3", "hsdp2x2", "tp2")


def save_truth(rank: int, world_size: int, layout: str, optimizer: str, path: str, *, tied: bool = False) -> None:
    bcp.save(path, Builder(layout, rank, tied=tied).truth(optimizer))


def load_each(
    rank: int, world_size: int, layout: str, optimizer: str, paths: dict[str, str], *, tied: bool = False
) -> dict[str, list[str]]:
    """What is wrong on this rank after loading each checkpoint, by source."""
    builder = Builder(layout, rank, tied=tied)
    expected = builder.truth(optimizer)
    problems = {source: load(path, builder.stateless(optimizer), expected) for source, path in paths.items()}
    # State that is there already is overwritten alike wherever the values come from: one source shows it.
    if layout in paths:
        problems[layout] += load(paths[layout], builder.noise(optimizer), expected)
    return problems


def load(path: str, state: State, expected: State) -> list[str]:
    try:
        bcp.load(path, state)
    except bcp.CheckpointError:
        return [traceback.format_exc()]
    return differences(state, expected)


def save_truth_tied(rank: int, world_size: int, layout: str, optimizer: str, path: str) -> None:
    save_truth(rank, world_size, layout, optimizer, path, tied=True)


def load_each_tied(
    rank: int, world_size: int, layout: str, optimizer: str, paths: dict[str, str]
) -> dict[str, list[str]]:
    return load_each(rank, world_size, layout, optimizer, paths, tied=True)


class Matrix:
    """Saves and loads when a cell first asks, and remembers what came of it."""

    def __init__(self, workers: WorkerPool, folder: Path, *, tied: bool) -> None:
        self._workers = workers
        self._folder = folder
        self._save, self._load = (save_truth_tied, load_each_tied) if tied else (save_truth, load_each)
        self._layouts = TIED_LAYOUTS if tied else tuple(LAYOUTS)
        self._saves: dict[tuple[str, str], str | Exception] = {}
        self._loads: dict[tuple[str, str], list[dict[str, list[str]]] | Exception] = {}

    def problems(self, source: str, destination: str, optimizer: str) -> list[str]:
        """What is wrong in one cell, over all ranks. Raises what the save or the loading process raised."""
        saved = self._saved(source, optimizer)
        if isinstance(saved, Exception):
            raise saved
        loaded = self._loaded(destination, optimizer)
        if isinstance(loaded, Exception):
            raise loaded
        return [f"rank {rank}: {problem}" for rank, by_source in enumerate(loaded) for problem in by_source[source]]

    def _saved(self, source: str, optimizer: str) -> str | Exception:
        if (source, optimizer) not in self._saves:
            path = str(self._folder / f"{source}-{optimizer}")
            try:
                self._workers.run(self._save, source, optimizer, path, **_ranks_of(source))
                self._saves[source, optimizer] = path
            except Exception as error:  # noqa: BLE001  # kept for every cell of this source
                self._saves[source, optimizer] = error
        return self._saves[source, optimizer]

    def _loaded(self, destination: str, optimizer: str) -> list[dict[str, list[str]]] | Exception:
        if (destination, optimizer) not in self._loads:
            saved = {source: self._saved(source, optimizer) for source in self._layouts}
            paths = {source: path for source, path in saved.items() if isinstance(path, str)}
            try:
                self._loads[destination, optimizer] = self._workers.run(
                    self._load, destination, optimizer, paths, **_ranks_of(destination)
                )
            except Exception as error:  # noqa: BLE001  # kept for every cell of this destination
                self._loads[destination, optimizer] = error
        return self._loads[destination, optimizer]


def _ranks_of(layout: str) -> dict[str, Any]:
    """One process needs no process group, and here it has none. A call may be nine loads on a busy machine."""
    world_size = LAYOUTS[layout].world_size
    return {"world_size": world_size, "process_group": bool(LAYOUTS[layout].axes), "timeout_s": 150}


@pytest.fixture(scope="session")
def matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("matrix"), tied=False)


@pytest.fixture(scope="session")
def tied_matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("tied"), tied=True)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("destination", LAYOUTS)
@pytest.mark.parametrize("optimizer", truth.OPTIMIZERS)
def test_what_is_loaded_is_bit_equal(matrix: Matrix, source: str, destination: str, optimizer: str) -> None:
    problems = matrix.problems(source, destination, optimizer)
    assert not problems, "\n".join(problems[:20])


@pytest.mark.parametrize("source", TIED_LAYOUTS)
@pytest.mark.parametrize("destination", TIED_LAYOUTS)
def test_tied_weights_are_bit_equal(tied_matrix: Matrix, source: str, destination: str) -> None:
    problems = tied_matrix.problems(source, destination, "adamw")
    assert not problems, "\n".join(problems[:20])
