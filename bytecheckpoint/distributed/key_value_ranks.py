"""Messages between the ranks of a process group.

They travel through the key-value store of the group, never through its collectives: a store needs no device, can be
used by the background thread of a save while the training thread runs collectives of its own, works after
`destroy_process_group`, and shows the coordinator which rank is missing. The content of messages is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import Store, TCPStore

from bytecheckpoint.distributed.departures import ABANDONED, HAS_FAILURE, NUM_FAILURES, Departures, failure_key
from bytecheckpoint.distributed.failures import decode_failure, encode_failure, merge_errors
from bytecheckpoint.distributed.store_limits import run_with_timeout, store_lost
from bytecheckpoint.distributed.store_values import get_message, get_messages, keys_of, put_message
from bytecheckpoint.distributed.waiting import CallStore, base_of
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError

T = TypeVar("T")

COORDINATOR = 0
"""The rank that plans and commits."""

MAX_GRACE_S = 5.0
"""Time that a rank waits for the coordinator longer than the coordinator for it, so that the verdict arrives; at most
the timeout itself."""
_CLOSE_S = 5.0
"""Time that the coordinator waits for others to read its last message; at most the timeout."""
_STORE_GRACE_S = 4.0
"""Time that an operation of the store may take beyond its longest wait; entering the call may take 2 of it."""
_SMALL_BYTES = 1 << 10
"""Longest message to the coordinator that may stay in the store until the call is over."""


class RankFailedError(Exception):
    """Another rank failed. Carries the error that all are to raise; it is final on ranks other than the coordinator."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


_OWN, _SHARED, _FAILURE = b"+", b"=", b"-"
"""First byte of a message from the coordinator: for one rank; the same for all ranks; a rank has failed."""
_END_OF_CALL = b"\0"
"""Ends the name of the call, with which the first message of each rank begins."""


