"""Stops of training loops that a framework drives."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop
from bytecheckpoint.manager.agreement import stopping
from distributed.workers import WorkerPool


@pytest.mark.parametrize("begin", [AgreedStop, bcp.CheckpointManager])
def test_a_stop_that_ranks_cannot_join_leaves_no_signal_handler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begin: Callable[[Path], object]
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(stopping, "SoleStop", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        begin(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def stop_of_a_run_in_a_folder_of_its_own(rank: int, world_size: int) -> bool:
    with AgreedStop(f"/disk-of-rank-{rank}/run", signals=(), timeout_s=60.0) as stop:
        return stop.end_step()


def test_the_ranks_may_name_different_folders_as_that_of_the_run(workers: WorkerPool) -> None:
    assert workers.run(stop_of_a_run_in_a_folder_of_its_own, world_size=2) == [False, False]
