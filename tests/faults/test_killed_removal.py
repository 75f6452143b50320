"""SIGKILL at every step of what removes: `bcp gc --delete`, the sweep after a commit, the clean-up of an overwrite and
of a save that failed. Whatever can be selected is whole after each, and whoever removes next finishes it.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli
from faults.launcher import Launcher
from faults.seams import files_under, loads_as, state_of

KILLED = """
import os, signal, sys
from itertools import count
from faults.seams import state_of
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends import local_store
from bytecheckpoint.tools.main import cli

root, last, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
calls = count()

def counted(function):
    def call(*arguments, **options):
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

def count_from_here():
    os.unlink, os.rmdir = counted(os.unlink), counted(os.rmdir)
    local_store.sync_folder = counted(local_store.sync_folder)

def commit(*arguments, **options):
    if job == "failed":
        count_from_here()
        raise bcp.CheckpointSaveError("the disk is full", kind="no_space")
    committed(*arguments, **options)
    count_from_here()

committed, layout.commit = layout.commit, commit
step, overwrite = (8, False) if job == "sweep" else (7, True)
exit_code = 0
try:
    if job == "gc":
        count_from_here()
        cli.main(["gc", root, "--older-than", "1d", "--delete"])
    else:
        bcp.save(root, state_of(0, 2.0), step=step, options=bcp.SaveOptions(overwrite=overwrite))
except SystemExit as ended:
    exit_code = ended.code
except bcp.CheckpointSaveError:
    exit_code = 1
os._exit(exit_code)
"""
DEAD, YOUNG = "00000000deadbeef", "00000000aaaaaaaa"
DAY_S = 24 * 3600
NUM_LEFT = 3


def leave(root: Path, step: int, save_id: str, *, age_s: float) -> None:
    """What three ranks wrote of a save that did not commit, one of them not to the end."""
    folder = root / f"step_{step:08d}" / "data"
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{save_id}-00000-0.safetensors", f"{save_id}-00001-0.safetensors"]
    for name in [*names, f".tmp-0123456789abcdef-{save_id}-00002-0.safetensors"]:
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (time.time() - age_s,) * 2)


@pytest.mark.parametrize(
    "stride", [pytest.param(5, id="some steps"), pytest.param(1, id="every step", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("job", "least"), [("gc", 12), ("sweep", 6), ("overwrite", 6), ("failed", 2)])
def test_what_is_killed_while_it_removes_harms_nothing_and_the_next_one_finishes(
    launcher: Launcher, tmp_path: Path, job: str, least: int, stride: int
) -> None:
    steps = [7, 8] if job == "sweep" else [7]
    for last in count(1 % stride, stride):
        root = tmp_path / str(last)
        bcp.save(root, state_of(0, 1.0), step=7)
        leave(root, 7, DEAD, age_s=2 * DAY_S)
        leave(root, 8, DEAD, age_s=2 * DAY_S)
        leave(root, 9, YOUNG, age_s=0.0)
        ended = launcher.run(KILLED, root, last, job)
        assert bcp.steps(root) == steps, last
        assert loads_as(root, 0, 2.0 if job == "overwrite" else 1.0, step=7), last
        assert job != "sweep" or loads_as(root, 0, 2.0), last
        if ended.exit_code != -signal.SIGKILL:
            assert ended.exit_code == (1 if job == "failed" else 0), ended.output
            assert last >= least
            return
        finish(root, job)
        assert [name for name in files_under(root) if "00000009" not in name] == [
            name for step in steps for name in whole(root, step)
        ]
        assert len(files_under(root / "step_00000009")) == NUM_LEFT


def finish(root: Path, job: str) -> None:
    """As whoever comes next does, two days later."""
    for name in files_under(root):
        if YOUNG not in name:
            os.utime(root / name, (time.time() - 2 * DAY_S,) * 2)
    if job in {"sweep", "overwrite"}:
        for step in bcp.steps(root):
            bcp.save(root, state_of(0, 3.0), step=step, options=bcp.SaveOptions(overwrite=True))
            assert [name for name in files_under(root) if f"{step:08d}" in name] == whole(root, step)
    ended = CliRunner().invoke(cli, ["gc", str(root), "--delete"])
    assert ended.exit_code == 0, ended.output


def whole(root: Path, step: int) -> list[str]:
    """All that belongs to a checkpoint that stands there."""
    save_id = bcp.open(root, step=step).info.save_id
    names = [f"data/{save_id}-00000-0.safetensors", "manifest.bcp", f"telemetry/{save_id}-00000.json"]
    return [f"step_{step:08d}/{name}" for name in names]
