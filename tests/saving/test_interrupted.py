"""What waits for other threads is never left waiting: interrupts and failed allocations at bad moments, and several
saves that share what there is little of.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.saving.in_flight import wait_until_staged
from bytecheckpoint.staging import compress, file_image, snapshots
from bytecheckpoint.storage import range_reader

WAIT_S = 100
WAVES = bcp.SaveOptions(snapshot="lazy", staging_bytes=32 << 20)


def ends(do: Callable[[], object]) -> BaseException | None:
    """What it raises, on a thread of its own; fails where it does not end."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  returned
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert outcome, "it did not end"
    return outcome[0]


def test_a_state_that_is_staged_in_waves_waits_for_all_of_them(tmp_path: Path) -> None:
    """Whoever waits, from whichever thread: the caller must not stage in place of the background and let others go."""
    tensor = torch.ones(96 << 20, dtype=torch.uint8)
    handle = bcp.save(tmp_path, {"x": tensor}, async_save=True, options=WAVES)

    def change() -> None:
        wait_until_staged()
        tensor.fill_(7)

    others = [threading.Thread(target=change) for _ in range(3)]
    for other in others:
        other.start()
    handle.staged()
    tensor.fill_(7)
    handle.result(WAIT_S)
    for other in others:
        other.join()
    assert bool((bcp.open(tmp_path)["x"][:] == 1).all())


def test_waves_that_cannot_be_staged_are_an_error_for_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(file_image.LiveFile, "gather", no_memory)
    handle = bcp.save(tmp_path, {"x": torch.ones(64 << 20, dtype=torch.uint8)}, async_save=True, options=WAVES)
    assert isinstance(ends(handle.staged), bcp.CheckpointSaveError)
    assert isinstance(ends(lambda: handle.result(WAIT_S)), bcp.CheckpointSaveError)


@pytest.mark.parametrize("where", ["before a block is noted as begun", "before it is taken off", "after that"])
def test_an_interrupt_between_two_steps_of_staging_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    begin_one = snapshots.StagedState._begin_one
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    caller: list[threading.Thread] = []
    left = [KeyboardInterrupt()]

    def interrupt(here: str) -> None:
        if here == where and threading.current_thread() in caller and left:
            raise left.pop()

    class Blocks(deque[int]):
        def __getitem__(self, index: Any) -> int:
            interrupt("before a block is noted as begun")
            return super().__getitem__(index)

        def popleft(self) -> int:
            interrupt("before it is taken off")
            return super().popleft()

    def interrupted(self: Any, *arguments: Any) -> Any:
        result = begin_one(self, *arguments)
        interrupt("after that")
        return result

    monkeypatch.setattr(snapshots, "deque", Blocks)
    monkeypatch.setattr(snapshots.StagedState, "_begin_one", interrupted)

    def save() -> None:
        caller.append(threading.current_thread())
        bcp.save(tmp_path, {"x": torch.ones(48 << 20, dtype=torch.uint8)}, async_save=True)

    assert isinstance(ends(save), KeyboardInterrupt)
    monkeypatch.undo()
    assert ends(lambda: bcp.save(tmp_path / "next", {"x": torch.ones(3)})) is None


def test_an_interrupt_before_the_first_frame_of_a_chunk_ends_compressing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = compress._CompressedChunk.add

    def interrupted(self: Any, number: int, *arguments: Any) -> float:
        if number == 0:
            raise KeyboardInterrupt
        return original(self, number, *arguments)

    monkeypatch.setattr(compress._CompressedChunk, "add", interrupted)
    options = bcp.SaveOptions(codec="zstd", writer_threads=2)
    error = ends(lambda: bcp.save(tmp_path, {"x": torch.zeros(2 << 20)}, options=options))
    assert isinstance(error, KeyboardInterrupt)


def test_compressing_saves_on_several_threads_do_not_wait_for_one_another(tmp_path: Path) -> None:
    states = [{"x": torch.randn(9 << 20)} for _ in range(4)]
    meeting = threading.Barrier(len(states))

    def save(number: int) -> None:
        meeting.wait(WAIT_S)
        bcp.save(tmp_path / str(number), states[number], options=bcp.SaveOptions(codec="zstd"))

    threads = [threading.Thread(target=save, args=(number,), daemon=True) for number in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for number, state in enumerate(states):
        assert torch.equal(bcp.open(tmp_path / str(number))["x"][:], state["x"])


class NoStore:
    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
        """Leaves the bytes as they are."""


def test_reads_do_not_wait_for_scratch_memory_that_could_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty
    left = [MemoryError("no memory")]

    def failing(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return empty(*arguments)

    monkeypatch.setattr(range_reader.np, "empty", failing)
    file = DataFile("f", 1000)
    reads = [Fetch(0, start, 100, (), is_direct=False) for start in range(0, 1000, 100)]

    def run() -> None:
        memory = range_reader.HostMemory()
        range_reader.run_fetches(
            NoStore(), "", [file], reads, threads=4, verify=False, scratch_bytes=100, memory=memory
        )

    assert isinstance(ends(run), MemoryError)


def test_an_interrupted_load_drops_the_reads_that_have_not_begun() -> None:
    begun: list[str] = []
    ended: list[str] = []
    is_interrupted = threading.Event()

    class Interrupting:
        def read_into(self, *_: object, **__: object) -> None:
            begun.append(threading.current_thread().name)
            if threading.current_thread() is threading.main_thread():
                is_interrupted.set()
                raise KeyboardInterrupt
            assert is_interrupted.wait(WAIT_S)
            time.sleep(0.2)
            ended.append(threading.current_thread().name)

    file = DataFile("f", 1000)
    reads = [Fetch(0, start, 10, (), is_direct=False) for start in range(0, 1000, 10)]
    with pytest.raises(KeyboardInterrupt):
        range_reader.run_fetches(
            Interrupting(),
            "",
            [file],
            reads,
            threads=3,
            verify=False,
            scratch_bytes=1 << 20,
            memory=range_reader.HostMemory(),
        )
    assert len(begun) < 50  # of 100; on a busy machine some begin before the interrupt is known
    assert len(ended) == len(begun) - 1  # nobody is at work any more
