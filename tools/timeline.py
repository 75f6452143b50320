"""`bcp timeline`: shows the course of a save."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from bytecheckpoint.diagnostics.telemetry import (
    Phase,
    RankRecord,
    SaveRecords,
    SlowRank,
    first_call,
    last_end,
    phases_of,
    read_save_records,
    slowest_ranks,
)
from bytecheckpoint.errors import CheckpointNotFoundError

from . import exit_codes
from .arguments import (
    AccessOptions,
    LocalFile,
    Opened,
    with_limit_option,
    with_output_options,
    with_step_option,
    write_text,
)
from .completion.param_types import StoredPath
from .render.terminal import Screen, print_json, without
from .render.timeline_text import chrome_trace, print_timeline

_DEFAULT_ROWS = 32

_EXAMPLE = """\b
Example:
  bcp timeline s3://bucket/run --step 1000
  bcp timeline /data/run --trace save.json
"""


@click.command(epilog=_EXAMPLE)
@click.argument("ckpt", type=StoredPath())
@with_step_option()
@click.option(
    "--trace",
    "trace_path",
    type=LocalFile(),
    metavar="FILE",
    help="Also write a trace for ui.perfetto.dev or chrome://tracing to this local file, in place of one there.",
)
@with_limit_option(
    _DEFAULT_ROWS,
    "Print at most this many rows of the heat map, 0 for one a rank. Where there are more ranks, neighbours "
    "share a row, which shows the slowest of them.",
)
@with_output_options
def timeline(
    *,
    ckpt: str,
    trace_path: str | None,
    limit: int,
    access: AccessOptions,
    as_json: bool,
) -> int:
    """Show the save of the checkpoint CKPT: the phases of each rank, and the ranks that the others waited for.

    The source is small files beside the data, which a checkpoint may lack: exit code 3 if there are none, 1 if one
    cannot be decoded, 4 if the storage refuses to read one. Starts of ranks on several machines are as exact as their
    clocks.
    """
    opened = access.open_manifest(ckpt)
    records = read_save_records(opened.store, opened.folder, opened.manifest.save_id)
    if not records.ranks and not records.unreadable:
        raise CheckpointNotFoundError(
            f"{opened.path} has no telemetry: its save wrote none, or it was removed; nothing else is missing",
            kind="missing_file",
            path=opened.path,
        )
    phases = phases_of(records.ranks)
    slowest = slowest_ranks(records.ranks, phases) if records.ranks else []
    if trace_path is not None:
        write_text(trace_path, json.dumps(chrome_trace(records.ranks, path=opened.path)))
    if as_json:
        print_json(_as_json(opened, records, phases, slowest, trace_path))
    else:
        print_timeline(Screen(), opened, records, phases, slowest, limit=limit, trace_path=trace_path)
    return exit_codes.code_of_findings(item.kind for item in records.unreadable)


def _as_json(
    opened: Opened,
    records: SaveRecords,
    phases: Sequence[Phase],
    slowest: Sequence[SlowRank],
    trace_path: str | None,
) -> dict[str, Any]:
    manifest, ranks = opened.manifest, records.ranks
    started_at = first_call(ranks) if ranks else None
    return {
        **opened.as_json(),
        "world_size": opened.info.world_size,
        "started_at": None if started_at is None else datetime.fromtimestamp(started_at, UTC),
        "committed_at": manifest.provenance.get("created_at"),
        "seconds": last_end(ranks) if ranks else None,
        "phases": [without(phase, "by_rank") for phase in phases],
        "slowest": slowest,
        "ranks": [_rank_json(record, started_at or 0.0) for record in ranks],
        "unreadable": records.unreadable,
        "trace": trace_path,
    }


def _rank_json(record: RankRecord, first_s: float) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "host": record.host,
        "start_s": record.started_at - first_s,
        "end_s": record.started_at - first_s + record.end,
        "num_bytes": record.num_bytes,
        "num_files": record.num_files,
        "seconds": record.seconds,
        "spans": [{"phase": span.phase, "start_s": span.start, "end_s": span.end} for span in record.spans],
    }
