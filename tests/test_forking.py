"""The forked child that keeps a snapshot: what it leaves alone, what ends it, and what its death looks like. Each of
these saves is stopped in the middle, with the child at hand.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.seams import loads_as, state_of
from snapshot_cases import between_blocks, bits_of_all, differing, paused, running, save, saved_bits

import bytecheckpoint as bcp
from bytecheckpoint import forking
from bytecheckpoint.forking import ForkedState, _PrivateMemory
from bytecheckpoint.storage.scratch import Scratch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked snapshots are for Linux")


def large_state(value: int) -> dict[str, torch.Tensor]:
    """A block of a file, and a little more."""
    return {"x": torch.full((17 << 20,), value, dtype=torch.uint8)}


def children() -> set[int]:
    """Of this process, whichever thread started them; zombies too."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


@contextmanager
def forked_save(path: Path, value: int = 1) -> Iterator[tuple[bcp.SaveHandle, int]]:
    """A save that stands still in the middle until the block ends, and the process id of its child."""
    reached, go, forked = threading.Event(), threading.Event(), []
    fork = forking._fork

    def stop_at_the_second(byte_offset: int) -> None:
        if byte_offset:
            reached.set()
            assert go.wait(30)

    def fork_and_tell() -> int:
        forked.append(fork())
        return forked[-1]

    with between_blocks(stop_at_the_second), pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytecheckpoint.forking._fork", fork_and_tell)
        handle = save(path, large_state(value), "fork")
        try:
            assert reached.wait(20)
            yield handle, forked[0]
        finally:
            go.set()
            with suppress(bcp.CheckpointError):
                handle.result(30)


def is_whole(path: Path, value: int = 1) -> bool:
    return bcp.open(path)["x"][:].unique().tolist() == [value]


def test_a_child_that_is_killed_is_an_error_and_the_next_save_works(tmp_path: Path) -> None:
    with forked_save(tmp_path / "ckpt") as (handle, child):
        os.kill(child, signal.SIGKILL)
    with pytest.raises(bcp.CheckpointSaveError, match=f"pid {child}.*died of signal 9 .SIGKILL.") as raised:
        handle.result(0)
    assert raised.value.kind == "writer_died"
    assert "nothing was committed" in str(raised.value)
    assert not (tmp_path / "ckpt").exists() or not any((tmp_path / "ckpt").rglob("*.*"))
    assert child not in children()
    save(tmp_path / "ckpt", large_state(2), "fork").result(30)
    assert is_whole(tmp_path / "ckpt", 2)


def test_a_child_that_crashes_is_an_error_that_names_the_signal(tmp_path: Path) -> None:
    with forked_save(tmp_path) as (handle, child):
        os.kill(child, signal.SIGSEGV)
    with pytest.raises(bcp.CheckpointSaveError, match="SIGSEGV"):
        handle.result(0)


def test_a_child_that_is_killed_while_it_is_asked_is_noticed(tmp_path: Path) -> None:
    """Stopped first, so that a request is on its way when it dies."""
    with forked_save(tmp_path) as (handle, child):
        os.kill(child, signal.SIGSTOP)
        killing = threading.Timer(0.3, lambda: os.kill(child, signal.SIGKILL))
        killing.start()
    with pytest.raises(bcp.CheckpointSaveError, match="SIGKILL"):
        handle.result(0)


ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGQUIT]


@pytest.mark.parametrize("number", ENDING)
def test_signals_that_are_meant_for_training_do_not_end_a_save(tmp_path: Path, number: signal.Signals) -> None:
    """Schedulers send them to whole process groups; a program that ends in good order then needs its save."""
    with forked_save(tmp_path) as (handle, child):
        os.kill(child, number)
        time.sleep(0.05)
    handle.result(0)
    assert is_whole(tmp_path)


def test_handlers_of_training_do_not_run_in_the_child(tmp_path: Path) -> None:
    written, write = os.pipe()
    handler = signal.signal(signal.SIGUSR1, lambda *_: os.write(write, b"!"))
    try:
        with forked_save(tmp_path) as (handle, child):
            os.kill(child, signal.SIGUSR1)
            time.sleep(0.05)
        handle.result(0)
        os.set_blocking(written, False)
        with pytest.raises(BlockingIOError):
            os.read(written, 1)
    finally:
        signal.signal(signal.SIGUSR1, handler)
        os.close(written)
        os.close(write)


def test_signals_that_come_during_the_fork_reach_training(tmp_path: Path) -> None:
    arrived: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, _: arrived.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for step in range(5):
            save(tmp_path, state_of(0, float(step)), "fork", step=step).result(20)
        signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert arrived
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert all(loads_as(tmp_path, 0, float(step), step=step) for step in range(5))


@pytest.mark.parametrize("disposition", ["handler", "ignored", "reaping loop"])
def test_whoever_else_waits_for_children_does_not_break_a_save(tmp_path: Path, disposition: str) -> None:
    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def loop() -> None:
        while not stop.is_set():
            reap()
            time.sleep(0.001)

    stop = threading.Event()
    handlers = {"handler": reap, "ignored": signal.SIG_IGN, "reaping loop": signal.SIG_DFL}
    before = signal.signal(signal.SIGCHLD, handlers[disposition])
    try:
        with running([loop] if disposition == "reaping loop" else [], stop):
            for step in range(3):
                save(tmp_path, state_of(0, float(step)), "fork", step=step).result(20)
            with forked_save(tmp_path / "killed") as (handle, child):
                os.kill(child, signal.SIGKILL)
                time.sleep(0.1)
            with pytest.raises(bcp.CheckpointSaveError, match="died of") as raised:
                handle.result(0)
            assert raised.value.kind == "writer_died"
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert all(loads_as(tmp_path, 0, float(step), step=step) for step in range(3))
    assert child not in children()


