"""Connections between the ranks of one load, over which a reader passes bytes on to its takers. It knows who is at the
other end and when one of them is gone, and not what the bytes are.

Plain sockets instead of a process group: they need no device and no collective, fill memory in place, and tell at once
when the process at the other end has died.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from bytecheckpoint.errors import CheckpointError

_HELLO = struct.Struct("<16sIQ")
"""The reader's token, the taker's rank, the length of what it asks for."""
_MAX_REQUEST_BYTES = 1 << 32
_HELLO_S = 10.0
"""How long one that has connected may take to say who it is."""
_ACCEPT_POLL_S = 0.1


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank listens."""

    hosts: Sequence[str]
    """Names or numbers, the likeliest first: which of them another host can reach is not known here."""
    port: int
    token: bytes
    """16 bytes that a taker shows, and 16 that the reader answers with: nobody else knows them."""


class PeerLeftError(Exception):
    """Another rank broke off. What has failed there, or elsewhere, is told to all by other means."""


class Peer(NamedTuple):
    """Who is at the other end, for errors."""

    rank: int
    """Within the group."""
    name: int
    """Its global rank."""


class Listener:
    """Takes the connections of the ranks to which this one passes something on."""

    def __init__(self, *, towards: str | None) -> None:
        """`towards` is a host that all ranks reach, whose direction tells which of this host's addresses to use."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=256, dualstack_ipv6=dual)
        self._socket.settimeout(_ACCEPT_POLL_S)
        token = secrets.token_bytes(32)
        self.address = Address(_own_hosts(towards), self._socket.getsockname()[1], token)

    def accept(self, takers: Sequence[Peer], timeout_s: float) -> Iterator[tuple[Connection | None, bytes]]:
        """The connection of each of these ranks, in the order in which they come, with what it asks for.

        In between it gives (None, b""), so that the caller can look whether anybody is still wanted.
        Raises CheckpointError (rank_missing) when some have not come in time.
        """
        missing = {peer.rank: peer for peer in takers}
        deadline = time.monotonic() + timeout_s
        while missing:
            if time.monotonic() > deadline:
                names = tuple(peer.name for peer in missing.values())
                raise _missing(names, f"did not connect to this one within {timeout_s:g} s")
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError:
                yield None, b""
                continue
            found = _greeted(accepted, self.address.token, missing, timeout_s)
            if found is not None:
                yield found

    def close(self) -> None:
        """Later connections are refused."""
        self._socket.close()


def _greeted(
    accepted: socket.socket, token: bytes, missing: dict[int, Peer], timeout_s: float
) -> tuple[Connection, bytes] | None:
    """None for somebody who is not one of the ranks."""
    try:
        accepted.settimeout(_HELLO_S)
        shown, rank, num_bytes = _HELLO.unpack(_receive(accepted, _HELLO.size))
        if not hmac.compare_digest(shown, token[:16]) or rank not in missing or num_bytes > _MAX_REQUEST_BYTES:
            accepted.close()
            return None
        accepted.sendall(token[16:])
        request = _receive(accepted, num_bytes)
    except OSError:
        accepted.close()
        return None
    return Connection(accepted, missing.pop(rank), timeout_s), request


def connect(reader: Peer, address: Address, own_rank: int, request: bytes, timeout_s: float) -> Connection:
    """A connection to a rank that listens there, which has been told what this one wants.

    Raises CheckpointError (rank_missing) where it cannot be reached.
    """
    reasons = []
    for host in address.hosts:
        try:
            connected = socket.create_connection((host, address.port), timeout=min(timeout_s, _HELLO_S))
        except (OSError, UnicodeError) as error:  # UnicodeError of a name that is too long
            reasons.append(f"{host}: {error}")
            continue
        try:
            connected.settimeout(timeout_s)
            connected.sendall(_HELLO.pack(address.token[:16], own_rank, len(request)))
            if hmac.compare_digest(_receive(connected, 16), address.token[16:]):
                connected.sendall(request)
                return Connection(connected, reader, timeout_s)
            reasons.append(f"{host}: somebody else answers")
        except OSError as error:
            reasons.append(f"{host}: {error}")
        connected.close()
    raise CheckpointError(
        f"rank {reader.name} cannot be reached on port {address.port} of {'; '.join(reasons)}. Ranks exchange what "
        'several of them want: open the network between them, or load with LoadOptions(exchange="off")',
        kind="rank_missing",
        ranks=(reader.name,),
    )


class Connection:
    """One end of the connection between a reader and a taker. Used by one thread at a time."""

    def __init__(self, connected: socket.socket, peer: Peer, timeout_s: float) -> None:
        self.peer = peer
        self._timeout_s = timeout_s
        self._socket = connected
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content: memoryview | bytes) -> None:
        """Sends all of it. Raises PeerLeftError, or CheckpointError (rank_missing) when the other end is stuck."""
        left = memoryview(content)
        try:
            while left:
                left = left[self._socket.send(left) :]
        except TimeoutError:
            raise _missing((self.peer.name,), f"took nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise PeerLeftError from error

    def receive_into(self, buffer: memoryview) -> None:
        """Fills the buffer. Raises CheckpointError (rank_missing) when the other end is stuck or dead."""
        left = buffer
        try:
            while left:
                count = self._socket.recv_into(left)
                if not count:
                    raise ConnectionResetError("the connection was closed")
                left = left[count:]
        except TimeoutError:
            raise _missing((self.peer.name,), f"passed nothing on for {self._timeout_s:g} s") from None
        except OSError as error:
            raise _missing((self.peer.name,), f"was to pass on what it reads, and is gone ({error})") from error

    def receive(self, num_bytes: int) -> bytes:
        """So many bytes."""
        content = bytearray(num_bytes)
        self.receive_into(memoryview(content))
        return bytes(content)

    def interrupt(self) -> None:
        """Whoever waits for the other end, here or there, waits no longer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; what was sent before still arrives."""
        self._socket.close()


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    left = memoryview(content)
    while left:
        count = connected.recv_into(left)
        if not count:
            raise ConnectionResetError("closed before it said who it is")
        left = left[count:]
    return bytes(content)


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


def _missing(names: tuple[int, ...], what: str) -> CheckpointError:
    who = f"rank {names[0]}" if len(names) == 1 else f"ranks {list(names)}"
    return CheckpointError(
        f"{who} {what}: dead or stuck. Look at its log; raise options.timeout_s if it is only slow",
        kind="rank_missing",
        ranks=names,
    )
