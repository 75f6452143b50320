"""`bcp keep`: shows which checkpoints of a root policies keep, and deletes the others with --delete."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple, cast

import click

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    and_more,
)
from bytecheckpoint.manager import keep_policies, retention, step_records
from bytecheckpoint.manager.step_info import StepInfo
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

from . import exit_codes
from .arguments import AccessOptions, Age, with_output_options
from .completion.param_types import StoredPath
from .render.metric_columns import MetricColumns
from .render.number_format import age_text, count_text, size_text, time_text, utc_of
from .render.terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape, print_json, without

_LOOKS_IN_FLIGHT = 8
_BEST = re.compile(r"(?P<metric>[^:]+|.+(?=:(?:min|max)(?::\d+)?\Z))(?::(?P<mode>min|max)(?::(?P<n>\d{1,9}))?)?")
_EXAMPLE = """\b
Example:
  bcp keep s3://bucket/run --latest 3 --every 1000
  bcp keep s3://bucket/run --latest 3 --best val_loss:min:2 --delete
"""


class BestParam(click.ParamType[keep_policies.Best]):
    """A metric by which checkpoints are best: `val_loss`, `val_loss:min`, `accuracy:max:3`."""

    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> keep_policies.Best:
        found = _BEST.fullmatch(str(value))
        n = int((found and found["n"]) or 1)
        if found is None or n < 1:
            self.fail(f"{value!r} is no metric: give val_loss, val_loss:min or accuracy:max:3", param, ctx)
        return keep_policies.Best(n, found["metric"], "max" if found["mode"] == "max" else "min")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRow:
    """A checkpoint, and the decision about it."""

    path: str
    step: int
    created_at: datetime | None
    num_bytes: int
    """Bytes of its data files; of one that is not kept, only of those that go with it."""
    metrics: Mapping[str, float]
    is_pinned: bool
    is_abandoned: bool
    is_kept: bool
    why: str
    """All reasons that keep it, with commas; `no policy keeps it` if there are none."""
    is_deleted: bool = False
    info: StepInfo


class Deletions(NamedTuple):
    """Result of deleting checkpoints: all rows, also the kept ones, and messages about failures."""

    rows: list[DecidedRow]
    num_finished: int = 0
    """Number of the deletions that another process had begun and this one has finished."""
    failures: Sequence[str] = ()

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows if row.is_deleted)


@click.command(epilog=_EXAMPLE)
@click.argument("root", type=StoredPath())
@click.option("--latest", type=click.IntRange(min=1), metavar="N", help="Keep the newest N.")
@click.option("--every", type=click.IntRange(min=1), metavar="N", help="Keep the steps that N divides.")
@click.option(
    "--best",
    type=BestParam(),
    multiple=True,
    metavar="METRIC:MODE:N",
    help="Keep the N with the lowest (min) or highest (max) value of this metric; NaN is the worst. min and 1 if not "
    "given. May be repeated.",
)
@click.option("--within", type=Age(), metavar="AGE", help="Keep what was committed within this time: 90m, 24h, 7d.")
@click.option("--delete", "is_real", is_flag=True, help="Delete what is not kept. Without it, nothing is changed.")
@with_output_options
def keep(
    *,
    root: str,
    latest: int | None,
    every: int | None,
    best: Sequence[keep_policies.Best],
    within: float | None,
    is_real: bool,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Show which steps under ROOT stay, and why, by the policies of the options; with --delete delete the others.

    A step stays if one of the options keeps it. The newest, pinned and leased ones always stay, and so does whatever
    no save of this library has written.
    """
    policy = _policy(latest, every, best, within)
    store = access.open_root(root)
    stored, unreadable = _steps(store, best)
    now = (clock_of(store) if is_real else None) or time.time()
    rows, incomplete = _decide(store, policy, stored, now=now)
    unreadable = sorted(unreadable + incomplete)
    result = _delete(store, rows, now=now) if is_real else Deletions(rows)
    if as_json:
        print_json(_as_json(store, policy, result, unreadable, is_real=is_real))
    else:
        _print(store, result, unreadable, best, is_real=is_real)
    return exit_codes.STORAGE if result.failures else exit_codes.FINE


