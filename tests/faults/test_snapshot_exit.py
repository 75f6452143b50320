"""Programs that end, or are ended, while a lazy or a forked save is under way: the save is finished or said to have
failed, and no process is left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.launcher import Launcher
from faults.seams import loads_as
from faults.test_exit import ENDINGS, FAILING_SAVE, SLOW_SAVE

START = "handle = bcp.save(path, state_of(0, 1.0), async_save=True, options=bcp.SaveOptions(snapshot=sys.argv[2]))\n"
KINDS = ["lazy", "fork"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked snapshots are for Linux")


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


def test_a_child_that_is_killed_at_the_end_is_not_silent(launcher: Launcher, tmp_path: Path) -> None:
    code = START + CHILD + "os.kill(child, 9)\n"
    ended = launcher.run(SLOW_SAVE + code, tmp_path / "ckpt", "fork")
    assert ended.exit_code == 1, ended.output
    assert "SIGKILL" in ended.output
    assert bcp.steps(tmp_path / "ckpt") == []


CHILD = """
(child,) = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
"""
SAVE_IN_A_GROUP = "import os\nos.setsid()\n" + SLOW_SAVE + START + CHILD + "print('child', child, flush=True)\n"


def is_gone(pid: int, within_s: float) -> bool:
    """Whether the process ends in time. One that nobody waits for is a zombie until its new parent does."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def start_in_a_group(launcher: Launcher, path: Path, ending: str) -> tuple[int, int]:
    """A program with a group of its own, and the child of its save."""
    pid = launcher.start(SAVE_IN_A_GROUP + ending, path, "fork")
    launcher.wait_for_output(pid, "child")
    (child,) = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_child(entry, pid)]
    return pid, child


def is_child(process: Path, parent: int) -> bool:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def test_a_child_ends_soon_after_a_program_that_just_stops(launcher: Launcher, tmp_path: Path) -> None:
    pid, child = start_in_a_group(launcher, tmp_path / "ckpt", "time.sleep(0.1)\nos._exit(7)\n")
    assert launcher.wait(pid).exit_code == 7
    assert is_gone(child, 2.0)
    assert bcp.steps(tmp_path / "ckpt") == []


def test_a_child_ends_soon_after_a_program_that_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    pid, child = start_in_a_group(launcher, tmp_path / "ckpt", "time.sleep(20)\n")
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(pid).exit_code == -signal.SIGKILL
    assert is_gone(child, 2.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_of_a_program_that_does_not_take_it_ends_all(
    launcher: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    pid, child = start_in_a_group(launcher, tmp_path / "ckpt", "time.sleep(20)\n")
    os.killpg(pid, number)
    ended = launcher.wait(pid)
    assert is_gone(child, 2.0)
    if number == signal.SIGINT:  # a KeyboardInterrupt: the program ends in order, and so does its save
        assert "KeyboardInterrupt" in ended.output
        assert loads_as(tmp_path / "ckpt", 0, 1.0)
    else:
        assert ended.exit_code == -signal.SIGTERM
        assert not (tmp_path / "ckpt" / "manifest.bcp").exists()


def test_a_program_that_takes_the_signal_to_its_group_still_gets_its_save(launcher: Launcher, tmp_path: Path) -> None:
    taking = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('taken', flush=True))\n"
    pid = launcher.start(taking + SAVE_IN_A_GROUP + "handle.result(20)\n", tmp_path / "ckpt", "fork")
    launcher.wait_for_output(pid, "child")
    os.killpg(pid, signal.SIGTERM)
    ended = launcher.wait(pid)
    assert ended.exit_code == 0, ended.output
    assert "taken" in ended.output
    assert loads_as(tmp_path / "ckpt", 0, 1.0)
