"""The rounds of the save benchmark: which candidate saves when, in which process. Imports no torch: the states live in
the pools.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from saves.registry import CANDIDATES
from shared.memory import PeakMemory, memory_of
from shared.process_pool import PoolError, ProcessPool
from shared.rounds import CandidatePools, PoolName, Settings
from shared.workloads import Workload

MEASURES = ("stall", "staged", "durable", "lost", "steps", "step")


class SaveRounds:
    """One workload, measured candidate by candidate; rows fill up as it goes."""

    def __init__(self, workload: Workload, names: Sequence[str], settings: Settings) -> None:
        self._num_ranks = workload.source.num_ranks
        pool_of = {
            name: CANDIDATES[name].pool for name in names if self._num_ranks > 1 or not CANDIDATES[name].needs_ranks
        }
        self._workload = workload
        self._settings = settings
        self._pools = CandidatePools(pool_of, settings, self._worker)
        self.rows = self._pools.rows
        self.state_bytes = 0
        self._warmed_up: set[tuple[ProcessPool, str]] = set()
        """Candidates past their first save, which fills caches, in each pool."""
        self._num_folders = 0

    def _worker(self, pool: PoolName, _side: str) -> tuple[str, dict[str, Any], int]:
        settings = {"pool": pool, "workload": self._workload.name, "size": self._settings.size}
        return "saves.worker", settings, self._num_ranks

    def time(self) -> None:
        """Every round runs each candidate once, in an order of its own, so that no one always follows the same. The
        first round does not count.
        """
        rng = random.Random(0)
        try:
            for number in range(self._settings.rounds + 1):
                for name in rng.sample(list(self.rows), len(self.rows)):
                    if self.rows[name].skipped is None:
                        self._time_once(name, is_counted=number > 0)
        finally:
            self._pools.end()

    def _time_once(self, name: str, *, is_counted: bool) -> None:
        row = self.rows[name]
        timings: list[dict[str, Any]] = []

        def save(pool: ProcessPool) -> None:
            if is_counted and (pool, name) not in self._warmed_up:  # the pool is new, because another candidate failed
                self._save_once(pool, name)
            timings.append(slowest(self._save_once(pool, name)))
            self._warmed_up.add((pool, name))

        if not self._pools.attempt([name], "", save):
            return
        self.state_bytes = sum(int(facts["share_bytes"]) for facts in self._pools.facts(name))
        if is_counted:
            row.rounds += timings
        stall, durable = timings[0]["stall"], timings[0]["durable"]
        print(f"  {name}: {stall:.3f} s, durable {durable:.3f} s", file=sys.stderr, flush=True)

    def _save_once(self, pool: ProcessPool, name: str) -> list[dict[str, Any]]:
        with self._fresh_folder() as folder:
            answers = pool.run(candidate=name, folder=str(folder))
            pattern = CANDIDATES[name].rank_in_name
            if pattern is not None and self._num_ranks > 1:
                self.rows[name].bytes_by_rank = bytes_by_rank(folder, pattern, self._num_ranks)
            return answers

    def measure_memory(self) -> None:
        """Measures two saves of each candidate in fresh processes, because memory that a library keeps counts too."""
        for name, row in self.rows.items():
            if row.skipped is not None or CANDIDATES[name].is_limit:
                continue
            try:
                with (
                    self._pools.new_pool(CANDIDATES[name].pool) as pool,
                    PeakMemory(partial(memory_of, pool.sessions)) as peak,
                ):
                    for _ in range(2):
                        self._save_once(pool, name)
            except PoolError as error:
                row.skipped = f"failed where memory was measured: {self._pools.without_paths(error)}"
                continue
            row.memory_bytes = peak.bytes
            print(f"  {name}: {row.memory_bytes / 1e6:.0f} MB beyond the state", file=sys.stderr, flush=True)

    @contextmanager
    def _fresh_folder(self) -> Iterator[Path]:
        """Removes the folder and syncs everything afterwards, so that no save pays for the one before it."""
        self._num_folders += 1
        folder = self._settings.folder / f"{self._workload.name}-{self._num_folders}"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()


def bytes_by_rank(folder: Path, pattern: str, num_ranks: int) -> list[int]:
    sizes = [0] * num_ranks
    for path in folder.rglob("*"):
        match: Any = re.search(pattern, path.name)
        if match and path.is_file():
            sizes[int(match[1])] += path.stat().st_size
    return sizes


def slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one round of one candidate, from what its ranks measured."""
    return {**{name: max(rank[name] for rank in ranks) for name in MEASURES}, "phases": ranks[0]["phases"]}
