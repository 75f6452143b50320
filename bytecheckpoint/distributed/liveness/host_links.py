"""Idle connections between ranks on different hosts. Each shows that the process at its other end is there: the kernel
closes the connection when that process ends, and answers keepalives while the process is stopped. Only a hello is sent,
and a byte by a process that closes the link and goes on.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from bytecheckpoint.runtime.threads import shared_threads

_HELLO = struct.Struct("<16sI")
"""The token of the rank that listens, and the rank that connects."""
_CLOSED = b"\0"
"""Sent by a process that closes a link and goes on. If it still listens, it did not know whose link that was."""
_CONNECT_S = 2.0
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 4, 2, 3
"""A host that does not answer is known after 10 s."""
_UNREACHABLE_S = _KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_PROBES
_BACKLOG = 256
MAX_SILENT = 256
"""Accepted links whose hello has not arrived. Of more the oldest are closed: anybody may connect, and send nothing."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address on which a rank listens."""

    hosts: Sequence[str]
    """Host names or IP addresses, the likeliest first: this rank cannot know which of them another host can reach."""
    port: int
    token: bytes
    """Random bytes that only the ranks know: a rank that connects shows some of them."""


def listen(towards: str | None, *, token_bytes: int) -> tuple[socket.socket, Address]:
    """Returns a socket that listens on all networks, and its address, with the hosts of `own_hosts`."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listening = socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    return listening, Address(own_hosts(towards), listening.getsockname()[1], secrets.token_bytes(token_bytes))


class HostLinks:
    """The links of one rank to ranks on other hosts. One thread at a time uses them; connecting runs on another."""

    def __init__(self, rank: int, towards: str | None) -> None:
        """`towards` is a host that all ranks reach; None if no such host is known."""
        self._rank, self._towards = rank, towards
        self.address: Address | None = None
        self._listening: socket.socket | None = None
        self._open: dict[int, socket.socket] = {}
        self._new: list[socket.socket] = []
        """Accepted links whose hello has not arrived yet."""
        self._connecting: set[int] = set()
        """Ranks to which a link is being opened. Only one at a time: the other end would drop the first for a second
        one."""
        self._targets: dict[int, tuple[Any, bytes]] = {}
        """By rank: the place to which this rank has opened a link, and its token."""
        self._ended: set[int] = set()
        self._unreachable: dict[int, float] = {}
        """By rank: the time on the monotonic clock at which it became unreachable."""

    def listen(self) -> Address:
        self._listening, self.address = listen(self._towards, token_bytes=16)
        self._listening.setblocking(False)
        return self.address

    def needs(self, rank: int) -> bool:
        """Returns True if no link to this rank is open or being opened, and its process is not known to have ended."""
        return not any(rank in known for known in (self._open, self._ended, self._connecting))

    def connect(self, rank: int, address: Address) -> None:
        """Opens a link on a thread. Raises nothing: without it, that rank's end is noticed at a call's time limit."""
        self._begin(rank, lambda: self._connect(rank, address))

    def _begin(self, rank: int, connect: Callable[[], None]) -> None:
        """Calls `connect` on a thread, unless a link to this rank is being opened or there can be no more threads."""
        if rank in self._connecting:
            return
        self._connecting.add(rank)

        def run() -> None:
            try:
                connect()
            finally:
                self._connecting.discard(rank)

        try:
            shared_threads().begin("bcp-links", run)
        except RuntimeError:  # there can be no more threads
            self._connecting.discard(rank)

    def _connect(self, rank: int, address: Address) -> None:
        for host in address.hosts:
            with suppress(OSError, UnicodeError):  # the next one may be reached
                self._open_link(rank, (host, address.port), address.token)
                return

    def _connect_again(self, rank: int, *, was_reset: bool) -> None:
        """Opens a closed link again; of one that was reset finds out if the other end has ended or only gave it up."""
        try:
            self._open_link(rank, *self._targets[rank])
        except ConnectionRefusedError:  # by a host that is there
            if was_reset:
                self._ended.add(rank)
        except OSError:
            self._unreachable[rank] = time.monotonic()

    def _open_link(self, rank: int, place: Any, token: bytes) -> None:
        link = socket.create_connection(place, timeout=_CONNECT_S)
        link.sendall(_HELLO.pack(token, self._rank))
        self._targets[rank] = link.getpeername()[:2], token
        self._open[rank] = _with_keepalive(link)
        self._unreachable.pop(rank, None)

    def ended(self) -> set[int]:
        """Returns the ranks whose process has ended."""
        self._accept()
        by_descriptor = {link.fileno(): (rank, link) for rank, link in list(self._open.items())}
        by_descriptor.pop(-1, None)  # of a link that was closed meanwhile
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
            self._note(*by_descriptor[descriptor])
        return self._ended

    def unreachable(self) -> dict[int, float]:
        now = time.monotonic()
        return {rank: now - since + _UNREACHABLE_S for rank, since in self._unreachable.items()}

    def close(self) -> None:
        """Closes all links; their other ends learn that this process lives on."""
        self._accept()
        if self._listening is not None:  # first: an other end would open its link again
            self._listening.close()
        for link in [*self._new, *self._open.values()]:
            _leave(link)
        self.forget()

    def forget(self) -> None:
        """Closes all sockets without telling the other ends. In a forked child, a copy of a link would keep the link
        open after the end of the parent.
        """
        listening = [self._listening] if self._listening is not None else []
        for each in [*listening, *self._new, *self._open.values()]:
            each.close()
        self._listening, self._new = None, []
        self._open.clear()

    def _note(self, rank: int, link: socket.socket) -> None:
        """Closes a link that has become readable, and notes if the rank at its other end has ended or is unreachable.
        If the other end only closed the link, opens it again on a thread.
        """
        received, is_reset = None, False
        try:
            received = link.recv(1)
        except (BrokenPipeError, ConnectionResetError):
            is_reset = True
        except (TimeoutError, OSError):  # keepalives without an answer, or no route
            self._unreachable[rank] = time.monotonic()
        if self._open.get(rank) is link:
            del self._open[rank]
        link.close()
        if received == b"":
            self._ended.add(rank)
        elif (is_reset or received == _CLOSED) and rank in self._targets:
            self._begin(rank, lambda: self._connect_again(rank, was_reset=is_reset))
        elif is_reset:  # a process that ends resets only links with unread bytes: here the other end opens a new link
            self._unreachable[rank] = time.monotonic()

    def _accept(self) -> None:
        while self._listening is not None:
            try:
                self._new.append(_with_keepalive(self._listening.accept()[0]))
            except OSError:
                break
        for link in list(self._new):
            with suppress(BlockingIOError):
                self._admit(link)
        while len(self._new) > MAX_SILENT:
            _leave(self._new.pop(0))

    def _admit(self, link: socket.socket) -> None:
        """Accepts a link that shows the token, else closes it. Raises BlockingIOError if its hello is not there yet."""
        try:
            hello = link.recv(_HELLO.size)
        except BlockingIOError:
            raise
        except OSError:
            hello = b""
        self._new.remove(link)
        token, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
        if self.address is None or not hmac.compare_digest(token, self.address.token):
            link.close()
            return
        self._unreachable.pop(rank, None)
        self._open[rank] = link


def _leave(link: socket.socket) -> None:
    """Closes a link; its other end learns that this process goes on."""
    with suppress(OSError):
        link.sendall(_CLOSED)
    link.close()


def _with_keepalive(link: socket.socket) -> socket.socket:
    """Returns the same socket, with keepalive probes, and no longer blocking."""
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(AttributeError, OSError):  # not every system has these
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    return link


def own_hosts(towards: str | None) -> list[str]:
    """Returns this host's addresses on the networks that lead to the host `towards`, then this host's name. Without
    `towards`, returns this host's name, then 127.0.0.1.
    """
    if towards is None:
        return [socket.gethostname(), "127.0.0.1"]
    hosts = []
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing: it only chooses the network
                hosts.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*hosts, socket.gethostname()]))
