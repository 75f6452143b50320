"""Carries out the load plans of several ranks together: what more than one of them wants is read by one, the reader
rank, and passed on to its peers while reading goes on. It does not choose the reader ranks, and opens no file.

No circle of ranks can wait for one another: a peer always takes what comes, into its tensors or into memory that is
freed again without the help of other ranks, so every unit that is sent arrives, and makes room for the next read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec

from bytecheckpoint.distributed.connection import GRACE_S, Activity, Connection, PeerLeftError
from bytecheckpoint.distributed.failures import shown_ranks
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import MAX_UNAUTHENTICATED, Address, Listener, connect
from bytecheckpoint.distributed.wire import OutgoingUnit, damaged, decode_request, encode_request, view_pieces
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.receive import Receiver, read_common
from bytecheckpoint.manifest.frames import FRAME_BYTES
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory.host_to_device import CopyStreams, streams_to
from bytecheckpoint.planner.byte_ranges import ByteRange, piece_of
from bytecheckpoint.planner.exchange_plan import DividedPlan, ExtentRun, Extents, ReaderShare, divide_plan, wanted_runs
from bytecheckpoint.planner.read_division import ReadGroup, divide_reading, share_of
from bytecheckpoint.runtime.buffers import ByteBudget

_HEARTBEATS_IN_TIMEOUT = 4
_MAX_HEARTBEAT_S = 30.0
_TELL_S = 10.0
"""Time in which a rank whose load has failed still connects to those that wait for it, to tell them."""
_POLL_S = 0.01


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
    held: list[int] = []
    """The files that it can read and not all ranks can."""


class _EncodedReadPlan(msgspec.Struct, frozen=True, array_like=True):
    """A LocalReadPlan of which the runs were not decoded."""

    address: Address
    runs: msgspec.Raw
    unit_bytes: int
    timeout_s: float
    held: list[int] = []

    @property
    def key(self) -> bytes:
        return bytes(self.runs)


class _Reply(NamedTuple):
    """The coordinator's answer to all ranks that are in the same groups."""

    groups: list[ReadGroup]
    common: list[tuple[int, ExtentRun]]
    addresses: dict[int, Address]
    """Those of all readers in the groups."""
    unit_bytes: int
    heartbeat_s: float


class ReadAssignment(NamedTuple):
    """The part of one rank in the load, as the coordinator has assigned it."""

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
    extents = Extents(source.manifest.files)
    tensors = (shard.tensor for shard in match.shards if not shard.address)
    with closing(Listener(towards=ranks.rendezvous_host)) as listener, streams_to(tensors) as lanes:
        runs, unit_bytes = wanted_runs(fetches, extents), source.unit_bytes(fetches)
        held = sorted(source.held_files)
        local_plan = LocalReadPlan(listener.address, runs, unit_bytes, source.options.timeout_s, held)
        reply = ranks.reduce_scatter(msgspec.msgpack.encode(local_plan), partial(assign, extents=extents))
        assigned = decode_assignment(reply, ranks.rank)
        plan = divide_plan(fetches, assigned.share, extents, unit_bytes=assigned.unit_bytes)
        source.begin_reading([*plan.shared, *plan.alone])
        exchange = _Exchange(ranks, source, match, assigned=assigned, lanes=lanes)
        common = read_common(assigned.share, extents, ranks, source, lanes)
        for fetch in plan.common:
            exchange.receiver.place(fetch, common[fetch.file, fetch.byte_offset])
        try:
            exchange.run(plan, listener)
        except PeerLeftError:
            ranks.barrier()  # raises the error of the rank that failed
            raise
    source.fill_zeros(match.shards, match.stored_fqns)
    readers = dict(zip(common, assigned.share.common_readers, strict=True))
    of_others = [fetch for fetch in plan.common if readers[fetch.file, fetch.byte_offset] != ranks.rank]
    received = chain(*plan.received.values(), of_others)
    own_common = sum(len(content) for run, content in common.items() if readers[run] == ranks.rank)
    return Traffic(
        sum(fetch.byte_length for fetch in (*plan.shared, *plan.alone)) + own_common,
        sum(piece_of(item).byte_length for fetch in received for item in (*fetch.parts, *fetch.frames)),
    )


