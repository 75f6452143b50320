"""What a SaveHandle promises: the state may change at once, the outcome is told in every way, and a failure that nobody
asked about is told by the next save.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from faults.seams import Seam, before, loads_as, raising, state_of

import bytecheckpoint as bcp
from bytecheckpoint.options import MIN_STAGING_BYTES
from bytecheckpoint.runtime.threads import ThreadPool
from bytecheckpoint.saving import commit, in_flight, write
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.prepare import PreparedSave

WRITING = Seam(write, "write_image")
WAITING = Seam(in_flight.SavesInFlight, "slot")


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written within the block until the event is set; it is in the end."""
    go = threading.Event()
    write_image = write.write_image

    def write_late(*arguments: Any) -> Any:
        assert go.wait(20)
        return write_image(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WRITING.owner, WRITING.name, write_late)
        try:
            yield go
        finally:
            go.set()


def every_kind_of_memory() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    return {
        "flat": base.clone(),
        "transposed": base.clone().T,
        "strided": base.clone()[:, ::2],
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "step": optimizer.state[parameter]["step"],
        "plain": {"epoch": 1, "seen": [1, 2]},
    }


def test_the_state_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    state, expected = every_kind_of_memory(), every_kind_of_memory()
    with held_back() as go:
        handle = bcp.save(tmp_path, state, async_save=True)
        assert not handle.done()
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.add_(100)
        state["plain"]["epoch"] = 2
        state["plain"]["seen"].append(3)
        go.set()
        handle.result(20)
    bcp.load(tmp_path, state)
    for name, value in expected.items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name


def test_a_handle_tells_how_far_it_is(tmp_path: Path) -> None:
    called: SimpleQueue[SaveHandle] = SimpleQueue()
    with held_back() as go:
        handle = bcp.save(tmp_path, state_of(0, 1.0), async_save=True)
        handle.add_done_callback(called.put)
        handle.staged()
        assert not handle.done()
        assert called.empty()
        assert "under way" in repr(handle)
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)
        with pytest.raises(TimeoutError):
            handle.exception(timeout=0.01)
        go.set()
        info = handle.result(20)
    assert (info.path, info.step, info.num_tensors) == (str(tmp_path), None, 2)
    assert handle.done()
    assert handle.exception() is None
    assert called.get(timeout=20) is handle  # which may come a little after the result
    handle.add_done_callback(called.put)
    assert called.get_nowait() is handle
    assert called.empty()
    assert "done" in repr(handle)


def test_a_synchronous_save_gives_a_finished_handle(tmp_path: Path) -> None:
    handle = bcp.save(tmp_path, state_of(0, 1.0))
    handle.staged()
    assert handle.done()
    assert handle.exception(0) is None
    assert handle.result(0).num_tensors == 2


def failed_save(path: Path) -> SaveHandle:
    with before(WRITING, raising(OSError(5, "the disk fell off"))):
        handle = bcp.save(path, state_of(0, 1.0), async_save=True)
        while not handle.done():
            threading.Event().wait(0.001)
    return handle


def test_a_failed_save_raises_in_result_every_time(tmp_path: Path) -> None:
    handle = failed_save(tmp_path)
    for _ in range(2):
        with pytest.raises(bcp.CheckpointSaveError, match="the disk fell off") as raised:
            handle.result()
        assert raised.value.kind == "rank_failed"
        with pytest.raises(bcp.CheckpointSaveError, match="the disk fell off"):
            handle.staged()
    assert isinstance(handle.exception(), bcp.CheckpointSaveError)
    assert "failed" in repr(handle)
    bcp.save(tmp_path, state_of(0, 2.0))
    assert loads_as(tmp_path, 0, 2.0)


def raise_caused_by_itself(*_: Any) -> None:
    error = OSError(5, "its own cause")
    raise error from error


def raise_caused_by_its_own_effect(*_: Any) -> None:
    first, second = OSError(5, "the first of a circle"), OSError(5, "the second of a circle")
    first.__context__ = second
    raise second from first


