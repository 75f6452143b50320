"""Many saves in a row leave nothing behind: no memory, thread, file descriptor, process or shared memory. And processes
that are forked meanwhile, as data loaders do, neither hang nor spoil a save.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults.seams import state_of
from snapshot_cases import KINDS, bits_of_all, differing, mutating, save, saved_bits, slowed

import bytecheckpoint as bcp
from bytecheckpoint.storage.paths import join_name
from distributed.workers import WorkerPool

NUM_SAVES = 200
NUM_WARM_UP_SAVES = 60
MAX_MORE_THREADS = 2
"""Threads are kept for the next job, and on a busy machine more jobs may come together than before: far fewer than one
a save, which a leak would be.
"""


SETTLED_S = 30.0


class Held(NamedTuple):
    """What this process holds."""

    threads: int
    descriptors: int
    children: int
    """Those that have ended and were not waited for, too."""
    shared_files: int
    """Under /dev/shm, of this process: others of the machine come and go."""
    shared_bytes: int
    resident_bytes: int


def held() -> Held:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    maps = Path("/proc/self/maps").read_text()
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.exists()]
    return Held(
        threads=threading.active_count(),
        descriptors=len(os.listdir("/proc/self/fd")),
        children=sum(len((task / "children").read_text().split()) for task in tasks),
        shared_files=sum(name in maps or str(os.getpid()) in name for name in shared),
        shared_bytes=int(status["RssShmem"].split()[0]) << 10,
        resident_bytes=int(status["VmRSS"].split()[0]) << 10,
    )


def save_again_and_again(rank: int, world_size: int, path: str, kind: str) -> tuple[Held, Held]:
    state = state_of(rank, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)  # a disk that others use would take most of the time
        save_steps(path, state, kind, range(NUM_WARM_UP_SAVES))
        before = held()
        save_steps(path, state, kind, range(NUM_WARM_UP_SAVES, NUM_SAVES))
        return before, held_in_the_end(before)


def held_in_the_end(before: Held) -> Held:
    """What is held once that is no more than before, or after SETTLED_S: on a busy machine a thread that is ending, and
    what it holds, may take a while.
    """
    deadline = time.monotonic() + SETTLED_S
    while not is_no_more(after := held(), before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return after


def is_no_more(after: Held, before: Held) -> bool:
    """Fewer are no leak: what was ending before has ended."""
    is_counted = all(now <= then for now, then in zip(after[1:4], before[1:4], strict=True))
    is_small = after.shared_bytes <= before.shared_bytes + (1 << 20)
    is_small &= after.resident_bytes <= before.resident_bytes + (24 << 20)
    return is_counted and is_small and after.threads <= before.threads + MAX_MORE_THREADS


def save_steps(path: str, state: dict[str, Any], kind: str, steps: range) -> None:
    """Each a save to one of several paths, begun while the one before may still be under way."""
    for step in steps:
        handle = save(join_name(path, str(step % 5)), state, kind, step=step)
        state["all"].add_(1)
        if step == steps[-1]:
            handle.result(20)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="/proc tells what a process holds")
@pytest.mark.parametrize("kind", [*KINDS, "waves"])
def test_two_hundred_saves_leave_nothing_behind(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    ((before, after),) = workers.run(
        save_again_and_again, str(tmp_path), kind, world_size=1, process_group=False, timeout_s=150
    )
    assert is_no_more(after, before), (before, after)
    assert bcp.open(tmp_path / "4", 199)["all"][:].unique().tolist() == [199.0]


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), float(index)) ** 2


def batches(**arguments: object) -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=100, **arguments
    )


def large_state() -> dict[str, torch.Tensor]:
    return {
        "flat": torch.randn(9 << 20),
        "strided": torch.randn(500, 100)[:, ::3],
        "shared": torch.ones(9).share_memory_(),
    }


@pytest.mark.parametrize("kind", [*KINDS, "waves"])
def test_a_data_loader_that_is_started_during_a_save(tmp_path: Path, kind: str) -> None:
    state = large_state()
    expected = bits_of_all(state)
    with slowed(0.1):
        handle = save(tmp_path, state, kind)
        with mutating(state, num_threads=1):
            for _ in range(2):
                assert torch.cat(list(batches()))[:, 0].tolist() == [float(index**2) for index in range(16)]
            handle.result(30)
    assert differing(saved_bits(tmp_path), expected) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_data_loader_whose_workers_live_on_during_saves(tmp_path: Path, kind: str) -> None:
    loader = batches(persistent_workers=True)
    state = large_state()
    for step in range(3):
        expected = bits_of_all(state)
        found = iter(loader)
        next(found)
        handle = save(tmp_path, state, kind, step=step)
        for tensor in state.values():
            tensor.add_(1)
        assert len(list(found)) == 3
        handle.result(30)
        assert differing(saved_bits(tmp_path / f"step_{step:08}"), expected) == []
    del found, loader


def test_a_forked_process_can_save_by_itself_in_every_way(tmp_path: Path) -> None:
    """It has nothing of the memory that its parent kept."""
    context = torch.multiprocessing.get_context("fork")
    for kind in KINDS:
        with slowed(0.1):
            handle = save(tmp_path / "parent" / kind, large_state(), kind)
            child = context.Process(target=_save_all, args=(str(tmp_path / "child" / kind),))
            child.start()
            child.join(100)
            handle.result(30)
        assert child.exitcode == 0
        for each in KINDS:
            assert bcp.open(tmp_path / "child" / kind / each)["all"].shape == (700, 501)


def _save_all(path: str) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        save(join_name(path, kind), state_of(0, 1.0), kind).result(20)