def assign(payloads: Sequence[bytes], extents: Extents) -> list[bytes]:
    """Makes the encoded groups of each rank of the encoded local plans of all. Thousands of ranks want the same, and
    get the same: each is decoded and encoded once.
    """
    plans = [msgspec.msgpack.decode(content, type=_EncodedReadPlan) for content in payloads]
    runs = {encoded: msgspec.msgpack.decode(encoded, type=list[ExtentRun]) for encoded in {plan.key for plan in plans}}
    division = divide_reading([runs[plan.key] for plan in plans], extents, [plan.held for plan in plans])
    unit_bytes, timeout_s = min(plan.unit_bytes for plan in plans), min(plan.timeout_s for plan in plans)
    heartbeat_s = min(timeout_s / _HEARTBEATS_IN_TIMEOUT, _MAX_HEARTBEAT_S)
    parts: dict[int, msgspec.Raw] = {}
    replies: dict[tuple[int, ...], bytes] = {}
    numbers_of_rank = [*map(tuple, division.groups_of_rank(len(plans)))]
    for numbers in numbers_of_rank:
        if numbers in replies:
            continue
        groups = [division.groups[number] for number in numbers]
        for group in groups:
            if id(group.parts) not in parts:
                parts[id(group.parts)] = msgspec.Raw(msgspec.msgpack.encode(group.parts))
        readers = {rank for group in groups for rank, part in zip(group.ranks, group.parts, strict=True) if part}
        addresses = {reader: plans[reader].address for reader in sorted(readers)}
        encoded = [(group.ranks, parts[id(group.parts)]) for group in groups]
        replies[numbers] = msgspec.msgpack.encode((encoded, division.common, addresses, unit_bytes, heartbeat_s))
    return [replies[numbers] for numbers in numbers_of_rank]


def decode_assignment(reply: bytes, rank: int) -> ReadAssignment:
    """Returns what the coordinator has assigned to a rank."""
    groups, common, addresses, unit_bytes, heartbeat_s = msgspec.msgpack.decode(reply, type=_Reply)
    share = share_of(rank, groups, common)
    of_readers = {reader: addresses[reader] for reader, _ in share.received}
    return ReadAssignment(share, of_readers, unit_bytes, heartbeat_s)


