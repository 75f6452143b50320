"""Summary of the phases of a save over all ranks, to find what made it slow. Knows seconds, and not how they are
shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bytecheckpoint.diagnostics.telemetry_records import RankRecord

_ORDER = ("wait", "plan", "stage", "write", "upload", "commit")
_START = "start"
"""The time before a rank called save, while the others waited for it."""
_MAX_PHASES = 16


class Phase(NamedTuple):
    """One phase over all ranks, in seconds."""

    name: str
    min_s: float
    median_s: float
    max_s: float
    slowest_rank: int
    by_rank: Sequence[float]
    """Seconds of each rank, in the order of the records."""


class SlowRank(NamedTuple):
    """A rank that was among the last to end."""

    record: RankRecord
    end_s: float
    """Seconds since the first rank's call, by the clocks of their machines."""
    phase: str
    """The phase with the most time lost against the median rank, or the longest if none was lost; `start` for a late
    call.
    """
    phase_s: float
    median_s: float
    """Median of that phase."""


class RankRow(NamedTuple):
    """A rank, or neighbours that share a row of a chart."""

    label: str
    """`3`, or `0-15`."""
    host: str
    """Host of the rank that ended last."""
    seconds: Sequence[float]
    """Longest time of one of them in each phase."""
    slowest: RankRecord
    """The rank that ended last."""


def phases_of(ranks: Sequence[RankRecord]) -> list[Phase]:
    """Returns the phases that have spans, in the order of a save."""
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
    """Returns the time of the first rank's call, in seconds since 1970."""
    return min(record.started_at for record in ranks)


def end_of(record: RankRecord, ranks: Sequence[RankRecord]) -> float:
    """Returns the time at which a rank ended, in seconds since the first call."""
    return record.started_at - first_call(ranks) + record.end


def slowest_ranks(ranks: Sequence[RankRecord], phases: Sequence[Phase], count: int) -> list[SlowRank]:
    """Returns the ranks that ended last, the last one first, each with the phase that took its time."""
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
    """Returns the ranks as at most so many rows (0 for all): neighbours share one, so that no slow rank is lost."""
    per_row = -(-len(ranks) // max_rows) if max_rows else 1
    rows = []
    for start in range(0, len(ranks), per_row):
        of_row = range(start, min(start + per_row, len(ranks)))
        slowest = max((ranks[index] for index in of_row), key=lambda record: record.started_at + record.end)
        first, last = ranks[of_row[0]].rank, ranks[of_row[-1]].rank
        seconds = [max(phase.by_rank[index] for index in of_row) for phase in phases]
        rows.append(RankRow(str(first) if len(of_row) == 1 else f"{first}-{last}", slowest.host, seconds, slowest))
    return rows
