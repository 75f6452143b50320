"""How often a job looks at its data files: once each in a load, whatever the number of ranks, and several at a time."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.loading.file_checks import shares_of
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.store import delete_many
from distributed.workers import WorkerPool


def state_of(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 12 // dist.get_world_size()
    shards = {f"w{number}": torch.full((rows, 100), value) for number in range(4)}
    held = {name: DTensor.from_local(local, mesh, [Shard(0)]) for name, local in shards.items()}
    return {**held, "step": torch.tensor(value)}


def save_and_load(rank: int, world_size: int, path: str, missing: str) -> tuple[list[str], str]:
    looks: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        byte_length = LocalStore.byte_length

        def counted(self: LocalStore, name: str) -> int | None:
            looks.append(name)
            return byte_length(self, name)

        if not missing:
            bcp.save(path, state_of(1.0))
        dist.barrier()
        state = state_of(2.0)
        patch.setattr(LocalStore, "byte_length", counted)
        try:
            bcp.load(path, state, step=None)
        except bcp.CheckpointNotFoundError as error:
            return looks, f"{error.kind}: {error.message}; {state['step'].item()}"
        return looks, "" if torch.equal(state["w0"].to_local(), torch.ones_like(state["w0"].to_local())) else "wrong"


def data_looks(results: list[Any]) -> Counter[str]:
    return Counter(name for looks, _ in results for name in looks if name.startswith("data/"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_load_looks_at_each_file_once_in_the_whole_job(workers: WorkerPool, tmp_path: Path, world_size: int) -> None:
    results = workers.run(save_and_load, str(tmp_path), "", world_size=world_size)
    assert [problem for _, problem in results] == [""] * world_size
    files = {f"data/{name}" for name in os.listdir(tmp_path / "data")}
    assert len(files) == world_size
    assert data_looks(results) == Counter(files)


def test_a_missing_file_is_named_on_all_before_anything_is_changed(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_and_load, str(tmp_path), "", world_size=4)
    gone = sorted(os.listdir(tmp_path / "data"))[2]
    (tmp_path / "data" / gone).unlink()
    results = workers.run(save_and_load, str(tmp_path), gone, world_size=4)
    for _, problem in results:
        assert problem.startswith("missing_file")
        assert gone in problem
        assert problem.endswith("; 2.0")


def test_files_that_all_ranks_want_are_dealt_out() -> None:
    shares = shares_of(np.ones((4, 8), bool), is_listed=False)
    assert shares == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shares_of(np.ones((4, 8), bool), is_listed=True) == [[*range(8)], [], [], []]
    only = np.zeros((3, 5), bool)
    only[2, 1] = only[0, 3] = only[1, 3] = True
    assert shares_of(only, is_listed=False) == [[], [3], [1]]


def test_a_file_that_some_ranks_want_goes_to_one_of_these_in_turn() -> None:
    wanted = np.random.default_rng(0).random((7, 100)) < 0.3
    shares = shares_of(wanted, is_listed=False)
    for file, holders in enumerate(wanted.T):
        owner = [holder for holder in range(7) if file in shares[holder]]
        assert owner == (np.flatnonzero(holders)[[file % holders.sum()]].tolist() if holders.any() else [])


def test_the_files_of_thousands_of_ranks_are_dealt_out_evenly() -> None:
    shares = shares_of(np.eye(2048, dtype=bool), is_listed=False)
    assert shares == [[number] for number in range(2048)]


def test_deletions_synchronise_each_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bytecheckpoint.storage.backends import local_store

    synced: list[str] = []
    monkeypatch.setattr(local_store, "sync_folder", synced.append)
    names = [f"{folder}/{number}" for folder in ("a/b", "c") for number in range(500)]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    delete_many(LocalStore(str(tmp_path), writer_threads=1), [*names, "c/never"])
    assert synced == [str(tmp_path / "a/b"), str(tmp_path / "c")]
    assert list(tmp_path.iterdir()) == []


def test_other_stores_delete_several_objects_at_a_time() -> None:
    both = threading.Barrier(2, timeout=20)
    deleted: list[str] = []

    class Slow:
        def delete(self, name: str) -> None:
            both.wait()
            deleted.append(name)

    delete_many(Slow(), ["a", "b"])  # type: ignore[arg-type]
    assert sorted(deleted) == ["a", "b"]
