"""Ports for servers that are told their port, or keep it from one start to the next."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST, _END = 20_000, 60_000
_GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nobody listens. Hazard: of those that the kernel gives out by itself, some
    other process may have got it before it is listened on, or between a server's end and its next start.
    """
    first, last = map(int, _GIVEN_OUT.read_text().split()) if _GIVEN_OUT.exists() else (1, 0)
    ports = [port for port in range(_FIRST, _END) if not first <= port <= last] or [0]
    while True:
        # Drawn from what differs in each process, because several look for one at the same time.
        with suppress(OSError), socket.create_server(("127.0.0.1", random.SystemRandom().choice(ports))) as listener:
            return int(listener.getsockname()[1])
