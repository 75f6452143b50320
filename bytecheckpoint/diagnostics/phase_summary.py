"""How long the phases of a save took on all ranks together: what to look at first where a save was slow. It knows
seconds, and nothing of how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bytecheckpoint.diagnostics.telemetry_records import RankRecord

_ORDER = ("wait", "plan", "stage", "write", "upload", "commit")
_START = "start"
"""Stands for what a rank did before it called: the others waited for it."""
_MAX_PHASES = 16


class Phase(NamedTuple):
    """One phase over all ranks, in seconds."""

    name: str
    min_s: float
    median_s: float
    max_s: float
    slowest_rank: int
    by_rank: Sequence[float]
    """In the order of the records."""


class SlowRank(NamedTuple):
    """One of the ranks that were through last."""

    record: RankRecord
    end_s: float
    """Since the first rank's call, by the clocks of their machines."""
    phase: str
    """In which it lost most time against the median rank, or the longest where it lost none; `start` where it called
    late.
    """
    phase_s: float
    median_s: float
    """Of that phase."""


class RankRow(NamedTuple):
    """A rank, or neighbours that share a row of a picture."""

    label: str
    """`3`, or `0-15`."""
    host: str
    """Of the one that was through last."""
    seconds: Sequence[float]
    """By phase: the most that one of them took."""
    slowest: RankRecord
    """The one that was through last."""


def phases_of(ranks: Sequence[RankRecord]) -> list[Phase]:
    """The phases that have spans, in the order in which a save goes through them."""
    names = dict.fromkeys(span.phase for record in ranks for span in record.spans)
    known = [name for name in _ORDER if name in names]
    others = [name for name in names if name not in _ORDER]
    return [_phase(name, ranks) for name in [*known, *others][:_MAX_PHASES]]


def _phase(name: str, ranks: Sequence[RankRecord]) -> Phase:
    seconds = [_seconds_in(record, name) for record in ranks]
    slowest = max(range(len(ranks)), key=lambda index: seconds[index])
    return Phase(name, min(seconds), median(seconds), max(seconds), ranks[slowest].rank, seconds)


def _seconds_in(record: RankRecord, phase: str) -> float:
    return sum(span.end - span.start for span in record.spans if span.phase == phase)


def first_call(ranks: Sequence[RankRecord]) -> float:
    """When the first rank called, in seconds since 1970."""
    return min(record.started_at for record in ranks)


def end_of(record: RankRecord, ranks: Sequence[RankRecord]) -> float:
    """When a rank was through, in seconds since the first call."""
    return record.started_at - first_call(ranks) + record.end


def slowest_ranks(ranks: Sequence[RankRecord], phases: Sequence[Phase], count: int) -> list[SlowRank]:
    """The ranks that were through last, the last one first, with what each lost its time in."""
    first = first_call(ranks)
    starts = [record.started_at - first for record in ranks]
    candidates = [(_START, starts), *((phase.name, phase.by_rank) for phase in phases)]
    medians = {name: median(seconds) for name, seconds in candidates}
    order = sorted(range(len(ranks)), key=lambda index: -(starts[index] + ranks[index].end))
    slow = []
    for index in order[:count]:
        name, seconds = max(candidates, key=lambda item: (item[1][index] - medians[item[0]], item[1][index]))
        end_s = starts[index] + ranks[index].end
        slow.append(SlowRank(ranks[index], end_s, name, seconds[index], medians[name]))
    return slow


def rank_rows(ranks: Sequence[RankRecord], phases: Sequence[Phase], max_rows: int) -> list[RankRow]:
    """The ranks as at most so many rows (0 for all): neighbours share one, so that no slow rank is lost."""
    per_row = -(-len(ranks) // max_rows) if max_rows else 1
    rows = []
    for start in range(0, len(ranks), per_row):
        of_row = range(start, min(start + per_row, len(ranks)))
        slowest = max((ranks[index] for index in of_row), key=lambda record: record.started_at + record.end)
        first, last = ranks[of_row[0]].rank, ranks[of_row[-1]].rank
        seconds = [max(phase.by_rank[index] for index in of_row) for phase in phases]
        rows.append(RankRow(str(first) if len(of_row) == 1 else f"{first}-{last}", slowest.host, seconds, slowest))
    return rows