@pytest.mark.parametrize("fail", [raise_caused_by_itself, raise_caused_by_its_own_effect])
def test_a_failure_whose_causes_form_a_circle_ends_the_save(tmp_path: Path, fail: Callable[..., None]) -> None:
    with before(WRITING, fail):
        handle = bcp.save(tmp_path, state_of(0, 1.0), async_save=True)
        with pytest.raises(bcp.CheckpointSaveError, match=r"its own cause|of a circle"):
            handle.result(20)
    bcp.save(tmp_path, state_of(0, 2.0))
    assert loads_as(tmp_path, 0, 2.0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_that_nobody_saw_raises_at_the_next_save_and_only_there(tmp_path: Path, is_async: bool) -> None:
    failed_save(tmp_path / "first")
    with pytest.raises(bcp.CheckpointSaveError, match="this one was not begun") as raised:
        bcp.save(tmp_path / "second", state_of(0, 2.0), async_save=is_async)
    assert "the disk fell off" in str(raised.value)
    assert raised.value.path == str(tmp_path / "first")
    assert not (tmp_path / "second").exists()
    bcp.save(tmp_path / "second", state_of(0, 3.0), async_save=is_async).result()
    assert loads_as(tmp_path / "second", 0, 3.0)


def test_a_callback_is_no_one_who_saw_a_failure(tmp_path: Path) -> None:
    handle = failed_save(tmp_path)
    handle.add_done_callback(lambda _: None)
    with pytest.raises(bcp.CheckpointSaveError):
        bcp.save(tmp_path, state_of(0, 2.0))


def test_a_timeout_is_no_one_who_saw_a_failure(tmp_path: Path) -> None:
    with held_back() as go, before(Seam(commit, "encode_report"), raising(OSError(5, "gone"))):
        handle = bcp.save(tmp_path, state_of(0, 1.0), async_save=True)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        go.set()
        with pytest.raises(bcp.CheckpointSaveError, match="this one was not begun"):
            bcp.save(tmp_path, state_of(0, 2.0))


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    with held_back() as go:
        first = bcp.save(tmp_path, state_of(0, 1.0), step=1, async_save=True)
        with before(WAITING, threading.Timer(0.2, go.set).start):
            second = bcp.save(tmp_path, state_of(0, 2.0), step=2, async_save=True)
        assert first.result(20).step == 1  # its slot is free a moment before its outcome is set
        info = second.result(20)
    assert info.seconds["wait"] > 0.05
    assert info.seconds["stall"] >= info.seconds["wait"]
    assert bcp.steps(tmp_path) == [1, 2]
    assert loads_as(tmp_path, 0, 2.0)


def test_a_thread_that_cannot_start_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPool, "begin", no_more)
    handle = bcp.save(tmp_path, {"x": torch.ones(3)}, async_save=True)
    assert handle.done()
    handle.result(0)
    monkeypatch.undo()
    bcp.save(tmp_path / "next", {"x": torch.ones(3)})


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_ctrl_c_in_a_save_that_no_thread_can_write_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Any
) -> None:
    monkeypatch.setattr(in_flight.SavesInFlight, "begin_thread", lambda *_: False)
    options = bcp.SaveOptions(snapshot=snapshot)
    with before(WRITING, raising(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        bcp.save(tmp_path, state_of(0, 1.0), async_save=True, options=options)
    assert not (tmp_path / "manifest.bcp").exists()
    bcp.save(tmp_path, state_of(0, 2.0), async_save=True, options=options)  # and raises it no second time
    assert loads_as(tmp_path, 0, 2.0)


def test_what_ranks_refuse_where_no_thread_can_start_is_told_by_the_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.ones(3)}
    bcp.save(tmp_path, state)  # whose plan is known from now on
    monkeypatch.setattr(in_flight.SavesInFlight, "begin_thread", lambda *_: False)
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(snapshot="lazy"))
    assert handle.done()
    assert isinstance(handle.exception(0), bcp.CheckpointExistsError)


