"""Watches the processes of other ranks: on this host by process id and start time, on others by an open socket. So a
process that has ended is known at once, and one that is slow, stopped or holds the GIL is not taken for dead.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import Store, TCPStore

from bytecheckpoint.distributed.blocks import COORDINATOR, RankBlocks
from bytecheckpoint.distributed.liveness.host_links import Address, HostLinks
from bytecheckpoint.distributed.store_values import get_messages
from bytecheckpoint.distributed.waiting import base_of

_LAST_MESSAGES_S = 0.1
"""Time that the last messages of a process may be on their way."""

logger = logging.getLogger("bytecheckpoint")


class Presence(msgspec.Struct, frozen=True, array_like=True):
    """Identifies the process of a rank."""

    kernel: str
    """Names the kernel and its space of process ids; empty where that is unknown."""
    host: str
    pid: int
    started: int
    """Start time in ticks of the kernel, because process ids are used again; 0 if unknown."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_presence() -> Presence:
    """Returns the presence of this process."""
    kernel = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        kernel = f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    return Presence(kernel, socket.gethostname(), os.getpid(), _start_time(os.getpid()) or 0)


def _start_time(pid: int) -> int | None:
    """Returns the start time in ticks; None if there is no such process, or it has ended and was not reaped."""
    try:
        # Bytes, because the name of the process, which comes before the ")", may be no text.
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in {b"Z", b"X"} else int(fields[18])


