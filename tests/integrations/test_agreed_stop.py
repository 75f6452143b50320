"""Stops of training loops that a framework drives."""

from __future__ import annotations

import signal

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.integrations.shared import agreed_stop
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop
from distributed.workers import WorkerPool


def test_a_stop_that_ranks_cannot_join_leaves_no_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise bcp.CheckpointError("rank 1 is gone", kind="rank_missing")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(agreed_stop, "join_stop", refuse)
    with pytest.raises(bcp.CheckpointError, match="rank 1 is gone"):
        AgreedStop("run", signals=("SIGTERM",), timeout_s=10.0)
    assert signal.getsignal(signal.SIGTERM) is before


def stop_of_a_run_in_a_folder_of_its_own(rank: int, world_size: int) -> bool:
    with AgreedStop(f"/disk-of-rank-{rank}/run", signals=(), timeout_s=60.0) as stop:
        return stop.end_step()


def test_the_ranks_may_name_different_folders_as_that_of_the_run(workers: WorkerPool) -> None:
    assert workers.run(stop_of_a_run_in_a_folder_of_its_own, world_size=2) == [False, False]
