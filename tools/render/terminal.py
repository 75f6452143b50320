"""Prints to standard output: colours and fitted columns on a terminal, plain aligned text everywhere else, so that
pipes and files get the same words without escape sequences. Numbers are shown whole or not at all.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, Self, TextIO

import click

from bytecheckpoint.errors import rest_text

GAP = "  "
_FULL_TEXT = 24
"""Width of a text column for which other columns are dropped."""
_LEAST_TEXT = 8
LAST_DROP = 100
"""Columns with this order or a later one are dropped only if texts at their least width leave no room for them."""
NAME_STYLE = "bold cyan"
"""Style of the column that names what a row is about."""


class Column(NamedTuple):
    """A column of a table."""

    title: str
    is_right: bool = False
    """Right-aligned, as numbers are, and never shortened."""
    style: str = ""
    """Style on a terminal, in rich's words."""
    is_whole: bool = False
    """True for text that is never shortened."""
    drop: int = 0
    """Order in which columns are dropped if the window is too narrow, 1 first; 0 stays."""

    @property
    def is_text(self) -> bool:
        return not (self.is_right or self.is_whole)


class TableShape(NamedTuple):
    """Columns of a table, and how a row is made of an item."""

    columns: Sequence[Column]
    cells: Callable[[Any], Sequence[str]]


