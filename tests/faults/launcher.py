"""Programs without waiting seconds for the import of torch: one process has imported it, and forks for each program.
A program has the environment of one that a user starts, and ends as any Python program does, exit hooks and all. Its
memory is not as a user's: it inherits malloc in place of Python's own allocator, and large pages. Run as a script, this
is that process.
"""

from __future__ import annotations

import atexit
import ctypes
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_LOOK_S = 0.001
"""How often it is seen whether a program has said something or ended."""
_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Where Python's objects lie in large pages a fork costs a tenth, and so does the end of a program."""
_PR_SET_CHILD_SUBREAPER = 36


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
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{root / 'tests'}"} | _LARGE_PAGES
        self._process = subprocess.Popen(
            [sys.executable, __file__, *([ready_for] if ready_for else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, code: str, *arguments: object) -> int:
        """Starts a program with these arguments and returns its process id."""
        output = self._folder / f"output-{next(self._numbers)}.txt"  # not named after the process: its id comes again
        pid = int(self._ask({"code": code, "argv": ["program", *map(str, arguments)], "output": str(output)}))
        self._outputs[pid] = output
        return pid

    def wait(self, pid: int, timeout_s: float = 30.0) -> Ended:
        return Ended(self._ask({"wait": pid, "timeout_s": timeout_s}), self._outputs[pid].read_text())

    def has_ended(self, pid: int) -> bool:
        """Whether there is nothing to wait for."""
        return bool(self._ask({"look": pid}))

    def wait_for_output(self, pid: int, text: str, timeout_s: float = 30.0) -> None:
        self._wait_until(pid, lambda said: text.encode() in said, timeout_s)

    def wait_for_lines(self, pid: int, number: int, timeout_s: float = 120.0) -> None:
        self._wait_until(pid, lambda said: said.count(b"\n") >= number, timeout_s)

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

    def _wait_until(self, pid: int, is_enough: Callable[[bytes], bool], timeout_s: float) -> None:
        output, seen_bytes = self._outputs[pid], -1
        deadline = time.monotonic() + timeout_s
        while True:
            if (num_bytes := output.stat().st_size) != seen_bytes:
                seen_bytes = num_bytes
                if is_enough(output.read_bytes()):
                    return
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(_LOOK_S)

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


class Programs:
    """Those that were forked here. What they have forked and left behind ends up here, too, and is waited for as soon
    as it ends: the first process of a machine may take seconds for that, and meanwhile it looks as if it were alive.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._is_forking = False
        self._children = Path(f"/proc/self/task/{os.getpid()}/children")
        if self._children.exists():
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            signal.signal(signal.SIGCHLD, lambda *_: self._wait_for_strangers())

    def fork(self) -> int:
        self._is_forking = True  # what ends before it is known here is no stranger
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return 0
        self._own.add(pid)
        self._is_forking = False
        self._wait_for_strangers()
        return pid

    def wait_for(self, pid: int, timeout_s: float) -> int | None:
        """The exit code; None where it had to be killed. Until this a program keeps its number, dead or alive."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._own.remove(pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(_LOOK_S)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._own.remove(pid)
        return None

    def has_ended(self, pid: int) -> bool:
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it was waited for before
            return True

    def _wait_for_strangers(self) -> None:
        if self._children.exists() and not self._is_forking:
            for pid in {int(number) for number in self._children.read_text().split()} - self._own:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def serve() -> dict[str, Any] | None:
    """Answers requests until the end; in a child, the program that it is to run."""
    programs = Programs()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            _answer(programs.wait_for(request["wait"], request["timeout_s"]))
            continue
        if "look" in request:
            _answer(programs.has_ended(request["look"]))
            continue
        Path(request["output"]).touch()
        pid = programs.fork()
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


def _redirect(output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.close(nothing)


if __name__ == "__main__":
    for name in _LARGE_PAGES:
        os.environ.pop(name, None)  # what programs start has the environment and the allocator of a user's
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
