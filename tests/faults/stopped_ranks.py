"""SIGTERM to one rank of four at a random moment of a training run with a manager: all ranks stop after the same step
and save it, or none does because the run is over, and all end as programs do that nothing has disturbed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint import save_policies
from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.launcher import Launcher, shared_launcher
from faults.seams import loads_as, state_of
from faults.traced import Rank, meeting_place

PROGRAM = """
import sys
from faults.stopped_ranks import train
train(*sys.argv[1:])
"""
NUM_RANKS = 4
NUM_STEPS = 60
STEP_S = 0.01
EVERY = 7
WITHIN_S = 90.0
LOOP_S = NUM_STEPS * STEP_S * 2
"""Time in which a run ends that nothing disturbs, on a machine that is not busy."""
_ENDED = re.compile(r"^(stopped at|trained to) (\d+)$", re.MULTILINE)
_POLICIES = {
    "steps": save_policies.EverySteps(EVERY),
    "a message a step": save_policies.When(lambda now, _: now.step > 0 and now.step % EVERY == 0),
}


class Way(NamedTuple):
    """A training run of one trial."""

    policy: str
    is_async: bool
    is_in_step: bool
    """True if the ranks meet in each step, as those do that share gradients."""


def train(policy: str, is_async: str, is_in_step: str, root: str, *of_group: str) -> None:
    """One rank: says when it can be stopped, after which step it ended and why."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # after `close`; another handler would not outlive the interpreter
    rank, world_size, port, meeting = of_group
    Rank(int(rank), int(world_size), int(port), meeting).join()
    options = bcp.ManagerOptions(async_save=is_async == "True", save=bcp.SaveOptions(timeout_s=60))
    keep = bcp.keep_policies.Latest(2)
    rng = random.Random(int(rank))
    ended = f"trained to {NUM_STEPS - 1}"
    with bcp.CheckpointManager(root, save=_POLICIES[policy], keep=keep, options=options) as manager:
        manager.restore(state_of(int(rank), -1.0))
        say("ready")
        for step in range(manager.next_step, NUM_STEPS):
            time.sleep(STEP_S * 2 * rng.random())
            if is_in_step == "True":
                dist.all_reduce(torch.ones(1))
            manager.save(step, state_of(int(rank), float(step)))
            if manager.should_stop():
                ended = f"stopped at {step}"
                break
    say(ended)
    dist.barrier()
    dist.destroy_process_group()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Stopped(NamedTuple):
    """What came of one trial."""

    step: int | None
    """Step after which all ranks stopped; None if they had trained to the end."""
    is_wrong: str | None


def stop_once(launcher: Launcher, asked: Asked, trial: int, port: int) -> Stopped:
    rng, root = asked.rng(trial), asked.folder / str(trial)
    way = Way(rng.choice(list(_POLICIES)), rng.random() < 0.5, rng.random() < 0.5)
    receiver, delay_s = rng.randrange(NUM_RANKS), rng.random() * LOOP_S
    pids = [
        launcher.start(PROGRAM, *way, root, *Rank(rank, NUM_RANKS, port, f"stop-{trial}")) for rank in range(NUM_RANKS)
    ]
    launcher.wait_for_output(pids[receiver], "ready", timeout_s=WITHIN_S)
    time.sleep(delay_s)
    os.kill(pids[receiver], signal.SIGTERM)
    all_ended = [launcher.wait(pid, WITHIN_S) for pid in pids]
    for rank, ended in enumerate(all_ended):
        if ended.exit_code != 0:
            return Stopped(None, f"rank {rank} ended with {ended.exit_code}: {ended.output[-500:]} ({way}, {receiver})")
    found = {_ENDED.search(ended.output).groups() for ended in all_ended}  # type: ignore[union-attr]
    if len(found) > 1:
        return Stopped(None, f"ranks ended differently: {sorted(found)} ({way}, signal to {receiver})")
    ((why, step),) = found
    is_stopped = why == "stopped at"
    expected = int(step) if is_stopped else (NUM_STEPS - 1) // EVERY * EVERY
    return Stopped(int(step) if is_stopped else None, wrong_steps(root, expected, way))


def wrong_steps(root: Path, newest: int, way: Way) -> str | None:
    """Returns what is wrong if this is the newest step, and the policies are those of the run."""
    steps = bcp.steps(root)
    expected = sorted({newest, *range(EVERY, newest, EVERY)})[-2:]
    if steps != expected:
        return f"there are steps {steps}, not {expected} ({way})"
    for step in steps:
        wrong = [rank for rank in range(NUM_RANKS) if not loads_as(root, rank, float(step), step=step, strict=False)]
        if wrong:
            return f"step {step} is not that of ranks {wrong} ({way})"
    return None


def run(asked: Asked) -> Outcome:
    launcher = shared_launcher("faults.kill_times")
    stopped, broken = [], []
    with meeting_place() as port:
        for trial in asked.due():
            stopped.append(stop_once(launcher, asked, trial, port))
            if stopped[-1].is_wrong is None:
                shutil.rmtree(asked.folder / str(trial))
            else:
                broken.append(Broken(trial, stopped[-1].is_wrong))
    num_stopped = sum(one.step is not None for one in stopped)
    num_between = sum(one.step is not None and one.step % EVERY > 0 for one in stopped)
    return Outcome(
        len(stopped),
        tuple(broken),
        f"{num_stopped:,} runs stopped, all ranks after the same step, which was saved and loads ({num_between:,} of "
        f"them not due); {len(stopped) - num_stopped:,} signals came too late to stop anything",
    )


CAMPAIGNS = (
    Campaign(
        name="stop-ranks",
        fault="SIGTERM to one of 4 ranks at a random moment of a run with a manager, each kind of save",
        how="os.kill from another process; ranks over gloo, forked by a server",
        unit="signals",
        run=run,
        trials=range(200),
        quick=range(2),
    ),
)
