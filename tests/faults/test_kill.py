"""SIGKILL at every system call that a save makes on the file system: the previous checkpoint loads, and the new one is
whole or absent. A save that comes later is not disturbed by what is left.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.launcher import Ended, Launcher
from faults.seams import loads_as, state_of

CALLS = ("mkdir", "fallocate", "pwritev", "pwritev2", "fsync", "link", "rename", "unlink", "rmdir")
"""All that change the disk, but for the `openat` that creates a file, which a `pwritev` or `fallocate` follows at once.
strace counts each on its own."""
MAX_CALLS = 40

SAVE = """
import os, sys
from faults.seams import state_of

path, gate, kind = sys.argv[1:]
gate = os.open(gate, os.O_RDWR)
os.write(1, b"ready")
os.read(gate, 1)
if kind == "overwrite":
    bcp.save(path, state_of(0, 2.0), step=1, options=bcp.SaveOptions(overwrite=True))
else:
    bcp.save(path, state_of(0, 2.0), step=2)
os._exit(0)
"""


def can_trace() -> bool:
    strace = shutil.which("strace")
    return strace is not None and subprocess.run([strace, "-o", os.devnull, "true"], check=False).returncode == 0


needs_strace = pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace here")


def save_and_kill(launcher: Launcher, folder: Path, kind: str, call: str, k: int) -> Ended:
    """A save in a process that is killed at the k-th of these calls."""
    gate = folder.with_suffix(".gate")
    os.mkfifo(gate)
    pid = launcher.start(SAVE, folder, gate, kind)
    launcher.wait_for_output(pid, "ready")
    injected = ["-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={k}"]
    tracer = subprocess.Popen(
        ["strace", "-p", str(pid), "-o", os.devnull, *injected], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr
    assert "attached" in tracer.stderr.readline()
    descriptor = os.open(gate, os.O_RDWR)  # which does not wait for a reader, who may be dead
    os.write(descriptor, b"!")
    ended = launcher.wait(pid)
    os.close(descriptor)
    tracer.communicate(timeout=60)
    return ended


def is_killed(launcher: Launcher, root: Path, kind: str, call: str, k: int) -> bool:
    """One kill, and all that must hold after it; False where the save made fewer calls."""
    folder = root / f"{kind}-{call}-{k}"
    bcp.save(folder, state_of(0, 1.0), step=1)
    ended = save_and_kill(launcher, folder, kind, call, k)
    assert ended.exit_code in {0, -signal.SIGKILL}, ended.output
    if kind == "overwrite":
        is_new = loads_as(folder, 0, 2.0)
        assert is_new or loads_as(folder, 0, 1.0), (call, k)
    else:
        steps = bcp.steps(folder)
        is_new = steps == [1, 2]
        assert is_new or steps == [1], (call, k)
        assert loads_as(folder, 0, 1.0, step=1), (call, k)
        assert not is_new or loads_as(folder, 0, 2.0, step=2), (call, k)
    if ended.exit_code == 0:
        assert is_new
    bcp.save(folder, state_of(0, 3.0), step=2, options=bcp.SaveOptions(overwrite=True))
    assert loads_as(folder, 0, 3.0, step=2), (call, k)
    return ended.exit_code != 0


@needs_strace
@pytest.mark.privileged
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["save", "overwrite"])
def test_a_kill_at_every_call_loses_nothing(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    kills = dict.fromkeys(CALLS, 0)
    for call in CALLS:
        while is_killed(launcher, tmp_path, kind, call, kills[call] + 1):
            kills[call] += 1
            assert kills[call] < MAX_CALLS
    assert kills["pwritev"] + kills["pwritev2"] >= 2
    assert kills["fallocate"] == 1
    assert kills["fsync"] >= 6
    assert sum(kills.values()) >= 15, kills


KILL_AT_RANDOM = """
import sys
from faults.seams import state_of

path = sys.argv[1]
print("ready", flush=True)
for step in range(2, 10_000):
    bcp.save(path, state_of(0, float(step)), step=step)
    bcp.save(path + "-over", state_of(0, float(step)), options=bcp.SaveOptions(overwrite=True))
"""


def test_kills_at_random_times_lose_nothing(launcher: Launcher, tmp_path: Path) -> None:
    chooser = random.Random(20)
    for number in range(8):
        path = tmp_path / str(number)
        bcp.save(path, state_of(0, 1.0), step=1)
        pid = launcher.start(KILL_AT_RANDOM, path)
        while bcp.latest(path) == 1:
            time.sleep(0.002)
        time.sleep(chooser.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        assert launcher.wait(pid).exit_code == -signal.SIGKILL
        steps = bcp.steps(path)
        assert steps == list(range(1, len(steps) + 1))
        assert all(loads_as(path, 0, float(step), step=step) for step in steps[-2:])
        over = tmp_path / f"{number}-over"
        if over.exists() and (over / "manifest.bcp").exists():
            assert any(loads_as(over, 0, float(step)) for step in steps[-2:])
