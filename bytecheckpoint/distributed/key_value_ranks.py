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
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bytecheckpoint.distributed.failures import decode_failure, encode_failure, merge_errors
from bytecheckpoint.distributed.polling import poll, run_with_timeout, store_lost
from bytecheckpoint.distributed.store_values import get_message, get_messages, keys_of, put_message
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
_POLLS_PER_FAILURE_CHECK = 4
"""Polls for messages between two polls for failures."""


class RankFailedError(Exception):
    """Another rank failed. Carries the error that all are to raise; it is final on ranks other than the coordinator."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


ABANDONED = "abandoned"
"""The key of a call that ended because a rank did not come, so that this rank can tell when it does."""

_OWN, _SHARED, _FAILURE = b"+", b"=", b"-"
"""First byte of a message from the coordinator: for one rank; the same for all ranks; a rank has failed."""
_END_OF_CALL = b"\0"
"""Ends the name of the call, with which the first message of each rank begins."""
_HAS_FAILURE = "failed"
"""The key that is set once any rank has failed."""
_DEPARTED = "departed"
"""The key that counts the ranks that have closed the call."""
_REMAINING = "remains"
"""The key of the list of keys that the last rank to close removes if that is not the coordinator."""


class GroupRanks:
    """The ranks of a process group. Messages go up (rank to coordinator) and down, each under a numbered key.

    Groups of more than `block_ranks` are divided into blocks of so many consecutive ranks, mostly those of a host. The
    first rank of each, its leader, puts the messages of its block together, so that no rank handles one of every other.

    Each rank puts an ack when it has read the last message, of success or failure. The coordinator, whose process may
    hold the store, stays until then, and removes the keys of the call. If an ack is late, the last rank to put its own
    removes them.
    """

    def __init__(
        self,
        enter: Callable[[], Store],
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
        self._entered: Store | None = None
        self._block_ranks = block_ranks
        self._leaders = range(0, len(global_ranks), block_ranks)
        self._leader = rank - rank % block_ranks
        self._has_blocks = len(self._leaders) > 1
        self._timeout_s = timeout_s
        self._reply_timeout_s = timeout_s + min(timeout_s, MAX_GRACE_S)
        self._num_polls = 0
        self._num_up = 0
        self._num_down = 0
        self._left: list[str] = []
        """Keys to remove when the call is over."""
        self._has_given_up = False
        self._is_store_lost = False
        self._has_failed = False
        """Known on the coordinator."""

    @property
    def _store(self) -> Store:
        if self._entered is None:
            self._entered = self._enter()
        return self._entered

    @property
    def rendezvous_host(self) -> str | None:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
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
            self._use_store(self._close)

    def _gather(self, payload: bytes) -> list[bytes]:
        number, self._num_up = self._num_up, self._num_up + 1
        if number == 0:
            payload = self._call.encode() + _END_OF_CALL + payload
        if self.rank != COORDINATOR:
            self._put(self._up_key(number, self.rank), payload)
            if self.rank == self._leader:
                self._forward_block(number, payload)
            return []
        members = [self._up_key(number, rank) for rank in self._members(COORDINATOR)]
        blocks = [self._block_key(number, leader) for leader in self._leaders[1:]]
        keys = members + blocks
        if not poll(lambda: self._arrived(keys), self._timeout_s) and (absent := self._find_absent(number)):
            raise self._missing(absent)
        messages = get_messages(self._store, keys)
        for key, message in zip(keys, messages, strict=True):
            if len(message) > _SMALL_BYTES:
                self._remove(keys_of(key, message))
            else:  # training waits for the answer, and a small message may stay until the end of the call
                self._left.append(key)
        of_blocks = [msgspec.msgpack.decode(message, type=list[bytes]) for message in messages[len(members) :]]
        gathered = [payload, *messages[: len(members)], *chain.from_iterable(of_blocks)]
        return self._check_call(gathered) if number == 0 else gathered

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

    def _arrived(self, keys: Sequence[str]) -> bool:
        has_arrived = self._is_set(*keys)
        self._num_polls += 1
        is_due = has_arrived or self._num_polls % _POLLS_PER_FAILURE_CHECK == 0
        if is_due and self._is_set(_HAS_FAILURE):  # also of a rank that sent its message and then gave up on this one
            raise RankFailedError(merge_errors(self._failures()))
        return has_arrived

    def _members(self, leader: int) -> range:
        """Returns the ranks of a block without its leader."""
        return range(leader + 1, min(leader + self._block_ranks, self.num_ranks))

    def _forward_block(self, number: int, payload: bytes) -> None:
        """Forwards the messages of the block, as its leader. Does nothing if a member is missing or has failed: the
        coordinator sees that for itself, and sends one verdict to all.
        """
        keys = [self._up_key(number, rank) for rank in self._members(self.rank)]
        # Before this message has come no other is sent down but a verdict. The coordinator may begin to wait later.
        verdict = self._down_key(self._num_down, "all")
        over = (_HAS_FAILURE, verdict)
        if not poll(lambda: self._is_set(*keys) or any(map(self._is_set, over)), self._reply_timeout_s):
            return
        if not any(map(self._is_set, over)):
            payloads = [payload, *get_messages(self._store, keys)]
            self._put(self._block_key(number, self.rank), msgspec.msgpack.encode(payloads))
            for key, message in zip([self._up_key(number, self.rank), *keys], payloads, strict=True):
                self._remove(keys_of(key, message))

    def _find_absent(self, number: int) -> list[int]:
        """Returns the ranks whose message the coordinator has waited for in vain."""
        silent = [leader for leader in self._leaders[1:] if not self._is_set(self._block_key(number, leader))]
        suspects = [rank for leader in [COORDINATOR, *silent] for rank in (leader, *self._members(leader))]
        absent = [rank for rank in suspects[1:] if not self._is_set(self._up_key(number, rank))]
        absent = [rank for rank in absent if not self._is_set(self._block_key(number, rank - rank % self._block_ranks))]
        # A leader may have been lost with the messages of its block.
        return absent or [leader for leader in silent if not self._is_set(self._block_key(number, leader))]

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
            self._put(self._down_key(self._num_down, _block(leader)), msgspec.msgpack.encode(of_block))
        for rank in () if self._has_blocks else range(1, self.num_ranks):
            self._put(self._down_key(self._num_down, str(rank)), payloads[rank])
        self._send_down(_OWN)
        return payloads[COORDINATOR]

    def _fail(self, error: CheckpointError) -> CheckpointError:
        if self.rank == COORDINATOR:
            self._has_failed = True
            if error.kind == "rank_missing" and self._is_set(_HAS_FAILURE):
                error = merge_errors([error, *self._failures()])
            self._send_down(_FAILURE + encode_failure(error))
            if error.kind == "rank_missing":
                put_message(self._store, ABANDONED, b"")  # stays for those who come late
            self._close(missing=error.ranks if error.kind == "rank_missing" else ())
            return error
        self._put(self._failure_key(self.rank), _FAILURE + encode_failure(error))
        self._put(_HAS_FAILURE, b"")
        try:
            while not self._has_given_up:  # messages that were under way come first
                self._receive_down()
        except RankFailedError as verdict:
            return verdict.error
        return error

    def _close(self, missing: Sequence[int] = (), left: Sequence[str] = ()) -> None:
        """Puts an ack, or on the coordinator waits for those of all but the missing (global) ranks. The last rank then
        removes what was left in the store.
        """
        acks = [self._ack_key(rank) for rank in range(1, self.num_ranks)]
        if self.rank != COORDINATOR:
            # Counted first: when the coordinator has all acks, no rank will create the counter again.
            if self._store.add(_DEPARTED, 1) == self.num_ranks:
                self._remove_remaining(left, [key for key in acks if key != self._ack_key(self.rank)])
            else:
                self._put(self._ack_key(self.rank), msgspec.msgpack.encode(left) if left else b"")
            return
        awaited = [key for key, name in zip(acks, self.global_ranks[1:], strict=True) if name not in missing]
        has_all = poll(lambda: self._is_set(*awaited), min(_CLOSE_S, self._timeout_s)) and not missing
        if not has_all:  # the last message stays, for ranks that are late
            self._put(_REMAINING, msgspec.msgpack.encode((self._has_failed, self._left)))
            has_all = self._store.add(_DEPARTED, 1) == self.num_ranks
        if has_all:
            self._remove_all(self._left, acks, has_failed=self._has_failed)

    def _remove_remaining(self, left: Sequence[str], acks: Sequence[str]) -> None:
        """Removes the keys of a call whose coordinator did not wait for this rank, the last one."""
        remains = get_message(self._store, _REMAINING)
        has_failed, keys = msgspec.msgpack.decode(remains, type=tuple[bool, list[str]])
        self._remove_all([*keys, *left, *keys_of(_REMAINING, remains)], acks, has_failed=has_failed)

    def _remove_all(self, keys: Sequence[str], acks: Sequence[str], *, has_failed: bool) -> None:
        """Waits for the acks of ranks that were counted, and removes these keys and those that the acks list."""
        poll(lambda: self._is_set(*acks), _CLOSE_S)
        said = get_messages(self._store, acks) if has_failed and self._is_set(*acks) else []
        lists = [msgspec.msgpack.decode(message, type=list[str]) for message in said if message]
        self._remove([*acks, *keys, *chain.from_iterable(lists), _HAS_FAILURE, _DEPARTED])

    def _send_down(self, message: bytes) -> None:
        self._put(self._down_key(self._num_down, "all"), message)
        self._num_down += 1

    def _receive_down(self) -> bytes:
        number = self._num_down
        key = self._down_key(number, "all")
        if not poll(lambda: self._is_set(key), self._reply_timeout_s):
            self._has_given_up = True
            put_message(self._store, ABANDONED, b"")
            raise self._missing([COORDINATOR], ", or waits for another rank that is")
        self._num_down += 1
        message = get_message(self._store, key)
        if message[:1] == _FAILURE:
            if not self._has_blocks:  # else a leader may be about to read it
                self._remove(self._left)  # the coordinator will not read them any more
            self._close(left=self._left if self._has_blocks else ())
            raise RankFailedError(decode_failure(message))
        if message[:1] == _SHARED:
            return message[1:]
        if not self._has_blocks:
            return get_message(self._store, self._down_key(number, str(self.rank)))
        of_block = get_message(self._store, self._down_key(number, _block(self._leader)))
        return msgspec.msgpack.decode(of_block, type=list[bytes])[self.rank - self._leader]

    def _failures(self) -> list[CheckpointError]:
        keys = [self._failure_key(rank) for rank in range(1, self.num_ranks)]
        return [decode_failure(get_message(self._store, key)) for key in keys if self._is_set(key)]

    def _put(self, key: str, message: bytes) -> None:
        self._left += put_message(self._store, key, message)

    def _is_set(self, *keys: str) -> bool:
        return not keys or bool(self._store.check(list(keys)))

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

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

    @staticmethod
    def _up_key(number: int, rank: int) -> str:
        return f"up/{number}/{rank}"

    @staticmethod
    def _block_key(number: int, leader: int) -> str:
        return f"up/{number}/{_block(leader)}"

    @staticmethod
    def _down_key(number: int, reader: str) -> str:
        return f"down/{number}/{reader}"

    @staticmethod
    def _failure_key(rank: int) -> str:
        return f"failed/{rank}"

    @staticmethod
    def _ack_key(rank: int) -> str:
        return f"ack/{rank}"


def _block(leader: int) -> str:
    return f"block-{leader}"


def shown_ranks(global_ranks: Sequence[int]) -> str:
    """Names the ranks in an error."""
    return f"rank {global_ranks[0]}" if len(global_ranks) == 1 else f"ranks {list(global_ranks)}"
