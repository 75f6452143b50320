"""The end of a call: which ranks have read its last message, and the removal of its keys by the last one. Each block
of ranks counts its own, so that no rank handles a key of every other one. The messages are not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from bytecheckpoint.distributed.store_values import get_message, keys_of, put_message
from bytecheckpoint.distributed.waiting import CallStore

ABANDONED = "abandoned"
"""The key of a call that ended because a rank did not come, so that this rank can tell when it comes later."""
HAS_FAILURE = "failed"
"""The key that is set once a rank other than the coordinator has failed."""
NUM_FAILURES = "failures"
"""The key that counts the ranks other than the coordinator that have failed."""
MAX_BLOCK_RANKS = 64
"""The ranks of a block that have left are the bits of one number of the store."""

_NUM_BLOCKS = "left"
"""The key that counts the blocks all of whose ranks have left; the coordinator counts as one if it leaves first."""
_ALL_LEFT = "left/all"
"""The key that is set when all but the coordinator have left."""
_NUM_LISTS = "left/lists"
"""The key that counts the lists of keys that ranks, also failed ones, have left for the last rank to remove."""
_ALL_LEFT_S = 5.0
_POLL_S = 0.02


class Departures:
    """Counts, in the store, the ranks that have left a call."""

    def __init__(self, call: CallStore, num_ranks: int, block_ranks: int) -> None:
        self._call = call
        self._num_ranks = num_ranks
        self._block_ranks = block_ranks
        self._leaders = [leader for leader in range(0, num_ranks, block_ranks) if self._members(leader)]

    def leave(self, rank: int, *, block_keys: Sequence[str] = (), call_keys: Sequence[str] = ()) -> None:
        """Counts a rank, which is not the coordinator, as gone. The last rank of its block to go removes the keys
        `block_keys`, and the last of all the keys `call_keys`: other ranks may read them until then.
        """
        leader = rank - rank % self._block_ranks
        if block_keys:
            put_message(self._call.store, _list_key(leader), msgspec.msgpack.encode(list(block_keys)))
        if call_keys:
            self._hand_over(call_keys)
        if self._call.store.add(_mask_key(leader), _bit(rank - leader)) != self._mask(leader):
            return
        if len(self._leaders) > 1 and self._call.is_set(_list_key(leader)):
            self._call.remove(*self._listed(_list_key(leader)))
        num_blocks = self._call.store.add(_NUM_BLOCKS, 1)
        if num_blocks == len(self._leaders):
            self._call.store.set(_ALL_LEFT, "")
        elif num_blocks > len(self._leaders):
            self._remove_all()

    def leave_for(self, ranks: Collection[int]) -> None:
        """Counts dead ranks as gone, unless they had left before."""
        for rank in ranks:
            leader = rank - rank % self._block_ranks
            if not self._call.store.add(_mask_key(leader), 0) & _bit(rank - leader):
                self.leave(rank)

    def end(
        self,
        keys: Sequence[str],
        limit_s: float,
        *,
        missing: Collection[int],
        has_failed: bool,
        look: Callable[[], object] | None = None,
    ) -> bool:
        """Waits, as the coordinator and for at most `limit_s`, until all but the `missing` ranks have left. If none is
        missing or late, removes `keys` and the keys of the call, and returns True; else returns False, and the caller
        has to call `end_first`. `has_failed` says that the call has failed: more keys are left then. `look` is as for
        CallStore.wait, and not called if ranks are missing.
        """
        if missing:
            self._wait_for_others(limit_s, missing)
        elif self._call.wait(_ALL_LEFT, limit_s, look=look, is_own=True):
            if has_failed or self._call.is_set(_NUM_LISTS):
                self._hand_over(keys)
                self._remove_all()
            else:
                self._call.remove(*keys, *self._counters())
            return True
        return False

    def end_first(self, keys: Sequence[str] = ()) -> None:
        """Counts the coordinator as gone before ranks that are late. These can still read the last message; the last of
        them removes `keys` and the keys of the call. If all have left meanwhile, this rank removes them.
        """
        self._hand_over(keys)
        if self._call.store.add(_NUM_BLOCKS, 1) > len(self._leaders):
            self._call.wait(_ALL_LEFT, _ALL_LEFT_S)  # which the last rank sets, or is about to
            self._remove_all()

    def _wait_for_others(self, limit_s: float, missing: Collection[int]) -> None:
        deadline = time.monotonic() + limit_s
        while not all(map(self._is_empty_but_for(missing), self._leaders)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _is_empty_but_for(self, missing: Collection[int]) -> Callable[[int], bool]:
        """Returns a test of a leader: whether all ranks of its block have left, but for the missing ones."""

        def is_empty(leader: int) -> bool:
            late = [_bit(rank - leader) for rank in self._members(leader) if rank in missing]
            return self._call.store.add(_mask_key(leader), 0) | sum(late) == self._mask(leader)

        return is_empty

    def _members(self, leader: int) -> range:
        """Returns the ranks of a block without the coordinator."""
        return range(max(leader, 1), min(leader + self._block_ranks, self._num_ranks))

    def _mask(self, leader: int) -> int:
        return sum(_bit(rank - leader) for rank in self._members(leader))

    def _hand_over(self, keys: Sequence[str]) -> None:
        """Leaves a list of keys for the last rank to remove."""
        number = self._call.store.add(_NUM_LISTS, 1)
        put_message(self._call.store, _handed_key(number), msgspec.msgpack.encode(list(keys)))

    def _listed(self, key: str) -> list[str]:
        """Returns the keys in the list that was left under `key`, and the keys that hold the list itself."""
        message = get_message(self._call.store, key)
        return [*msgspec.msgpack.decode(message, type=list[str]), *keys_of(key, message)]

    def _counters(self) -> list[str]:
        return [*map(_mask_key, self._leaders), _NUM_BLOCKS, _ALL_LEFT]

    def _remove_all(self) -> None:
        """Removes all that is left of a call: the errors, the keys that ranks have handed over, and the counters."""
        # A rank that died after it had counted what it was about to put has not put it: reading that would block.
        for key in map(failure_key, range(1, self._call.store.add(NUM_FAILURES, 0) + 1)):
            if self._call.is_set(key):
                self._call.remove(*keys_of(key, get_message(self._call.store, key)))
        for key in map(_handed_key, range(1, self._call.store.add(_NUM_LISTS, 0) + 1)):
            if self._call.is_set(key):
                self._call.remove(*self._listed(key))
        self._call.remove(HAS_FAILURE, NUM_FAILURES, ABANDONED, _NUM_LISTS, *self._counters())


def failure_key(number: int) -> str:
    """Returns the key of an error; `number` counts ranks in the order in which they failed, from 1."""
    return f"failed/{number}"


def _bit(index: int) -> int:
    """Returns the number that has only this bit, as a signed 64-bit integer: a store counts in these."""
    return 1 << index if index < MAX_BLOCK_RANKS - 1 else -(1 << index)


def _mask_key(leader: int) -> str:
    return f"left/{leader}"


def _list_key(leader: int) -> str:
    return f"left/block-{leader}"


def _handed_key(number: int) -> str:
    return f"left/list-{number}"
