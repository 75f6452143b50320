"""`bcp ls`: lists checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import click

from bytecheckpoint.errors import CheckpointNotFoundError, and_more
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name

from .. import exit_codes
from ..analysis.checkpoint_list import CheckpointList, ListedCheckpoint, list_checkpoints, read_sole
from ..arguments import AccessOptions, with_limit_option, with_output_options
from ..completion.param_types import StoredPath
from ..render.number_format import count_text, size_text
from ..render.terminal import Screen, print_json, without
from .ls_table import COLUMN_NAMES, ListColumn, named_columns, print_table, sort_rows

_EXAMPLE = """\b
Example:
  bcp ls s3://bucket/run
  bcp ls /data/runs --sort size --reverse --limit 10
  bcp ls /data/run --columns step,val_loss,saved
"""


@click.command(epilog=_EXAMPLE)
@click.argument("root", type=StoredPath())
@click.option(
    "--columns",
    callback=lambda _, __, text: [name.strip() for name in text.split(",")] if text else [],
    metavar="NAME,...",
    help=f"Show these columns, in this order: {', '.join(COLUMN_NAMES)}, or names of metrics.",
)
@click.option("--sort", metavar="NAME", help="Sort each table by this column or metric; rows without a value are last.")
@click.option("--reverse", is_flag=True, help="With --sort: begin with the largest, or the newest.")
@with_limit_option(0, "Print at most this many rows of each table; 0 for all.")
@with_output_options
def ls(
    *,
    root: str,
    columns: Sequence[str],
    sort: str | None,
    reverse: bool,
    limit: int,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """List the checkpoints under ROOT, or the one that ROOT is: step, size, age, tensors, number of ranks,
    metrics, pins.

    ROOT may also be a folder of runs: checkpoints in folders of ROOT that are no checkpoints themselves are listed too,
    and none deeper. Folders of saves that did not finish, or are still being written, are listed as not committed. Only
    manifests are read, and the small objects beside them. Exit code 1 if a checkpoint is damaged.
    """
    if reverse and not sort:
        raise click.UsageError("--reverse is for --sort NAME")
    store = access.open_root(root)
    listing = CheckpointList([], [])
    with suppress(CheckpointNotFoundError):  # a file may be a checkpoint too
        listing = list_checkpoints(store)
    if not listing.checkpoints:
        sole = access.find(root)  # or raises with what is there instead
        listing = CheckpointList([read_sole(sole)], listing.not_listed)
    if sort:
        in_order = sort_rows(listing.checkpoints, sort, is_reversed=reverse)
        by_run = _by_run(in_order)
        listing = listing._replace(checkpoints=[item for run in _by_run(listing.checkpoints) for item in by_run[run]])
    found = listing.checkpoints
    named = named_columns(found, columns)
    if as_json:
        print_json(
            {
                "root": str(store),
                "warning": _mixed_root_warning(found),
                "checkpoints": [{**without(item, "folder", "refused"), "run": item.run or None} for item in found],
                "not_listed": [join_name(str(store), folder) for folder in listing.not_listed],
            }
        )
    else:
        _print(str(store), listing, named, limit=limit)
    return exit_codes.CORRUPT if any(item.is_damaged for item in found) else exit_codes.FINE


def _mixed_root_warning(found: Sequence[ListedCheckpoint]) -> str | None:
    """Returns a warning about the first root or run that is a checkpoint and has steps below it; None without any."""
    own = [item for item in found if item.committed and item.format == OWN_FORMAT]
    steps_below: dict[str, list[int | None]] = {}
    for item in own:
        parent, _, name = item.folder.rpartition("/")
        if layout.parse_step(name) is not None:
            steps_below.setdefault(parent, []).append(item.step)
    for item in own:
        steps = steps_below.get(item.folder)
        if steps:
            return (
                f"{item.path} is a checkpoint and has committed steps below it: load and the other commands ask for "
                f"--step none or --step {steps[-1]}. Move one of the two to a path of its own."
            )
    return None


def _print(root: str, listing: CheckpointList, named: Sequence[ListColumn], *, limit: int) -> None:
    screen = Screen()
    found = listing.checkpoints
    screen.line(f"{root}: {_totals(found)}", style="bold")
    now = datetime.now(UTC)
    for run, of_run in _by_run(found).items():
        screen.line()
        if run:
            screen.line(f"{run}: {_totals(of_run)}")
        print_table(screen, of_run, named, now, limit=limit)
    for item in found:
        if item.problem:
            screen.paragraph(item.problem, style="red" if item.is_damaged else "yellow")
    warning = _mixed_root_warning(found)
    if warning:
        screen.paragraph(warning, style="yellow")
    if listing.not_listed:
        shown = and_more(listing.not_listed, 10)
        screen.paragraph(f"not looked into: {shown}: give one of them as ROOT", style="yellow")


def _by_run(found: Sequence[ListedCheckpoint]) -> dict[str, list[ListedCheckpoint]]:
    by_run: dict[str, list[ListedCheckpoint]] = {}
    for item in found:
        by_run.setdefault(item.run, []).append(item)
    return by_run


def _totals(found: Sequence[ListedCheckpoint]) -> str:
    committed = [item for item in found if item.committed]
    uncommitted = f" and {len(found) - len(committed)} not committed" if len(committed) < len(found) else ""
    total = size_text(sum(item.num_bytes for item in found))
    return f"{count_text(len(committed), 'checkpoint')}{uncommitted}, {total}"
