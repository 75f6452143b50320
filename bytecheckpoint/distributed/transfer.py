"""Ranks fetch bytes out of the memory of one another, over the sockets of the exchange, each piece with a digest. The
first failure ends what a rank has under way. It does not know what the bytes are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from bytecheckpoint.distributed.connection import Connection, PeerLeftError
from bytecheckpoint.distributed.liveness.connected_threads import TELL_S, ConnectedThreads
from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.rendezvous import Listener
from bytecheckpoint.distributed.wire import HEADER, WireHeader, check_digest, damaged, seal, with_digest, without_digest
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.runtime.thread_priority import lower_priority


class SentPiece(NamedTuple):
    """Consecutive bytes of one of the files that a rank offers."""

    file: int
    """Index into the files that the rank offers."""
    byte_offset: int
    byte_length: int


class Fetching(NamedTuple):
    """The pieces that this rank fetches from another one."""

    rank: int
    """Rank of the other one within the group."""
    address: Address
    pieces: Sequence[SentPiece]
    memory: Callable[[SentPiece], memoryview]
    """Returns the memory that a piece goes to, once it comes."""
    take: Callable[[SentPiece, memoryview], None]
    """Called with each piece that has arrived, by one thread for each rank."""


def nothing_from(rank: int, address: Address) -> Fetching:
    """Returns a fetch of no pieces for `transfer`, which then connects and ends the other rank's wait for this one."""
    return Fetching(rank, address, [], lambda _: memoryview(b""), lambda *_: None)


def transfer(
    ranks: Ranks,
    listener: Listener,
    offered: Sequence[memoryview],
    *,
    takers: Sequence[int],
    fetches: Sequence[Fetching],
    timeout_s: float,
) -> None:
    """Fetches all pieces, and serves the pieces of the `offered` files that the ranks in `takers` fetch from this rank.

    Ranks that take no part in it wait at the next message of the ranks.

    Raises CheckpointError (rank_missing) for a rank that is gone or stuck (not for a taker that is stuck once it has
    been sent everything: it misses the next message of the ranks), CheckpointError (rank_failed) if there can be no
    more threads, CheckpointCorruptError (checksum) for bytes that were damaged on the way, and whatever `take` raises;
    RankFailedError if the call has failed on another rank.
    """
    if not takers and not fetches:
        return
    try:
        num_peers = len(takers) + len(fetches)
        _Transfer(ranks, offered, timeout_s, num_peers=num_peers).run(listener, takers, fetches)
    except PeerLeftError:
        ranks.barrier()  # raises the error of the rank that failed
        raise


class _Transfer(ConnectedThreads):
    """The part of one rank."""

    def __init__(self, ranks: Ranks, offered: Sequence[memoryview], timeout_s: float, *, num_peers: int) -> None:
        use = "one is taken for each rank that bytes are fetched from or sent to: raise the limit"
        # With a lower priority, which a shared thread would keep.
        super().__init__(ranks, num_peers, name="bcp-copies", use=use, initializer=lower_priority)
        self._offered = offered
        self._timeout_s = timeout_s

    def run(self, listener: Listener, takers: Sequence[int], fetches: Sequence[Fetching]) -> None:
        """Serves the takers and carries out the fetches. Raises the first error of any thread."""
        peers = {rank: self._ranks.global_ranks[rank] for rank in takers}
        unstarted = [*fetches]
        try:
            with self._failing_together(), self._watching():
                while unstarted:
                    self._start(self._fetch, unstarted[0])
                    del unstarted[0]
                if peers:
                    listener.accept(peers, self._admit, self._start, timeout_s=self._timeout_s, is_over=self._is_over)
                else:  # a rank that was to be a taker waits for no answer
                    listener.close()
                wait(self._futures, return_when=FIRST_EXCEPTION)
        finally:
            if unstarted:  # before it accepts: ranks that leave too, and tell this one so, wait for no answer of it
                listener.close()
            for fetch in unstarted:  # whose rank waits for this one: it sees that this one leaves
                with suppress(PeerLeftError, CheckpointError, OSError):
                    self._fetch(fetch, limit_s=TELL_S)
            try:
                self._close(TELL_S)
                for error in self._errors[:1]:  # the others are of threads that were interrupted for it
                    raise error
            finally:
                listener.close()  # so that no rank waits for an answer of it

    def _admit(self, connection: Connection, message: bytes) -> Callable[[], None]:
        self._outbound.append(connection)
        request = without_digest(message, peer=connection.global_rank)
        return partial(self._serve, connection, msgspec.msgpack.decode(request, type=list[SentPiece]))

    def _serve(self, connection: Connection, pieces: Sequence[SentPiece]) -> None:
        for piece in pieces:
            if self._is_over.is_set():
                raise PeerLeftError
            content = self._offered[piece.file][piece.byte_offset :][: piece.byte_length]
            header = seal(WireHeader(piece.file, piece.byte_offset, content.nbytes), [content])
            connection.send(HEADER.pack(*header))
            connection.send(content)
        connection.check_peer(self._timeout_s)  # until it has them all

    def _fetch(self, fetch: Fetching, limit_s: float = math.inf) -> None:
        request, timeout_s = with_digest(msgspec.msgpack.encode(fetch.pieces)), min(self._timeout_s, limit_s)
        connection = self._connection_to(fetch.rank, fetch.address, request, timeout_s=timeout_s)
        if self._is_over.is_set():  # the other rank waits, and sees now that this one leaves
            connection.interrupt()
            raise PeerLeftError
        for piece in fetch.pieces:
            header = connection.receive_header()
            if (header.file, header.byte_offset, header.byte_length) != piece:
                raise damaged(f"a piece of the memory of rank {connection.global_rank}, or its header, was")
            memory = fetch.memory(piece)
            connection.receive_into(memory)
            check_digest(header, [memory], reader=connection.global_rank, wanted_by="a copy")
            fetch.take(piece, memory)
        connection.send_ack()

    def _stop(self) -> None:
        """Interrupts the connections of this rank, except those that are still being opened."""
        for connection in (*self._inbound, *self._outbound):
            if connection.is_established or connection in self._outbound:
                connection.interrupt()
