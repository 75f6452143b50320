"""A port for a program that binds it later, or that nobody is to bind."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a port of 127.0.0.1 that no other process gets meanwhile: a port that was free a moment ago may be
    another's by the time that a program has started.

    A socket holds it that does not listen: connections are refused, until a server that may reuse addresses, as the
    stores of torch do, takes the port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # others do not share it
            holder.close()
        yield port
