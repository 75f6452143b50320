"""Carries out the load plans of several ranks together: what more than one of them wants is read by one, the reader
rank, and passed on to its peers while reading goes on. It does not choose the reader ranks, and opens no file.

No circle of ranks can wait for one another: a peer always takes what comes, into its tensors or into memory that is
freed again without the help of other ranks, so every unit that is sent arrives, and makes room for the next read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import NamedTuple

import msgspec
import numpy as np

from bytecheckpoint.distributed.connection import Activity, Connection, PeerLeftError, PeerSender, start_thread
from bytecheckpoint.distributed.key_value_ranks import MAX_GRACE_S, shown_ranks
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.rendezvous import Address, Listener, connect
from bytecheckpoint.distributed.wire import (
    OutgoingUnit,
    WireHeader,
    damaged,
    decode_request,
    encode_request,
    pack,
    seal,
    view_pieces,
)
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.receive import CommonBytes, Receiver
from bytecheckpoint.manifest.frames import FRAME_BYTES
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory.host_to_device import CopyStreams, streams_to
from bytecheckpoint.planner.byte_ranges import ByteRange, piece_of
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare, assign_readers, max_common_bytes
from bytecheckpoint.planner.exchange_split import DividedPlan, can_share, divide_plan, wanted_runs
from bytecheckpoint.runtime.buffers import ByteBudget

_HEARTBEATS_IN_TIMEOUT = 4
_MAX_HEARTBEAT_S = 30.0
_GRACE_S = 1.0
"""Time that a rank whose load has failed leaves to DISCONNECT messages, its own and those of other ranks."""


class Traffic(NamedTuple):
    """Bytes that a rank took in."""

    num_bytes_read: int
    num_bytes_received: int


class LocalReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank to the coordinator."""

    address: Address
    runs: list[ExtentRun]
    """The extents that it wants."""
    unit_bytes: int
    timeout_s: float


