"""SIGKILL of a run that holds its steps in memory, before every line of what holds and resumes them, and at random
times: of the only rank, of one of several, of all of them. After each death the run starts again. What was held is
resumed or something newer, every value is of one step, and nothing is left over.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.launcher import Ended, Launcher, shared_launcher
from faults.memory_run import HOSTS, NEVER, PROGRAM
from faults.traced import meeting_place

STEPS_A_LIFE = 5
WITHIN_S = 120.0
LIVES = 3
_RESUMED = re.compile(r"^resumed (-?\d+) (\d)$", re.MULTILINE)
_HELD = re.compile(r"^held (\d+)$", re.MULTILINE)
_BEGUN = re.compile(r"^begun (\d+)$", re.MULTILINE)
_LINES = re.compile(r"^lines (\d+)$", re.MULTILINE)


class Death(NamedTuple):
    """What ends one life of the run."""

    line: int = NEVER
    """Line before which each dying rank ends; NEVER for one that runs to its end."""
    after_s: float | None = None
    """Seconds after its start; None for a line."""
    is_of_all: bool = True


class Life(NamedTuple):
    """What came of one life."""

    num_killed: int
    resumed: int | None
    held: int
    begun: int
    is_wrong: str | None
    num_lines: int = 0


def live(launcher: Launcher, root: Path, number: int, *, world_size: int, port: int, death: Death, held: int) -> Life:
    """Runs one life of all ranks. `held` is the newest step that an earlier one said to be held."""
    last = max(held, -1) + STEPS_A_LIFE
    programs = []
    for rank in range(world_size):
        dies = death.is_of_all or rank == number % world_size
        line = death.line if dies else NEVER
        arguments = (root, 0, last, line, rank, world_size, port, f"{root.name}-{number}")
        programs.append((launcher.start(PROGRAM, *arguments), dies))
    if death.after_s is not None:
        time.sleep(death.after_s)
        for pid, dies in programs:
            if dies and not launcher.has_ended(pid):
                os.kill(pid, signal.SIGKILL)
    ended = [launcher.wait(pid, WITHIN_S) for pid, _ in programs]
    return judge(ended, held)


def judge(ended: list[Ended], held: int) -> Life:
    """Returns what the ranks said, and the first thing that is wrong with it."""
    is_killed = [one.exit_code == -signal.SIGKILL for one in ended]
    resumed = {int(found[1]) for one in ended for found in [_RESUMED.search(one.output)] if found}
    mixed = any(
        found[2] == "0" and found[1] != "-1" for one in ended for found in [_RESUMED.search(one.output)] if found
    )
    now_held = max([held, *(int(step) for one in ended for step in _HELD.findall(one.output))])
    begun = max([-1, *(int(step) for one in ended for step in _BEGUN.findall(one.output))])
    lines = [int(found[1]) for one in ended for found in [_LINES.search(one.output)] if found]
    wrong = None
    if mixed:
        wrong = f"values of more than one step, or of a wrong one: {sorted(resumed)}"
    elif len(resumed) > 1:
        wrong = f"ranks resumed different steps: {sorted(resumed)}"
    elif resumed and min(resumed) < held:
        wrong = f"step {held} was held, and {min(resumed)} was resumed"
    elif not any(is_killed) and any(one.exit_code for one in ended):
        wrong = f"a life without a kill failed: {[one.output[-600:] for one in ended if one.exit_code]}"
    return Life(sum(is_killed), min(resumed, default=None), now_held, begun, wrong, max(lines, default=0))


def leftovers(root: Path, world_size: int) -> str | None:
    """Returns what is in the memory roots that a run which has ended should not leave."""
    for host in range(min(HOSTS, world_size)):
        ((job, _),) = find_jobs(str(root / f"memory{host}"))
        num_ranks = len(range(host, world_size, HOSTS))
        slots = list(slot_file.scan(job.slots))
        if len(slots) > 2 * num_ranks:
            return f"host {host} has {len(slots)} slots for {num_ranks} ranks"
        names = [name for _, _, names in os.walk(job.path) for name in names if name.startswith(".")]
        if names:
            return f"host {host} has temporaries left: {names}"
    return None


def try_one(
    launcher: Launcher, root: Path, deaths: list[Death], *, world_size: int, port: int
) -> tuple[int, str | None]:
    """Lives as often as there are deaths, then once to the end, twice over; returns the kills and what is wrong."""
    num_killed, held = 0, -1
    for number, death in enumerate([*deaths, Death(), Death()]):
        life = live(launcher, root, number, world_size=world_size, port=port, death=death, held=held)
        num_killed += life.num_killed
        held = life.held
        if life.is_wrong is not None:
            return num_killed, f"life {number}: {life.is_wrong}"
    return num_killed, leftovers(root, world_size)


def run(asked: Asked, *, world_size: int, by_line: bool) -> Outcome:
    """Each trial draws the deaths of a few lives."""
    launcher = shared_launcher("faults.kill_times")
    num_killed, broken = 0, []
    with meeting_place() as port:
        calm = live(launcher, asked.folder / "calm", 0, world_size=world_size, port=port, death=Death(), held=-1)
        if calm.is_wrong is not None or not calm.num_lines:
            raise RuntimeError(f"a run that nothing disturbs has failed: {calm}")
        for trial in asked.due():
            rng, root = asked.rng(trial), asked.folder / str(trial)
            deaths = [
                Death(
                    line=rng.randrange(calm.num_lines) if by_line else NEVER,
                    after_s=None if by_line else rng.uniform(0.05, 1.5),
                    is_of_all=world_size == 1 or rng.random() < 0.7,
                )
                for _ in range(LIVES)
            ]
            killed, wrong = try_one(launcher, root, deaths, world_size=world_size, port=port)
            num_killed += killed
            if wrong is None:
                shutil.rmtree(root, ignore_errors=True)
            else:
                broken.append(Broken(trial, f"{wrong} (deaths {deaths})"))
    return Outcome(num_killed, tuple(broken), f"{num_killed:,} kills; lines that a calm run passes: {calm.num_lines:,}")


def campaign(name: str, fault: str, how: str, trials: int, quick: range, *, world_size: int, by_line: bool) -> Campaign:
    return Campaign(
        name=name,
        fault=fault,
        how=how,
        unit="kills",
        run=partial(run, world_size=world_size, by_line=by_line),
        trials=range(trials),
        quick=quick,
    )


CAMPAIGNS = (
    campaign(
        "kill-memory-lines",
        "SIGKILL before any line of what holds steps in memory and resumes them, one rank; three lives, then two to "
        "the end",
        "a trace function, os.kill of itself",
        1000,
        range(1),
        world_size=1,
        by_line=True,
    ),
    campaign(
        "kill-memory-ranks",
        "the same for four ranks on two hosts: one of them, or all",
        "a trace function, os.kill of itself",
        300,
        range(0),
        world_size=4,
        by_line=True,
    ),
    campaign(
        "kill-memory-times",
        "SIGKILL at random times of a run that holds its steps in memory, one rank",
        "a fork server, os.kill",
        1000,
        range(0),
        world_size=1,
        by_line=False,
    ),
)
