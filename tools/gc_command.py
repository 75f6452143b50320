"""`bcp gc`: lists what abandoned saves have left, and removes it with --delete."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import click
from click.core import ParameterSource

from bytecheckpoint.errors import CheckpointError, and_more
from bytecheckpoint.memory_tier.flush import JobInMemory, jobs_in_memory, remove_job
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage import garbage, layout, stage_folder
from bytecheckpoint.storage.garbage import Garbage, Leftover
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.open_store import real_location
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, endpoint_of

from . import exit_codes
from .arguments import AccessOptions, Age, at_home_folder, with_output_options
from .completion.param_types import StoredPath
from .listing.memory import MEMORY_ROOT
from .render.number_format import age_text, count_text, size_text, utc_of
from .render.terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape, print_json, without

_EXAMPLE = """\b
Example:
  bcp gc s3://bucket/run
  bcp gc s3://bucket/run --older-than 6h --delete
  bcp gc s3://bucket/run --local-stage /nvme/stage --delete
"""
_REMOVALS_IN_FLIGHT = 4
_TAKEN = "taken meanwhile"
_ALIVE = {"lives", "young", _TAKEN}
"""States of a job's memory that is not dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageRow:
    """Leftovers of one save in one place."""

    path: str
    """Path of the folder: the root, one below it, or one in the local stage."""
    save_id: str
    num_files: int
    num_uploads: int = 0
    num_bytes: int
    changed_at: datetime | None
    """Time of the last change of any of it; in a local stage, the time when the save began. None if it is not known."""
    is_local: bool = False
    is_dead: bool
    why: str
    """Reason why it is taken for dead or for alive."""
    leftover: Leftover | None = None
    """None for the files in a local stage."""
    is_removed: bool = False


@click.command(name="gc", epilog=_EXAMPLE)
@click.argument("root", type=StoredPath(), required=False)
@click.option("--delete", "is_real", is_flag=True, help="Remove what is dead. Without it, nothing is changed.")
@click.option(
    "--older-than",
    "min_age_s",
    type=Age(),
    default=garbage.MIN_AGE_S,
    metavar="AGE",
    help="Take for alive what has changed within this time: 90m, 24h, 7d. 24h if not given.",
)
@click.option(
    "--save-id",
    "save_ids",
    multiple=True,
    metavar="ID",
    help="Remove or list only what this save has left, whatever its age: you know that it is dead. May be repeated.",
)
@click.option(
    "--local-stage",
    "stage",
    callback=at_home_folder,
    metavar="FOLDER",
    help="Also list what saves to ROOT left in this local stage on this host; `bcp.recover` could finish them.",
)
@click.option(
    "--memory",
    "in_memory",
    is_flag=True,
    help="List the memory of ended jobs on this host instead; of ROOT, or of all.",
)
@MEMORY_ROOT
@with_output_options
def gc(
    *,
    root: str | None,
    is_real: bool,
    min_age_s: float,
    save_ids: Sequence[str],
    stage: str | None,
    in_memory: bool,
    roots: Sequence[str],
    access: AccessOptions,
    as_json: bool,
) -> int:
    """List data files, temporaries and unfinished uploads under ROOT of saves that never committed, and with --delete
    remove what abandoned saves left.

    A save is taken for dead when nothing that it wrote has changed for --older-than. Committed checkpoints are never
    touched, nor is anything that no save of this library has written. With --memory, what ended jobs hold in memory is
    listed, and with --delete removed, committed or not: bring it to storage first with `bcp memory flush`.
    """
    if in_memory and (save_ids or stage is not None):
        # Hazard: ignored, they would leave all ended jobs to be removed, where one save was meant.
        raise click.UsageError("--memory takes all that ended jobs hold: give it without --save-id and --local-stage")
    if in_memory:
        location = None if root is None else real_location(access.open_root(root), "")
        return _gc_memory(roots, location, min_age_s, is_real=is_real, as_json=as_json)
    if root is None:
        raise click.UsageError("give the ROOT of the checkpoints, or --memory")
    if click.get_current_context().get_parameter_source("roots") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--memory-root is for --memory, which was not given")
    if "" in save_ids:
        # Hazard: it would name the temporaries without a save id, those of running saves too.
        raise click.UsageError("--save-id is empty: give the id of a save")
    store = access.open_root(root)
    listing = store.list("")
    found = garbage.find_leftovers(store, "")
    if not listing and not found.found and stage is None:
        layout.find_checkpoint(store, "latest", location=str(store))  # raises: there is nothing at all
    now_s = time.time()
    if is_real and found.found:
        # Times are the storage's, and so must be what they are compared with.
        now_s = clock_of(store) or now_s
    rows = [_row(store, item, now_s, min_age_s, save_ids) for item in found.found]
    if stage is not None:
        rows += _rows_of_stage(store, stage, min_age_s, save_ids)
    rows = [row for row in rows if not save_ids or row.save_id in save_ids]
    rows, failures = _remove(store, stage, rows) if is_real else (rows, [])
    if as_json:
        print_json(_as_json(store, rows, found, failures, is_real=is_real))
    else:
        _print(store, rows, found, failures, is_real=is_real)
    return exit_codes.STORAGE if failures else exit_codes.FINE


