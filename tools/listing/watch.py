"""`bcp watch`: prints checkpoints as they commit."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

import click

from bytecheckpoint.diagnostics.telemetry import end_of, phases_of, read_save_records
from bytecheckpoint.errors import CheckpointSaveError, StorageError
from bytecheckpoint.formats.find_checkpoint import Opening, find_checkpoint
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store

from .. import exit_codes
from ..arguments import AccessOptions, finite, with_output_options
from ..completion.param_types import StoredPath
from ..render.number_format import count_text, size_text, time_text
from ..render.terminal import Screen, print_json, printable, to_json
from ..render.timeline_text import seconds_text
from .commits import CommitWatch, NewCheckpoint

_EXAMPLE = """\b
Example:
  bcp watch s3://bucket/run --interval 30
  bcp watch /data/run --once --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedCheckpoint:
    """A checkpoint that was committed, and how its save went."""

    path: str
    run: str | None
    """Folder of the root that holds it, if it is in one."""
    step: int | None
    save_id: str | None
    created_at: datetime | None
    num_bytes: int
    num_ranks: int | None
    seconds: float | None
    """Seconds from the first rank's call to the end of the last one; None without telemetry."""
    stall_seconds: float | None
    """Longest time for which the call held a rank."""
    slowest_phase: str | None
    slowest_phase_seconds: float | None
    slowest_rank: int | None
    """The rank that took longest in that phase."""
    is_replacement: bool
    """True if another checkpoint stood at this path when it was last looked at."""
    problem: str | None
    """Error of reading the manifest."""

    @property
    def line(self) -> str:
        """One line for people."""
        name = self.path.rpartition("/")[2] if self.step is None else f"step {self.step}"
        name = f"{self.run}: {name}" if self.run else name
        name += " (replaced)" if self.is_replacement else ""
        saved_by = "" if self.num_ranks is None else f" by {count_text(self.num_ranks, 'rank')}"
        what = f"{time_text(self.created_at)}  {name}  {size_text(self.num_bytes)}{saved_by}"
        if self.problem is not None:
            return f"{name}  DAMAGED: {self.problem}"
        if self.seconds is None:
            return f"{what}  (no timings)"
        rate = f"{size_text(self.num_bytes / max(self.seconds, 1e-9))}/s"
        stall = "" if self.stall_seconds is None else f", stall {seconds_text(self.stall_seconds)}"
        slowest = f", {self.slowest_phase} {seconds_text(self.slowest_phase_seconds or 0.0)}"
        of_rank = f" on rank {self.slowest_rank}" if (self.num_ranks or 1) > 1 else ""
        return f"{what}  in {seconds_text(self.seconds)}, {rate}{stall}{slowest}{of_rank}"


@click.command(epilog=_EXAMPLE)
@click.argument("root", type=StoredPath())
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=86400),
    callback=finite,
    default=5.0,
    show_default=True,
    metavar="S",
    help="Look again after so many seconds.",
)
@click.option("--once", is_flag=True, help="Print the checkpoints that are there, and end.")
@with_output_options
def watch(*, root: str, interval_s: float, once: bool, access: AccessOptions, as_json: bool) -> int:
    """Print each new checkpoint under ROOT as it commits: a line with its step, size and timings.

    One that replaces another at its path is a new one, too. While the storage fails, the command says so and goes on.

    ROOT may be a root of steps, or a folder of such roots, and need not be there yet. Ends with Ctrl-C and exit code
    130; with --once, prints what is there and ends with exit code 0. With --json, each checkpoint is one object in a
    line of its own; with --once, all are one object.
    """
    store = open_store(root, storage_options=access.storage_options, writer_threads=1)
    commits = CommitWatch(store)
    if once:
        found = [_watched(store, commit) for commit in commits.look()]
        if not found:
            find_checkpoint(root, "latest", Opening(access.storage_options))  # raises with what is there instead
        if as_json:
            print_json({"root": str(store), "checkpoints": found})
        else:
            for item in found:
                _print(item, as_json=False)
        return exit_codes.CORRUPT if any(item.problem for item in found) else exit_codes.FINE
    try:
        commits.begin()
        if not as_json:
            Screen().line(f"watching {store}: {count_text(commits.num_seen, 'checkpoint')} so far", style="bold")
        _watch(store, commits, interval_s=interval_s, as_json=as_json)
    except KeyboardInterrupt:  # the usual way to end this command, so no error is printed
        return exit_codes.INTERRUPTED


def _watch(store: Store, commits: CommitWatch, *, interval_s: float, as_json: bool) -> NoReturn:
    is_failing = False
    while True:
        time.sleep(interval_s)
        try:
            for commit in commits.look():
                _print(_watched(store, commit), as_json=as_json)
        except (StorageError, CheckpointSaveError) as error:  # a store that was there before may be there again
            if not is_failing:
                what = printable(" ".join(error.message.split()))
                click.echo(f"warning: {what}; looking again every {interval_s:g} s", err=True)
            is_failing = True
            continue
        if is_failing:
            click.echo("the storage answers again", err=True)
            is_failing = False


def _print(item: WatchedCheckpoint, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(to_json(item), allow_nan=False))
    else:
        Screen().line(item.line)


def _watched(store: Store, commit: NewCheckpoint) -> WatchedCheckpoint:
    item = commit.checkpoint
    ranks = read_save_records(store, item.folder, item.save_id).ranks if item.save_id else []
    slowest = max(phases_of(ranks), key=lambda phase: phase.max_s, default=None)
    return WatchedCheckpoint(
        path=item.path,
        run=item.folder.rpartition("/")[0] or None,
        step=item.step,
        save_id=item.save_id,
        created_at=item.created_at,
        num_bytes=item.num_bytes,
        num_ranks=item.world_size,
        seconds=max((end_of(record, ranks) for record in ranks), default=None),
        stall_seconds=max((record.seconds["stall"] for record in ranks if "stall" in record.seconds), default=None),
        slowest_phase=slowest and slowest.name,
        slowest_phase_seconds=slowest and slowest.max_s,
        slowest_rank=slowest and slowest.slowest_rank,
        is_replacement=commit.is_replacement,
        problem=item.problem,
    )
