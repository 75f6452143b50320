"""Every layout saves, every layout loads, and what arrives is bit-equal in every way of reading: by default, and with
ranks that exchange what they read and ranks that do not, scratch memory that is too small for anything, and gaps that
are never, sometimes or always read over. Each source is saved once, and a destination loads all sources in one call to
the workers; each cell is still a test of its own. Every day each pair of layouts is read in two ways, so that each
layout meets every way; the long tests read each pair in all five.
"""

from __future__ import annotations

import traceback
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from distributed import truth
from distributed.layouts import LAYOUTS, Builder, State, differences, local_parts
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerPool

TIED_LAYOUTS = ("single", "fsdp3", "hsdp2x2", "tp2")
TINY_BYTES = 3000
"""Scratch memory for a few extents, less than most tensors."""
GAPS = (0, 700, 1 << 20, None)


class Way(NamedTuple):
    """Of reading."""

    exchange: str
    max_gap_bytes: int | None
    scratch_bytes: int


BY_DEFAULT = Way("auto", None, bcp.LoadOptions().scratch_bytes)


def ways_of(source: str, destination: str, optimizer: str) -> list[Way]:
    """Over both optimizers each pair of layouts is read with every gap, half of them with exchange and half without;
    the next pair the other way round.
    """
    names = [*LAYOUTS]
    gap = names.index(source) + names.index(destination) + 2 * truth.OPTIMIZERS.index(optimizer)
    tiny = [Way("on", GAPS[gap % 4], TINY_BYTES), Way("off", GAPS[(gap + 1) % 4], TINY_BYTES)]
    return [BY_DEFAULT, *tiny] if optimizer == "adamw" else tiny


def ways_of_the_day(source: str, destination: str, optimizer: str) -> list[Way]:
    """With or without exchange, by turns of four layouts, so that either meets every gap. With SGD each source has
    three destinations.
    """
    numbers = [[*LAYOUTS].index(layout) for layout in (source, destination)]
    if optimizer == "sgd" and (numbers[1] - numbers[0]) % len(LAYOUTS) not in {0, 1, 4}:
        return []
    exchange = ("on", "off")[sum(number // len(GAPS) for number in numbers) % 2]
    return [way for way in ways_of(source, destination, optimizer) if way.exchange in {"auto", exchange}]


WAYS = {"day": ways_of_the_day, "long": ways_of}
CELLS = {
    term: [
        (source, destination, optimizer)
        for optimizer in truth.OPTIMIZERS
        for destination in LAYOUTS
        for source in LAYOUTS
        if ways(source, destination, optimizer)
    ]
    for term, ways in WAYS.items()
}


def save_truth(rank: int, world_size: int, layout: str, optimizer: str, path: str, *, tied: bool = False) -> None:
    with small_pieces():
        bcp.save(path, Builder(layout, rank, tied=tied).truth(optimizer))


Loaded = dict[Way, tuple[list[str], int]]
"""What is wrong on a rank after a load in this way, and how much came from other ranks."""


def load_each(
    rank: int, world_size: int, layout: str, optimizer: str, paths: dict[str, str], term: str, *, tied: bool = False
) -> dict[str, Loaded]:
    """By source. Into an optimizer without state first; the next load overwrites state that is there. No value stays
    from one source to the next, so one model is enough for all.
    """
    builder = Builder(layout, rank, tied=tied)
    expected = builder.truth(optimizer)
    state = builder.stateless(optimizer)
    loaded: dict[str, Loaded] = {}
    for source, path in paths.items():
        state["optimizer"].state.clear()
        loaded[source] = {way: load(path, state, expected, way) for way in WAYS[term](source, layout, optimizer)}
    return loaded


def load(path: str, state: State, expected: State, way: Way) -> tuple[list[str], int]:
    spoil(state)
    try:
        with small_pieces():
            report = bcp.load(path, state, options=bcp.LoadOptions(**way._asdict(), reader_threads=2, timeout_s=60))
    except bcp.CheckpointError:
        return [traceback.format_exc()], 0
    return differences(state, expected), report.num_bytes_received


def spoil(state: State) -> None:
    """Nothing stays of what an earlier load has put there."""
    for part in local_parts(state).values():
        if isinstance(part, torch.Tensor):
            (part.to_local() if isinstance(part, DTensor) else part).detach().fill_(77)
    for group in state["optimizer"].param_groups:
        group.update(lr=0.5, weight_decay=0.5)


def save_truth_tied(rank: int, world_size: int, layout: str, optimizer: str, path: str) -> None:
    save_truth(rank, world_size, layout, optimizer, path, tied=True)


def load_each_tied(
    rank: int, world_size: int, layout: str, optimizer: str, paths: dict[str, str], term: str
) -> dict[str, Loaded]:
    return load_each(rank, world_size, layout, optimizer, paths, term, tied=True)


class Matrix:
    """Saves and loads when a cell first asks, and remembers what came of it."""

    def __init__(self, workers: WorkerPool, folder: Path, *, tied: bool, term: str) -> None:
        self._workers = workers
        self._term = term
        self._folder = folder
        self._save, self._load = (save_truth_tied, load_each_tied) if tied else (save_truth, load_each)
        self._layouts = TIED_LAYOUTS if tied else tuple(LAYOUTS)
        self._saves: dict[tuple[str, str], str | Exception] = {}
        self._loads: dict[tuple[str, str], list[dict[str, Loaded]] | Exception] = {}

    def cell(self, source: str, destination: str, optimizer: str) -> list[Loaded]:
        """By rank. Raises what the save or the loading process raised."""
        saved = self._saved(source, optimizer)
        if isinstance(saved, Exception):
            raise saved
        loaded = self._loaded(destination, optimizer)
        if isinstance(loaded, Exception):
            raise loaded
        return [by_source[source] for by_source in loaded]

    def _saved(self, source: str, optimizer: str) -> str | Exception:
        if (source, optimizer) not in self._saves:
            path = str(self._folder / f"{source}-{optimizer}")
            try:
                self._workers.run(self._save, source, optimizer, path, **_ranks_of(source))
                self._saves[source, optimizer] = path
            except Exception as error:  # noqa: BLE001  # kept for every cell of this source
                self._saves[source, optimizer] = error
        return self._saves[source, optimizer]

    def _loaded(self, destination: str, optimizer: str) -> list[dict[str, Loaded]] | Exception:
        if (destination, optimizer) not in self._loads:
            sources = [source for source in self._layouts if (source, destination, optimizer) in CELLS[self._term]]
            saved = {source: self._saved(source, optimizer) for source in sources}
            paths = {source: path for source, path in saved.items() if isinstance(path, str)}
            try:
                self._loads[destination, optimizer] = self._workers.run(
                    self._load, destination, optimizer, paths, self._term, **_ranks_of(destination)
                )
            except Exception as error:  # noqa: BLE001  # kept for every cell of this destination
                self._loads[destination, optimizer] = error
        return self._loads[destination, optimizer]


def _ranks_of(layout: str) -> dict[str, Any]:
    """One process needs no process group, and here it has none. A call may be 27 loads on a busy machine."""
    world_size = LAYOUTS[layout].world_size
    return {"world_size": world_size, "process_group": bool(LAYOUTS[layout].axes), "timeout_s": 150}


@pytest.fixture(scope="session")
def matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("matrix"), tied=False, term="day")


@pytest.fixture(scope="session")
def long_matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("matrix"), tied=False, term="long")


