"""The rounds of benchmarks/load.py: who saves what for whom, who loads when, from a cold or a warm page cache, and what
becomes of one that fails. Imports no torch: the states live in the crews.
"""

from __future__ import annotations

import platform
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import page_cache
from crew import Crew, CrewError
from load_catalogue import CONTESTANTS, Workload
from results import Row

WORKER = Path(__file__).with_name("load_worker.py")


@dataclass(frozen=True)
class Settings:
    """How to measure one workload."""

    size: float
    rounds: int
    folder: Path
    own_python: str
    peers_python: str | None
    drops_all: bool
    """Whether a cold load has the whole machine's caches dropped, not only those of its files."""
    timeout_s: float


class LoadRounds:
    """One workload, measured contestant by contestant; rows fill up as it goes."""

    def __init__(self, workload: Workload, names: Sequence[str], settings: Settings) -> None:
        self.rows = {name: Row() for name in names if CONTESTANTS[name].takes(workload)}
        self.state_bytes = 0
        self._workload = workload
        self._settings = settings
        self._folder = settings.folder / workload.name
        self._crews: dict[tuple[str, str], Crew] = {}
        self._checked: set[tuple[Crew, str]] = set()
        """Who has loaded the right values, in which crew: that is also its first load."""
        if settings.peers_python is None:
            for name in self.rows:
                if CONTESTANTS[name].crew == "peers":
                    self.rows[name].skipped = "not measured: --peers not given"

    def run(self) -> None:
        """Saves each checkpoint once; then every round has each contestant load once from a cold and once from a warm
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
            self._end_crews(["source", "target"])
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save_all(self) -> None:
        for crew_name in ("own", "peers"):
            for name, row in self.rows.items():
                folder = self._folder_of(name)
                if CONTESTANTS[name].crew != crew_name or row.skipped is not None or folder.exists():
                    continue
                folder.mkdir(parents=True)
                # A limit reads what the loading ranks have written as they want it.
                side = "target" if CONTESTANTS[name].is_limit else "source"
                alike = [each for each in self.rows if self._folder_of(each) == folder]
                self._try(alike, side, lambda crew, name=name, folder=folder: crew.run(name, folder, task="save"))
                page_cache.drop(folder, everything=False)
            if self._side("source") != self._side("target"):
                self._end_crews(["source"])

    def _load(self, name: str) -> None:
        folder = self._folder_of(name)
        figures: dict[str, Any] = {}

        def load(crew: Crew) -> None:
            if (crew, name) not in self._checked:
                crew.run(name, folder, task="check")
                self._checked.add((crew, name))
            for condition in self._workload.conditions:
                self._bring_about(condition, folder)
                ranks = crew.run(name, folder, task="load")
                figures[condition] = max(rank["seconds"] for rank in ranks)
                for measure in ("called_bytes", "disk_bytes", "requests"):
                    figures[f"{condition} {measure}"] = sum(rank[measure] for rank in ranks)

        if self._try([name], "target", load):
            self.rows[name].rounds.append(figures)
            said = ", ".join(f"{condition} {figures[condition]:.3f} s" for condition in self._workload.conditions)
            print(f"  {name}: {said}", file=sys.stderr, flush=True)

    def _bring_about(self, condition: str, folder: Path) -> None:
        if condition == "cold":
            page_cache.drop(folder, everything=self._settings.drops_all)
        else:
            page_cache.read_through(folder)

    def _try(self, names: Sequence[str], side: str, work: Callable[[Crew], object]) -> bool:
        """Whether the work for these contestants of one crew went well; if not, they are out, and the crew ends."""
        crew_name = CONTESTANTS[names[0]].crew
        try:
            work(self._crew(crew_name, side))
        except CrewError as error:
            reason = f"failed: {self._without_places(error)}"
            print(f"  {', '.join(names)} {reason}", file=sys.stderr, flush=True)
            self._give_up(names, self._crews.pop((crew_name, self._side(side)), None), reason)
            return False
        return True

    def _give_up(self, names: Sequence[str], crew: Crew | None, reason: str) -> None:
        if crew is not None:
            print(crew.log_tail(), file=sys.stderr, flush=True)
            crew.end()
        else:  # it never began, and would not for the others
            names = [name for name in self.rows if CONTESTANTS[name].crew == CONTESTANTS[names[0]].crew]
        for name in names:
            self.rows[name].skipped = reason

    def _without_places(self, error: CrewError) -> str:
        """For a report that tells nothing of the machine's paths and names."""
        return str(error).replace(str(self._settings.folder), "FOLDER").replace(platform.node(), "HOST")

    def _folder_of(self, name: str) -> Path:
        return self._folder / CONTESTANTS[name].checkpoint

    def _side(self, side: str) -> str:
        """Where both sides have one layout, the same processes are both."""
        return "target" if self._workload.source == self._workload.target else side

    def _crew(self, name: str, side: str) -> Crew:
        key = name, self._side(side)
        if key not in self._crews:
            self._crews[key] = self._new_crew(*key)
        return self._crews[key]

    def _new_crew(self, name: str, side: str) -> Crew:
        settings, workload = self._settings, self._workload
        python = settings.peers_python if name == "peers" and settings.peers_python else settings.own_python
        command = [python, str(WORKER), "--crew", name, "--workload", workload.name, "--side", side]
        crew = Crew(
            [*command, "--size", str(settings.size)],
            num_ranks=(workload.source if side == "source" else workload.target).num_ranks,
            timeout_s=settings.timeout_s,
        )
        if side == "target":
            self.state_bytes = crew.facts[0]["state_bytes"]
        return crew

    def _end_crews(self, sides: Sequence[str]) -> None:
        for key in [key for key in self._crews if key[1] in sides]:
            self._crews.pop(key).end()
