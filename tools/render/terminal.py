"""Text on standard output: colours and fitted columns where it is a terminal, plain aligned text everywhere else, so
that pipes and files get the same words without any escape sequence.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self, TextIO

import click

from .column_widths import GAP, Column, fit_columns


class Styled(str):
    """A cell of a table with a style of its own, for a terminal."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str) -> Self:
        cell = super().__new__(cls, text)
        cell.style = style
        return cell


def printable(text: str) -> str:
    """The text without control characters: names in a checkpoint may hold what would steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Screen:
    """Where a command writes for people."""

    def __init__(self, stream: TextIO | None = None, *, is_terminal: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal

    def line(self, text: str = "", *, style: str = "") -> None:
        """One line; nothing in it is wrapped, so that it can be copied."""
        if self._is_terminal and style:
            from rich.console import Console  # noqa: PLC0415 - a pipe does not wait for rich
            from rich.text import Text  # noqa: PLC0415

            Console(file=self._stream, soft_wrap=True).print(Text(printable(text), style))
        else:
            click.echo(printable(text), file=self._stream)

    def rest(self, num_rows: int, limit: int, how: str) -> None:
        """Says how many rows a table of at most `limit` rows (0 for all) has not shown, and how to see them."""
        if limit and num_rows > limit:
            self.line(f"  ... and {num_rows - limit:,} {how}", style="dim")

    def fields(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Names and values, values aligned."""
        self.table([Column("", style="dim"), Column("")], pairs)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], *, indent: int = 2) -> None:
        """Rows under their titles; without a title line where no column has one."""
        if self._is_terminal:
            self._rich_table(columns, rows, indent)
        else:
            self._plain_table(columns, [[printable(cell) for cell in row] for row in rows], indent)

    def _plain_table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], indent: int) -> None:
        titles = [column.title for column in columns]
        lines = [titles, *rows] if any(titles) else rows
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for line in lines:
            padded = [
                cell.rjust(width) if column.is_right else cell.ljust(width)
                for column, cell, width in zip(columns, line, widths, strict=True)
            ]
            click.echo(" " * indent + GAP.join(padded).rstrip(), file=self._stream)

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
            # Names stand first and explanations last: both go on in the next line. Other texts end with an ellipsis.
            is_folded = column.is_text and number in {0, len(columns) - 1}
            table.add_column(
                Text(column.title),
                justify="right" if column.is_right else "left",
                style=column.style,
                no_wrap=not is_folded,
                overflow="fold" if is_folded else "ellipsis",
                width=width,
            )
        for row in rows:
            cells = [row[number] for number in fitted.numbers]
            table.add_row(*(Text(printable(cell), cell.style if isinstance(cell, Styled) else "") for cell in cells))
        # Where even the numbers do not fit, the window folds the lines: nothing of a number is lost.
        needed = indent + sum(fitted.widths) + len(GAP) * max(len(fitted.widths) - 1, 0)
        Console(file=self._stream, highlight=False, width=max(window, needed)).print(Padding(table, (0, 0, 0, indent)))
        if fitted.dropped:
            names = ", ".join(columns[number].title for number in fitted.dropped)
            self.line(f"{' ' * indent}not shown: {names}", style="dim")


def print_json(value: Mapping[str, Any]) -> None:
    """The one object of `--json`."""
    click.echo(json.dumps(to_json(value), allow_nan=False))


def to_json(value: Any) -> Any:
    """What JSON can hold: NaN and infinities become null, bytes their hexadecimal digits, other things their text."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
