"""Python programs without waiting seconds for the import of torch: a stand-in for the interpreter, which has a process
fork for each program. That process has imported torch and the library before.

    subprocess.run([forked_python(), "train.py"])    # in place of sys.executable

A program has the arguments, environment, folder, input and outputs of the command, and runs its exit functions; signals
that the stand-in gets reach it, and what kills the stand-in kills it. Programs that it starts with its own
sys.executable are forked as well. Its memory is not as a user's, nothing of it is torn down at its end, and what reads
the environment while torch is imported has read it long ago. What asks for more of the interpreter than a script, `-m`,
`-c` and `-u` runs in the real one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

import no_sync
from python_stand_in import CODE_BYTES, KINDS, STANDARD_FILES

_MAX_BYTES = 1 << 20
_PRELOADED = (
    "bytecheckpoint.manager.checkpoint_manager",
    "bytecheckpoint.tools.main",
    "numpy",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.nn.parallel",
)
_OF_SERVER = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "OMP_NUM_THREADS": "1"}
"""Where Python's objects lie in large pages a fork costs a tenth."""
STAND_IN = Path(__file__).with_name("python_stand_in.py")


@functools.cache
def forked_python() -> str:
    """Returns the path of the stand-in, one for all that this process does. What runs when that ends is killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | _OF_SERVER
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    atexit.register(shutil.rmtree, folder)
    python, path = folder / "python", folder / "socket"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {STAND_IN} {path} {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, __file__, str(path), str(python)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(_end, server)  # which comes first
    assert server.stdout
    assert server.stdout.read(1)  # it listens
    return str(python)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.communicate()


class Server:
    """Forks programs, tells how they ended, and passes signals on."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._programs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._woken, waking = socket.socketpair()
        self._woken.setblocking(False)
        waking.setblocking(False)
        self._waking = waking
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict[str, Any] | None:
        """Returns None once nobody wants it any more; in a forked process, what that is to run."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return self._end()
                if key.fileobj is self._listener:
                    asked = self._fork(self._listener.accept()[0])
                    if asked is not None:
                        return asked
                elif key.fileobj is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._tell_of_ended()
                elif key.data in self._programs:
                    self._pass_on(key.data)

    def _fork(self, client: socket.socket) -> dict[str, Any] | None:
        asked, fds = self._receive(client)
        pid = os.fork() if asked is not None else None
        if pid == 0:
            self._let_go(client, fds)
            return asked
        for fd in fds:
            os.close(fd)
        if pid is None:
            client.close()
        else:
            self._programs[pid] = client
            self._selector.register(client, selectors.EVENT_READ, pid)
        return None

    @staticmethod
    def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
        """What a stand-in asks for, and its open files. None for one that was killed before it had asked."""
        fds: list[int] = []
        content = b""
        with contextlib.suppress(ConnectionError):
            head, fds, _, _ = socket.recv_fds(client, CODE_BYTES, len(STANDARD_FILES))
            num_bytes = int.from_bytes(head, "big")
            while len(content) < num_bytes and (part := client.recv(min(num_bytes - len(content), _MAX_BYTES))):
                content += part
            if head and len(content) == num_bytes:
                return json.loads(content), fds
        return None, fds

    def _let_go(self, client: socket.socket, fds: list[int]) -> None:
        """In the program: nothing stays of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (client, self._listener, self._woken, self._waking, *self._programs.values()):
            each.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)

    def _tell_of_ended(self) -> None:
        while self._programs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            client = self._programs.pop(pid)
            with contextlib.suppress(KeyError):  # where the stand-in was killed
                self._selector.unregister(client)
            with contextlib.suppress(OSError), client:
                client.sendall(os.waitstatus_to_exitcode(status).to_bytes(CODE_BYTES, "big", signed=True))

    def _pass_on(self, pid: int) -> None:
        try:
            numbers = self._programs[pid].recv(64)
        except OSError:
            numbers = b""
        if not numbers:  # the stand-in was killed
            self._selector.unregister(self._programs[pid])
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)

    def _end(self) -> None:
        for pid in self._programs:
            os.kill(pid, signal.SIGKILL)


def become(asked: dict[str, Any], python: str) -> tuple[types.CodeType, str | None]:
    """Makes this process that of the program; returns its code, and the path of its script if it is one."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    sys.executable = python
    arguments = asked["arguments"]
    _open_standard_files(is_unbuffered=arguments[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED")))
    if arguments[0] == "-u":
        arguments = arguments[1:]
    kind = arguments[0] if arguments[0] in KINDS else ""
    text, *sys.argv[1:] = arguments[1:] if kind else arguments
    sys.argv[0] = kind or text
    first = "" if kind == "-c" else asked["folder"] if kind else str(Path(text).resolve().parent)
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if kind == "-m":
        text, kind = f"import runpy; runpy.run_module({text!r}, run_name='__main__', alter_sys=True)", "-c"
    if kind:
        return compile(text, "<string>", "exec"), None
    return compile(Path(text).read_bytes(), text, "exec"), text


def _open_standard_files(*, is_unbuffered: bool) -> None:
    """Anew: those of the server know what its files can do."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if is_unbuffered:
        sys.stdout.reconfigure(write_through=True)


def run(code: types.CodeType, script: str | None) -> int:
    """Runs the program to its end, and returns its exit code."""
    program = types.ModuleType("__main__")
    if script is not None:
        program.__file__ = script
    sys.modules["__main__"] = program
    exit_code: Any = 0
    try:
        exec(code, program.__dict__)
    except SystemExit as end:
        exit_code = end.code
        if exit_code is not None and not isinstance(exit_code, int):
            sys.stderr.write(f"{exit_code}\n")
            exit_code = 1
    except BaseException:  # noqa: BLE001  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return (exit_code or 0) & 255


def end(exit_code: int) -> NoReturn:
    """Ends this process with what it printed written, and its interpreter not torn down."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    os._exit(exit_code)


def main() -> None:
    _, path, python = sys.argv
    for name in _OF_SERVER:
        os.environ.pop(name)  # what programs start has the environment of a user's
    import torch

    for name in _PRELOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    no_sync.install()
    server = Server(path)
    gc.collect()
    gc.freeze()  # collections in the programs would copy every page
    os.write(1, b".")
    asked = server.serve()
    if asked is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end(run(*become(asked, python)))  # an interpreter that tears all modules down copies every page


if __name__ == "__main__":
    main()
