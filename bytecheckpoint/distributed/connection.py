"""Connections between the ranks of one load, over which a reader passes bytes on to its takers. It knows who is at the
other end and when one of them is gone, and not what the bytes are.

Plain sockets instead of a process group: they need no device and no collective, fill memory in place, and tell at once
when the process at the other end has died.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError

_LEAVING, _HAS_ALL = b"\x00", b"\x01"
"""All that a taker ever says after it was let in."""


class PeerLeftError(Exception):
    """Another rank broke off. What has failed there, or elsewhere, is told to all by other means."""


class Peer(NamedTuple):
    """Who is at the other end, for errors."""

    rank: int
    """Within the group."""
    name: int
    """Its global rank."""


class Connection:
    """One end of the connection between a reader and a taker. Used by one thread at a time, but for the last three
    methods.
    """

    def __init__(self, connected: socket.socket, peer: Peer, timeout_s: float) -> None:
        """`timeout_s` is how long the other end may move no byte."""
        self.peer = peer
        self._timeout_s = timeout_s
        self._socket = connected
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content: memoryview | bytes) -> None:
        """Sends all of it. Raises PeerLeftError where the taker broke off, and CheckpointError (rank_missing) where it
        is stuck or gone.
        """
        left = memoryview(content)
        try:
            while left:
                left = left[self._socket.send(left) :]
        except TimeoutError:
            raise missing((self.peer.name,), f"took nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise self._loss(str(error)) from error

    def look_after_taker(self) -> None:
        """Raises as `send` does where the taker, who has nothing to say, has left or is gone."""
        if self._has_news():
            raise self._loss("the connection was closed")

    def await_receipt(self) -> None:
        """Returns when the taker has all that was sent, or is slow to say so. Raises where it has left or is gone.

        One that is stuck misses the end of the load. Others notice, and must not miss this rank as well.
        """
        try:
            self._socket.settimeout(self._timeout_s / 4)
            said = self._socket.recv(1)
        except TimeoutError:
            return
        except OSError as error:
            raise self._loss(str(error)) from error
        if said == _LEAVING:
            raise PeerLeftError
        if said != _HAS_ALL:
            raise self._loss("the connection was closed")

    def confirm(self) -> None:
        """Tells the reader that all has arrived."""
        with suppress(OSError):  # where it is gone already, others are told why
            self._socket.send(_HAS_ALL)

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
            raise missing((self.peer.name,), f"passed nothing on for {self._timeout_s:g} s") from None
        except OSError as error:
            raise missing((self.peer.name,), f"was to pass on what it reads, and is gone ({error})") from error

    def receive(self, num_bytes: int) -> bytes:
        """So many bytes."""
        content = bytearray(num_bytes)
        self.receive_into(memoryview(content))
        return bytes(content)

    def leave(self) -> None:
        """Tells the reader that this one breaks off, and interrupts."""
        with suppress(OSError):
            self._socket.send(_LEAVING)
        self.interrupt()

    def interrupt(self) -> None:
        """Whoever waits for the other end, here or there, waits no longer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; what was sent before still arrives."""
        self._socket.close()

    def _has_news(self) -> bool:
        """Whether the other end has said something, or has closed the connection."""
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        return bool(ready.poll(0))

    def _loss(self, reason: str) -> PeerLeftError | CheckpointError:
        """Of a taker to whom nothing more can be sent."""
        with suppress(OSError):
            if self._has_news() and self._socket.recv(1) == _LEAVING:
                return PeerLeftError()
        return missing((self.peer.name,), f"was to take what this one reads, and is gone ({reason})")


def shown_ranks(names: Sequence[int]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {list(names)}"


def missing(names: tuple[int, ...], what: str) -> CheckpointError:
    """That these (global) ranks are not there."""
    return CheckpointError(
        f"{shown_ranks(names)} {what}: dead or stuck. Look at its log; raise options.timeout_s if it is only slow",
        kind="rank_missing",
        ranks=names,
    )
