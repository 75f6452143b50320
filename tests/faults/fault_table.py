"""Runs campaigns of faults, keeps what came of each as JSON in docs/faults/, and writes docs/faults.md from that. What
a campaign does is its own business.

    python tests/faults/fault_table.py                             all of them, two at a time, the longest first
    python tests/faults/fault_table.py kill-times-copy flip-data   these
    python tests/faults/fault_table.py kill-times-copy --trials 17      one trial again; it keeps nothing
    python tests/faults/fault_table.py damaged-slots --more --minutes 5    goes on where its row was cut short
    python tests/faults/fault_table.py --table                     the page alone, from what was kept
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch

from faults.campaigns import EVERY, Asked, Campaign, Outcome, Row, Tally, all_campaigns

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "faults"
PAGE = ROOT / "docs" / "faults.md"
WHOLE = "whole-run.json"
"""Beside the rows: the last run of all campaigns."""
_ROOM_BYTES = 1 << 30
"""More than any campaign takes."""
SCRIPT = "python tests/faults/fault_table.py"


def run(campaign: Campaign, *, seed: int, trials: range, until_s: float = math.inf) -> Row:
    """Does these trials; a machine that lacks the means gives a row that says so."""
    torch.set_num_threads(1)  # other campaigns run beside this one
    started, tally = time.monotonic(), Tally()
    missing = campaign.missing()
    if missing is not None:
        return _row(campaign, seed, result=f"not run: needs {missing}")
    commit = f"torch {torch.__version__}" if campaign.is_peer else _commit()  # before it changes under a long run
    with tempfile.TemporaryDirectory(prefix=f"{campaign.name}-", dir=_fast_folder()) as folder:
        outcome = campaign.run(Asked(seed, trials, Path(folder), until_s, tally))
    for trial, what in outcome.broken:  # the row keeps the first only
        sys.stderr.write(f"broken: {campaign.name}, trial {trial}: {what}\n")
    return _row(
        campaign,
        seed,
        number=outcome.num_trials,
        asked=None if trials == EVERY else len(trials),
        broken=len(outcome.broken),
        first_broken=_first_broken(campaign, outcome, seed, folder),
        result=outcome.result,
        tried=tally.num_tried,
        is_cut_short=tally.is_cut_short,
        seconds=round(time.monotonic() - started, 1),
        commit=commit,
        date=time.strftime("%Y-%m-%d"),
    )


_TO = " to "
"""Stands between the first and the last commit of a row that several runs have added to."""
_COUNTED = re.compile(r"([\d,]+) (.+)")


def added(before: Row, after: Row) -> Row:
    """Returns the row of both runs of one campaign. What they saw is told as counts: `12 killed, 3 of them twice`."""
    counts: Counter[str] = Counter()
    for row in (before, after):
        for part in row.result.split(", ") if row.result else []:
            found = _COUNTED.fullmatch(part)
            if found is None:
                raise ValueError(f"{row.name} cannot be added to, because {part!r} is no count; run all of it at once")
            counts[found[2]] += int(found[1].replace(",", ""))
    commits = dict.fromkeys((before.commit.split(_TO)[0], after.commit))
    return replace(
        after,
        number=(before.number or 0) + (after.number or 0),
        broken=before.broken + after.broken,
        first_broken=before.first_broken or after.first_broken,
        result=", ".join(f"{number:,} {what}" for what, number in sorted(counts.items())),
        tried=(before.tried or 0) + (after.tried or 0),
        is_cut_short=after.is_cut_short,
        seconds=round(before.seconds + after.seconds, 1),
        commit=_TO.join(commits),
    )


def do_more(campaign: Campaign, until_s: float) -> Row:
    """Does trials that the kept row has not, and adds them to it."""
    before = _kept_row(campaign)
    if before.number is None:
        return run(campaign, seed=campaign.seed, trials=campaign.trials, until_s=until_s)
    added(before, before)  # raises now what it would raise after the trials
    left = range(campaign.trials.stop if before.tried is None else before.tried, campaign.trials.stop)
    after = run(campaign, seed=campaign.seed, trials=left, until_s=until_s)
    return replace(added(before, after), asked=None if campaign.trials == EVERY else len(campaign.trials))


def _fast_folder() -> str | None:
    """In memory where that is to be had: what outlives a process there is what outlives it on a disk, and a loop device
    loses there what it has not been told to keep. The ordinary folder for temporary files otherwise.
    """
    in_memory = Path("/dev/shm")
    has_room = in_memory.is_dir() and shutil.disk_usage(in_memory).free >= _ROOM_BYTES
    return str(in_memory) if has_room and os.access(in_memory, os.W_OK) else None


def _first_broken(campaign: Campaign, outcome: Outcome, seed: int, folder: str) -> str | None:
    """Without the folder, which is nobody else's."""
    if not outcome.broken:
        return None
    trial, what = outcome.broken[0]
    return f"{what.replace(folder, '')} ({SCRIPT} {campaign.name} --seed {seed} --trials {trial})"


