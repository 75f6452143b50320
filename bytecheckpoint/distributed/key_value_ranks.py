"""Messages between the ranks of a process group.

They travel through the key-value store of the group, never through its collectives: a store needs no device, can be
used by the background thread of a save while the training thread runs collectives of its own, works after
`destroy_process_group`, and shows the coordinator which rank is missing. The content of messages is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TypeVar

import msgspec
from torch._C._distributed_c10d import Store

from bytecheckpoint.distributed.attendance import ENDED, Attendance, check_call, check_calls, named_call
from bytecheckpoint.distributed.blocks import (
    COORDINATOR,
    RankBlocks,
    arrivals_key,
    bell_key,
    block_key,
    block_name,
    down_key,
    up_key,
)
from bytecheckpoint.distributed.departures import ABANDONED, HAS_FAILURE, NUM_FAILURES, Departures, failure_key
from bytecheckpoint.distributed.failures import decode_failure, encode_failure, merge_errors
from bytecheckpoint.distributed.liveness.peer_watch import PeerWatch, host_of
from bytecheckpoint.distributed.store_limits import run_with_timeout, store_lost
from bytecheckpoint.distributed.store_values import get_message, get_messages, keys_of, put_message
from bytecheckpoint.distributed.waiting import CallStore
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError

T = TypeVar("T")

MAX_GRACE_S = 5.0
"""Time that a rank goes on waiting for the coordinator after the timeout, so that the coordinator, whose wait ends with
the timeout, can send the verdict; no longer than the timeout itself."""
_CLOSE_S = 5.0
"""Time that the coordinator waits for others to read its last message; at most the timeout."""
_STORE_GRACE_S = 4.0
"""Time that an operation of the store may take beyond its longest wait; entering the call may take 2 s of it."""
_SMALL_BYTES = 1 << 10
"""Longest message to the coordinator or to a leader that may stay in the store until the call is over."""


class RankFailedError(Exception):
    """Another rank failed. Carries the error for all ranks to raise; the coordinator must first pass it to `fail`."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


_OWN, _SHARED, _FAILURE, _LEFT = b"+", b"=", b"-", b"."
"""First byte of a message from the coordinator: for one rank; the same for all; a rank has failed; the call is over."""


