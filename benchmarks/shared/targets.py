"""Targets, as ratios within one run, and the table that compares them with what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shared.tables import table, times


class Against(NamedTuple):
    """The other side of a ratio: the best of these candidates, or, without any, something that the title names."""

    title: str
    candidates: tuple[str, ...]


class Outcome(NamedTuple):
    """A target and the measured figure."""

    workload: str
    what: str
    against: str
    at_most: float
    measured: float


def target_lines(outcomes: Iterable[Outcome]) -> Iterator[str]:
    yield "\n### Targets\n"
    rows = [
        [*one[:3], times(one.at_most), times(one.measured), "yes" if one.measured <= one.at_most else "no"]
        for one in outcomes
    ]
    yield from table(("workload", "what", "against", "at most", "measured", "reached"), rows)
