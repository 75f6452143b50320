"""What happens after the commit of the save in flight, and what does not if there is none."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.integrations.lightning import saves as of_saves
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
    saves.note_begun(under_way(outcome))
    saves.remove(str(old), None)
    assert bcp.open(old)
    outcome.set_result(None)
    saves.settle(timeout_s=60)
    assert not old.exists()
    saves.close()


def test_a_checkpoint_stays_when_the_next_one_fails(tmp_path: Path) -> None:
    old, outcome, saves = saved(tmp_path / "old.ckpt"), Future[Any](), SaveInFlight()
    saves.note_begun(under_way(outcome))
    saves.remove(str(old), None)
    outcome.set_exception(bcp.StorageError("no space", kind="unavailable"))
    with pytest.raises(bcp.StorageError, match="no space"):
        saves.settle(timeout_s=60)
    saves.close()
    assert bcp.open(old)


def test_a_copy_of_a_save_that_fails_is_not_made(tmp_path: Path) -> None:
    source, outcome, saves = saved(tmp_path / "a.ckpt"), Future[Any](), SaveInFlight()
    saves.note_begun(under_way(outcome))
    saves.copy(str(source), str(tmp_path / "last.ckpt"), None, timeout_s=60)
    outcome.set_exception(bcp.StorageError("no space", kind="unavailable"))
    with pytest.raises(bcp.StorageError, match="no space"):
        saves.settle(timeout_s=60)
    saves.close()
    assert not (tmp_path / "last.ckpt").exists()


def test_a_checkpoint_stays_when_the_copy_that_was_to_follow_it_fails(tmp_path: Path) -> None:
    old, outcome, saves = saved(tmp_path / "old.ckpt"), Future[Any](), SaveInFlight()
    saves.note_begun(under_way(outcome))
    saves.copy(str(tmp_path / "gone.ckpt"), str(tmp_path / "last.ckpt"), None, timeout_s=60)
    saves.remove(str(old), None)
    outcome.set_result(None)
    with pytest.raises(bcp.CheckpointError, match=r"gone\.ckpt"):
        saves.settle(timeout_s=60)
    saves.close()
    assert bcp.open(old)


def test_a_copy_is_waited_for_no_longer_than_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, outcome, saves = Event(), Future[Any](), SaveInFlight()
    monkeypatch.setattr(of_saves, "copy_checkpoint", lambda *_: may_end.wait(60))
    saves.note_begun(under_way(outcome))
    saves.copy("a.ckpt", str(tmp_path / "last.ckpt"), None, timeout_s=60)
    outcome.set_result(None)
    with pytest.raises(bcp.CheckpointError, match="still under way 0 s after the save"):
        saves.settle(timeout_s=60, wait_s=0.0)
    may_end.set()
    saves.close()


def test_a_link_stays_until_the_checkpoint_that_is_to_be_copied_there_is_committed(tmp_path: Path) -> None:
    old, source, link = saved(tmp_path / "old.ckpt"), saved(tmp_path / "a.ckpt"), tmp_path / "last.ckpt"
    link.symlink_to(old.name)
    outcome, saves = Future[Any](), SaveInFlight()
    saves.note_begun(under_way(outcome))
    saves.copy(str(source), str(link), None, timeout_s=60)
    assert link.is_symlink()
    outcome.set_result(None)
    saves.settle(timeout_s=60)
    saves.close()
    assert not link.is_symlink()
    assert bcp.open(old).info.save_id != bcp.open(link).info.save_id == bcp.open(source).info.save_id


def test_a_save_that_is_not_waited_for_long_enough_is_still_found_by_the_next_wait(tmp_path: Path) -> None:
    old, outcome, saves = saved(tmp_path / "old.ckpt"), Future[Any](), SaveInFlight()
    saves.note_begun(under_way(outcome))
    saves.remove(str(old), None)
    with pytest.raises(TimeoutError):
        saves.settle(timeout_s=60, wait_s=0.0)
    outcome.set_exception(bcp.StorageError("no space", kind="unavailable"))
    with pytest.raises(bcp.StorageError, match="no space"):
        saves.settle(timeout_s=60)
    saves.close()
    assert bcp.open(old)
