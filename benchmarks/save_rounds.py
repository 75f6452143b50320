"""The rounds of benchmarks/save.py: who saves when, in which process, and what becomes of one that fails. Imports no
torch: the states live in the crews.
"""

from __future__ import annotations

import os
import platform
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crew import Crew, CrewError
from results import Row
from save_catalogue import CONTESTANTS, Workload
from save_memory import PeakMemory, memory_of

WORKER = Path(__file__).with_name("save_worker.py")
MEASURES = ("stall", "staged", "durable", "lost", "steps", "step")


@dataclass(frozen=True)
class Settings:
    """How to measure one workload."""

    size: float
    rounds: int
    """Counted ones, after one that is not."""
    folder: Path
    own_python: str
    peers_python: str | None
    timeout_s: float


class Rounds:
    """One workload, measured contestant by contestant; rows fill up as it goes."""

    def __init__(self, workload: Workload, names: Sequence[str], settings: Settings) -> None:
        self.rows = {name: Row() for name in names if workload.num_ranks > 1 or not CONTESTANTS[name].needs_ranks}
        self.state_bytes = 0
        self._workload = workload
        self._settings = settings
        self._crews: dict[str, Crew] = {}
        self._have_saved: set[tuple[Crew, str]] = set()
        """Who is past the first save, which makes what is kept, in which crew."""
        self._num_folders = 0
        if settings.peers_python is None:
            for name in self.rows:
                if CONTESTANTS[name].crew == "peers":
                    self.rows[name].skipped = "not measured: --peers not given"

    def time(self) -> None:
        """Every round runs each contestant once, in an order of its own, so that no one always follows the same."""
        rng = random.Random(0)
        with ExitStack() as ending:
            ending.callback(self._end_crews)
            for number in range(self._settings.rounds + 1):
                for name in rng.sample(list(self.rows), len(self.rows)):
                    if self.rows[name].skipped is None:
                        self._time_once(name, is_counted=number > 0)

    def _time_once(self, name: str, *, is_counted: bool) -> None:
        row, crew_name = self.rows[name], CONTESTANTS[name].crew
        try:
            crew = self._crew(crew_name)
            if (
                is_counted and (crew, name) not in self._have_saved
            ):  # the crew is new, because another contestant failed
                with self._fresh_folder() as folder:
                    crew.run(name, folder)
            with self._fresh_folder() as folder:
                timing = slowest(crew.run(name, folder))
                self._have_saved.add((crew, name))
                pattern = CONTESTANTS[name].rank_in_name
                if pattern is not None and self._workload.num_ranks > 1:
                    row.bytes_by_rank = bytes_by_rank(folder, pattern, self._workload.num_ranks)
        except CrewError as error:
            self._give_up(name, crew_name, error)
            return
        if is_counted:
            row.rounds.append(timing)
        print(f"  {name}: {timing['stall']:.3f} s, durable {timing['durable']:.3f} s", file=sys.stderr, flush=True)

    def _give_up(self, name: str, crew_name: str, error: CrewError) -> None:
        reason = f"failed: {self._without_places(error)}"
        self.rows[name].skipped = reason
        print(f"  {name} {reason}", file=sys.stderr, flush=True)
        crew = self._crews.pop(crew_name, None)
        if crew is not None:
            print(crew.log_tail(), file=sys.stderr, flush=True)
            crew.end()
        else:  # it never began, and would not for the others
            for other in self.rows:
                if CONTESTANTS[other].crew == crew_name:
                    self.rows[other].skipped = reason

    def _without_places(self, error: CrewError) -> str:
        """For a report that tells nothing of the machine's paths and names."""
        return str(error).replace(str(self._settings.folder), "FOLDER").replace(platform.node(), "HOST")

    def measure_memory(self) -> None:
        """By two saves of each contestant in fresh processes, because memory that is kept counts as well."""
        for name, row in self.rows.items():
            if row.skipped is not None or CONTESTANTS[name].is_limit:
                continue
            try:
                with self._new_crew(CONTESTANTS[name].crew) as crew:
                    before = memory_of(crew.sessions)
                    with PeakMemory(crew.sessions) as peak:
                        for _ in range(2):
                            with self._fresh_folder() as folder:
                                crew.run(name, folder)
            except CrewError as error:
                row.skipped = f"failed where memory was measured: {self._without_places(error)}"
                continue
            row.memory_bytes = peak.bytes - before
            print(f"  {name}: {row.memory_bytes / 1e6:.0f} MB beyond the state", file=sys.stderr, flush=True)

    def _crew(self, name: str) -> Crew:
        if name not in self._crews:
            self._crews[name] = self._new_crew(name)
        return self._crews[name]

    def _new_crew(self, name: str) -> Crew:
        settings, workload = self._settings, self._workload
        python = settings.peers_python if name == "peers" and settings.peers_python else settings.own_python
        command = [python, str(WORKER), "--crew", name, "--workload", workload.name, "--size", str(settings.size)]
        crew = Crew(command, num_ranks=workload.num_ranks, timeout_s=settings.timeout_s)
        self.state_bytes = sum(int(facts["share_bytes"]) for facts in crew.facts)
        return crew

    def _end_crews(self) -> None:
        for crew in self._crews.values():
            crew.end()
        self._crews.clear()

    @contextmanager
    def _fresh_folder(self) -> Iterator[Path]:
        """Gone afterwards, and everything on disk, so that no save pays for the one before it."""
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
    """One round of one contestant, from what its ranks measured."""
    return {**{name: max(rank[name] for rank in ranks) for name in MEASURES}, "phases": ranks[0]["phases"]}
