"""What a load of several ranks takes beside the bytes that it is for: reads of the manifest, memory beyond the target,
and time in which nothing is passed on.
"""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_url_store import PROTOCOL, url_of
from faults.seams import Seam, before, loads_as, state_of
from storage.s3_service import S3Service
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.loading.between_ranks.host_exchange import HostExchange
from bytecheckpoint.storage.backends import local_store
from bytecheckpoint.storage.layout import MANIFEST_NAME
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerPool

MiB = 1 << 20
WAIT_S = 60.0


class _Opened:
    """How often this process has opened a manifest. An audit hook stays for ever, so there is one a process."""

    def __init__(self) -> None:
        self.number = 0
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and os.path.basename(arguments[0]) == MANIFEST_NAME:
            self.number += 1


_OPENED: list[_Opened] = []


def count_manifests(rank: int, world_size: int, path: str, exchange: Any) -> int:
    _OPENED[:] = _OPENED or [_Opened()]
    bcp.save(path, state_of(rank, 1.0), options=bcp.SaveOptions(overwrite=True))
    dist.barrier()
    before_it = _OPENED[0].number
    assert loads_as(path, rank, 1.0, options=bcp.LoadOptions(exchange=exchange))
    return _OPENED[0].number - before_it


@pytest.mark.parametrize("exchange", ["off", "on"])
def test_one_rank_reads_the_manifest_for_all(workers: WorkerPool, tmp_path: Path, exchange: str) -> None:
    assert workers.run(count_manifests, str(tmp_path), exchange, world_size=4) == [1, 0, 0, 0]


ROWS, COLUMNS = 3000, 4001
SCRATCH_BYTES = 8 * MiB
PLAN_BYTES = 1 * MiB
"""What a load has of Python's objects: the manifest, plans, messages."""


def part_of(tensor: torch.Tensor, how: str, rank: int, world_size: int) -> Any:
    """What a rank holds of a tensor that all hold, or that is cut along its rows or columns."""
    mesh = init_device_mesh("cpu", (world_size,))
    placement = {"replicas": Replicate(), "rows": Shard(0), "columns": Shard(1)}[how]
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


@cache
def values() -> torch.Tensor:
    """They get smaller by a codec, by a third."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()


def save_in_rows(rank: int, world_size: int, path: str, codec: str, storage_options: Any = None) -> None:
    state = {"t": part_of(values(), "rows", rank, world_size)}
    bcp.save(path, state, options=bcp.SaveOptions(codec=codec), storage_options=storage_options)


def peak_of_load(
    rank: int, world_size: int, path: str, how: str, options: bcp.LoadOptions, storage_options: Any = None
) -> tuple[int, int]:
    """The most memory that a load takes beyond its target, and how much this rank gets from others."""
    if path.startswith(PROTOCOL):
        path = url_of(path.removeprefix(PROTOCOL))
    expected = part_of(values(), how, rank, world_size).to_local()
    state = {"t": part_of(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), how, rank, world_size)}
    load = partial(bcp.load, path, state, options=options, storage_options=storage_options)
    load()  # what is kept for the next load is there afterwards
    state["t"].to_local().zero_()
    gc.collect()
    tracemalloc.start()
    try:
        report = load()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(state["t"].to_local(), expected)
    return peak_bytes, report.num_bytes_received


def options_of(exchange: Any) -> bcp.LoadOptions:
    return bcp.LoadOptions(exchange=exchange, scratch_bytes=SCRATCH_BYTES, reader_threads=4, timeout_s=WAIT_S)


@pytest.mark.parametrize("exchange", ["on", "off"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("how", ["replicas", "columns"])
def test_a_load_stays_within_its_scratch_memory(
    workers: WorkerPool, tmp_path: Path, how: str, codec: str, exchange: Any
) -> None:
    workers.run(save_in_rows, str(tmp_path), codec, world_size=4)
    for path in (str(tmp_path), f"{PROTOCOL}{tmp_path}"):
        found = workers.run(peak_of_load, path, how, options_of(exchange), world_size=4, timeout_s=2 * WAIT_S)
        assert all(num_received > 0 for _, num_received in found) == (exchange == "on")
        assert max(peak_bytes for peak_bytes, _ in found) <= SCRATCH_BYTES + PLAN_BYTES, path


@pytest.mark.parametrize(("exchange", "how"), [("on", "replicas"), ("off", "columns")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_a_load_from_s3_stays_within_its_scratch_memory(
    workers: WorkerPool, s3: S3Service, s3_prefix: str, how: str, exchange: Any
) -> None:
    url = f"s3://{s3.bucket}/{s3_prefix}"
    workers.run(save_in_rows, url, "none", s3.options, world_size=4)
    found = workers.run(peak_of_load, url, how, options_of(exchange), s3.options, world_size=4, timeout_s=2 * WAIT_S)
    assert all(num_received > 0 for _, num_received in found) == (exchange == "on")
    assert max(peak_bytes for peak_bytes, _ in found) <= SCRATCH_BYTES + PLAN_BYTES


EXTENT_BYTES = 8192
SPLIT = {"t": torch.arange(64 * EXTENT_BYTES // 4, dtype=torch.int32)}


def load_holding_back(rank: int, world_size: int, path: str) -> tuple[bool, int]:
    """Rank 0 reads for both, and after its first read reads no more until rank 1 has what came of that."""
    store, arrived = dist.distributed_c10d._get_default_store(), "a unit has arrived"
    state = {name: torch.zeros_like(value) for name, value in SPLIT.items()}
    num_reads = 0

    def hold_back() -> None:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 2:  # the manifest is the first
            store.wait([arrived], timedelta(seconds=WAIT_S))

    if rank == 0:
        seam = before(Seam(local_store.LocalStore, "read_into"), hold_back)
    else:
        seam = before(Seam(HostExchange, "_take"), lambda: store.set(arrived, "1"))
    with small_pieces(extent_bytes=EXTENT_BYTES), seam:
        options = bcp.LoadOptions(exchange="on", timeout_s=2 * WAIT_S, reader_threads=1, scratch_bytes=4 * EXTENT_BYTES)
        bcp.load(path, state, options=options)
    return all(torch.equal(tensor, SPLIT[name]) for name, tensor in state.items()), num_reads


def test_what_is_read_is_passed_on_while_the_next_read_is_under_way(workers: WorkerPool, tmp_path: Path) -> None:
    with small_pieces(extent_bytes=EXTENT_BYTES):
        bcp.save(tmp_path, SPLIT)
    outcomes = workers.run(load_holding_back, str(tmp_path), world_size=2, timeout_s=3 * WAIT_S)
    assert [is_right for is_right, _ in outcomes] == [True, True]
    assert outcomes[0][1] > 2  # or nothing was held back
