"""The processes of a benchmark that hold a state: started, told what to do, watched, ended. A crew is as many processes
as the state has ranks, all of one Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GRACE_S = 15.0
"""After one rank has failed: the others may wait for it for ever."""
LOG_LINES = 25


class CrewError(Exception):
    """A rank failed, died or did not answer in time; the crew is of no more use."""


class Crew:
    """The ranks of one state. `command` starts one of them, when it is told its rank and the port they meet at."""

    def __init__(self, command: Sequence[str], *, num_ranks: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  end() closes it
        fixed = [*command, "--port", str(free_port())]
        self._processes = [self._start([*fixed, "--rank", str(rank)]) for rank in range(num_ranks)]
        for rank, process in enumerate(self._processes):
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()
        try:
            self.facts = self._collect()
        except CrewError:
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
        """Process ids of the ranks. Each leads a session, which what it starts belongs to as well."""
        return [process.pid for process in self._processes]

    def run(self, contestant: str, folder: Path, **more: str) -> list[dict[str, Any]]:
        """What each rank measured. Raises CrewError."""
        message = json.dumps({"contestant": contestant, "folder": str(folder), **more})
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # a rank that has died says so by the end of its answers
                process.stdin.write(message + "\n")
                process.stdin.flush()
        return self._collect()

    def log_tail(self) -> str:
        """The last lines that the ranks wrote to standard error."""
        self._log.seek(0)
        return "\n".join(self._log.read().splitlines()[-LOG_LINES:])

    def end(self) -> None:
        """Ends all processes of the crew, also what the ranks have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        # DCP's process mode looks for its partners at the host's name, which need not resolve, unless told this.
        environment: Mapping[str, str] = {**os.environ, "MASTER_ADDR": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
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
        """An answer of each rank, in order of rank."""
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
            raise CrewError(errors[0])
        return [answers[rank] for rank in sorted(answers)]


def free_port() -> int:
    """Free now; that another process takes it in between fails loudly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
