"""Tells how the saves of listed checkpoints went, from the telemetry beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from bytecheckpoint.diagnostics.telemetry import RankRecord, last_end, phases_of, read_save_records
from bytecheckpoint.errors import StorageError, UnsafeCheckpointError
from bytecheckpoint.storage.store import Store

from ..analysis.checkpoint_list import ListedCheckpoint
from ..render.number_format import count_text, rate_text, size_text, time_text
from ..render.timeline_text import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCheckpoint:
    """A checkpoint that was committed, and the times of its save."""

    path: str
    run: str | None
    """Folder of the root that holds it, if it is in one."""
    step: int | None
    save_id: str | None
    created_at: datetime | None
    num_bytes: int
    num_ranks: int | None
    seconds: float | None
    """Seconds from the first call of a rank to the end of the last phase of any; None without telemetry."""
    stall_seconds: float | None
    """Longest time for which the call of an asynchronous save held a rank; None for others, or without telemetry."""
    slowest_phase: str | None
    slowest_phase_seconds: float | None
    slowest_rank: int | None
    """The rank that took longest in that phase."""
    is_replacement: bool
    """True if another checkpoint stood at this path when it was last looked at."""
    problem: str | None
    """Error of reading the manifest."""

    @property
    def line(self) -> str:
        """One line for people."""
        name = self.path.rpartition("/")[2] if self.step is None else f"step {self.step}"
        name = f"{self.run}: {name}" if self.run else name
        name += " (replaced)" if self.is_replacement else ""
        saved_by = "" if self.num_ranks is None else f" by {count_text(self.num_ranks, 'rank')}"
        what = f"{time_text(self.created_at)}  {name}  {size_text(self.num_bytes)}{saved_by}"
        if self.problem is not None:
            return f"{name}  DAMAGED: {self.problem}"
        if self.seconds is None:
            return f"{what}  (no timings)"
        rate = rate_text(self.num_bytes, self.seconds)
        stall = "" if self.stall_seconds is None else f", stall {seconds_text(self.stall_seconds)}"
        slowest = f", {self.slowest_phase} {seconds_text(self.slowest_phase_seconds or 0.0)}"
        of_rank = f" on rank {self.slowest_rank}" if (self.num_ranks or 1) > 1 else ""
        return f"{what}  in {seconds_text(self.seconds)}, {rate}{stall}{slowest}{of_rank}"


def with_timings(
    store: Store, item: ListedCheckpoint, *, is_replacement: bool, is_last_try: bool = False
) -> TimedCheckpoint:
    """Returns a checkpoint with the times of its save, from telemetry. The times are None if there is no telemetry, or
    it may not be read. Raises StorageError if the storage fails otherwise; with `is_last_try`, the times are None then
    too.
    """
    ranks = _records_of(store, item, is_last_try=is_last_try)
    slowest = max(phases_of(ranks), key=lambda phase: phase.max_s, default=None)
    return TimedCheckpoint(
        path=item.path,
        run=item.folder.rpartition("/")[0] or None,
        step=item.step,
        save_id=item.save_id,
        created_at=item.created_at,
        num_bytes=item.num_bytes,
        num_ranks=item.world_size,
        seconds=last_end(ranks) if ranks else None,
        stall_seconds=max((record.seconds["stall"] for record in ranks if "stall" in record.seconds), default=None),
        slowest_phase=slowest and slowest.name,
        slowest_phase_seconds=slowest and slowest.max_s,
        slowest_rank=slowest and slowest.slowest_rank,
        is_replacement=is_replacement,
        problem=item.problem,
    )


def _records_of(store: Store, item: ListedCheckpoint, *, is_last_try: bool) -> Sequence[RankRecord]:
    """Reads the telemetry of a save. Returns nothing where `with_timings` returns no times, and raises as it does."""
    try:
        return read_save_records(store, item.folder, item.save_id).ranks if item.save_id else []
    except (StorageError, UnsafeCheckpointError) as error:
        if not is_last_try and error.kind not in {"permission", "path_escape"}:
            raise
        return []
