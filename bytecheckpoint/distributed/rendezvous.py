"""Finds and authenticates the connections between reader ranks and their peers. No wait is for one peer alone:
unauthenticated connections that send nothing delay no other, and all waits end once the load has failed.
"""

from __future__ import annotations

import errno
import hmac
import os
import queue
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from bytecheckpoint.distributed.connection import Connection, PeerLeftError, missing, start_thread
from bytecheckpoint.errors import CheckpointError

_HELLO = struct.Struct("<16sIQ")
"""The first half of the reader rank's token, the rank of the peer within the group, the length of its request."""
_MAX_REQUEST_BYTES = 1 << 32
_HELLO_S = 10.0
"""Limit for all of a hello, and for reaching a host."""
_MAX_UNAUTHENTICATED = 128
"""Connections whose hello has not come. Of more the oldest are closed."""
_POLL_S = 0.1


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address on which a rank listens."""

    hosts: Sequence[str]
    """Names or numbers, the likeliest first: this rank cannot know which of them another host can reach."""
    port: int
    token: bytes
    """32 bytes that only the ranks know: a peer shows the first half, and the reader rank answers with the other."""


class Listener:
    """The socket to which peers connect. While it accepts, one thread waits for connections, and one for each of them
    until it is authenticated and its request is here.
    """

    def __init__(self, *, towards: str | None) -> None:
        """`towards` is a host that all ranks reach: the network that leads there is the one to listen on."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=256, dualstack_ipv6=dual)
        self._socket.settimeout(_POLL_S)  # not every system wakes a thread that accepts when the socket is shut down
        self.address = Address(_own_hosts(towards), self._socket.getsockname()[1], secrets.token_bytes(32))
        self._is_accepting = True
        self._pending: dict[socket.socket, bool] = {}
        """Connections in the order in which they came; True once authenticated."""
        self._arrived: queue.SimpleQueue[tuple[socket.socket, int, bytes] | Exception] = queue.SimpleQueue()

    def accept(
        self, peers: Mapping[int, int], timeout_s: float, *, io_timeout_s: float, is_wanted: Callable[[], bool]
    ) -> Generator[tuple[Connection, bytes], None, None]:
        """Yields the connection of each peer with its request, in the order in which they come. `peers` has their ranks
        within the group and their global ranks. A connection may stall for `io_timeout_s`.

        Raises CheckpointError (rank_missing) if some have not come in time, and PeerLeftError soon after `is_wanted`
        returns False.
        """
        awaited = dict(peers)
        if not awaited:
            return
        deadline = time.monotonic() + timeout_s
        # Enough for all: a peer that waited for a thread while others send long requests could be taken for a stranger.
        pool = ThreadPoolExecutor(len(peers) + 2 * _MAX_UNAUTHENTICATED, thread_name_prefix="bcp-rendezvous")
        accepting = start_thread(pool, self._accept_all, pool, timeout_s)
        try:
            while awaited:
                if not is_wanted():
                    raise PeerLeftError
                if time.monotonic() > deadline:
                    raise missing(tuple(awaited.values()), f"did not connect to this one within {timeout_s:g} s")
                arrived = self._next()
                if arrived is not None and arrived[1] in awaited:
                    yield Connection(arrived[0], awaited.pop(arrived[1]), io_timeout_s), arrived[2]
                elif arrived is not None:
                    arrived[0].close()
        finally:
            self._is_accepting = False
            _interrupt(self._socket)
            wait([accepting])
            for connected in list(self._pending):
                _interrupt(connected)
            pool.shutdown()

    def close(self) -> None:
        """Refuses later connections, and closes those that `accept` has not returned."""
        self._socket.close()
        while not self._arrived.empty():
            arrived = self._arrived.get()
            if not isinstance(arrived, Exception):
                arrived[0].close()

    def _next(self) -> tuple[socket.socket, int, bytes] | None:
        """Returns an authenticated connection, its rank and its request; None if none comes for a moment."""
        with suppress(queue.Empty):
            arrived = self._arrived.get(timeout=_POLL_S)
            if isinstance(arrived, Exception):
                raise arrived
            return arrived
        return None

    def _accept_all(self, pool: ThreadPoolExecutor, timeout_s: float) -> None:
        while self._is_accepting:
            try:
                connected, _ = self._socket.accept()
                self._pending[connected] = False
                start_thread(pool, self._authenticate, connected, timeout_s)
            except (TimeoutError, ConnectionAbortedError):
                continue
            except (OSError, CheckpointError) as error:  # closed, or no more descriptors or threads
                self._arrived.put(error)
                return
            unauthenticated = [each for each, is_known in list(self._pending.items()) if not is_known]
            for oldest in unauthenticated[:-_MAX_UNAUTHENTICATED]:
                _interrupt(oldest)

    def _authenticate(self, connected: socket.socket, timeout_s: float) -> None:
        try:
            shown, rank, num_bytes = _HELLO.unpack(_receive(connected, _HELLO.size, _HELLO_S))
            if not hmac.compare_digest(shown, self.address.token[:16]) or num_bytes > _MAX_REQUEST_BYTES:
                raise ConnectionRefusedError
            self._pending[connected] = True
            connected.sendall(self.address.token[16:])
            request = _receive(connected, num_bytes, timeout_s)
        except OSError:
            del self._pending[connected]
            connected.close()
        else:
            # In this order: once the last peer has arrived, all that is still pending is interrupted.
            del self._pending[connected]
            self._arrived.put((connected, rank, request))


