"""The connection between a reader rank and a peer that it passes bytes on to: one authenticated socket, the units that
are sent through it, and the heartbeats in between. It knows which rank is lost, and not what the bytes are.

Plain sockets instead of a process group: they need no device and no collective, fill memory in place, and report at
once that the process at the other end has died.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

from bytecheckpoint.distributed.failures import shown_ranks
from bytecheckpoint.distributed.wire import DISCONNECT, HEADER, HEARTBEAT, OutgoingUnit, WireHeader
from bytecheckpoint.errors import CheckpointError

GRACE_S = 1.0
"""Time that a rank whose load has failed leaves to DISCONNECT messages, its own and those of other ranks."""
_LEAVING, _ACK = b"\x00", b"\x01"
"""All that a peer sends after its request."""
_CHECK_S = 0.1
"""Time between two checks of a peer to which there is nothing to send."""


class PeerLeftError(Exception):
    """Another rank has ended the exchange, or this one has. The ranks learn why through the coordinator."""


class Activity:
    """Progress of this rank, which heartbeats report: something was read, or this rank waits for another one. That wait
    has a limit of its own, after which the rank that is stuck is named.
    """

    def __init__(self) -> None:
        self._stepped_at = 0.0
        self._waits: list[None] = []
        """An item for each wait: items are added and removed without a lock."""

    def step(self) -> None:
        self._stepped_at = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block this rank waits for another one."""
        self._waits.append(None)
        try:
            yield
        finally:
            self._waits.pop()
            self.step()

    def is_active_since(self, since: float) -> bool:
        """Returns True if this rank waits, or has made progress after this time of the monotonic clock."""
        return bool(self._waits) or self._stepped_at > since


class Connection:
    """One end of a connection. Used by one thread at a time, except for `disconnect`, `interrupt` and `close`."""

    def __init__(self, connected: socket.socket, global_rank: int, timeout_s: float) -> None:
        """`global_rank` is that of the other end, which may stall for `timeout_s`."""
        self.global_rank = global_rank
        self.timeout_s = timeout_s
        self.is_established = False
        """True once this end has sent its request; stays False at the end of the reader rank."""
        self.units: queue.SimpleQueue[OutgoingUnit] = queue.SimpleQueue()
        """Units for `send_units`. Any thread may put some in."""
        self._sent_at = time.monotonic()
        """Time of the last message on the monotonic clock: the other end knows of progress until then."""
        self._socket = connected
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, content: memoryview | bytes) -> None:
        """Sends all. Raises PeerLeftError if the peer has left, CheckpointError (rank_missing) if stuck or gone."""
        left = memoryview(content)
        try:
            while left:
                left = left[self._socket.send(left) :]
        except TimeoutError:
            raise missing_error((self.global_rank,), f"took nothing for {self.timeout_s:g} s") from None
        except OSError as error:
            self.check_peer()  # it may have disconnected before
            raise self._gone(error) from error

    def send_units(self, num_units: int, activity: Activity, is_over: threading.Event, *, heartbeat_s: float) -> None:
        """Sends the next `num_units` of `units` as they come, then waits up to a quarter of the timeout for the peer to
        acknowledge them; returns also if it does not. If `is_over` is set before that wait, sends DISCONNECT instead.
        When nothing was sent for `heartbeat_s`, but `activity` shows progress, a heartbeat is sent.

        Raises as `send` does.
        """
        while num_units and not is_over.is_set():
            try:
                unit = self.units.get(timeout=_CHECK_S)
            except queue.Empty:
                self.check_peer()
                now = time.monotonic()
                if now - self._sent_at >= heartbeat_s and activity.is_active_since(self._sent_at):
                    self._sent_at = now
                    self.send(HEARTBEAT)
                continue
            with activity.waiting():
                for buffer in unit.buffers:
                    self.send(buffer)
            self._sent_at = time.monotonic()
            unit.sent()
            num_units -= 1
        if is_over.is_set():
            self.send(DISCONNECT)
        else:
            # A peer that is stuck misses the end of the load. Others report that, and must not miss this rank too.
            with activity.waiting():
                self.check_peer(self.timeout_s / 4)

    def check_peer(self, wait_s: float = 0.0) -> None:
        """Returns once the peer has acknowledged all, or after `wait_s` without answer. Raises the errors of `send`."""
        if not wait([self._socket], wait_s):
            return
        try:
            answer = self._socket.recv(1)
        except OSError as error:
            raise self._gone(error) from error
        if answer == _LEAVING:
            raise PeerLeftError
        if answer != _ACK:
            raise self._gone("the connection was closed")

    def send_ack(self) -> None:
        """Tells the peer that everything has arrived."""
        with suppress(OSError):  # if it is gone already, others learn why
            self._socket.send(_ACK)

    def receive_into(self, buffer: memoryview) -> None:
        """Fills the buffer. Raises CheckpointError (rank_missing) if the peer is stuck or gone."""
        try:
            fill(buffer, self._socket)
        except TimeoutError:
            raise missing_error((self.global_rank,), f"passed nothing on for {self.timeout_s:g} s") from None
        except OSError as error:
            raise missing_error((self.global_rank,), f"was to pass on what it reads, and is gone ({error})") from error

    def receive_header(self, on_heartbeat: Callable[[], object] = lambda: None) -> WireHeader:
        """Returns the next header, past heartbeats. Raises PeerLeftError at DISCONNECT, or as `receive_into` does."""
        content = bytearray(HEARTBEAT)
        while content == HEARTBEAT:
            on_heartbeat()
            self.receive_into(memoryview(content))
        if content == DISCONNECT:
            raise PeerLeftError
        return WireHeader(*HEADER.unpack(content))

    def disconnect(self) -> None:
        """Ends all waits, as `interrupt` does. An end that has sent its request first tells the reader rank that it
        leaves.
        """
        with suppress(OSError):
            if self.is_established:  # else the message would wait, or be taken for a part of the request
                self._socket.send(_LEAVING)
        self.interrupt()

    def interrupt(self) -> None:
        """Ends all waits for this connection, at both ends."""
        interrupt(self._socket)

    def close(self) -> None:
        """Ends the connection; what was sent before still arrives."""
        self._socket.close()

    def _gone(self, reason: object) -> CheckpointError:
        return missing_error((self.global_rank,), f"was to take what this one reads, and is gone ({reason})")


def interrupt(waiting: socket.socket) -> None:
    """Ends all waits of other threads on this socket, also one in `accept`."""
    with suppress(OSError):
        waiting.shutdown(socket.SHUT_RDWR)


def fill(buffer: memoryview | bytearray, connected: socket.socket) -> memoryview:
    """Receives until the buffer is full; returns it as a memoryview. Raises OSError: TimeoutError if nothing comes
    within the timeout of the socket, ConnectionResetError if the other end closes the connection before.
    """
    filled = left = memoryview(buffer)
    while left:
        count = connected.recv_into(left)
        if not count:
            raise ConnectionResetError("the connection was closed")
        left = left[count:]
    return filled


def missing_error(global_ranks: tuple[int, ...], what: str) -> CheckpointError:
    """Returns the error about ranks that are lost; `what` follows their names, as in "took nothing for 5 s"."""
    return CheckpointError(
        f"{shown_ranks(global_ranks)} {what}: dead or stuck. Look at its log; raise options.timeout_s if it is only "
        "slow",
        kind="rank_missing",
        ranks=global_ranks,
    )
