"""The ranks of one host that have one another's memory open, for one load. Ranks that cannot open it (they are in other
containers, lack the permission or lack memory) each count as a host of their own, and no error is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from bytecheckpoint.distributed.liveness import peer_watch
from bytecheckpoint.distributed.liveness.peer_watch import LocalProcesses
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.distributed.same_host.shared_memory import (
    QUEUE_MESSAGES,
    MemoryOffer,
    Message,
    OwnMemory,
    PeerMemory,
)

logger = logging.getLogger("bytecheckpoint")

LEFT, GONE = 0, 1
"""Kinds of messages: the sender's load has failed, and all learn why; the sender ends without a reason."""


class HostRanks:
    """The memory of this rank, and the memories of the other ranks of its host."""

    def __init__(self, rank: int, content: memoryview, own: OwnMemory | None = None) -> None:
        """`rank` is within the group. `content` is the memory of `own`; without `own` no other rank can open it."""
        self.rank = rank
        self.content = content
        self.others: dict[int, PeerMemory] = {}
        self._own = own
        self._processes = LocalProcesses()
        self._has_left = False

    @property
    def host(self) -> int:
        """The lowest of this rank and of the ranks whose memory it has open; -1 if it has none open."""
        return min(self.rank, *self.others) if self.others else -1

    @property
    def max_parts_of_arena(self) -> int:
        """The most parts that this rank may have announced in each of its two arenas: those of all ranks, and their
        answers, then fill half a queue at most.
        """
        return max(1, QUEUE_MESSAGES // (8 * (1 + len(self.others))))

    def open(self, offers: Mapping[int, MemoryOffer]) -> None:
        """Opens the memory of all other ranks in `offers`. Raises OSError, with none open, if one cannot be opened."""
        try:
            for rank, offer in offers.items():
                if rank != self.rank:
                    self.others[rank] = PeerMemory(offer)
                    self._processes.add(rank, offer.presence)
        except BaseException:
            self.share_with(())
            raise

    def share_with(self, ranks: Collection[int]) -> None:
        """Closes the memory of the ranks that are not among these."""
        for rank in [*self.others]:
            if rank not in ranks:
                self.others.pop(rank).close()

    def map_pages(self, received: Mapping[int, int], passed_on: int) -> None:
        """Maps all pages of the memories that will be filled whole. `received` has, by rank, the number of bytes that
        this rank will take out of the memory of other ranks; `passed_on` the number that goes through its own.
        """
        for rank, num_bytes in received.items():
            if num_bytes >= self.others[rank].content.nbytes:
                self.others[rank].map_pages()
        if self._own is not None and passed_on >= self.content.nbytes:
            self._own.map_pages()
            self.content = self._own.content

    def send(self, to: int, kind: int, **fields: int) -> bool:
        """Sends a message to the rank `to`. Returns False, with nothing sent, if its queue is full."""
        return self.others[to].send(Message(kind, self.rank, **fields))

    def append(self, content: bytes) -> int:
        """Puts bytes where others can `read` them; returns their start. Does nothing and returns 0 without `own`."""
        return self._own.append(content) if self._own is not None else 0

    def receive(self, wait_s: float) -> Message | None:
        return self._own.receive(wait_s) if self._own is not None else None

    def wake(self, kind: int) -> None:
        """Sends a message to this rank itself."""
        if self._own is not None:
            self._own.wake(Message(kind, self.rank))

    def ended(self) -> set[int]:
        """Returns the ranks of this host whose process has ended."""
        return self._processes.ended() & {*self.others}

    def leave(self, *, is_silent: bool) -> None:
        """Tells the other ranks, once, that this one leaves early; `is_silent` if the coordinator will not say why. A
        rank whose queue is full is not told.
        """
        if not self._has_left:
            self._has_left = True
            for rank in self.others:
                self.send(rank, GONE if is_silent else LEFT)

    def close(self) -> None:
        self.share_with(())
        self._processes.close()
        if self._own is not None:
            self._own.close()


@contextmanager
def meet_on_host(ranks: Ranks, num_bytes: int) -> Iterator[HostRanks]:
    """Yields the ranks of this host that share memory, of which this rank offers `num_bytes`; this rank alone if it
    cannot share. All ranks must call this. A rank that leaves the context with an error tells the others.
    """
    host_ranks = _with_memory(ranks.rank, num_bytes)
    try:
        presence = peer_watch.own_presence()
        own = host_ranks._own.offer(presence) if host_ranks._own is not None and presence.kernel else None
        reply = ranks.reduce_scatter(msgspec.msgpack.encode(own), _offers_by_host)
        try:
            host_ranks.open(msgspec.msgpack.decode(reply, type=dict[int, MemoryOffer]))
        except OSError as error:
            _log_no_sharing("the memory of another one cannot be opened", error)
        yield host_ranks
    except BaseException as error:
        host_ranks.leave(is_silent=not isinstance(error, Exception))
        raise
    finally:
        host_ranks.close()


def _with_memory(rank: int, num_bytes: int) -> HostRanks:
    try:
        own = OwnMemory(num_bytes)
    except (OSError, AttributeError) as error:
        _log_no_sharing("there is no memory for it", error)
        return HostRanks(rank, np.empty(num_bytes, np.uint8).data)
    return HostRanks(rank, own.content, own)


def _log_no_sharing(what: str, error: Exception) -> None:
    logger.debug("this rank exchanges through sockets with others of its host: %s (%s)", what, error)


def _offers_by_host(payloads: Sequence[bytes]) -> list[bytes]:
    """Returns, for each rank, the encoded offers of the ranks of its host by rank; of none if it offers no memory."""
    offers = [msgspec.msgpack.decode(payload, type=MemoryOffer | None) for payload in payloads]
    by_host: dict[tuple[str, str], dict[int, MemoryOffer]] = {}
    for rank, offer in enumerate(offers):
        if offer is not None:
            by_host.setdefault((offer.presence.kernel, offer.presence.host), {})[rank] = offer
    encoded = {key: msgspec.msgpack.encode(of_host) for key, of_host in by_host.items()}
    nobody = msgspec.msgpack.encode({})
    return [nobody if each is None else encoded[each.presence.kernel, each.presence.host] for each in offers]
