"""Starts runs of train_gpt.py as processes of their own, watches their logs, and kills or stops them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

SCRIPT = Path(__file__).parent / "train_gpt.py"
LAUNCHER = "torch/distributed/elastic"
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
LOG, OUTPUT = "log.jsonl", "output.txt"
STEPS_PER_LINE = 10


class Schedule(NamedTuple):
    steps: int
    save_every: int
    """Number of steps between saves."""
    memory_every: int
    """Number of steps between those that are held in memory, in a run that does that."""
    timeout_s: float
    """Time limit of a run; a run that takes longer is killed and the demo fails."""


class RunError(Exception):
    """A run ended otherwise than it should have."""


class Run:
    """One run of the training script, with a folder of its own."""

    def __init__(
        self,
        name: str,
        title: str,
        *,
        layout: str,
        num_processes: int,
        folder: Path,
        checkpoints: Path | None = None,
        memory: Path | None = None,
    ) -> None:
        """`checkpoints` are those of another run, which this one goes on with; `memory` holds steps in memory."""
        self.name = name
        self.title = title
        self.folder = folder
        self.checkpoints = checkpoints or folder / "checkpoints"
        self._is_of_other = checkpoints is not None
        self._memory = memory
        self._layout = layout
        self._num_processes = num_processes

    def clear(self) -> None:
        """Removes the files of an earlier demo, and nothing else."""
        if not self._is_of_other:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        for name in (LOG, OUTPUT):
            (self.folder / name).unlink(missing_ok=True)

    def finish(self, schedule: Schedule, console: Console) -> None:
        """Runs to the end. Raises RunError if the run fails or takes too long."""
        with self._started(schedule) as process:
            for event in self._follow(process, schedule):
                _show(event, console)
        if process.returncode != 0:
            raise RunError(f"the run ended with exit code {process.returncode}. {self._output_tail()}")

    def kill_at(self, step: int, schedule: Schedule, console: Console) -> None:
        """Runs until the step is in the log, then kills every process. Raises RunError if the run ends before."""
        with self._started(schedule) as process:
            for event in self._follow(process, schedule):
                _show(event, console)
                if event["event"] == "step" and event["step"] >= step:
                    self._kill(process)
                    return
        raise RunError(f"the run ended before step {step}, at which it was to be killed. {self._output_tail()}")

    def stop_at(self, step: int, schedule: Schedule, console: Console, *, rank: int) -> None:
        """Runs until the step is in the log, sends SIGTERM to one process, and lets all of them end by themselves.

        Raises RunError if the run ends before, or if a process ends with an error.
        """
        is_sent = False
        with self._started(schedule) as process:
            for event in self._follow(process, schedule):
                _show(event, console)
                if event["event"] == "step" and event["step"] >= step and not is_sent:
                    pid = self.events("started")[0]["pids"][rank]
                    os.kill(pid, signal.SIGTERM)
                    is_sent = True
                    console.print(f"  [yellow]SIGTERM to process {pid}[/yellow], rank {rank} of {self._num_processes}")
        if not is_sent:
            raise RunError(f"the run ended before step {step}, at which it was to be stopped. {self._output_tail()}")
        if process.returncode != 0:  # torchrun's is 0 only if that of each of its processes is
            raise RunError(f"the run was stopped, and ended with exit code {process.returncode}. {self._output_tail()}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, self._lines()) if event["event"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """Losses by step, in nats per byte; exactly the numbers that the run computed."""
        return {event["step"]: float.fromhex(event["hex"]) for event in self.events("step")}

    def digests(self, kind: str, step: int) -> dict[str, str]:
        """FQN -> sha256 of the state as the run had it when it saved ("saving") or had loaded ("loaded") this step."""
        found = [event["digests"] for event in self.events(kind) if event["step"] == step]
        return found[0] if found else {}

    @contextmanager
    def _started(self, schedule: Schedule) -> Iterator[subprocess.Popen[bytes]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                self._command(schedule), stdout=output, stderr=output, env=_environment(), start_new_session=True
            )
            try:
                yield process
            finally:
                self._kill(process)

    def _command(self, schedule: Schedule) -> list[str]:
        launcher = [sys.executable]
        if self._num_processes > 1:
            launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={self._num_processes}"]
            launcher += ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
        arguments = [f"--layout={self._layout}", f"--out={self.folder}", "--digests"]
        arguments += [f"--steps={schedule.steps}", f"--save-every={schedule.save_every}"]
        arguments += [f"--checkpoints={self.checkpoints}"]
        if self._memory is not None:
            arguments += [f"--memory-root={self._memory}", f"--memory-every={schedule.memory_every}"]
        return [*launcher, str(SCRIPT), *arguments]

    def _follow(self, process: subprocess.Popen[bytes], schedule: Schedule) -> Iterator[dict[str, Any]]:
        """The log's events as they come, until the process has ended."""
        num_seen, deadline = 0, time.monotonic() + schedule.timeout_s
        is_running = True
        while is_running:
            is_running = process.poll() is None  # asked before the log is read, so that its last lines are not missed
            lines = self._lines()
            yield from map(json.loads, lines[num_seen:])
            num_seen = len(lines)
            if time.monotonic() > deadline:
                raise RunError(f"the run took more than {schedule.timeout_s:.0f} s. {self._output_tail()}")
            time.sleep(0.05)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Sends SIGKILL to the launcher, then to its workers, which lead sessions of their own; none can clean up."""
        if process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGKILL)
        for event in self.events("started"):
            for pid in event["pids"]:
                _kill_pid(pid)
        process.wait()

    def _lines(self) -> list[str]:
        """Returns the complete lines of the log."""
        log = self.folder / LOG
        return log.read_text().split("\n")[:-1] if log.exists() else []

    def _output_tail(self) -> str:
        """Returns the end of the processes' output, without the launcher's summary, which hides the cause."""
        output = self.folder / OUTPUT
        text = output.read_text(errors="replace").partition(LAUNCHER)[0]
        return f"{output} ends:\n" + "\n".join(text.splitlines()[-30:])


def _show(event: dict[str, Any], console: Console) -> None:
    step = event.get("step")
    if event["event"] == "started":
        console.print(f"  {len(event['pids'])} process(es), {event['layout']}: pids {event['pids']}")
    elif event["event"] == "loaded":
        source = "memory" if event["from_memory"] else "disk"
        console.print(f"  [cyan]loaded step {step}[/cyan] from {source} in {event['load_s']:.2f} s")
    elif event["event"] == "step" and step % STEPS_PER_LINE == 0:
        console.print(f"  step {step:3}  loss {event['loss']:.4f}  ({event['step_s']:.2f} s a step)")
    elif event["event"] == "saving":
        console.print(f"  [cyan]saving step {step}[/cyan]: training stood still for {event['stall_s']:.2f} s")
    elif event["event"] == "stopping":
        console.print(f"  [cyan]stopping after step {step}[/cyan], which is durable")


def _kill_pid(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # gone already: the worker noticed that its launcher had died


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    """Returns an environment with one thread a process, so that sums are added in one order, and gloo on the loopback
    interface.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform in LOOPBACK:
        environment["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    return environment
