"""A copy that is begun before it is certain that it is the right one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.staging.file_image import LiveFile, PlannedFile
from bytecheckpoint.staging.snapshots import ProposedState, StagedState

NUM_BLOCKS, BLOCK_BYTES = 4, 4096


class File(LiveFile):
    """Blocks of one value, slow to gather."""

    def __init__(self, value: int, go: threading.Event) -> None:
        blocks = [Block(number * BLOCK_BYTES, BLOCK_BYTES) for number in range(NUM_BLOCKS)]
        none = np.zeros(0, np.int64)
        self.planned = PlannedFile((), (), (), b"", (), blocks, NUM_BLOCKS * BLOCK_BYTES, none, none)
        self._value, self._go = value, go
        self.begun = threading.Event()
        self.num_gathered = 0

    def leave_out_devices(self) -> dict[int, torch.Tensor]:
        return {}

    def gather(self, _byte_offset: int, into: memoryview) -> None:
        self.begun.set()
        assert self._go.wait(20)
        into[:] = bytes([self._value]) * into.nbytes
        self.num_gathered += 1


def staged(files: Sequence[LiveFile], memory: bytearray, threads: int = 2) -> StagedState:
    return StagedState(files, memoryview(memory), {}, threads=threads)


def wait_until_failed(state: StagedState) -> None:
    """Returns when `fail` was called on another thread, which may still wait in it."""
    give_up = time.monotonic() + 20
    while state._error is None:
        assert time.monotonic() < give_up
        time.sleep(0.001)


def held(is_held: bool) -> threading.Event:
    event = threading.Event()
    if not is_held:
        event.set()
    return event


def test_what_is_right_is_staged_once_and_given() -> None:
    file = File(1, held(False))
    state = ProposedState(staged([file], bytearray(NUM_BLOCKS * BLOCK_BYTES)))
    state.agree(None)
    state.stage()
    state.wait()
    with state.content(Block(0, BLOCK_BYTES)) as content:
        assert bytes(content) == b"\1" * BLOCK_BYTES
    assert file.num_gathered == NUM_BLOCKS


def test_another_one_in_the_same_memory_is_not_overwritten_by_the_wrong_one() -> None:
    memory, go = bytearray(NUM_BLOCKS * BLOCK_BYTES), held(True)
    state = ProposedState(staged([File(1, go)], memory))
    with ThreadPoolExecutor(2) as pool:
        staging, helping = pool.submit(state.stage), pool.submit(state.proposed.stage)
        state.agree(staged([File(2, held(False))], memory))
        time.sleep(0.05)  # threads that would be too early have begun
        assert not any(memory)
        go.set()
        helping.result(20)
        staging.result(20)
    state.wait()
    with state.content(Block(BLOCK_BYTES, BLOCK_BYTES)) as content:
        assert bytes(content) == b"\2" * BLOCK_BYTES
    assert bytes(memory) == b"\2" * len(memory)


def test_staging_ends_only_when_the_plan_is_agreed() -> None:
    state = ProposedState(staged([File(1, held(False))], bytearray(NUM_BLOCKS * BLOCK_BYTES)))
    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(state.stage)
        time.sleep(0.05)
        assert not staging.done()
        state.agree(None)
        staging.result(20)


def test_after_a_failure_nobody_writes_to_the_memory() -> None:
    memory, go = bytearray(NUM_BLOCKS * BLOCK_BYTES), held(True)
    file = File(1, go)
    state = ProposedState(staged([file], memory, threads=1))
    with ThreadPoolExecutor(2) as pool:
        staging = pool.submit(state.stage)
        assert file.begun.wait(20)
        failing = pool.submit(state.fail, ValueError("no"))
        wait_until_failed(state.proposed)
        time.sleep(0.05)
        assert not failing.done()  # a block is on its way
        go.set()
        failing.result(20)
        num_gathered = file.num_gathered
        with pytest.raises(ValueError, match="no"):
            staging.result(20)
    assert file.num_gathered == num_gathered < NUM_BLOCKS
    with pytest.raises(ValueError, match="no"), state.content(Block(0, 1)):
        pass


@pytest.mark.parametrize("is_right", [True, False])
def test_what_the_ranks_agree_on_after_a_failure_fails_as_well(is_right: bool) -> None:
    memory = bytearray(NUM_BLOCKS * BLOCK_BYTES)
    state = ProposedState(staged([File(1, held(False))], memory))
    state.fail(ValueError("no"))
    state.agree(None if is_right else staged([File(2, held(False))], memory))
    waiting = threading.Thread(target=state.wait, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive(), "the one that was settled on does not know of the failure"
    with pytest.raises(ValueError, match="no"), state.content(Block(0, 1)):
        pass
    with pytest.raises(ValueError, match="no"):
        state.stage()
    assert not any(memory)


def test_a_copy_that_has_failed_is_never_staged() -> None:
    memory = bytearray(NUM_BLOCKS * BLOCK_BYTES)
    state = staged([File(1, held(False))], memory)
    state.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        state.stage()
    with pytest.raises(ValueError, match="no"), state.content(Block(0, 1)):
        pass
    assert not any(memory)


def test_who_waits_for_a_copy_that_fails_goes_on_when_nobody_writes_to_its_memory() -> None:
    go = held(True)
    file = File(1, go)
    state = staged([file], bytearray(NUM_BLOCKS * BLOCK_BYTES), threads=1)
    with ThreadPoolExecutor(3) as pool:
        staging = pool.submit(state.stage)
        assert file.begun.wait(20)
        waiting, failing = pool.submit(state.wait), pool.submit(state.fail, ValueError("no"))
        wait_until_failed(state)
        time.sleep(0.05)
        assert not waiting.done()
        assert not failing.done()
        go.set()
        waiting.result(20)
        assert file.num_gathered == 1
        failing.result(20)
        with pytest.raises(ValueError, match="no"):
            staging.result(20)
