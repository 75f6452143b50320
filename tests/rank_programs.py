"""Runs a program on several ranks as torchrun does, without torchrun's own process and waiting times."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

MAIN = Path(__file__).with_name("rank_main.py")


class Ended(NamedTuple):
    """How the process of one rank ended."""

    exit_code: int
    """Negative: the number of the signal that killed it."""
    output: str
    """What it printed."""
    errors: str
    """What it wrote to standard error."""


def run_ranks(
    program: Path,
    arguments: Sequence[object] = (),
    *,
    world_size: int = 1,
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
    exit_codes: Sequence[int] | None = None,
    python: str = sys.executable,
) -> list[Ended]:
    """Starts the program on each rank and waits for all; a test fails unless they end with these codes, each 0 if None.

    The program finds the variables that `dist.init_process_group("gloo")` reads.
    """
    with RankProcesses(program, arguments, world_size=world_size, environment=environment, python=python) as ranks:
        all_ended = ranks.wait(timeout_s)
    expected = [0] * world_size if exit_codes is None else list(exit_codes)
    assert [ended.exit_code for ended in all_ended] == expected, "\n".join(map(_told, all_ended))
    return all_ended


def _told(ended: Ended) -> str:
    return f"exit code {ended.exit_code}\n{ended.output[-2000:]}\n{ended.errors[-4000:]}"


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on 127.0.0.1 that no other program gets within the block. Who is told its number may listen there: torch
    and ZeroMQ share addresses (SO_REUSEADDR), as the socket does that holds it here, at which nobody listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # others do not share it
            holder.close()
        yield port


class RankProcesses:
    """The processes of all ranks of a program, for a test that signals or kills some of them."""

    def __init__(
        self,
        program: Path,
        arguments: Sequence[object] = (),
        *,
        world_size: int = 1,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._held = ExitStack()
        port = self._held.enter_context(reserved_port())
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
        shared |= {"LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
        shared |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", **(environment or {})}
        command = [python, str(MAIN), str(program), *map(str, arguments)]
        self.processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def wait(self, timeout_s: float = 240.0) -> list[Ended]:
        """Returns how each ended, by rank."""
        with ThreadPoolExecutor(len(self.processes)) as pool:  # a pipe that nobody reads stops its process
            outputs = list(pool.map(lambda process: process.communicate(timeout=timeout_s), self.processes))
        return [Ended(process.returncode, *output) for process, output in zip(self.processes, outputs, strict=True)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._held.close()
