"""Loaders that gather their state in the step before a save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stream_loaders import StreamLoader

import bytecheckpoint as bcp
from bytecheckpoint import save_policies
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manager.data import prepared_state
from distributed.workers import WorkerPool

EVERY_4 = save_policies.EverySteps(4)


class PreparingLoader(StreamLoader):
    """One that notes each preparation, and fails in some."""

    def __init__(self, ids: list[str], fails_at: tuple[int, ...] = ()) -> None:
        super().__init__({each: {"position": 0} for each in ids})
        self.fails_at = fails_at
        self.step = 0
        self.prepared_at: list[int] = []

    def take(self, step: int) -> None:
        self.step = step
        for state in self.streams.values():
            state["position"] = step

    def prepare_state(self) -> None:
        self.prepared_at.append(self.step)
        if self.step in self.fails_at:
            raise OSError("the data service does not answer")


class PlainLoader:
    """A loader with a state of its own rank."""

    def __init__(self) -> None:
        self.num_prepared = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def prepare_state(self) -> None:
        self.num_prepared += 1


def state_with(loader: Any, rank: int = 0, size: int = 1) -> dict[str, Any]:
    return {"weight": torch.zeros(8), "parts": [{"data": bcp.DataLoaderState(loader, rank=rank, size=size)}]}


def run(manager: bcp.CheckpointManager, loader: PreparingLoader, steps: range) -> None:
    state = state_with(loader)
    for step in steps:
        loader.take(step)
        manager.save(step, state)


def test_a_loader_prepares_once_in_the_step_before_each_save(tmp_path: Path) -> None:
    loader = PreparingLoader(["a"])
    with bcp.CheckpointManager(tmp_path, save=EVERY_4 | save_policies.Last(11)) as manager:
        run(manager, loader, range(11))
        manager.save(3, state_with(loader))
    assert loader.prepared_at == [3, 7, 9, 10]
    restored = StreamLoader()
    bcp.load(tmp_path, state_with(restored))
    assert restored.streams == {"a": {"position": 10}}


def test_a_save_that_is_asked_for_again_in_the_step_before_is_prepared_once(tmp_path: Path) -> None:
    loader = PreparingLoader(["a"])
    with bcp.CheckpointManager(tmp_path, save=EVERY_4) as manager:
        for _ in range(3):
            run(manager, loader, range(3, 4))
    assert loader.prepared_at == [3]


@pytest.mark.parametrize("policy", [save_policies.EverySeconds(1e9) | EVERY_4, save_policies.When(lambda *_: False)])
def test_nothing_is_prepared_where_the_step_alone_does_not_decide(
    tmp_path: Path, policy: save_policies.SavePolicy
) -> None:
    loader = PreparingLoader(["a"])
    with bcp.CheckpointManager(tmp_path, save=policy) as manager:
        run(manager, loader, range(1, 6))
    assert loader.prepared_at == []


def test_a_manager_that_only_reads_prepares_nothing(tmp_path: Path) -> None:
    loader = PreparingLoader(["a"])
    with bcp.CheckpointManager(tmp_path, save=EVERY_4, options=bcp.ManagerOptions(read_only=True)) as manager:
        run(manager, loader, range(4))
    assert loader.prepared_at == []


def test_a_step_that_is_not_before_a_save_does_not_look_for_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    find = prepared_state.data_loaders_in
    monkeypatch.setattr(prepared_state, "data_loaders_in", lambda state: looks.append(state) or find(state))
    with bcp.CheckpointManager(tmp_path, save=EVERY_4) as manager:
        run(manager, PreparingLoader(["a"]), range(9))
    assert len(looks) == 2


def test_an_error_of_the_preparation_is_raised_by_the_save_and_by_that_one_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = PreparingLoader(["a"], fails_at=(3,))
    with bcp.CheckpointManager(tmp_path, save=EVERY_4) as manager:
        run(manager, loader, range(4))
        assert "the save of step 4 raises this" in caplog.text
        with pytest.raises(CheckpointSaveError, match="the data service does not answer") as raised:
            run(manager, loader, range(4, 5))
        assert isinstance(raised.value.__cause__, OSError)
        assert bcp.steps(tmp_path) == []
        manager.save(4, state_with(loader), force=True)
        run(manager, loader, range(5, 9))
    assert bcp.steps(tmp_path) == [4, 8]


def test_another_save_before_it_does_not_hide_an_error_of_the_preparation(tmp_path: Path) -> None:
    loader = PreparingLoader(["a"], fails_at=(3,))
    with bcp.CheckpointManager(tmp_path, save=EVERY_4) as manager:
        run(manager, loader, range(4))
        manager.save(3, state_with(loader), force=True)
        with pytest.raises(CheckpointSaveError, match="the data service does not answer"):
            run(manager, loader, range(4, 5))


def test_an_error_of_the_preparation_counts_as_one_of_its_save(tmp_path: Path) -> None:
    loader = PreparingLoader(["a"], fails_at=(3,))
    options = bcp.ManagerOptions(on_failed_save="warn")
    with bcp.CheckpointManager(tmp_path, save=EVERY_4, options=options) as manager:
        run(manager, loader, range(9))
    assert bcp.steps(tmp_path) == [8]


def test_a_restore_forgets_an_error_of_the_preparation(tmp_path: Path) -> None:
    loader = PreparingLoader(["a"], fails_at=(7,))
    with bcp.CheckpointManager(tmp_path, save=EVERY_4) as manager:
        run(manager, loader, range(8))
        assert manager.restore(state_with(loader)) is not None
        loader.fails_at = ()
        run(manager, loader, range(5, 9))
    assert loader.prepared_at == [3, 7, 7]
    assert bcp.steps(tmp_path) == [4, 8]


def fail_on_rank_1(rank: int, world_size: int, path: str) -> tuple[str, tuple[int, ...], list[int]]:
    loader = PreparingLoader([f"s{rank}"], fails_at=(3,) if rank == 1 else ())
    state = state_with(loader, rank, world_size)
    with bcp.CheckpointManager(path, save=EVERY_4, options=bcp.ManagerOptions(signals=())) as manager:
        for step in range(4):
            loader.take(step)
            manager.save(step, state)
        with pytest.raises(CheckpointSaveError, match="does not answer") as raised:
            manager.save(4, state)
        for step in range(5, 9):
            loader.take(step)
            manager.save(step, state)
    dist.barrier()
    return raised.value.kind, raised.value.ranks, bcp.steps(path)


def test_an_error_of_the_preparation_on_one_rank_is_raised_by_all_at_the_save(
    workers: WorkerPool, tmp_path: Path
) -> None:
    assert workers.run(fail_on_rank_1, str(tmp_path), world_size=2) == [("rank_failed", (1,), [8])] * 2


def test_prepare_state_reaches_the_loader_and_raises_what_it_raises() -> None:
    plain, failing = PlainLoader(), PreparingLoader(["a"], fails_at=(0,))
    bcp.DataLoaderState(plain, rank=0, size=1, elastic="same").prepare_state()
    assert plain.num_prepared == 1
    bcp.DataLoaderState(StreamLoader({"a": 1}), rank=0, size=1).prepare_state()  # has nothing to prepare
    with pytest.raises(OSError, match="does not answer"):
        bcp.DataLoaderState(failing, rank=0, size=1).prepare_state()
