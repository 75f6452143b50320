"""Draws the course of a save as SVG: the phases of each rank, when and how long."""

from __future__ import annotations

from collections.abc import Sequence

from bytecheckpoint.diagnostics.telemetry import Phase, RankRecord, RankRow, first_call, last_end, rank_rows

from ..number_format import shortened
from ..timeline_text import in_lanes, seconds_text
from .elements import color, fitted
from .layout_charts import WIDTH, label, rect, svg
from .scales import round_ticks
from .treemap import Box

_LEFT = 90.0
"""Width of the names of rows."""
_AXIS_HEIGHT = 20.0
_TOP = 4.0
_MAX_ROWS = 64
_MAX_COLUMNS = 256
_MAX_SPANS = 200
"""Largest number of spans of a row: the longest ones are drawn."""
_CELL_HEIGHT = 26.0
_MAX_TICKS = 8


def gantt(ranks: Sequence[RankRecord], phases: Sequence[Phase]) -> str:
    """Draws ranks down, time across. Of more than 64 ranks, neighbours share a row, which shows the slowest of them."""
    rows = rank_rows(ranks, phases, _MAX_ROWS)
    row_height = 18.0 if len(rows) <= 32 else 10.0
    height = _TOP + row_height * len(rows) + _AXIS_HEIGHT
    first, last = first_call(ranks), last_end(ranks) or 1e-9
    scale = (WIDTH - _LEFT) / last
    colors = {phase.name: color(number) for number, phase in enumerate(phases)}
    parts = _ticks(last, scale, height)
    for number, row in enumerate(rows):
        y = _TOP + number * row_height
        parts.append(label(0.0, y + row_height - 3, fitted(row.label, _LEFT - 6), "small"))
        parts += _bars(row, colors, Box(_LEFT + (row.slowest.started_at - first) * scale, y, scale, row_height - 1))
    return svg(WIDTH, height, "when each rank was in which phase", *parts)


def _ticks(last: float, scale: float, height: float) -> list[str]:
    parts = []
    for seconds in round_ticks(0.0, last, max_ticks=_MAX_TICKS):
        x = _LEFT + seconds * scale
        shown = seconds_text(seconds) if seconds else "0"
        parts.append(rect(Box(x, 0.0, 1.0, height - _AXIS_HEIGHT), "currentColor", [shown], "tick"))
        at_end = x + 40 > WIDTH
        parts.append(label(x, height - 5, shown, "small end" if at_end else "small"))
    return parts


def _bars(row: RankRow, colors: dict[str, str], box: Box) -> list[str]:
    """Draws the longest 200 spans of the slowest rank of a row. The box begins at the call of that rank, and its width
    is that of one second.
    """
    longest = sorted(row.slowest.spans, key=lambda span: span.start - span.end)[:_MAX_SPANS]
    placed = in_lanes(longest)
    num_lanes = 1 + max((lane for lane, _ in placed), default=0)
    parts = []
    for lane, span in placed:
        of_span = Box(
            box.x + span.start * box.width,
            box.y + box.height * lane / num_lanes,
            (span.end - span.start) * box.width,
            box.height / num_lanes,
        )
        lines = [
            f"rank {row.slowest.rank} on {shortened(row.slowest.host, 40)}",
            f"{shortened(span.phase, 40)}: {seconds_text(span.end - span.start)}",
        ]
        parts.append(rect(of_span, colors.get(span.phase, "gray"), lines))
    return parts


def heat_map(ranks: Sequence[RankRecord], phases: Sequence[Phase]) -> str:
    """Draws phases down, ranks across, the darker the longer. Of more than 256 ranks, neighbours share a column, which
    shows the longest time of any of them.
    """
    columns = rank_rows(ranks, phases, _MAX_COLUMNS)
    width = (WIDTH - _LEFT) / len(columns)
    height = _CELL_HEIGHT * len(phases) + _AXIS_HEIGHT
    longest = max(phase.max_s for phase in phases)
    parts = []
    for number, phase in enumerate(phases):
        y = number * _CELL_HEIGHT
        parts.append(label(0.0, y + 17, fitted(phase.name, _LEFT - 6), "small"))
        for position, column in enumerate(columns):
            seconds = column.seconds[number]
            share = seconds / longest if longest else 0.0
            lines = [f"rank {column.label}", f"{shortened(phase.name, 40)}: {seconds_text(seconds)}"]
            box = Box(_LEFT + position * width, y, width, _CELL_HEIGHT - 1)
            parts.append(rect(box, f"hsl(14 85% {round(94 - 54 * share)}%)", lines))
    stride = -(-len(columns) // 16)
    parts += [
        label(_LEFT + position * width, height - 5, columns[position].label.partition("-")[0], "small")
        for position in range(0, len(columns), stride)
    ]
    return svg(WIDTH, height, "how long each rank was in each phase", *parts)
