"""Carries out the load plans of several ranks together: what more than one of them wants is read by one, the reader
rank, and passed on while reading goes on: to the ranks of its host in memory that they share, and once to each other
host, where a relay passes it on likewise. It does not choose these ranks, and opens no file.

No circle of ranks can wait for one another: a rank always takes what comes, into memory that is freed again without the
help of other hosts, so every unit that is sent arrives, and makes room for the next read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain

import msgspec

from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.connection import GRACE_S, Activity, Connection, PeerLeftError
from bytecheckpoint.distributed.failures import shown_ranks
from bytecheckpoint.distributed.liveness.connected_threads import TELL_S, ConnectedThreads
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import Listener
from bytecheckpoint.distributed.same_host.host_ranks import HostRanks, meet_on_host
from bytecheckpoint.distributed.wire import OutgoingUnit, damaged, decode_request, encode_request, view_pieces
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.between_ranks.assignment import LocalReadPlan, ReadAssignment, assign, decode_assignment
from bytecheckpoint.loading.between_ranks.host_exchange import NUM_THREADS, HostExchange
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.read import Source, Traffic
from bytecheckpoint.loading.receive import Receiver, pieces_of, read_common, united
from bytecheckpoint.loading.scatter import Targets
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory.host_to_device import CopyStreams, streams_to
from bytecheckpoint.planner.byte_ranges import ByteRange, names_in
from bytecheckpoint.planner.exchange_plan import DividedPlan, Extents, divide_plan, wanted_runs
from bytecheckpoint.runtime.buffers import Arena, ArenaPart, ByteBudget
from bytecheckpoint.storage.range_reader import ALIGNMENT


def arena_lengths(source: Source, extents: Extents, wanted_bytes: int) -> tuple[int, int]:
    """Returns the bytes of memory for what is read for other ranks too, and for what comes from other hosts; each holds
    any unit. Together they are up to three eighths of `scratch_bytes`, more for a long extent: half of `scratch_bytes`
    is for what only this rank wants, and an eighth for copies.
    """
    unit_bytes = source.unit_bytes
    least = extents.longest_unit(unit_bytes) + ALIGNMENT
    # Making shared memory takes time, and a rank reads little for others that it does not want itself.
    read_bytes, received_bytes = (max(least, min(wanted_bytes, units * unit_bytes)) for units in (4, 2))
    return read_bytes, received_bytes


def read_together(ranks: Ranks, source: Source, fetches: Sequence[Fetch], match: Match) -> Traffic:
    """Carries out the plans of all ranks, each of which passes its own and must call this. If ranks do not exchange
    what they read, each does all of its plan. Returns the bytes that this rank has read and received.

    Raises the errors of reading, CheckpointCorruptError (checksum) for bytes that were damaged on the way, and
    CheckpointError (rank_missing) for a rank that died or is stuck. A failure elsewhere is raised here as well.
    """
    if not source.is_exchanged:
        source.read(fetches, match.shards, match.stored_fqns)
        return Traffic(sum(fetch.byte_length for fetch in fetches), 0)
    extents = Extents(source.manifest.files)
    tensors = TargetShards.of(match.shards).tensors_without_address
    runs = wanted_runs(fetches, extents)
    arena_bytes = arena_lengths(source, extents, sum(map(extents.num_bytes, runs)))
    meeting = meet_on_host(ranks, sum(arena_bytes))
    with (
        closing(Listener(towards=ranks.rendezvous_host)) as listener,
        meeting as host_ranks,
        streams_to(tensors) as lanes,
    ):
        targets = source.targets(match.shards, match.stored_fqns, lanes)
        held, timeout_s = sorted(source.held_files), source.options.timeout_s
        wanted = msgspec.Raw(msgspec.msgpack.encode(runs))
        local_plan = LocalReadPlan(listener.address, wanted, source.unit_bytes, timeout_s, held, host_ranks.host)
        reply = ranks.reduce_scatter(msgspec.msgpack.encode(local_plan), partial(assign, extents=extents))
        assigned = decode_assignment(reply, ranks.rank)
        share = assigned.share
        from_others: Counter[int] = Counter()
        for rank, run in share.received:
            from_others[rank] += extents.num_bytes(run)
        passed_on = sum(map(extents.num_bytes, chain(share.reads, (run for _, run in share.relayed))))
        host_ranks.share_with({*share.takers, *from_others})
        host_ranks.map_pages(from_others, passed_on)
        common = read_common(share.common, extents, ranks, source, lanes)
        exchange = _Exchange(
            ranks, source, match, host_ranks, targets=targets, read_bytes=arena_bytes[0], assigned=assigned, lanes=lanes
        )
        try:
            # Reader ranks wait for this one by now: they are told of whatever fails in `run`.
            plan = exchange.run(listener, partial(divide_plan, fetches, share, extents), common)
        except PeerLeftError:
            ranks.barrier()  # raises the error of the rank that failed
            raise
    source.fill_zeros(match.shards, match.stored_fqns)
    own_common = sum(extents.num_bytes(run) for reader, run in share.common if reader == ranks.rank)
    of_others = (fetches for reader, fetches in plan.common.items() if reader != ranks.rank)
    received = chain(*plan.received.values(), *plan.relayed.values(), *of_others)
    return Traffic(
        sum(fetch.byte_length for fetch in (*plan.shared, *plan.alone)) + own_common,
        sum(piece.byte_length for fetch in received for piece in pieces_of(fetch)),
    )


class _Exchange(ConnectedThreads):
    """The connections, threads and memory of one load on one rank. `run` is called once."""

    def __init__(
        self,
        ranks: Ranks,
        source: Source,
        match: Match,
        host_ranks: HostRanks,
        *,
        targets: Targets,
        read_bytes: int,
        assigned: ReadAssignment,
        lanes: CopyStreams,
    ) -> None:
        num_threads = len(assigned.addresses) + len(assigned.share.peers) + NUM_THREADS
        use = "the exchange takes one for each rank that this one is connected to: raise the limit, or load with "
        super().__init__(ranks, num_threads, name="bcp-exchange", use=f'{use}LoadOptions(exchange="off")')
        copy_bytes = source.options.scratch_bytes // 16
        self._targets = targets
        self._receiver = Receiver(source, match, targets, scratch_bytes=copy_bytes)
        self._outgoing = ByteBudget(copy_bytes)
        """For pieces that are put together for other hosts."""
        self._source = source
        self._stored_fqns = match.stored_fqns
        self._assigned = assigned
        self._lanes = lanes
        self._activity = Activity()
        self._requests: dict[tuple[int, int], dict[tuple[ByteRange, ...], list[Connection]]] = {}
        """The pieces of each unit, by its file and byte offset, with the peers that asked for them."""
        self._untold = {*assigned.addresses}
        """Reader ranks that wait for this one to connect, and to which it has not begun to, or could not."""
        self._relays: list[Future[object]] = []
        self._host_ranks = host_ranks
        parts = range(read_bytes), range(read_bytes, host_ranks.content.nbytes)
        arenas = [Arena(host_ranks.content, part, max_parts=host_ranks.max_parts_of_arena) for part in parts]
        # Two, because two hosts could wait for one another if the memory of each was full of what the other waits for.
        self._read_arena, self._received_arena = arenas
        self._host = HostExchange(
            host_ranks,
            self._receiver,
            self._activity,
            self._is_over,
            takers=assigned.share.takers,
            global_ranks=ranks.global_ranks,
            timeout_s=source.options.timeout_s,
            heartbeat_s=assigned.heartbeat_s,
        )

    def run(
        self, listener: Listener, divide: Callable[..., DividedPlan], common: Mapping[tuple[int, int], memoryview]
    ) -> DividedPlan:
        """Reads, passes on and receives until all is done. `divide` returns the plan of this rank for units of a given
        length, which this returns; `common` is what `read_common` has read. Raises the first error of any thread.
        """
        share, global_ranks = self._assigned.share, self._ranks.global_ranks
        peers = {rank: global_ranks[rank] for rank in share.peers}
        timeout_s = self._source.options.timeout_s
        try:
            # The starts are in the block too: threads may have run out, and a signal may interrupt the wait.
            with self._failing_together(), self._watching():
                plan = divide(unit_bytes=self._assigned.unit_bytes)
                self._source.expect_bytes([*plan.shared, *plan.alone])
                self._host.ask(plan.received)
                for _ in range(NUM_THREADS if self._host_ranks.others else 0):
                    self._start(self._host.serve)
                for item in plan.relayed.items():
                    self._relays.append(self._start(self._relay, *item))
                for fetch in chain(*plan.common.values()):
                    self._receiver.place(fetch, common[fetch.file, fetch.byte_offset])
                with self._activity.waiting():
                    listener.accept(peers, self._admit, self._start, timeout_s=timeout_s, is_over=self._is_over)
                self._host.wait_for_requests()
                passed_on = [self._passing_on(read) for read in plan.shared]
                if self._requests:
                    raise damaged(f"what was asked for of {len(self._requests)} units that this rank does not read was")
                alone = map(self._noted, self._source.with_targets(plan.alone, self._targets, self._stored_fqns))
                break_off = partial(self._read_arena.break_off, PeerLeftError)
                self._source.run([*passed_on, *alone], self._lanes, break_off)
                wait(self._relays, return_when=FIRST_EXCEPTION)
                self._host.end_serving()
                wait(self._futures, return_when=FIRST_EXCEPTION)
        finally:
            self._end()
        return plan

    def _admit(self, connection: Connection, message: bytes) -> Callable[[], None]:
        """Notes what a peer asks for, and returns the function that sends it."""
        self._outbound.append(connection)
        if self._is_silent():
            connection.interrupt()
        request = decode_request(message, peer=connection.global_rank)
        for unit, pieces in request.items():
            self._requests.setdefault(unit, {}).setdefault(pieces, []).append(connection)
        return partial(self._send, connection, len(request))

    def _passing_on(self, read: Fetch) -> Fetch:
        """Returns a fetch that reads a unit into shared memory, and passes it on to all that asked for bytes of it."""
        unit = read.file, read.byte_offset
        requests = self._requests.pop(unit, {})
        parts: list[ArenaPart] = []

        @contextmanager
        def target() -> Iterator[memoryview]:
            # Bytes that are aligned in the file are aligned in memory.
            parts.append(self._read_arena.take(read.byte_length, lead_bytes=read.byte_offset % ALIGNMENT))
            yield parts[0].content

        def place(_: memoryview) -> None:
            self._note_progress()
            self._pass_on(read, parts[0], requests)

        def wanted_by(start: int, end: int) -> str:
            """Names what this rank wants of these bytes, else who asked for them: the reader rank verifies for them."""
            names = self._ranks.global_ranks
            of_host = self._host.requests.get(unit, {})
            asked = [(pieces, [peer.global_rank for peer in peers]) for pieces, peers in requests.items()]
            asked += [(pieces, [names[rank] for rank in ranks]) for pieces, ranks in of_host.items()]
            touching = [ranks for pieces, ranks in asked if any(piece.touches(start, end) for piece in pieces)]
            ranks = sorted({*chain.from_iterable(touching)})
            own = names_in(read, self._stored_fqns, start, end)
            return own or (f"what {shown_ranks(ranks)} asked for" if ranks else "")

        return Fetch(*unit, read.byte_length, (), is_direct=False, target=target, place=place, wanted_by=wanted_by)

    def _noted(self, read: Fetch) -> Fetch:
        """Returns a read that is noted as progress, for heartbeats, and that raises once any thread has failed."""

        def place(content: memoryview) -> None:
            self._note_progress()
            read.place(content)

        return read._replace(place=place)

    def _note_progress(self) -> None:
        if self._is_over.is_set():
            raise PeerLeftError
        self._activity.step()

    def _pass_on(
        self, fetch: Fetch, part: ArenaPart, requests: Mapping[tuple[ByteRange, ...], Sequence[Connection]]
    ) -> None:
        """Passes on the unit in this part, puts what this rank wants of it into tensors, and releases the part."""
        self._host.announce((fetch.file, fetch.byte_offset), part)
        for pieces, peers in requests.items():
            part.hold()
            views, verify = view_pieces(part.content, fetch.byte_offset, pieces), self._source.options.verify
            unit = OutgoingUnit(fetch, views, len(peers), budget=self._outgoing, verify=verify, done=part.release)
            for connection in peers:
                connection.units.put(unit)
        self._receiver.place(fetch, part.content)
        part.release()

    def _send(self, connection: Connection, num_units: int) -> None:
        try:
            connection.send_units(num_units, self._activity, self._is_over, heartbeat_s=self._assigned.heartbeat_s)
        except PeerLeftError:
            self._is_over.wait(GRACE_S)  # the peer may be a reader rank too: then its other connection has the reason
            raise

    def _relay(self, reader: int, fetches: Sequence[Fetch]) -> None:
        """Receives, from a reader rank on another host, what ranks of this host want, and passes it on to them."""
        self._host.wait_for_requests()
        awaited: dict[tuple[int, int], tuple[Fetch, tuple[ByteRange, ...]]] = {}
        for fetch in fetches:
            unit = fetch.file, fetch.byte_offset
            if pieces := united(fetch, [pieces_of(fetch), *self._host.requests.get(unit, ())]):
                awaited[unit] = fetch, pieces
        request = encode_request({unit: pieces for unit, (_, pieces) in awaited.items()})
        connection = self._connect(reader, request, timeout_s=self._source.options.timeout_s)
        while awaited and not self._is_over.is_set():
            header = connection.receive_header(self._host.beat)
            if (header.file, header.byte_offset) not in awaited:
                raise damaged(
                    f"{header.byte_length} bytes from rank {connection.global_rank} that were not asked for "
                    f"(file {header.file}, byte {header.byte_offset}), were"
                )
            fetch, pieces = awaited.pop((header.file, header.byte_offset))
            part = self._received_arena.take(fetch.byte_length, lead_bytes=fetch.byte_offset % ALIGNMENT)
            self._receiver.receive(connection, header, fetch, pieces=pieces, content=part.content)
            self._pass_on(fetch, part, {})
        if not awaited:
            connection.send_ack()

    def _connect(self, reader: int, request: bytes, *, timeout_s: float) -> Connection:
        """Connects to the reader rank. If this rank has failed meanwhile, tells the reader and raises PeerLeftError."""
        self._untold.discard(reader)
        try:
            connection = self._connection_to(reader, self._assigned.addresses[reader], request, timeout_s=timeout_s)
        except OSError:  # of this rank, as where it has no descriptor left: the reader rank waits as before
            self._untold.add(reader)
            raise
        if self._is_over.is_set():
            connection.disconnect()
            raise PeerLeftError
        return connection

    def _stop(self) -> None:
        """Ends all waits of other threads. May be called several times."""
        self._host_ranks.leave(is_silent=self._is_silent())
        if self._is_silent():
            self._interrupt()
        for memory in (self._receiver.scratch, self._outgoing, self._read_arena, self._received_arena):
            memory.break_off(PeerLeftError)
        self._host.stop()
        for connection in [each for each in self._inbound if each.is_established]:
            connection.disconnect()

    def _is_silent(self) -> bool:
        """Returns True if the first error is no Exception, as an interrupt: then nothing is sent to other ranks."""
        return any(not isinstance(error, Exception) for error in self._errors[:1])

    def _tell(self, connect_to_reader: Callable[[], object]) -> None:
        """Connects to a reader rank that waits for this one, on a thread or, if there can be none, on this one."""
        try:
            self._relays.append(self._start(connect_to_reader))
        except CheckpointError:
            with suppress(PeerLeftError, CheckpointError, OSError):
                connect_to_reader()

    def _end(self) -> None:
        """Waits for what is under way, or ends it after an error; closes connections, and raises the first error."""
        if self._errors:
            for reader in [] if self._is_interrupted.is_set() else [*self._untold]:
                self._tell(partial(self._connect, reader, encode_request({}), timeout_s=TELL_S))
            wait(self._relays, timeout=TELL_S)
        self._close(GRACE_S)
        for error in self._errors[:1]:
            if isinstance(error, CheckpointError) and error.kind == "rank_missing":
                time.sleep(min(GRACE_S, self._source.options.timeout_s))  # the error of the lost rank says more
            raise error
