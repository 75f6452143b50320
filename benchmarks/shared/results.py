"""Figures of a benchmark of candidates, as records that go into a JSON file and come out of it again."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One candidate on one workload."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each counted round, by the name of the measure: seconds are the slowest rank's."""
    memory_bytes: int | None = None
    """Peak of two saves beyond what was there before the first."""
    bytes_by_rank: list[int] | None = None
    """Bytes of data files by the rank that wrote them, where their names say so."""
    skipped: str | None = None
    """Reason why there are no timings, or no more of them."""

    def values(self, measure: str) -> list[float]:
        return [timing[measure] for timing in self.rounds]

    def median(self, measure: str) -> float | None:
        values = self.values(measure)
        return statistics.median(values) if values else None

    @property
    def spread(self) -> float | None:
        """Distance of the largest and the smallest rank's bytes, as a part of their mean."""
        if not self.bytes_by_rank or not sum(self.bytes_by_rank):
            return None
        mean = sum(self.bytes_by_rank) / len(self.bytes_by_rank)
        return (max(self.bytes_by_rank) - min(self.bytes_by_rank)) / mean


@dataclass
class Results:
    """One run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    state_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by workload, of all ranks together; replicas count once."""
    rows: dict[str, dict[str, Row]] = field(default_factory=dict)
    """Rows by workload and candidate."""

    def median(self, workload: str, candidate: str, measure: str) -> float | None:
        row = self.rows.get(workload, {}).get(candidate)
        return row.median(measure) if row else None

    def ratio(self, workload: str, measure: str, candidate: str, to: Sequence[str]) -> float | None:
        """Returns the ratio of medians; to the smallest one where several are named."""
        own = self.median(workload, candidate, measure)
        others = [value for name in to if (value := self.median(workload, name, measure)) is not None]
        return own / min(others) if own is not None and others else None

    def paired(self, workload: str, measure: str, candidate: str, to: str) -> list[float]:
        """Returns the ratio in each round: both ran within it, so the machine's drift cancels out."""
        own, other = (self.rows[workload][name].values(measure) for name in (candidate, to))
        return [mine / theirs for mine, theirs in zip(own, other, strict=False) if theirs]


def read_results(path: Path) -> Results:
    content = json.loads(path.read_text())
    rows = {name: {each: Row(**row) for each, row in rows.items()} for name, rows in content.pop("rows").items()}
    return Results(**content, rows=rows)
