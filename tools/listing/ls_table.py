"""The table of `bcp ls`: its columns, the order of its rows, and the names by which options select both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError, and_more

from ..analysis.checkpoint_list import ListedCheckpoint
from ..render.metric_columns import MetricColumns, metric_text
from ..render.number_format import age_text, count_text, size_text, time_text
from ..render.terminal import LAST_DROP, NAME_STYLE, Column, Screen


class ListColumn(NamedTuple):
    """A column of the table: what it shows of a checkpoint, and by what it sorts."""

    column: Column
    cell: Callable[[ListedCheckpoint, datetime], str]
    key: Callable[[ListedCheckpoint], Any]
    """Returns None for a checkpoint that has no such value: it stands last in any order."""


_BEFORE_METRICS = {
    "step": ListColumn(
        Column("step", is_right=True, style=NAME_STYLE),
        lambda item, _: "-" if item.step is None else str(item.step),
        lambda item: item.step,
    ),
    "size": ListColumn(
        Column("size", is_right=True),
        lambda item, _: "-" if item.problem else size_text(item.num_bytes),
        lambda item: None if item.problem else item.num_bytes,
    ),
    "saved": ListColumn(
        Column("saved", is_whole=True, drop=4),
        lambda item, _: time_text(item.created_at),
        lambda item: item.created_at and item.created_at.timestamp(),
    ),
    "age": ListColumn(
        Column("age", is_whole=True, drop=1),
        lambda item, now: age_text(item.created_at, now),
        lambda item: item.created_at and -item.created_at.timestamp(),
    ),
    "tensors": ListColumn(
        Column("tensors", is_right=True, drop=2),
        lambda item, _: count_text(item.num_tensors),
        lambda item: item.num_tensors,
    ),
    "ranks": ListColumn(
        Column("ranks", is_right=True, drop=3),
        lambda item, _: count_text(item.world_size),
        lambda item: item.world_size,
    ),
}
_AFTER_METRICS = {
    "folder": ListColumn(
        Column("folder", style="dim", drop=LAST_DROP),
        lambda item, _: item.name or ".",
        lambda item: item.name,
    ),
    "state": ListColumn(Column("state", is_whole=True), lambda item, _: item.state, lambda item: item.state),
}
_ON_REQUEST = {
    "format": ListColumn(
        Column("format", is_whole=True),
        lambda item, _: item.format if item.committed else "-",
        lambda item: item.format if item.committed else None,
    ),
    "save_id": ListColumn(
        Column("save_id", is_whole=True, style="dim"),
        lambda item, _: item.save_id or "-",
        lambda item: item.save_id or None,
    ),
}
_ALL = {**_BEFORE_METRICS, **_AFTER_METRICS, **_ON_REQUEST}
COLUMN_NAMES = tuple(_ALL)
"""Names of columns that --columns and --sort take for any list, beside those of its metrics."""


def sort_rows(found: Sequence[ListedCheckpoint], name: str, *, is_reversed: bool) -> list[ListedCheckpoint]:
    """Sorts the checkpoints by a column; those without a value come last.

    Raises CheckpointMismatchError (conflict) for a name that is neither a column nor a metric of one of them.
    """
    key = _column(found, name).key
    keyed = [(key(item), item) for item in found]
    with_value = sorted((pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[0], reverse=is_reversed)
    return [item for _, item in with_value] + [item for value, item in keyed if value is None]


def _column(found: Sequence[ListedCheckpoint], name: str) -> ListColumn:
    metrics = sorted({metric for item in found for metric in item.metrics})
    if name in _ALL:
        return _ALL[name]
    if name in metrics:
        return _metric_column(name, Column(name, is_right=True))
    have = f", and the metrics {and_more(metrics, 10)}" if metrics else "; these checkpoints have no metrics"
    what = f"there is no column {name!r}: there are {', '.join(COLUMN_NAMES)}{have}"
    raise CheckpointMismatchError(what, kind="conflict")


def _metric_column(name: str, column: Column) -> ListColumn:
    def key(item: ListedCheckpoint) -> float | None:
        value = item.metrics.get(name)
        return None if value is None or math.isnan(value) else value

    return ListColumn(column, lambda item, _: metric_text(item.metrics.get(name)), key)


def named_columns(found: Sequence[ListedCheckpoint], names: Sequence[str]) -> list[ListColumn]:
    """Returns the columns with these names for all tables of a list: the last of them leaves a narrow window first, and
    the first one stays. Raises as `sort_rows` does.
    """
    columns = [_column(found, name) for name in names]
    drops = [len(columns) - number if number else 0 for number in range(len(columns))]
    return [each._replace(column=each.column._replace(drop=drop)) for each, drop in zip(columns, drops, strict=True)]


def print_table(
    screen: Screen, found: Sequence[ListedCheckpoint], named: Sequence[ListColumn], now: datetime, *, limit: int
) -> None:
    """Prints the table of a run, of at most `limit` rows, 0 for all: the named columns, or without these the usual ones
    and the metrics of the run.
    """
    metrics = MetricColumns.of([] if named else [item.metrics for item in found])
    of_metrics = [_metric_column(name, column) for name, column in zip(metrics.names, metrics.columns, strict=True)]
    columns = named or [*_BEFORE_METRICS.values(), *of_metrics, *_AFTER_METRICS.values()]
    rows = [[column.cell(item, now) for column in columns] for item in found[: limit or None]]
    screen.table([column.column for column in columns], rows)
    screen.rest(len(found), limit, ": --limit 0 shows all")
    metrics.print_rest(screen)