class _Exchange:
    """The connections, threads and memory of one load on one rank. `run` is called once."""

    def __init__(
        self, ranks: Ranks, source: Source, match: Match, *, assigned: ReadAssignment, lanes: CopyStreams
    ) -> None:
        # Half of the scratch memory is for reading. The rest is halved between what goes out and what comes in, unless
        # a frame that comes in would not fit, which is decompressed beside itself.
        rest_bytes = source.options.scratch_bytes // 2
        incoming_bytes = max(rest_bytes // 2, min(3 * FRAME_BYTES, 3 * rest_bytes // 4))
        self._targets = source.targets(match.shards, match.stored_fqns, lanes)
        self.receiver = Receiver(source, match, self._targets, scratch_bytes=incoming_bytes)
        self._outgoing = ByteBudget(rest_bytes - incoming_bytes)
        self._ranks = ranks
        self._source = source
        self._stored_fqns = match.stored_fqns
        self._assigned = assigned
        self._lanes = lanes
        self._activity = Activity()
        self._inbound: list[Connection] = []
        """To reader ranks, also those that are not established yet."""
        self._outbound: list[Connection] = []
        self._requests: dict[tuple[int, int], dict[tuple[ByteRange, ...], list[Connection]]] = {}
        """The pieces of each unit, by its file and byte offset, with the peers that asked for them."""
        self._errors: list[BaseException] = []
        """Those of all threads, in the order of time."""
        self._is_over = threading.Event()
        """Set with the first error."""
        self._is_interrupted = threading.Event()
        """Set when no reader rank is to be reached any more."""
        self._awaiting: set[int] = set()
        """Reader ranks that wait for this one to connect; those in `_connected` wait no more."""
        self._connected: set[int] = set()
        num_threads = len(assigned.addresses) + len(assigned.share.peers) + 2 * MAX_UNAUTHENTICATED
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bcp-exchange")
        self._futures: list[Future[None]] = []

    def run(self, plan: DividedPlan, listener: Listener) -> None:
        """Raises the first error of any thread."""
        peers = {rank: self._ranks.global_ranks[rank] for rank in self._assigned.share.peers}
        timeout_s = self._source.options.timeout_s
        try:
            # There may be no more threads, and the wait may be interrupted.
            with self._failing_together():
                for item in plan.received.items():
                    self._start(self._receive, *item)
                    self._awaiting.add(item[0])
                with self._activity.waiting():
                    listener.accept(peers, self._admit, self._start, timeout_s=timeout_s, is_over=self._is_over)
                # The shared ones first: one that cannot be shared may begin at the same byte.
                reads = self._source.with_targets([*plan.shared, *plan.alone], self._targets, self._stored_fqns)
                passed_on = [self._passing_on(read) for read in reads]
                if self._requests:
                    raise damaged(f"what was asked for of {len(self._requests)} units that this rank does not read was")
                self._source.run(passed_on, self._lanes)
                wait(self._futures, return_when=FIRST_EXCEPTION)
        finally:
            self._end()

    def _start(self, do: Callable[..., None], *arguments: object) -> None:
        """Calls `do` on a thread. Raises CheckpointError (rank_failed) if there can be no more threads."""
        try:
            self._futures.append(self._pool.submit(self._failing_together()(do), *arguments))
        except RuntimeError as error:
            if isinstance(error, CheckpointError):  # raised by a signal handler
                raise
            raise CheckpointError(
                f"the process can have no more threads ({error}), of which the exchange takes one for each rank that "
                'this one is connected to: raise the limit, or load with LoadOptions(exchange="off")',
                kind="rank_failed",
            ) from error

    def _admit(self, connection: Connection, message: bytes) -> Callable[[], None]:
        """Notes what a peer asks for, and returns what sends it."""
        self._outbound.append(connection)
        if self._is_silent():
            connection.interrupt()
        request = decode_request(message, peer=connection.global_rank)
        for unit, pieces in request.items():
            self._requests.setdefault(unit, {}).setdefault(pieces, []).append(connection)
        return partial(self._send, connection, len(request))

    def _passing_on(self, read: Fetch) -> Fetch:
        """Returns the read of a unit, after which the peers get the pieces that they asked for."""
        requests = self._requests.pop((read.file, read.byte_offset), {})

        def place(content: memoryview) -> None:
            if self._is_over.is_set():
                raise PeerLeftError
            read.place(content)
            self._activity.step()
            for pieces, peers in requests.items():
                views, verify = view_pieces(content, read.byte_offset, pieces), self._source.options.verify
                unit = OutgoingUnit(read, views, len(peers), budget=self._outgoing, verify=verify)
                for connection in peers:
                    connection.units.put(unit)

        def wanted_by(start: int, end: int) -> str:
            """Names the peers as well: they rely on the reader rank to verify."""
            touching = [pieces for pieces in requests if any(piece.touches(start, end) for piece in pieces)]
            peers = sorted({connection.global_rank for key in touching for connection in requests[key]})
            return read.wanted_by(start, end) or (f"what {shown_ranks(peers)} asked for" if peers else "")

        return read._replace(place=place, wanted_by=wanted_by)

    def _send(self, connection: Connection, num_units: int) -> None:
        try:
            connection.send_units(num_units, self._activity, self._is_over, heartbeat_s=self._assigned.heartbeat_s)
        except PeerLeftError:
            self._is_over.wait(GRACE_S)  # if the peer is also a reader rank of this one, that says why
            raise

    def _receive(self, reader: int, fetches: Sequence[Fetch]) -> None:
        awaited = {(fetch.file, fetch.byte_offset): fetch for fetch in fetches}
        request = encode_request({unit: self.receiver.pieces(fetch) for unit, fetch in awaited.items()})
        connection = self._connect(reader, request)
        while awaited and not self._is_over.is_set():
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

    def _connect(self, reader: int, request: bytes) -> Connection:
        """Returns a connection to the reader rank. If this rank has failed meanwhile, it is told so."""
        try:
            connection = connect(
                self._ranks.global_ranks[reader],
                self._assigned.addresses[reader],
                self._ranks.rank,
                request,
                timeout_s=self._source.options.timeout_s,
                on_open=self._inbound.append,
                is_over=self._is_interrupted,
            )
            if self._is_over.is_set():
                connection.disconnect()
                raise PeerLeftError
        finally:
            self._connected.add(reader)
        return connection

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """The first error in such a block, on any thread, ends everything that is under way here; peers are sent
        DISCONNECT.
        """
        try:
            yield
        except BaseException as error:
            self._errors.append(error)
            self._is_over.set()
            self._stop()
            raise

    def _stop(self) -> None:
        """Ends all waits of other threads. May be called several times."""
        if self._is_silent():
            self._interrupt_all()
        self.receiver.scratch.break_off(PeerLeftError)
        self._outgoing.break_off(PeerLeftError)
        for connection in [each for each in self._inbound if each.is_established]:
            connection.disconnect()

    def _is_silent(self) -> bool:
        """Returns True if this rank will not say what has happened: others are to see that it is gone."""
        return any(not isinstance(error, Exception) for error in self._errors[:1])

    def _interrupt_all(self) -> None:
        self._is_interrupted.set()
        for connection in (*self._inbound, *self._outbound):
            connection.interrupt()

    def _end(self) -> None:
        """Waits until nothing is under way, and raises the first error."""
        if self._errors:
            deadline = time.monotonic() + _TELL_S
            while not (
                self._awaiting <= self._connected or self._is_interrupted.is_set() or time.monotonic() > deadline
            ):
                time.sleep(_POLL_S)
            wait(self._futures, timeout=GRACE_S)
            self._interrupt_all()
        self._pool.shutdown()
        for connection in (*self._inbound, *self._outbound):
            connection.close()
        if not self._errors:
            return
        error = self._errors[0]
        if isinstance(error, CheckpointError) and error.kind == "rank_missing":
            time.sleep(min(GRACE_S, self._source.options.timeout_s))  # the error of the lost rank says more
        raise error