class ReadAssignment(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's answer to a rank."""

    share: ReaderShare
    addresses: dict[int, Address]
    """Addresses of the reader ranks of what it receives."""
    unit_bytes: int
    heartbeat_s: float
    """Time between heartbeats: a fraction of the shortest timeout of any rank."""


def read_together(ranks: Ranks, source: Source, fetches: Sequence[Fetch], match: Match) -> Traffic:
    """Carries out the plans of all ranks, each of which passes its own. Must be called by all. If ranks do not exchange
    what they read, each does all of its plan.

    Raises the errors of reading, CheckpointCorruptError (checksum) for bytes that were damaged on the way, and
    CheckpointError (rank_missing) for a rank that died or is stuck. A failure elsewhere is raised here as well.
    """
    if not source.is_exchanged:
        source.read(fetches, match.shards, match.stored_fqns)
        return Traffic(sum(fetch.byte_length for fetch in fetches), 0)
    extents, options = Extents(source.manifest.files), source.options
    sharable = [fetch for fetch in fetches if can_share(fetch, extents)]
    unsharable = [fetch for fetch in fetches if not can_share(fetch, extents)]
    tensors = (shard.tensor for shard in match.shards if not shard.address)
    with closing(Listener(towards=ranks.rendezvous_host)) as listener, streams_to(tensors) as lanes:
        runs = wanted_runs(sharable, extents)
        local_plan = LocalReadPlan(listener.address, runs, source.unit_bytes(sharable), options.timeout_s)
        payloads = ranks.gather(msgspec.msgpack.encode(local_plan))
        assigned = msgspec.msgpack.decode(ranks.scatter(assign(payloads, extents)), type=ReadAssignment)
        plan = divide_plan(sharable, assigned.share, extents, unit_bytes=assigned.unit_bytes)
        plan = plan._replace(alone=[*plan.alone, *unsharable])
        exchange = _Exchange(ranks, source, match, assigned=assigned, lanes=lanes)
        common = CommonBytes(assigned.share.common, extents)
        common.broadcast(ranks, source, exchange.targets, lanes)
        common.place(plan.common, exchange.receiver)
        try:
            exchange.run(plan, listener)
        except PeerLeftError:
            ranks.barrier()  # raises the error of the rank that failed
            raise
    source.fill_zeros(match.shards, match.stored_fqns)
    is_reader = ranks.rank == COORDINATOR
    received = [fetch for of_reader in plan.received.values() for fetch in of_reader]
    received += () if is_reader else plan.common
    return Traffic(
        sum(fetch.byte_length for fetch in (*plan.shared, *plan.alone)) + is_reader * len(common.content),
        sum(piece_of(item).byte_length for fetch in received for item in (*fetch.parts, *fetch.frames)),
    )


def assign(payloads: Sequence[bytes], extents: Extents) -> list[bytes]:
    """Makes the encoded assignment of each rank of the encoded local plans of all."""
    plans = [msgspec.msgpack.decode(content, type=LocalReadPlan) for content in payloads]
    shares = assign_readers([plan.runs for plan in plans], extents, common_bytes=max_common_bytes(len(plans)))
    unit_bytes = min((plan.unit_bytes for plan in plans), default=0)
    timeout_s = min((plan.timeout_s for plan in plans), default=0.0)
    heartbeat_s = min(timeout_s / _HEARTBEATS_IN_TIMEOUT, _MAX_HEARTBEAT_S)
    assignments = (
        ReadAssignment(share, {reader: plans[reader].address for reader, _ in share.received}, unit_bytes, heartbeat_s)
        for share in shares
    )
    return list(map(msgspec.msgpack.encode, assignments))


class _FirstFailure:
    """The first error of any thread of an exchange. As a context manager it takes what its block raises."""

    def __init__(self, stop: Callable[[BaseException], None]) -> None:
        """`stop` is called with that error, once."""
        self.error: BaseException | None = None
        self.is_over = threading.Event()
        self._failed_at = 0.0
        self._stop = stop
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            if error is None or self.error is not None:
                return
            self._failed_at = time.monotonic()
            self.error = error
            self.is_over.set()
        self._stop(error)

    def is_within_grace(self) -> bool:
        """Returns True until peers that connect after a failure have had time to receive DISCONNECT."""
        return self.error is None or time.monotonic() <= self._failed_at + _GRACE_S


class _Exchange:
    """The connections, threads and memory of one load on one rank."""

    def __init__(
        self, ranks: Ranks, source: Source, match: Match, *, assigned: ReadAssignment, lanes: CopyStreams
    ) -> None:
        self.targets = source.targets(match.shards, match.stored_fqns, lanes)
        options = source.options
        # Half of the scratch memory is for reading. The rest is halved between what goes out and what comes in, unless
        # a frame that comes in would not fit, which is decompressed beside itself.
        rest_bytes = options.scratch_bytes // 2
        incoming_bytes = max(rest_bytes // 2, min(3 * FRAME_BYTES, 3 * rest_bytes // 4))
        self.receiver = Receiver(
            self.targets,
            match.stored_fqns,
            scratch_bytes=incoming_bytes,
            verify=options.verify,
            changes=source.changes,
        )
        self._outgoing = ByteBudget(rest_bytes - incoming_bytes)
        self._ranks = ranks
        self._source = source
        self._stored_fqns = match.stored_fqns
        self._assigned = assigned
        self._lanes = lanes
        self._activity = Activity()
        self._failure = _FirstFailure(self._stop)
        self._inbound: list[Connection] = []
        self._senders: list[PeerSender] = []
        self._requests: dict[tuple[int, int], dict[tuple[ByteRange, ...], list[PeerSender]]] = {}
        """The pieces of each unit, by its file and byte offset, with the peers that asked for them."""

    def run(self, plan: DividedPlan, listener: Listener) -> None:
        """Raises the first error of any thread."""
        num_peers = len(plan.received) + len(self._assigned.share.peers)
        with ThreadPoolExecutor(num_peers + 1, thread_name_prefix="bcp-exchange") as pool:
            futures: list[Future[None]] = []
            try:
                # There may be no more threads, and the wait may be interrupted.
                with self._failure, closing(self._accept(listener)) as senders:
                    futures += [start_thread(pool, self._receive, *item) for item in plan.received.items()]
                    futures.extend(start_thread(pool, self._send, sender) for sender in senders)
                    self._source.run(list(self._reads(plan)), self._lanes)
                    self._end_queues()
                    wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                listener.close()
                self._end(futures)

    def _accept(self, listener: Listener) -> Generator[PeerSender, None, None]:
        """Connects all peers, and notes what they ask for."""
        timeout_s = self._source.options.timeout_s
        accepted = listener.accept(
            {rank: self._ranks.global_ranks[rank] for rank in self._assigned.share.peers},
            timeout_s,
            # Longer than a peer waits for its reader ranks: it may be held up by another one, and that one is stuck
            # then. A reader rank that a peer holds up sends heartbeats.
            io_timeout_s=timeout_s + min(timeout_s, MAX_GRACE_S),
            is_wanted=self._failure.is_within_grace,
        )
        with self._activity.waiting(), closing(accepted):
            for connection, message in accepted:
                try:
                    request = decode_request(message, peer=connection.global_rank)
                except CheckpointError:
                    connection.close()
                    raise
                heartbeat_s = self._assigned.heartbeat_s
                sender = PeerSender(
                    connection, num_units=len(request), activity=self._activity, heartbeat_s=heartbeat_s
                )
                self._senders.append(sender)
                for unit, pieces in request.items():
                    self._requests.setdefault(unit, {}).setdefault(pieces, []).append(sender)
                yield sender

    def _reads(self, plan: DividedPlan) -> Iterator[Fetch]:
        shared = self._source.with_targets(plan.shared, self.targets, self._stored_fqns)
        for fetch, read in zip(plan.shared, shared, strict=True):
            yield self._passing_on(read, fetch.file, self._requests.get((fetch.file, fetch.byte_offset), {}))
        for read in self._source.with_targets(plan.alone, self.targets, self._stored_fqns):
            yield self._passing_on(read, 0, {})

    def _passing_on(self, read: Fetch, file: int, requests: Mapping[tuple[ByteRange, ...], list[PeerSender]]) -> Fetch:
        """Returns the read of a unit, after which the peers get the pieces that they asked for."""

        def place(content: memoryview) -> None:
            if self._failure.is_over.is_set():
                raise PeerLeftError
            read.place(content)
            self._activity.step()
            for pieces, senders in requests.items():
                outgoing = self._outgoing_unit(read, file, view_pieces(content, read.byte_offset, pieces), len(senders))
                for sender in senders:
                    sender.put(outgoing)

        def wanted_by(start: int, end: int) -> str:
            """Names the peers as well: they rely on the reader rank to verify."""
            touching = [pieces for pieces in requests if any(piece.touches(start, end) for piece in pieces)]
            peers = sorted({sender.connection.global_rank for key in touching for sender in requests[key]})
            return read.wanted_by(start, end) or (f"what {shown_ranks(peers)} asked for" if peers else "")

        return read._replace(place=place, wanted_by=wanted_by)

    def _outgoing_unit(self, read: Fetch, file: int, views: Sequence[np.ndarray], num_peers: int) -> OutgoingUnit:
        """Returns the pieces where they are, if the content stays there and they are single rows, else as a copy."""
        num_bytes = sum(view.size for view in views)
        is_copied = read.target is None or any(view.ndim > 1 for view in views)
        if is_copied:
            self._outgoing.take(num_bytes)
        buffers = [pack(views)] if is_copied else [view.data for view in views]
        header = WireHeader(file, read.byte_offset, num_bytes)
        if self._source.options.verify:
            header = seal(header, buffers)
        release = partial(self._outgoing.give, num_bytes if is_copied else 0)
        return OutgoingUnit([header.encode(), *buffers], num_peers, release)

    def _send(self, sender: PeerSender) -> None:
        with self._failure:
            try:
                sender.send_all(self._failure.is_over)
            except PeerLeftError:
                self._failure.is_over.wait(_GRACE_S)  # if the peer is also a reader rank of this one, that says why
                raise

    def _receive(self, reader: int, fetches: Sequence[Fetch]) -> None:
        with self._failure:
            request = {(fetch.file, fetch.byte_offset): self.receiver.pieces(fetch) for fetch in fetches}
            connection = connect(
                self._ranks.global_ranks[reader],
                self._assigned.addresses[reader],
                self._ranks.rank,
                encode_request(request),
                timeout_s=self._source.options.timeout_s,
                is_wanted=lambda: not self._failure.is_over.is_set(),
            )
            self._inbound.append(connection)
            awaited = {(fetch.file, fetch.byte_offset): fetch for fetch in fetches}
            while awaited and not self._failure.is_over.is_set():
                header = connection.receive_header()
                fetch = awaited.pop((header.file, header.byte_offset), None)
                if fetch is None:
                    raise damaged(
                        f"{header.byte_length} bytes from rank {connection.global_rank} that were not asked for "
                        f"(file {header.file}, byte {header.byte_offset}), were"
                    )
                self.receiver.receive(connection, header, fetch)
            if not awaited:
                connection.send_ack()

    def _stop(self, error: BaseException) -> None:
        """Ends everything that is under way here; peers are sent DISCONNECT."""
        if not isinstance(error, Exception):  # this rank will not say what has happened: others see that it is gone
            self._interrupt_all()
        self.receiver.stop()
        self._outgoing.break_off(PeerLeftError)
        self._end_queues()
        for connection in self._inbound:
            connection.disconnect()

    def _end_queues(self) -> None:
        for sender in self._senders:
            sender.put(None)

    def _connections(self) -> list[Connection]:
        return [*self._inbound, *(sender.connection for sender in self._senders)]

    def _interrupt_all(self) -> None:
        for connection in self._connections():
            connection.interrupt()

    def _end(self, futures: Sequence[Future[None]]) -> None:
        """Waits until nothing is under way, and raises the first error."""
        if self._failure.error is not None:
            self._end_queues()  # again, for peers that came after the failure
            wait(futures, timeout=_GRACE_S)
            self._interrupt_all()
        wait(futures)
        for connection in self._connections():
            connection.close()
        error = self._failure.error
        if isinstance(error, CheckpointError) and error.kind == "rank_missing":
            time.sleep(min(_GRACE_S, self._source.options.timeout_s))  # the error of the lost rank says more
        if error is not None:
            raise error
