"""Starts, commands and ends ranks forked from one process, with the server of their store in another."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from bytecheckpoint.distributed import key_value_ranks
from forked_ranks.states import Calls
from shared.process_pool import PoolError, free_port

_BEGIN_S = 0.1
"""Seconds between a command and the moment at which all ranks begin."""


class Waiting(NamedTuple):
    """Shares of a core that are taken while ranks wait."""

    store: float
    """By the process with the store."""
    rank: float
    """By each rank that waits, the mean."""
    busiest: float


class ForkedRanks:
    """Ranks of one process group, and the process with their store."""

    def __init__(self, num_ranks: int, setting: Mapping[str, Any], *, timeout_s: float) -> None:
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise PoolError("this process has threads, with which it must not fork")
        self._timeout_s = timeout_s
        self._fork = multiprocessing.get_context("fork")
        port = free_port()
        self._connections: list[Connection] = []
        self._processes = [self._start(_serve_store, port)]
        for rank in range(num_ranks):
            self._processes.append(self._start(_serve, rank, num_ranks, port, dict(setting)))
        self._store, *self._ranks = self._connections
        self._collect("starting")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()

    def run(self, call: str, number: int) -> list[dict[str, Any]]:
        """Makes a call on all ranks; returns what each measured. `number` counts the calls of this kind."""
        begin = time.monotonic() + _BEGIN_S
        for connection in self._ranks:
            connection.send((call, number, begin))
        return self._collect(call)

    def run_late(self, number: int, *, settle_s: float, wait_s: float) -> tuple[list[dict[str, Any]], Waiting]:
        """Lets the last rank be late for a call; returns what each measured, and what waiting took of the store's
        process and, in the mean, of each rank that waits. Ranks and store have `settle_s` before that is measured.
        """
        begin = time.monotonic() + _BEGIN_S
        waiting = [process.pid for process in self._processes[:-1]]
        for connection in self._ranks:
            connection.send((f"late {settle_s + wait_s}", number, begin))
        time.sleep(_BEGIN_S + settle_s)
        started, before = time.monotonic(), [_cpu_s_of(pid) for pid in waiting]
        time.sleep(wait_s * 0.9)
        seconds = time.monotonic() - started
        store, *ranks = [(_cpu_s_of(pid) - was) / seconds for pid, was in zip(waiting, before, strict=True)]
        return self._collect("being late"), Waiting(store, sum(ranks) / len(ranks), max(ranks))

    def _start(self, work: Any, *args: Any) -> Any:
        ours, theirs = self._fork.Pipe()
        process = self._fork.Process(target=work, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self._connections.append(ours)
        return process

    def _collect(self, doing: str) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < len(self._ranks):
            left = {connection: rank for rank, connection in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PoolError(f"{doing}: no answer of {len(left)} ranks within {self._timeout_s:.0f} s")
            for connection in ready:
                answers[left[connection]] = _received(connection, doing, left[connection])
        return [answers[rank] for rank in range(len(self._ranks))]


def _received(connection: Any, doing: str, rank: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = connection.recv()
    except EOFError:
        raise PoolError(f"{doing}: rank {rank} died") from None
    if "error" in answer:
        raise PoolError(f"{doing}: rank {rank}: {answer['error']}")
    return answer


def _serve_store(connection: Connection, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    connection.poll(None)  # for ever: this process is killed
    del store


def _serve(connection: Connection, rank: int, num_ranks: int, port: int, setting: dict[str, Any]) -> None:
    """Runs a rank: builds the state, answers that, and then each command with what it measured."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        calls = Calls(**setting)
        events = _Events(setting["folder"])
        connection.send({})
        while True:
            call, number, begin = connection.recv()
            connection.send(_measured(calls, call, number, begin=begin, events=events))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  a library that fails is a row that says so
        connection.send({"error": f"{type(error).__name__}: {str(error)[:200]}"})


class _Events:
    """Counts of data files opened, connections and threads begun. The hooks stay as long as the process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.files: set[str] = set()
        self.num_connections = self.num_threads = self.num_sent_bytes = 0
        sys.addaudithook(self._note)
        put_message = key_value_ranks.put_message

        def put_counted(store: Any, key: str, message: bytes) -> list[str]:
            self.num_sent_bytes += len(message)
            return put_message(store, key, message)

        key_value_ranks.put_message = put_counted
        # These have no audit event.
        accept, start = socket.socket.accept, threading.Thread.start

        def accept_counted(listening: socket.socket) -> Any:
            accepted = accept(listening)
            self.num_connections += 1
            return accepted

        def start_counted(thread: threading.Thread) -> None:
            self.num_threads += 1
            start(thread)

        socket.socket.accept, threading.Thread.start = accept_counted, start_counted  # type: ignore[method-assign]

    def reset(self) -> None:
        self.files.clear()
        self.num_connections = self.num_threads = self.num_sent_bytes = 0

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path):
            path = str(arguments[0])
            if path.startswith(self._folder) and path.endswith((".safetensors", ".distcp")):
                self.files.add(path)
        elif event == "socket.connect":
            # A datagram socket only asks for this host's address.
            self.num_connections += arguments[0].type & 0xF == socket.SOCK_STREAM


def _measured(calls: Calls, call: str, number: int, *, begin: float, events: _Events) -> dict[str, Any]:
    calls.prepare(call)
    events.reset()
    time.sleep(max(0.0, begin - time.monotonic()))
    started, all_bytes, cpu_s = time.monotonic(), _read_bytes(), _cpu_s()
    read_bytes = calls.run(call, number)
    found = {
        "wall_s": time.monotonic() - started,
        "cpu_s": _cpu_s() - cpu_s,
        "read_bytes": _read_bytes() - all_bytes if read_bytes is None else read_bytes,
        "wanted_bytes": calls.local_bytes(),
        "files": len(events.files),
        "connections": events.num_connections,
        "threads": events.num_threads,
        "sent_bytes": events.num_sent_bytes,
        "woken_at": calls.woken_at,
        "came_at": calls.came_at,
    }
    calls.check(call)
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _cpu_s_of(pid: int) -> float:
    """Returns the processor time of another process, from its clock."""
    return time.clock_gettime(~pid << 3 | 2)


def _read_bytes() -> int:
    """Returns the bytes that this process has read from files so far, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])
