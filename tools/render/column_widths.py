"""The widths of a table's columns in a window: which columns stay where not all fit, and which texts are shortened.
Numbers are shown whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GAP = "  "
_FULL_TEXT = 24
"""A text column of this width is wide enough that no other column gives way to it."""
_LEAST_TEXT = 8


class Column(NamedTuple):
    """Of a table."""

    title: str
    is_right: bool = False
    """Right-aligned, as numbers are. Such a column is whole."""
    style: str = ""
    """For a terminal, in rich's words."""
    is_whole: bool = False
    """Never shortened, whatever the window."""
    drop: int = 0
    """Where the window is too narrow, columns go in this order, 1 first; 0 stays."""

    @property
    def is_text(self) -> bool:
        return not (self.is_right or self.is_whole)


class Fitted(NamedTuple):
    """The columns that a window shows."""

    numbers: list[int]
    """Their positions among all columns."""
    widths: list[int]
    """Of these, in cells."""
    dropped: list[int]
    """The positions of the others."""


def fit_columns(columns: Sequence[Column], lengths: Sequence[int], room: int) -> Fitted:
    """Widths that together take at most `room` cells, gaps included, wherever numbers allow that.

    Args:
        columns: All columns of the table.
        lengths: The cells that the longest content of each takes.
        room: The width of the window.
    """
    shown = list(range(len(columns)))
    for number in sorted((n for n in shown if columns[n].drop), key=lambda n: columns[n].drop):
        if _total([_wanted(columns[n], lengths[n], _FULL_TEXT) for n in shown]) <= room:
            break
        shown.remove(number)
    spare = room - _total([_wanted(columns[n], lengths[n], 0) for n in shown])
    texts = [n for n in shown if columns[n].is_text]
    given = dict(zip(texts, _share(spare, [lengths[n] for n in texts]), strict=True))
    widths = [given.get(n, lengths[n]) for n in shown]
    return Fitted(shown, widths, [n for n in range(len(columns)) if n not in shown])


def _wanted(column: Column, length: int, text_limit: int) -> int:
    return min(length, text_limit) if column.is_text else length


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * max(len(widths) - 1, 0)


def _share(room: int, lengths: Sequence[int]) -> list[int]:
    """Divides cells among texts of these lengths: the shorter ones get all that they need first."""
    shares = [0] * len(lengths)
    rising = sorted(range(len(lengths)), key=lambda n: lengths[n])
    for position, number in enumerate(rising):
        fair = max(room // (len(rising) - position), _LEAST_TEXT)
        shares[number] = min(lengths[number], fair)
        room -= shares[number]
    return shares
