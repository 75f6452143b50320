"""The ranks of one save or load. A phase in which one rank fails, fails on all of them, and a lost rank is named. The
content and the transport of messages are not known here.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from bytecheckpoint.distributed.blocks import COORDINATOR
from bytecheckpoint.distributed.departures import ABANDONED, MAX_BLOCK_RANKS, Departures
from bytecheckpoint.distributed.key_value_ranks import GroupRanks, RankFailedError
from bytecheckpoint.distributed.liveness.peer_watch import PeerWatch
from bytecheckpoint.distributed.store_limits import run_on_thread, store_lost
from bytecheckpoint.distributed.waiting import CallStore, WaitingClients
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointSaveError

__all__ = ["COORDINATOR", "RankFailedError", "Ranks", "SoleRank", "Subject", "join_ranks", "together"]


BLOCK_RANKS = MAX_BLOCK_RANKS
"""Most ranks in a block. A rank exchanges messages with about so many others, or with as many blocks as there are."""
_CATCH_UP_S = 2.0
"""Time in which a rank whose call the others gave up on looks for their next one."""
_NO_GROUP = (None, dist.GroupMember.NON_GROUP_MEMBER)
"""The default group, and what torch gives to ranks that are not in a new group."""


class Ranks(Protocol):
    """The view that one rank has of all that take part in a call. Exchanges of messages raise RankFailedError if
    another rank has failed, and CheckpointError (rank_missing) if one is lost or the store is.
    """

    rank: int
    """Within the group."""
    global_ranks: Sequence[int]
    """The global rank of each rank of the group, as error messages give it."""
    num_ranks: int

    @property
    def rendezvous_host(self) -> str | None:
        """The host of the group's store, as all ranks reach it; None if there is no store, or it is not a TCPStore."""

    def enter(self) -> None:
        """Waits until the number of this call is known; before that, the process may make no other call on this group.
        Raises CheckpointError (rank_missing) if the store is lost.
        """

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns every rank's payload by rank on the coordinator, and an empty list elsewhere."""

    def broadcast(self, payload: bytes) -> bytes:
        """Returns the coordinator's payload on every rank."""

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Returns the coordinator's payload for this rank; the `payloads` of others are ignored."""

    def reduce_scatter(self, payload: bytes, reduce: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Gathers every rank's payload on the coordinator, whose `reduce` returns one reply for each rank; returns the
        reply for this rank. The `reduce` of others is ignored. Cheaper than `gather` and then `scatter`.
        """

    def barrier(self) -> None:
        """Waits until every rank has called this."""

    def has_failed(self) -> bool:
        """Returns True if another rank has failed: the next exchange of messages raises its error. For a rank that
        waits for something else than a message; any thread may call it. Raises CheckpointError (rank_missing) if the
        process of a rank that sends its messages to this one has ended.
        """

    def fail(self, error: CheckpointError) -> CheckpointError:
        """Sends the error to the other ranks, and returns the error that every rank is to raise: that of another rank
        if that counts more, or this one.
        """

    def close(self) -> None:
        """Ends the call. The coordinator waits, for 5 s at most, until all ranks have read the last message. Raises no
        error about ranks or a store that are lost.
        """


class SoleRank:
    """A process on its own, or in a group of its own."""

    rank = COORDINATOR
    num_ranks = 1
    rendezvous_host = None

    def __init__(self, global_rank: int = 0) -> None:
        self.global_ranks: Sequence[int] = (global_rank,)

    def enter(self) -> None:
        """Does nothing."""

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def broadcast(self, payload: bytes) -> bytes:
        return payload

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        return payloads[0]

    def reduce_scatter(self, payload: bytes, reduce: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        return reduce([payload])[0]

    def barrier(self) -> None:
        """Does nothing."""

    def has_failed(self) -> bool:
        return False

    def fail(self, error: CheckpointError) -> CheckpointError:
        return error

    def close(self) -> None:
        """Does nothing."""


def join_ranks(
    process_group: dist.ProcessGroup | None, timeout_s: float, *, about: Subject, enters_later: bool = False
) -> Ranks:
    """Returns the ranks of the given group or, without one, of the default group; a SoleRank if there is no default
    group either, or the group has one rank.

    Must be called by every rank of the group, in the same order as other calls, before anything that can fail. A thread
    asks the store for the number of this call meanwhile; with `enters_later`, only once `enter` is called or the first
    message sent. Raises CheckpointMismatchError (conflict) on a process that is not in the group, and like check_group.
    """
    check_group(process_group)
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        if about.is_save:
            _warn_of_others(about.path)
        return SoleRank()
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # new_group returns something else to ranks that are not in the group
        raise CheckpointMismatchError(
            "this process is not a member of the process_group that it passes; nothing was done: call save and load on "
            "the members of the group only",
            kind="conflict",
            path=about.path,
            step=about.step,
            ranks=(dist.get_rank(),),
        )
    rank, global_ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    if len(global_ranks) == 1:
        return SoleRank(global_ranks[0])
    clients, watch = group_peers()(group)
    ask = partial(run_on_thread, lambda: _next_call(clients, rank, len(global_ranks)))
    # Now, and not with the first message: a rank that is late for that one has not missed the call.
    try:
        call = None if enters_later else ask()
    except RuntimeError as error:
        raise _located(store_lost(error), SoleRank(), about) from error

    def enter() -> CallStore:
        nonlocal call
        call = call or ask()
        return _call_store(clients, call.result(timeout_s + _CATCH_UP_S))

    def has_called(other: int) -> bool:
        """Returns True if a rank of the group has asked for the number of this call, or of a later one."""
        return call is not None and clients.store.add(_calls_key(other), 0) >= call.result(timeout_s)

    call_name = about.call or ("save" if about.is_save else "load")
    return GroupRanks(
        enter,
        rank,
        global_ranks,
        timeout_s,
        block_ranks=BLOCK_RANKS,
        call=call_name,
        watch=watch,
        has_called=has_called,
    )


def check_group(process_group: object) -> None:
    """Raises TypeError for what is neither a process group nor one of `_NO_GROUP`."""
    if not isinstance(process_group, dist.ProcessGroup) and process_group not in _NO_GROUP:
        raise TypeError(
            f"process_group takes a torch.distributed.ProcessGroup or None, not a value of type "
            f"{type(process_group).__name__}; nothing was done: of a DeviceMesh pass mesh.get_group()"
        )


class GroupPeers(NamedTuple):
    """Connections that this process keeps for a process group."""

    clients: WaitingClients
    watch: PeerWatch


@cache
def group_peers() -> Callable[[dist.ProcessGroup], GroupPeers]:
    """Returns the process's one function that gives the GroupPeers of a process group: it makes them at its first call
    for a group, or if the group's store was replaced, and keeps them for as long as the group lives.
    """
    kept: WeakKeyDictionary[dist.ProcessGroup, GroupPeers] = WeakKeyDictionary()

    def forget() -> None:  # a connection has one process at its end
        for peers in kept.values():
            peers.watch.close(is_forked=True)
        kept.clear()

    os.register_at_fork(after_in_child=forget)

    def find(group: dist.ProcessGroup) -> GroupPeers:
        store = group_store(group)
        peers = kept.get(group)
        if peers is None or peers.clients.store is not store:
            rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
            watch = PeerWatch(store, rank, num_ranks, BLOCK_RANKS)
            peers = kept[group] = GroupPeers(WaitingClients(store, num_ranks), watch)
            # Not at the end of the process, which other ranks are to see.
            finalize(group, watch.close).atexit = False
        return peers

    return find


def _warn_of_others(path: str) -> None:
    """Warns where a launcher has started several processes that do not know of one another: each would save alone."""
    num_processes = os.environ.get("WORLD_SIZE", "")
    if dist.is_available() and dist.is_torchelastic_launched() and num_processes not in {"", "1"}:
        warnings.warn(
            f"this process saves to {path} by itself, although the launcher started {num_processes}: torch.distributed "
            "is not initialized, so each of them writes a checkpoint of its own there; call "
            "torch.distributed.init_process_group() before the first save",
            stacklevel=7,
        )


def _call_store(clients: WaitingClients, call: int) -> CallStore:
    return CallStore(clients, f"bytecheckpoint/{call}")


def _next_call(clients: WaitingClients, rank: int, num_ranks: int) -> int:
    """Returns the number of the call that this rank makes, the same on all ranks. It is counted in the store.

    A rank skips calls that it has missed and the other ranks gave up on: else it would be one call behind for ever.
    """
    store = clients.store
    call = store.add(_calls_key(rank), 1)
    if rank == COORDINATOR:
        while _was_abandoned(store, call):
            _departures(clients, call, num_ranks).end_first()
            call = store.add(_calls_key(rank), 1)
        return call
    deadline = time.monotonic() + _CATCH_UP_S
    while _was_abandoned(store, call) and time.monotonic() < deadline:
        current = store.add(_calls_key(COORDINATOR), 0)
        if current > call:
            for skipped in range(call, current):
                _departures(clients, skipped, num_ranks).leave(rank)
            return store.add(_calls_key(rank), current - call)
        time.sleep(0.02)
    return call  # if it was abandoned, its verdict can still be read


def _departures(clients: WaitingClients, call: int, num_ranks: int) -> Departures:
    return Departures(_call_store(clients, call), num_ranks, BLOCK_RANKS)


def _calls_key(rank: int) -> str:
    return f"bytecheckpoint/calls/{rank}"


def _was_abandoned(store: Store, call: int) -> bool:
    return bool(store.check([f"bytecheckpoint/{call}/{ABANDONED}"]))


def group_store(group: dist.ProcessGroup) -> Store:
    """Returns the store under a process group, which torch gives no public access to."""
    store: Store = dist.distributed_c10d._get_process_group_store(group)
    return store


@contextmanager
def together(ranks: Ranks, what: str, *, about: Subject) -> Iterator[None]:
    """Surrounds a phase that every rank runs: if it fails on one, every rank raises that error when it next receives a
    message in such a block. The rank is named, unless the error is about all of them.

    An Exception that is no CheckpointError becomes one of kind `rank_failed`, chained to its cause. What is no
    Exception, such as KeyboardInterrupt, passes unchanged, and is not sent to other ranks.
    """
    try:
        yield
    except RankFailedError as failure:
        raise (ranks.fail(failure.error) if ranks.rank == COORDINATOR else failure.error) from None
    except CheckpointError as error:
        # The library's own frames say nothing to the reader of a refusal.
        cause = error.__cause__ if error.kind in _REFUSALS else error
        raise ranks.fail(_located(error, ranks, about)) from cause
    except Exception as error:
        raise ranks.fail(_wrapped(error, ranks, what, about)) from error


class Subject(NamedTuple):
    """The subject of a call, for its errors."""

    path: str
    step: int | None
    is_save: bool
    left_behind: str = ""
    """A sentence on what a failure in this phase leaves behind; empty if nothing has changed yet."""
    call: str = ""
    """The public function, if it is neither save nor load."""


_SHARED_KINDS = {
    *("conflict", "coverage", "missing_key", "unexpected_key", "shape", "dtype"),
    *("exists", "not_found", "not_committed", "replaced", "superseded", "rank_missing"),
}
"""Kinds of errors that the coordinator finds in the messages of all ranks, or in what is the same for all: its own
rank is not named."""


_REFUSALS = {*_SHARED_KINDS, "unsupported_value", "path_escape", "pickle_refused"} - {"rank_missing"}
"""Kinds of errors about the arguments of a call, or about the objects at its path: nothing has failed."""


def _located(error: CheckpointError, ranks: Ranks, about: Subject) -> CheckpointError:
    """Returns the error with the checkpoint added, and with this rank if the error names none and is not about all
    ranks. A plain CheckpointError becomes a CheckpointSaveError in a save.
    """
    cls = CheckpointSaveError if about.is_save and type(error) is CheckpointError else type(error)
    message, named_ranks = error.message, error.ranks
    is_shared = ranks.rank == COORDINATOR and error.kind in _SHARED_KINDS
    if ranks.num_ranks > 1 and not named_ranks and not is_shared:
        named_ranks = (ranks.global_ranks[ranks.rank],)
        message = f"rank {named_ranks[0]} on {socket.gethostname()}: {message}"
    step = about.step if error.step is None else error.step
    return cls(_sentences(message, about), kind=error.kind, path=error.path or about.path, step=step, ranks=named_ranks)


def _wrapped(error: Exception, ranks: Ranks, what: str, about: Subject) -> CheckpointError:
    cls = CheckpointSaveError if about.is_save else CheckpointError
    name = ranks.global_ranks[ranks.rank]
    where = f" on rank {name} ({socket.gethostname()})" if ranks.num_ranks > 1 else ""
    message = f"{what} failed{where}: {type(error).__name__}: {error}"
    return cls(_sentences(message, about), kind="rank_failed", path=about.path, step=about.step, ranks=(name,))


def _sentences(message: str, about: Subject) -> str:
    return f"{message}. {about.left_behind}" if about.left_behind else message


def merge_texts(ranks: Ranks, own: Mapping[str, str]) -> dict[str, str]:
    """Returns, on every rank, the texts of all ranks by name; of equal names, the text of the highest rank. All ranks
    must call it.
    """

    def merge(payloads: Sequence[bytes]) -> Sequence[bytes]:
        merged: dict[str, str] = {}
        for payload in payloads:
            merged |= msgspec.msgpack.decode(payload, type=dict[str, str])
        return [msgspec.msgpack.encode(merged)] * len(payloads)

    return msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(own), merge), type=dict[str, str])


def check_same(doing: str, targets: Sequence[str], global_ranks: Sequence[int]) -> None:
    """Raises CheckpointMismatchError (conflict) if the ranks do not all have the same target. `doing` is the verb for
    the error, such as `load from`.
    """
    differing = [rank for rank, target in enumerate(targets) if target != targets[COORDINATOR]]
    if differing:
        raise CheckpointMismatchError(
            f"the ranks were called to {doing} different places: rank {global_ranks[COORDINATOR]} "
            f"{targets[COORDINATOR]}, rank {global_ranks[differing[0]]} {targets[differing[0]]}; nothing was changed: "
            "pass the same to all ranks",
            kind="conflict",
            ranks=tuple(global_ranks[rank] for rank in differing),
        )
