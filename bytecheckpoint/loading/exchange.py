"""A load plan carried out by several ranks together: what more than one of them wants is read by one and passed on to
the others while reading goes on. It decides nothing about who reads what, and opens no file.

Nobody waits in a circle: a taker always takes what comes, into its tensors or into memory that is freed again without
the help of others, so every parcel that is sent arrives, and makes room for the next read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import NamedTuple

import numpy as np

from bytecheckpoint.distributed.connection import Connection, Peer, PeerLeftError, shown_ranks
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.rendezvous import Address, Listener, connect
from bytecheckpoint.distributed.sender import Activity, Outbox
from bytecheckpoint.distributed.wire import (
    HEADER_BYTES,
    Header,
    Parcel,
    Request,
    decode_header,
    decode_request,
    encode_request,
    not_asked_for,
    pack,
    sealed,
    slices,
)
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.assign_readers import Assignment, LocalPlan, agree_on_reads
from bytecheckpoint.loading.broadcast_bytes import CommonBytes
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.receive import Arrivals
from bytecheckpoint.loading.scatter import Targets
from bytecheckpoint.manifest.frames import FRAME_BYTES
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory.host_to_device import CopyStreams, streams_to
from bytecheckpoint.planner.byte_ranges import ByteRange, piece_of
from bytecheckpoint.planner.exchange_plan import Extents
from bytecheckpoint.planner.exchange_split import Arrival, Unit, Work, can_share, divide_work, wanted_runs
from bytecheckpoint.runtime.buffers import ByteBudget

_GRACE_S = 1.0
"""How long a rank that lost another one waits for news of what happened, and for its own farewell to be sent."""
_MAX_GRACE_S = 5.0
"""How much longer a reader waits for a taker than the taker for its readers, so that who is stuck is named: a taker may
be held up by another reader, while a reader that is held up by a taker says that it gets on."""


class Traffic(NamedTuple):
    """Bytes that a rank took in."""

    num_bytes_read: int
    num_bytes_received: int


def read_together(ranks: Ranks, source: Source, fetches: Sequence[Fetch], match: Match) -> Traffic:
    """Carries out the plans of all ranks, each of which passes its own. Must be called by all.

    Where ranks do not exchange what they read, each does all of its plan.

    Raises what reading raises, CheckpointCorruptError (checksum) for bytes that were damaged on the way, and
    CheckpointError (rank_missing) for a rank that died or is stuck. A failure elsewhere is raised here as well.
    """
    if not source.is_exchanged:
        source.read(fetches, match.shards, match.stored_fqns)
        return Traffic(sum(fetch.byte_length for fetch in fetches), 0)
    extents = Extents(source.manifest.files)
    sharable = [fetch for fetch in fetches if can_share(fetch, extents)]
    unsharable = [fetch for fetch in fetches if not can_share(fetch, extents)]
    tensors = (shard.tensor for shard in match.shards if not shard.address)
    with closing(Listener(towards=ranks.rendezvous_host)) as listener, streams_to(tensors) as lanes:
        runs, timeout_s = wanted_runs(sharable, extents), source.options.timeout_s
        plan = LocalPlan(listener.address, runs, source.unit_bytes(sharable), timeout_s)
        assigned = agree_on_reads(ranks, plan, extents)
        work = divide_work(sharable, assigned.share, extents, unit_bytes=assigned.unit_bytes)
        work = work._replace(alone=[*work.alone, *unsharable])
        targets = source.targets(match.shards, match.stored_fqns, lanes)
        common = CommonBytes(assigned.share.common, extents, source.manifest.files)
        common.share(ranks, source, targets, lanes)
        exchange = _Exchange(ranks, source, targets, match.stored_fqns, lanes=lanes, beat_s=assigned.beat_s)
        exchange.put(common, work)
        try:
            traffic = exchange.run(work, assigned, listener)
        except PeerLeftError:
            _await_verdict(ranks)
            raise
    source.fill_zeros(match.shards, match.stored_fqns)
    return _with_common(traffic, common, work, is_reader=ranks.rank == COORDINATOR)


def _with_common(traffic: Traffic, common: CommonBytes, work: Work, *, is_reader: bool) -> Traffic:
    if is_reader:
        return traffic._replace(num_bytes_read=traffic.num_bytes_read + len(common))
    received = sum(piece_of(item).byte_length for fetch in work.common for item in (*fetch.parts, *fetch.frames))
    return traffic._replace(num_bytes_received=traffic.num_bytes_received + received)


def _await_verdict(ranks: Ranks) -> None:
    """Whatever has failed elsewhere is the error of this rank as well, and it will be told."""
    ranks.gather(b"")
    ranks.broadcast(b"")


def _halved_again(num_bytes: int) -> tuple[int, int]:
    """Memory for what goes out and for what comes in: the same, unless a frame that comes in would not fit, which is
    decompressed beside itself.
    """
    incoming_bytes = max(num_bytes // 2, min(3 * FRAME_BYTES, 3 * num_bytes // 4))
    return num_bytes - incoming_bytes, incoming_bytes


class _Exchange:
    """The connections, threads and memory of one load on one rank."""

    def __init__(
        self,
        ranks: Ranks,
        source: Source,
        targets: Targets,
        stored_fqns: Sequence[str],
        *,
        lanes: CopyStreams,
        beat_s: float,
    ) -> None:
        self._ranks = ranks
        self._source = source
        self._lanes = lanes
        self._targets = targets
        self._stored_fqns = stored_fqns
        self._beat_s = beat_s
        # The other half is for reading.
        outgoing_bytes, incoming_bytes = _halved_again(source.options.scratch_bytes // 2)
        self._outgoing = ByteBudget(outgoing_bytes)
        self._arrivals = Arrivals(
            targets,
            stored_fqns,
            scratch_bytes=incoming_bytes,
            verify=source.options.verify,
            changes=source.changes,
        )
        self._activity = Activity()
        self._outboxes: list[Outbox] = []
        self._takers_of: dict[Unit, dict[tuple[ByteRange, ...], list[Outbox]]] = {}
        self._inbound: list[Connection] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        """Set on the first failure."""
        self._failure: BaseException | None = None
        self._failed_at = 0.0

    def put(self, common: CommonBytes, work: Work) -> None:
        """Puts into place what this rank wants of what all ranks have."""
        common.put(work.common, self._arrivals)

    def run(self, work: Work, assigned: Assignment, listener: Listener) -> Traffic:
        by_reader: dict[int, list[Arrival]] = {reader: [] for reader in assigned.addresses}
        for arrival in work.received:
            by_reader[arrival.reader].append(arrival)
        alone = self._source.with_targets(work.alone, self._targets, self._stored_fqns)
        reads = [*map(self._passing_on, work.passed_on), *map(self._counted, alone)]
        num_others = len(by_reader) + len(assigned.share.takers)
        with ThreadPoolExecutor(num_others + 1, thread_name_prefix="bcp-exchange") as pool:
            futures: list[Future[None]] = []
            try:
                with self._failing_together():  # a thread may not be had, and whoever waits may be interrupted
                    futures.extend(self._begin(pool, by_reader, assigned, listener))
                    self._read_all(reads)
                    wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                listener.close()
                self._end(futures)
        received = sum(piece_of(item).byte_length for arrival in work.received for item in arrival.items)
        return Traffic(sum(read.byte_length for read in reads), received)

    def _begin(
        self, pool: ThreadPoolExecutor, by_reader: Mapping[int, list[Arrival]], assigned: Assignment, listener: Listener
    ) -> Iterator[Future[None]]:
        """A thread for each rank that this one takes from or passes on to."""
        for reader, arrivals in by_reader.items():
            yield pool.submit(self._receive_all, self._peer(reader), assigned.addresses[reader], arrivals)
        for outbox in self._admit(listener, assigned.share.takers):
            yield pool.submit(self._send_all, outbox)

    def _read_all(self, reads: Sequence[Fetch]) -> None:
        """Reads, and has what others want sent."""
        self._source.run(reads, self._lanes)
        for outbox in self._outboxes:
            outbox.end()

    def _peer(self, rank: int) -> Peer:
        return Peer(rank, self._ranks.global_ranks[rank])

    def _admit(self, listener: Listener, ranks: Sequence[int]) -> Iterator[Outbox]:
        """Lets all takers in, and notes what they want."""
        timeout_s = self._source.options.timeout_s
        patience_s = timeout_s + min(timeout_s, _MAX_GRACE_S)
        takers = [self._peer(rank) for rank in ranks]
        with self._activity.waiting():
            for connection, request in listener.accept(takers, timeout_s, patience_s=patience_s):
                if connection is not None:
                    yield self._outbox(connection, decode_request(request, taker=connection.peer.name))
                if self._is_long_over():  # who comes before gets a farewell
                    raise PeerLeftError

    def _is_long_over(self) -> bool:
        with self._lock:
            return self._failure is not None and time.monotonic() > self._failed_at + _GRACE_S

    def _outbox(self, connection: Connection, request: Request) -> Outbox:
        outbox = Outbox(connection, num_parcels=len(request), activity=self._activity, beat_s=self._beat_s)
        self._outboxes.append(outbox)
        for unit, pieces in request.items():
            self._takers_of.setdefault(unit, {}).setdefault(pieces, []).append(outbox)
        return outbox

    def _counted(self, read: Fetch) -> Fetch:
        """A read that others do not want, but that shows them that this rank gets on."""

        def place(content: memoryview) -> None:
            self._refuse_if_over()
            read.place(content)
            self._activity.step()

        return read._replace(place=place)

    def _passing_on(self, fetch: Fetch) -> Fetch:
        """The read of a unit, after which those who want parts of it get them."""
        read = self._source.with_targets([fetch], self._targets, self._stored_fqns)[0]
        unit = Unit(fetch.file, fetch.byte_offset, fetch.end)

        def pass_on(content: memoryview) -> None:
            self._refuse_if_over()
            read.place(content)
            self._activity.step()
            for pieces, outboxes in self._takers_of.get(unit, {}).items():
                parcel = self._parcel(unit, pieces, content, len(outboxes), is_lasting=read.target is not None)
                for outbox in outboxes:
                    outbox.put(parcel)

        def wanted_by(start: int, end: int) -> str:
            return read.wanted_by(start, end) or self._takers_in(unit, start, end)

        return read._replace(place=pass_on, wanted_by=wanted_by)

    def _takers_in(self, unit: Unit, start: int, end: int) -> str:
        """Who has asked for bytes of this range of a unit: they count on it that the reader has verified them."""
        asked = self._takers_of.get(unit, {}).items()
        touching = [outboxes for pieces, outboxes in asked if any(piece.touches(start, end) for piece in pieces)]
        names = sorted({outbox.connection.peer.name for outboxes in touching for outbox in outboxes})
        return f"what {shown_ranks(names)} asked for" if names else ""

    def _refuse_if_over(self) -> None:
        """Ends this rank's own reading where the load has failed."""
        if self._over.is_set():
            raise PeerLeftError

    def _parcel(
        self, unit: Unit, pieces: Sequence[ByteRange], content: memoryview, num_takers: int, *, is_lasting: bool
    ) -> Parcel:
        """The pieces where they are, if they stay there, or in memory of their own."""
        num_bytes = sum(piece.byte_length for piece in pieces)
        buffers = slices(content, unit, pieces) if is_lasting else None
        taken = 0 if buffers is not None else num_bytes
        if buffers is None:
            self._outgoing.take(num_bytes)
            buffers = [np.empty(num_bytes, np.uint8).data]
            pack(content, unit, pieces, buffers[0])
        header = Header(unit.file, unit.byte_offset, num_bytes, 0)
        if self._source.options.verify:
            header = sealed(header, buffers)
        return Parcel(header, buffers, num_takers=num_takers, done=partial(self._outgoing.give, taken))

    def _send_all(self, outbox: Outbox) -> None:
        with self._failing_together():
            try:
                outbox.send_all(self._over)
            except PeerLeftError:
                self._over.wait(_GRACE_S)  # where it also was to send something here, that tells why
                raise

    def _receive_all(self, reader: Peer, address: Address, arrivals: Sequence[Arrival]) -> None:
        with self._failing_together():
            request = {arrival.unit: tuple(map(piece_of, arrival.items)) for arrival in arrivals}
            connection = connect(
                reader,
                address,
                self._ranks.rank,
                encode_request(request),
                timeout_s=self._source.options.timeout_s,
                is_wanted=lambda: not self._over.is_set(),
            )
            with self._lock:
                self._inbound.append(connection)
            left = {(arrival.unit.file, arrival.unit.byte_offset): arrival for arrival in arrivals}
            while left and not self._over.is_set():
                header = decode_header(connection.receive(HEADER_BYTES))
                if header is None:
                    continue
                arrival = left.pop((header.file, header.unit_byte_offset), None)
                if arrival is None:
                    raise not_asked_for(header, reader.name)
                self._arrivals.take_in(connection, header, arrival)
            if not left:
                connection.confirm()

    def _connections(self) -> list[Connection]:
        with self._lock:
            return [*self._inbound, *(outbox.connection for outbox in self._outboxes)]

    def _failing_together(self) -> _FailingTogether:
        return _FailingTogether(self)

    def break_off(self, error: BaseException) -> None:
        """Ends all that is under way here, for the first error that there is; takers are told."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            self._failed_at = time.monotonic()
            self._over.set()
            inbound = list(self._inbound)
        if not isinstance(error, Exception):  # this rank will not say what has happened: others see that it is gone
            for connection in self._connections():
                connection.interrupt()
        self._arrivals.break_off()
        self._outgoing.break_off(PeerLeftError)
        for outbox in self._outboxes:
            outbox.end()
        for connection in inbound:
            connection.leave()

    def _end(self, futures: Sequence[Future[None]]) -> None:
        """Until nothing is under way. Raises the first error that there was."""
        if self._failure is not None:
            for outbox in self._outboxes:
                outbox.end()  # again, for those who came after the failure
            wait(futures, timeout=_GRACE_S)
            for connection in self._connections():
                connection.interrupt()
        wait(futures)
        for connection in self._connections():
            connection.close()
        if isinstance(self._failure, CheckpointError) and self._failure.kind == "rank_missing":
            time.sleep(min(_GRACE_S, self._source.options.timeout_s))  # what it has failed with says more
        if self._failure is not None:
            raise self._failure


class _FailingTogether:
    """What fails in here ends the whole exchange, which then raises it."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._exchange.break_off(error)
