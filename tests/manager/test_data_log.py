"""Positions of data loaders that are logged between full saves: loaders that are made anew go on exactly there."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data.sample_sources import KINDS, EpochOrder, plain
from stream_loaders import StreamLoader, state_of
from torch.utils.data import DataLoader

import bytecheckpoint as bcp
from bytecheckpoint import keep_policies, save_policies
from bytecheckpoint.data import Streams
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
)
from bytecheckpoint.manager.after_commit import retried_work
from bytecheckpoint.manager.data import log_writer
from bytecheckpoint.manager.data.log_objects import branches, earlier_objects, logged_steps
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import open_store
from distributed.workers import WorkerPool

EVERY_5 = save_policies.EverySteps(5)
NUM_STREAMS, NUM_SAMPLES = 6, 11


class Trainer:
    """Takes batches from streams, and logs its position after each step."""

    def __init__(self, kind: str = "sequence", *, rank: int = 0, size: int = 1, num_workers: int = 0) -> None:
        self.kind, self.rank, self.size, self.num_workers = kind, rank, size, num_workers
        self.weight = torch.zeros(4)
        self.make_loader()

    def make_loader(self) -> None:
        """Makes the loader anew, as after its process has died."""
        make = KINDS[self.kind]
        sources = {
            f"s{number}": make(list(range(100 * number, 100 * number + NUM_SAMPLES))) for number in range(NUM_STREAMS)
        }
        streams = Streams(sources, rank=self.rank, size=self.size, endless=True, with_ids=True, snapshot_every=3)
        self.loader = DataLoader(streams, batch_size=2, num_workers=self.num_workers, collate_fn=list)
        self.state = {"weight": self.weight, "data": bcp.DataLoaderState(self.loader, rank=self.rank, size=self.size)}
        self.batches: Iterator[Any] | None = None

    def take(self) -> list[Any]:
        if self.batches is None:
            self.batches = iter(self.loader)
        return [(stream_id, plain(sample)) for stream_id, sample in next(self.batches)]

    def step(self, manager: bcp.CheckpointManager, step: int) -> list[Any]:
        batch = self.take()
        manager.save(step, self.state)
        manager.log_data(step, self.state)
        return batch


def manager_at(path: Path | str, **arguments: Any) -> bcp.CheckpointManager:
    options = bcp.ManagerOptions(signals=(), **arguments)
    return bcp.CheckpointManager(path, save=EVERY_5, options=options)


def log_objects(path: Path) -> list[str]:
    folder = path / "manager" / "data_log"
    return sorted(found.relative_to(folder).as_posix() for found in folder.rglob("*") if found.is_file())


def uninterrupted(num_steps: int, **trainer: Any) -> list[list[Any]]:
    alone = Trainer(**trainer)
    return [alone.take() for _ in range(num_steps)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_is_made_anew_goes_on_where_the_trainer_is(tmp_path: Path, kind: str) -> None:
    """Before the first save, after one, and in the next epoch: 66 samples are one of those that are not packed."""
    trainer, batches = Trainer(kind), []
    with manager_at(tmp_path) as manager:
        for step in range(45):
            if step in {3, 8, 9, 37, 43}:
                trainer.make_loader()
                assert manager.restore_data(trainer.state, step=step - 1) == step - 1
            batches.append(trainer.step(manager, step))
    assert batches == uninterrupted(45, kind=kind)


def test_a_loader_with_workers_goes_on_where_the_trainer_is(tmp_path: Path) -> None:
    trainer = Trainer("shuffled records", num_workers=2)
    with manager_at(tmp_path) as manager:
        batches = [trainer.step(manager, step) for step in range(8)]
        trainer.make_loader()
        assert manager.restore_data(trainer.state) == 7
        batches += [trainer.step(manager, step) for step in range(8, 14)]
    assert batches == uninterrupted(14, kind="shuffled records", num_workers=2)


def test_the_order_of_a_later_epoch_is_that_of_the_epoch_and_not_of_an_older_snapshot() -> None:
    class StatefulOrder(EpochOrder):
        """As an iterable dataset of datasets: a state at the end of a pass yields nothing."""

    stateful = StatefulOrder(list(range(4)))
    streams = Streams({"a": stateful}, rank=0, size=1)
    snapshot = {"epoch": 0, "position": 2, "samples": 2, "state": None}
    state = {"epoch": 1, "position": 1, "samples": 5, "turn": 0, "source": "StatefulOrder", "snapshot": snapshot}
    streams.load_streams({"a": state}, {"kind": "streams"})
    assert "snapshot" not in streams.stream_state("a")
    assert next(iter(streams)) == 0


def test_only_data_is_loaded(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        for step in range(8):
            trainer.weight.fill_(step)
            trainer.step(manager, step)
        trainer.make_loader()
        manager.restore_data(trainer.state)
    assert trainer.weight.tolist() == [7.0] * 4


def test_when_weights_go_back_data_goes_back_with_them(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        for step in range(14):
            trainer.step(manager, step)
        manager.wait()
        assert [logged.step for logged in manager.data_log()] == [11, 12, 13]
        trainer.make_loader()
        report = manager.restore(trainer.state, step=5)
        assert report is not None
        assert (report.step, log_objects(tmp_path), manager.data_log()) == (5, [], [])
        assert manager.restore_data(trainer.state) == 5
        batches = [trainer.step(manager, step) for step in range(6, 9)]
        manager.wait()
        assert [(logged.step, logged.base) for logged in manager.data_log()] == [(6, 5), (7, 5), (8, 5)]
        trainer.make_loader()
        assert manager.restore_data(trainer.state) == 8
        batches.append(trainer.take())
    assert batches == uninterrupted(10)[6:]


def test_a_restart_goes_back_to_the_checkpoint_and_its_first_commit_deletes_the_log_before(tmp_path: Path) -> None:
    trainer = Trainer()
    first = manager_at(tmp_path)
    for step in range(9):
        trainer.step(first, step)
    first.close()
    assert len(log_objects(tmp_path)) == 3
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        report = manager.restore(trainer.state)
        assert report is not None
        assert manager.data_log() == []
        batches = [trainer.step(manager, step) for step in range(manager.next_step, 11)]
    assert batches == uninterrupted(11)[6:]
    assert log_objects(tmp_path) == []


def test_a_start_without_a_checkpoint_forgets_the_log(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        trainer.step(manager, 0)
        assert manager.restore_data() == 0
        assert manager.restore(trainer.state) is None
        trainer.make_loader()
        assert manager.restore_data(trainer.state) is None
        assert trainer.take() == uninterrupted(1)[0]


def test_the_thread_of_the_log_ends_with_the_manager_also_after_a_restore(tmp_path: Path) -> None:
    trainer = Trainer()
    earlier = threading.enumerate()  # those of other managers may take a moment to end
    with manager_at(tmp_path) as manager:
        trainer.step(manager, 0)
        (thread,) = (each for each in threading.enumerate() if each.name == "bcp-data-log" and each not in earlier)
        assert manager.restore(trainer.state) is None
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_that_was_not_logged_is_refused(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        for step in range(7):
            trainer.step(manager, step)
        with pytest.raises(CheckpointNotFoundError, match="step 9"):
            manager.restore_data(trainer.state, step=9)
        assert manager.restore_data(trainer.state, step=5) == 5


@pytest.mark.parametrize("request_name", ["list", "write"])
def test_a_position_is_not_lost_when_a_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_name: str
) -> None:
    failures = [StorageError("passing", kind="unavailable")]
    real = getattr(LocalStore, request_name)

    def fail_once(store: LocalStore, *arguments: Any, **keywords: Any) -> Any:
        if failures and threading.current_thread().name == "bcp-data-log":
            raise failures.pop()
        return real(store, *arguments, **keywords)

    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        monkeypatch.setattr(retried_work, "_SHORTEST_PAUSE_S", 0.01)
        monkeypatch.setattr(LocalStore, request_name, fail_once)
        manager.log_data(7, trainer.state)
        manager.wait()  # until the first attempt has failed
        manager.wait()
        assert not failures
        assert [logged.step for logged in manager.data_log()] == [7]


def test_a_write_that_fails_while_training_leaves_its_branch_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made into the folder of the branch before."""
    monkeypatch.setattr(retried_work, "_SHORTEST_PAUSE_S", 0.01)
    begun, may_fail = threading.Event(), threading.Event()
    written: list[str] = []
    write = LocalStore.write

    def write_and_fail(store: LocalStore, name: str, *arguments: Any, **names: Any) -> None:
        write(store, name, *arguments, **names)
        if "data_log" in name:
            written.append(name)
            begun.set()
            assert may_fail.wait(60)
            if len(written) == 1:
                raise StorageError("the connection broke", kind="unavailable")

    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        monkeypatch.setattr(LocalStore, "write", write_and_fail)
        trainer.take()
        manager.log_data(3, trainer.state)
        assert begun.wait(60)
        assert manager._data._log is not None
        manager._data._log.begin_branch()
        may_fail.set()
        manager.wait()  # until the attempt has failed
        manager.wait()
    assert [name.rpartition("/")[2][:8] for name in written] == ["00000003"]
    assert log_objects(tmp_path) == []


