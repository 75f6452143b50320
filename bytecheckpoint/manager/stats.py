"""Goodput of a training run: the time that saves take from it, and how much of it a crash would lose."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from bytecheckpoint.info import CheckpointInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStats:
    """Counts of one manager, on this rank, since it was made."""

    step: int | None
    """Newest step that it committed, or None."""
    num_saves: int
    """Saves that were committed."""
    num_failed_saves: int
    num_bytes: int
    """Bytes of the newest checkpoint."""
    bytes_per_s: float | None
    """Bytes per second of the newest save, from the call to the commit."""
    stall_s: float
    """Seconds for which the newest save held training up."""
    save_s: float
    """Seconds from the call of the newest save to its commit."""
    lost_s: float
    """Seconds that calls of `save` took from training in all."""
    elapsed_s: float
    """Seconds since the manager was made."""
    longest_step_s: float
    """Longest time between two calls of `save`."""
    since_durable_s: float | None
    """Seconds since the commit of the newest checkpoint; None before the first."""

    @property
    def lost_fraction(self) -> float:
        """Share of `elapsed_s` for which calls of `save` held training up, from 0.0 to 1.0."""
        return self.lost_s / self.elapsed_s if self.elapsed_s else 0.0


class Goodput:
    """The counters behind ManagerStats. `begin_call` and `end_call` are for one thread, the others for any thread."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._newest: CheckpointInfo | None = None
        self._durable_at: float | None = None
        self._num_saves = self._num_failed = 0
        self._lost_s = 0.0
        self._call_ended: float | None = None
        self.longest_step_s = 0.0
        self.earlier_save_s = 0.0
        """Seconds that the newest save before this manager took; 0.0 if it left no record."""

    def needed_to_stop_s(self) -> float:
        """Returns the seconds that one more step and its save are expected to take."""
        with self._lock:
            save_s = self.earlier_save_s if self._newest is None else self._newest.seconds.get("total", 0.0)
        return save_s + self.longest_step_s

    def begin_call(self) -> float:
        """Notes that `save` is called; returns the time for `end_call`."""
        now = time.monotonic()
        if self._call_ended is not None:
            self.longest_step_s = max(self.longest_step_s, now - self._call_ended)
        return now

    def end_call(self, began: float) -> None:
        self._call_ended = time.monotonic()
        self._lost_s += self._call_ended - began

    def committed(self, info: CheckpointInfo) -> str:
        """Counts a commit; returns the line for the log."""
        now = time.monotonic()
        with self._lock:
            since_s = now - (self._started if self._durable_at is None else self._durable_at)
            self._newest, self._durable_at, self._num_saves = info, now, self._num_saves + 1
        stats = self.stats()
        rate = f"{(stats.bytes_per_s or 0.0) / 1e6:,.0f} MB/s"
        return (
            f"step {info.step}: {info.num_bytes / 1e6:,.1f} MB committed in {stats.save_s:.2f} s ({rate}), training "
            f"held up for {stats.stall_s:.2f} s; saves took {stats.lost_s:.1f} of {stats.elapsed_s:.0f} s in all; "
            f"{since_s:.0f} s since the durable one before"
        )

    def failed(self) -> None:
        with self._lock:
            self._num_failed += 1

    def stats(self) -> ManagerStats:
        now = time.monotonic()
        with self._lock:
            newest, durable_at = self._newest, self._durable_at
            seconds = newest.seconds if newest else {}
            return ManagerStats(
                step=newest.step if newest else None,
                num_saves=self._num_saves,
                num_failed_saves=self._num_failed,
                num_bytes=newest.num_bytes if newest else 0,
                bytes_per_s=newest.bytes_per_s if newest else None,
                stall_s=seconds.get("stall", 0.0),
                save_s=seconds.get("total", 0.0),
                lost_s=self._lost_s,
                elapsed_s=now - self._started,
                longest_step_s=self.longest_step_s,
                since_durable_s=None if durable_at is None else now - durable_at,
            )
