"""Whatever the kind of a snapshot: the saved values are those at the call, however hard the state is changed from the
moment on at which it may be.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before, loads_as, raising, state_of
from sample_tensors import bits_of
from snapshot_cases import (
    KINDS,
    OPTIONS,
    bits_of_all,
    differing,
    every_memory,
    mutating,
    paused,
    save,
    saved_bits,
    slowed,
)

import bytecheckpoint as bcp
from bytecheckpoint.runtime.threads import ThreadPool
from bytecheckpoint.saving import prepare
from bytecheckpoint.saving.in_flight import SavesInFlight
from bytecheckpoint.staging import file_image
from bytecheckpoint.staging.snapshots import Snapshot, StagedState
from bytecheckpoint.storage.backends import direct_io

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


@pytest.mark.parametrize("kind", OPTIONS)
def test_saved_values_are_those_of_the_call_for_every_kind_of_memory(tmp_path: Path, kind: str) -> None:
    state: dict[str, Any] = every_memory(tmp_path)
    expected = bits_of_all(state)
    with slowed(0.02):
        handle = save(tmp_path / "ckpt", state | {"plain": {"epoch": 1}}, kind)
        with mutating(state):
            handle.result(60)
    assert differing(saved_bits(tmp_path / "ckpt"), expected) == []


@pytest.mark.parametrize("options", [bcp.SaveOptions(snapshot="auto"), bcp.SaveOptions()], ids=["auto", "default"])
def test_auto_is_a_copy_after_which_the_state_may_change_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: bcp.SaveOptions
) -> None:
    """A buffer that a forward pass changes is in the state, and nobody calls `staged`: lazy would be wrong here."""
    state: dict[str, Any] = every_memory(tmp_path)
    state["module"] = torch.nn.BatchNorm1d(64)
    tensors = {name: value for name, value in state.items() if name != "module"}
    expected = bits_of_all(tensors)
    running_mean = bits_of(state["module"].running_mean)
    made: list[type] = []
    new_snapshot = prepare.new_snapshot

    def take(*args: Any, **kwargs: Any) -> Snapshot:
        snapshot = new_snapshot(*args, **kwargs)
        made.append(type(snapshot))
        return snapshot

    monkeypatch.setattr(prepare, "new_snapshot", take)
    with paused() as go:
        handle = bcp.save(tmp_path / "ckpt", state, async_save=True, options=options)
        with mutating(tensors):
            state["module"](torch.randn(8, 64))
            go.set()
            handle.result(60)
    saved = saved_bits(tmp_path / "ckpt")
    assert saved.pop("module.running_mean") == running_mean
    assert differing({name: bits for name, bits in saved.items() if not name.startswith("module.")}, expected) == []
    assert made == [StagedState]


@pytest.mark.parametrize("kind", OPTIONS)
def test_saves_in_a_row_each_have_the_values_of_their_call(tmp_path: Path, kind: str) -> None:
    """From the second on, the plan and the memory are those of the save before."""
    state = {"flat": torch.zeros(10 << 20), "strided": torch.zeros(1000, 100)[:, ::2], "scalar": torch.tensor(0.0)}
    expected = {}
    for step in range(4):
        for tensor in state.values():
            tensor.fill_(step + 1)
        expected[step] = bits_of_all(state)
        with slowed(0.005):
            handle = save(tmp_path, state, kind, step=step)
            with mutating(state):
                handle.result(60)
    for step, bits in expected.items():
        assert differing(saved_bits(tmp_path / f"step_{step:08}"), bits) == []


@pytest.mark.parametrize("kind", OPTIONS)
def test_training_that_goes_on_changes_nothing_that_is_being_saved(tmp_path: Path, kind: str) -> None:
    """AdamW's step count is a tensor on the host, a BatchNorm's buffers change in the forward pass."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        scheduler.step()

    train()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(3):
        expected_model = {f"model.{name}": bits_of(value) for name, value in model.state_dict().items()}
        names = {parameter: name for name, parameter in model.named_parameters()}
        expected_optimizer = {
            f"optimizer.state.{names[parameter]}.{key}": bits_of(value)
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
        }
        epoch = scheduler.last_epoch
        with slowed(0.05):
            handle = bcp.save(tmp_path, state, step=step, async_save=True, options=OPTIONS[kind])
            while not handle.done():
                train()
        handle.result(20)
        assert differing(saved_bits(tmp_path / f"step_{step:08}"), expected_model | expected_optimizer) == []
        bcp.load(tmp_path, state)
        assert scheduler.last_epoch == epoch


@pytest.mark.parametrize("kind", KINDS)
def test_values_stay_those_of_the_call_when_the_tensors_are_freed(tmp_path: Path, kind: str) -> None:
    state = {f"t{number}": torch.full((100_000,), float(number)) for number in range(20)}
    expected = bits_of_all(state)
    with paused() as go:
        handle = save(tmp_path, state, kind)
        state.clear()
        noise = [torch.full((100_000,), -1.0) for _ in range(40)]
        go.set()
        handle.result(20)
    assert len(noise) == 40
    assert differing(saved_bits(tmp_path), expected) == []