@pytest.fixture(scope="session")
def tied_matrix(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(workers, tmp_path_factory.mktemp("tied"), tied=True, term="long")


def check(by_rank: list[Loaded], source: str, destination: str, optimizer: str, *, term: str) -> None:
    assert len(by_rank) == LAYOUTS[destination].world_size
    for rank, loaded in enumerate(by_rank):
        assert list(loaded) == WAYS[term](source, destination, optimizer)
        for way, (problems, _) in loaded.items():
            assert not problems, "\n".join([f"{way} on rank {rank}:", *problems[:20]])
    for way in by_rank[0]:
        num_received = sum(loaded[way][1] for loaded in by_rank)
        # Stages of a pipeline may want nothing in common.
        assert way.exchange == "on" or num_received == 0
        assert way.exchange != "on" or num_received > 0 or len(by_rank) == 1 or destination == "pp2"


@pytest.mark.parametrize(("source", "destination", "optimizer"), CELLS["day"])
def test_what_is_loaded_is_bit_equal(matrix: Matrix, source: str, destination: str, optimizer: str) -> None:
    check(matrix.cell(source, destination, optimizer), source, destination, optimizer, term="day")


@pytest.mark.long
@pytest.mark.parametrize(("source", "destination", "optimizer"), CELLS["long"])
def test_what_is_loaded_in_all_ways_is_bit_equal(
    long_matrix: Matrix, source: str, destination: str, optimizer: str
) -> None:
    check(long_matrix.cell(source, destination, optimizer), source, destination, optimizer, term="long")


@pytest.mark.parametrize("source", TIED_LAYOUTS)
@pytest.mark.parametrize("destination", TIED_LAYOUTS)
def test_tied_weights_are_bit_equal(tied_matrix: Matrix, source: str, destination: str) -> None:
    check(tied_matrix.cell(source, destination, "adamw"), source, destination, "adamw", term="long")


def test_no_way_of_reading_is_left_out() -> None:
    """The tests above check that each cell was loaded in these ways."""
    cells = [(source, destination) for source in LAYOUTS for destination in LAYOUTS]
    ways = Counter[Way]()
    for source, destination in cells:
        of_cell = [way for optimizer in truth.OPTIMIZERS for way in ways_of(source, destination, optimizer)]
        assert sorted(way.exchange for way in of_cell) == ["auto", "off", "off", "on", "on"]
        assert {way.max_gap_bytes for way in of_cell if way.scratch_bytes == TINY_BYTES} == set(GAPS)
        ways.update(of_cell)
        assert len(ways_of_the_day(source, destination, "adamw")) == 2
    assert ways.total() == 9 * 9 * 5
    assert len(ways) == 1 + 2 * len(GAPS)
    for position, layout in product((0, 1), LAYOUTS):
        found = {way for cell in cells if cell[position] == layout for way in ways_of_the_day(*cell, "adamw")}
        assert found == set(ways)
        assert sum(cell[position] == layout and cell[2] == "sgd" for cell in CELLS["day"]) == 3
