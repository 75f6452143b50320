"""What a checkpoint has and the state does not is named: a state that lost an entry would lose it for good."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp


def _saved(root: Path) -> dict[str, object]:
    model = torch.nn.Linear(3, 2)
    state: dict[str, object] = {"model": model, "epoch": 3, "rng": bcp.RngState(), "ema": {"weight": torch.ones(2)}}
    with bcp.CheckpointManager(root) as manager:
        manager.save(0, state, force=True)
    return state


def test_a_load_reports_the_entries_that_the_state_does_not_name(tmp_path: Path) -> None:
    state = _saved(tmp_path)
    assert bcp.load(tmp_path, {"model": state["model"]}).ignored == ["ema", "epoch", "rng"]
    assert bcp.load(tmp_path, {"net": state["model"]}, key_map=[("^model", "net")]).ignored == ["ema", "epoch", "rng"]
    assert bcp.load(tmp_path, {"model": state["model"]}, exclude=["epoch", "rng*"]).ignored == ["ema"]
    assert bcp.load(tmp_path, state).ignored == []


def test_a_restore_warns_of_entries_that_the_next_save_would_lack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = _saved(tmp_path)
    with caplog.at_level(logging.WARNING), bcp.CheckpointManager(tmp_path) as manager:
        manager.restore(state)
        assert not caplog.records
        manager.restore({"model": state["model"]})
        assert "step 0 also has 'ema', 'epoch', 'rng', which the state does not" in caplog.text
        caplog.clear()
        manager.restore({"model": state["model"]}, exclude=["ema.*", "epoch", "rng*"])
        assert not caplog.records