def test_another_process_with_the_number_of_a_dead_child_is_not_killed(tmp_path: Path) -> None:
    with forked_save(tmp_path) as (handle, child), pytest.MonkeyPatch.context() as patch:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed: list[int] = []
        patch.setattr("bytecheckpoint.forking.os.kill", lambda pid, _: killed.append(pid))
        with pytest.raises(TimeoutError):
            handle.result(0.01)
    assert isinstance(handle.exception(20), bcp.CheckpointSaveError)
    assert killed == []


def test_a_fork_that_is_refused_is_an_error_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(12, "Cannot allocate memory")

    save(tmp_path / "first", {"x": torch.ones(3)}, "fork").result(20)
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("bytecheckpoint.forking.os.fork", refuse)
    with pytest.raises(bcp.CheckpointSaveError, match=r"could not be forked.*Cannot allocate.*use 'copy' or 'lazy'"):
        save(tmp_path / "second", {"x": torch.ones(3)}, "fork")
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert not (tmp_path / "second").exists()
    save(tmp_path / "second", {"x": torch.ones(3)}, "fork").result(20)


def test_the_child_keeps_nothing_open_that_training_has(tmp_path: Path) -> None:
    """Who reads a pipe to its end must not wait for a save."""
    ours, theirs = os.pipe()
    with forked_save(tmp_path) as (_, child):
        os.close(theirs)
        assert os.read(ours, 1) == b""
        assert len(os.listdir(f"/proc/{child}/fd")) <= 5
        answer = subprocess.run(["cat"], input=b"through a pipe", stdout=subprocess.PIPE, timeout=10, check=True)
        assert answer.stdout == b"through a pipe"
    os.close(ours)


def test_programs_that_other_threads_start_do_not_wait_for_a_save(tmp_path: Path) -> None:
    stop = threading.Event()
    longest_s = 0.0

    def start_programs() -> None:
        nonlocal longest_s
        while not stop.is_set():
            started = time.monotonic()
            subprocess.run(["cat"], input=b"x", stdout=subprocess.PIPE, timeout=20, check=True)
            longest_s = max(longest_s, time.monotonic() - started)

    with running([start_programs] * 2, stop):
        for step in range(3):
            with forked_save(tmp_path / str(step)):
                time.sleep(0.1)
    assert longest_s < 10


def test_the_child_steps_back_behind_training(tmp_path: Path) -> None:
    with forked_save(tmp_path) as (_, child):
        assert os.getpriority(os.PRIO_PROCESS, child) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.sched_getscheduler(child) == os.SCHED_BATCH


def test_no_child_is_left_when_a_save_has_ended_well_or_not(tmp_path: Path) -> None:
    before = children()
    with forked_save(tmp_path / "a") as (handle, child):
        assert child in children()
    assert handle.exception(20) is None
    assert children() == before


def _idle(stop: multiprocessing.synchronize.Event) -> None:
    stop.wait(20)


def test_a_process_that_is_forked_during_a_save_does_not_hold_it_up(tmp_path: Path) -> None:
    """It has copies of both ends of the pipes, and goes on to live."""
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    with forked_save(tmp_path / "killed") as (handle, child):
        worker = context.Process(target=_idle, args=(stop,))
        worker.start()
        os.kill(child, signal.SIGKILL)
    with pytest.raises(bcp.CheckpointSaveError, match="SIGKILL"):
        handle.result(0)
    save(tmp_path / "next", large_state(2), "fork").result(20)
    assert worker.is_alive()
    stop.set()
    worker.join(20)
    assert worker.exitcode == 0
    assert is_whole(tmp_path / "next", 2)


def test_only_memory_that_a_child_gets_a_copy_of_counts_as_private() -> None:
    private = torch.ones(5 << 20, dtype=torch.uint8)
    shared = torch.ones(5 << 20, dtype=torch.uint8).share_memory_()
    memory = _PrivateMemory()
    assert memory.holds(private.data_ptr(), private.nbytes)
    assert memory.holds(private.data_ptr() + 17, 100)
    assert not memory.holds(shared.data_ptr(), 1)
    assert not memory.holds(shared.data_ptr() + shared.nbytes - 1, 2)
    assert not memory.holds(4096, 8192)


def test_what_is_given_back_early_is_what_nothing_else_is_gathered_from(tmp_path: Path) -> None:
    """Views that share pages, in files of their own, in every order."""
    base = torch.from_numpy(np.random.default_rng(0).integers(0, 255, 12 << 20, dtype=np.uint8))
    bounds = [(0, 12), (1, 5), (2, 3), (4, 9), (8, 12), (9, 10), (0, 1)]
    state = {f"v{start}-{end}": base[start << 20 : end << 20] for start, end in bounds}
    state |= {f"odd{start}-{end}": base[(start << 20) + 1 : (end << 20) - 1] for start, end in bounds}
    expected = bits_of_all(state)
    with paused() as go:
        handle = bcp.save(
            tmp_path, state, async_save=True, options=bcp.SaveOptions(snapshot="fork", max_file_bytes=1 << 20)
        )
        base.zero_()
        go.set()
        handle.result(30)
    assert differing(saved_bits(tmp_path), expected) == []


def test_a_forked_state_that_is_never_asked_can_be_closed() -> None:
    state = ForkedState([], Scratch(1 << 16, 2, is_shared=True))
    state.stage()
    state.close()
