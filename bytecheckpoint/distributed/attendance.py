"""Finds out which ranks take part in a call: whose messages have come, whose processes have ended, and which ranks make
another call. Makes the errors about such ranks. Of a message it reads only the name of the call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from bytecheckpoint.distributed.blocks import COORDINATOR, RankBlocks, block_key, down_key, up_key
from bytecheckpoint.distributed.departures import HAS_FAILURE
from bytecheckpoint.distributed.failures import shown_ranks
from bytecheckpoint.distributed.liveness.peer_watch import PeerWatch
from bytecheckpoint.distributed.store_values import get_message
from bytecheckpoint.distributed.waiting import CallStore
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError

logger = logging.getLogger("bytecheckpoint")

LATE_S = 30.0
"""Time of waiting after which the log names the ranks that have not made a call. Steps of ranks may differ by seconds.
"""
_WITNESS = 1
"""The rank whose log names the coordinator, for which all others wait."""
ENDED = b"!"
"""Message for all ranks that the coordinator's process has ended, which another rank sends in its place."""
_END_OF_CALL = b"\0"
"""Ends the name of the call, with which the first message of each rank begins."""
_GATHERS, _LISTENS = "gathers", "listens"
"""Keys for the name of a call, and a rank. The coordinator has waited for first messages, or another rank for that of
the coordinator. Either would wait for ever in different calls; each puts its own key and then looks for the other."""


