"""Loads in which a rank can read the data files of its own host only: the others pass on what it wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.loading.read import Source
from bytecheckpoint.storage.backends.local_store import LocalStore
from distributed.workers import WorkerPool

ROWS, COLUMNS = 700, 301


def state_of(placement: Placement, *, is_filled: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(ROWS, COLUMNS, generator=generator)
    small = {f"b{number}": torch.randn(17, generator=generator) for number in range(20)}
    scale = 1.0 if is_filled else 0.0
    whole = {name: distribute_tensor(scale * tensor, mesh, [Replicate()]) for name, tensor in small.items()}
    return {"s": {"w": distribute_tensor(scale * large, mesh, [placement]), **whole}}


def save_rows(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, state_of(Shard(0), is_filled=True))


def saver_of(name: str) -> int:
    """The rank that saved a data file."""
    return int(name.rpartition("/")[2].split("-")[1])


@contextmanager
def held_by(rank: int, holders: dict[int, tuple[int, ...]]) -> Iterator[set[int]]:
    """`holders` has the ranks that can read each saver's files. Yields the savers whose files are read here."""
    init, read_into, read = Source.__init__, LocalStore.read_into, set[int]()

    def with_holders(source: Source, *args: Any, **kwargs: Any) -> None:
        init(source, *args, **kwargs)
        files = enumerate(source.manifest.files)
        source.held_files = frozenset(number for number, file in files if rank in holders[saver_of(file.name)])

    def noting(store: LocalStore, name: str, *args: Any, **kwargs: Any) -> Any:
        read.add(saver_of(name))
        return read_into(store, name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "__init__", with_holders)
        patch.setattr(LocalStore, "read_into", noting)
        yield read


def load_held(
    rank: int, world_size: int, path: str, placement: Placement, holders: dict[int, tuple[int, ...]]
) -> tuple[bool, list[int], int]:
    with held_by(rank, holders) as read:
        state = state_of(placement, is_filled=False)
        options = bcp.LoadOptions(exchange="on", timeout_s=30, scratch_bytes=8 << 20)
        report = bcp.load(path, state, options=options)
    expected = state_of(placement, is_filled=True)
    same = all(torch.equal(state["s"][name].to_local(), part.to_local()) for name, part in expected["s"].items())
    return same, sorted(read), report.num_bytes_received


HELD = {
    "a rank has what it saved": {saver: (saver,) for saver in range(4)},
    "hosts have swapped": {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)},
    "the coordinator's host is new": {0: (1,), 1: (1,), 2: (2,), 3: (3,)},
    "one has all": dict.fromkeys(range(4), (3,)),
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=["replicas", "rows", "columns"])
def test_a_rank_reads_only_the_files_that_it_holds(
    workers: WorkerPool, tmp_path: Path, placement: Placement, held: str
) -> None:
    path, holders = str(tmp_path / "ckpt"), HELD[held]
    workers.run(save_rows, path, world_size=4)
    results = workers.run(load_held, path, placement, holders, world_size=4)
    assert [same for same, _, _ in results] == [True] * 4
    for rank, (_, savers, _) in enumerate(results):
        assert all(rank in holders[saver] for saver in savers)
    assert sum(received for _, _, received in results) > 0


def save_count(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"n": bcp.RankLocal(torch.full((20_000,), 10 + rank))})


def load_sum(
    rank: int, world_size: int, path: str, holders: dict[int, tuple[int, ...]]
) -> tuple[list[int], list[int], tuple[int, int]]:
    holder: bcp.RankLocal = bcp.RankLocal(None, merge="sum")
    with held_by(rank, holders) as read:
        report = bcp.load(path, {"n": holder}, options=bcp.LoadOptions(exchange="on", timeout_s=30))
    return holder.value.unique().tolist(), sorted(read), (report.num_bytes_read, report.num_bytes_received)


def test_the_coordinator_sums_integers_in_files_that_only_another_rank_holds(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_count, str(tmp_path), world_size=4)
    results = workers.run(load_sum, str(tmp_path), dict.fromkeys(range(4), (1,)), world_size=2)
    num_bytes = 2 * 4 * 20_000 * 8  # before the load changes anything, and into the state
    assert results == [([46], [], (0, num_bytes)), ([0], [0, 1, 2, 3], (num_bytes, 0))]
