"""Units that the ranks of one host take out of one another's memory. The host has a unit once, as it lies in its file,
in the memory of the rank that has read it or received it from another host; each rank copies from there what it wants.
Which units, and how they get there, is not known here.

No circle of ranks can wait for one another: a rank takes what is announced without the help of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from bytecheckpoint.distributed.connection import Activity, PeerLeftError, missing_error
from bytecheckpoint.distributed.rendezvous import taking_timeout
from bytecheckpoint.distributed.same_host.host_ranks import GONE, LEFT, HostRanks
from bytecheckpoint.distributed.same_host.shared_memory import Message
from bytecheckpoint.distributed.wire import UnitRequests, decode_request, encode_request
from bytecheckpoint.loading.receive import Receiver, pieces_of
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.planner.byte_ranges import ByteRange
from bytecheckpoint.runtime.buffers import ArenaPart

NUM_THREADS = 2
"""Threads of a rank that take units."""
_REQUEST, _READY, _TAKEN, _HEARTBEAT, _WAKE = range(GONE + 1, GONE + 6)
_CHECK_S = 0.1
"""Time between two looks at ranks of which nothing is heard."""
_FULL_S = 0.002
"""Time before a message is sent again to a rank that had no room for it."""

Unit = tuple[int, int]
"""File and byte offset."""


class HostExchange:
    """One rank's part in passing on units through the memory of its host. If the host has other ranks, `serve` has to
    run on NUM_THREADS threads.
    """

    def __init__(
        self,
        host_ranks: HostRanks,
        receiver: Receiver,
        activity: Activity,
        is_over: threading.Event,
        *,
        takers: Sequence[int],
        global_ranks: Sequence[int],
        timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        self._host_ranks = host_ranks
        self._receiver = receiver
        self._activity = activity
        self._is_over = is_over
        self._awaited: dict[int, dict[Unit, Fetch]] = {}
        self._num_left = 0
        self._takers = takers
        self._global_ranks = global_ranks
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self.requests: dict[Unit, dict[tuple[ByteRange, ...], list[int]]] = {}
        """Unit -> pieces of it that other ranks of the host want -> the ranks that want these pieces."""
        self._unasked = {*takers}
        self._has_requests = threading.Event()
        self._announced: dict[tuple[int, Unit], tuple[ArenaPart, float]] = {}
        """By taker and unit: the part that was announced and not taken yet, and the time of the announcement."""
        self._started_at = self._beat_at = time.monotonic()
        self._checked_at = self._started_at
        self._seen_at = dict.fromkeys(takers, self._started_at)
        self._may_end = False
        self._lock = threading.Lock()

    def ask(self, received: Mapping[int, Sequence[Fetch]]) -> None:
        """Asks the other ranks for the units to be `received` from each. Call it once, before `serve`."""
        for rank, units in received.items():
            self._awaited[rank] = {(fetch.file, fetch.byte_offset): fetch for fetch in units}
        self._num_left = sum(map(len, self._awaited.values()))
        self._seen_at.update(dict.fromkeys(received, time.monotonic()))
        for rank, fetches in self._awaited.items():
            message = encode_request({unit: pieces_of(fetch) for unit, fetch in fetches.items()})
            self._send(rank, _REQUEST, start=self._host_ranks.append(message), byte_length=len(message))
        if not self._unasked:
            self._has_requests.set()

    def wait_for_requests(self) -> None:
        """Waits until all takers have asked for their units. Raises PeerLeftError if the load has failed meanwhile."""
        with self._activity.waiting():
            self._has_requests.wait()
        if self._is_over.is_set():
            raise PeerLeftError

    def announce(self, unit: Unit, part: ArenaPart) -> None:
        """Tells every rank that has asked for this unit to take it from this part of the memory, which is held until
        each has done so. Waits while a rank has no room for the message.
        """
        now = time.monotonic()
        for rank in {rank for ranks in self.requests.get(unit, {}).values() for rank in ranks}:
            part.hold()
            self._announced[rank, unit] = part, now
            file, byte_offset = unit
            where = {"start": part.start, "byte_length": part.content.nbytes}
            self._send(rank, _READY, file=file, byte_offset=byte_offset, **where)

    def beat(self) -> None:
        """Tells takers that this rank makes progress, at most once in `heartbeat_s`. Does not block."""
        now = time.monotonic()
        if now - self._beat_at >= self._heartbeat_s:
            self._beat_at = now
            for rank in self._takers:
                self._host_ranks.send(rank, _HEARTBEAT)  # a taker without room for it has other messages to see

    def end_serving(self) -> None:
        """Lets `serve` end on all threads, as soon as this rank has taken what it wants. Call it only when this rank
        announces no more units: nothing frees their memory once `serve` has ended.
        """
        self._may_end = True
        self._wake()

    def stop(self) -> None:
        """Ends all waits, after the load has failed."""
        self._has_requests.set()
        self._wake()

    def serve(self) -> None:
        """Takes the units that are announced, and handles the other messages of the host's ranks. Returns once this
        rank has all its units and `end_serving` was called, or this rank's load has failed.

        Raises PeerLeftError if the load of another rank has failed, or this rank's while a message to another waits
        for room; CheckpointError (rank_missing) for a rank that is stuck or gone.
        """
        while (self._num_left or not self._may_end) and not self._is_over.is_set():
            message = self._host_ranks.receive(_CHECK_S)
            self._check_processes()
            if message is not None:
                self._handle(message)
            else:
                self._check_silence()
        self._wake()

    def _handle(self, message: Message) -> None:
        sender, unit = message.sender, (message.file, message.byte_offset)
        if sender in self._seen_at:
            self._seen_at[sender] = time.monotonic()
        if message.kind == LEFT:
            raise PeerLeftError
        if message.kind == GONE:
            raise missing_error((self._global_ranks[sender],), "has ended its load, and says nothing")
        if message.kind == _REQUEST:
            content = self._host_ranks.others[sender].read(message.start, message.byte_length)
            self._note_request(sender, decode_request(content, peer=self._global_ranks[sender]))
        elif message.kind == _READY:
            self._take(message, self._awaited[sender].pop(unit))
        elif message.kind == _TAKEN:
            self._announced.pop((sender, unit))[0].release()

    def _note_request(self, sender: int, request: UnitRequests) -> None:
        with self._lock:
            for unit, pieces in request.items():
                self.requests.setdefault(unit, {}).setdefault(pieces, []).append(sender)
            self._unasked.discard(sender)
            if not self._unasked:
                self._has_requests.set()

    def _take(self, message: Message, fetch: Fetch) -> None:
        content = self._host_ranks.others[message.sender].content[message.start :][: message.byte_length]
        self._receiver.place(fetch, content)
        self._send(message.sender, _TAKEN, file=message.file, byte_offset=message.byte_offset)
        with self._lock:
            self._num_left -= 1

    def _check_processes(self) -> None:
        """Raises CheckpointError (rank_missing) for a rank that is gone; sends takers a heartbeat if this one has made
        progress. Does both at most every `_CHECK_S`.
        """
        with self._lock:
            if time.monotonic() - self._checked_at < _CHECK_S:
                return
            self._checked_at = time.monotonic()
            ended = self._host_ranks.ended()
        if ended:
            raise self._lost(ended, "shared memory with this one, and its process has ended")
        if self._activity.is_active_since(self._beat_at):
            self.beat()

    def _check_silence(self) -> None:
        """Raises CheckpointError (rank_missing) for a rank that is silent too long. Call it when no message waits."""
        now, timeout_s = time.monotonic(), self._timeout_s
        take_timeout_s = taking_timeout(timeout_s)
        silent = [rank for rank, units in self._awaited.items() if units and now - self._seen_at[rank] > timeout_s]
        if silent:
            raise self._lost(silent, f"passed nothing on for {timeout_s:g} s")
        announced = [*self._announced.items()]  # a copy: other threads change them
        waits = [(rank, max(since, self._seen_at[rank])) for (rank, _), (_, since) in announced]
        if late := [rank for rank, since in waits if now - since > take_timeout_s]:
            raise self._lost(late, f"took nothing for {take_timeout_s:g} s")
        if self._unasked and now - self._started_at > timeout_s:
            raise self._lost(self._unasked, f"did not connect to this one within {timeout_s:g} s")

    def _lost(self, ranks: Iterable[int], what: str) -> Exception:
        return missing_error(tuple(sorted({self._global_ranks[rank] for rank in ranks})), what)

    def _send(self, to: int, kind: int, **fields: int) -> None:
        while not self._host_ranks.send(to, kind, **fields):
            if self._is_over.is_set():
                raise PeerLeftError
            time.sleep(_FULL_S)

    def _wake(self) -> None:
        for _ in range(NUM_THREADS if self._host_ranks.others else 0):
            self._host_ranks.wake(_WAKE)
