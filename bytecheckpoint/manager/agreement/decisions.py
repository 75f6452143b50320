"""Decisions of rank 0 that all ranks receive, and the clock by which they are made. Knows no policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch.distributed as dist

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, check_same, join_ranks, together
from bytecheckpoint.saving.in_flight import wait_until_numbered
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.store import Store

T = TypeVar("T")


class Decisions:
    """Decisions about one root, by the ranks of one group."""

    def __init__(self, process_group: dist.ProcessGroup | None, root: str, *, timeout_s: float) -> None:
        self._group = process_group
        self._timeout_s = timeout_s
        self._root = root

    def decide_together(self, doing: str, decide: Callable[[], T], kind: type[T]) -> T:
        """Calls `decide` on rank 0 alone; returns its answer, or raises its error, on every rank. All ranks call this
        together.
        """
        with self._call(doing) as ranks:
            message = msgspec.msgpack.encode(decide()) if ranks.rank == COORDINATOR else b""
            return msgspec.msgpack.decode(ranks.broadcast(message), type=kind)

    def decide_alike(self, doing: str, find: Callable[[], str], decide: Callable[[], T], kind: type[T]) -> T:
        """Calls `find` on every rank, which has to return the same text on all, then does as `decide_together`. Raises
        CheckpointMismatchError (conflict) for different texts, and on all ranks the error of `find` on one.
        """
        with self._call(doing) as ranks:

            def answer(found: list[bytes]) -> list[bytes]:
                check_same("open", [text.decode() for text in found], ranks.global_ranks)
                return [msgspec.msgpack.encode(decide())] * len(found)

            return msgspec.msgpack.decode(ranks.reduce_scatter(find().encode(), answer), type=kind)

    def agree(self, doing: str, act: Callable[[], T], kind: type[T]) -> T:
        """Calls `act` on every rank, and returns on all of them what it returns on rank 0; an error of one rank is
        raised on all. All ranks call this together.
        """
        with self._call(doing) as ranks:
            own = msgspec.msgpack.encode(act())
            answer = ranks.reduce_scatter(own, lambda answers: [answers[COORDINATOR]] * len(answers))
            return msgspec.msgpack.decode(answer, type=kind)

    def do(self, doing: str, act: Callable[[], object]) -> None:
        """Calls `act` on every rank; if it fails on one rank, all raise its error. All ranks call this together."""
        with self._call(doing) as ranks:
            act()
            ranks.barrier()

    @contextmanager
    def _call(self, doing: str) -> Iterator[Ranks]:
        """Yields the connected ranks, and raises an error of the body on all of them, as `together` does. A rank whose
        `doing` differs is refused; no path belongs in `doing`: it may differ between ranks or hold credentials.
        """
        wait_until_numbered()
        about = Subject(self._root, None, is_save=False, call=f"CheckpointManager ({doing})")
        ranks = join_ranks(self._group, self._timeout_s, about=about)
        with together(ranks, doing, about=about):
            yield ranks
        ranks.close()


class StorageClock:
    """The clock of a storage: one time for hosts whose own clocks differ. It never runs backwards or stands still,
    even if the clock of this host is set to another time.
    """

    def __init__(self, offset_s: float) -> None:
        self._offset_s = time.time() + offset_s - time.monotonic()

    def keep_after(self, time_s: float) -> None:
        """Moves the clock forward to `time_s` if it is behind: `now` never returns an earlier time from then on. Does
        so even for a time that is in the future because another clock was wrong.
        """
        self._offset_s = max(self._offset_s, time_s - time.monotonic())

    def now(self) -> float:
        """Returns seconds since 1970."""
        return self._offset_s + time.monotonic()


def offset_of(store: Store) -> float:
    """Returns the seconds by which the clock of the storage is ahead of this host's; 0.0 if that clock is unknown."""
    now = clock_of(store)
    return 0.0 if now is None else now - time.time()