class Attendance:
    """The ranks for which this one waits."""

    def __init__(
        self,
        blocks: RankBlocks,
        global_ranks: Sequence[int],
        timeout_s: float,
        watch: PeerWatch | None,
        *,
        call: str,
        has_called: Callable[[int], bool] | None,
        put: Callable[[str, bytes], object],
    ) -> None:
        """`call` is the name of the call, and `has_called` tells of a rank of the group if it has made it; without that
        the log names no rank that is late. Without a `watch` a process that has ended is noticed only at the time
        limit. `put` puts a message into the store of the call.
        """
        self._blocks = blocks
        self._global_ranks = global_ranks
        self._timeout_s = timeout_s
        self._watch = watch
        self._call_name = call
        self._has_called = has_called
        self._put = put
        self._waits_since: float | None = None
        """Time of the first look at others on the monotonic clock, not of the call: this rank may have been late."""
        self._has_looked_for_late = False
        self.ended: list[int] = []
        """Ranks without which the call cannot go on, because their processes have ended."""
        self._other_call: CheckpointMismatchError | None = None
        """The error about a rank that waits for a message in another call than the coordinator's."""
        self._has_compared = False

    def introduce(self) -> None:
        """Puts what other ranks need to watch this one into the store of the group, if there is a watch."""
        if self._watch is not None:
            self._watch.introduce()

    def meet(self, number: int) -> None:
        """Begins to watch other ranks at the first message of a call (`number` 0): their presences are in the store by
        then. Later messages change nothing.
        """
        if self._watch is not None and number == 0:
            self._watch.meet()

    def ended_among(self, ranks: Sequence[int]) -> list[int]:
        return self._watch.ended(ranks) if self._watch is not None else []

    def look_for_senders(self, call: CallStore, number: int) -> bool:
        """Returns True if `raise_found` has an error to raise: ranks have ended without sending this rank the message
        with this number, or this is the coordinator and a rank waits for it in another call. The coordinator warns once
        of ranks that have not made the call.
        """
        if number == 0 and self._blocks.rank == COORDINATOR:
            self._warn_of_late(partial(self.find_absent, call, 0))
            self._compare_with_listener(call)
        keys = {
            rank: block_key(number, rank) if rank in self._blocks.leaders else up_key(number, rank)
            for rank in self.ended_among(self._blocks.senders(self._blocks.rank))
        }
        self.ended = [rank for rank, key in keys.items() if not call.is_set(key)]
        return bool(self.ended or self._other_call)

    def raise_found(self, leave_for: Callable[[Sequence[int]], object]) -> None:
        """Raises the error that `look_for_senders` has found last, if any. If it is about ranks that have ended, first
        calls `leave_for` with them.
        """
        if self.ended:
            leave_for(self.ended)
            raise self.ended_error(self.ended)
        if self._other_call is not None:
            raise self._other_call

    def _compare_with_listener(self, call: CallStore) -> None:
        other, _, rank = self._exchange_calls(call, _GATHERS, _LISTENS).partition(_END_OF_CALL)
        if rank and other.decode() != self._call_name:
            self._other_call = _other_call(other.decode(), self._call_name, self._global_ranks, rank=int(rank))

    def _exchange_calls(self, call: CallStore, own_key: str, other_key: str) -> bytes:
        """Puts the call under its own key, unless another rank has, and returns the one under the other key; b"" if
        there is none, and after the first time.
        """
        if self._has_compared:
            return b""
        self._has_compared = True
        if not call.is_set(own_key):
            self._put(own_key, named_call(self._call_name, str(self._blocks.rank).encode()))
        return get_message(call.store, other_key) if call.is_set(other_key) else b""

    def look_for_coordinator(self, call: CallStore, number: int, *, is_first: bool) -> None:
        """Puts ENDED in place of the coordinator's message with this number if its process has ended. Only leaders and
        the ranks of the coordinator's own block watch it. One rank warns once of a coordinator that has not made the
        call.

        Raises CheckpointMismatchError (conflict) if the coordinator waits in another call, and this message would be
        the first of the call for this rank (`is_first`).
        """
        if number == 0 and self._blocks.rank == _WITNESS:
            self._warn_of_late(lambda: [COORDINATOR])
        if is_first and (message := self._exchange_calls(call, _LISTENS, _GATHERS)):
            check_call(self._call_name, message, self._global_ranks, rank=self._blocks.rank)
        watches_it = self._blocks.is_leader or self._blocks.leader == COORDINATOR
        key = down_key(number, "all")
        if watches_it and self.ended_among([COORDINATOR]) and not call.is_set(key):
            self._put(key, ENDED)

    def has_failed(
        self, call: CallStore, num_up: int, num_down: int, leave_for: Callable[[Sequence[int]], object]
    ) -> bool:
        """Returns True if the call has failed on another rank, so that the next message of the coordinator is an error.
        `num_up` and `num_down` are the numbers of the next messages up and down; this rank has exchanged some before.

        Raises as `raise_found` does if ranks that send to this one have ended.
        """
        if self._blocks.senders(self._blocks.rank) and self.look_for_senders(call, num_up):
            self.raise_found(leave_for)
        if self._blocks.rank != COORDINATOR:
            self.look_for_coordinator(call, num_down, is_first=False)
        return call.is_set(HAS_FAILURE) or call.is_set(down_key(num_down, "all"))

    def _warn_of_late(self, find_silent: Callable[[], Sequence[int]]) -> None:
        """Warns, LATE_S after the first call of this, of the silent ranks that have not made the call. A rank that has
        made it may be silent for long, because it waits for its earlier save or looks through its state.
        """
        now, has_called = time.monotonic(), self._has_called
        self._waits_since = now if self._waits_since is None else self._waits_since
        if has_called is None or self._has_looked_for_late or now - self._waits_since < LATE_S:
            return
        self._has_looked_for_late = True
        if late := [self._global_ranks[rank] for rank in find_silent() if not has_called(rank)]:
            logger.warning(
                "%s waits for %s, which did not make this call within %.0f s: all ranks of the process group have to "
                "make it. It fails after %g s (options.timeout_s)",
                self._call_name,
                shown_ranks(late),
                LATE_S,
                self._timeout_s,
            )

    def find_absent(self, call: CallStore, number: int) -> list[int]:
        """Returns the ranks that have sent no message with this number; if all have, the leaders that have not
        forwarded the messages of their blocks.
        """
        blocks = self._blocks
        silent = [leader for leader in blocks.leaders[1:] if not call.is_set(block_key(number, leader))]
        suspects = [rank for leader in [COORDINATOR, *silent] for rank in (leader, *blocks.members(leader))]
        absent = [rank for rank in suspects[1:] if not call.is_set(up_key(number, rank))]
        absent = [rank for rank in absent if not call.is_set(block_key(number, blocks.leader_of(rank)))]
        # A leader may have been lost with the messages of its block.
        return absent or [leader for leader in silent if not call.is_set(block_key(number, leader))]

    def missing_error(self, ranks: Sequence[int], hint: str = "") -> CheckpointError:
        """Returns the error (rank_missing) about these ranks of the group, which did not come in time."""
        global_ranks = tuple(self._global_ranks[rank] for rank in ranks)
        unreachable = self._watch.unreachable() if self._watch is not None else {}
        if away := [rank for rank in ranks if rank in unreachable]:
            seconds = max(unreachable[rank] for rank in away)
            hint += f" ({shown_ranks([self._global_ranks[rank] for rank in away])} not reachable for {seconds:.0f} s)"
        return CheckpointError(
            f"{shown_ranks(global_ranks)} did not answer within {self._timeout_s:g} s: dead, stuck, or did not make "
            f"this call{hint}. Look at its log; raise options.timeout_s if it is only slow",
            kind="rank_missing",
            ranks=global_ranks,
        )

    def ended_error(self, ranks: Sequence[int]) -> CheckpointError:
        """Returns the error (rank_missing) about these ranks of the group, whose processes have ended."""
        global_ranks = tuple(self._global_ranks[rank] for rank in ranks)
        processes = [self._watch.describe(rank) for rank in ranks] if self._watch is not None else []
        return CheckpointError(
            f"{shown_ranks(global_ranks)} cannot answer, because {' and '.join(processes) or 'its process'} has ended: "
            "it died, or left the job while others made this call. Look at its log, and start the job again from the "
            "last checkpoint",
            kind="rank_missing",
            ranks=global_ranks,
        )


