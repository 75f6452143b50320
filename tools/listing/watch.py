"""`bcp watch`: prints checkpoints as they commit."""

from __future__ import annotations

import json
import time
from typing import NoReturn

import click

from bytecheckpoint.errors import CheckpointNotFoundError, CheckpointSaveError, StorageError
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint
from bytecheckpoint.storage.store import Store

from .. import exit_codes
from ..arguments import AccessOptions, finite, with_output_options
from ..completion.param_types import StoredPath
from ..render.number_format import count_text
from ..render.terminal import Screen, print_json, printable, to_json
from .commits import CommitWatch
from .timings import TimedCheckpoint, with_timings

_EXAMPLE = """\b
Example:
  bcp watch s3://bucket/run --interval 30
  bcp watch /data/run --once --json
"""


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

    One that replaces another at its path is a new one, too: each look compares the newest 8, and 8 others in turn.
    If the storage fails later, a warning says so and the command goes on.

    ROOT may be a root of steps, or a folder of such roots, and need not be there yet. Ends with Ctrl-C and exit code
    130; with --once, prints what is there and ends with exit code 0, 1 if a checkpoint is damaged, 3 if there is none.
    With --json, each checkpoint is one object in a line of its own; with --once, all are one object.
    """
    store = access.open_root(root)
    commits = CommitWatch(store)
    if once:
        found = [
            with_timings(store, commit.checkpoint, is_replacement=commit.is_replacement) for commit in commits.look()
        ]
        if not found:
            _refuse_foreign(access.find(root))  # or raises what is there
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


def _refuse_foreign(found: FoundCheckpoint) -> None:
    if found.foreign is not None:
        what = f"{found.path} is a checkpoint of {found.foreign.format}: only those that this library saves are watched"
        raise CheckpointNotFoundError(f"{what}; `bcp ls` lists the others", kind="not_found", path=found.path)


def _watch(store: Store, commits: CommitWatch, *, interval_s: float, as_json: bool) -> NoReturn:
    is_failing, tried = False, ""
    while True:
        time.sleep(interval_s)
        try:
            for commit in commits.look():
                item = commit.checkpoint
                # Hazard: telemetry that can never be listed would hold up all later checkpoints.
                is_last_try, tried = tried == item.path, item.path
                timed = with_timings(store, item, is_replacement=commit.is_replacement, is_last_try=is_last_try)
                _print(timed, as_json=as_json)
                tried = ""
        except (StorageError, CheckpointSaveError) as error:  # a store that was there before may be there again
            if not is_failing:
                what = printable(" ".join(error.message.split()))
                click.echo(f"warning: {what}; looking again every {interval_s:g} s", err=True)
            is_failing = True
            continue
        if is_failing:
            click.echo("the storage answers again", err=True)
            is_failing = False


def _print(item: TimedCheckpoint, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(to_json(item), allow_nan=False))
    else:
        Screen().line(item.line)
