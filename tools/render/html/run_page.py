"""Makes the page of `bcp report`: the checkpoints of a run, or of several, over their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from ...analysis.checkpoint_list import ListedCheckpoint
from ..metric_columns import MetricColumns, metric_text
from ..number_format import count_text, rate_text, size_text, time_text
from ..terminal import Column, TableShape
from ..timeline_text import seconds_text
from .elements import tag, text
from .line_chart import Curve, line_chart
from .page import legend, listing, note, note_of_rest, section, whole_page

if TYPE_CHECKING:
    from ...listing.timings import TimedCheckpoint

_MAX_ROWS = 2000
_MAX_CHARTS = 24


class RunRow(NamedTuple):
    """A committed checkpoint and its save."""

    item: ListedCheckpoint
    timings: TimedCheckpoint

    @property
    def rate(self) -> float | None:
        """Bytes a second; None if the times are not known."""
        return self.item.num_bytes / self.timings.seconds if self.timings.seconds else None


_Value = Callable[[RunRow], float | None]


def run_page(root: str, rows: Sequence[RunRow]) -> str:
    made = f"this page was made {time_text(datetime.now(UTC))}"
    heading = (tag("h1", {}, text(root)), note(f"{_totals(rows)}; {made}"))
    return whole_page(f"{root}, {count_text(len(rows), 'checkpoint')}", *heading, *_sections(rows))


def _totals(rows: Sequence[RunRow]) -> str:
    times = sorted(row.item.created_at for row in rows if row.item.created_at)
    span = f", saved {time_text(times[0])} to {time_text(times[-1])}" if times else ""
    size = size_text(sum(row.item.num_bytes for row in rows))
    return f"{count_text(len(rows), 'checkpoint')}, {size}{span}"


def _sections(rows: Sequence[RunRow]) -> Iterator[str]:
    runs = _by_run(rows)
    charts = [
        _chart("Size", runs, lambda row: row.item.num_bytes, size_text, base=1024),
        _chart("Seconds from the call to the last write", runs, lambda row: row.timings.seconds, seconds_text),
        _chart("Stall of asynchronous saves", runs, lambda row: row.timings.stall_seconds, seconds_text),
        _chart("Rate", runs, lambda row: row.rate, rate_text, base=1024),
    ]
    names = sorted({name for row in rows for name in row.item.metrics})
    charts += [_chart(name, runs, _metric(name), metric_text) for name in names[:_MAX_CHARTS]]
    if any(charts):
        names_of_runs = legend([run or "." for run in runs]) if len(runs) > 1 else ""
        left_out = note_of_rest(len(names), _MAX_CHARTS, " metrics")
        yield section("Over the steps", names_of_runs, *charts, left_out)
    for row in rows:
        if row.item.problem:
            yield note(f"{row.item.path} is {row.item.state}: {row.item.problem}")
    yield section("Checkpoints", listing(_shape(rows, has_runs=len(runs) > 1), rows, limit=_MAX_ROWS))


def _by_run(rows: Sequence[RunRow]) -> Mapping[str, Sequence[RunRow]]:
    by_run: dict[str, list[RunRow]] = {}
    for row in rows:
        by_run.setdefault(row.item.run, []).append(row)
    return by_run


def _metric(name: str) -> _Value:
    return lambda row: row.item.metrics.get(name)


def _chart(
    title: str,
    runs: Mapping[str, Sequence[RunRow]],
    value_of: _Value,
    format_value: Callable[[float], str],
    *,
    base: int = 10,
) -> str:
    """Returns a curve for each run; "" if there is no value at any step."""
    curves = [Curve(run, list(_points(rows, value_of))) for run, rows in runs.items()]
    drawn = line_chart(title, curves, format_value, base=base)
    return tag("h3", {}, text(title)) + drawn if drawn else ""


def _points(rows: Sequence[RunRow], value_of: _Value) -> Iterator[tuple[int, float]]:
    for row in sorted(rows, key=lambda row: row.item.step or 0):
        value = None if row.item.problem else value_of(row)
        if row.item.step is not None and value is not None:
            yield row.item.step, value


def _shape(rows: Sequence[RunRow], *, has_runs: bool) -> TableShape:
    metrics = MetricColumns.of([row.item.metrics for row in rows])
    columns = [
        Column("checkpoint"),
        *(Column(title, is_right=True) for title in ("step", "size", "ranks", "took", "rate", "stall")),
        Column("longest phase"),
        *metrics.columns,
        Column("saved", is_whole=True),
        Column("state"),
    ]

    def cells(row: RunRow) -> list[str]:
        item, timings = row.item, row.timings
        seconds = [timings.seconds, timings.stall_seconds]
        took, stall = ("-" if value is None else seconds_text(value) for value in seconds)
        of_rank = f", rank {timings.slowest_rank}" if (item.world_size or 1) > 1 else ""
        return [
            (item.folder if has_runs else item.name) or ".",
            "-" if item.step is None else str(item.step),
            size_text(item.num_bytes),
            "-" if item.world_size is None else str(item.world_size),
            took,
            "-" if row.rate is None else rate_text(row.rate),
            stall,
            f"{timings.slowest_phase}{of_rank}" if timings.slowest_phase else "-",
            *metrics.cells(item.metrics),
            time_text(item.created_at),
            item.state,
        ]

    return TableShape(columns, cells)
