"""Programs that end while a lazy save is under way: the save is finished or said to have failed."""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.launcher import Launcher
from faults.seams import loads_as
from faults.test_exit import ENDINGS, FAILING_SAVE, SLOW_SAVE

START = "handle = bcp.save(path, state_of(0, 1.0), async_save=True, options=bcp.SaveOptions(snapshot=sys.argv[2]))\n"
KINDS = ["lazy"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_is_under_way_is_finished(launcher: Launcher, tmp_path: Path, kind: str, ending: str) -> None:
    code, exit_code = ENDINGS[ending]
    ended = launcher.run(SLOW_SAVE + START + code, tmp_path / "ckpt", kind)
    assert ended.exit_code == exit_code, ended.output
    assert loads_as(tmp_path / "ckpt", 0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_fails_at_the_end_is_not_silent(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    ended = launcher.run(FAILING_SAVE + START, tmp_path / "ckpt", kind)
    assert ended.exit_code == 1, ended.output
    assert "the disk fell off" in ended.output
    assert "failed and was not committed" in ended.output
    assert bcp.steps(tmp_path / "ckpt") == []
