"""One rank of the benchmark of exchanges: holds a replicated or hybrid-sharded state on a host that it plays, and saves
or loads it on command.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import bytecheckpoint as bcp
from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.distributed.liveness import peer_watch
from shared.rank_process import Obey, join

NUM_TENSORS = 8
COLUMNS = 1024


def begin(rank: int, port: int, *, layout: str, ranks: int, hosts: int, mib: float) -> tuple[dict[str, Any], Obey]:
    """Returns the facts of this rank, and what obeys."""
    torch.set_num_threads(1)
    join(rank, ranks, port)
    host_of = [each * hosts // ranks for each in range(ranks)]
    own = peer_watch.own_presence()
    labelled = type(own)(f"{own.kernel}-{host_of[rank]}", own.host, own.pid, own.started)
    peer_watch.own_presence = lambda: labelled
    expected, held = (state_of(layout, ranks, mib) for _ in range(2))
    counts = SocketCounts(host_of, rank)

    def obey(command: dict[str, Any]) -> dict[str, Any]:
        if command["task"] == "save":
            bcp.save(command["folder"], expected)
            return {}
        for tensor in held.values():
            tensor.to_local().zero_()
        dist.barrier()
        counts.reset()
        started = time.perf_counter()
        bcp.load(command["folder"], held, options=bcp.LoadOptions(exchange="on", timeout_s=120))
        seconds = time.perf_counter() - started
        wrong = [name for name in held if not torch.equal(held[name].to_local(), expected[name].to_local())]
        if wrong:
            raise ValueError(f"{wrong} are not what was saved")
        return {"seconds": seconds, **counts.found()}

    return {"state_bytes": sum(tensor.numel() * tensor.element_size() for tensor in expected.values())}, obey


def state_of(layout: str, ranks: int, mib: float) -> dict[str, DTensor]:
    """Replicated on all ranks, or on two halves of them, each of which shards it."""
    mesh = init_device_mesh("cpu", (2, ranks // 2))
    placements = [Replicate(), Replicate() if layout == "DDP" else Shard(0)]
    rows = max(1, round(mib * 2**20 / NUM_TENSORS / COLUMNS / 4 / ranks)) * ranks
    state = {}
    for number in range(NUM_TENSORS):
        local_rows = rows if layout == "DDP" else rows * 2 // ranks
        first = 0 if layout == "DDP" else mesh.get_local_rank(1) * local_rows
        values = torch.arange(first * COLUMNS, (first + local_rows) * COLUMNS, dtype=torch.float32) + number
        local = values.reshape(local_rows, COLUMNS)
        state[f"t{number}"] = DTensor.from_local(local, mesh, placements, shape=(rows, COLUMNS), stride=(COLUMNS, 1))
    return state


class SocketCounts:
    """Bytes that come over the sockets of exchanges, and their connections. The hooks stay as long as the process."""

    def __init__(self, host_of: list[int], rank: int) -> None:
        self._between = self._within = 0
        self._connections: list[Connection] = []
        make, receive_into = Connection.__init__, Connection.receive_into

        def make_counted(connection: Connection, *arguments: Any) -> None:
            make(connection, *arguments)
            self._connections.append(connection)

        def receive_counted(connection: Connection, buffer: memoryview) -> None:
            receive_into(connection, buffer)
            if host_of[connection.global_rank] == host_of[rank]:
                self._within += len(buffer)
            else:
                self._between += len(buffer)

        Connection.__init__, Connection.receive_into = make_counted, receive_counted  # type: ignore[method-assign]

    def reset(self) -> None:
        self._between = self._within = 0
        self._connections.clear()

    def found(self) -> dict[str, int]:
        return {"between": self._between, "within": self._within, "connections": len(self._connections)}