@pytest.mark.parametrize("snapshot", ["copy", "lazy", "waves"])
def test_the_handle_of_a_failed_save_does_not_keep_the_state(tmp_path: Path, snapshot: str) -> None:
    staging_bytes = MIN_STAGING_BYTES if snapshot == "waves" else None
    state = {"x": torch.ones(1000 if staging_bytes is None else staging_bytes // 4)}
    kept = weakref.ref(state["x"])
    with before(Seam(commit, "encode_report"), raising(OSError(5, "the disk fell off"))):
        kind: Any = "copy" if staging_bytes else snapshot
        options = bcp.SaveOptions(snapshot=kind, staging_bytes=staging_bytes)
        handle = bcp.save(tmp_path, state, async_save=True, options=options)
        assert isinstance(handle.exception(20), bcp.CheckpointSaveError)
    del state
    assert is_let_go(kept)


class Calling:
    """What calls something when its state is asked for."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"count": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Nothing is put back."""


def test_what_a_state_calls_may_load_inside_an_asynchronous_save_and_not_save(tmp_path: Path) -> None:
    bcp.save(tmp_path / "first", state_of(0, 1.0))
    loading = Calling(lambda: loads_as(tmp_path / "first", 0, 1.0))
    bcp.save(tmp_path / "second", {"x": loading}, async_save=True).result(20)
    saving = Calling(lambda: bcp.save(tmp_path / "inside", state_of(0, 2.0)))
    with pytest.raises(bcp.CheckpointSaveError, match="this thread is inside a save"):
        bcp.save(tmp_path / "third", {"x": saving}, async_save=True)
    assert not (tmp_path / "inside").exists()
    bcp.save(tmp_path / "third", {"x": loading}, async_save=True).result(20)


class Batch:
    """What the caller of a save has in its frame, as it has the state."""


def is_let_go(kept: weakref.ref[Any]) -> bool:
    """Soon: the thread that has ended a save may still be in its last function."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        gc.collect()
        if kept() is None:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("ask", [SaveHandle.result, SaveHandle.staged], ids=["result", "staged"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_failure_that_was_raised_does_not_keep_what_the_caller_knew(
    tmp_path: Path, ask: Callable[[SaveHandle], object], has_ended: bool
) -> None:
    def train() -> weakref.ref[Batch]:
        batch = Batch()
        with before(WRITING, raising(OSError(5, "the disk fell off"))):
            handle = bcp.save(tmp_path, state_of(0, 1.0), async_save=True)
            if has_ended:
                wait([handle._progress.outcome])
            with pytest.raises(bcp.CheckpointSaveError):
                handle.result(20)
        with pytest.raises(bcp.CheckpointSaveError):
            ask(handle)
        return weakref.ref(batch)

    assert is_let_go(train())


def test_a_save_that_ended_well_does_not_keep_its_callbacks(tmp_path: Path) -> None:
    def train() -> weakref.ref[Batch]:
        batch = Batch()
        handle = bcp.save(tmp_path, state_of(0, 1.0), async_save=True)
        handle.add_done_callback(lambda _: batch)
        handle.result(20)
        return weakref.ref(batch)

    assert is_let_go(train())


def test_a_save_that_is_interrupted_before_its_thread_begins_gives_its_turn_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ThreadPool.begin

    def interrupted(threads: ThreadPool, name: str, do: Callable[[], object]) -> None:
        if name == "bcp-save":
            raise KeyboardInterrupt
        begin(threads, name, do)

    state = {"w": torch.ones(10)}
    monkeypatch.setattr(ThreadPool, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bcp.save(tmp_path / "a", state, async_save=True)
    monkeypatch.undo()
    bcp.load(bcp.save(tmp_path / "b", state, async_save=True).result(20).path, state)
    assert bcp.latest(tmp_path / "a") is None
    assert torch.equal(bcp.open(tmp_path / "b")["w"][:], state["w"])


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_a_save_that_is_interrupted_while_its_threads_start_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: str
) -> None:
    begin = ThreadPool.begin

    def interrupted(threads: ThreadPool, name: str, do: Callable[[], object]) -> None:
        begin(threads, name, do)
        if name == "bcp-save":
            raise KeyboardInterrupt

    state = {"w": torch.ones(10)}
    monkeypatch.setattr(ThreadPool, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bcp.save(tmp_path / "a", state, async_save=True, options=bcp.SaveOptions(snapshot=snapshot))
    monkeypatch.undo()
    with contextlib.suppress(bcp.CheckpointSaveError):  # the interrupted one's, if it was not committed
        bcp.save(tmp_path / "b", state)
    bcp.save(tmp_path / "c", state)
    assert torch.equal(bcp.open(tmp_path / "c")["w"][:], state["w"])


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_lazy_save_whose_staging_cannot_begin_fails_and_the_next_one_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_begun: bool
) -> None:
    begin, lazy = ThreadPool.begin, bcp.SaveOptions(snapshot="lazy")

    def without_memory(threads: ThreadPool, name: str, do: Callable[[], object]) -> None:
        if name != "bcp-stage" or is_begun:
            begin(threads, name, do)
        if name == "bcp-stage":
            raise MemoryError

    state = {"w": torch.ones(10)}
    bcp.save(tmp_path / "first", state, async_save=True, options=lazy).result(20)  # its plan is known now
    monkeypatch.setattr(ThreadPool, "begin", without_memory)
    handle = bcp.save(tmp_path / "a", state, async_save=True, options=lazy)
    error = handle.exception(20)
    if error is None:  # staging was through before it was told not to go on
        assert is_begun
    else:
        assert isinstance(error, bcp.CheckpointSaveError)
        assert "MemoryError" in str(error)
    assert (tmp_path / "a" / "manifest.bcp").exists() == (error is None)
    monkeypatch.undo()
    bcp.save(tmp_path / "b", state, async_save=True, options=lazy).result(20)
    assert torch.equal(bcp.open(tmp_path / "b")["w"][:], state["w"])


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_an_interrupt_where_there_can_be_no_thread_reaches_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: str
) -> None:
    original, state = PreparedSave.prepare_without_thread, {"w": torch.ones(10)}
    bcp.save(tmp_path / "first", state, async_save=True, options=bcp.SaveOptions(snapshot=snapshot)).result(20)

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def interrupted(prepared: PreparedSave) -> None:
        original(prepared)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPool, "begin", no_thread)
    monkeypatch.setattr(PreparedSave, "prepare_without_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bcp.save(tmp_path / "a", state, async_save=True, options=bcp.SaveOptions(snapshot=snapshot))
    monkeypatch.undo()
    assert process_state().saves._all == ()  # the interpreter would wait for it
    bcp.save(tmp_path / "b", state)
    assert not (tmp_path / "a" / "manifest.bcp").exists()
    assert torch.equal(bcp.open(tmp_path / "b")["w"][:], state["w"])


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_launched_process_without_a_process_group_is_warned_that_it_saves_alone(
    tmp_path, monkeypatch, world_size
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    if world_size == "1":
        bcp.save(tmp_path / "c", {"x": 1})
    else:
        with pytest.warns(UserWarning, match="init_process_group") as warned:
            bcp.save(tmp_path / "c", {"x": 1})
        assert warned[0].filename == __file__  # the line that saves, and none of this library
    bcp.load(tmp_path / "c", {"x": 1})
