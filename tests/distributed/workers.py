"""A pool of processes for tests that need several ranks. Importing torch costs seconds, so the processes are forked
from one server that has imported it, are kept for the whole session and are sent work; what a worker does, and what
it is testing, is none of its business.

    outcome = pool.run(function, argument, world_size=4)      # function(rank, world_size, argument) on each of 4 ranks

Every call gets a process group of its own over gloo on 127.0.0.1. A worker that dies or hangs is replaced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from distributed.worker_process import Call, Group, serve

MAX_WORKERS = 8
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.testing",
    "bytecheckpoint.manager.checkpoint_manager",
    "numpy",
    "pytest",
]
"""Imported once, by the server: torch's optimizers import torch._dynamo when the first one is made."""
_PROCESSES = threading.Lock()
"""Pools of several threads share one environment, and the list of children in which multiprocessing looks after each
of them whenever another one starts. Hazard: of two threads that ask at once how a child has ended, one is told wrong.
"""
_STARTUP_S = 120.0
_DUMP_S = 30.0
_END_S = 60.0
"""A process that was killed has to end, and multiprocessing's server of forks to say so, before it can be closed."""


class WorkerError(Exception):
    """At least one rank raised, died or hung. `errors` holds what each such rank raised."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}:\n{describe(error)}" for rank, error in errors.items()))


class WorkerDied(Exception):  # noqa: N818  # the name says what happened, as KeyboardInterrupt does
    """The process of a rank ended. `exit_code` is negative for a signal, as in subprocess; `stacks` is what
    faulthandler said about its threads, if the signal let it.
    """

    def __init__(self, rank: int, exit_code: int | None, stacks: str) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.stacks = stacks
        where = f"; it was here:\n{stacks}" if stacks else ""
        super().__init__(f"the process of rank {rank} ended with exit code {exit_code}{where}")


class WorkerHung(Exception):  # noqa: N818  # as above
    """A rank was not done in time and was killed. `stacks` is what faulthandler said about each of its threads."""

    def __init__(self, rank: int, timeout_s: float, stacks: str) -> None:
        self.rank = rank
        self.stacks = stacks
        super().__init__(f"rank {rank} was not done after {timeout_s} s; it was here:\n{stacks}")


class Outcome(NamedTuple):
    """What became of a rank: the value that the function returned, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None


def describe(error: BaseException) -> str:
    """The error as text, with the traceback from its worker, which travels as a note."""
    return "".join(traceback.format_exception_only(error))


