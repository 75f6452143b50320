"""Campaigns: the same fault many times, each trial drawn from a seed and a number, so that any can be repeated alone.
Each module named in MODULES has a tuple CAMPAIGNS; fault_table.py runs them and keeps what came of it.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

MODULES: tuple[str, ...] = (
    "faults.kill_times",
    "faults.kill_calls",
    "faults.power_cuts",
    "faults.failing_calls",
    "faults.damage",
    "fuzz.campaign",
    "faults.object_store_faults",
    "faults.commit_machine",
    "faults.lost_ranks",
    "faults.manager_kills",
    "faults.memory_kills",
    "faults.stopped_ranks",
    "faults.lost_hosts",
    "faults.slot_damages",
)
"""Each has a tuple CAMPAIGNS. Their order is that of the table."""
EVERY = range(sys.maxsize)
"""For a campaign that knows its own end, as one that goes through every bit of a file."""


@dataclass(slots=True)
class Tally:
    """Counts as a campaign goes."""

    num_tried: int = 0
    """Trials. One may inject several faults, or none."""
    is_cut_short: bool = False
    """Whether there was no time for all of them."""


class Asked(NamedTuple):
    """Which trials to do, and where."""

    seed: int
    trials: range
    """Numbers of trials. A campaign that has fewer stops at its last."""
    folder: Path
    """Empty, on an ordinary disk, and removed afterwards."""
    until_s: float = math.inf
    """When there is no time for more, by time.monotonic()."""
    tally: Tally | None = None
    """Of the trials that were begun."""

    def due(self) -> Generator[int, None, None]:
        """The numbers of the trials, as long as there is time."""
        tally = self.tally or Tally()
        for trial in self.trials:
            if time.monotonic() > self.until_s:
                tally.is_cut_short = True
                return
            tally.num_tried += 1
            yield trial

    def rng(self, trial: int) -> random.Random:
        """What a trial draws from: the same whichever trials were done before it."""
        return random.Random(f"{self.seed}/{trial}")


Lane = TypeVar("Lane")
Found = TypeVar("Found")


def side_by_side(asked: Asked, lanes: Sequence[Lane], try_one: Callable[[Lane, int], Found]) -> list[Found]:
    """What `try_one` gives for each trial that is due, in their order. Each lane has one trial at a time: this is for
    trials that wait most of their time, and meet nothing of one another.
    """
    due, turn = asked.due(), threading.Lock()
    found: dict[int, Found] = {}

    def go_through(lane: Lane) -> None:
        while True:
            with turn:
                trial = next(due, None)
            if trial is None:
                return
            found[trial] = try_one(lane, trial)

    with ThreadPoolExecutor(len(lanes)) as pool:
        under_way = [pool.submit(go_through, lane) for lane in lanes]
        try:
            wait(under_way, return_when=FIRST_EXCEPTION)
        finally:
            with turn:  # where one lane cannot go on, no other begins another trial
                due.close()
    for lane_done in under_way:
        lane_done.result()
    return [found[trial] for trial in sorted(found)]


class Broken(NamedTuple):
    """A trial after which something did not hold that must."""

    trial: int
    what: str
    """Found against expected."""


class Outcome(NamedTuple):
    """What came of the trials."""

    num_trials: int
    """Faults that were really injected."""
    broken: tuple[Broken, ...]
    result: str
    """What was seen, in a few words with numbers: `5,113 saves committed, 4,887 left no trace`. That nothing is broken
    need not be said."""


def nothing_missing() -> str | None:
    """Of a campaign that runs everywhere."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One row of the table, as it is made."""

    name: str
    """On the command line: words with hyphens."""
    fault: str
    """What goes wrong: `SIGKILL at a random time of an asynchronous save, snapshot="copy"`."""
    how: str
    """By which means: `a fork server, os.kill`."""
    unit: str
    """What is counted, in the plural: `kills`."""
    run: Callable[[Asked], Outcome]
    """Does the trials. Raises only where it cannot be run; what a trial finds goes into `broken`."""
    trials: range
    """Of the long run; EVERY where it knows its own end."""
    quick: range
    """Of the run in `make test`, a second or two; empty for none."""
    quick_shows: str = ""
    """What the result of that run must say, where its trials were chosen for what they meet."""
    seed: int = 1
    missing: Callable[[], str | None] = nothing_missing
    """What this machine lacks for it: `the right to mount a loop device`. None where it has all."""
    is_peer: bool = False
    """Whether another library is broken, for comparison: what is lost then fails nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table, as it is kept."""

    name: str
    fault: str
    how: str
    number: int | None
    """None where it was not run."""
    asked: int | None
    """Trials; None for a campaign that knows its own end."""
    unit: str
    broken: int
    first_broken: str | None
    result: str
    """What was seen; what was missing where it was not run."""
    seed: int
    seconds: float
    command: str
    """Repeats all of it."""
    is_peer: bool
    commit: str
    date: str
    """Year, month and day."""
    tried: int | None = None
    """Trials. One may inject several faults, or none."""
    is_cut_short: bool = False
    """Whether there was no time for all trials."""


def all_campaigns() -> list[Campaign]:
    """In the order of the table."""
    return [campaign for module in MODULES for campaign in importlib.import_module(module).CAMPAIGNS]
