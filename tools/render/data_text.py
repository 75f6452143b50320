"""Prints the states of data loaders, for `bcp show --data` and `bcp diff`."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.data_streams import DataDifference, DataRecord
from .number_format import count_text
from .terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape


def print_data(screen: Screen, records: Sequence[DataRecord], *, limit: int) -> None:
    """Prints each loader: a line, its streams by source, and each of its streams."""
    if not records:
        screen.paragraph("no state of a data loader: bcp.DataLoaderState saves one")
    for record in records:
        screen.paragraph(_title(record), style="bold")
        if record.streams:
            screen.section(_SOURCE_TABLE, record.sources, limit=limit, rest=" sources: --limit 0 shows all")
            screen.section(_STREAM_TABLE, record.streams, limit=limit, rest=" streams: --limit 0 shows all")
        else:
            screen.line(f"  one position for all ranks: {record.shared}")


def _title(record: DataRecord) -> str:
    what = count_text(len(record.streams), "stream" if record.keyed_by == "stream" else "rank state")
    taken = "" if record.samples is None else f", {count_text(record.samples, 'sample')} taken"
    by = f"saved by {count_text(record.size, 'data-parallel rank')}"
    return f"{record.fqn}: {record.loader}, {what} {by}, elastic {record.elastic}{taken}"


def print_data_differences(screen: Screen, differences: Sequence[DataDifference]) -> None:
    """Prints how far each loader went from A to B."""
    for found in differences:
        between = found.num_samples_between
        text = "samples are not counted"
        if between is not None:
            away = "B is ahead of A" if between > 0 else "A is ahead of B"
            lie = "lies" if abs(between) == 1 else "lie"
            text = f"{count_text(abs(between), 'sample')} {lie} between A and B" + (f": {away}" if between else "")
        only = [(found.num_only_in_a, "A"), (found.num_only_in_b, "B")]
        only_text = "".join(f", {count_text(number, 'stream')} only in {letter}" for number, letter in only if number)
        screen.line(f"  {found.fqn}: {text}{only_text}")


def _range(values: tuple[int, int] | None) -> str:
    if values is None:
        return "-"
    return count_text(values[0]) if values[0] == values[1] else f"{values[0]:,} to {values[1]:,}"


_SOURCE_TABLE = TableShape(
    [
        Column("source", style=NAME_STYLE),
        Column("streams", is_right=True, drop=1),
        Column("epoch", is_right=True, drop=2),
        Column("position", is_right=True, drop=LAST_DROP),
        Column("samples", is_right=True),
    ],
    lambda total: [
        total.source or "-",
        f"{total.num_streams:,}",
        _range(total.epochs),
        _range(total.positions),
        count_text(total.samples),
    ],
)
_STREAM_TABLE = TableShape(
    [
        Column("stream", style=NAME_STYLE),
        Column("source", drop=2),
        Column("rank", is_right=True, drop=1),
        Column("epoch", is_right=True, drop=3),
        Column("position", is_right=True, drop=LAST_DROP),
        Column("samples", is_right=True),
    ],
    lambda row: [
        row.id,
        row.source or "-",
        count_text(row.owner),
        count_text(row.epoch),
        count_text(row.position),
        count_text(row.samples),
    ],
)