def test_a_full_disk_is_freed_of_positions_that_a_commit_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retried_work, "_SHORTEST_PAUSE_S", 0.01)
    real, trainer = LocalStore.write, Trainer()

    def write(store: LocalStore, name: str, *arguments: Any, **names: Any) -> None:
        if "data_log" in name and any("00000003-" in logged for logged in log_objects(tmp_path)):
            raise CheckpointSaveError("the disk is full", kind="no_space")
        real(store, name, *arguments, **names)

    with manager_at(tmp_path) as manager:
        trainer.take()
        manager.log_data(3, trainer.state)
        manager.wait()
        monkeypatch.setattr(LocalStore, "write", write)
        manager.log_data(4, trainer.state)
        manager.save(5, trainer.state)
        manager.log_data(6, trainer.state)
        manager.wait()  # until the first attempt has failed
        manager.wait()
        assert [logged.step for logged in manager.data_log()] == [6]


def test_a_damaged_entry_counts_as_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        for step in range(8):
            trainer.step(manager, step)
        manager.wait()
        newest = tmp_path / "manager" / "data_log" / log_objects(tmp_path)[-1]
        nested = zlib.compress(b"\x81\xa1x" + b"\x91" * 100_000)
        for content in (b"no zlib", zlib.compress(b"no record"), nested, newest.read_bytes()[:-4]):
            newest.write_bytes(content)
            assert manager.restore_data(trainer.state) == 6
        os.truncate(newest, (1 << 26) + 1)  # longer than any that is read
        assert manager.restore_data(trainer.state) == 6
        assert caplog.text.count("count as absent") == 5
        with pytest.raises(CheckpointNotFoundError):
            manager.restore_data(trainer.state, step=7)