class LocalProcesses:
    """The processes of ranks on this host. Notices when they end."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        """Rank by process descriptor. A descriptor refers to one process, even if its id is given to another later."""
        self._unopened: dict[int, Presence] = {}
        """By rank: processes without a descriptor, or that had ended when it was opened."""

    def add(self, rank: int, presence: Presence) -> None:
        self._unopened[rank] = presence
        with suppress(OSError, AttributeError):  # it has ended, or the system has no such descriptors or none left
            descriptor = os.pidfd_open(presence.pid)
            self._poll.register(descriptor, select.POLLIN)
            self._watched[descriptor] = rank
            if self._is_running(presence):
                del self._unopened[rank]

    def ended(self) -> set[int]:
        watched = self._watched  # the watch may be closed meanwhile
        by_descriptor = {watched[descriptor] for descriptor, event in self._poll.poll(0) if event & select.POLLIN}
        return by_descriptor | {rank for rank, process in self._unopened.items() if not self._is_running(process)}

    @staticmethod
    def _is_running(presence: Presence) -> bool:
        return _start_time(presence.pid) == presence.started

    def close(self) -> None:
        """Ends the watch: from now on no process is known to have ended."""
        watched, self._watched, self._poll, self._unopened = self._watched, {}, select.poll(), {}
        for descriptor in watched:
            os.close(descriptor)


class PeerWatch:
    """Watches the ranks of a group with which this rank exchanges messages. A rank watches its leader, a leader the
    members of its block and the coordinator, and the coordinator all leaders.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, block_ranks: int) -> None:
        blocks = RankBlocks(rank, num_ranks, block_ranks)
        self._below = blocks.senders(rank) if blocks.is_leader else []
        self._above = None if rank == COORDINATOR else COORDINATOR if blocks.is_leader else blocks.leader
        self._store, self._rank = store, rank
        self._own: Presence | None = None
        self._known: dict[int, Presence] = {}
        self._local = LocalProcesses()
        self._links: HostLinks | None = None
        self._seen_ended: dict[int, float] = {}
        self._reported: set[int] = set()
        self._lock = threading.RLock()  # a save in the background may wait while the caller loads

    @property
    def _watched(self) -> Sequence[int]:
        return self._below if self._above is None else [self._above, *self._below]

    def ended_of_watched(self) -> list[int]:
        """Returns what `ended` returns for the ranks that this one watches."""
        return self.ended(self._watched)

    def introduce(self) -> None:
        """Puts the presence of this process into the key-value store of the group, once."""
        with self._lock:
            if self._own is not None:
                return
            self._own = own_presence()
            self._store.set(_presence_key(self._rank), msgspec.msgpack.encode(self._own))  # type: ignore[arg-type]

    def meet(self) -> None:
        """Begins to watch, and links to watched ranks elsewhere. Call it when those ranks have called `introduce`."""
        with self._lock:
            self._meet()

    def _meet(self) -> None:
        self._find(self._watched)
        if self._links is None:
            self._links = HostLinks(self._rank, host_of(self._store))
        remote = [rank for rank, presence in self._known.items() if not self._is_local(presence)]
        if not self._links.address and set(remote) & set(self._below):
            address = self._links.listen()
            self._store.set(_address_key(self._rank), msgspec.msgpack.encode(address))  # type: ignore[arg-type]
        above = self._above
        if above in remote and self._links.needs(above) and self._store.check([_address_key(above)]):
            address = msgspec.msgpack.decode(self._store.get(_address_key(above)), type=Address)
            self._links.connect(above, address)

    def ended(self, ranks: Collection[int]) -> list[int]:
        """Returns those of `ranks` found ended more than `_LAST_MESSAGES_S` ago: their last messages have arrived.
        Warns once of each rank whose host does not answer.
        """
        with self._lock:
            self._find(ranks)
            found = self._local.ended() | (self._links.ended() if self._links is not None else set())
            now = time.monotonic()
            self._seen_ended = {rank: self._seen_ended.get(rank, now) for rank in found}
            self._warn_of_unreachable()
            return [rank for rank in ranks if now > self._seen_ended.get(rank, now) + _LAST_MESSAGES_S]

    def unreachable(self) -> Mapping[int, float]:
        """Returns the ranks whose host does not answer, with the seconds for which it has not."""
        return self._links.unreachable() if self._links is not None else {}

    def describe(self, rank: int) -> str:
        return str(self._known[rank]) if rank in self._known else "its process"

    def close(self, *, is_forked: bool = False) -> None:
        """Ends the watch; `is_forked` in a child, whose copies of links must not outlive the parent's."""
        self._local.close()
        if self._links is not None:
            (self._links.forget if is_forked else self._links.close)()

    def _find(self, ranks: Iterable[int]) -> None:
        """Reads the presences of ranks that are not known yet and have called `introduce`."""
        new = [rank for rank in ranks if rank not in self._known]
        if not new:
            return
        if not self._store.check([*map(_presence_key, new)]):
            new = [rank for rank in new if self._store.check([_presence_key(rank)])]
        for rank, message in zip(new, get_messages(self._store, [*map(_presence_key, new)]), strict=True):
            self._known[rank] = presence = msgspec.msgpack.decode(message, type=Presence)
            if self._is_local(presence):
                self._local.add(rank, presence)

    def _is_local(self, presence: Presence) -> bool:
        own = self._own  # copies of one virtual machine have one kernel's id, and different names
        return own is not None and bool(own.kernel) and (own.kernel, own.host) == (presence.kernel, presence.host)

    def _warn_of_unreachable(self) -> None:
        for rank, seconds in self.unreachable().items():
            if rank not in self._reported:
                self._reported.add(rank)
                logger.warning(
                    "rank %d of the group (%s) is not reachable: its host has not answered for %.0f s. The call waits "
                    "on, and fails at its timeout_s",
                    rank,
                    self.describe(rank),
                    seconds,
                )


def host_of(store: Store) -> str | None:
    """Returns the host of a TCPStore, as all ranks reach it; None for any other kind of store."""
    base = base_of(store)
    return base.host if isinstance(base, TCPStore) else None


def _presence_key(rank: int) -> str:
    return f"bytecheckpoint/presence/{rank}"


def _address_key(rank: int) -> str:
    return f"bytecheckpoint/links/{rank}"
