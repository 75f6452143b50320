"""Programs that are forked behave as those of the interpreter that they stand in for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_python import forked_python
from python_stand_in import CODE_BYTES

REPORT = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('SHOWN'), sys.path[0], __name__, input())"
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def run(python: str, folder: Path, *arguments: str) -> tuple[int, str, str]:
    environment = {**os.environ, "SHOWN": "yes"}
    ended = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, input="line\n", capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout, ended.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", REPORT, "one", "two"),
        ("script.py", "one"),
        ("-u", "folder/script.py"),
        ("-m", "named", "one"),
        ("-c", "import sys; sys.exit(7)"),
        ("-c", "import sys; sys.exit('no')"),
        ("-c", "1 / 0"),
        ("-c", "import atexit; atexit.register(print, 'last'); print('first')"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("-c", "import os; os._exit(3)"),
        ("-W", "error", "-c", "import sys; print(sys.warnoptions)"),
    ],
    ids=" ".join,
)
def test_a_forked_program_does_what_one_of_the_interpreter_does(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "folder").mkdir()
    for path in ("script.py", "folder/script.py", "named.py"):
        (tmp_path / path).write_text(REPORT)
    assert run(forked_python(), tmp_path, *arguments) == run(sys.executable, tmp_path, *arguments)


def test_a_forked_program_has_torch_and_what_it_starts_is_forked(tmp_path: Path) -> None:
    has_torch = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; {has_torch}; subprocess.run([sys.executable, '-c', {has_torch!r}])"
    assert sorted(run(forked_python(), tmp_path, "-c", code)[1].split()) == ["True", "True"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_to_the_stand_in_ends_the_program(number: signal.Signals) -> None:
    with subprocess.Popen(
        [forked_python(), "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as stand_in:
        assert stand_in.stdout
        pid = int(stand_in.stdout.readline())
        stand_in.send_signal(number)
        assert stand_in.wait() == -number
    deadline = time.monotonic() + 30
    while is_there(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("said", [b"", (1000).to_bytes(CODE_BYTES, "big"), (1000).to_bytes(CODE_BYTES, "big") + b"{"])
def test_a_stand_in_that_is_killed_before_it_has_asked_leaves_the_server_to_others(tmp_path: Path, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stand_in:
        stand_in.connect(str(Path(forked_python()).with_name("socket")))
        stand_in.sendall(said)
    assert run(forked_python(), tmp_path, "-c", "print('here')")[:2] == (0, "here\n")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