def _gc_memory(roots: Sequence[str], location: str | None, min_age_s: float, *, is_real: bool, as_json: bool) -> int:
    """Carries out `--memory`: prints what jobs, also running ones, hold in the memory roots `roots` of this host: the
    job that saves to `location`, or all for None. With `is_real`, removes the memory of jobs without a living process
    whose memory has not changed for `min_age_s`.

    Returns the exit code: STORAGE if the memory of such a job stays because another process has taken it meanwhile: a
    new one of the job, a flush or another gc.
    """
    jobs = [(job, _remove_if_dead(job, min_age_s, is_real=is_real)) for job in jobs_in_memory(roots, location)]
    kept = [job.path for job, state in jobs if state == _TAKEN]
    by = "a process of its job, a flush or another gc"
    failures = [f"{path} has been taken by {by} meanwhile, and was left alone" for path in kept]
    code = exit_codes.STORAGE if failures else exit_codes.FINE
    if as_json:
        shown = [{**job._asdict(), "is_dead": state not in _ALIVE, "state": state} for job, state in jobs]
        print_json({"deleted": is_real and not failures, "jobs": shown, "failures": failures})
        return code
    screen, did = Screen(), "removed" if is_real else "to be removed with --delete"
    counted = [job for job, state in jobs if state == ("removed" if is_real else "dead")]
    size = size_text(sum(job.num_bytes for job in counted))
    screen.line(f"memory: {count_text(len(counted), 'ended job')}, {size}, {did}", style="bold")
    for job, state in jobs:
        screen.line(f"{job.root}: {size_text(job.num_bytes)} in {count_text(job.num_slots, 'slot')} ({state})")
    for failure in failures:
        screen.line(failure, style="red")
    return code


def _remove_if_dead(job: JobInMemory, min_age_s: float, *, is_real: bool) -> str:
    """Removes the memory of a job if it is dead and `is_real`. Returns the state of the memory, in words."""
    if job.num_living:
        return "lives"
    if job.age_s < min_age_s:
        return "young"
    if not is_real:
        return "dead"
    outcome = remove_job(job.path.rpartition("/")[0], job.path)
    return {"removed": "removed", "gone": "removed by another process", "lives": _TAKEN}[outcome]


def _row(store: Store, item: Leftover, now_s: float, min_age_s: float, save_ids: Collection[str]) -> GarbageRow:
    is_named = item.save_id in save_ids
    is_old = item.is_dead(now_s=now_s, min_age_s=min_age_s)
    why = "named" if is_named else "old" if is_old else "age unknown" if item.newest_s is None else "young"
    return GarbageRow(
        path=join_name(str(store), item.folder),
        save_id=item.save_id,
        num_files=len(item.names),
        num_uploads=len(item.uploads),
        num_bytes=item.num_bytes,
        changed_at=None if item.newest_s is None else utc_of(item.newest_s),
        is_dead=is_named or is_old,
        why=why,
        leftover=item,
    )


