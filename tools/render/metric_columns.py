"""Columns of a table for the metrics of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from bytecheckpoint.errors import and_more

from .number_format import shortened
from .terminal import LAST_DROP, Column, Screen, printable

_MAX_COLUMNS = 6
_MAX_TITLE = 24
_FIRST_DROP = 10
"""Metrics leave a narrow window after those columns of the command that have lower numbers."""


class MetricColumns(NamedTuple):
    """The metrics that a table shows, each in a column of its own, and the names of the others."""

    names: list[str]
    left_out: list[str]
    columns: list[Column]

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, float]], *, first: Sequence[str] = ()) -> Self:
        """Chooses at most 6 columns for checkpoints with these metrics, or all of `first` if these are more. The last
        column leaves a narrow window first, and those of `first` leave last.
        """
        others = {name for item in metrics for name in item} - set(first)
        names = [*dict.fromkeys(first), *sorted(others)]
        num_shown = max(_MAX_COLUMNS, len(set(first)))
        columns = [
            Column(
                shortened(printable(name), _MAX_TITLE),
                is_right=True,
                drop=(LAST_DROP if name in first else _FIRST_DROP) + _MAX_COLUMNS - min(number, _MAX_COLUMNS - 1),
            )
            for number, name in enumerate(names[:num_shown])
        ]
        return cls(names[:num_shown], names[num_shown:], columns)

    def cells(self, metrics: Mapping[str, float]) -> list[str]:
        return [metric_text(metrics.get(name)) for name in self.names]

    def print_rest(self, screen: Screen) -> None:
        """Prints the names of the metrics without a column."""
        if self.left_out:
            screen.line(f"  more metrics, with --json: {and_more(self.left_out, _MAX_COLUMNS)}", style="dim")


def metric_text(value: float | None) -> str:
    """Returns six significant digits, since metrics of neighbouring checkpoints are alike; `-` for None."""
    return "-" if value is None else "nan" if math.isnan(value) else f"{value:.6g}"
