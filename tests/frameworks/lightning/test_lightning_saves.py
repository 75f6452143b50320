"""What happens after the commit of the save in flight, and what does not if there is none."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning.saves import SaveInFlight

pytestmark = pytest.mark.frameworks


def under_way(outcome: Future[Any]) -> Any:
    """Returns the handle of a save that ends when the test says so."""
    return SimpleNamespace(_progress=SimpleNamespace(outcome=outcome), done=outcome.done, result=outcome.result)


def saved(path: Path) -> Path:
    bcp.save(path, {"x": torch.ones(2)})
    return path


def test_a_checkpoint_goes_only_when_the_next_one_is_committed(tmp_path: Path) -> None:
    old, outcome, saves = saved(tmp_path / "old.ckpt"), Future[Any](), SaveInFlight()
    saves.begin(under_way(outcome))
    saves.remove(str(old), None)
    assert bcp.open(old)
    outcome.set_result(None)
    saves.settle(timeout_s=60)
    assert not old.exists()
    saves.close()


def test_a_checkpoint_stays_when_the_next_one_fails(tmp_path: Path) -> None:
    old, outcome, saves = saved(tmp_path / "old.ckpt"), Future[Any](), SaveInFlight()
    saves.begin(under_way(outcome))
    saves.remove(str(old), None)
    outcome.set_exception(bcp.StorageError("no space", kind="unavailable"))
    with pytest.raises(bcp.StorageError, match="no space"):
        saves.settle(timeout_s=60)
    saves.close()
    assert bcp.open(old)


def test_a_copy_of_a_save_that_fails_is_not_made(tmp_path: Path) -> None:
    source, outcome, saves = saved(tmp_path / "a.ckpt"), Future[Any](), SaveInFlight()
    saves.begin(under_way(outcome))
    saves.copy(str(source), str(tmp_path / "last.ckpt"), None, timeout_s=60)
    outcome.set_exception(bcp.StorageError("no space", kind="unavailable"))
    with pytest.raises(bcp.StorageError, match="no space"):
        saves.settle(timeout_s=60)
    saves.close()
    assert not (tmp_path / "last.ckpt").exists()


def test_a_save_that_is_not_waited_for_long_enough_is_still_found_by_the_next_wait(tmp_path: Path) -> None:
    old, outcome, saves = saved(tmp_path / "old.ckpt"), Future[Any](), SaveInFlight()
    saves.begin(under_way(outcome))
    saves.remove(str(old), None)
    with pytest.raises(TimeoutError):
        saves.settle(timeout_s=60, wait_s=0.0)
    outcome.set_exception(bcp.StorageError("no space", kind="unavailable"))
    with pytest.raises(bcp.StorageError, match="no space"):
        saves.settle(timeout_s=60)
    saves.close()
    assert bcp.open(old)
