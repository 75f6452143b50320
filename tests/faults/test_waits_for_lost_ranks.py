"""What the campaign `lost-ranks` says of a rank that waits too long for one that is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.workers import Outcome
from faults.lost_ranks import LATER_S, NEVER, Case, what_is_wrong
from faults.seams import Seen


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