def _policy(
    latest: int | None, every: int | None, best: Sequence[keep_policies.Best], within: float | None
) -> keep_policies.KeepPolicy:
    if within == 0:
        raise click.UsageError("--within 0 keeps nothing: give 90m, 24h, 7d, or a number of seconds")
    given: list[Any] = [keep_policies.Latest(latest)] if latest else []
    given += [keep_policies.EverySteps(every)] if every else []
    given += best
    given += [keep_policies.Within(within)] if within else []
    if not given:
        raise click.UsageError("nothing says what to keep: give --latest, --every, --best, --within, or several")
    return cast("keep_policies.KeepPolicy", reduce(or_, given))


def _steps(store: Store, best: Sequence[keep_policies.Best]) -> tuple[list[StoredStep], list[str]]:
    """Returns the committed steps whose manifest can be read, and the folders of the others; at least one of either.

    Raises CheckpointNotFoundError, and CheckpointMismatchError (conflict) for a root that is one checkpoint, and for a
    metric that no step has: it may be misspelt, and the best ones would be deleted.
    """
    damaged: list[int] = []
    stored = step_records.list_steps(store, reads_manifests=True, on_damaged=lambda step, _: damaged.append(step))
    if not stored and not layout.find_checkpoint(store, "latest", location=str(store)):
        what = f"{store} is one checkpoint, not a root of steps, and stays as it is: `bcp rm` deletes one checkpoint"
        raise CheckpointMismatchError(what, kind="conflict", path=str(store))
    metrics = sorted({name for item in stored for name in item.info.metrics})
    unknown = [policy.metric for policy in best if policy.metric not in metrics]
    if unknown:
        have = f"they have {and_more(metrics, 10)}" if metrics else "they have no metrics at all"
        what = f"no checkpoint under {store} has the metric {unknown[0]!r}, {have}; nothing was changed: check its name"
        raise CheckpointMismatchError(what, kind="conflict", path=str(store))
    return stored, [layout.step_folder(step) for step in sorted(damaged)]


def _decide(
    store: Store, policy: keep_policies.KeepPolicy, stored: Sequence[StoredStep], *, now: float
) -> tuple[list[DecidedRow], list[str]]:
    """Returns a row for each step that is whole, and the folders of those of which data is missing: such a step must
    not stay in the place of a good one. A step whose files a link reads stays if the link stays.
    """
    complete: set[int] = set()
    incomplete: list[str] = []
    linked: dict[int, str] = {}
    while True:
        held = linked | retention.held_by_leases(stored, now=now)
        infos, num_abandoned = [item.info for item in stored], sum(item.is_abandoned for item in stored)
        decided = retention.decide(policy, infos, num_abandoned=num_abandoned, now=now, held=held)
        kept = [decision.step for decision in decided if decision.is_kept and decision.step not in complete]
        looks = map_jobs(partial(_linked_if_complete, store), kept, num_threads=_LOOKS_IN_FLIGHT)
        lost = {step for step, folder in zip(kept, looks, strict=True) if folder is None}
        by_folder = {layout.step_folder(item.info.step): item.info.step for item in stored}
        found = {
            by_folder.get(folder or ""): f"step {step} links to it" for step, folder in zip(kept, looks, strict=True)
        }
        targets = {step: why for step, why in found.items() if step is not None and step not in linked}
        linked |= targets
        if not lost and not targets:
            pairs = list(zip(stored, decided, strict=True))
            return map_jobs(lambda pair: _row(store, *pair), pairs, num_threads=_LOOKS_IN_FLIGHT), incomplete
        complete.update(set(kept) - lost)
        incomplete += map(layout.step_folder, sorted(lost))
        stored = [item for item in stored if item.info.step not in lost]


def _linked_if_complete(store: Store, step: int) -> str | None:
    """Returns the folder inside the root in which the files of a link lie, "" for any other step; None if the
    manifest or a data file is missing or damaged. The files of a link out of the root are not looked at.
    """
    folder = layout.step_folder(step)
    try:
        manifest = layout.read_manifest(store, folder)
        inside = _inside(store, manifest.linked_to)
        is_here = inside or not manifest.linked_to
        layout.check_files(store, inside or folder, manifest, range(len(manifest.files)) if is_here else ())
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return None
    return inside


def _inside(store: Store, location: str) -> str:
    """Returns the name inside the root of what a manifest links to; empty if it is not below the root."""
    root = f"{store}/"
    return location.removeprefix(root) if location.startswith(root) else ""


def _own_bytes(store: Store, step: int) -> int:
    """Returns the bytes of the data files that a deletion of a step frees; 0 if the step is gone or damaged."""
    folder = layout.step_folder(step)
    try:
        manifest = layout.read_manifest(store, folder)
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return 0
    own = set(deletion.written_files(store, folder, manifest))
    return sum(file.byte_length for file in manifest.files if file.name in own)


