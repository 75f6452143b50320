"""System calls that fail: each call of a save on the files of its checkpoint with EIO or ENOSPC, once or from then on;
files that may not grow beyond a length; disks with any number of free pages.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from faults.campaigns import EVERY, Asked, Broken, Campaign, Outcome
from faults.kill_calls import Crew, census
from faults.launcher import Ended, shared_launcher
from faults.savers import OWN, Training
from faults.survived import lost, stuck, torn
from faults.traced import BEFORE, CHANGING, SAVED, FileCall, missing_for_traces, save_and_tell

DURABLE = {"fsync", "pwritev", "pwritev2", "link", "rename", "mkdir"}
"""Calls that a save cannot do without."""
PROGRAM = """
import sys
from faults.failing_calls import save_within
save_within(*sys.argv[1:])
"""
DISK_BYTES, PAGE_BYTES = 8 << 20, 4096
LEFT_OVER = re.compile(r"^\d+ of \d+ files in .* could not be deleted .*: `bcp gc` finds them\n", re.MULTILINE)
"""Says a save that has committed, of what it has replaced."""


class Case(NamedTuple):
    """Which call is to fail, and how."""

    in_place: bool
    call: FileCall
    error: str
    for_good: bool
    is_needed: bool
    """Whether a save must not be acknowledged after that."""


def cases_of(crew: Crew, folder: Path) -> list[Case]:
    found = census(crew, folder)
    cases = []
    for in_place in (False, True):
        calls = [case.call for case in found if case.in_place == in_place]
        needed = set(_needed(calls))
        for call in calls:
            ways = [("EIO", False)]
            if call.name in CHANGING or "O_CREAT" in call.text:
                ways += [("EIO", True), ("ENOSPC", True)]
            cases += [Case(in_place, call, error, for_good, call in needed) for error, for_good in ways]
    return cases


def _needed(calls: Sequence[FileCall]) -> Iterator[FileCall]:
    """Without telemetry, which is only told about a save, and without what follows the commit but for its fsyncs."""
    is_telemetry = is_committed = False
    for call in calls:
        if "manifest.bcp" in call.text:
            is_telemetry = False
        elif "telemetry" in call.text:
            is_telemetry = True
        if call.name in DURABLE and not is_telemetry and (not is_committed or call.name == "fsync"):
            yield call
        is_committed |= call.name in {"link", "rename"} and "manifest.bcp" in call.text
        clears_away = call.name == "unlink" and "manifest.bcp" not in call.text
        if is_committed and (clears_away or call.name.startswith("getdents")):
            return


def fail_once(crew: Crew, root: Path, case: Case) -> tuple[str, str | None]:
    """What the save said, and what is wrong with that or with what is there."""
    call, in_place = case.call, case.in_place
    when = f"{call.number}+" if case.for_good else str(call.number)
    options = ("-e", f"trace={call.name}", "-e", f"inject={call.name}:error={case.error}:when={when}")
    (program,) = crew.begin(root, in_place=in_place, traced=0, options=options)
    program.go_on()
    said, is_wrong = judged(program.wait(), root, in_place=in_place)
    if is_wrong is None and said == "done" and case.is_needed:
        is_wrong = "the save was acknowledged without it"
    return said, is_wrong


def judged(ended: Ended, root: Path, *, in_place: bool) -> tuple[str, str | None]:
    """What a save with an error said, in a word, and what is wrong with it."""
    words = LEFT_OVER.sub("", ended.output).replace("ready", "").strip()
    said = words.removeprefix("failed with ").split("]")[0] + "]" if words.startswith("failed") else words
    if ended.exit_code != 0 or (said != "done" and not words.startswith("failed")):
        return "broken", f"it ended with {ended.exit_code}: {words[-500:]}"
    newest = SAVED if said == "done" else BEFORE
    acknowledged = [newest] if in_place else list(range(BEFORE, newest + 1))
    is_wrong = (
        lost(OWN, root, begun=SAVED, acknowledged=acknowledged, in_place=in_place)
        or torn(root, begun=SAVED, acknowledged=acknowledged, in_place=in_place)
        or stuck(root, begun=SAVED, in_place=in_place)
    )
    return said, None if is_wrong is None else f"{is_wrong}; it said: {words[:300]}"


def fail_calls(asked: Asked) -> Outcome:
    """Trial k is the k-th of all calls and ways to fail."""
    launcher = shared_launcher("faults.kill_times")
    said: Counter[str] = Counter()
    broken = []
    crew = Crew(launcher, saver_name="own", world_size=1, port=0)
    cases = cases_of(crew, asked.folder)
    for trial in asked.due():
        if trial >= len(cases):
            break
        what, is_wrong = fail_once(crew, asked.folder / str(trial), cases[trial])
        said[what] += 1
        if is_wrong is None:
            shutil.rmtree(asked.folder / str(trial))
        else:
            broken.append(Broken(trial, f"{is_wrong} ({cases[trial]})"))
    return Outcome(said.total(), tuple(broken), _counted(said))


def _counted(said: Counter[str]) -> str:
    return ", ".join(f"{number:,} {what}" for what, number in said.most_common()).replace(
        " done", " saved all the same"
    )


def save_within(root: str, num_bytes: str, place: str) -> None:
    """In a program whose files may not grow beyond so many bytes; what goes beyond is a short write, then an error.

    -1 for no limit.
    """
    training = Training(steps=SAVED)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(num_bytes), resource.RLIM_INFINITY))
    save_and_tell(
        Path(root),
        training,
        saver_name="own",
        in_place=place == "in place",
        before_telling=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2),
    )


def limit_files(asked: Asked) -> Outcome:
    """Trial k gives files a length of so many bytes at most, drawn from its number: more of them short than long."""
    launcher = shared_launcher("faults.kill_times")
    said: Counter[str] = Counter()
    broken = []
    for trial in asked.due():
        rng, root = asked.rng(trial), asked.folder / str(trial)
        in_place, num_bytes = rng.random() < 0.5, int(1.2e6 * rng.random() ** 3)
        OWN.save(root, Training(steps=BEFORE), in_place=in_place)
        ended = launcher.run(PROGRAM, root, num_bytes, "in place" if in_place else "steps")
        what, is_wrong = judged(ended, root, in_place=in_place)
        said[what] += 1
        if is_wrong is not None:
            broken.append(Broken(trial, f"{is_wrong} (at most {num_bytes} bytes)"))
        shutil.rmtree(root)
    return Outcome(said.total(), tuple(broken), _counted(said))


def fill_disks(asked: Asked) -> Outcome:
    """Trial k leaves k pages free on a disk, until a save has enough of them."""
    said: Counter[str] = Counter()
    broken = []
    launcher = shared_launcher("faults.kill_times")
    num_pages = 2 * 4 * 2 * Training().model.wide.numel() // PAGE_BYTES  # of the model and its momentum, twice
    for trial in asked.due():
        if trial >= num_pages:
            break
        in_place = trial % 2 == 1
        with small_disk(asked.folder / str(trial)) as disk:
            root = disk / "ckpt"
            OWN.save(root, Training(steps=BEFORE), in_place=in_place)
            filler = disk / "filler"
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - trial * PAGE_BYTES))
            ended = launcher.run(PROGRAM, root, -1, "in place" if in_place else "steps")
            filler.unlink()
            what, is_wrong = judged(ended, root, in_place=in_place)
        said[what] += 1
        if is_wrong is not None:
            broken.append(Broken(trial, f"{is_wrong} ({trial} pages free)"))
    return Outcome(said.total(), tuple(broken), _counted(said))


@contextmanager
def small_disk(mounted: Path) -> Iterator[Path]:
    mounted.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mounted)], check=True, capture_output=True
    )
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True, capture_output=True)
        mounted.rmdir()


def missing_for_small_disks() -> str | None:
    """What this machine lacks for a disk of a few megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "disk"):
                return None
        except (OSError, subprocess.CalledProcessError):
            return "the right to mount a tmpfs"


CAMPAIGNS = (
    Campaign(
        name="fail-calls",
        fault="EIO or ENOSPC, once or from then on, at every system call on the checkpoint's files",
        how="strace, inject=...:error=...:when=k",
        unit="errors",
        run=fail_calls,
        trials=EVERY,
        quick=range(1),
        missing=missing_for_traces,
    ),
    Campaign(
        name="limit-files",
        fault="A write that is cut short, then an error, at a random length of a file",
        how="RLIMIT_FSIZE",
        unit="saves",
        run=limit_files,
        trials=range(500),
        quick=range(1),
    ),
    Campaign(
        name="fill-disks",
        fault="A disk with k free pages, for every k until a save has enough",
        how="a small tmpfs, filled up",
        unit="disks",
        run=fill_disks,
        trials=EVERY,
        quick=range(0, 400, 399),
        missing=missing_for_small_disks,
    ),
)