class GroupRanks:
    """The ranks of a process group. Messages go up (rank to coordinator) and down, each under a numbered key.

    Groups of more than `block_ranks` are divided into blocks of so many consecutive ranks, mostly those of a host. The
    first rank of each, its leader, puts the messages of its block together, so that no rank handles one of every other.

    Nobody polls for a message. Those that go up are counted in the store, and the last of them rings a bell: it sets
    the key for which the reader waits. Failures ring it too.

    Each rank counts itself as gone when it has read the last message, of success or failure. The coordinator, whose
    process may hold the store, stays until all are gone, and removes the keys of the call. If some are late, the last
    rank to go removes them.
    """

    def __init__(
        self,
        enter: Callable[[], CallStore],
        rank: int,
        global_ranks: Sequence[int],
        timeout_s: float,
        *,
        block_ranks: int,
        call: str,
    ) -> None:
        """`enter` returns the store of this call; it is called with the first message, when waits have a limit. `call`
        is the public function that was called, which has to be the same on all ranks.
        """
        self._call = call
        self.rank = rank
        self.global_ranks = global_ranks
        self.num_ranks = len(global_ranks)
        self._enter = enter
        self._entered: CallStore | None = None
        self._block_ranks = block_ranks
        self._leaders = range(0, len(global_ranks), block_ranks)
        self._leader = rank - rank % block_ranks
        self._has_blocks = len(self._leaders) > 1
        self._timeout_s = timeout_s
        self._reply_timeout_s = timeout_s + min(timeout_s, MAX_GRACE_S)
        self._num_up = 0
        self._num_down = 0
        self._left: list[str] = []
        """Keys to remove when the call is over."""
        self._of_block: list[str] = []
        """Keys that all ranks of the block read, for the last of them to remove."""
        self._num_read = 0
        """So many of them, in the order in which they were put, nobody reads any more."""
        self._large: list[str] = []
        """Keys that their reader removes, unless the call fails before."""
        self._has_given_up = False
        self._is_store_lost = False
        self._has_failed = False
        """This rank has failed, or on the coordinator any."""

    @property
    def _at(self) -> CallStore:
        if self._entered is None:
            self._entered = self._enter()
        return self._entered

    @property
    def _store(self) -> Store:
        return self._at.store

    @property
    def _departures(self) -> Departures:
        return Departures(self._at, self.num_ranks, self._block_ranks)

    @property
    def rendezvous_host(self) -> str | None:
        store = base_of(self._store)
        return store.host if isinstance(store, TCPStore) else None

    def enter(self) -> None:
        try:
            self._entered = self._entered or self._enter()
        except CheckpointError:  # a signal handler's
            raise
        except (TimeoutError, RuntimeError) as error:
            self._is_store_lost = True
            raise store_lost(error) from error

    def gather(self, payload: bytes) -> list[bytes]:
        return self._use_store(lambda: self._gather(payload))

    def broadcast(self, payload: bytes) -> bytes:
        return self._use_store(lambda: self._broadcast(payload))

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        return self._use_store(lambda: self._scatter(payloads))

    def reduce_scatter(self, payload: bytes, reduce: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        if self.rank == COORDINATOR:
            return self.scatter(reduce(self.gather(payload)))
        if self.rank == self._leader and self._has_blocks:  # waits twice, for its block and for the answer
            self.gather(payload)
            return self._use_store(self._receive_down)
        return self._use_store(lambda: self._gather_and_receive(payload))

    def barrier(self) -> None:
        self.reduce_scatter(b"", lambda payloads: payloads)

    def fail(self, error: CheckpointError) -> CheckpointError:
        if self._is_store_lost:
            return error
        try:
            return self._use_store(lambda: self._fail(error))
        except CheckpointError:
            return error  # no rank can be reached, and the own error says more

    def close(self) -> None:
        with suppress(CheckpointError):  # the work is done and known to be; only keys may stay behind
            self._use_store(self._end if self.rank == COORDINATOR else self._leave)

    def _gather(self, payload: bytes) -> list[bytes]:
        number, self._num_up = self._num_up, self._num_up + 1
        if number == 0:
            payload = self._call.encode() + _END_OF_CALL + payload
        if self.rank != COORDINATOR:
            if self.rank == self._leader:
                self._forward_block(number, payload)
            else:
                self._send_up(number, _up_key(number, self.rank), payload, reader=self._leader)
            return []
        if not self._await_arrivals(number, self._timeout_s) and (absent := self._find_absent(number)):
            raise self._missing(absent)
        if self._at.is_set(HAS_FAILURE):  # also of a rank that sent its message and then gave up on this one
            raise RankFailedError(merge_errors(self._failures()))
        members = [_up_key(number, rank) for rank in self._members(COORDINATOR)]
        messages = self._take([*members, *(_block_key(number, leader) for leader in self._leaders[1:])])
        of_blocks = [msgspec.msgpack.decode(message, type=list[bytes]) for message in messages[len(members) :]]
        gathered = [payload, *messages[: len(members)], *chain.from_iterable(of_blocks)]
        return self._check_call(gathered) if number == 0 else gathered

    def _send_up(self, number: int, key: str, message: bytes, *, reader: int) -> None:
        """Puts a message for the reader, and rings its bell if this was the last one."""
        keys = put_message(self._store, key, message)
        # Training waits for the answer: a small message may stay until the end of the call.
        is_small = len(message) <= _SMALL_BYTES
        self._left += keys if is_small else []
        self._large += [] if is_small else keys
        num_senders = self._num_senders(reader)
        if num_senders > 1 and self._store.add(_arrivals_key(number, reader), 1) < num_senders:
            return
        self._put(_bell_key(number, reader), b"")
        self._left += [_arrivals_key(number, reader)] if num_senders > 1 else []

    def _take(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the messages, and removes those that are not small."""
        messages = get_messages(self._store, keys)
        for key, message in zip(keys, messages, strict=True):
            if len(message) > _SMALL_BYTES:
                self._at.remove(*keys_of(key, message))
        return messages

    def _await_arrivals(self, number: int, limit_s: float) -> bool:
        """Returns True when the bell of this reader rings; then all messages for it are there, or a rank has failed."""
        if not self._num_senders(self.rank):
            return True
        return self._at.wait(_bell_key(number, self.rank), limit_s, is_own=True)

    def _num_senders(self, reader: int) -> int:
        of_blocks = len(self._leaders) - 1 if reader == COORDINATOR else 0
        return len(self._members(reader)) + of_blocks

    def _check_call(self, messages: Sequence[bytes]) -> list[bytes]:
        """Returns the first messages of all ranks without the names of their calls. Raises CheckpointMismatchError
        (conflict) if these differ.
        """
        parts = [message.partition(_END_OF_CALL) for message in messages]
        for rank, (call, _, _) in enumerate(parts):
            if call.decode() != self._call:
                odd, first = self.global_ranks[rank], self.global_ranks[COORDINATOR]
                raise CheckpointMismatchError(
                    f"rank {odd} called {call.decode()} while rank {first} called {self._call}; nothing was "
                    "done: all ranks of a process group have to make the same calls in the same order",
                    kind="conflict",
                )
        return [payload for _, _, payload in parts]

    def _gather_and_receive(self, payload: bytes) -> bytes:
        self._gather(payload)
        return self._receive_down()

    def _members(self, leader: int) -> range:
        """Returns the ranks of a block without its leader."""
        return range(leader + 1, min(leader + self._block_ranks, self.num_ranks))

    def _forward_block(self, number: int, payload: bytes) -> None:
        """Forwards the messages of the block, as its leader. Does nothing if a member is missing or a rank has failed:
        the coordinator sees that for itself, and sends one verdict to all.
        """
        self._put(_up_key(number, self.rank), b"")  # to be found there, if a member is missing
        # The coordinator may begin to wait later.
        if not self._await_arrivals(number, self._reply_timeout_s):
            return
        # Before this message has come no other is sent down but a verdict.
        if any(map(self._at.is_set, (HAS_FAILURE, _down_key(self._num_down, "all")))):
            return
        payloads = [payload, *self._take([_up_key(number, rank) for rank in self._members(self.rank)])]
        message = msgspec.msgpack.encode(payloads)
        self._send_up(number, _block_key(number, self.rank), message, reader=COORDINATOR)

    def _find_absent(self, number: int) -> list[int]:
        """Returns the ranks whose message the coordinator has waited for in vain."""
        silent = [leader for leader in self._leaders[1:] if not self._at.is_set(_block_key(number, leader))]
        suspects = [rank for leader in [COORDINATOR, *silent] for rank in (leader, *self._members(leader))]
        absent = [rank for rank in suspects[1:] if not self._at.is_set(_up_key(number, rank))]
        absent = [rank for rank in absent if not self._at.is_set(_block_key(number, rank - rank % self._block_ranks))]
        # A leader may have been lost with the messages of its block.
        return absent or [leader for leader in silent if not self._at.is_set(_block_key(number, leader))]

    def _broadcast(self, payload: bytes) -> bytes:
        if self.rank != COORDINATOR:
            return self._receive_down()
        self._send_down(_SHARED + payload)
        return payload

    def _scatter(self, payloads: Sequence[bytes]) -> bytes:
        if self.rank != COORDINATOR:
            return self._receive_down()
        if len(set(payloads)) == 1:
            return self._broadcast(payloads[COORDINATOR])
        for leader in self._leaders if self._has_blocks else ():
            of_block = list(payloads[leader : leader + self._block_ranks])
            keys = put_message(self._store, _down_key(self._num_down, _block(leader)), msgspec.msgpack.encode(of_block))
            (self._left if leader == COORDINATOR else self._large).extend(keys)
        for rank in () if self._has_blocks else range(1, self.num_ranks):
            self._put(_down_key(self._num_down, str(rank)), payloads[rank])
        self._send_down(_OWN)
        return payloads[COORDINATOR]

    def _fail(self, error: CheckpointError) -> CheckpointError:
        if self.rank != COORDINATOR:
            return self._report_failure(error)
        self._has_failed = True
        if error.kind == "rank_missing" and self._at.is_set(HAS_FAILURE):
            error = merge_errors([error, *self._failures()])
        self._send_down(_FAILURE + encode_failure(error))
        for leader in self._leaders[1:]:  # which may wait for a rank of their blocks
            self._ring(leader)
        if error.kind == "rank_missing":
            put_message(self._store, ABANDONED, b"")  # stays for those who come late
        self._end(missing=error.ranks if error.kind == "rank_missing" else ())
        return error

    def _report_failure(self, error: CheckpointError) -> CheckpointError:
        """Reports the error to the coordinator, and returns the one that it says all are to raise."""
        self._has_failed = True
        number = self._store.add(NUM_FAILURES, 1)
        put_message(self._store, failure_key(number), _FAILURE + encode_failure(error))
        put_message(self._store, HAS_FAILURE, b"")
        for reader in {self._leader, COORDINATOR} - {self.rank}:
            self._ring(reader)
        try:
            while not self._has_given_up:  # messages that were under way come first
                self._receive_down()
        except RankFailedError as verdict:
            return verdict.error
        self._leave(all_failed=True)
        return error

    def _ring(self, reader: int) -> None:
        """Rings the bell of a reader that waits for this message of this rank, or still for the last one."""
        for number in {max(self._num_up - 1, 0), self._num_up}:
            self._put(_bell_key(number, reader), b"")

    def _leave(self, *, all_failed: bool = False) -> None:
        """Removes the own keys that nobody reads any more and counts this rank, not the coordinator, as gone."""
        is_safe = not (self._has_failed or (all_failed and self._has_blocks))  # else a leader may be about to read them
        num_read = self._num_read if is_safe else 0
        self._at.remove(*self._left[:num_read])
        of_call = [*self._left[num_read:], *self._large, *(self._last_arrivals() if all_failed else [])]
        self._departures.leave(self.rank, of_block=self._of_block, of_call=of_call)

    def _end(self, missing: Sequence[int] = ()) -> None:
        """Leaves the call as the coordinator; `missing` are global ranks."""
        names = zip(range(self.num_ranks), self.global_ranks, strict=True)
        absent = {rank for rank, name in names if name in missing}
        limit_s = min(_CLOSE_S, self._timeout_s)
        left = [*self._left, *([*self._large, *self._last_arrivals()] if self._has_failed else [])]
        self._departures.end(left, limit_s, missing=absent, has_failed=self._has_failed)

    def _last_arrivals(self) -> list[str]:
        """Returns the counters for this reader of messages whose last one may never come."""
        return [_arrivals_key(number, self.rank) for number in (max(self._num_up - 1, 0), self._num_up)]

    def _send_down(self, message: bytes) -> None:
        self._put(_down_key(self._num_down, "all"), message)
        self._num_down += 1

    def _receive_down(self) -> bytes:
        number = self._num_down
        key = _down_key(number, "all")
        if not self._at.wait(key, self._reply_timeout_s):
            self._has_given_up = True
            put_message(self._store, ABANDONED, b"")
            raise self._missing([COORDINATOR], ", or waits for another rank that is")
        self._num_down += 1
        message = get_message(self._store, key)
        self._num_read = len(self._left)
        if message[:1] == _FAILURE:
            self._leave(all_failed=True)
            raise RankFailedError(decode_failure(message))
        self._large.clear()
        if message[:1] == _SHARED:
            return message[1:]
        if not self._has_blocks:
            return get_message(self._store, _down_key(number, str(self.rank)))
        of_block = get_message(self._store, key := _down_key(number, _block(self._leader)))
        self._of_block += keys_of(key, of_block) if self.rank == self._leader else []
        return msgspec.msgpack.decode(of_block, type=list[bytes])[self.rank - self._leader]

    def _failures(self) -> list[CheckpointError]:
        keys = map(failure_key, range(1, self._store.add(NUM_FAILURES, 0) + 1))
        return [decode_failure(get_message(self._store, key)) for key in keys if self._at.is_set(key)]

    def _put(self, key: str, message: bytes) -> None:
        self._left += put_message(self._store, key, message)

    def _missing(self, ranks: Sequence[int], hint: str = "") -> CheckpointError:
        global_ranks = tuple(self.global_ranks[rank] for rank in ranks)
        return CheckpointError(
            f"{shown_ranks(global_ranks)} did not answer within {self._timeout_s:g} s: dead, stuck, or did not make "
            f"this call{hint}. Look at its log; raise options.timeout_s if it is only slow",
            kind="rank_missing",
            ranks=global_ranks,
        )

    def _use_store(self, do: Callable[[], T]) -> T:
        """Runs it within a limit of time. Raises CheckpointError (rank_missing) if the store is gone or silent."""
        try:
            return run_with_timeout(self._reply_timeout_s + _STORE_GRACE_S, do)
        except CheckpointError:
            raise
        except (TimeoutError, RuntimeError) as error:
            self._is_store_lost = True
            raise store_lost(error) from error


def _up_key(number: int, rank: int) -> str:
    return f"up/{number}/{rank}"


def _block_key(number: int, leader: int) -> str:
    return f"up/{number}/{_block(leader)}"


def _arrivals_key(number: int, reader: int) -> str:
    return f"up/{number}/arrivals-{reader}"


def _bell_key(number: int, reader: int) -> str:
    return f"up/{number}/bell-{reader}"


def _down_key(number: int, reader: str) -> str:
    return f"down/{number}/{reader}"


def _block(leader: int) -> str:
    return f"block-{leader}"


def shown_ranks(global_ranks: Sequence[int]) -> str:
    """Names the ranks in an error."""
    return f"rank {global_ranks[0]}" if len(global_ranks) == 1 else f"ranks {list(global_ranks)}"