@pytest.mark.parametrize("kind", KINDS)
def test_saves_from_a_thread_are_like_all_others(tmp_path: Path, kind: str) -> None:
    tensor = torch.full((3 << 20,), 5.0)

    def work() -> None:
        with paused() as go:
            handle = save(tmp_path, {"x": tensor}, kind)
            tensor.fill_(6.0)
            go.set()
            handle.result(20)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert bcp.open(tmp_path)["x"][:].unique().tolist() == [5.0]


@pytest.mark.parametrize("second", [*KINDS, "sync"])
@pytest.mark.parametrize("first", KINDS)
def test_a_save_waits_for_the_one_under_way_and_says_so(tmp_path: Path, first: str, second: str) -> None:
    state = state_of(0, 1.0)
    with paused() as go:
        running = save(tmp_path / "first", state, first)
        state["all"].fill_(2.0)
        state["own"]["rank0"].fill_(2.0)
        state["plain"]["value"] = 2.0
        is_sync = second == "sync"
        with before(Seam(SavesInFlight, "slot"), threading.Timer(0.15, go.set).start):
            handle = bcp.save(tmp_path / "second", state) if is_sync else save(tmp_path / "second", state, second)
        assert go.is_set()
        info = handle.result(20)
        running.result(20)
    assert info.seconds["wait"] > 0.05
    assert info.seconds["stall"] >= info.seconds["wait"]
    assert loads_as(tmp_path / "first", 0, 1.0)
    assert loads_as(tmp_path / "second", 0, 2.0)


def test_staging_memory_that_is_too_small_for_a_save_is_given_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"staging_bytes takes an integer of at least 33554432, not 1000"):
        bcp.SaveOptions(staging_bytes=1000)


@pytest.mark.parametrize("wrong", ["frok", "", None, True, 3, ("copy",)])
def test_a_snapshot_that_there_is_not_is_refused_with_those_that_there_are(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"snapshot takes one of 'auto', 'copy', 'lazy', not"):
        bcp.SaveOptions(snapshot=wrong)


def test_the_snapshot_that_was_removed_is_refused_with_what_to_take_instead() -> None:
    with pytest.raises(ValueError, match=r"snapshot='fork' was removed: take 'lazy', .* or 'copy'"):
        bcp.SaveOptions(snapshot="fork")


def test_a_state_of_many_times_the_staging_memory_goes_through_it(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((5 << 20,), number, dtype=torch.int32) for number in range(10)}
    expected = bits_of_all(state)
    handle = save(tmp_path, state, "waves")
    with mutating(state):
        handle.result(60)
    assert differing(saved_bits(tmp_path), expected) == []


def test_a_writer_that_fails_in_the_middle_of_the_waves_ends_the_save(tmp_path: Path) -> None:
    state = {"x": torch.zeros(200 << 20, dtype=torch.uint8)}
    with before(Seam(direct_io.DirectFile, "write"), raising(OSError(28, "full"))):
        handle = save(tmp_path, state, "waves")
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            handle.result(20)
    assert raised.value.kind == "no_space"
    save(tmp_path, state, "waves").result(20)


@pytest.mark.parametrize("kind", ["copy", "lazy", "waves"])
def test_staging_that_fails_fails_the_save_and_nothing_else(tmp_path: Path, kind: str) -> None:
    state = {"x": torch.zeros(40 << 20, dtype=torch.uint8)}
    with before(Seam(file_image.LiveFile, "gather"), raising(MemoryError("no memory for a copy"))):
        handle = bcp.save(tmp_path, state, async_save=True, options=OPTIONS[kind])
        with pytest.raises(bcp.CheckpointSaveError, match="no memory for a copy"):
            handle.result(20)
        with pytest.raises(bcp.CheckpointSaveError):
            handle.staged()
    assert not (tmp_path / "manifest.bcp").exists()
    save(tmp_path, state, kind).result(20)


def test_a_save_whose_thread_cannot_start_is_made_by_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    state = {"flat": torch.full((1 << 20,), 3.0), "strided": torch.ones(100, 100)[:, ::3]}
    for kind, options in OPTIONS.items():
        monkeypatch.setattr(threading.Thread, "start", no_more)
        monkeypatch.setattr(ThreadPool, "begin", no_more)
        handle = bcp.save(tmp_path / kind, state, async_save=True, options=options)
        assert handle.done()
        handle.result(0)
        monkeypatch.undo()
        assert differing(saved_bits(tmp_path / kind), bits_of_all(state)) == [], kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_of_nothing_is_a_snapshot(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "plain", {"epoch": 3}, kind).result(20)
    save(tmp_path / "empty", {"x": torch.empty(0, 4)}, kind).result(20)
    assert bcp.open(tmp_path / "empty")["x"].shape == (0, 4)
    state = {"epoch": 0}
    bcp.load(tmp_path / "plain", state)
    assert state == {"epoch": 3}


def test_the_kinds_say_how_long_they_held_the_caller(tmp_path: Path) -> None:
    state = {"x": torch.zeros(20 << 20)}
    for kind in KINDS:
        with paused() as go:
            started = time.perf_counter()
            handle = bcp.save(tmp_path / kind, state, async_save=True, options=OPTIONS[kind])
            held_s = time.perf_counter() - started
            go.set()
            seconds = handle.result(20).seconds
        assert 0 < seconds["stall"] <= held_s
        assert seconds["total"] >= seconds["stall"]
