"""Shows the course of a save, for `bcp timeline`: as text, and in the Trace Event Format, which Perfetto
(ui.perfetto.dev) and chrome://tracing open: each rank is a process in it, with as many rows as phases overlap.

The format: "Trace Event Format", Google, https://chromium.googlesource.com/catapult.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Any

from bytecheckpoint.diagnostics.telemetry import (
    Phase,
    PhaseSpan,
    RankRecord,
    RankRow,
    SaveRecords,
    SlowRank,
    first_call,
    last_end,
    rank_rows,
)
from bytecheckpoint.errors import and_more

from ..arguments import Opened
from .number_format import count_text, rate_text, shortened, size_text, time_text
from .terminal import LAST_DROP, NAME_STYLE, Column, Screen, StyledCell, TableShape

_SHADES = " ░▒▓█"
_SHADE_WIDTH = 4
_HEAT = ("", "yellow", "dark_orange", "red", "bold red")
_MAX_NAME = 40
_SHOWN_UNREADABLE = 10
_US = 1e6


def print_timeline(
    screen: Screen,
    opened: Opened,
    records: SaveRecords,
    phases: Sequence[Phase],
    slowest: Sequence[SlowRank],
    *,
    limit: int,
    trace_path: str | None,
) -> None:
    screen.line(opened.path, style="bold")
    if records.ranks:
        _print_header(screen, opened, records)
        screen.section(PHASE_TABLE, phases)
        _print_heat_map(screen, rank_rows(records.ranks, phases, limit), phases, len(records.ranks))
        screen.section(SLOW_TABLE, slowest)
    for item in records.unreadable[:_SHOWN_UNREADABLE]:
        screen.paragraph(f"cannot be understood: {item.name}: {item.what}", style="red")
    screen.rest(len(records.unreadable), _SHOWN_UNREADABLE, " like that: --json lists all")
    if trace_path is not None:
        screen.paragraph(f"trace written to {trace_path}: open it in ui.perfetto.dev or chrome://tracing")


def _print_header(screen: Screen, opened: Opened, records: SaveRecords) -> None:
    ranks = records.ranks
    first = first_call(ranks)
    started = datetime.fromtimestamp(first, UTC)
    info = opened.info
    missing = (info.world_size or 0) - len(ranks)
    hosts = sorted({record.host for record in ranks})
    written = sum(record.num_bytes for record in ranks)
    lasted = last_end(ranks)
    rows = [
        ("called", time_text(started)),
        ("ranks", f"{len(ranks):,}" + (f", {count_text(missing, 'other')} without telemetry" if missing > 0 else "")),
        ("hosts", and_more([shortened(host, _MAX_NAME) for host in hosts], 4)),
        ("written", f"{size_text(written)} in {seconds_text(lasted)} ({rate_text(written, lasted)})"),
    ]
    if info.created_at is not None:
        rows.append(("committed", time_text(info.created_at)))
    screen.fields(rows)


def seconds_text(seconds: float) -> str:
    """Returns `1.23 s`, `45 ms`, `20 µs`."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    # What three digits round up to the next unit is told in that unit: 1e+03 ms is hard to read.
    if seconds >= 0.9995:
        return "1.00 s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


PHASE_TABLE = TableShape(
    [
        Column("phase", style=NAME_STYLE),
        Column("fastest", is_right=True, drop=1),
        Column("median", is_right=True, drop=2),
        Column("slowest", is_right=True),
        Column("on rank", is_right=True),
    ],
    lambda phase: [
        shortened(phase.name, _MAX_NAME),
        *map(seconds_text, (phase.min_s, phase.median_s, phase.max_s)),
        str(phase.slowest_rank),
    ],
)
SLOW_TABLE = TableShape(
    [
        Column("last ranks", is_right=True, style=NAME_STYLE),
        Column("through after", is_right=True, drop=2),
        Column("slow in"),
        Column("for", is_right=True),
        Column("median", is_right=True, drop=1),
        Column("host", drop=LAST_DROP),
    ],
    lambda slow: [
        str(slow.rank),
        seconds_text(slow.end_s),
        "called late" if slow.phase == "start" else shortened(slow.phase, _MAX_NAME),
        seconds_text(slow.phase_s),
        seconds_text(slow.median_s),
        shortened(slow.host, _MAX_NAME),
    ],
)


def _print_heat_map(screen: Screen, rows: Sequence[RankRow], phases: Sequence[Phase], num_ranks: int) -> None:
    by_duration = sorted(range(len(phases)), key=lambda number: phases[number].max_s)
    columns = [
        Column("rank", is_right=True, style=NAME_STYLE),
        *(
            # The shortest phase is the least important one, and the longest stays.
            Column(
                shortened(phase.name, _MAX_NAME),
                is_whole=True,
                drop=0 if number == by_duration[-1] else 2 + by_duration.index(number),
            )
            for number, phase in enumerate(phases)
        ),
        Column("host", drop=1),
    ]
    longest = max((phase.max_s for phase in phases), default=0.0)

    def cells(row: RankRow) -> list[str]:
        return [row.label, *(_cell(seconds, longest) for seconds in row.seconds), shortened(row.host, _MAX_NAME)]

    screen.section(TableShape(columns, cells), rows)
    shared = "; a row shows the slowest of its ranks" if len(rows) < num_ranks else ""
    screen.line(f"  the darker, the longer{shared}", style="dim")


def _cell(seconds: float, longest: float) -> StyledCell:
    share = seconds / longest if longest else 0.0
    level = min(int(share * len(_SHADES)), len(_SHADES) - 1)
    return StyledCell(f"{_SHADES[level] * _SHADE_WIDTH} {seconds_text(seconds):>7}", _HEAT[level])


def chrome_trace(ranks: Sequence[RankRecord], *, path: str) -> dict[str, Any]:
    """Returns the trace of these ranks as JSON. Time 0 is the earliest call of a rank."""
    first = first_call(ranks) if ranks else 0.0
    events = [event for record in ranks for event in _events(record, record.started_at - first)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"checkpoint": path}}


def _events(record: RankRecord, offset_s: float) -> Iterator[dict[str, Any]]:
    name = f"rank {record.rank} ({record.host})"
    yield {"ph": "M", "name": "process_name", "pid": record.rank, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": record.rank, "tid": 0, "args": {"sort_index": record.rank}}
    for lane, span in in_lanes(record.spans):
        yield {
            "ph": "X",
            "cat": "save",
            "name": span.phase,
            "pid": record.rank,
            "tid": lane,
            "ts": round((offset_s + span.start) * _US, 3),
            "dur": round((span.end - span.start) * _US, 3),
            "args": {"seconds": span.end - span.start},
        }


def in_lanes(spans: Sequence[PhaseSpan]) -> list[tuple[int, PhaseSpan]]:
    """Returns each span with its lane, in the order of their starts. A lane is the number of the first row that is free
    when the span starts.
    """
    free: list[int] = []
    in_use: list[tuple[float, int]] = []
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while in_use and in_use[0][0] <= span.start:
            heappush(free, heappop(in_use)[1])
        lane = heappop(free) if free else len(in_use)
        heappush(in_use, (span.end, lane))
        placed.append((lane, span))
    return placed