class StyledCell(str):
    """A cell of a table with a style of its own, for a terminal."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str) -> Self:
        cell = super().__new__(cls, text)
        cell.style = style
        return cell


def printable(text: str) -> str:
    """Escapes what is not printable: names in a checkpoint may hold what would steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Screen:
    """Standard output for people."""

    def __init__(self, stream: TextIO | None = None, *, is_terminal: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal

    def line(self, text: str = "", *, style: str = "") -> None:
        """Prints one line, which is not wrapped, so that it can be copied."""
        if self._is_terminal and style:
            from rich.console import Console  # noqa: PLC0415 - a pipe does not wait for rich
            from rich.text import Text  # noqa: PLC0415

            Console(file=self._stream, soft_wrap=True).print(Text(printable(text), style))
        else:
            click.echo(printable(text), file=self._stream)

    def paragraph(self, text: str, *, style: str = "") -> None:
        """Prints an empty line and one line."""
        self.line()
        self.line(text, style=style)

    def rest(self, num_rows: int, limit: int, how: str) -> None:
        """Prints how many rows a table of at most `limit` rows (0 for all) has not shown, and how to see them:
        `how` goes on after the word "more".
        """
        if limit and (left_out := rest_text(num_rows, limit, "  ... ")):
            self.line(left_out + how, style="dim")

    def section(
        self, shape: TableShape, items: Sequence[Any], *, limit: int = 0, rest: str = "", num_items: int | None = None
    ) -> None:
        """Prints an empty line and a table of at most `limit` items (0 for all); `rest` tells how to see the others.
        `num_items` says how many there are where the items are the first ones only.
        """
        self.line()
        self.table(shape.columns, list(map(shape.cells, islice(items, limit or None))))
        self.rest(len(items) if num_items is None else num_items, limit, rest)

    def fields(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Prints names and aligned values."""
        self.table([Column("", style="dim"), Column("")], pairs)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, indent: int = 2) -> None:
        """Prints rows under their titles; without a title line if no column has one."""
        if self._is_terminal:
            self._rich_table(columns, rows, indent)
        else:
            self._plain_table(columns, [[printable(cell) for cell in row] for row in rows], indent)

    def _plain_table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], indent: int) -> None:
        """Prints rows of cells that are printable already; titles need not be."""
        titles = [printable(column.title) for column in columns]
        lines = [titles, *rows] if any(titles) else rows
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        padded = (
            [
                cell.rjust(width) if column.is_right else cell.ljust(width)
                for column, cell, width in zip(columns, line, widths, strict=True)
            ]
            for line in lines
        )
        text = "\n".join(" " * indent + GAP.join(cells).rstrip() for cells in padded)
        if lines:
            click.echo(text, file=self._stream)

    def _rich_table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], indent: int) -> None:
        from rich.cells import cell_len  # noqa: PLC0415 - a pipe does not wait for rich
        from rich.console import Console  # noqa: PLC0415
        from rich.padding import Padding  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        window = Console(file=self._stream).width
        lengths = [
            max(cell_len(printable(cell)) for cell in (column.title, *(row[number] for row in rows)))
            for number, column in enumerate(columns)
        ]
        fitted = fit_columns(columns, lengths, window - indent)
        has_titles = any(column.title for column in columns)
        table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), show_header=has_titles, header_style="dim")
        for number, width in zip(fitted.numbers, fitted.widths, strict=True):
            column = columns[number]
            # Names stand first and explanations last: both go on in the next line. Other texts are cut in the middle.
            is_folded = column.is_text and number in {0, len(columns) - 1}
            table.add_column(
                Text(printable(column.title)),
                justify="right" if column.is_right else "left",
                style=column.style,
                no_wrap=not is_folded,
                overflow="fold" if is_folded else "crop",
                width=width,
            )
        for row in rows:
            cells = [(row[number], number, width) for number, width in zip(fitted.numbers, fitted.widths, strict=True)]
            table.add_row(
                *(
                    Text(
                        _fitted_text(printable(cell), width, is_folded=number in {0, len(columns) - 1}),
                        cell.style if isinstance(cell, StyledCell) else "",
                    )
                    for cell, number, width in cells
                )
            )
        # Where the columns that must stay do not fit, the window folds the lines: nothing of a number is lost.
        needed = indent + sum(fitted.widths) + len(GAP) * max(len(fitted.widths) - 1, 0)
        Console(file=self._stream, highlight=False, width=max(window, needed)).print(Padding(table, (0, 0, 0, indent)))
        if fitted.dropped:
            names = ", ".join(columns[number].title for number in fitted.dropped)
            self.line(f"{' ' * indent}not shown: {names}", style="dim")


def print_json(value: Mapping[str, Any]) -> None:
    """Prints the one object of `--json`."""
    click.echo(json.dumps(to_json(value), allow_nan=False))


def to_json(value: Any) -> Any:
    """Converts to JSON: a record becomes an object of its fields, without the `is_` of their names; NaN and infinities
    become null, bytes their hexadecimal digits, times ISO 8601, other things their text.
    """
    names = [field.name for field in fields(value)] if is_dataclass(value) else getattr(value, "_fields", None)
    if names is not None:
        return {name.removeprefix("is_"): to_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def without(record: Any, *names: str) -> dict[str, Any]:
    """Returns a record as JSON, without the fields that have these names there: `refused` for `is_refused`."""
    return {name: value for name, value in to_json(record).items() if name not in names}


class ShownColumns(NamedTuple):
    """Columns that are shown, and those that are not."""

    numbers: list[int]
    """Positions of the shown columns."""
    widths: list[int]
    """Their widths, in cells."""
    dropped: list[int]
    """Positions of the dropped columns."""


def fit_columns(columns: Sequence[Column], lengths: Sequence[int], room: int) -> ShownColumns:
    """Chooses columns and their widths. They take at most `room` cells, gaps included, unless the columns that must
    stay need more: each text at least 8 cells (fewer if it is shorter), any other column its whole length.

    Args:
        columns: All columns of the table.
        lengths: The cells that the longest content of each takes.
        room: The cells for the table: the width of the window without the indent.
    """
    shown = list(range(len(columns)))
    for number in sorted((n for n in shown if columns[n].drop), key=lambda n: columns[n].drop):
        text_limit = _FULL_TEXT if columns[number].drop < LAST_DROP else _LEAST_TEXT
        if _total([_wanted(columns[n], lengths[n], text_limit) for n in shown]) <= room:
            continue
        shown.remove(number)
    spare = room - _total([_wanted(columns[n], lengths[n], 0) for n in shown])
    texts = [n for n in shown if columns[n].is_text]
    text_widths = dict(zip(texts, _share(spare, [lengths[n] for n in texts]), strict=True))
    widths = [text_widths.get(n, lengths[n]) for n in shown]
    return ShownColumns(shown, widths, [n for n in range(len(columns)) if n not in shown])


def _wanted(column: Column, length: int, text_limit: int) -> int:
    return min(length, text_limit) if column.is_text else length


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * max(len(widths) - 1, 0)


def _share(room: int, lengths: Sequence[int]) -> list[int]:
    """Divides cells among texts of these lengths. Texts shorter than an equal share get all that they need, the others
    share the rest and get at least 8 each.
    """
    shares = [0] * len(lengths)
    rising = sorted(range(len(lengths)), key=lambda n: lengths[n])
    for position, number in enumerate(rising):
        fair = max(room // (len(rising) - position), _LEAST_TEXT)
        shares[number] = min(lengths[number], fair)
        room -= shares[number]
    return shares


def _fitted_text(text: str, width: int, *, is_folded: bool) -> str:
    """Cuts the middle out of a text that neither fits nor is folded: names of neighbours differ at their ends."""
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 - a pipe does not wait for rich

    if is_folded or cell_len(text) <= width:
        return text
    num_end = (width - 1) * 2 // 3
    end = text[len(text) - num_end :]
    while cell_len(end) > num_end:
        end = end[1:]
    return f"{set_cell_size(text, width - 1 - cell_len(end)).rstrip()}…{end}"


@contextmanager
def byte_progress(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on standard error, if that is a terminal. Yields a function that takes the number of bytes
    done since its last call.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress  # noqa: PLC0415 - a pipe does not wait for rich
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