class GroupRanks:
    """The ranks of a process group. Messages go up (rank to coordinator) and down, each under a numbered key.

    Groups of more than `block_ranks` are divided into blocks of so many consecutive ranks, mostly those of a host. The
    first rank of each, its leader, joins the messages of its block, so that no rank reads a message of every other one.

    No rank polls for a message, unless the store cannot block. Messages that go up are counted in the store, and the
    last of them rings a bell: it sets the key for which the reader waits. Failures ring it too.

    Each rank counts itself as gone when it has read the last message, of success or failure. The coordinator, whose
    process may hold the store, stays until all are gone, for 5 s at most, and removes the keys of the call. If some
    ranks are late, the last one to go removes them.
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
        watch: PeerWatch | None,
        has_called: Callable[[int], bool] | None = None,
    ) -> None:
        """`enter` returns the store of this call, and may wait for it up to a limit of its own; it is called when the
        store is first needed. `call` names the public function that was called, which has to be the same on all ranks.
        Without a `watch` a rank that died is noticed only when `timeout_s` has passed. `has_called`: see Attendance.
        """
        self._call_name = call
        self.rank = rank
        self.global_ranks = global_ranks
        self.num_ranks = len(global_ranks)
        self._enter = enter
        self._entered: CallStore | None = None
        self._blocks = RankBlocks(rank, self.num_ranks, block_ranks)
        self._attendance = Attendance(
            self._blocks, global_ranks, timeout_s, watch, call=call, has_called=has_called, put=self._put
        )
        self._timeout_s = timeout_s
        self._reply_timeout_s = timeout_s + min(timeout_s, MAX_GRACE_S)
        self._num_up = 0
        self._num_down = 0
        self._keys: list[str] = []
        """Keys to remove when the call is over."""
        self._block_keys: list[str] = []
        """Keys that all ranks of the block read, for the last of them to remove."""
        self._num_read = 0
        """Number of keys, from the start of `_keys`, that no rank reads any more."""
        self._large_keys: list[str] = []
        """Keys that their reader removes, unless the call fails before."""
        self._may_get_verdict = True
        """False if the coordinator sends nothing more to this rank: after a failure, it must not wait for a verdict."""
        self._is_store_lost = False
        self._has_failed = False
        """True if this rank has failed or, on the coordinator, any rank."""

    @property
    def _call_store(self) -> CallStore:
        if self._entered is None:
            self._entered = self._enter()
            self._attendance.introduce()
        return self._entered

    @property
    def _store(self) -> Store:
        return self._call_store.store

    @property
    def _departures(self) -> Departures:
        return Departures(self._call_store, self.num_ranks, self._blocks.block_ranks)

    @property
    def rendezvous_host(self) -> str | None:
        return host_of(self._store)

    def enter(self) -> None:
        try:
            _ = self._call_store
        except CheckpointError:  # raised by a signal handler
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
        if self._blocks.is_leader and self._blocks.are_several:  # waits twice, for its block and for the answer
            self.gather(payload)
            return self._use_store(self._receive_down)
        return self._use_store(lambda: (self._gather(payload), self._receive_down())[1])

    def barrier(self) -> None:
        self.reduce_scatter(b"", lambda payloads: payloads)

    def has_failed(self) -> bool:
        call, numbers, leave_for = self._call_store, (self._num_up, self._num_down), self._departures.leave_for
        return self._use_store(lambda: self._attendance.has_failed(call, *numbers, leave_for))

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
            payload = named_call(self._call_name, payload)
        if self.rank != COORDINATOR:
            if self._blocks.is_leader:
                self._forward_block(number, payload)
            else:
                self._send_up(number, up_key(number, self.rank), payload, reader=self._blocks.leader)
            return []
        has_rung = self._await_arrivals(number, self._timeout_s)
        if not has_rung and (absent := self._attendance.find_absent(self._call_store, number)):
            raise self._attendance.missing_error(absent)
        if self._call_store.is_set(HAS_FAILURE):  # also of a rank that sent its message and then gave up on this one
            raise RankFailedError(merge_errors(self._failures()))
        self._attendance.raise_found(self._departures.leave_for)
        members = [up_key(number, rank) for rank in self._blocks.members(COORDINATOR)]
        messages = self._take([*members, *(block_key(number, leader) for leader in self._blocks.leaders[1:])])
        of_blocks = [msgspec.msgpack.decode(message, type=list[bytes]) for message in messages[len(members) :]]
        gathered = [payload, *messages[: len(members)], *chain.from_iterable(of_blocks)]
        return check_calls(self._call_name, gathered, self.global_ranks) if number == 0 else gathered

    def _send_up(self, number: int, key: str, message: bytes, *, reader: int) -> None:
        """Puts a message for the reader, and rings its bell if this was the last one."""
        keys = put_message(self._store, key, message)
        # Training waits for the answer: a small message may stay until the end of the call.
        (self._keys if len(message) <= _SMALL_BYTES else self._large_keys).extend(keys)
        num_senders = len(self._blocks.senders(reader))
        if num_senders > 1 and self._store.add(arrivals_key(number, reader), 1) < num_senders:
            return
        self._put(bell_key(number, reader), b"")
        self._keys += [arrivals_key(number, reader)] if num_senders > 1 else []

    def _take(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the messages, and removes those of more than `_SMALL_BYTES` from the store."""
        messages = get_messages(self._store, keys)
        for key, message in zip(keys, messages, strict=True):
            if len(message) > _SMALL_BYTES:
                self._call_store.remove(*keys_of(key, message))
        return messages

    def _await_arrivals(self, number: int, limit_s: float) -> bool:
        """Returns True when the bell of this reader rings: all messages are there, or a rank has failed or ended.
        Returns True at once if no rank sends to this one, and False after `limit_s`.
        """
        if not self._blocks.senders(self.rank):
            return True
        has_rung = self._call_store.wait(
            bell_key(number, self.rank), limit_s, is_own=True, look=lambda: self._ring_if_sender_ended(number)
        )
        if has_rung and not self._attendance.ended:
            self._attendance.meet(number)
        return has_rung

    def _ring_if_sender_ended(self, number: int) -> None:
        """Rings this rank's own bell if a sender will not send its message: its process has ended, or calls another."""
        if self._attendance.look_for_senders(self._call_store, number):
            self._put(bell_key(number, self.rank), b"")

    def _forward_block(self, number: int, payload: bytes) -> None:
        """Forwards the messages of the block, as its leader. Raises `ended_error` if a member has ended. Forwards
        nothing if one is missing or a rank has failed: the coordinator sees that itself, and sends one verdict to all.
        """
        self._put(up_key(number, self.rank), b"")  # so that this rank does not count as missing if a member is
        # The coordinator may begin to wait later.
        if not self._await_arrivals(number, self._reply_timeout_s):
            return
        # Until this message has arrived, the coordinator sends down nothing but a verdict.
        if any(map(self._call_store.is_set, (HAS_FAILURE, down_key(self._num_down, "all")))):
            return
        self._attendance.raise_found(self._departures.leave_for)
        payloads = [payload, *self._take([up_key(number, rank) for rank in self._blocks.members(self.rank)])]
        message = msgspec.msgpack.encode(payloads)
        self._send_up(number, block_key(number, self.rank), message, reader=COORDINATOR)

    def _broadcast(self, payload: bytes) -> bytes:
        if self.rank != COORDINATOR:
            return self._receive_down()
        self._send_down(_SHARED, payload)
        return payload

    def _scatter(self, payloads: Sequence[bytes]) -> bytes:
        if self.rank != COORDINATOR:
            return self._receive_down()
        if len(set(payloads)) == 1:
            return self._broadcast(payloads[COORDINATOR])
        for leader in self._blocks.leaders if self._blocks.are_several else ():
            message = msgspec.msgpack.encode(list(payloads[leader : leader + self._blocks.block_ranks]))
            keys = put_message(self._store, down_key(self._num_down, block_name(leader)), message)
            (self._keys if leader == COORDINATOR else self._large_keys).extend(keys)
        for rank in () if self._blocks.are_several else range(1, self.num_ranks):
            self._put(down_key(self._num_down, str(rank)), payloads[rank])
        self._send_down(_OWN)
        return payloads[COORDINATOR]

    def _fail(self, error: CheckpointError) -> CheckpointError:
        if self.rank != COORDINATOR:
            return self._report_failure(error)
        self._has_failed = True
        if error.kind == "rank_missing" and self._call_store.is_set(HAS_FAILURE):
            error = merge_errors([error, *self._failures()])
        self._send_down(_FAILURE, encode_failure(error))
        for leader in self._blocks.leaders[1:]:  # which may wait for a rank of their blocks
            self._ring(leader)
        if error.kind == "rank_missing":
            put_message(self._store, ABANDONED, b"")  # stays for ranks that come late
        self._end(missing=error.ranks if error.kind == "rank_missing" else ())
        return error

    def _report_failure(self, error: CheckpointError) -> CheckpointError:
        """Reports an error to the coordinator; waits for and returns the one that all ranks raise, else `error`."""
        self._has_failed = True
        number = self._store.add(NUM_FAILURES, 1)
        put_message(self._store, failure_key(number), _FAILURE + encode_failure(error))
        put_message(self._store, HAS_FAILURE, b"")
        for reader in {self._blocks.leader, COORDINATOR} - {self.rank}:
            self._ring(reader)
        try:
            with suppress(CheckpointMismatchError):  # the coordinator made another call
                while self._may_get_verdict:  # messages that were under way come first
                    self._receive_down()
        except RankFailedError as verdict:
            return verdict.error
        self._leave(all_failed=True)
        return error

    def _ring(self, reader: int) -> None:
        """Rings both bells at which a reader may wait: that of the last messages and that of the next ones."""
        for number in {max(self._num_up - 1, 0), self._num_up}:
            self._put(bell_key(number, reader), b"")

    def _leave(self, *, all_failed: bool = False) -> None:
        """Counts this rank, not the coordinator, as gone. Removes its keys, except what the last rank is to remove."""
        # A leader may be about to read them.
        num_read = 0 if self._has_failed or (all_failed and self._blocks.are_several) else self._num_read
        self._call_store.remove(*self._keys[:num_read])
        call_keys = [*self._keys[num_read:], *self._large_keys, *(self._last_arrivals() if all_failed else [])]
        self._departures.leave(self.rank, block_keys=self._block_keys, call_keys=call_keys)

    def _end(self, missing: Sequence[int] = ()) -> None:
        """Waits, as the coordinator, for others to leave, then leaves the call; `missing` are global ranks."""
        names = zip(range(self.num_ranks), self.global_ranks, strict=True)
        absent = {rank for rank, name in names if name in missing}
        limit_s = min(_CLOSE_S, self._timeout_s)
        keys = [*self._keys, *([*self._large_keys, *self._last_arrivals()] if self._has_failed else [])]
        departures, find = self._departures, partial(self._attendance.ended_among, self._blocks.senders(COORDINATOR))
        has_failed, look = self._has_failed, lambda: departures.leave_for(find())
        if not departures.end(keys, limit_s, missing=absent, has_failed=has_failed, look=look):
            # For a rank that fails after the last message: it would wait for a verdict until its time limit.
            keys += put_message(self._store, down_key(self._num_down, "all"), _LEFT)
            departures.end_first(keys)

    def _last_arrivals(self) -> list[str]:
        """Returns the keys that count messages for this reader, which no rank removes if the last one never comes."""
        return [arrivals_key(number, self.rank) for number in (max(self._num_up - 1, 0), self._num_up)]

    def _send_down(self, kind: bytes, payload: bytes = b"") -> None:
        # A rank that makes another call would take the payload for that of its own.
        payload = payload if self._num_down or kind == _FAILURE else named_call(self._call_name, payload)
        self._put(down_key(self._num_down, "all"), kind + payload)
        self._num_down += 1

    def _receive_down(self) -> bytes:
        number = self._num_down
        key = down_key(number, "all")
        is_there = self._call_store.wait(key, self._reply_timeout_s, look=self._look_for_coordinator)
        message = get_message(self._store, key) if is_there else b""
        if not is_there or message == ENDED:
            self._may_get_verdict = False
            put_message(self._store, ABANDONED, b"")
            if is_there:
                raise self._attendance.ended_error([COORDINATOR])
            raise self._attendance.missing_error([COORDINATOR], ", or waits for another rank that is")
        self._attendance.meet(number)
        self._num_down += 1
        self._num_read = len(self._keys)
        if message[:1] == _FAILURE:
            self._leave(all_failed=True)
            raise RankFailedError(decode_failure(message))
        if message == _LEFT:  # only a rank that fails after the last message reads on: see `_end`
            self._may_get_verdict = False
            return b""
        self._large_keys.clear()
        payload = message[1:]
        if number == 0:
            self._may_get_verdict = False  # of another call comes no verdict
            payload = check_call(self._call_name, payload, self.global_ranks, rank=self.rank)
            self._may_get_verdict = True
        if message[:1] == _SHARED:
            return payload
        if not self._blocks.are_several:
            return get_message(self._store, down_key(number, str(self.rank)))
        block_message = get_message(self._store, key := down_key(number, block_name(self._blocks.leader)))
        self._block_keys += keys_of(key, block_message) if self._blocks.is_leader else []
        return msgspec.msgpack.decode(block_message, type=list[bytes])[self.rank - self._blocks.leader]

    def _look_for_coordinator(self) -> None:
        is_first = not (self._num_up or self._num_down or self._has_failed)
        self._attendance.look_for_coordinator(self._call_store, self._num_down, is_first=is_first)

    def _failures(self) -> list[CheckpointError]:
        keys = map(failure_key, range(1, self._store.add(NUM_FAILURES, 0) + 1))
        return [decode_failure(get_message(self._store, key)) for key in keys if self._call_store.is_set(key)]

    def _put(self, key: str, message: bytes) -> None:
        self._keys += put_message(self._store, key, message)

    def _use_store(self, do: Callable[[], T]) -> T:
        """Runs `do` within a time limit. Raises CheckpointError (rank_missing) if the store is gone or silent."""
        try:
            return run_with_timeout(self._reply_timeout_s + _STORE_GRACE_S, do)
        except CheckpointError:
            raise
        except (TimeoutError, RuntimeError) as error:
            self._is_store_lost = True
            raise store_lost(error) from error
