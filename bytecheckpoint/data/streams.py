"""A fixed set of streams, dealt out to ranks and workers, as one dataset. It knows nothing of data loaders: what those
read ahead is counted in `tracked_loader`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from bytecheckpoint.data.elastic_loader import assign_streams
from bytecheckpoint.data.sources import (
    SourceCursor,
    carries_over,
    check_reaches,
    check_source,
    inexact_reason,
    is_stateful,
    source_name,
)
from bytecheckpoint.data.stream_position import SourceSnapshot, StreamPosition, position_of, tree_of
from bytecheckpoint.data.stream_reader import Change, StreamReader, blocks_in_turn, pass_epoch
from bytecheckpoint.errors import CheckpointMismatchError

logger = logging.getLogger("bytecheckpoint")

_REQUESTS, _UNCOUNTED, _COUNTINGS = 0, 1, 2
"""Places in the numbers that a process shares with its workers."""


class Streams(IterableDataset[Any]):
    """Samples of a fixed set of streams, of which each data-parallel rank owns a part.

    A pass is one epoch of the streams that this rank owns: `iter` goes on where the state stands, and the next one
    after a pass has ended begins the next epoch. Samples come from the streams in turn. Inside a `DataLoader` with any
    number of workers each stream is read by one worker; make the `bcp.DataLoaderState` of that loader before its first
    pass.

    A source is a sequence, which is read by index; an iterable with `state_dict()` and `load_state_dict()`, whose state
    is saved; or any other iterable, which is read again from the start of the epoch. Its `__iter__` begins a pass, and
    its `set_epoch(epoch)`, if it has one, is called before.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        *,
        rank: int,
        size: int,
        with_ids: bool = False,
        endless: bool = False,
        snapshot_every: int = 256,
        read_ahead: int = 0,
    ) -> None:
        """Opens nothing yet.

        Args:
            sources: the source of each stream by its id: all streams, on every rank the same ids.
            rank: this process's data-parallel rank. Tensor, pipeline and context parallel replicas pass the same.
            size: the number of data-parallel ranks.
            with_ids: yield `(id, sample)` instead of the sample.
            endless: go on with the next epoch instead of ending the pass, so that no rank runs out of batches first.
            snapshot_every: samples of a stream between two calls of a source's `state_dict()`; for a ShuffleBuffer at
                least its size. Where workers read ahead, a load reads up to this many samples of a stream again and
                drops them. Sequences and plain iterables have no snapshots.
            read_ahead: batches that the training loop has taken from the loader, and not trained on, when it
                saves. Lightning takes 1; other loops 0, and what accelerate's loaders take is known.

        Raises:
            ValueError: an argument is out of range, there are fewer streams than ranks, a source cannot be read, or two
                streams share one that each would move.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks")
        if not isinstance(sources, Mapping):
            raise ValueError(f"sources is a {type(sources).__name__}; it is a dict of each stream's source by its id")
        if len(sources) < size:
            raise ValueError(
                f"{len(sources)} streams cannot be shared out to {size} ranks: split the data into at least {size} "
                "streams, better a multiple of every number of ranks that it may be trained on"
            )
        if snapshot_every < 1:
            raise ValueError(f"snapshot_every is {snapshot_every}; it is a number of samples, 1 or more")
        if read_ahead < 0:
            raise ValueError(f"read_ahead is {read_ahead}; it is a number of batches, 0 or more")
        for stream_id, source in sources.items():
            check_stream(stream_id, source)
        check_unshared(sources)
        self._sources = dict(sources)
        self._every_id = sorted(self._sources)
        self._with_ids, self._endless, self._snapshot_every = with_ids, endless, snapshot_every
        self._taken = {each: StreamPosition() for each in assign_streams(self, self._every_id, size)[rank]}
        """Places after what the trainer took. In a worker process: after what the worker has read."""
        self._cursors: dict[str, SourceCursor] = {}
        self._prepared: set[str] = set()
        self._reader: StreamReader | None = None
        self._block: list[str] | None = None
        """The streams of this worker process, from its first pass on."""
        self._epoch = 0
        """Epoch of the last pass that was begun."""
        self.read_ahead = read_ahead
        """Batches that the training loop holds when it saves."""
        self.is_tracked = False
        """True once a loader counts what the trainer takes; then iteration alone does not."""
        self.is_counted = False
        """True while a loader that counts begins a pass. Workers keep what they were started with."""
        self._num_countings = 0
        """How often a loader began to count. In a worker: before the worker was started."""
        # Shared memory, because workers are forked or sent a copy of this object.
        self._flags = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._flags.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        return _StreamsPass(self)

    def stream_ids(self) -> list[str]:
        """Returns the sorted ids of the streams that this rank owns."""
        return sorted(self._taken)

    def all_stream_ids(self) -> list[str]:
        """Returns the sorted ids of all streams."""
        return list(self._every_id)

    def stream_state(self, stream_id: str) -> dict[str, Any]:
        """Returns the state of a stream after what the trainer took of it."""
        position = self._taken[stream_id]
        cursor = self._cursors.get(stream_id)
        if stream_id in self._prepared:
            self._prepared.discard(stream_id)
        elif cursor is not None and (snapshot := cursor.capture(position)) is not None:
            # The source is at the trainer's position, so that a load has nothing to read again.
            position = replace(position, snapshot=snapshot)
        return tree_of(position, source_name(self._sources[stream_id]))

    def stream_position(self, stream_id: str) -> dict[str, Any]:
        """Returns the state of a stream without a snapshot of its source. An earlier state of the stream in which these
        values are replaced is the state of now: a load reads on from the snapshot there to the position here.
        """
        return tree_of(replace(self._taken[stream_id], snapshot=None), source_name(self._sources[stream_id]))

    def shared_state(self) -> dict[str, Any]:
        """Returns the state that all ranks have in common. It only says that all other state belongs to streams."""
        return {"kind": "streams"}

    def check_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Raises CheckpointMismatchError (conflict) for an unknown id, a state that does not fit the source, or that of
        another kind of loader.
        """
        self._checked(streams, shared)

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Takes over these streams at their positions, and gives up all others.

        Raises:
            CheckpointMismatchError: as `check_streams` raises it. Nothing was changed then.
        """
        self._taken = self._checked(streams, shared)
        self._reader, self._prepared = None, set()
        self._lose_places()

    def _checked(self, streams: Mapping[str, Any], shared: Any) -> dict[str, StreamPosition]:
        unknown = sorted(streams.keys() - self._sources.keys())
        if unknown or shared != self.shared_state():
            found = f"the unknown streams {unknown[:3]}" if unknown else f"{shared!r} as the state of all ranks"
            raise CheckpointMismatchError(
                f"bcp.data.Streams cannot take over {found}. Nothing was loaded into the loader. Give it the streams "
                "that it had when it was saved",
                kind="conflict",
            )
        return {each: self._position_of(each, streams[each]) for each in streams}

    def _position_of(self, stream_id: str, tree: Any) -> StreamPosition:
        source = self._sources[stream_id]
        position = position_of(stream_id, tree, source_name(source))
        check_reaches(source, position)
        is_old = position.snapshot is not None and position.snapshot.epoch != position.epoch
        # A logged position on top of a checkpoint of the epoch before, whose end such a source cannot go on from.
        return replace(position, snapshot=None) if is_old and not carries_over(source) else position

    def start_states(self) -> dict[str, Any]:
        """Returns the states of this rank's streams at position 0 of epoch 0."""
        return {each: tree_of(StreamPosition(), source_name(self._sources[each])) for each in self._taken}

    def joining_state(self, stream_id: str, others: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state of a stream that is at its first sample, in the lowest epoch of `others`: in epoch 0 it
        would be read alone until it has caught up with them.
        """
        source = self._sources[stream_id]
        epoch = pass_epoch(self._position_of(each, state) for each, state in others.items())
        # Without a snapshot a source that carries something over would be read through all epochs before.
        snapshot = SourceSnapshot(epoch, 0, 0, None) if epoch and carries_over(source) else None
        return tree_of(StreamPosition(epoch, snapshot=snapshot), source_name(source))

    def refuse_inexact(self) -> str | None:
        """Returns why a source or the way to read it cannot go on exactly; None if all can."""
        if int(self._flags[_UNCOUNTED]):
            return (
                "a pass was begun over these Streams in which nothing counts what the trainer takes. Make "
                "bcp.DataLoaderState(loader, ...) of the DataLoader that you iterate over, not of the Streams or of "
                "another loader, before its first pass"
            )
        reasons = ((each, inexact_reason(self._sources[each])) for each in self.stream_ids())
        return next((f"stream {each!r}: {reason}" for each, reason in reasons if reason), None)

    def prepare_state(self) -> None:
        """Lets sources take a snapshot now, workers with their next batch, so that a save soon after need not."""
        self._flags[_REQUESTS] += 1
        for stream_id, position in self._taken.items():
            cursor = self._cursors.get(stream_id)
            if cursor is not None and (snapshot := cursor.capture(position)) is not None:
                self._taken[stream_id] = replace(position, snapshot=snapshot)
                self._prepared.add(stream_id)

    # The rest is for passes and for the loader that counts.

    def _begin_pass(self) -> StreamReader:
        worker = get_worker_info()
        if worker is not None:
            ids, positions = self._begin_worker_pass(worker.id, worker.num_workers), self._taken
        elif self.is_tracked:
            ids, positions = self.stream_ids(), dict(self._taken)
        else:
            ids, positions = self.stream_ids(), self._taken
        self._epoch = pass_epoch(self._taken.values())
        self._reader = StreamReader(
            ids,
            positions,
            self._sources,
            self._cursors,
            epoch=None if self._endless else self._epoch,
            snapshot_every=self._snapshot_every,
            num_requests=lambda: int(self._flags[_REQUESTS]),
        )
        return self._reader

    def _begin_worker_pass(self, worker: int, num_workers: int) -> list[str]:
        if self._block is not None:
            # A worker that lives on gets here once the trainer has come to the end of the pass before.
            if self._reader is not None:
                self._reader.discount_dropped()
            self._finish_pass(self._epoch)
            return self._block
        self._lose_places()  # forked from a process that may have read: files that are open would be shared with it
        self._block = self._blocks(num_workers)[worker]
        return self._block

    def _begin_counting(self) -> None:
        """Lets a loader count what the trainer takes, from the positions of now: they include what was read in this
        process, and not what workers have read. A pass that was begun before, here or in a worker, is out of date.
        """
        self.is_tracked = True
        self._reader = None
        if int(self._flags[_UNCOUNTED]):
            logger.warning(
                "workers have begun a pass over bcp.data.Streams before bcp.DataLoaderState was made of their loader: "
                "what that pass has given, and gives before it ends or is out of date, is not counted, so a save would "
                "store the position before it. Call iter() on the loader again before the next step"
            )
        self._num_countings += 1
        self._flags[_COUNTINGS] = self._num_countings
        self._flags[_UNCOUNTED] = 0

    def _blocks(self, num_workers: int) -> list[list[str]]:
        return blocks_in_turn(self._every_id, self._taken, num_workers, endless=self._endless)

    def _finish_pass(self, epoch: int) -> None:
        """Puts the streams that are in `epoch`, whose pass has ended, at the start of the next epoch, however far they
        were read. Does nothing if endless.
        """
        if self._endless:
            return
        for stream_id, position in self._taken.items():
            if position.epoch == epoch:
                self._taken[stream_id] = position.next_epoch(carries_over=carries_over(self._sources[stream_id]))

    def _is_mid_pass(self) -> bool:
        """Returns True if a stream is past the start of the lowest epoch among all streams; False if endless."""
        start = (pass_epoch(self._taken.values()), 0)
        # An endless pass ends only where no stream has samples: another one would end as well.
        return not self._endless and any(each.place > start for each in self._taken.values())

    def _take(self, changes: Sequence[Change], turn: int) -> None:
        """Counts what the trainer took with its batch number `turn`."""
        for change in changes:
            self._taken[change.stream_id] = change.applied_to(self._taken[change.stream_id], turn)

    def _lose_places(self) -> None:
        for cursor in self._cursors.values():
            cursor.lose_place()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


class _StreamsPass:
    """One pass over the streams of this process. It begins with the first sample, not before: a load may come first."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._is_counted = streams.is_counted
        self._flags = streams._flags.numpy()  # shares the memory, and is read ten times as fast
        self._reader: StreamReader | None = None
        self._is_over = False

    def __iter__(self) -> _StreamsPass:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        streams = self._streams
        reader, is_mid_pass = self._reader, False
        is_current = streams._num_countings == self._flags[_COUNTINGS]
        # A worker that began after the counting, with what it had before, gives nothing: nothing is uncounted.
        if reader is None and is_current:
            if not (self._is_counted or self._counts):
                self._flags[_UNCOUNTED] = 1
            reader, is_mid_pass = self._begin()
        if reader is None or reader is not streams._reader or not is_current:
            raise RuntimeError(
                "this pass over bcp.data.Streams is out of date: another one was begun since, or a state was loaded. "
                "Call iter() again"
            )
        while (found := next(reader, None)) is None:
            if self._counts:
                streams._finish_pass(streams._epoch)
            if not (self._counts and is_mid_pass):
                self._is_over = True
                raise StopIteration
            # The end of the epoch was not known when the state was saved. A pass without samples does not count.
            reader, is_mid_pass = self._begin()
        if self._counts:
            reader.take_changes()
        return found if streams._with_ids else found[1]

    def _begin(self) -> tuple[StreamReader, bool]:
        """Begins to read an epoch, or all epochs from there on if endless. Returns the reader, and what `_is_mid_pass`
        returned before.
        """
        is_mid_pass = self._streams._is_mid_pass()
        self._reader = self._streams._begin_pass()
        return self._reader, is_mid_pass

    @property
    def _counts(self) -> bool:
        return get_worker_info() is None and not self._streams.is_tracked


def check_stream(stream_id: Any, source: Any) -> None:
    """Raises ValueError if the id is no text, or empty, or the source cannot be read pass after pass."""
    if not isinstance(stream_id, str):
        raise ValueError(f"the id of a stream is a text; {stream_id!r} is a {type(stream_id).__name__}")
    if not stream_id:
        raise ValueError("the id of a stream is empty: give each stream a name, which checkpoints know it by")
    check_source(f"the source of stream {stream_id!r}", source)


def check_unshared(sources: Mapping[str, Any]) -> None:
    """Raises ValueError if two streams share a source, maybe inside buffers of their own, that has a position or an
    epoch: each of them would set it.
    """
    ids: dict[int, str] = {}
    for stream_id, outer in sources.items():
        for source in _with_wrapped(outer):
            if not (is_stateful(source) or hasattr(source, "set_epoch")):
                continue
            other = ids.setdefault(id(source), stream_id)
            if other != stream_id:
                raise ValueError(
                    f"streams {other!r} and {stream_id!r} have the same {type(source).__name__} as their source, and "
                    "each would move it under the other: give each a source of its own, with its part of the data"
                )


def _with_wrapped(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "wrapped_source", None)
