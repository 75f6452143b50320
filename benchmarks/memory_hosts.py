"""Bytes that ranks send so that memory checkpoints survive the loss of a host: 4 ranks on 2 hosts, Memory(copies=2).

    python benchmarks/run.py memory_hosts               # 256 MiB of weights
    python benchmarks/run.py memory_hosts --mib 64 --rounds 5

With HSDP and DDP the hosts hold the same bytes, which are staged where they are; with FSDP over all ranks none has a
replica, and all are copied to the other host. Ranks with a memory root of their own stand for hosts. Bytes are those
that the library gives to the sockets between ranks and to the store of the process group, in one save until
`held("host")`, the mean of the rounds; the first save, which plans and makes the slots, does not count.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy and torch read them at import

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
import bytecheckpoint.api  # the package imports it when it is first used, and that would be in each rank
from bytecheckpoint.distributed import key_value_ranks
from bytecheckpoint.distributed.connection import Connection
from bytecheckpoint.storage.memory_root import slot_file
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from shared.process_pool import free_port
from shared.tables import table

NUM_RANKS, NUM_HOSTS = 4, 2
NUM_TENSORS = 8
LAYOUTS = {"HSDP, a replica on each host": "hsdp", "DDP": "ddp", "FSDP over all ranks": "fsdp"}
TITLES = ["state", "MB of state", "MB sent from rank to rank", "sent / state", "kB of messages", "messages / state"]
TITLES += ["MB in slots and copies of a host"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=256, help="of float32 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")


def run(arguments: argparse.Namespace) -> None:
    rows = [row_of(name, layout, arguments) for name, layout in LAYOUTS.items()]
    print("\n".join(table(TITLES, rows)), flush=True)


def row_of(name: str, layout: str, arguments: argparse.Namespace) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="bench-memory-hosts-", dir=arguments.tmpfs))
    fork = multiprocessing.get_context("fork")  # of a process that has imported torch and started no thread
    results: Any = fork.SimpleQueue()
    given = Given(layout, str(folder), arguments.mib << 20, arguments.rounds, free_port())
    ranks = [fork.Process(target=measure, args=(rank, given, results)) for rank in range(NUM_RANKS)]
    try:
        for rank in ranks:
            rank.start()
        measured = [results.get() for _ in ranks]
        for rank in ranks:
            rank.join()
        held = [bytes_held(folder / f"host{host}") for host in range(NUM_HOSTS)]
    finally:
        shutil.rmtree(folder)
    state, sent, messages = arguments.mib << 20, sum(each[0] for each in measured), sum(each[1] for each in measured)
    return [
        name,
        f"{state / 1e6:.1f}",
        f"{sent / 1e6:.1f}",
        f"{sent / state:.3f}",
        f"{messages / 1e3:.1f}",
        f"{messages / state:.5f}",
        f"{max(held) / 1e6:.1f}",
    ]


def bytes_held(root: Path) -> int:
    ((job, _),) = find_jobs(str(root))
    folders = (job.slots, f"{job.path}/copies")
    return sum(slot.capacity for folder in folders for slot in slot_file.scan(folder))


class Sent:
    """Counts what this process sends to other ranks and to the store."""

    def __init__(self) -> None:
        self.to_ranks = self.to_store = 0
        send, put_message = Connection.send, key_value_ranks.put_message

        def send_counted(connection: Connection, content: Any) -> None:
            self.to_ranks += memoryview(content).nbytes
            send(connection, content)

        def put_counted(store: Any, key: str, message: bytes) -> list[str]:
            self.to_store += len(message)
            return put_message(store, key, message)

        Connection.send = send_counted  # type: ignore[method-assign]
        key_value_ranks.put_message = put_counted


def state_of(layout: str, num_bytes: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (NUM_HOSTS, NUM_RANKS // NUM_HOSTS) if layout == "hsdp" else (NUM_RANKS,))
    placements = {"hsdp": [Replicate(), Shard(0)], "ddp": [Replicate()], "fsdp": [Shard(0)]}[layout]
    rows = num_bytes // 4 // 1024 // NUM_TENSORS
    weights = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    return {str(number): distribute_tensor(weights + number, mesh, placements) for number in range(NUM_TENSORS)}


class Given(NamedTuple):
    """One row, for its ranks."""

    layout: str
    folder: str
    num_bytes: int
    rounds: int
    port: int


def measure(rank: int, given: Given, results: Any) -> None:
    """Runs a rank: the mean of the bytes of a save goes into the results."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{given.port}", rank=rank, world_size=NUM_RANKS)
    host = rank // (NUM_RANKS // NUM_HOSTS)
    options = bcp.SaveOptions(memory=bcp.Memory(copies=2, root=f"{given.folder}/host{host}"))
    state = state_of(given.layout, given.num_bytes)
    counts: list[tuple[int, int]] = []
    sent = Sent()
    for step in range(given.rounds + 1):
        sent.to_ranks = sent.to_store = 0
        handle = bcp.save(f"{given.folder}/run", state, step=step, async_save=True, options=options, to="memory")
        handle.held("host")
        handle.result()
        counts.append((sent.to_ranks, sent.to_store))
        dist.barrier()
    results.put(tuple(statistics.mean(each) for each in zip(*counts[1:], strict=True)))
    dist.destroy_process_group()