def _commit() -> str:
    """Of the library; with a plus where its files are not as committed. Empty where git does not know."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("log", "-1", "--format=%h", "--", "bytecheckpoint", "tools")
    return head + "+" if git("status", "--porcelain", "--", "bytecheckpoint", "tools") else head


def keep(row: Row) -> None:
    KEPT.mkdir(exist_ok=True)
    _write(KEPT / f"{row.name}.json", json.dumps(asdict(row), indent=1) + "\n")


def kept_rows(campaigns: Iterable[Campaign]) -> list[Row]:
    """What was kept, in the order of the campaigns; those that were never run say so."""
    return [_kept_row(campaign) for campaign in campaigns]


def _kept_row(campaign: Campaign) -> Row:
    file = KEPT / f"{campaign.name}.json"
    return Row(**json.loads(file.read_text())) if file.exists() else _row(campaign, campaign.seed, result="not run yet")


def _row(campaign: Campaign, seed: int, **seen: Any) -> Row:
    """What is known of a campaign, and what was seen; without that, a row of one that was not run."""
    nothing = {
        "number": None,
        "asked": None,
        "broken": 0,
        "first_broken": None,
        "seconds": 0.0,
        "commit": "",
        "date": "",
    }
    return Row(
        name=campaign.name,
        fault=campaign.fault,
        how=campaign.how,
        unit=campaign.unit,
        seed=seed,
        command=f"{SCRIPT} {campaign.name}",
        is_peer=campaign.is_peer,
        **{**nothing, **seen},
    )


class Whole(NamedTuple):
    """A run of all campaigns."""

    seconds: float
    jobs: int
    """At a time."""
    rows: str
    """A digest of what was kept of them: rows that have one of their own since then are not of this run."""


def whole_run(rows: Sequence[Row]) -> Whole | None:
    """The run that all these rows are of; None where they are of several."""
    file = KEPT / WHOLE
    whole = Whole(**json.loads(file.read_text())) if file.exists() else None
    return whole if whole is not None and whole.rows == _digest(rows) else None


def _digest(rows: Sequence[Row]) -> str:
    return hashlib.sha256(json.dumps([asdict(row) for row in rows]).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """In one step: several campaigns end at the same time."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


_INTRODUCTION = """\
# What was broken on purpose, and what became of it

Here you see which faults were caused on purpose, how often, and what they broke. `make fault-table` runs them all and
writes this page; `make fault-table FAULT_ARGS="kill-times-copy --trials 17"` repeats one trial of one row. A trial is
drawn from the seed and its number, so it is the same every time but for the moment at which a timer strikes. After each
fault a reader checks that

- what was acknowledged (`save` or `result()` had returned) loads, bit by bit;
- what can be seen (`steps`, `latest`) loads, bit by bit;
- the next save at the same place works, and `bcp gc` leaves nothing of what died.

Whatever does not hold counts as broken. `tests/faults` has the code. Some faults need rights to trace or to mount; a
row that could not be run says so.
"""
_COMPARISON = """\
## The same harness on torch.distributed.checkpoint

torch's own `dcp.save` and `dcp.load`, with the same state, synchronous; trials are drawn alike, from the same seeds.
Only what `dcp.save` had acknowledged can be lost here: it counts when it no longer loads, or loads other values without
an error. An error at a load of damaged bytes counts as detected. "In place" is a save into the folder of the save
before, which `dcp.save` takes by default.
"""


def page(rows: Sequence[Row], whole: Whole | None = None) -> str:
    """docs/faults.md. `whole` is the run that all rows are of."""
    own = [row for row in rows if not row.is_peer]
    peers = [row for row in rows if row.is_peer]
    parts = [_INTRODUCTION, _how_long(rows, whole), _table(own, broken="broken")]
    if peers:
        parts += [_COMPARISON, _table(peers, broken="lost")]
    return "\n".join(parts)


def _how_long(rows: Sequence[Row], whole: Whole | None) -> str:
    if whole is None:
        added_up = sum(row.seconds for row in rows) / 60
        return f"The rows are of several runs. Their seconds add up to {added_up:,.0f} minutes.\n"
    at_a_time = f"{whole.jobs} campaigns at a time" if whole.jobs > 1 else "one campaign after the other"
    return f"All rows are of one run, which took {whole.seconds / 60:,.0f} minutes, {at_a_time}.\n"


