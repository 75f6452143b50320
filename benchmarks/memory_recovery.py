"""Seconds of a resume from memory after one of four hosts was lost, beside those where nothing was lost and those that
a bare socket takes for the bytes that ranks send.

    python benchmarks/run.py memory_recovery               # 256 MiB of weights
    python benchmarks/run.py memory_recovery --mib 64 --rounds 5

Four ranks, each with a memory root of its own that stands for a host, have an FSDP state; copies are on another host,
or parity is over all four. The processes end, a host is erased, and four ranks resume, one of them on an empty host.
Seconds are from the first call to the end of the last, the best of the rounds; imports come before.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy and torch read them at import

import argparse
import multiprocessing
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import bytecheckpoint as bcp
import bytecheckpoint.api  # the package imports it when it is first used, and that would be in each rank
from bytecheckpoint.distributed.liveness import peer_watch
from memory_hosts import NUM_RANKS, Sent, state_of
from shared.machine import facts_line, machine_facts
from shared.process_pool import free_port
from shared.tables import table

KINDS: dict[str, dict[str, int]] = {
    "copies=2": {"copies": 2},
    "copies=1, parity=1": {"copies": 1, "parity": 1},
}
TITLES = ["memory", "nothing lost, s", "a host lost, s", "MB sent", "bare socket, s", "lost / (nothing lost + socket)"]
LOST = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=256, help="of float32 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(arguments.tmpfs)))
    rows = [row_of(name, memory, arguments) for name, memory in KINDS.items()]
    print("\n".join(table(TITLES, rows)), flush=True)


def row_of(name: str, memory: dict[str, int], arguments: argparse.Namespace) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="bench-memory-recovery-", dir=arguments.tmpfs))
    try:
        given = Given(str(folder / "now"), memory, arguments.mib << 20)
        on_all_ranks(save, given)
        shutil.copytree(folder / "now", folder / "kept")
        kept_s, lost_s, num_sent = [], [], 0
        for _ in range(arguments.rounds):
            for seconds, is_lost in ((kept_s, False), (lost_s, True)):
                shutil.rmtree(folder / "now")
                shutil.copytree(folder / "kept", folder / "now")
                if is_lost:
                    shutil.rmtree(folder / "now" / f"host{LOST}")
                done = on_all_ranks(resume, given)
                seconds.append(max(each.end_s for each in done) - min(each.begin_s for each in done))
                num_sent = sum(each.num_sent for each in done)
        raw_s = min(loopback_s(num_sent) for _ in range(arguments.rounds))
    finally:
        shutil.rmtree(folder)
    ratio = min(lost_s) / (min(kept_s) + raw_s)
    return [name, f"{min(kept_s):.3f}", f"{min(lost_s):.3f}", f"{num_sent / 1e6:.1f}", f"{raw_s:.3f}", f"{ratio:.2f}"]


class Given(NamedTuple):
    """One row, for its ranks."""

    folder: str
    memory: dict[str, int]
    num_bytes: int

    def options(self, rank: int, job: str = "") -> bcp.SaveOptions:
        return bcp.SaveOptions(memory=bcp.Memory(root=f"{self.folder}/{job}host{rank}", **self.memory))


class Resumed(NamedTuple):
    """One rank's call."""

    begin_s: float
    end_s: float
    num_sent: int


def on_all_ranks(work: Callable[[int, Given], Any], given: Given) -> list[Any]:
    """Returns what the ranks return, each in a process of its own."""
    fork = multiprocessing.get_context("fork")  # of a process that has imported torch and started no thread
    results: Any = fork.SimpleQueue()
    port = free_port()
    ranks = [fork.Process(target=_be, args=(work, rank, given, port, results)) for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}")
    return [results.get() for _ in ranks]


def _be(work: Callable[[int, Given], Any], rank: int, given: Given, port: int, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own = peer_watch.own_presence()
    labelled = type(own)(f"{own.kernel}-{rank}", own.host, own.pid, own.started)
    peer_watch.own_presence = lambda: labelled  # on a host of its own: what ranks exchange goes through sockets
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    results.put(work(rank, given))
    dist.destroy_process_group()


def save(rank: int, given: Given) -> None:
    _save(rank, given, state_of("fsdp", given.num_bytes), "run", "")


def _save(rank: int, given: Given, state: dict[str, Any], path: str, job: str) -> None:
    for step in (1, 2):
        handle = bcp.save(
            f"{given.folder}/{path}",
            state,
            step=step,
            async_save=True,
            options=given.options(rank, job),
            to="memory",
        )
        handle.held("host")
        handle.result()


def resume(rank: int, given: Given) -> Resumed:
    small = state_of("fsdp", 1 << 20)
    _save(rank, given, small, "warm", "warm-")
    bcp.resume(f"{given.folder}/warm", small, options=given.options(rank, "warm-"))
    state = state_of("fsdp", given.num_bytes)
    expected = {name: tensor.to_local().clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.to_local().zero_()
    sent = Sent()
    dist.barrier()
    begin_s = time.monotonic()
    report = bcp.resume(f"{given.folder}/run", state, options=given.options(rank))
    end_s = time.monotonic()
    is_whole = all(torch.equal(state[name].to_local(), expected[name]) for name in state)
    if report is None or report.step != 2 or not is_whole:
        raise RuntimeError(f"resumed {report}, and not step 2 as it was saved")
    return Resumed(begin_s, end_s, sent.to_ranks)


def loopback_s(num_bytes: int) -> float:
    """Returns the seconds in which another process has received so many bytes through a TCP socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = multiprocessing.get_context("fork").Process(target=_receive, args=(server, num_bytes))
        receiver.start()
        with socket.create_connection(server.getsockname()) as connection:
            content = bytearray(num_bytes)
            connection.recv(1)
            began_s = time.monotonic()
            connection.sendall(content)
            connection.recv(1)
            seconds = time.monotonic() - began_s
        receiver.join()
    return seconds


def _receive(server: socket.socket, num_bytes: int) -> None:
    connection, _ = server.accept()
    memory = memoryview(bytearray(num_bytes))
    connection.sendall(b"!")
    while memory:
        memory = memory[connection.recv_into(memory) :]
    connection.sendall(b"!")
    connection.close()
