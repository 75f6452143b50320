"""How the takers of a load find their readers: who listens where, and who of those that come is let in. Neither side
waits for one other alone: strangers who say nothing delay nobody, and one that is not wanted any more stops waiting.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.distributed.connection import Connection, Peer, PeerLeftError, missing
from bytecheckpoint.errors import CheckpointError

_HELLO = struct.Struct("<16sIQ")
"""The reader's token, the taker's rank, the length of what it asks for."""
_MAX_REQUEST_BYTES = 1 << 32
_HELLO_S = 10.0
"""How long one that has connected may take to say who it is, and one that connects to reach a host."""
_MAX_STRANGERS = 128
"""Who have connected and not said who they are; of more, those that came first are turned away."""
_POLL_S = 0.1


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank listens."""

    hosts: Sequence[str]
    """Names or numbers, the likeliest first: which of them another host can reach is not known here."""
    port: int
    token: bytes
    """16 bytes that a taker shows, and 16 that the reader answers with: nobody else knows them."""


class Listener:
    """Takes the connections of the ranks to which this one passes something on."""

    def __init__(self, *, towards: str | None) -> None:
        """`towards` is a host that all ranks reach, whose direction tells which of this host's addresses to use."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=256, dualstack_ipv6=dual)
        self._socket.setblocking(False)
        token = secrets.token_bytes(32)
        self.address = Address(_own_hosts(towards), self._socket.getsockname()[1], token)

    def accept(
        self, takers: Sequence[Peer], timeout_s: float, *, patience_s: float
    ) -> Iterator[tuple[Connection | None, bytes]]:
        """The connection of each of these ranks, in the order in which they come, with what it asks for.

        In between it gives (None, b""), so that the caller can look whether anybody is still wanted. Connections wait
        `patience_s` for a taker to take something.
        Raises CheckpointError (rank_missing) when some have not come in time.
        """
        awaited = {peer.rank: peer for peer in takers}
        deadline = time.monotonic() + timeout_s
        hall = _Hall(self._socket, self.address.token)
        try:
            while awaited:
                if time.monotonic() > deadline:
                    names = tuple(peer.name for peer in awaited.values())
                    raise missing(names, f"did not connect to this one within {timeout_s:g} s")
                for connected, rank, request in hall.arrivals(awaited):
                    yield Connection(connected, awaited.pop(rank), patience_s), request
                yield None, b""
        finally:
            hall.close()

    def close(self) -> None:
        """Later connections are refused."""
        self._socket.close()


class _Guest:
    """Somebody who has connected and has not said all that a taker says."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.since = time.monotonic()
        self.rank: int | None = None
        """Known from one who has shown the token."""
        self._content = bytearray(_HELLO.size)
        self._num_bytes = 0

    def hear(self, token: bytes) -> bytes | None:
        """What it asks for, as soon as all of that has come. Raises OSError where it is no taker, or has left."""
        if not self._is_complete():
            return None
        if self.rank is not None:
            return bytes(self._content)
        shown, rank, num_bytes = _HELLO.unpack(self._content)
        if not hmac.compare_digest(shown, token[:16]) or num_bytes > _MAX_REQUEST_BYTES:
            raise ConnectionRefusedError
        self.socket.send(token[16:])  # nothing was sent before: there is room for it
        self.rank, self._content, self._num_bytes = rank, bytearray(num_bytes), 0
        return None if num_bytes else b""

    def _is_complete(self) -> bool:
        with suppress(BlockingIOError):
            while self._num_bytes < len(self._content):
                count = self.socket.recv_into(memoryview(self._content)[self._num_bytes :])
                if not count:
                    raise ConnectionResetError
                self._num_bytes += count
        return self._num_bytes == len(self._content)