def _table(rows: Sequence[Row], *, broken: str) -> str:
    lines = [f"| fault | how | number | {broken} | seen | run |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(map(_cell, _cells(row)))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    number = "-" if row.number is None else f"{row.number:,} {row.unit}"
    if row.is_cut_short:
        of_all = "not all" if row.asked is None else f"{row.tried:,} of {row.asked:,} trials"
        number += f" ({of_all}: the time was up)"
    lost = "-" if row.number is None else f"{row.broken:,}"
    seen = row.result if row.first_broken is None else f"{row.result}. First: {row.first_broken}"
    when = "" if row.number is None else f", {row.seconds:,.0f} s, {row.date}, at {row.commit}"
    run_as = f"`{row.name}`, seed {row.seed}{when}"
    return [row.fault, row.how, number, lost if row.broken == 0 else f"**{lost}**", seen, run_as]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_page() -> None:
    """Writes it from all rows that are kept by now: one run after the other, or one would leave out the other's row."""
    folder = os.open(KEPT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = kept_rows(all_campaigns())
        _write(PAGE, page(rows, whole_run(rows)))
    finally:
        os.close(folder)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    of_one = arguments.more or arguments.seed is not None or arguments.trials is not None
    if of_one and len(arguments.names) != 1:
        parser.error("--more, --seed and --trials are options of one campaign: name exactly one")
    by_name = {campaign.name: campaign for campaign in all_campaigns()}
    unknown = [name for name in arguments.names if name not in by_name]
    if unknown:
        sys.stderr.write(f"no campaign is called {', '.join(unknown)}; there are {', '.join(by_name)}\n")
        return 2
    names = arguments.names or list(by_name)
    if arguments.table:
        write_page()
        return 0
    if len(names) > 1:
        return run_many([by_name[name] for name in names], jobs=arguments.jobs, minutes=arguments.minutes)
    campaign = by_name[names[0]]
    seed = campaign.seed if arguments.seed is None else arguments.seed
    trials = campaign.trials if arguments.trials is None else range_of(arguments.trials)
    until_s = time.monotonic() + 60 * arguments.minutes
    if arguments.more:
        keep(do_more(campaign, until_s))
        write_page()
        return int(_kept_row(campaign).broken > 0)
    row = run(campaign, seed=seed, trials=trials, until_s=until_s)
    sys.stdout.write(f"{json.dumps(asdict(row), indent=1)}\n")
    if (seed, trials) == (campaign.seed, campaign.trials):
        keep(row)
        write_page()
    return int(row.broken > 0 and not row.is_peer)


def run_many(campaigns: Sequence[Campaign], *, jobs: int, minutes: float) -> int:
    """Each in a process of its own; writes the page, and says how long that took and what was broken."""
    before, began_s = {campaign.name: _kept_file(campaign.name) for campaign in campaigns}, time.monotonic()
    longest_first = [row.name for row in sorted(kept_rows(campaigns), key=expected_s, reverse=True)]
    codes = _each_alone(longest_first, jobs, minutes)
    seconds, rows = time.monotonic() - began_s, kept_rows(campaigns)
    silent = [row.name for row in rows if _kept_file(row.name) == before[row.name]]
    if not silent and [row.name for row in rows] == [campaign.name for campaign in all_campaigns()]:
        _write(KEPT / WHOLE, json.dumps(Whole(round(seconds, 1), jobs, _digest(rows))._asdict(), indent=1) + "\n")
    write_page()
    num_broken = sum(row.broken for row in rows if not row.is_peer and row.name not in silent)
    ended_early = f"; of {', '.join(silent)} nothing is known: they ended early" if silent else ""
    sys.stdout.write(f"{len(rows)} campaigns in {seconds / 60:.1f} minutes: {num_broken:,} broken{ended_early}\n")
    return int(bool(silent) or any(codes))


def expected_s(row: Row) -> float:
    """How long a campaign may take, by what was kept of it; one that was never run may take for ever."""
    if row.number is None:
        return math.inf
    part = row.tried / row.asked if row.is_cut_short and row.tried and row.asked else 1.0
    return row.seconds / part


def _kept_file(name: str) -> tuple[int, int] | None:
    """Tells one file that `keep` wrote from the next: by number and date, as dates alone may be of another clock."""
    file = KEPT / f"{name}.json"
    return ((status := file.stat()).st_ino, status.st_mtime_ns) if file.exists() else None


def _each_alone(names: Sequence[str], jobs: int, minutes: float) -> list[int]:
    """Each in a process of its own, so many at a time; their exit codes."""

    def run_alone(name: str) -> int:
        command = [sys.executable, __file__, name, "--minutes", str(minutes)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run_alone, names))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="campaigns; all of them if none is named")
    parser.add_argument("--seed", type=int, help="another one than the campaign's own")
    parser.add_argument("--trials", metavar="N or N-M", help="only these trials of one campaign")
    parser.add_argument("--more", action="store_true", help="of one campaign: go on where its kept row was cut short")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="campaigns at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for each campaign: begin no trial after that")
    parser.add_argument("--table", action="store_true", help="write the page only, from what was kept")
    return parser


def range_of(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    sys.exit(main())
