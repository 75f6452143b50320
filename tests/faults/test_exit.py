"""A program that ends while an asynchronous save is under way, in every way in which programs end: the save finishes,
or the exit code and a message say that it did not.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.free_ports import free_port
from faults.launcher import Launcher
from faults.seams import loads_as, state_of

SLOW_SAVE = """
import os, sys, time
import torch
import torch.distributed as dist
from bytecheckpoint.saving import write
from faults.seams import state_of

path = sys.argv[1]
write_image = write.write_image

def write_late(*arguments):
    # Not before the program has come to its end.
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        time.sleep(0.05)
    return write_image(*arguments)

write.write_image = write_late
"""

FAILING_SAVE = (
    SLOW_SAVE
    + """
def fail(*arguments):
    time.sleep(0.3)
    raise OSError(5, "the disk fell off")

write.write_image = fail
"""
)

HELD_UP_SAVE = SLOW_SAVE.replace("time.monotonic() < deadline", "True")
"""It never ends."""

START = "handle = bcp.save(path, state_of(0, 1.0), async_save=True)\n"

FORKING = """
pid = os.fork()
if pid == 0:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
SAVING_IN_THE_FORK = FORKING.replace("sys.exit(0)", "bcp.save(path + '-child', state_of(0, 5.0)); sys.exit(0)")

ENDINGS = {
    "end of program": ("", 0),
    "sys.exit with a code": ("sys.exit(3)", 3),
    "uncaught exception": ("raise ValueError('training broke')", 1),
    "a worker is forked": (FORKING, 0),
    "a worker is forked and saves itself": (SAVING_IN_THE_FORK, 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_save_that_is_under_way_is_finished(launcher: Launcher, tmp_path: Path, ending: str) -> None:
    code, exit_code = ENDINGS[ending]
    ended = launcher.run(SLOW_SAVE + START + code, tmp_path / "ckpt")
    assert ended.exit_code == exit_code, ended.output
    assert loads_as(tmp_path / "ckpt", 0, 1.0)


def test_a_save_of_several_blocks_is_finished_too(launcher: Launcher, tmp_path: Path) -> None:
    """Its writer threads start when executors already refuse work."""
    code = "bcp.save(path, {'x': torch.ones(40 << 20, dtype=torch.uint8)}, async_save=True)\n"
    ended = launcher.run(SLOW_SAVE + code, tmp_path / "ckpt")
    assert ended.exit_code == 0, ended.output
    assert bcp.open(tmp_path / "ckpt")["x"].shape == (40 << 20,)


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "time.sleep(0.6)", "raise ValueError('x')"])
def test_a_save_that_fails_at_the_end_is_not_silent(launcher: Launcher, tmp_path: Path, ending: str) -> None:
    ended = launcher.run(FAILING_SAVE + START + ending, tmp_path / "ckpt")
    assert ended.exit_code not in {0, None}, ended.output
    assert "the disk fell off" in ended.output
    assert f"the save to {tmp_path / 'ckpt'} failed and was not committed" in ended.output
    assert bcp.steps(tmp_path / "ckpt") == []


def test_a_failure_that_was_seen_is_not_reported_again(launcher: Launcher, tmp_path: Path) -> None:
    ended = launcher.run(FAILING_SAVE + START + "assert handle.exception() is not None", tmp_path / "ckpt")
    assert ended == (0, "")


def test_other_exit_functions_run_and_output_is_flushed_when_a_save_failed(launcher: Launcher, tmp_path: Path) -> None:
    code = "import atexit; atexit.register(print, 'goodbye')\n" + START + "print('end', end='')"
    ended = launcher.run(FAILING_SAVE + code, tmp_path / "ckpt")
    assert ended.exit_code == 1
    assert "goodbye" in ended.output
    assert "end" in ended.output


