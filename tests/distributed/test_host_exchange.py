"""Ranks of one host pass on what they read in memory that they share, and each byte comes once to each other host.
Ranks that cannot share memory use sockets, and a rank that is lost is named and leaves nothing behind.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seam, Seen, before, seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.distributed.liveness import peer_watch
from bytecheckpoint.distributed.same_host import host_ranks
from bytecheckpoint.loading.between_ranks.host_exchange import HostExchange
from distributed.played_hosts import on_host
from distributed.workers import WorkerDied, WorkerPool

ROWS, COLUMNS = 1024, 512
STATE_BYTES = 2 * ROWS * COLUMNS * 4
ON = bcp.LoadOptions(exchange="on", timeout_s=60)
LAYOUTS: dict[str, Any] = {
    "replicas": (Replicate(), Replicate()),
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Shard(1)),
    "replicas of rows": (Replicate(), Shard(0)),
    "replicas of columns": (Replicate(), Shard(1)),
    "rows of replicas": (Shard(0), Replicate()),
}


def state_of(layout: str, *, is_filled: bool = True) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2)]
    parts = [distribute_tensor(each, mesh, LAYOUTS[layout], src_data_rank=None) for each in whole]
    return {f"w{number}": part if is_filled else torch.zeros_like(part) for number, part in enumerate(parts)}


def save_as(rank: int, world_size: int, path: str, layout: str) -> None:
    bcp.save(path, state_of(layout))


class Loaded(NamedTuple):
    """What one rank saw of a load."""

    is_right: bool
    num_read: int
    between: int
    """Bytes received over sockets from other hosts."""
    within: int
    connections: int


def load_counted(rank: int, world_size: int, path: str, layout: str, hosts: list[int]) -> Loaded:
    """`hosts` has the host of each rank."""
    between = within = 0
    connections: set[Connection] = set()
    receive_into, init = Connection.receive_into, Connection.__init__

    def counting(self: Connection, buffer: memoryview) -> None:
        nonlocal between, within
        receive_into(self, buffer)
        is_here = hosts[self.global_rank] == hosts[rank]
        between, within = between + buffer.nbytes * (not is_here), within + buffer.nbytes * is_here

    def noting(self: Connection, *arguments: Any) -> None:
        init(self, *arguments)
        connections.add(self)

    state = state_of(layout, is_filled=False)
    with pytest.MonkeyPatch.context() as patch, on_host(hosts[rank]):
        patch.setattr(Connection, "receive_into", lambda self, buffer: counting(self, memoryview(buffer)))
        patch.setattr(Connection, "__init__", noting)
        report = bcp.load(path, state, options=ON)
    expected = state_of(layout)
    is_right = all(torch.equal(state[name].to_local(), expected[name].to_local()) for name in state)
    return Loaded(is_right, report.num_bytes_read, between, within, len(connections))


HOSTS = {"one host": [0, 0, 0, 0], "two": [0, 0, 1, 1], "two, mixed": [0, 1, 0, 1], "three and one": [0, 0, 0, 1]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_each_byte_is_read_once_and_comes_once_to_each_other_host(
    workers: WorkerPool, tmp_path: Path, layout: str, hosts: list[int]
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_as, path, "rows", world_size=4)
    found = workers.run(load_counted, path, layout, hosts, world_size=4)
    assert all(each.is_right for each in found)
    assert sum(each.num_read for each in found) <= 1.05 * STATE_BYTES
    assert sum(each.within for each in found) == 0
    assert sum(each.between for each in found) <= (len({*hosts}) - 1) * 1.02 * STATE_BYTES
    assert max(each.connections for each in found) <= 8


def test_two_hosts_of_four_send_one_another_the_state_once(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_as, path, "rows", world_size=8)
    found = workers.run(load_counted, path, "replicas", [0] * 4 + [1] * 4, world_size=8)
    assert all(each.is_right for each in found)
    assert STATE_BYTES <= sum(each.between for each in found) <= 1.01 * STATE_BYTES
    assert max(each.connections for each in found) == 2


def test_eight_ranks_that_share_no_memory_have_eight_connections_at_most(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_as, path, "rows", world_size=8)
    found = workers.run(load_counted, path, "replicas", [*range(8)], world_size=8)
    assert all(each.is_right for each in found)
    assert max(each.connections for each in found) <= 8


def load_without(rank: int, world_size: int, path: str, what: str, ranks: list[int]) -> tuple[Loaded, list[str]]:
    """Some ranks have no room for memory, or cannot open that of others. Returns also what is logged."""

    def refuse(error: OSError) -> Any:
        def refusing(*_: Any) -> None:
            raise error

        return refusing

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("bytecheckpoint")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank in ranks and what == "room":
                patch.setattr(os, "posix_fallocate", refuse(OSError(errno.ENOSPC, "No space left on device")))
            elif rank in ranks:
                patch.setattr(host_ranks, "PeerMemory", refuse(PermissionError(errno.EACCES, "Permission denied")))
            loaded = load_counted(rank, world_size, path, "replicas", [0] * world_size)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return loaded, messages


@pytest.mark.parametrize("ranks", [[0], [2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("what", ["room", "permission"])
def test_ranks_that_cannot_share_memory_use_sockets_and_say_so(
    workers: WorkerPool, tmp_path: Path, what: str, ranks: list[int]
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_as, path, "rows", world_size=4)
    found = workers.run(load_without, path, what, ranks, world_size=4)
    assert all(loaded.is_right for loaded, _ in found)
    num_hosts = len(ranks) + (len(ranks) < 4)
    assert STATE_BYTES <= sum(loaded.within for loaded, _ in found) / (num_hosts - 1) <= 1.02 * STATE_BYTES
    for rank, (_, messages) in enumerate(found):
        assert any("through sockets" in message for message in messages) == (rank in ranks)
        assert all("No space" in message or "denied" in message for message in messages if "sockets" in message)


def die_in_a_load(
    rank: int, world_size: int, path: str, function: Seam, hosts: list[int]
) -> tuple[Seen | None, list[str]]:
    """Rank 1 is killed while others wait for it. Returns also the shared memory that this rank still has."""
    state = state_of("replicas", is_filled=False)
    options = bcp.LoadOptions(exchange="on", timeout_s=600)
    dies = before(function, lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 1 else nullcontext()
    with dies, on_host(hosts[rank]):
        error = seen(lambda: bcp.load(path, state, options=options))
    gc.collect()
    opened = [os.readlink(each) for each in map(str, Path("/proc/self/fd").iterdir()) if os.path.lexists(each)]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return error, [each for each in (*opened, *mapped) if "memfd:bytecheckpoint" in each]


PLACES = {"passing on": Seam(HostExchange, "announce"), "taking": Seam(HostExchange, "_take")}


@pytest.mark.parametrize("hosts", [HOSTS["one host"], HOSTS["two"]], ids=["one host", "two"])
@pytest.mark.parametrize("place", PLACES)
def test_a_reader_that_is_killed_is_named_at_once_and_leaves_nothing(
    workers: WorkerPool, tmp_path: Path, place: str, hosts: list[int]
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_as, path, "rows", world_size=4)
    started = time.monotonic()
    outcomes = workers.run_each(die_in_a_load, path, PLACES[place], hosts, world_size=4, timeout_s=60)
    assert time.monotonic() - started < 40
    assert isinstance(outcomes[1].error, WorkerDied)
    for rank in (0, 2, 3):
        assert outcomes[rank].error is None, outcomes[rank].error
        error, left = outcomes[rank].value
        assert (error.kind, error.ranks) == ("rank_missing", (1,))
        assert left == []


def test_only_memory_that_will_be_filled_whole_is_mapped_with_its_pages() -> None:
    num_bytes = 1 << 20
    both = [host_ranks._with_memory(rank, num_bytes) for rank in (0, 1)]
    with closing(both[0]) as taker, closing(both[1]) as reader:
        taker.open({1: reader._own.offer(peer_watch.own_presence())})
        own, of_reader = taker.content, taker.others[1].content
        taker.map_pages({1: num_bytes - 1}, num_bytes - 1)
        assert (taker.content, taker.others[1].content) == (own, of_reader)
        assert taker.others[1].content is of_reader
        taker.map_pages({1: num_bytes}, num_bytes)
        assert taker.others[1].content is not of_reader
        assert taker.content is not own
        reader.content[:4] = b"read"
        assert taker.others[1].content[:4] == of_reader[:4] == b"read"
        del own, of_reader
