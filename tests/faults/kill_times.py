"""SIGKILL at a moment drawn at random, in a program that trains and saves again and again. The programs are forked from
one process that has torch, so that thousands can be killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from faults import savers
from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.launcher import Launcher, shared_launcher
from faults.savers import OWN, SAVERS, Training
from faults.survived import lost, stuck, told, torn

PROGRAM = """
import sys
from faults.kill_times import train_and_save
train_and_save(*sys.argv[1:])
"""
MAX_DONE = 3
"""Kills come in one of the first saves, or as many later."""
FIRST_GUESS_S = 0.03
"""Of the time that a save takes, until one was seen."""
SURELY_TOLD_S = 2.0
"""When what is still there is looked at closely, which takes milliseconds."""
ENDS_WITHIN_S = 60.0
"""What the program has forked. Machines are busy."""


def train_and_save(saver_name: str, root: str, kind: str, place: str, num_saves: str) -> None:
    """Says before each save that it begins and after each that it is done; waits for its end after the last."""
    os.setsid()  # by which whatever it forked is found again
    training, saver, in_place = Training(), SAVERS[saver_name], place == "in place"
    for _ in range(int(num_saves)):
        training.step()
        number = training.extra["steps"]
        sys.stdout.write(f"begin {number}\n")
        sys.stdout.flush()
        begun = time.monotonic()
        if kind == "sync":
            saver.save(Path(root), training, in_place=in_place)
        else:
            wait = OWN.begin(Path(root), training, in_place=in_place, snapshot=kind)
            training.step()  # what is saved must stay as it was at the call
            wait()
        sys.stdout.write(f"done {number} after {time.monotonic() - begun:.4f}\n")
        sys.stdout.flush()
    while True:
        signal.pause()


def warm_up() -> None:
    """For a Launcher that is to start many of these programs."""
    savers.warm_up()


class Killed(NamedTuple):
    """What a program had done when it was killed."""

    begun: int
    acknowledged: list[int]
    save_s: list[float]
    """How long the acknowledged saves took."""
    is_wrong: str | None


def kill_once(launcher: Launcher, asked: Asked, trial: int, *, saver_name: str, kind: str, save_s: float) -> Killed:
    """`save_s` is how long a save takes on this machine today: a kill strikes at any moment of one."""
    rng = asked.rng(trial)
    root = asked.folder / str(trial)
    in_place, num_done, delay_s = rng.random() < 0.5, rng.randint(0, MAX_DONE), rng.random() * 1.3 * save_s
    pid = launcher.start(PROGRAM, saver_name, root, kind, "in place" if in_place else "steps", 1000)
    launcher.wait_for_lines(pid, 2 * num_done + 1)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    ended = launcher.wait(pid)
    begun, acknowledged, took_s = told(ended.output)
    if ended.exit_code != -signal.SIGKILL:
        return Killed(begun, acknowledged, took_s, f"the program ended by itself: {ended.output[-500:]}")
    saver = SAVERS[saver_name]
    is_wrong = lost(saver, root, begun=begun, acknowledged=acknowledged, in_place=in_place)
    if saver_name == "own" and is_wrong is None:
        is_wrong = (
            torn(root, begun=begun, acknowledged=acknowledged, in_place=in_place)
            or stuck(root, begun=begun, in_place=in_place)
            or left_alive(pid)
        )
    return Killed(begun, acknowledged, took_s, is_wrong)


def left_alive(pid: int) -> str | None:
    """What the program had forked and has outlived it for long."""
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < ENDS_WITHIN_S:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return None
        if waited_s > SURELY_TOLD_S and not living_in_group(pid):
            return None
        time.sleep(0.001)
    living = living_in_group(pid)
    told = ", ".join(f"{one} in {_system_call_of(one)}" for one in living)
    return f"a child of the program lives {ENDS_WITHIN_S:g} s after it: {told}" if living else None


def _system_call_of(pid: int) -> str:
    with suppress(OSError):  # it has just ended, or may not be looked at
        return Path(f"/proc/{pid}/syscall").read_text().strip()
    return "?"


def living_in_group(group: int) -> list[int]:
    """Its processes that have not ended. One that has, and that nobody has waited for yet, can be sent signals still:
    the launcher is not told of all of them, because the kernel's list of children leaves some out while others end.
    """
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just gone
            _, _, its_group = _state_parent_group(stat)
            threads = stat.parent.glob("task/*/stat") if int(its_group) == group else ()
            if any(_state_parent_group(thread)[0] not in "ZX" for thread in threads):  # the first one may be gone
                living.append(int(stat.parent.name))
    return living


def _state_parent_group(stat: Path) -> list[str]:
    return stat.read_text().rpartition(") ")[2].split()[:3]


def run(asked: Asked, *, saver_name: str, kind: str) -> Outcome:
    killed: list[Killed] = []
    broken = []
    save_s = FIRST_GUESS_S
    launcher = shared_launcher("faults.kill_times")
    for trial in asked.due():
        killed.append(kill_once(launcher, asked, trial, saver_name=saver_name, kind=kind, save_s=save_s))
        save_s = statistics.median([save_s, *killed[-1].save_s])
        if killed[-1].is_wrong is None:
            shutil.rmtree(asked.folder / str(trial), ignore_errors=True)  # it may not have come to making it
        else:
            broken.append(Broken(trial, killed[-1].is_wrong))
    num_acknowledged = sum(len(one.acknowledged) for one in killed)
    num_within = sum(one.begun not in one.acknowledged for one in killed)
    return Outcome(
        len(killed),
        tuple(broken),
        f"{num_within:,} struck within a save; {num_acknowledged:,} saves were acknowledged before",
    )


_HOW = "SIGKILL from another process; programs forked by a server"
_STRUCK = "at a random moment of a program that saves again and again, in steps or in place"
_KINDS = {
    "sync": "synchronous",
    "copy": 'asynchronous, `snapshot="copy"`',
    "lazy": 'asynchronous, `snapshot="lazy"`',
}

CAMPAIGNS = (
    *(
        Campaign(
            name=f"kill-times-{kind}",
            fault=f"SIGKILL {_STRUCK}, {called}",
            how=_HOW,
            unit="kills",
            run=partial(run, saver_name="own", kind=kind),
            trials=range(2500),
            quick=range(2),
            seed=seed,
        )
        for seed, (kind, called) in enumerate(_KINDS.items(), 1)
    ),
    Campaign(
        name="kill-times-torch",
        fault=f"SIGKILL {_STRUCK}, synchronous",
        how=_HOW,
        unit="kills",
        run=partial(run, saver_name="torch", kind="sync"),
        trials=range(800),
        quick=range(1),
        is_peer=True,
    ),
)
