"""Starts, commands, watches and ends the processes that hold a benchmark's state: one a rank, all of one Python."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WORKER = Path(__file__).parents[1] / "worker.py"
GRACE_S = 15.0
"""Time for answers after one rank has failed: the others may wait for it for ever."""
LOG_LINES = 25
_HOLDERS: list[socket.socket] = []
"""They hold the ports that `free_port` has given away."""


class PoolError(Exception):
    """A rank failed, died or did not answer in time; the pool must be ended."""


class ProcessPool:
    """The ranks of one state: processes of worker.py, which import `module` and begin with `settings`."""

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        num_ranks: int,
        timeout_s: float,
        python: str = sys.executable,
        checkout: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`checkout` is the folder whose bytecheckpoint the ranks import instead of the installed one; they get the
        variables of `environment` beside those of this process.
        """
        command = [python, str(WORKER), module, json.dumps(settings)]
        command += ["--checkout", str(checkout)] if checkout is not None else []
        self._timeout_s = timeout_s
        self._environment = environment or {}
        self._answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  end() closes it
        fixed = [*command, "--port", str(free_port())]
        self._processes = [self._start([*fixed, "--rank", str(rank)]) for rank in range(num_ranks)]
        for rank, process in enumerate(self._processes):
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()
        try:
            self.facts = self._collect()
        except PoolError:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def sessions(self) -> list[int]:
        """Process ids of the ranks. Each leads a session, to which its children belong as well."""
        return [process.pid for process in self._processes]

    def run(self, **command: str | int) -> list[dict[str, Any]]:
        """Sends a command to all ranks; returns the answer of each. Raises PoolError."""
        message = json.dumps(command)
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # a rank that has died ends its answers, which _listen reports
                process.stdin.write(message + "\n")
                process.stdin.flush()
        return self._collect()

    def log_tail(self) -> str:
        """Returns the last lines that the ranks wrote to standard error."""
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-LOG_LINES:])

    def end(self) -> None:
        """Ends all processes of the pool, also what the ranks have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        # DCP's process mode connects to the host's name, which need not resolve, unless MASTER_ADDR is set.
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"} | self._environment
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def _listen(self, rank: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout:
            self._answers.put((rank, json.loads(line)))
        self._answers.put((rank, {"error": "the process died"}))

    def _collect(self) -> list[dict[str, Any]]:
        """Waits for an answer of each rank; returns them in order of rank."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(answers) < len(self._processes):
            try:
                rank, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                answers[len(answers)] = {"error": f"no answer within {self._timeout_s:.0f} s"}
                break
            answers[rank] = answer
            if "error" in answer:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        errors = [answer["error"] for answer in answers.values() if "error" in answer]
        if errors:
            raise PoolError(errors[0])
        return [answers[rank] for rank in sorted(answers)]


def free_port() -> int:
    """Returns a port on 127.0.0.1 that no other program gets while this process lives, where rank 0 may listen: torch
    shares the address (SO_REUSEADDR) with a socket that holds it, at which nobody listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    if sys.platform == "linux":
        _HOLDERS.append(holder)
    else:  # others do not share it: if another program takes it in between, that fails loudly
        holder.close()
    return port