def named_call(call: str, payload: bytes) -> bytes:
    """Returns the first message of a rank that makes this call."""
    return call.encode() + _END_OF_CALL + payload


def check_calls(call: str, messages: Sequence[bytes], global_ranks: Sequence[int]) -> list[bytes]:
    """Returns the payloads of the first messages of all ranks, without the names of their calls. Raises
    CheckpointMismatchError (conflict) if a rank has made another call than `call`, that of the coordinator.
    """
    parts = [message.partition(_END_OF_CALL) for message in messages]
    for rank, (other, _, _) in enumerate(parts):
        if other.decode() != call:
            raise _other_call(other.decode(), call, global_ranks, rank=rank)
    return [payload for _, _, payload in parts]


def check_call(call: str, message: bytes, global_ranks: Sequence[int], *, rank: int) -> bytes:
    """Returns the payload of the coordinator's first message, without the name of its call. Raises
    CheckpointMismatchError (conflict) if `rank`, which received it, has made another call.
    """
    of_coordinator, _, payload = message.partition(_END_OF_CALL)
    if of_coordinator.decode() != call:
        # The coordinator may have waited for nobody.
        raise _other_call(call, of_coordinator.decode(), global_ranks, rank=rank, outcome="this rank did nothing")
    return payload


def _other_call(
    call: str, of_coordinator: str, global_ranks: Sequence[int], *, rank: int, outcome: str = "nothing was done"
) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"rank {global_ranks[rank]} called {call} while rank {global_ranks[COORDINATOR]} called {of_coordinator}; "
        f"{outcome}: all ranks of a process group have to make the same calls in the same order",
        kind="conflict",
        ranks=(global_ranks[rank],),
    )
