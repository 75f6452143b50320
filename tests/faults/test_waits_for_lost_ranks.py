"""The campaign `lost-ranks` itself: what it says of a rank that waits too long, and that it wakes whom it stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from distributed.workers import Outcome, WorkerPool
from faults.lost_ranks import LATER_S, NEVER, Case, lose_one, what_is_wrong
from faults.seams import Seam, Seen, before


def wrong_after(seconds: float, path: Path, *, missing_seconds: float = 0.0) -> str | None:
    """Of rank 1, when rank 0 never comes."""
    case = Case("load", NEVER, NEVER, missing_rank=0, group_size=2)
    told = Seen("CheckpointError", "rank_missing", (0,), "rank 0 did not come", "")
    outcomes = [Outcome((None, missing_seconds, True), None), Outcome((told, seconds, True), None)]
    return what_is_wrong(case, outcomes, 0, path)


def test_a_rank_that_waits_far_longer_than_its_timeout_breaks_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faults.lost_ranks._wrong_at", lambda *_: None)  # that nothing was saved here
    assert wrong_after(1.5 + LATER_S, tmp_path) is None
    assert wrong_after(1.5 + LATER_S, tmp_path, missing_seconds=50.0) is None
    assert "rank 1 took 40.0 s, and 21.5 s is the most" in (wrong_after(40.0, tmp_path) or "")


class PatientCase(Case):
    """One in which nobody waits for the missing rank: a short timeout would only make a slow rank a missing one."""

    @property
    def timeout_s(self) -> float:
        return 20.0


def lose_one_late(rank: int, world_size: int, root: str, cases: list[Case]) -> Any:
    """Fails where it is woken before it has stopped."""
    woken: list[int] = []

    def linger() -> None:
        time.sleep(1.0)
        assert not woken

    previous = signal.signal(signal.SIGCONT, lambda number, _: woken.append(number))
    try:
        with before(Seam(signal, "pthread_kill"), linger):
            return lose_one(rank, world_size, root, cases)
    finally:
        signal.signal(signal.SIGCONT, previous)


def test_a_rank_that_stops_when_the_others_are_done_is_woken_all_the_same(workers: WorkerPool, tmp_path: Path) -> None:
    case = PatientCase("save", "leaving", "stopped", missing_rank=0, group_size=2)
    outcomes = workers.run_each(lose_one_late, str(tmp_path), [case], world_size=2, timeout_s=60)
    assert what_is_wrong(case, outcomes, 0, tmp_path / "0") is None
