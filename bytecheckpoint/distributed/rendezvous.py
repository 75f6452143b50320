"""Finds and authenticates the connections between reader ranks and their peers. No wait is for one peer alone:
unauthenticated connections that send nothing delay no other, and all waits end once the load has failed.
"""

from __future__ import annotations

import errno
import hmac
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from bytecheckpoint.distributed.connection import GRACE_S, Connection, PeerLeftError, fill, interrupt, missing_error
from bytecheckpoint.distributed.key_value_ranks import MAX_GRACE_S
from bytecheckpoint.distributed.liveness.host_links import Address, listen
from bytecheckpoint.errors import CheckpointError

_HELLO = struct.Struct("<16sIQ")
"""The first half of the reader rank's token, the rank of the peer within the group, the length of its request. The
reader rank answers with the other half."""
_MAX_REQUEST_BYTES = 1 << 32
_HELLO_S = 10.0
"""Limit for all of a hello, and for reaching a host."""
MAX_UNAUTHENTICATED = 128
"""Connections whose hello has not come. Of more the oldest are closed."""
_POLL_S = 0.1


Admit = Callable[[Connection, bytes], Callable[[], None]]
"""Called with a connection and the request of the peer; returns what the thread of that connection does next."""


class Listener:
    """The socket to which peers connect. Each connection takes a thread."""

    def __init__(self, *, towards: str | None) -> None:
        """`towards` is a host that all ranks reach: `address` has this host's addresses on the network that leads
        there, then its name. With None it has only the name, then 127.0.0.1. The socket listens on all networks.
        """
        self._socket, self.address = listen(towards, token_bytes=32)
        self._socket.settimeout(_POLL_S)  # not every system wakes a thread that accepts when the socket is shut down
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, float] = {}
        """Connections in the order in which they came, until their request is here, with the time on the monotonic
        clock by which they must be authenticated; infinity once they are."""

    def accept(
        self,
        peers: Mapping[int, int],
        admit: Admit,
        start: Callable[..., object],
        *,
        timeout_s: float,
        is_over: threading.Event,
    ) -> None:
        """Waits until all peers are connected and admitted; can be called once. `peers` maps their ranks within the
        group to their global ranks. `admit` is called by one thread at a time. `start` starts threads: it must be able
        to start one for each peer and `2 * MAX_UNAUTHENTICATED` more, or a peer that waits for a thread could be closed
        as unauthenticated.

        Raises CheckpointError (rank_missing) if some have not come in time, PeerLeftError if some have not come GRACE_S
        after `is_over` is set (those that come before are admitted, and can be sent DISCONNECT), or OSError.
        """
        awaited, deadline = dict(peers), time.monotonic() + timeout_s
        try:
            while awaited:
                if is_over.is_set():
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if time.monotonic() > deadline:
                    error = missing_error(
                        tuple(awaited.values()), f"did not connect to this one within {timeout_s:g} s"
                    )
                    raise PeerLeftError if is_over.is_set() else error
                with suppress(TimeoutError, ConnectionAbortedError):
                    connected, _ = self._socket.accept()
                    self._pending[connected] = time.monotonic() + _HELLO_S
                    start(self._serve, connected, awaited, admit, timeout_s)
                unauthenticated = [item for item in list(self._pending.items()) if item[1] < math.inf]
                overdue = [item for item in unauthenticated if item[1] < time.monotonic()]
                for each, _ in (*overdue, *unauthenticated[:-MAX_UNAUTHENTICATED]):
                    interrupt(each)
        except OSError:  # the socket was shut down for the last peer, or there can be no more descriptors
            if awaited:
                raise
        finally:
            for waiting in (self._socket, *self._pending):
                interrupt(waiting)

    def close(self) -> None:
        """Closes the socket, and the connections that no thread came to serve. Call it when all threads that
        `accept` started have ended.
        """
        for connected in (self._socket, *self._pending):
            connected.close()

    def _serve(self, connected: socket.socket, awaited: dict[int, int], admit: Admit, timeout_s: float) -> None:
        """Admits the connection of an awaited peer, then runs what `admit` returned; closes any other connection."""
        rank, request = -1, memoryview(b"")
        connected.settimeout(timeout_s)
        with suppress(OSError):
            shown, said_rank, num_bytes = _HELLO.unpack(fill(bytearray(_HELLO.size), connected))
            if hmac.compare_digest(shown, self.address.token[:16]) and num_bytes <= _MAX_REQUEST_BYTES:
                self._pending[connected] = math.inf
                connected.sendall(self.address.token[16:])
                request = fill(bytearray(num_bytes), connected)
                rank = said_rank
        del self._pending[connected]  # once the last peer is admitted, all that is pending is interrupted
        with self._lock:
            if rank not in awaited:
                connected.close()
                return
            connection = Connection(connected, awaited[rank], taking_timeout(timeout_s))
            serve_peer = admit(connection, bytes(request))
            del awaited[rank]
            if not awaited:
                interrupt(self._socket)
        serve_peer()


def taking_timeout(timeout_s: float) -> float:
    """Returns the time for which a sender waits for a peer that takes nothing. It is longer than `timeout_s`, the time
    that the peer waits for others: a peer that is held up by another rank reports that one first.
    """
    return timeout_s + min(timeout_s, MAX_GRACE_S)


def connect(
    reader: int,
    address: Address,
    own_rank: int,
    request: bytes,
    *,
    timeout_s: float,
    on_open: Callable[[Connection], None],
    is_over: threading.Event,
) -> Connection:
    """Returns a connection to the reader rank with this global rank, over which `request` has been sent. `own_rank` is
    within the group. `on_open` is called with each connection before it is tried: to end the wait, another thread sets
    `is_over` and disconnects these connections.

    Raises CheckpointError (rank_missing) if the reader rank cannot be reached, and PeerLeftError if `is_over` is set.
    """
    hello = _HELLO.pack(address.token[:16], own_rank, len(request))
    reasons: list[str] = []
    for host, family, socket_address in _resolved(address, reasons):
        try:
            opened = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:  # of IPv6, where this host has none; else this rank is at fault
                raise
            reasons.append(f"{host}: {error}")
            continue
        connection = Connection(opened, reader, timeout_s)
        on_open(connection)
        if is_over.is_set():
            raise PeerLeftError
        try:
            opened.settimeout(min(timeout_s, _HELLO_S))
            opened.connect(socket_address)
            opened.sendall(hello)
            opened.settimeout(timeout_s)
            if not hmac.compare_digest(fill(bytearray(16), opened), address.token[16:]):
                raise ConnectionRefusedError("another process answers")
            opened.sendall(request)
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            reasons.append(f"{host}: {f'no answer within {opened.gettimeout():g} s' if is_late else error}")
            connection.close()
            if is_over.is_set():
                raise PeerLeftError from error
        else:
            connection.is_established = True
            return connection
    raise CheckpointError(
        f"rank {reader} cannot be reached on port {address.port} of {'; '.join(reasons)}. Ranks exchange "
        'what several of them want: open the network between them, or load with LoadOptions(exchange="off")',
        kind="rank_missing",
        ranks=(reader,),
    )


def _resolved(address: Address, reasons: list[str]) -> Iterator[tuple[str, int, Any]]:
    """Yields host, family and socket address of each host in turn; adds to `reasons` those that cannot be resolved."""
    for host in address.hosts:
        try:
            for family, _, _, _, socket_address in socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM):
                yield host, family, socket_address
        except (OSError, UnicodeError) as error:  # UnicodeError of a name that is too long
            reasons.append(f"{host}: {error}")
