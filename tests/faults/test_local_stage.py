"""Processes that die while data is on its way from a local disk to the path: what was durable on the disk is finished
by `bcp.recover`, what was not is removed, and what a living process has is left alone.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.storage.backends.file_lock import is_locked
from faults.launcher import Launcher
from faults.seams import files_under, loads_as, state_of


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
def options(stage: Path) -> bcp.SaveOptions:
    return bcp.SaveOptions(local_stage=stage, timeout_s=20)


def outcomes(saves: list[bcp.RecoveredSave]) -> list[tuple[int | None, str]]:
    return [(save.step, save.outcome) for save in saves]


PROGRAM = """
import os, signal, sys
import bytecheckpoint as bcp
from faults.seams import before, state_of

root, stage, function = sys.argv[1:]
options = bcp.SaveOptions(local_stage=stage)
bcp.save(root, state_of(0, 1.0), step=1, options=options)
with before(function, lambda: os.kill(os.getpid(), signal.SIGKILL)):
    handle = bcp.save(root, state_of(0, 2.0), step=2, async_save=True, options=options)
    handle.result(20)
"""

DEATHS = {
    "before anything is written": ("bytecheckpoint.saving.upload.write_files", "removed"),
    "before the manifest is kept": ("bytecheckpoint.storage.stage_folder.StagedFolder.keep_manifest", "removed"),
    "between local durability and the upload": ("bytecheckpoint.saving.local_stage.copy_file", "committed"),
    "between the upload and the commit": ("bytecheckpoint.saving.upload.commit_together", "committed"),
    "in the commit": ("bytecheckpoint.storage.layout.commit", "committed"),
    "after the commit": ("bytecheckpoint.saving.local_stage.LocalStage.remove", "removed"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_loses_nothing_that_was_durable(
    launcher: Launcher, tmp_path: Path, stage: Path, options: bcp.SaveOptions, death: str
) -> None:
    function, outcome = DEATHS[death]
    ended = launcher.run(PROGRAM, tmp_path / "run", stage, function)
    assert ended.exit_code == -signal.SIGKILL, ended.output
    assert loads_as(tmp_path / "run", 0, 1.0, step=1)
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(2, outcome)]
    is_there = outcome == "committed" or death == "after the commit"
    assert bcp.steps(tmp_path / "run") == ([1, 2] if is_there else [1])
    if is_there:
        assert loads_as(tmp_path / "run", 0, 2.0, step=2)
    assert files_under(stage) == []
    bcp.save(tmp_path / "run", state_of(0, 3.0), step=3, options=options)


ALIVE = """
import sys
import bytecheckpoint as bcp
from faults.seams import before, state_of

root, stage, gate = sys.argv[1:]
options = bcp.SaveOptions(local_stage=stage)

def wait():
    print("uploading", flush=True)
    open(gate).read()

with before("bytecheckpoint.saving.local_stage.copy_file", wait):
    bcp.save(root, state_of(0, 1.0), step=1, options=options)
"""


def test_what_another_living_job_has_is_left_alone(
    launcher: Launcher, tmp_path: Path, stage: Path, options: bcp.SaveOptions
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    pid = launcher.start(ALIVE, tmp_path / "run", stage, gate)
    launcher.wait_for_output(pid, "uploading")
    assert outcomes(bcp.recover(tmp_path / "run", options=options)) == [(1, "under_way")]
    bcp.save(tmp_path / "run", state_of(0, 2.0), step=2, options=options)
    gate.write_text("go on")
    assert launcher.wait(pid).exit_code == 0
    assert bcp.steps(tmp_path / "run") == [1, 2]
    assert files_under(stage) == []


def test_a_program_that_ends_finishes_the_upload(launcher: Launcher, tmp_path: Path, stage: Path) -> None:
    code = """
import sys, time
import bytecheckpoint as bcp
from faults.seams import before, state_of
import bytecheckpoint.saving.local_stage as tier

copy_file = tier.copy_file
tier.copy_file = lambda *arguments: (time.sleep(0.3), copy_file(*arguments))
options = bcp.SaveOptions(local_stage=sys.argv[2])
for step in (1, 2):
    bcp.save(sys.argv[1], state_of(0, float(step)), step=step, async_save=True, options=options)
"""
    ended = launcher.run(code, tmp_path / "run", stage)
    assert ended == (0, "")
    assert bcp.steps(tmp_path / "run") == [1, 2]
    assert files_under(stage) == []


FORKING = """
import os, signal, sys
from bytecheckpoint.storage.backends.file_lock import ProcessLock, is_locked

path, gate = sys.argv[1:]
lock = ProcessLock(path)
if os.fork() == 0:
    os.write(1, b"forked")
    open(gate).read()
    os._exit(0)
other = ProcessLock(path + "-other")
other.release()
print(is_locked(path), is_locked(path + "-other"), flush=True)
open(gate + "-killed").read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_does_not_keep_a_lock(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "lock-other").touch()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    os.mkfifo(tmp_path / "gate-killed")
    pid = launcher.start(FORKING, tmp_path / "lock", gate)
    launcher.wait_for_output(pid, "forked")
    launcher.wait_for_output(pid, "True False")
    (tmp_path / "gate-killed").write_text("go on")
    assert launcher.wait(pid).exit_code == -signal.SIGKILL
    assert not is_locked(str(tmp_path / "lock"))
    gate.write_text("the end")  # the child has lived until now
