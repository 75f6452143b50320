"""Stands for the interpreter in a command: asks the server of forked_python.py for a process, and ends as that does.
It imports little, because each program waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STANDARD_FILES = (0, 1, 2)
CODE_BYTES = 8
KINDS = ("-c", "-m")


def stand_in(path: str, real: str, arguments: list[str]) -> int:
    """Has the program run, and returns its exit code, or ends by the signal that ended it."""
    first = arguments[0] if arguments else "-"
    if (first.startswith("-") and first not in {"-u", *KINDS}) or "PYTHONWARNINGS" in os.environ:
        os.execv(real, [real, *arguments])
    asked = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # what they send comes behind what this asks for
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: server.send(bytes([number])))
        socket.send_fds(server, [len(asked).to_bytes(CODE_BYTES, "big")], STANDARD_FILES)
        server.sendall(asked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        answer = server.recv(CODE_BYTES)
    if not answer:
        raise ConnectionError("the server of forked_python.py has ended")
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(stand_in(sys.argv[1], sys.argv[2], sys.argv[3:]))
