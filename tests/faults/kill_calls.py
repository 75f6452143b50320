"""SIGKILL at every system call that a save makes on the files of its checkpoint, those that only look included. First
one save is watched to the end; then there is a trial for each call that it made, which dies just before that call.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from faults.campaigns import EVERY, Asked, Broken, Campaign, Outcome
from faults.launcher import Launcher, shared_launcher
from faults.savers import SAVERS, Training
from faults.survived import lost, stuck, torn
from faults.traced import (
    BEFORE,
    CENSUS,
    CHANGING,
    SAVED,
    WITHIN_S,
    FileCall,
    Rank,
    Traced,
    file_calls,
    meeting_place,
    missing_for_traces,
)

KEEP_ALIVE = 3
"""One of so many trials with several ranks lets the others live; they must find out that one is gone. In the rest all
of them die, as with their host."""
MIN_LOOK_S = 1.0
"""To hear of what has ended by then."""
MAX_WAITING = 4
"""So many trials wait at once for ranks that live on."""


class Case(NamedTuple):
    """Where a program is to die."""

    in_place: bool
    rank: int
    call: FileCall


class Struck(NamedTuple):
    """What came of one trial."""

    was_killed: bool
    is_committed: bool
    """Whether the new checkpoint is there."""
    is_wrong: str | None


class Crew:
    """As many programs as there are ranks, one of them traced."""

    def __init__(self, launcher: Launcher, *, saver_name: str, world_size: int, port: int) -> None:
        self._launcher = launcher
        self.saver_name, self.world_size, self._port = saver_name, world_size, port

    def begin(
        self, root: Path, *, in_place: bool, traced: int, options: Sequence[str], output: Path | None = None
    ) -> list[Traced]:
        """All of them, just before their save, where the checkpoint before it stands."""
        SAVERS[self.saver_name].save(root, Training(steps=BEFORE), in_place=in_place)
        alone = self.world_size == 1
        programs = [
            Traced(
                self._launcher,
                root,
                saver_name=self.saver_name,
                in_place=in_place,
                options=options if rank == traced else (),
                output=output,
                rank=None if alone else Rank(rank, self.world_size, self._port, root.name),
            )
            for rank in range(self.world_size)
        ]
        for program in programs:
            program.attach()
        return programs


def census(crew: Crew, folder: Path) -> list[Case]:
    """Every call of every rank; those that commit come first, whichever number they have on this machine."""
    cases = []
    for in_place in (False, True):
        for rank in range(crew.world_size):
            root = folder / f"census-{in_place}-{rank}"
            output = root.with_suffix(".txt")
            programs = crew.begin(root, in_place=in_place, traced=rank, options=CENSUS, output=output)
            for program in sorted(programs, key=lambda program: program.tracer is not None):
                program.go_on()
            ended = [program.wait() for program in programs]
            if not all("done" in one.output for one in ended):
                raise RuntimeError(f"a save that nothing disturbs has failed: {ended}")
            cases += [Case(in_place, rank, call) for call in file_calls(output.read_text(), root)]
    return sorted(cases, key=lambda case: not case.call.is_commit)


class Striking(NamedTuple):
    """A trial whose kill has been made, and whose other ranks may still have to find that out."""

    trial: int
    case: Case
    root: Path
    programs: list[Traced]
    struck_s: float
    """When, as time.monotonic() tells it."""

    @property
    def left_s(self) -> float:
        """Until when the other ranks must have ended."""
        return max(self.struck_s + WITHIN_S - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for: all have ended, or one has not and should have."""
        return not self.left_s or all(program.has_ended() for program in self.programs)


def strike(crew: Crew, root: Path, trial: int, case: Case) -> Striking:
    call = case.call
    others_live = call.name in CHANGING and trial % KEEP_ALIVE == 0
    options = ("-e", f"trace={call.name}", "-e", f"inject={call.name}:signal=SIGKILL:when={call.number}")
    programs = crew.begin(root, in_place=case.in_place, traced=case.rank, options=options)
    for program in sorted(programs, key=lambda program: program.tracer is not None):
        program.go_on()  # comes back from the traced one, which is the last, when that has ended
    if not others_live:
        for rank, program in enumerate(programs):
            if rank != case.rank:
                with suppress(ProcessLookupError):
                    os.kill(program.pid, signal.SIGKILL)
    return Striking(trial, case, root, programs, time.monotonic())


