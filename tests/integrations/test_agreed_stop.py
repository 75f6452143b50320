"""Stops of training loops that a framework drives, in one process."""

from __future__ import annotations

import signal

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.integrations.shared import agreed_stop
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop


def test_a_stop_that_ranks_cannot_join_leaves_no_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise bcp.CheckpointError("rank 1 is gone", kind="rank_missing")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(agreed_stop, "join_stop", refuse)
    with pytest.raises(bcp.CheckpointError, match="rank 1 is gone"):
        AgreedStop("run", signals=("SIGTERM",), timeout_s=10.0)
    assert signal.getsignal(signal.SIGTERM) is before
