"""Process pools of the candidates of one workload: started when first used, ended when one of their candidates fails,
which then leaves the run. Imports no torch: the states live in the pools.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from shared.process_pool import PoolError, ProcessPool
from shared.results import Row

PoolName = Literal["own", "peers", "against"]
"""Environment of a pool: this Python, the one that --peers names, or this one with the library of --against."""
AGAINST = "@against"
"""Suffix of the names of candidates that use the library of --against."""
C = TypeVar("C", bound=Any)


@dataclass(frozen=True)
class Settings:
    """Settings of a run for one workload."""

    size: float
    rounds: int
    folder: Path
    peers_python: str | None
    against: Path | None
    """Another checkout of this library."""
    timeout_s: float
    drops_all: bool = False
    """True if a cold load drops the whole machine's caches, not only those of its files."""


def with_against(candidates: Collection[C]) -> dict[str, C]:
    """Returns candidates by name, and after each that uses this library its twin that uses the one of --against."""
    found: dict[str, C] = {}
    for each in candidates:
        found[each.name] = each
        if each.name.startswith("bcp"):
            twin = replace(each, name=each.name + AGAINST, title=f"{each.title}, against", pool="against")
            found[twin.name] = twin
    return found


class CandidatePools:
    """Rows of one workload's candidates and the pools that run them."""

    def __init__(
        self,
        pool_of: Mapping[str, PoolName],
        settings: Settings,
        start: Callable[[PoolName, str], tuple[str, dict[str, Any], int]],
    ) -> None:
        """`pool_of` is by candidate; `start` returns the worker's module, its settings and the number of ranks, given a
        pool and a side of the workload.
        """
        self.rows = {name: Row() for name in pool_of}
        self._pool_of = pool_of
        self._settings = settings
        self._start = start
        self._pools: dict[tuple[PoolName, str], ProcessPool] = {}
        if settings.peers_python is None:
            for name, pool in pool_of.items():
                if pool == "peers":
                    self.rows[name].skipped = "not measured: --peers not given"

    def attempt(self, names: Collection[str], side: str, work: Callable[[ProcessPool], object]) -> bool:
        """Runs work for candidates of one pool. Returns False if it failed: they leave the run, and the pool ends."""
        pool_name = self._pool_of[next(iter(names))]
        key = pool_name, side
        try:
            if key not in self._pools:
                self._pools[key] = self.new_pool(*key)
            work(self._pools[key])
        except PoolError as error:
            reason = f"failed: {self.without_paths(error)}"
            print(f"  {', '.join(names)} {reason}", file=sys.stderr, flush=True)
            pool = self._pools.pop(key, None)
            if pool is not None:
                print(pool.log_tail(), file=sys.stderr, flush=True)
                pool.end()
            else:  # it never began, and would not for the others
                names = [name for name in self.rows if self._pool_of[name] == pool_name]
            for name in names:
                self.rows[name].skipped = reason
            return False
        return True

    def new_pool(self, name: PoolName, side: str = "") -> ProcessPool:
        settings = self._settings
        module, worker_settings, num_ranks = self._start(name, side)
        python = settings.peers_python if name == "peers" and settings.peers_python else sys.executable
        checkout = settings.against if name == "against" else None
        return ProcessPool(
            module, worker_settings, num_ranks=num_ranks, timeout_s=settings.timeout_s, python=python, checkout=checkout
        )

    def without_paths(self, error: PoolError) -> str:
        """Formats an error for a report, without the machine's paths and names."""
        return str(error).replace(str(self._settings.folder), "FOLDER").replace(platform.node(), "HOST")

    def facts(self, name: str, side: str = "") -> list[dict[str, Any]]:
        """Returns the facts of the ranks of a candidate's pool."""
        return self._pools[self._pool_of[name], side].facts

    def end(self, side: str | None = None) -> None:
        """Ends the pools of one side, or all."""
        for key in [key for key in self._pools if side in (None, key[1])]:
            self._pools.pop(key).end()
