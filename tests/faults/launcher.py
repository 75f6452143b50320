"""Programs as a user starts them, without waiting seconds for the import of torch: one process has imported it, and
forks for each program. A program ends as any Python program does, exit hooks and all; run as a script, this is that
process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How a program ended."""

    exit_code: int | None
    """Negative for a signal; None for one that had to be killed because it did not end."""
    output: str
    """Of stdout and stderr together."""


class Launcher:
    """The process that has torch, as seen from a test. To be closed."""

    def __init__(self, folder: Path, *, ready_for: str | None = None) -> None:
        """`ready_for` names a module whose `warm_up()` does once what every program would have to do for itself."""
        self._folder = folder
        self._outputs: dict[int, Path] = {}
        self._numbers = itertools.count()
        root = Path(__file__).parents[2]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{root / 'tests'}"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *([ready_for] if ready_for else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def start(self, code: str, *arguments: object) -> int:
        """Starts a program with these arguments and returns its process id."""
        output = self._folder / f"output-{next(self._numbers)}.txt"  # not named after the process: its id comes again
        pid = int(self._ask({"code": code, "argv": ["program", *map(str, arguments)], "output": str(output)}))
        self._outputs[pid] = output
        return pid

    def wait(self, pid: int, timeout_s: float = 30.0) -> Ended:
        return Ended(self._ask({"wait": pid, "timeout_s": timeout_s}), self._outputs[pid].read_text())

    def wait_for_output(self, pid: int, text: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self._outputs[pid].read_text():
            assert time.monotonic() < deadline, self._outputs[pid].read_text()
            time.sleep(0.002)

    def wait_for_lines(self, pid: int, number: int, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self._outputs[pid].read_bytes().count(b"\n") < number:
            assert time.monotonic() < deadline, self._outputs[pid].read_text()
            time.sleep(0.003)

    def run(self, code: str, *arguments: object, timeout_s: float = 30.0) -> Ended:
        return self.wait(self.start(code, *arguments), timeout_s)

    def close(self) -> None:
        if self._process.stdin and self._process.stdout:
            self._process.stdin.close()
            self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # it has nothing left to do but to clear up, which a busy machine makes slow
            self._process.kill()
            self._process.wait()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@functools.cache
def shared_launcher(ready_for: str) -> Launcher:
    """One for all that this process does, because starting it takes seconds; closed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="programs-"))
    launcher = Launcher(folder, ready_for=ready_for)
    atexit.register(shutil.rmtree, folder)
    atexit.register(launcher.close)  # which comes first
    return launcher


def serve() -> dict[str, Any] | None:
    """Answers requests until the end; in a child, the program that it is to run."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _answer(_wait_for(request["wait"], request["timeout_s"]))
            continue
        Path(request["output"]).touch()
        pid = os.fork()
        if pid == 0:
            _redirect(request["output"])
            # As in a terminal: what a shell starts in the background ignores it, and so does all that this starts.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return dict(request)
        _answer(pid)
    return None


def _answer(value: int | None) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def _wait_for(pid: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _redirect(output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.close(nothing)


if __name__ == "__main__":
    import no_pickle
    import torch.distributed

    import bytecheckpoint
    from faults.seams import state_of

    no_pickle.install()

    with tempfile.TemporaryDirectory() as folder:  # imports what a first save and load import
        bytecheckpoint.save(folder, state_of(0, 0.0))
        bytecheckpoint.load(folder, state_of(0, 0.0))
    for module in sys.argv[1:]:
        importlib.import_module(module).warm_up()
    torch.set_num_threads(1)
    gc.freeze()  # collections in the children would copy every page
    program = serve()
    if program is not None:
        sys.argv = program["argv"]
        exec(compile(program["code"], "<program>", "exec"), {"__name__": "__main__", "bcp": bytecheckpoint})
