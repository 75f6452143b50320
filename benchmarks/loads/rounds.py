"""The rounds of the load benchmark: which checkpoints are saved first, which candidate loads when, from a cold or a
warm page cache. Imports no torch: the states live in the pools.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loads.registry import CANDIDATES
from shared import page_cache
from shared.process_pool import ProcessPool
from shared.rounds import CandidatePools, PoolName, Settings
from shared.workloads import Workload


class LoadRounds:
    """One workload, measured candidate by candidate; rows fill up as it goes."""

    def __init__(self, workload: Workload, names: Sequence[str], settings: Settings) -> None:
        pool_of = {name: CANDIDATES[name].pool for name in names if CANDIDATES[name].takes(workload)}
        self._workload = workload
        self._settings = settings
        self._pools = CandidatePools(pool_of, settings, self._worker)
        self.rows = self._pools.rows
        self.state_bytes = 0
        self._folder = settings.folder / workload.name
        # Where both sides have one layout, the same processes are both.
        self._source = "target" if workload.source == workload.target else "source"
        self._checked: set[tuple[ProcessPool, str]] = set()
        """Candidates that have loaded the right values, in each pool: that is also their first load."""

    def _worker(self, pool: PoolName, side: str) -> tuple[str, dict[str, Any], int]:
        settings = {"pool": pool, "workload": self._workload.name, "side": side, "size": self._settings.size}
        layout = self._workload.source if side == "source" else self._workload.target
        return "loads.worker", settings, layout.num_ranks

    def run(self) -> None:
        """Saves each checkpoint once; then every round has each candidate load once from a cold and once from a warm
        page cache, in an order of its own, so that no one always follows the same.
        """
        rng = random.Random(0)
        try:
            self._save_all()
            for _ in range(self._settings.rounds):
                for name in rng.sample(list(self.rows), len(self.rows)):
                    if self.rows[name].skipped is None:
                        self._load(name)
        finally:
            self._pools.end()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save_all(self) -> None:
        for pool_name in ("own", "against", "peers"):
            for name, row in self.rows.items():
                folder = self._folder_of(name)
                if CANDIDATES[name].pool != pool_name or row.skipped is not None or folder.exists():
                    continue
                folder.mkdir(parents=True)
                # A limit reads what the loading ranks have written in their order.
                side = "target" if CANDIDATES[name].is_limit else self._source
                alike = [each for each in self.rows if self._folder_of(each) == folder]
                command = {"candidate": name, "folder": str(folder), "task": "save"}
                self._pools.attempt(alike, side, lambda pool, command=command: pool.run(**command))
                page_cache.drop(folder, everything=False)
            if self._source == "source":
                self._pools.end("source")

    def _load(self, name: str) -> None:
        folder = self._folder_of(name)
        figures: dict[str, Any] = {}

        def load(pool: ProcessPool) -> None:
            if (pool, name) not in self._checked:
                pool.run(candidate=name, folder=str(folder), task="check")
                self._checked.add((pool, name))
            for condition in self._workload.conditions:
                if condition == "cold":
                    page_cache.drop(folder, everything=self._settings.drops_all)
                else:
                    page_cache.read_through(folder)
                ranks = pool.run(candidate=name, folder=str(folder), task="load")
                figures[condition] = max(rank["seconds"] for rank in ranks)
                for measure in ("called_bytes", "disk_bytes", "requests"):
                    figures[f"{condition} {measure}"] = sum(rank[measure] for rank in ranks)

        if self._pools.attempt([name], "target", load):
            self.state_bytes = self._pools.facts(name, "target")[0]["state_bytes"]
            self.rows[name].rounds.append(figures)
            seconds = ", ".join(f"{condition} {figures[condition]:.3f} s" for condition in self._workload.conditions)
            print(f"  {name}: {seconds}", file=sys.stderr, flush=True)

    def _folder_of(self, name: str) -> Path:
        return self._folder / CANDIDATES[name].checkpoint
