"""Bytes that a process has read from files, as the kernel counts them: no tracing, no trust in a library's figures."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

IO = Path("/proc/self/io")
FDS = Path("/proc/self/fd")
TCP_INFO_BYTES = 256
BYTES_RECEIVED_AT = 128
"""In the kernel's struct tcp_info."""


class ReadCounts(NamedTuple):
    """Counts of this process and all its threads, since it began."""

    called_bytes: int
    """Bytes got by read, pread and the like, from the page cache or past it, not by mapping."""
    disk_bytes: int
    """Bytes that came from the disk for this process, also for what is mapped, with the kernel's read-ahead."""

    def since(self, earlier: ReadCounts) -> ReadCounts:
        return ReadCounts(self.called_bytes - earlier.called_bytes, self.disk_bytes - earlier.disk_bytes)


def read_counts(store_port: int) -> ReadCounts:
    """Returns the counts less what the ranks' key-value store, which listens on this port, has received: only the store
    gets messages by read. Gloo and the store's clients use recv, which is not counted in the first place.
    """
    lines = dict(line.split(": ") for line in IO.read_text().splitlines())
    return ReadCounts(int(lines["rchar"]) - received_at(store_port), int(lines["read_bytes"]))


def received_at(port: int) -> int:
    """Sums the bytes received on TCP connections to a port of this process that are open now."""
    return sum(received(int(path.name), port) for path in FDS.iterdir())


def received(fd: int, port: int) -> int:
    try:
        if not str((FDS / str(fd)).readlink()).startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                return 0
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            return int(struct.unpack_from("Q", facts, BYTES_RECEIVED_AT)[0])
    except OSError:
        return 0  # closed meanwhile, or no TCP