class WorkerPool:
    """Workers for ranks 0 to `MAX_WORKERS - 1`, each started when a call first needs it. To be closed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._workers: dict[int, _Worker] = {}
        self._store: Any = None
        self._num_calls = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 4,
        timeout_s: float = 120,
        process_group: bool = True,
    ) -> list[Any]:
        """What `function(rank, world_size, *args)` returned on each rank, by rank; WorkerError where one raised.

        The function stands at the top of a module; arguments and results are pickled. It runs under the warning
        filters of the caller. `timeout_s` is for all of the call, without the first start of the workers.
        """
        outcomes = self.run_each(
            function, *args, world_size=world_size, timeout_s=timeout_s, process_group=process_group
        )
        errors = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
        if errors:
            raise WorkerError(errors)
        return [outcome.value for outcome in outcomes]

    def run_each(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 4,
        timeout_s: float = 120,
        process_group: bool = True,
    ) -> list[Outcome]:
        """As `run`, but gives each rank's value or exception and raises nothing itself."""
        if not 1 <= world_size <= MAX_WORKERS:
            raise ValueError(f"world_size is 1 to {MAX_WORKERS}, not {world_size}")
        self._ensure_workers(world_size)
        self._num_calls += 1
        group = Group(self._store_port(), f"call{self._num_calls}", world_size) if process_group else None
        call = Call(function.__module__, function.__qualname__, args, world_size, group, _filters_to_send())
        deadline = time.monotonic() + timeout_s
        for rank in range(world_size):
            self._workers[rank].send(call)
        outcomes = self._collect(world_size, deadline, timeout_s)
        self._release(world_size, deadline=time.monotonic() + timeout_s)
        return [outcomes[rank] for rank in range(world_size)]

    def pids(self) -> list[int]:
        """The process of each rank that was started so far."""
        return [worker.pid for _, worker in sorted(self._workers.items())]

    def close(self) -> None:
        """Ends the processes that were started here, each by its id."""
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()
        self._store = None
        self._folder.cleanup()

    def _ensure_workers(self, count: int) -> None:
        for rank in [rank for rank, worker in self._workers.items() if not worker.is_alive()]:
            self._workers.pop(rank).stop()
        missing = [rank for rank in range(count) if rank not in self._workers]
        for rank in missing:
            self._workers[rank] = _Worker(rank, Path(self._folder.name) / f"stacks-{rank}.txt")
        for rank in missing:
            self._workers[rank].wait_until_ready()

    def _store_port(self) -> int:
        """The one server of all rendezvous. It lives here, so no worker's death takes it along."""
        from torch.distributed import TCPStore

        if self._store is None:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return int(self._store.port)

    def _collect(self, world_size: int, deadline: float, timeout_s: float) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = {self._workers[rank].connection: rank for rank in range(world_size)}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                outcomes[rank] = self._receive(rank)
        for rank in waiting.values():
            stacks = self._workers.pop(rank).dump_and_kill()
            outcomes[rank] = Outcome(error=WorkerHung(rank, timeout_s, stacks))
        return outcomes

    def _receive(self, rank: int) -> Outcome:
        try:
            return self._workers[rank].receive()
        except (EOFError, OSError):
            worker = self._workers.pop(rank)
            return Outcome(error=WorkerDied(rank, worker.stop(), worker.read_stacks()))

    def _release(self, world_size: int, deadline: float) -> None:
        """Only now may ranks that succeeded leave the group: another may have been in its last collective."""
        alive = [rank for rank in range(world_size) if rank in self._workers]
        for rank in alive:
            self._workers[rank].send(None)
        for rank in alive:
            worker = self._workers[rank]
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                worker.dump_and_kill()
                del self._workers[rank]
            elif (outcome := self._receive(rank)).error is not None:
                raise WorkerError({rank: outcome.error})


class _Worker:
    """One process, as seen from the pool."""

    def __init__(self, rank: int, stacks: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._stacks = stacks
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(rank, theirs, str(stacks)), name=f"rank {rank}")
        with _PROCESSES, _environment_of_workers():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def is_alive(self) -> bool:
        with _PROCESSES:
            is_running = self._process.is_alive()
        return is_running and not self.connection.poll()  # readable with nothing asked: it is closed

    def wait_until_ready(self) -> None:
        if not self.connection.poll(_STARTUP_S):
            raise TimeoutError(f"worker {self._process.name} did not start: {self.dump_and_kill()}")
        self.connection.recv_bytes()

    def send(self, call: Call | None) -> None:
        # A worker that has died is noticed when its answer is awaited.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> Outcome:
        value, error = pickle.loads(self.connection.recv_bytes())
        return Outcome(value, error.rebuild() if error is not None else None)

    def dump_and_kill(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        give_up = time.monotonic() + _DUMP_S
        # The dump ends with the main thread, which is the first to have started, and with the frame that it began in.
        while not self.read_stacks().endswith("in <module>\n") and time.monotonic() < give_up:
            time.sleep(0.02)
        self._process.kill()
        self.stop()
        return self.read_stacks()

    def stop(self) -> int | None:
        """Kills the process unless it has ended, and gives its exit code."""
        self.connection.close()
        wait([self._process.sentinel], 0.5)
        with _PROCESSES:
            self._process.kill()
            self._process.join(_END_S)
            exit_code = self._process.exitcode
            self._process.close()
        return exit_code

    def read_stacks(self) -> str:
        return self._stacks.read_text() if self._stacks.exists() else ""


@contextlib.contextmanager
def _environment_of_workers() -> Iterator[None]:
    """What the libraries under torch read before any argument can reach them. Two cores have no room for eight
    workers with a thread pool each, and gloo would look up the host's name.
    """
    changed = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _filters_to_send() -> list[Any]:
    """The warning filters that hold here now, but for pytest's own categories: workers know no pytest."""
    return [entry for entry in warnings.filters if not entry[2].__module__.startswith(("_pytest", "pytest"))]
