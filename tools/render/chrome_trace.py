"""Writes the phases of a save in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a
process a rank, and in it as many rows as phases overlap.

The format: "Trace Event Format", Google, https://chromium.googlesource.com/catapult.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bytecheckpoint.diagnostics.phase_summary import first_call
from bytecheckpoint.diagnostics.telemetry_records import PhaseSpan, RankRecord

_US = 1e6


def chrome_trace(ranks: Sequence[RankRecord], *, path: str) -> dict[str, Any]:
    """Returns the trace of these ranks as JSON. Time 0 is the call of the first of them."""
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
    """Returns the spans by start, each with the first row that is free at its start."""
    ends: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lane = next((number for number, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        placed.append((lane, span))
    return placed