def _receive(connected: socket.socket, num_bytes: int, limit_s: float) -> bytes:
    """Receives so many bytes within the limit, however often a few of them come. Raises OSError."""
    content = bytearray(num_bytes)
    left, deadline = memoryview(content), time.monotonic() + limit_s
    while left:
        connected.settimeout(max(deadline - time.monotonic(), 0.001))
        count = connected.recv_into(left)
        if not count:
            raise ConnectionResetError
        left = left[count:]
    return bytes(content)


def _interrupt(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def connect(
    reader: int, address: Address, own_rank: int, request: bytes, *, timeout_s: float, is_wanted: Callable[[], bool]
) -> Connection:
    """Returns a connection to the reader rank with this global rank, which has the request then.

    Raises CheckpointError (rank_missing) if it cannot be reached, and PeerLeftError soon after `is_wanted` returns
    False.
    """
    hello = _HELLO.pack(address.token[:16], own_rank, len(request))
    reasons: list[str] = []
    for host, family, place in _places(address, reasons):
        try:
            opened = _open(family, place, [hello, address.token[16:], request], timeout_s, is_wanted)
        except OSError as error:
            reasons.append(f"{host}: {error}")
        else:
            return Connection(opened, reader, timeout_s)
    raise CheckpointError(
        f"rank {reader} cannot be reached on port {address.port} of {'; '.join(reasons)}. Ranks exchange "
        'what several of them want: open the network between them, or load with LoadOptions(exchange="off")',
        kind="rank_missing",
        ranks=(reader,),
    )


def _places(address: Address, reasons: list[str]) -> Iterator[tuple[str, int, Any]]:
    """Resolves the hosts, one after the other; adds an error to `reasons` for each host that cannot be resolved."""
    for host in address.hosts:
        try:
            for family, _, _, _, place in socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM):
                yield host, family, place
        except (OSError, UnicodeError) as error:  # UnicodeError of a name that is too long
            reasons.append(f"{host}: {error}")


def _open(
    family: int, place: Any, messages: Sequence[bytes], limit_s: float, is_wanted: Callable[[], bool]
) -> socket.socket:
    """Sends the hello, and once the listener has sent the expected answer, the request. Raises OSError."""
    hello, expected, request = messages
    with ExitStack() as undo:
        opened = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        opened.setblocking(False)
        code = opened.connect_ex(place)
        if code == errno.EINPROGRESS:
            _await(opened, select.POLLOUT, min(limit_s, _HELLO_S), is_wanted)
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        opened.send(hello)  # the first bytes: there is room for them
        answer = b""
        while len(answer) < len(expected):
            _await(opened, select.POLLIN, limit_s, is_wanted)
            part = opened.recv(len(expected) - len(answer))
            if not part:
                raise ConnectionResetError("the connection was closed")
            answer += part
        if not hmac.compare_digest(answer, expected):
            raise ConnectionRefusedError("another process answers")
        left = memoryview(request)
        while left:
            _await(opened, select.POLLOUT, limit_s, is_wanted)
            left = left[opened.send(left) :]
        undo.pop_all()
    return opened


def _await(connected: socket.socket, event: int, limit_s: float, is_wanted: Callable[[], bool]) -> None:
    """Raises TimeoutError, or PeerLeftError soon after `is_wanted` returns False."""
    ready = select.poll()
    ready.register(connected, event)
    deadline = time.monotonic() + limit_s
    while not ready.poll(_POLL_S * 1000):
        if not is_wanted():
            raise PeerLeftError
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {limit_s:g} s")


def _own_hosts(towards: str | None) -> list[str]:
    """Returns this host's addresses on the networks that lead there, and its name."""
    if towards is None:
        return [socket.gethostname(), "127.0.0.1"]
    hosts = []
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing: it only chooses the network
                hosts.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*hosts, socket.gethostname()]))
