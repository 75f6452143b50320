"""A forked child has no thread that could end the saves of its parent: what waits for one raises there, or goes on."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from snapshot_cases import between_blocks, paused

import bytecheckpoint as bcp
from bytecheckpoint.manager.save_policies import EverySteps

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

TIMEOUT_S = 60.0


def in_child(do: Callable[[], object]) -> str:
    """What `do` returns or raises in a forked child, as text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            text = str(do())
        except BaseException as error:  # noqa: BLE001  nothing may leave the child
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode()[:4000])
            os._exit(0)
    os.close(writing)
    try:
        is_over, _, _ = select.select([reading], [], [], TIMEOUT_S)
        if not is_over:
            os.kill(pid, signal.SIGKILL)
        assert is_over, "the child waits for ever"
        return os.read(reading, 4000).decode()
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(1000.0)}


OF_PARENT = "belongs to the process that this one was forked from"


def test_a_handle_of_the_parent_raises(tmp_path: Path) -> None:
    with paused() as go:
        handle = bcp.save(tmp_path, state(), async_save=True)
        waits: list[Callable[[], object]] = [handle.result, handle.staged, lambda: handle.held("storage")]
        found = [in_child(wait) for wait in waits]
        shown = in_child(lambda: repr(handle))
        go.set()
        assert handle.result(TIMEOUT_S).num_tensors == 1
    assert "failed" not in shown
    assert "of the process that this one was forked from" in shown
    assert [text for text in found if not (text.startswith("CheckpointMismatchError: ") and OF_PARENT in text)] == []


def test_the_error_of_a_save_that_had_failed_before_is_its_own(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise OSError("the disk is gone")

    with between_blocks(fail):
        handle = bcp.save(tmp_path, state(), async_save=True)
        while not handle._progress.has_ended:
            time.sleep(0.01)
    assert "the disk is gone" in in_child(handle.result)
    with pytest.raises(Exception, match="the disk is gone"):
        handle.result(TIMEOUT_S)


def test_a_manager_of_the_parent(tmp_path: Path) -> None:
    options = bcp.ManagerOptions(signals=())
    with bcp.CheckpointManager(tmp_path, save=EverySteps(1), options=options) as manager:
        with paused() as go:
            handle = manager.save(1, state())
            assert handle is not None
            saved = in_child(lambda: manager.save(2, state()))
            closed = in_child(manager.close)
            go.set()
            handle.result(TIMEOUT_S)
        assert manager.save(2, state()) is not None
    assert OF_PARENT in saved
    assert closed == "None"
    assert bcp.steps(tmp_path) == [1, 2]