NOTHING_SAVED_YET = """
import atexit, threading
write.write_image = write_image

def save():
    for name in ("first", "second"):
        bcp.save(f"{path}/{name}", state_of(0, 1.0), async_save=ASYNC).result()

def save_after_the_end():
    threading.main_thread().join()
    save()

"""
LATE = {
    "in an exit function": "atexit.register(save)",
    "on a thread that outlives the program": "threading.Thread(target=save_after_the_end).start()",
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", LATE)
def test_the_first_save_of_a_process_may_come_when_the_program_has_ended(
    launcher: Launcher, tmp_path: Path, where: str, is_async: bool
) -> None:
    code = NOTHING_SAVED_YET.replace("ASYNC", str(is_async)) + LATE[where]
    assert launcher.run(SLOW_SAVE + code, tmp_path) == (0, "")
    assert loads_as(tmp_path / "first", 0, 1.0)
    assert loads_as(tmp_path / "second", 0, 1.0)


@pytest.mark.parametrize("before", ["", "bcp.save(f'{path}/before', state_of(0, 1.0))\n"], ids=["first", "later"])
@pytest.mark.parametrize("where", LATE)
def test_a_save_that_fails_when_the_program_has_ended_is_not_silent(
    launcher: Launcher, tmp_path: Path, where: str, before: str
) -> None:
    """Nothing comes later that could tell."""
    code = NOTHING_SAVED_YET.replace("ASYNC).result()", "True)") + before + "write.write_image = fail\n" + LATE[where]
    ended = launcher.run(FAILING_SAVE.replace("write.write_image = fail", "") + code, tmp_path)
    assert "the disk fell off" in ended.output
    assert bcp.steps(tmp_path) == []
    assert not (tmp_path / "first" / "manifest.bcp").exists()


GROUP = """
port, rank = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
handle = bcp.save(path, state_of(rank, 1.0), async_save=True, options=bcp.SaveOptions(timeout_s=20))
"""


def run_two(launcher: Launcher, code: str, path: Path) -> list[tuple[int | None, str]]:
    port = free_port()
    pids = [launcher.start(code, path, port, rank) for rank in range(2)]
    return [launcher.wait(pid) for pid in pids]


@pytest.mark.parametrize("ending", ["dist.destroy_process_group()", "", "if rank == 1: time.sleep(1)"])
def test_two_ranks_end_with_or_without_their_group(launcher: Launcher, tmp_path: Path, ending: str) -> None:
    for exit_code, output in run_two(launcher, SLOW_SAVE + GROUP + ending, tmp_path / "ckpt"):
        assert exit_code == 0, output
    info = bcp.open(tmp_path / "ckpt").info
    assert (info.world_size, info.num_tensors) == (2, 3)


def test_a_rank_that_fails_at_the_end_fails_both(launcher: Launcher, tmp_path: Path) -> None:
    failing_on_one = SLOW_SAVE + FAILING_SAVE[len(SLOW_SAVE) :].replace(
        "write.write_image = fail", "if sys.argv[3] == '1':\n    write.write_image = fail"
    )
    for exit_code, output in run_two(launcher, failing_on_one + GROUP, tmp_path / "ckpt"):
        assert exit_code == 1, output
        assert "the disk fell off" in output
    assert bcp.steps(tmp_path / "ckpt") == []


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_whose_program_ends_with_its_error_tells_the_other_first(
    launcher: Launcher, tmp_path: Path, failing_rank: int
) -> None:
    """Rank 0 holds the store of the group: when it is gone, nobody can be told anything."""
    code = SLOW_SAVE + GROUP.replace("async_save=True", "async_save=False").replace(
        "handle =", f"if rank == {failing_rank}:\n    write.write_image = None\nhandle ="
    )
    for exit_code, output in run_two(launcher, code, tmp_path / "ckpt"):
        assert exit_code == 1, output
        assert f"failed on rank {failing_rank}" in output
        assert "TypeError" in output


def test_a_rank_that_is_killed_at_the_end_is_named_by_the_other(launcher: Launcher, tmp_path: Path) -> None:
    code = SLOW_SAVE + GROUP + "if rank == 1: os.kill(os.getpid(), 9)"
    first, second = run_two(launcher, code, tmp_path / "ckpt")
    assert second[0] == -9
    assert first[0] == 1
    assert "rank 1 cannot answer, because process" in first[1]


def test_the_death_of_the_rank_with_the_store_is_named_by_the_other(launcher: Launcher, tmp_path: Path) -> None:
    code = SLOW_SAVE + GROUP + "if rank == 0: os.kill(os.getpid(), 9)"
    first, second = run_two(launcher, code, tmp_path / "ckpt")
    assert first[0] == -9
    assert second[0] == 1
    assert "rank_missing" in second[1] or "rank 0" in second[1]


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_leaves_nothing_committed_or_all(launcher: Launcher, tmp_path: Path, number: int) -> None:
    """Ctrl-C and SIGTERM while the program waits for its save."""
    code = START + f"os.kill(os.getpid(), {number})\nhandle.result()\n"
    ended = launcher.run((SLOW_SAVE if number == 2 else HELD_UP_SAVE) + code, tmp_path / "ckpt")
    assert ended.exit_code in {-number, 1, 130}, ended.output
    if number == 2:  # Python's own KeyboardInterrupt: the program ends in order, and so does the save
        assert "KeyboardInterrupt" in ended.output
        assert loads_as(tmp_path / "ckpt", 0, 1.0)
    else:
        assert not (tmp_path / "ckpt" / "manifest.bcp").exists()


@pytest.mark.parametrize("waiting", ["handle.result()", ""], ids=["in a wait for the save", "as it ends"])
def test_ctrl_c_while_the_interpreter_waits_for_a_save_ends_it_at_once_and_is_not_silent(
    launcher: Launcher, tmp_path: Path, waiting: str
) -> None:
    """The second one where the first has ended the program's own wait: the save is held up for ever."""
    bcp.save(tmp_path / "run", state_of(0, 1.0), step=1)
    pid = launcher.start(HELD_UP_SAVE + WAITING.replace("WAITING", waiting), tmp_path / "run")
    launcher.wait_for_output(pid, "ready")
    if waiting:
        os.kill(pid, signal.SIGINT)
    launcher.wait_for_output(pid, "waits")
    time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    ended = launcher.wait(pid)
    assert ended.exit_code == 1, ended.output
    assert ended.output.count("KeyboardInterrupt") == (2 if waiting else 1)
    assert f"the program ends while the save to {tmp_path / 'run' / 'step_00000002'} is under way" in ended.output
    assert bcp.steps(tmp_path / "run") == [1]
    assert loads_as(tmp_path / "run", 0, 1.0)


WAITING = """
import threading
handle = bcp.save(path, state_of(0, 2.0), step=2, async_save=True)
threading._register_atexit(print, "waits", flush=True)  # called before those of the save
print("ready", flush=True)
WAITING
"""
