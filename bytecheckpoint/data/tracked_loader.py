"""Counts what a trainer takes from a data loader of torch, torchdata or accelerate over `Streams`, and not what workers
and wrappers read ahead. The loader's classes are changed here and nowhere else, because none of them reports that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from bytecheckpoint.data.batch_messages import CountedBatch, CountingCollate, received
from bytecheckpoint.data.stream_reader import Change, pass_epoch
from bytecheckpoint.data.streams import Streams

_Begun = TypeVar("_Begun")
_NOT_PREPARED = (
    "each process reads its own streams already, so leave this loader out of prepare(), or pass it to "
    "accelerate.data_loader.prepare_data_loader(loader, device=accelerator.device, num_processes=1, process_index=0, "
    "put_on_device=True, dispatch_batches=False)"
)


def tracked_loader_of(loader: Any) -> TrackedLoader | None:
    """Returns the elastic loader of a data loader over `Streams`, the same for each call; None for all others.
    The first call changes the loader, which counts from then on. Call it before a pass: one under way is out of date.

    Raises ValueError for a loader of accelerate's that takes only some of its streams' samples.
    """
    base = getattr(loader, "base_dataloader", loader)  # a loader of accelerate holds one of torch
    dataset = getattr(base, "dataset", None)
    if type(dataset).__name__ == "IterableDatasetShard" and isinstance(getattr(dataset, "dataset", None), Streams):
        raise ValueError(
            "accelerate has put bcp.data.Streams into an IterableDatasetShard, which gives each process some of the "
            f"batches that it reads and drops the others: samples would be lost. What to do: {_NOT_PREPARED}"
        )
    if not isinstance(base, DataLoader) or not isinstance(base.dataset, Streams):
        return None
    tracked = base.__dict__.get("_get_iterator")
    tracked = getattr(tracked, "__self__", None)
    if not isinstance(tracked, TrackedLoader):
        tracked = TrackedLoader(base, base.dataset)
    if base is not loader:
        tracked.follow(loader)
    return tracked


class TrackedLoader:
    """The elastic loader of a `DataLoader`: state by stream, after the last batch that the trainer was given."""

    def __init__(self, loader: DataLoader[Any], streams: Streams) -> None:
        """Changes `loader` itself, which counts from then on. A pass over it that was begun before is out of date: it
        raises RuntimeError at its next batch, or after those that workers have read ahead, which are not counted.
        """
        self._loader = weakref.ref(loader)  # the loader holds this, and its workers end with its last reference
        self._streams = streams
        self._waiting: deque[Sequence[Change] | int] = deque()
        """Changes of batches that a wrapper or the training loop holds and has not trained on; an epoch where the pass
        over it ends."""
        self._is_followed = False
        self._refusal: str | None = None
        self._num_passes = 0
        self._turn = 0
        # The state is that of the streams.
        self.stream_ids, self.all_stream_ids = streams.stream_ids, streams.all_stream_ids
        self.stream_state, self.stream_position = streams.stream_state, streams.stream_position
        self.shared_state, self.check_streams = streams.shared_state, streams.check_streams
        self.start_states, self.joining_state = streams.start_states, streams.joining_state
        self.prepare_state = streams.prepare_state
        streams._begin_counting()
        collate = loader.collate_fn
        # Accelerate passes the collate_fn of a loader on to the loader that it makes of it.
        collate = collate.collate if isinstance(collate, CountingCollate) else collate
        loader.collate_fn = CountingCollate(collate, streams)
        # Found before the method of the class, by the loader's own __iter__.
        loader._get_iterator = self.new_iterator  # type: ignore[method-assign]
        self._drop_iterator()

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Takes over these streams, and gives up all others. A pass under way is out of date; the next `iter` starts
        workers anew.
        """
        self._streams.load_streams(streams, shared)
        self._num_passes += 1
        self._waiting.clear()
        self._drop_iterator()

    def refuse_inexact(self) -> str | None:
        """Returns why a loader that goes on from this state would repeat or skip samples; None if it would not."""
        return self._refusal or self._streams.refuse_inexact()

    def follow(self, wrapper: Any) -> None:
        """Changes the class of `wrapper`, a loader of accelerate's that reads this one ahead, so that what it gives to
        the trainer is counted. A DataLoaderDispatcher is not changed: `refuse_inexact` then says why it is inexact.
        """
        cls = type(wrapper)
        if cls.__name__ == "DataLoaderDispatcher":
            self._refusal = (
                "accelerate's DataLoaderDispatcher reads the streams of one process for all, and those of the others "
                f"are lost. What to do: {_NOT_PREPARED}"
            )
            return
        if self._is_followed and "_counts_batches" in cls.__dict__:
            return
        tracked = self

        def counting_iter(wrapper: Any) -> Iterator[Any]:
            num_taken = 1 + int(getattr(wrapper, "skip_batches", 0))
            for batch in cls.__iter__(wrapper):
                tracked._hand_over(num_taken)
                num_taken = 1
                yield batch
            tracked._hand_over(len(tracked._waiting))

        counting = type(
            cls.__name__, (cls,), {"__iter__": counting_iter, "_counts_batches": True, "__module__": __name__}
        )
        # Accelerate hides `__class__` behind a property, which says what it wraps.
        object.__dict__["__class__"].__set__(wrapper, counting)
        self._is_followed = True

    def new_iterator(self) -> Any:
        """Returns an iterator of the loader that counts; what `DataLoader.__iter__` calls."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the DataLoader of this iterator is gone")
        self._begin_pass()
        iterator: Any = self.begin_counted(lambda: type(loader)._get_iterator(loader))
        cls = type(iterator)
        methods = {"__next__": _counting_next, "_reset": _counting_reset, "__module__": __name__}
        # A subclass and no proxy: loaders reset and ask the iterator that they keep between passes.
        iterator.__class__ = type(cls.__name__, (cls,), methods)
        iterator._counted_by = _CountedPass(self, cls, self._blocks(loader.num_workers))
        return iterator

    def begin_counted(self, begin: Callable[[], _Begun]) -> _Begun:
        """Calls `begin` and returns its result: a pass over the streams, here or in workers, that is counted."""
        self._streams.is_counted = True
        try:
            return begin()
        finally:
            self._streams.is_counted = False

    def _begin_pass(self) -> None:
        self._num_passes += 1
        self._settle()
        self._turn = max((each.turn for each in self._streams._taken.values()), default=0)

    def _blocks(self, num_workers: int) -> list[list[str]]:
        return self._streams._blocks(num_workers) if num_workers else []

    def _drop_iterator(self) -> None:
        loader: Any = self._loader()
        if loader is None:
            return
        loader._iterator = None
        if hasattr(loader, "_initial_iter_for_state_dict"):  # torchdata's state_dict() made an iterator in advance
            loader._initial_iter_for_state_dict = False

    def _arrived(self, changes: Sequence[Change] | int) -> None:
        """Notes a batch that has arrived, given by its changes, or the end of a pass, given by its epoch. Counts it as
        taken once `read_ahead` others have arrived, or, if a wrapper is followed, when that hands it over.
        """
        self._waiting.append(changes)
        if not self._is_followed:
            self._hand_over(len(self._waiting) - self._streams.read_ahead)

    def _settle(self) -> None:
        """Forgets batches that were not handed over. If the pass has ended, counts them instead: the trainer has had
        them all.
        """
        if any(isinstance(each, int) for each in self._waiting):
            self._hand_over(len(self._waiting))
        self._waiting.clear()

    def _hand_over(self, num_batches: int) -> None:
        for _ in range(min(num_batches, len(self._waiting))):
            changes = self._waiting.popleft()
            if isinstance(changes, int):
                self._streams._finish_pass(changes)
            else:
                self._turn += 1
                self._streams._take(changes, self._turn)


class _CountedPass:
    """One pass over a tracked loader: counts the batches that an iterator of the loader's class returns."""

    def __init__(self, tracked: TrackedLoader, cls: Any, blocks: list[list[str]]) -> None:
        self._tracked, self._cls, self._blocks = tracked, cls, blocks
        self._continued: Any = None
        """The iterator that took over because this one had nothing left to read in its epoch; else None."""
        self._begin()

    def _begin(self) -> None:
        streams = self._tracked._streams
        self._number = self._tracked._num_passes
        self._epoch = pass_epoch(streams._taken.values())
        self._may_be_empty_rest = streams._is_mid_pass()
        """True until the first batch of a pass that goes on in the middle of an epoch, which may have none left."""
        self._is_over = False

    def next(self, iterator: Any) -> Any:
        counting, tracked = self, self._tracked
        if self._continued is not None:
            iterator, counting = self._continued, self._continued._counted_by
        while (counted := counting._read(iterator)) is None:
            counting._is_over = True
            if not counting._may_be_empty_rest:
                tracked._arrived(counting._epoch)
                raise StopIteration
            # The save did not know yet that the epoch was at its end. A pass without batches does not count.
            tracked._streams._finish_pass(counting._epoch)
            self._continued = iterator = counting._replace(iterator)
            counting = iterator._counted_by
        counting._may_be_empty_rest = False
        tracked._arrived(received(counted.changes))
        return counted.batch

    def _read(self, iterator: Any) -> CountedBatch | None:
        """Returns the next batch; None when the loader's own iterator ends, and StopIteration is raised after that.

        Raises RuntimeError for a pass that is out of date.
        """
        if self._number != self._tracked._num_passes:
            raise RuntimeError(
                "this pass over a DataLoader of bcp.data.Streams is out of date: another one was begun since, or a "
                "state was loaded. Call iter() on the loader again"
            )
        if self._is_over:
            raise StopIteration
        try:
            counted: CountedBatch = self._cls.__next__(iterator)
        except StopIteration:
            return None
        return counted

    def reset(self, iterator: Any, loader: Any, *, first_iter: bool) -> None:
        """Begins the next pass with the same workers, or with new ones if those are not where the trainer is."""
        tracked = self._tracked
        if self._number == tracked._num_passes:
            tracked._settle()
        is_in_step = self._is_over and self._number == tracked._num_passes and not tracked._waiting
        if is_in_step and tracked._blocks(loader.num_workers) == self._blocks:
            tracked._begin_pass()
            self._begin()
            tracked.begin_counted(lambda: self._cls._reset(iterator, loader, first_iter))
        else:
            self._replace(iterator)

    def _replace(self, iterator: Any) -> Any:
        """Ends the iterator's workers. Returns a new iterator, which the loader keeps if it kept the old one."""
        loader: Any = self._tracked._loader()
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        is_kept = loader._iterator is iterator
        replacement = self._tracked.new_iterator()
        if is_kept:
            loader._iterator = replacement
        return replacement


def _counting_next(iterator: Any) -> Any:
    return iterator._counted_by.next(iterator)


def _counting_reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:  # noqa: FBT001, FBT002  torch's
    iterator._counted_by.reset(iterator, loader, first_iter=first_iter)