def judged(crew: Crew, striking: Striking) -> Struck:
    """Waits until all ranks have ended, or one of them has not in time."""
    case, root, in_place = striking.case, striking.root, striking.case.in_place
    ended = [program.wait(max(striking.left_s, MIN_LOOK_S)) for program in striking.programs]
    was_killed = ended[case.rank].exit_code == -signal.SIGKILL
    hung = [rank for rank, one in enumerate(ended) if one.exit_code is None]
    crashed = [
        one.output for one in ended if "crashed" in one.output or one.exit_code not in {0, -signal.SIGKILL, None}
    ]
    saver, is_done = SAVERS[crew.saver_name], any("done" in one.output for one in ended)
    acknowledged = ([BEFORE] if not is_done else [SAVED]) if in_place else [BEFORE, *([SAVED] if is_done else [])]
    is_wrong = lost(saver, root, begun=SAVED, acknowledged=acknowledged, in_place=in_place)
    if crew.saver_name == "own" and is_wrong is None:
        is_wrong = torn(root, begun=SAVED, acknowledged=acknowledged, in_place=in_place)
        is_committed = saver.steps_loaded(root, step=None) == SAVED if in_place else SAVED in saver.steps(root)
        if is_wrong is None and hung:
            is_wrong = f"ranks {hung} did not end"
        if is_wrong is None and crashed:
            is_wrong = f"a rank ended otherwise than by the kill: {crashed[0][-500:]}"
        return Struck(was_killed, is_committed, is_wrong or stuck(root, begun=SAVED, in_place=in_place))
    return Struck(was_killed, is_done, is_wrong)


def all_struck(crew: Crew, asked: Asked, cases: Sequence[Case]) -> Iterator[tuple[Striking, Struck]]:
    """Ranks that live on wait for seconds until they miss one: meanwhile other trials are made."""
    waiting: deque[Striking] = deque()
    for trial in asked.due():
        if trial >= len(cases):
            break
        waiting.append(strike(crew, asked.folder / str(trial), trial, cases[trial]))
        over = [striking for striking in waiting if striking.is_over]
        for striking in over or ([waiting[0]] if len(waiting) > MAX_WAITING else []):
            waiting.remove(striking)
            yield striking, judged(crew, striking)
    for striking in waiting:
        yield striking, judged(crew, striking)


def run(asked: Asked, *, saver_name: str, world_size: int) -> Outcome:
    launcher = shared_launcher("faults.kill_times")
    struck: list[Struck] = []
    tried: list[Case] = []
    broken: list[Broken] = []
    with meeting_place() if world_size > 1 else nullcontext(0) as port:
        crew = Crew(launcher, saver_name=saver_name, world_size=world_size, port=port)
        cases = census(crew, asked.folder)
        for striking, one in all_struck(crew, asked, cases):
            struck.append(one)
            tried.append(striking.case)
            if one.is_wrong is None:
                shutil.rmtree(striking.root)
            else:
                broken.append(Broken(striking.trial, f"{one.is_wrong} (killed at {striking.case})"))
    num_kills = sum(one.was_killed for one in struck)
    num_changing = sum(case.call.name in CHANGING for case in cases)
    num_committed = sum(one.is_committed for one in struck if one.was_killed)
    num_at_commit = sum(of_trial.call.is_commit for of_trial, one in zip(tried, struck, strict=True) if one.was_killed)
    missed = len(struck) - num_kills
    return Outcome(
        num_kills,
        tuple(sorted(broken)),
        f"{len(cases):,} calls on its files, {num_changing:,} of which change something; after {num_committed:,} of "
        f"the kills the new checkpoint was there"
        + (f"; {num_at_commit:,} at the call that commits" if saver_name != "torch" else "")
        + (f"; {missed:,} times the program did not make the call again" if missed else ""),
    )


_HOW = "strace, inject=...:signal=SIGKILL:when=k"

CAMPAIGNS = (
    Campaign(
        name="kill-calls",
        fault="SIGKILL at every system call on the checkpoint's files, 1 process, step by step and in place",
        how=_HOW,
        unit="kills",
        run=partial(run, saver_name="own", world_size=1),
        trials=EVERY,
        quick=range(3),
        quick_shows="2 at the call that commits",
        missing=missing_for_traces,
    ),
    Campaign(
        name="kill-calls-ranks",
        fault="SIGKILL of one of 4 ranks at every system call on the checkpoint's files, step by step and in place; "
        "the others live on or die with it",
        how=_HOW,
        unit="kills",
        run=partial(run, saver_name="own", world_size=4),
        trials=EVERY,
        quick=range(3),
        quick_shows="2 at the call that commits",
        missing=missing_for_traces,
    ),
    Campaign(
        name="kill-calls-reuse",
        fault="SIGKILL at every system call of a save that takes frozen parameters from the checkpoint before it, "
        "step by step and in place",
        how=_HOW,
        unit="kills",
        run=partial(run, saver_name="reusing", world_size=1),
        trials=EVERY,
        quick=range(3),
        quick_shows="2 at the call that commits",
        missing=missing_for_traces,
    ),
    Campaign(
        name="kill-calls-torch",
        fault="SIGKILL at every system call on the checkpoint's files, 1 process, step by step and in place",
        how=_HOW,
        unit="kills",
        run=partial(run, saver_name="torch", world_size=1),
        trials=EVERY,
        quick=range(0),
        missing=missing_for_traces,
        is_peer=True,
    ),
)