def test_the_log_tells_the_position_of_each_stream(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        for step in range(7):
            trainer.step(manager, step)
        manager.wait()
        (logged,) = manager.data_log()
    assert logged == bcp.LoggedData(step=6, base=logged.base, loaders=logged.loaders)
    assert logged.base in {None, 5}  # known once the next call of save has asked
    samples = {each: position["samples"] for each, position in logged.loaders["data"].items()}
    assert samples == {"s0": 3, "s1": 3, "s2": 2, "s3": 2, "s4": 2, "s5": 2}


def test_the_log_is_bounded_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_logged = 24
    monkeypatch.setattr(log_writer, "MAX_LOGGED_STEPS", max_logged)
    trainer = Trainer("packed records")
    with manager_at(tmp_path) as manager:
        for step in range(1000, 1020 + max_logged):
            trainer.take()
            manager.log_data(step, trainer.state)
            if step % 10 == 0:
                manager.wait()  # no record waits so long that it is dropped
    objects = log_objects(tmp_path)
    assert len(objects) == max_logged
    assert max((tmp_path / "manager" / "data_log" / name).stat().st_size for name in objects) < 400


def test_nothing_is_logged_once_another_manager_owns_the_root(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, other = Trainer(), Trainer()
    older = manager_at(tmp_path)
    with manager_at(tmp_path) as newer:
        for step in range(3):
            trainer.step(older, step)
        older.close()
        assert log_objects(tmp_path) == []
        assert "belongs to another manager" in caplog.text
        other.step(newer, 0)
    assert log_objects(tmp_path) == ["00000002-0000/00000000-00000-of-00001"]


def test_a_manager_that_only_reads_logs_nothing_and_loads_a_given_step(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager, manager_at(tmp_path, read_only=True) as reader:
        batches = [trainer.step(manager, step) for step in range(8)]
        manager.wait()
        with pytest.raises(StorageError, match="read-only"):
            reader.log_data(7, trainer.state)
        with pytest.raises(CheckpointMismatchError, match="step="):
            reader.restore_data(trainer.state)
        trainer.make_loader()
        assert reader.restore_data(trainer.state, step=7) == 7
        assert [logged.step for logged in reader.data_log()] == [6, 7]
        batches.append(trainer.take())
    assert batches == uninterrupted(9)


def test_a_state_without_loaders_and_one_that_is_no_small_position_are_refused(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        with pytest.raises(CheckpointMismatchError, match="no state that was passed before"):
            manager.log_data(0)
        with pytest.raises(CheckpointMismatchError, match="has no data loader"):
            manager.log_data(0, {"weight": torch.zeros(2)})
        large = StreamLoader({"a": state_of("a", with_buffer=True)})
        for loader in (large, StreamLoader({"a": "x" * 100_000})):
            with pytest.raises(CheckpointSaveError, match="stream_position"):
                manager.log_data(0, {"data": bcp.DataLoaderState(loader, rank=0, size=1)})


class PositionLoader(StreamLoader):
    """Its positions are its states."""

    def stream_position(self, stream_id: str) -> Any:
        return self.stream_state(stream_id)


@pytest.mark.parametrize("large", ["x" * 20_000, torch.zeros(20_000)], ids=["text", "tensor"])
@pytest.mark.parametrize(
    ("kind", "is_shared", "advice"),
    [
        (StreamLoader, False, r"give the loader a method stream_position\(id\)"),
        (PositionLoader, False, r"let stream_position\(id\) of the loader return only"),
        (PositionLoader, True, r"let shared_state\(\) of the loader return less"),
    ],
)
def test_what_is_too_large_for_the_log_is_refused_with_what_would_make_it_smaller(
    tmp_path: Path, kind: type[StreamLoader], is_shared: bool, advice: str, large: Any
) -> None:
    loader = kind({"a": {"n": 1}}, large) if is_shared else kind({"a": large})
    with manager_at(tmp_path) as manager, pytest.raises(CheckpointSaveError, match=advice):
        manager.log_data(0, {"data": bcp.DataLoaderState(loader, rank=0, size=1)})


def test_a_small_sparse_tensor_in_a_position_is_not_told_to_be_too_large(tmp_path: Path) -> None:
    loader = PositionLoader({"a": {"table": torch.eye(3).to_sparse()}})
    with manager_at(tmp_path) as manager, pytest.raises(CheckpointSaveError, match=r"a\.table is a sparse_coo tensor"):
        manager.log_data(0, {"data": bcp.DataLoaderState(loader, rank=0, size=1)})


def test_a_position_that_replaces_no_values_of_the_state_is_refused(tmp_path: Path) -> None:
    loader = PositionLoader({"a": 5})
    with manager_at(tmp_path) as manager, pytest.raises(CheckpointSaveError, match=r"data\.streams\.a is a int of"):
        manager.log_data(0, {"data": bcp.DataLoaderState(loader, rank=0, size=1)})


def test_a_state_without_loaders_that_was_refused_leaves_those_of_the_state_before(tmp_path: Path) -> None:
    trainer = Trainer()
    with manager_at(tmp_path) as manager:
        trainer.step(manager, 5)
        with pytest.raises(CheckpointMismatchError, match="nothing was changed"):
            manager.log_data(6, {"weight": trainer.weight})
        manager.log_data(6)
        assert manager.restore_data() == 6


def test_a_loader_with_small_states_is_logged_whole(tmp_path: Path) -> None:
    loader, other = StreamLoader({"a": 3}, {"consumed": 3}), StreamLoader({"a": 0})
    with manager_at(tmp_path) as manager:
        state = {"parts": [{"data": bcp.DataLoaderState(loader, rank=0, size=1)}], "weight": torch.zeros(4)}
        manager.save(5, state)
        loader.streams, loader.shared = {"a": 7}, {"consumed": 7}
        manager.log_data(6, state)
        state["parts"] = [{"data": bcp.DataLoaderState(other, rank=0, size=1)}]
        assert manager.restore_data(state) == 6
    assert (other.streams, other.shared) == ({"a": 7}, {"consumed": 7})


def test_positions_of_another_loader_are_refused(tmp_path: Path) -> None:
    with manager_at(tmp_path) as manager:
        manager.log_data(3, {"data": bcp.DataLoaderState(StreamLoader({"a": 3}), rank=0, size=1)})
        with pytest.raises(CheckpointError, match="stream 'b' are not in it"):
            manager.restore_data({"data": bcp.DataLoaderState(StreamLoader({"b": 3}), rank=0, size=1)})
        with pytest.raises(CheckpointError, match="was not logged"):
            manager.restore_data({"more": bcp.DataLoaderState(StreamLoader({"a": 3}), rank=0, size=1)})


def lose_loaders(rank: int, world_size: int, path: str) -> list[list[Any]]:
    trainer, batches = Trainer("shuffled records", rank=rank, size=world_size), []
    with manager_at(path) as manager:
        for step in range(14):
            if step in {3, 8}:
                trainer.make_loader()
                assert manager.restore_data(trainer.state, step=step - 1) == step - 1
            batches.append(trainer.step(manager, step))
        dist.barrier()
        assert manager.restore(trainer.state, step=5) is not None
        assert manager.data_log() == []
        trainer.batches = None
        batches = batches[:6] + [trainer.step(manager, step) for step in range(6, 9)]
        trainer.make_loader()
        assert manager.restore_data(trainer.state) == 8
        batches += [trainer.take() for _ in range(9, 14)]
    dist.barrier()
    return batches


def test_loaders_of_two_ranks_go_on_where_the_trainer_is(workers: WorkerPool, tmp_path: Path) -> None:
    found = workers.run(lose_loaders, str(tmp_path), world_size=2)
    for rank in range(2):
        assert found[rank] == uninterrupted(14, kind="shuffled records", rank=rank, size=2)


def log_on_one_rank(rank: int, world_size: int, path: str) -> tuple[list[int], int | None]:
    trainer = Trainer(rank=rank, size=world_size)
    with manager_at(path) as manager:
        for step in range(3):
            trainer.take()
            if step < 2 or rank == 0:
                manager.log_data(step, trainer.state)
        restored = manager.restore_data(trainer.state)
        return [logged.step for logged in manager.data_log()], restored


def test_a_step_that_not_all_ranks_have_logged_does_not_count(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(log_on_one_rank, str(tmp_path), world_size=2) == [([0, 1], 1)] * 2


def restore_without_a_loader_on_one_rank(rank: int, world_size: int, path: str) -> str:
    trainer = Trainer(rank=rank, size=world_size)
    with manager_at(path, save=bcp.SaveOptions(timeout_s=20)) as manager:
        trainer.step(manager, 0)
        with pytest.raises(CheckpointMismatchError) as caught:
            manager.restore_data(trainer.state if rank == 0 else {"weight": trainer.weight})
        return caught.value.message


def test_a_state_without_loaders_on_one_rank_is_refused_on_all(workers: WorkerPool, tmp_path: Path) -> None:
    first, second = workers.run(restore_without_a_loader_on_one_rank, str(tmp_path), world_size=2)
    assert first == second
    assert "rank 1 on" in first
    assert "the state has no data loader" in first


def restore_after_a_log_on_one_rank(rank: int, world_size: int, path: str, logging_rank: int) -> list[int]:
    trainer = Trainer(rank=rank, size=world_size)
    options = bcp.ManagerOptions(signals=(), save=bcp.SaveOptions(timeout_s=20))
    with bcp.CheckpointManager(path, save=EVERY_5, options=options) as manager:
        trainer.take()
        if rank == logging_rank:
            manager.log_data(0, trainer.state)
        assert manager.restore(trainer.state) is None
        trainer.step(manager, 0)
        assert manager.restore_data(trainer.state) == 0
        return [logged.step for logged in manager.data_log()]


@pytest.mark.parametrize("logging_rank", [0, 1])
def test_a_restore_after_a_log_on_one_rank_waits_for_no_other_and_all_log_on_one_branch(
    workers: WorkerPool, tmp_path: Path, logging_rank: int
) -> None:
    assert workers.run(restore_after_a_log_on_one_rank, str(tmp_path), logging_rank, world_size=2) == [[0], [0]]


def test_folders_of_the_log_are_found_newest_first(tmp_path: Path) -> None:
    newest_first = ["00000010-10000", "00000010-9999", "00000002-0001", "00000001-0002"]
    for name in (*sorted(newest_first), "00000011-0000.copy", "other"):
        (tmp_path / "manager" / "data_log" / name).mkdir(parents=True)
        (tmp_path / "manager" / "data_log" / name / "x").touch()
    store = open_store(str(tmp_path), storage_options=None, writer_threads=1)
    assert [name.rpartition("/")[2] for name in branches(store)] == newest_first


def test_a_step_counts_as_logged_if_each_rank_has_an_object(tmp_path: Path) -> None:
    folder = tmp_path / "manager" / "data_log" / "00000001-0000"
    folder.mkdir(parents=True)
    for name in ("00000005-00000-of-00002", "00000005-00002-of-00002", "00000004-00001-of-00002"):
        (folder / name).touch()
    (folder / "00000004-00000-of-00002").touch()
    store = open_store(str(tmp_path), storage_options=None, writer_threads=1)
    assert [logged.step for logged in logged_steps(store, branches(store)[0])] == [4]


def test_files_of_others_in_the_log_of_an_earlier_manager_stay(tmp_path: Path) -> None:
    folder = tmp_path / "manager" / "data_log" / "00000001-0000"
    (folder / "of the user").mkdir(parents=True)
    (folder / "00000005-00000-of-00001").touch()
    (folder / "notes.txt").touch()
    store = open_store(str(tmp_path), storage_options=None, writer_threads=1)
    assert earlier_objects(store, 2) == ["manager/data_log/00000001-0000/00000005-00000-of-00001"]
    with bcp.CheckpointManager(tmp_path, save=save_policies.EverySteps(1)) as first:
        first.save(1, {"weight": torch.ones(2)})
    with bcp.CheckpointManager(tmp_path, save=save_policies.EverySteps(1), keep=keep_policies.Latest(1)) as second:
        second.save(2, {"weight": torch.ones(2)})
        second.wait()
        assert second.steps() == [2]
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "of the user"]
