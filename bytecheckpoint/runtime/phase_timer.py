"""Measures when the phases of a save begin and end. Knows no phase by name but the stall."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """The time of one phase, in seconds since the call."""

    phase: str
    start: float
    end: float


class PhaseTimer:
    """Seconds by phase. Phases may overlap, and run on several threads; if a phase runs twice, its seconds add up."""

    def __init__(self) -> None:
        self.started_at = time.time()
        """Wall-clock time of the call, in seconds since 1970."""
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of what it surrounds to the phase `name`, and notes its start and end, also if that fails."""
        start = self.total
        try:
            yield
        finally:
            end = self.total
            self.add(name, end - start)
            with self._lock:
                self._spans.append(Span(name, start, end))

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to a phase, without a span."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def end_stall(self) -> None:
        """Notes that the call returns: the time so far is the phase `stall`. Does nothing if that was noted before."""
        with self._lock:
            self._seconds.setdefault("stall", self.total)

    @property
    def total(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._started

    @property
    def age_s(self) -> float:
        """Seconds since the call, by the wall clock if that shows more: the clock of `total` stands still while the
        host sleeps.
        """
        return max(self.total, time.time() - self.started_at)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, so far."""
        with self._lock:
            return dict(self._seconds)

    @property
    def spans(self) -> list[Span]:
        """Phases that have ended, in the order in which they did."""
        with self._lock:
            return list(self._spans)