def _row(store: Store, item: StoredStep, decision: retention.StepDecision) -> DecidedRow:
    info = item.info
    return DecidedRow(
        path=join_name(str(store), layout.step_folder(info.step)),
        step=info.step,
        created_at=utc_of(info.time) if info.time else None,
        num_bytes=info.num_bytes if decision.is_kept else _own_bytes(store, info.step),
        metrics=info.metrics,
        is_pinned=info.pinned,
        is_abandoned=item.is_abandoned,
        is_kept=decision.is_kept,
        why=decision.why,
        info=info,
    )


def _delete(store: Store, rows: Sequence[DecidedRow], *, now: float) -> Deletions:
    """Finishes the deletions that other processes began, then deletes every checkpoint that is not kept, even if
    another deletion fails. One that was pinned or leased since, or is damaged, stays. Raises click.Abort for Ctrl-C.
    """
    done, failures, num_finished = list(rows), list[str](), 0
    try:
        num_finished = retention.finish_deletions(store, now=now)
    except CheckpointError as error:
        failures.append(error.message)
    try:
        for number, row in enumerate(rows):
            if row.is_kept:
                continue
            try:
                stays = retention.delete_steps(store, [row.info], now=now)
            except CheckpointError as error:
                failures.append(f"step {row.step}: {error.message}")
            else:
                why = stays.get(row.step, row.why)
                done[number] = replace(row, is_kept=bool(stays), is_deleted=not stays, why=why)
    except KeyboardInterrupt:
        deleted = count_text(sum(row.is_deleted for row in done), "checkpoint")
        raise click.Abort(f"{deleted} of those to delete are gone; the same command deletes the rest") from None
    return Deletions(done, num_finished, failures)


def _as_json(
    store: Store, policy: keep_policies.KeepPolicy, result: Deletions, unreadable: Sequence[str], *, is_real: bool
) -> dict[str, Any]:
    return {
        "root": str(store),
        "policy": repr(policy),
        "deleted": is_real,
        "deleted_num_bytes": result.num_bytes,
        "num_finished": result.num_finished,
        "checkpoints": [without(row, "info") for row in result.rows],
        "unreadable": [join_name(str(store), folder) for folder in unreadable],
        "failures": list(result.failures),
    }


def _print(
    store: Store,
    result: Deletions,
    unreadable: Sequence[str],
    best: Sequence[keep_policies.Best],
    *,
    is_real: bool,
) -> None:
    screen = Screen()
    to_delete = [row for row in result.rows if not row.is_kept and (row.is_deleted or not is_real)]
    size = size_text(sum(row.num_bytes for row in to_delete))
    did = "deleted" if is_real else "to be deleted with --delete"
    num_kept = sum(row.is_kept for row in result.rows)
    screen.line(f"{store}: {num_kept} kept; {count_text(len(to_delete), 'checkpoint')}, {size}, {did}", style="bold")
    first = [policy.metric for policy in best]
    metrics = MetricColumns.of([row.metrics for row in result.rows], first=first)
    screen.section(_table(metrics, is_real=is_real), result.rows)
    metrics.print_rest(screen)
    if result.num_finished:
        count = count_text(result.num_finished, "deletion")
        screen.paragraph(f"{count} that an earlier process had begun: finished")
    if unreadable:
        shown = and_more(unreadable, 10)
        screen.paragraph(
            f"left as they are, and not counted, because their manifest is damaged or data is missing: {shown}",
            style="yellow",
        )
    for failure in result.failures:
        screen.paragraph(f"not deleted: {failure}", style="red")


def _table(metrics: MetricColumns, *, is_real: bool) -> TableShape:
    now = datetime.now(UTC)
    columns = [
        Column("step", is_right=True, style=NAME_STYLE),
        Column("saved", is_whole=True, drop=1),
        Column("age", is_whole=True, drop=2),
        Column("size", is_right=True, drop=LAST_DROP),
        *metrics.columns,
        Column("", is_whole=True),
        Column("why"),
    ]

    def cells(row: DecidedRow) -> list[str]:
        gone = "deleted" if row.is_deleted else "not kept" if is_real else "goes"
        return [
            str(row.step),
            time_text(row.created_at),
            age_text(row.created_at, now),
            size_text(row.num_bytes),
            *metrics.cells(row.metrics),
            "kept" if row.is_kept else gone,
            f"abandoned; {row.why}" if row.is_abandoned else row.why,
        ]

    return TableShape(columns, cells)