def _rows_of_stage(store: Store, stage: str, min_age_s: float, save_ids: Collection[str]) -> list[GarbageRow]:
    """Lists the files that saves to this root have left in the local stage. A row is dead if the process of
    its save has ended, which the stage knows for certain, and the save is named or began at least `min_age_s` ago.
    """
    root = str(store)
    below = join_name(root, "x")[:-1]
    rows = []
    for found in stage_folder.scan(stage):
        journal = found.journal
        if (
            journal is None
            or journal.endpoint != endpoint_of(store)
            or not (journal.path == root or journal.path.startswith(below))
        ):
            continue
        is_named = journal.save_id in save_ids
        is_old = time.time() - journal.started_at >= min_age_s
        why = "its process lives" if found.is_alive else "named" if is_named else "old" if is_old else "young"
        rows.append(
            GarbageRow(
                path=join_name(stage, found.name),
                save_id=journal.save_id,
                num_files=len(found.sizes),
                num_bytes=sum(found.sizes.values()),
                changed_at=utc_of(journal.started_at),
                is_local=True,
                is_dead=not found.is_alive and (is_named or is_old),
                why=why,
            )
        )
    return rows


def _remove(store: Store, stage: str | None, rows: Sequence[GarbageRow]) -> tuple[list[GarbageRow], list[str]]:
    """Removes every dead item, even if another item fails. Returns all rows, and messages about dead ones that stay."""

    def remove(item: GarbageRow) -> tuple[GarbageRow, str]:
        if not item.is_dead:
            return item, ""
        try:
            if item.leftover is not None:
                garbage.remove(store, item.leftover)
            elif stage is not None and not stage_folder.remove_all(stage, [item.path.rpartition("/")[2]]):
                return item, f"{item.path} has been taken over by another process meanwhile, and was left alone"
        except CheckpointError as error:
            return item, error.message
        return replace(item, is_removed=True), ""

    done = map_jobs(remove, rows, num_threads=_REMOVALS_IN_FLIGHT)
    return [item for item, _ in done], [failure for _, failure in done if failure]


def _as_json(
    store: Store, rows: Sequence[GarbageRow], found: Garbage, failures: Sequence[str], *, is_real: bool
) -> dict[str, Any]:
    return {
        "root": str(store),
        "deleted": is_real and not failures,
        "leftovers": [{**without(item, "leftover", "removed"), "save_id": item.save_id or None} for item in rows],
        "unreadable": [join_name(str(store), folder) for folder in found.unreadable],
        "uploads_not_looked_for": found.not_looked_for or None,
        "failures": list(failures),
    }


def _print(store: Store, rows: Sequence[GarbageRow], found: Garbage, failures: Sequence[str], *, is_real: bool) -> None:
    screen = Screen()
    counted = [item for item in rows if (item.is_removed if is_real else item.is_dead)]
    size = size_text(sum(item.num_bytes for item in counted))
    did = "removed" if is_real else "to be removed with --delete"
    if rows:
        screen.line(f"{store}: {count_text(len(counted), 'leftover')} of abandoned saves, {size}, {did}", style="bold")
        screen.section(_table(str(store)), rows)
    else:
        screen.line(f"{store}: nothing is left of saves that did not commit", style="bold green")
    if num_others := sum(not item.is_dead for item in rows):
        what = f"{count_text(num_others, 'leftover')} of saves that may still run"
        screen.paragraph(f"{what}: --older-than AGE or --save-id ID decides which are dead.")
    if found.unreadable:
        screen.line()
        shown = and_more([folder or "." for folder in found.unreadable], 10)
        screen.line(f"not looked at, because the manifest there is damaged: {shown}", style="yellow")
    if found.not_looked_for:
        screen.paragraph(f"unfinished uploads were not looked for: {found.not_looked_for}", style="yellow")
    for failure in failures:
        screen.line(failure, style="red")


def _table(root: str) -> TableShape:
    now = datetime.now(UTC)
    columns = [
        Column("save id", style=NAME_STYLE, is_whole=True),
        Column("size", is_right=True),
        Column("files", is_right=True, drop=2),
        Column("uploads", is_right=True, drop=1),
        Column("last change", is_whole=True, drop=3),
        Column("folder", style="dim", drop=LAST_DROP),
        Column("state"),
    ]

    def cells(item: GarbageRow) -> list[str]:
        state = "removed" if item.is_removed else "dead" if item.is_dead else "alive?"
        return [
            item.save_id or "-",
            size_text(item.num_bytes),
            count_text(item.num_files),
            count_text(item.num_uploads),
            age_text(item.changed_at, now),
            item.path if item.is_local else item.path.removeprefix(root).strip("/") or ".",
            f"{state} ({item.why})",
        ]

    return TableShape(columns, cells)