class _Hall:
    """All who have connected and are not let in yet, each heard as soon as it says something."""

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        self._token = token
        self._listening = listening
        self._guests: dict[socket.socket, _Guest] = {}
        """Those who came first stand first."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def arrivals(self, awaited: Container[int]) -> Iterator[tuple[socket.socket, int, bytes]]:
        """Those of these ranks who have shown the token and said what they ask for. Waits a moment for them."""
        for key, _ in self._selector.select(_POLL_S):
            guest = self._guests.get(key.fileobj)  # type: ignore[call-overload]  # sockets only
            if guest is None:
                self._admit()
                continue
            try:
                request = guest.hear(self._token)
            except OSError:
                self._forget(guest).close()
                continue
            if request is None or guest.rank is None:
                continue
            connected = self._forget(guest)
            if guest.rank in awaited:
                yield connected, guest.rank, request
            else:
                connected.close()
        self._turn_away()

    def close(self) -> None:
        for guest in list(self._guests.values()):
            self._forget(guest).close()
        self._selector.close()

    def _admit(self) -> None:
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        self._guests[connected] = _Guest(connected)
        self._selector.register(connected, selectors.EVENT_READ)

    def _turn_away(self) -> None:
        """Strangers who have had their time, or are too many."""
        strangers = [guest for guest in self._guests.values() if guest.rank is None]
        latest = time.monotonic() - _HELLO_S
        for number, guest in enumerate(strangers, start=1):
            if guest.since < latest or number <= len(strangers) - _MAX_STRANGERS:
                self._forget(guest).close()

    def _forget(self, guest: _Guest) -> socket.socket:
        self._selector.unregister(guest.socket)
        return self._guests.pop(guest.socket).socket


class _Wait(NamedTuple):
    """How a taker waits for a reader to answer."""

    limit_s: float
    is_wanted: Callable[[], bool]

    def until(self, connected: socket.socket, event: int) -> None:
        """Raises TimeoutError, or PeerLeftError once nobody wants the connection any more."""
        ready = select.poll()
        ready.register(connected, event)
        deadline = time.monotonic() + self.limit_s
        while not ready.poll(_POLL_S * 1000):
            if not self.is_wanted():
                raise PeerLeftError
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {self.limit_s:g} s")


def connect(
    reader: Peer,
    address: Address,
    own_rank: int,
    request: bytes,
    *,
    timeout_s: float,
    is_wanted: Callable[[], bool],
) -> Connection:
    """A connection to a rank that listens there, which has been told what this one wants.

    Raises CheckpointError (rank_missing) where it cannot be reached, and PeerLeftError soon after `is_wanted` says no.
    """
    hello = _HELLO.pack(address.token[:16], own_rank, len(request))
    reasons = []
    for host in address.hosts:
        try:
            connected = _reached(host, address.port, _Wait(min(timeout_s, _HELLO_S), is_wanted))
            _introduce(connected, [hello, request], address.token[16:], _Wait(timeout_s, is_wanted))
            return Connection(connected, reader, timeout_s)
        except (OSError, UnicodeError) as error:  # UnicodeError of a name that is too long
            reasons.append(f"{host}: {error}")
    raise CheckpointError(
        f"rank {reader.name} cannot be reached on port {address.port} of {'; '.join(reasons)}. Ranks exchange what "
        'several of them want: open the network between them, or load with LoadOptions(exchange="off")',
        kind="rank_missing",
        ranks=(reader.name,),
    )


def _reached(host: str, port: int, wait: _Wait) -> socket.socket:
    """Somebody who listens there."""
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return _connected(socket.socket(family, kind, protocol), place, wait)
        except OSError as error:
            failure = error
    raise failure


def _connected(made: socket.socket, place: Any, wait: _Wait) -> socket.socket:
    with ExitStack() as undo:
        undo.callback(made.close)
        made.setblocking(False)
        code = made.connect_ex(place)
        if code == errno.EINPROGRESS:
            wait.until(made, select.POLLOUT)
            code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        undo.pop_all()
    return made


def _introduce(connected: socket.socket, messages: Sequence[bytes], expected: bytes, wait: _Wait) -> None:
    """Says the first of the messages, and the other once the one who listens there has shown to be the reader."""
    hello, request = messages
    with ExitStack() as undo:
        undo.callback(connected.close)
        _send(connected, hello, wait)
        answer = b""
        while len(answer) < len(expected):
            wait.until(connected, select.POLLIN)
            heard = connected.recv(len(expected) - len(answer))
            if not heard:
                raise ConnectionResetError("the connection was closed")
            answer += heard
        if not hmac.compare_digest(answer, expected):
            raise ConnectionRefusedError("somebody else answers")
        _send(connected, request, wait)
        undo.pop_all()


def _send(connected: socket.socket, content: bytes, wait: _Wait) -> None:
    left = memoryview(content)
    while left:
        wait.until(connected, select.POLLOUT)
        left = left[connected.send(left) :]


def _own_hosts(towards: str | None) -> list[str]:
    if towards is None:
        return [socket.gethostname(), "127.0.0.1"]
    hosts = []
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            hosts += _own_hosts_on_the_way(family, kind, address)
    return list(dict.fromkeys([*hosts, socket.gethostname()]))


def _own_hosts_on_the_way(family: socket.AddressFamily, kind: socket.SocketKind, address: Any) -> list[str]:
    """This host's address on the network that leads there, if any does."""
    with suppress(OSError), socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses the way
        return [str(probe.getsockname()[0])]
    return []
