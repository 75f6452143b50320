"""`bcp ls`: lists checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import click

from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, Opening, find_checkpoint
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import join_name

from . import exit_codes
from .analysis.checkpoint_list import CheckpointList, ListedCheckpoint, list_checkpoints, read_checkpoint
from .arguments import AccessOptions, with_output_options
from .render.metric_columns import MetricColumns
from .render.number_format import age_text, count_text, size_text, some_of, time_text
from .render.terminal import LAST_DROP, Column, Screen, print_json, without

_NOT_COMMITTED = "not committed"
_COLUMNS_BEFORE_METRICS = [
    Column("step", is_right=True, style="bold cyan"),
    Column("size", is_right=True),
    Column("saved", is_whole=True, drop=4),
    Column("age", is_whole=True, drop=1),
    Column("tensors", is_right=True, drop=2),
    Column("ranks", is_right=True, drop=3),
]
_COLUMNS_AFTER_METRICS = [
    Column("folder", style="dim", drop=LAST_DROP),
    Column("state", is_whole=True),
]

_EXAMPLE = """\b
Example:
  bcp ls s3://bucket/run
  bcp ls /data/run --json
"""


@click.command(epilog=_EXAMPLE)
@click.argument("root")
@with_output_options
def ls(*, root: str, access: AccessOptions, as_json: bool) -> int:
    """Lists the checkpoints under ROOT, or the one that ROOT is: step, size, age, tensors, number of ranks,
    metrics, pins.

    ROOT may also be a folder of runs: folders that are not checkpoints are listed, and no deeper. Folders of saves that
    did not finish, or are still being written, are listed as not committed. Only manifests are read, and
    the small objects beside them. Exit code 1 if a manifest is damaged.
    """
    store = open_store(root, storage_options=access.storage_options, writer_threads=1)
    listing = CheckpointList([], [])
    with suppress(CheckpointNotFoundError):  # a file may be a checkpoint too
        listing = list_checkpoints(store)
    if not listing.checkpoints:
        alone = find_checkpoint(root, "latest", Opening(access.storage_options))  # or raises with what is there instead
        listing = CheckpointList([read_checkpoint(alone, None) or _gone(alone)], listing.not_listed)
    found = listing.checkpoints
    if as_json:
        print_json(
            {
                "root": str(store),
                "warning": _mixed(found),
                "checkpoints": [{**without(item, "folder", "refused"), "run": item.run or None} for item in found],
                "not_listed": [join_name(str(store), folder) for folder in listing.not_listed],
            }
        )
    else:
        _print(str(store), listing)
    is_damaged = any(item.problem and not item.is_refused for item in found)
    return exit_codes.CORRUPT if is_damaged else exit_codes.FINE


def _mixed(found: Sequence[ListedCheckpoint]) -> str | None:
    """Returns the warning for a root, or a run, that is a checkpoint and has steps below it."""
    own = [item for item in found if item.committed and item.format == OWN_FORMAT]
    for item in own:
        beside = [other for other in own if other.folder.rpartition("/")[0] == item.folder != other.folder]
        steps = [other.step for other in beside if layout.parse_step(other.folder.rpartition("/")[2]) is not None]
        if steps:
            return (
                f"{item.path} is a checkpoint and has committed steps below it: load and the other commands ask for "
                f"--step none or --step {steps[-1]}. Move one of the two to a path of its own."
            )
    return None


def _gone(found: FoundCheckpoint) -> ListedCheckpoint:
    raise CheckpointNotFoundError(
        f"{found.path} was there and is gone, or a file of it is", kind="not_found", path=found.path
    )


def _print(root: str, listing: CheckpointList) -> None:
    screen = Screen()
    found = listing.checkpoints
    screen.line(f"{root}: {_totals(found)}", style="bold")
    now = datetime.now(UTC)
    for run in dict.fromkeys(item.run for item in found):
        of_run = [item for item in found if item.run == run]
        screen.line()
        if run:
            screen.line(f"{run}: {_totals(of_run)}")
        metrics = MetricColumns.of([item.metrics for item in of_run])
        columns = [*_COLUMNS_BEFORE_METRICS, *metrics.columns, *_COLUMNS_AFTER_METRICS]
        screen.table(columns, [_row(item, metrics, now) for item in of_run])
        metrics.print_rest(screen)
    for item in found:
        if item.problem:
            screen.paragraph(item.problem, style="yellow" if item.is_refused else "red")
    warning = _mixed(found)
    if warning:
        screen.paragraph(warning, style="yellow")
    if listing.not_listed:
        shown = some_of(listing.not_listed, 10)
        screen.paragraph(f"not looked into: {shown}: give one of them as ROOT", style="yellow")


def _totals(found: Sequence[ListedCheckpoint]) -> str:
    committed = [item for item in found if item.committed]
    rest = f", {len(found) - len(committed)} not committed" if len(committed) < len(found) else ""
    total = size_text(sum(item.num_bytes for item in found))
    return f"{count_text(len(committed), 'checkpoint')}{rest}, {total}"


def _state(item: ListedCheckpoint) -> str:
    if not item.committed:
        return _NOT_COMMITTED
    if item.is_pinned or item.leased_until:
        return "pinned" if item.is_pinned else "leased"
    return "committed" if item.format == OWN_FORMAT else item.format


def _row(item: ListedCheckpoint, metrics: MetricColumns, now: datetime) -> list[str]:
    state = "refused" if item.is_refused else "damaged" if item.problem else _state(item)
    return [
        "-" if item.step is None else str(item.step),
        "-" if item.problem else size_text(item.num_bytes),
        time_text(item.created_at),
        age_text(item.created_at, now),
        "-" if item.num_tensors is None else count_text(item.num_tensors),
        "-" if item.world_size is None else count_text(item.world_size),
        *metrics.cells(item.metrics),
        item.name or ".",
        state,
    ]
