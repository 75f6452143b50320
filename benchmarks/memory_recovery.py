"""Seconds of a resume after all processes were lost, a host of four with them, or two, beside those that a bare socket
takes for the bytes that ranks send.

    python benchmarks/run.py memory_recovery               # 256 MiB of weights
    python benchmarks/run.py memory_recovery --mib 64 --rounds 5

Four ranks, each with a memory root of its own that stands for a host, have an FSDP state; copies are on another host,
or parity is over all four. The processes end, hosts are erased, and four ranks resume, some of them on empty hosts: the
newest step, or where two hosts are lost one from storage, in the page cache. Seconds are from the first call to the end
of the last, the best of the rounds; imports come before. The last column has a goal, at most 1.5.
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
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.storage.memory_root.job_folder import find_jobs
from memory_hosts import NUM_RANKS, Sent, state_of
from shared.machine import facts_line, machine_facts
from shared.process_pool import free_port
from shared.tables import table

KINDS: dict[str, dict[str, int]] = {
    "copies=2": {"copies": 2},
    "copies=1, parity=1": {"copies": 1, "parity": 1},
}
TITLES = ["memory", "processes lost, s", "a host, s", "two hosts, s", "MB sent for a host", "bare socket, s"]
TITLES += ["a host / (processes + socket)"]
STORED, NEWEST = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=256, help="of float32 weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")


def run(arguments: argparse.Namespace) -> None:
    print(facts_line(machine_facts(arguments.tmpfs)))
    rows = [row_of(name, memory, arguments) for name, memory in KINDS.items()]
    print("\n".join(table(TITLES, rows)), flush=True)


def row_of(name: str, memory: dict[str, int], arguments: argparse.Namespace) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="bench-memory-recovery-", dir=arguments.tmpfs))
    disk = Path(tempfile.mkdtemp(prefix="bench-memory-recovery-", dir=arguments.folder))
    try:
        given = Given(f"{folder}/now", f"{disk}/run", memory, arguments.mib << 20)
        on_all_ranks(save, given)
        shutil.copytree(folder / "now", folder / "kept")
        cases = ((), (0,), (0, partner_of(folder / "now")))
        rounds = [[resumed(folder, given, lost) for lost in cases] for _ in range(arguments.rounds)]
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(disk)
    all_s, host_s, two_s = (min(seconds for seconds, _ in of_case) for of_case in zip(*rounds, strict=True))
    num_sent = rounds[0][1][1]
    raw_s = min(loopback_s(num_sent) for _ in range(arguments.rounds))
    seconds = [f"{each:.3f}" for each in (all_s, host_s, two_s)]
    return [name, *seconds, f"{num_sent / 1e6:.1f}", f"{raw_s:.3f}", f"{host_s / (all_s + raw_s):.2f}"]


def partner_of(folder: Path) -> int:
    """Returns the host without which host 0 is lost for good: that of its copies, or with parity any other."""
    for host in range(1, NUM_RANKS):
        ((job, _),) = find_jobs(f"{folder}/host{host}")
        if any(slot.header is not None and slot.header.rank == 0 for slot in scan_copies(job, "copies")):
            return host
    return 1


def resumed(folder: Path, given: Given, lost: tuple[int, ...]) -> tuple[float, int]:
    """Returns the seconds in which all ranks resume without these hosts, and the bytes that they send."""
    shutil.rmtree(folder / "now")
    shutil.copytree(folder / "kept", folder / "now")
    for host in lost:
        shutil.rmtree(folder / "now" / f"host{host}")
    done = on_all_ranks(resume, given._replace(step=STORED if len(lost) > 1 else NEWEST))
    seconds = max(each.end_s for each in done) - min(each.begin_s for each in done)
    return seconds, sum(each.num_sent for each in done)


class Given(NamedTuple):
    """One row, for its ranks."""

    folder: str
    path: str
    memory: dict[str, int]
    num_bytes: int
    step: int = NEWEST
    """Of which all is left."""

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
    save_both(rank, given, state_of("fsdp", given.num_bytes), given.path)


def save_both(rank: int, given: Given, state: dict[str, Any], path: str, job: str = "") -> None:
    """Saves a step to storage, and changed values to memory only."""
    for step, to in ((STORED, "storage"), (NEWEST, "memory")):
        options = given.options(rank, job)
        handle = bcp.save(path, changed(state, step), step=step, async_save=True, options=options, to=to)
        handle.held("host")
        handle.result()


def changed(state: dict[str, Any], step: int) -> dict[str, Any]:
    return {name: tensor + step for name, tensor in state.items()}


def resume(rank: int, given: Given) -> Resumed:
    small = state_of("fsdp", 1 << 20)
    save_both(rank, given, small, f"{given.folder}/warm", "warm-")
    bcp.resume(f"{given.folder}/warm", small, options=given.options(rank, "warm-"))
    expected = changed(state_of("fsdp", given.num_bytes), given.step)
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    sent = Sent()
    dist.barrier()
    begin_s = time.monotonic()
    report = bcp.resume(given.path, state, options=given.options(rank))
    end_s = time.monotonic()
    is_whole = all(torch.equal(state[name].to_local(), expected[name].to_local()) for name in state)
    if report is None or report.step != given.step or not is_whole:
        raise RuntimeError(f"resumed {report}, and not step {given.step} as it was saved")
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
