"""Power cuts: after an acknowledged save, with nothing done since that could have made it durable by chance, and in the
middle of one.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from functools import partial
from typing import NamedTuple

from bytecheckpoint.storage.backends.posix_files import sync_folder
from faults.campaigns import Asked, Broken, Campaign, Outcome
from faults.kill_times import FIRST_GUESS_S, PROGRAM
from faults.launcher import Launcher, shared_launcher
from faults.loop_disk import LoopDisk, missing_for_loop_disks
from faults.savers import SAVERS
from faults.survived import lost, stuck, told, torn

KINDS = ("sync", "copy", "lazy")
MAX_DONE = 3


class Cut(NamedTuple):
    """What a program had done when the power went."""

    begun: int
    acknowledged: list[int]
    save_s: list[float]
    """How long the acknowledged saves took."""
    is_wrong: str | None


def cut_once(
    launcher: Launcher, disk: LoopDisk, asked: Asked, trial: int, *, saver_name: str, in_the_middle: bool, save_s: float
) -> Cut:
    """`save_s` is how long a save takes here today: a cut in the middle strikes at any moment of one."""
    rng = asked.rng(trial)
    in_place, drawn = rng.random() < 0.5, rng.choice(KINDS)
    kind = drawn if saver_name == "own" else "sync"
    num_done = rng.randint(0 if in_the_middle else 1, MAX_DONE)
    delay_s = rng.random() * 1.3 * save_s if in_the_middle else 0.0
    root = disk.mounted / str(trial)
    place, num_saves = "in place" if in_place else "steps", 1000 if in_the_middle else num_done
    pid = launcher.start(PROGRAM, saver_name, root, kind, place, num_saves)
    launcher.wait_for_lines(pid, 2 * num_done + in_the_middle)
    time.sleep(delay_s)
    disk.cut_power()
    os.kill(pid, signal.SIGKILL)
    begun, acknowledged, took_s = told(launcher.wait(pid).output)
    disk.start_again()
    saver = SAVERS[saver_name]
    is_wrong = lost(saver, root, begun=begun, acknowledged=acknowledged, in_place=in_place)
    if saver_name == "own" and is_wrong is None:
        is_wrong = torn(root, begun=begun, acknowledged=acknowledged, in_place=in_place) or stuck(
            root, begun=begun, in_place=in_place
        )
    shutil.rmtree(root, ignore_errors=True)
    sync_folder(disk.mounted)  # or the next cut brings it back
    return Cut(begun, acknowledged, took_s, is_wrong)


def run(asked: Asked, *, saver_name: str, in_the_middle: bool) -> Outcome:
    cuts, broken, save_s = [], [], FIRST_GUESS_S
    launcher, disk = shared_launcher("faults.kill_times"), LoopDisk(asked.folder)
    try:
        for trial in asked.due():
            cut = cut_once(
                launcher, disk, asked, trial, saver_name=saver_name, in_the_middle=in_the_middle, save_s=save_s
            )
            cuts.append(cut)
            save_s = statistics.median([save_s, *cut.save_s])
            if cut.is_wrong is not None:
                broken.append(Broken(trial, cut.is_wrong))
    finally:
        disk.close()
    num_acknowledged = sum(len(cut.acknowledged) for cut in cuts)
    num_within = sum(cut.begun not in cut.acknowledged for cut in cuts)
    struck = f"{num_within:,} struck within a save; " if in_the_middle else ""
    return Outcome(len(cuts), tuple(broken), f"{struck}{num_acknowledged:,} saves were acknowledged before")


_HOW = "ext4 on a loop device, shut down without flushing its journal (EXT4_IOC_SHUTDOWN), mounted again"
_WHEN = {
    "acknowledged": (False, "Power cut right after an acknowledged save"),
    "middle": (True, "Power cut at a random moment of a program that saves again and again"),
}

CAMPAIGNS = tuple(
    Campaign(
        name=f"power-{when}" if saver_name == "own" else f"power-{when}-torch",
        fault=f"{fault}, in steps or in place, {'each snapshot' if saver_name == 'own' else 'synchronous'}",
        how=_HOW,
        unit="power cuts",
        run=partial(run, saver_name=saver_name, in_the_middle=in_the_middle),
        trials=range(num_trials),
        quick=range(num_quick),
        missing=missing_for_loop_disks,
        is_peer=saver_name != "own",
    )
    for saver_name, num_trials, num_quick in (("own", 500, 1), ("torch", 500, 0))
    for when, (in_the_middle, fault) in _WHEN.items()
)
