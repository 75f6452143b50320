"""Reads one pass over some streams in their order. The order follows from positions alone, so that a pass goes on
anywhere. It knows nothing of what a trainer took.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypeVar

import torch.utils.data._utils.worker as torch_worker

from bytecheckpoint.data.sources import END, PassEnd, SourceCursor, carries_over, cursor_of, read_next
from bytecheckpoint.data.stream_position import SourceSnapshot, StreamPosition

_Read = TypeVar("_Read")
_MAX_EMPTY_EPOCHS = 1_000


class Change(NamedTuple):
    """The place of a stream after a batch, without what has not changed: it goes from a worker with each batch."""

    stream_id: str
    epoch: int
    position: int
    samples: int
    snapshot: SourceSnapshot | EllipsisType | None
    """An ellipsis stands for no change."""

    def applied_to(self, before: StreamPosition, turn: int) -> StreamPosition:
        """Returns the new place of a stream that stood at `before`."""
        snapshot = before.snapshot if isinstance(self.snapshot, EllipsisType) else self.snapshot
        return StreamPosition(self.epoch, self.position, self.samples, turn, snapshot)


def pass_epoch(positions: Iterable[StreamPosition]) -> int:
    """Returns the epoch of a pass over streams at these positions: the lowest of their epochs, 0 for no stream."""
    return min((position.epoch for position in positions), default=0)


def blocks_in_turn(
    every_id: Sequence[str], positions: Mapping[str, StreamPosition], num_workers: int, *, endless: bool
) -> list[list[str]]:
    """Returns a list of streams for each worker: contiguous blocks of all sorted ids, of which only those in
    `positions` are listed.

    Blocks of all ids, and not of a rank's own, give the batches of one turn the same streams on any number of ranks.
    Worker 0 gets the block whose last batch is the oldest, so that after a load the batches go on in the same order.
    """
    bounds = [len(every_id) * worker // num_workers for worker in range(num_workers + 1)]
    blocks = [
        [stream_id for stream_id in every_id[start:end] if stream_id in positions]
        for start, end in itertools.pairwise(bounds)
    ]
    epoch = None if endless else pass_epoch(positions.values())
    return sorted(blocks, key=lambda ids: max((_last_turn(positions[each], epoch) for each in ids), default=0))


def _last_turn(position: StreamPosition, epoch: int | None) -> int:
    """Returns the number of the last batch with a sample of the stream in the pass over `epoch`; None means any pass.
    Returns 0 if no batch had one, or if the stream has gone on to later passes: its position tells nothing then.
    """
    ended_in_it = position.place == ((epoch or 0) + 1, 0) and position.samples > 0
    is_in_it = position.epoch == epoch and position.position > 0
    return position.turn if epoch is None or ended_in_it or is_in_it else 0


class StreamReader:
    """Yields `(id, sample)` of the streams of one epoch, or of all epochs from there on.

    The stream at the lowest position comes next, of several the one with the first id. What was read since the last
    `take_changes` is read again after an error, so that a batch comes whole or not at all.
    """

    def __init__(
        self,
        ids: Sequence[str],
        positions: dict[str, StreamPosition],
        sources: Mapping[str, Any],
        cursors: dict[str, SourceCursor],
        *,
        epoch: int | None,
        snapshot_every: int,
        num_requests: Callable[[], int],
    ) -> None:
        """`positions` is brought up to date with each sample. With `epoch` None the reader reads all epochs on.
        `num_requests` returns how often a snapshot of all sources was requested.
        """
        self._ids, self._positions, self._sources, self._cursors = ids, positions, sources, cursors
        self._is_endless = epoch is None
        self._epoch = pass_epoch(positions[each] for each in ids) if epoch is None else epoch
        self._snapshot_every, self._num_requests = snapshot_every, num_requests
        self._num_answered = num_requests()
        self._before: dict[str, StreamPosition] = {}
        """Places at the last `take_changes` of the streams that moved since."""
        self._queue = self._new_queue()
        """Heap of position and id of the streams to be read in this epoch."""
        self._num_empty_epochs = 0

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> tuple[str, Any]:
        try:
            return self._next()
        except StopIteration:
            raise
        except BaseException:
            self.roll_back()
            raise

    def _next(self) -> tuple[str, Any]:
        while self._queue or self._begin_next_epoch():
            position, stream_id = self._queue[0]
            sample = self._read(stream_id)
            if self._positions[stream_id].epoch == self._epoch:
                heapq.heapreplace(self._queue, (position + 1, stream_id))
            else:
                heapq.heappop(self._queue)
            if sample is not END:
                self._num_empty_epochs = 0
                return stream_id, sample
        raise StopIteration

    def take_changes(self) -> list[Change]:
        """Returns the places of the streams that moved since the last call; takes the snapshots that are requested."""
        if self._num_requests() != self._num_answered:
            self._num_answered = self._num_requests()
            self.capture_all()
        changes = [_change(each, before, self._positions[each]) for each, before in self._before.items()]
        self._before = {}
        return changes

    def capture_all(self) -> None:
        """Takes a snapshot of each source that was read from and has a state."""
        for stream_id in self._ids:
            position = self._positions[stream_id]
            cursor = self._cursors.get(stream_id)
            if cursor is not None and (snapshot := cursor.capture(position)) is not None:
                self._move(stream_id, replace(position, snapshot=snapshot))

    def discount_dropped(self) -> None:
        """Takes samples that were read since the last `take_changes`, and dropped, off the counts `samples`; epochs and
        positions stay.
        """
        for stream_id, before in self._before.items():
            self._positions[stream_id] = replace(self._positions[stream_id], samples=before.samples)

    def roll_back(self) -> None:
        """Goes back to the places of the last `take_changes`."""
        self._positions.update(self._before)
        self._before = {}
        self._epoch = pass_epoch(self._positions[each] for each in self._ids) if self._is_endless else self._epoch
        self._queue = self._new_queue()

    def _new_queue(self) -> list[tuple[int, str]]:
        queue = [
            (self._positions[each].position, each) for each in self._ids if self._positions[each].epoch == self._epoch
        ]
        heapq.heapify(queue)
        return queue

    def _begin_next_epoch(self) -> bool:
        """Begins an epoch of the streams that are furthest behind, if endless. Returns False if not endless, if there
        are no streams, or if too many epochs gave no sample.
        """
        # Streams without samples would go through epochs forever; packed rows may take some epochs to fill.
        if not self._is_endless or self._num_empty_epochs > _MAX_EMPTY_EPOCHS:
            return False
        self._epoch = pass_epoch(self._positions[each] for each in self._ids)
        self._queue = self._new_queue()
        # Only epochs of all streams count: those that are epochs behind the others are read alone first.
        self._num_empty_epochs += len(self._queue) == len(self._ids)
        return bool(self._queue)

    def _read(self, stream_id: str) -> Any | Literal[PassEnd.END]:
        cursor = self._cursors.get(stream_id)
        if cursor is None:
            cursor = self._cursors[stream_id] = cursor_of(self._sources[stream_id])
        at = self._positions[stream_id]
        try:
            sample, after = _without_worker_info(lambda: read_next(self._sources[stream_id], cursor, at))
        except StopIteration as error:  # it would end the pass, and the rest of the epoch would be lost
            raise RuntimeError(f"the source of stream {stream_id!r} raised StopIteration") from error
        self._move(stream_id, self._with_snapshot(stream_id, cursor, after))
        return sample

    def _with_snapshot(self, stream_id: str, cursor: SourceCursor, at: StreamPosition) -> StreamPosition:
        source = self._sources[stream_id]
        since = at.samples - (0 if at.snapshot is None else at.snapshot.samples)
        is_due = since >= max(self._snapshot_every, getattr(source, "snapshot_interval", 0))
        if at.position == 0:
            is_due = carries_over(source)
        snapshot = cursor.capture(at) if is_due else None
        return at if snapshot is None else replace(at, snapshot=snapshot)

    def _move(self, stream_id: str, to: StreamPosition) -> None:
        self._before.setdefault(stream_id, self._positions[stream_id])
        self._positions[stream_id] = to


def _change(stream_id: str, before: StreamPosition, after: StreamPosition) -> Change:
    snapshot = ... if after.snapshot is before.snapshot else after.snapshot
    return Change(stream_id, after.epoch, after.position, after.samples, snapshot)


def _without_worker_info(read: Callable[[], _Read]) -> _Read:
    """Returns the result of `read`, called as if outside of a worker process: datasets that find themselves in one give
    each worker a part of what they have, and a stream would lose the rest. There is no public way to say that the data
    is divided already.
    """
    info = torch_worker._worker_info
    if info is None:
        return read()
    torch_worker._worker_info = None
    try:
        return read()
    finally:
        torch_worker._worker_info = info
