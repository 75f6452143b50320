"""Cells and tables in Markdown, for the reports of benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from shared.results import Row


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (titles, ["---"] * len(titles), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def noted(row: Row) -> str:
    return f" (then: {row.skipped})" if row.skipped else ""


def spread(values: Sequence[float]) -> str:
    middle = statistics.median(values)
    if max(map(abs, values)) < 0.0005:
        return "0"
    return (
        f"{middle:.3f} ({min(values):.3f} - {max(values):.3f})"
        if middle < 1
        else f"{middle:.2f} ({min(values):.2f} - {max(values):.2f})"
    )


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}x" if ratio < 0.1 else f"{ratio:.2f}x"
