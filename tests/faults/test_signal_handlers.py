"""A signal handler that saves, as one for preemption may: it runs on the main thread, wherever that is. Where a save
waits for that thread nobody could ever go on, so the handler is refused; elsewhere it saves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint import phases
from bytecheckpoint.runtime import threads
from bytecheckpoint.staging import file_image
from faults.launcher import Launcher
from faults.seams import Seam, loads_as

HANDLER = """
import os, signal, sys, threading
import torch
from bytecheckpoint.saving import write
from bytecheckpoint.staging.file_image import LiveFile
from faults.seams import Seam, before, seam_named, state_of

path = sys.argv[1]
GATHER = Seam(LiveFile, "gather")
signals = [signal.SIGUSR1]
begun, go = threading.Event(), threading.Event()

def handle_signal(*_):
    bcp.save(f"{path}/handler", state_of(0, 2.0))

def interrupt():
    if threading.current_thread() is not threading.main_thread():
        return
    if signals:
        signal.raise_signal(signals.pop())

signal.signal(signal.SIGUSR1, lambda *_: handle_signal())
"""
REFUSED = """
try:
    with before(FUNCTION, interrupt):
        bcp.save(f"{path}/interrupted", state_of(0, 1.0), async_save=True, options=bcp.SaveOptions(snapshot=SNAPSHOT))
except bcp.CheckpointSaveError as error:
    print("refused:", error)
bcp.save(f"{path}/next", state_of(0, 3.0), async_save=True).result(20)
"""
STAGE = Seam(file_image.LiveFile, "gather")
PLAN = Seam(phases, "collect_all")
HAND_OVER = Seam(threads.ThreadPool, "begin")


@pytest.mark.parametrize(
    ("snapshot", "seam"), [("copy", PLAN), ("copy", STAGE), ("copy", HAND_OVER), ("lazy", HAND_OVER)]
)
def test_a_handler_that_saves_inside_an_asynchronous_save_is_refused(
    launcher: Launcher, tmp_path: Path, snapshot: str, seam: Seam
) -> None:
    code = REFUSED.replace("FUNCTION", f"seam_named('{seam}')").replace("SNAPSHOT", repr(snapshot))
    ended = launcher.run(HANDLER + code, tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "refused: this thread is inside a save" in ended.output
    assert "set a flag" in ended.output
    assert not (tmp_path / "handler").exists()
    assert not (tmp_path / "interrupted" / "manifest.bcp").exists()
    assert loads_as(tmp_path / "next", 0, 3.0)


HELPING = """
state = {f"x{number}": torch.full((1 << 18,), float(number)) for number in range(4)}

def hold_background():
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        assert go.wait(20)
    interrupt()

with before(GATHER, hold_background):
    options = bcp.SaveOptions(snapshot="lazy", max_file_bytes=1 << 20)
    handle = bcp.save(f"{path}/lazy", state, async_save=True, options=options)
    assert begun.wait(20)
    try:
        handle.staged()
    except bcp.CheckpointSaveError as error:
        print("refused:", error)
    go.set()
    handle.result(20)
"""
WAITING_FOR_IT = "def handle_signal(): HOW\n"


@pytest.mark.parametrize(
    "how",
    ["bcp.save(f'{path}/handler', state_of(0, 2.0))", "bcp.load(path, state)", "handle.staged()", "handle.result()"],
)
def test_a_handler_that_waits_for_a_save_which_its_thread_stages_is_refused(
    launcher: Launcher, tmp_path: Path, how: str
) -> None:
    ended = launcher.run(HANDLER + WAITING_FOR_IT.replace("HOW", how) + HELPING, tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "refused: this thread is inside a save" in ended.output
    assert not (tmp_path / "handler").exists()
    assert [float(bcp.open(tmp_path / "lazy")[f"x{number}"][-1]) for number in range(4)] == [0.0, 1.0, 2.0, 3.0]


ALLOWED = {
    "a synchronous save": """
with before(Seam(write, "write_image"), interrupt):
    bcp.save(f"{path}/interrupted", state_of(0, 1.0))
""",
    "a save that waits for its turn": """
def held():
    if threading.current_thread() is not threading.main_thread():
        assert go.wait(20)

def handle_signal():
    go.set()
    bcp.save(f"{path}/handler", state_of(0, 2.0))

with before(Seam(write, "write_image"), held):
    bcp.save(f"{path}/first", state_of(0, 1.0), async_save=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    bcp.save(f"{path}/interrupted", state_of(0, 1.0), async_save=True).result(20)
""",
}


@pytest.mark.parametrize("where", ALLOWED)
def test_a_handler_saves_where_no_save_waits_for_its_thread(launcher: Launcher, tmp_path: Path, where: str) -> None:
    assert launcher.run(HANDLER + ALLOWED[where], tmp_path) == (0, "")
    assert loads_as(tmp_path / "interrupted", 0, 1.0)
    assert loads_as(tmp_path / "handler", 0, 2.0)
