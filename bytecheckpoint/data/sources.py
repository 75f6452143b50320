"""Sources of samples, read pass after pass from any position. It knows nothing of ranks, workers and the order of
streams.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Literal, Protocol

from torch.utils.data import IterableDataset

from bytecheckpoint.data.stream_position import SourceSnapshot, StreamPosition, tree_of
from bytecheckpoint.errors import CheckpointMismatchError


class PassEnd(Enum):
    """Returned instead of a sample where a pass ends. A value, because StopIteration ends the loops that it crosses."""

    END = "end"


END = PassEnd.END
_OF_DATASETS = ("datasets.iterable_dataset", "IterableDataset")


class SourceCursor(Protocol):
    """A reader of one source that knows its place, and goes to others."""

    def read(self, at: StreamPosition) -> Any | Literal[PassEnd.END]:
        """Returns the sample that follows `at`, or END at the end of the epoch.

        Raises CheckpointMismatchError (conflict) if the epoch has fewer samples than come before `at`.
        """

    def is_at_end(self) -> bool:
        """Returns True if the source says that no sample of this epoch follows; False also if it cannot say."""

    def capture(self, at: StreamPosition) -> SourceSnapshot | None:
        """Returns the source's state if it has one and the cursor stands at this place, else None."""

    def lose_place(self) -> None:
        """Lets the next `read` open the source anew."""


def read_next(
    source: Any, cursor: SourceCursor, at: StreamPosition
) -> tuple[Any | Literal[PassEnd.END], StreamPosition]:
    """Returns the sample that follows `at`, or END, and the place after it.

    If the cursor can tell that the sample is the last of its epoch, the place after it is the start of the next epoch.
    """
    sample = cursor.read(at)
    if sample is END:
        return END, at.next_epoch(carries_over=carries_over(source))
    after = replace(at, position=at.position + 1, samples=at.samples + 1)
    return sample, after.next_epoch(carries_over=False) if cursor.is_at_end() else after


def state_after(source: Any, cursor: SourceCursor, at: StreamPosition) -> dict[str, Any]:
    """Returns the state of a source that was read up to `at`, with a snapshot if it has one."""
    snapshot = cursor.capture(at)
    return tree_of(at if snapshot is None else replace(at, snapshot=snapshot), source_name(source))


def cursor_of(source: Any) -> SourceCursor:
    return SequenceCursor(source) if is_sequence(source) else IterableCursor(source)


def is_stateful(source: Any) -> bool:
    """Returns True if the source gives and takes its own state."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def is_sequence(source: Any) -> bool:
    """Returns True if samples are read by their index, so that a position is all the state there is."""
    # Each Dataset of torch has a __getitem__; that of an IterableDataset, which may have a length, only raises.
    has_index = hasattr(source, "__getitem__") and not isinstance(source, IterableDataset)
    return has_index and hasattr(source, "__len__") and not is_stateful(source)


def carries_over(source: Any) -> bool:
    """Returns True if the next pass may begin from the source's state at the end of a pass.

    False for a source without a state, and for iterable datasets of Hugging Face: these begin each epoch anew, and from
    their state at the end of a pass they yield nothing.
    """
    return is_stateful(source) and not _has_state_of_datasets(source)


def _has_state_of_datasets(source: Any) -> bool:
    """Returns True if the state is that of an IterableDataset of Hugging Face's package, also in a subclass. A user may
    have a package of that name too.
    """
    definer = next((cls for cls in type(source).__mro__ if "state_dict" in vars(cls)), None)
    is_named = definer is not None and (definer.__module__, definer.__name__) == _OF_DATASETS
    return is_named and hasattr(source, "_ex_iterable")


def check_source(name: str, source: Any) -> None:
    """Raises ValueError, which begins with `name`, if a source cannot be read pass after pass."""
    if isinstance(source, Mapping) or not (is_sequence(source) or isinstance(source, Iterable)):
        raise ValueError(
            f"{name} is a {type(source).__name__}: a source is a sequence of samples or an iterable, with or without "
            "state_dict() and load_state_dict()"
        )
    if isinstance(source, Iterator) and not is_stateful(source):
        raise ValueError(
            f"{name} is a {type(source).__name__}, which can be read once and never again: pass an object whose "
            "__iter__ begins a new pass each time"
        )


def source_name(source: Any) -> str:
    """Returns the name of a source's class with all that a position depends on, and in parentheses the name of the
    source that it reads from.
    """
    inner = getattr(source, "wrapped_source", None)
    name = getattr(source, "name_of_positions", type(source).__name__)
    return name if inner is None else f"{name}({source_name(inner)})"


def check_reaches(source: Any, at: StreamPosition) -> None:
    """Raises CheckpointMismatchError (conflict) if a sequence has fewer samples than come before this place."""
    if at.position and is_sequence(source) and at.position > len(source):
        raise _too_short(source, at, len(source))


def inexact_reason(source: Any) -> str | None:
    """Returns why a source does not go on exactly where its state was taken; None if no reason is known."""
    if (inner := getattr(source, "wrapped_source", None)) is not None:
        return inexact_reason(inner)
    examples = list(_examples_in(source._ex_iterable)) if _has_state_of_datasets(source) else []
    if any(map(_shuffles_in_a_buffer, examples)):
        return (
            "datasets' .shuffle(buffer_size=...) loses the content of its buffer when it goes on from its state. "
            "Remove it and wrap the dataset in bcp.data.ShuffleBuffer(dataset, buffer_size), whose content is saved"
        )
    if any(map(_shuffles_without_a_seed, examples)):
        return (
            "datasets' .shuffle without a seed draws another order in each process, and a seed of 2^64 or more cannot "
            "be told from none. Pass it the same seed, below 2^64, in every run"
        )
    if any(map(_counts_rows_ahead, examples)):
        return (
            "a dataset with .map or .filter over Arrow data, or .shuffle(buffer_size=1), skips samples when it goes on "
            "from its state, in datasets before 5.1. Install datasets >= 5.1"
        )
    module = type(source).__module__.partition(".")[0]
    if module == "webdataset" and _shuffles_at_random(source):
        return (
            "webdataset's shuffle and resampled draw another order in each process. Remove them (shardshuffle=False) "
            "and wrap the dataset in bcp.data.ShuffleBuffer(dataset, buffer_size), whose content is saved"
        )
    return None


def _examples_in(examples: Any) -> Iterator[Any]:
    """Yields a part of a dataset of Hugging Face, and the parts that it reads from."""
    if examples is not None:
        yield examples
        for each in (getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())):
            yield from _examples_in(each)


def _shuffles_in_a_buffer(examples: Any) -> bool:
    return type(examples).__name__ == "BufferShuffledExamplesIterable" and getattr(examples, "buffer_size", 2) > 1


def _shuffles_without_a_seed(examples: Any) -> bool:
    # Without a seed numpy draws one of 128 bits, and keeps no record that it did.
    generator = getattr(getattr(examples, "generator", None), "bit_generator", None)
    entropy = getattr(getattr(generator, "seed_seq", None), "entropy", None)
    is_shuffle = type(examples).__name__ == "BufferShuffledExamplesIterable"
    return is_shuffle and isinstance(entropy, int) and entropy >= 1 << 64


def _counts_rows_ahead(examples: Any) -> bool:
    """Returns True if the state of the part counts rows as read that were not given yet: all rows of a table once its
    first is given, or the row that waits in a buffer of one.
    """
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        # The release that reads several shards by turns is the one whose buffer of one gives a sample at once.
        return not hasattr(sys.modules.get(type(examples).__module__), "InterleavedShardsExamplesIterable")
    if type(examples).__name__ not in {"MappedExamplesIterable", "FilteredExamplesIterable"}:
        return False
    rows = getattr(examples, "ex_iterable", None)
    if type(rows).__name__ != "FormattedExamplesIterable":
        return False
    # Releases without this fault cut the tables to the size that the function takes.
    tables = getattr(rows, "ex_iterable", None)
    return getattr(tables, "iter_arrow", None) is not None and type(tables).__name__ != "RebatchedArrowExamplesIterable"


def _shuffles_at_random(dataset: Any) -> bool:
    for stage in getattr(dataset, "pipeline", ()):
        name = getattr(getattr(stage, "f", None), "__name__", type(stage).__name__)
        if name.startswith("Resampled"):
            return True
        if name in {"_shuffle", "detshuffle"} and _buffer_size(stage) > 1:
            return True
    return False


def _buffer_size(stage: Any) -> int:
    # WebDataset(shardshuffle=False) shuffles as well, in a buffer of no samples.
    given = [*getattr(stage, "args", ()), getattr(stage, "kw", {}).get("bufsize"), getattr(stage, "bufsize", None)]
    return next((int(size) for size in given if isinstance(size, int)), 1000)


class SequenceCursor:
    """Reads a sequence by index."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._place = (-1, 0)

    def read(self, at: StreamPosition) -> Any | Literal[PassEnd.END]:
        if at.epoch != self._place[0]:
            _set_epoch(self._source, at.epoch)
        self._place = at.place
        if at.position > len(self._source):
            raise _too_short(self._source, at, len(self._source))
        if at.position == len(self._source):
            return END
        sample = self._source[at.position]
        self._place = (at.epoch, at.position + 1)
        return sample

    def is_at_end(self) -> bool:
        return self._place[1] >= len(self._source)

    def capture(self, at: StreamPosition) -> SourceSnapshot | None:  # noqa: ARG002  a position is all there is
        return None

    def lose_place(self) -> None:
        self._place = (-1, 0)


class IterableCursor:
    """Reads an iterable. Another place is reached from a snapshot, or from the start of an epoch, by reading on."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._iterator: Iterator[Any] | None = None
        self._place: tuple[int, int] | None = None
        """Epoch and position of the source. None before the first sample, after an error and after `lose_place`: then
        the source is put in place anew."""
        self._initial: Any = None
        """The state of a stateful source before anything was read; None until it is first put in place."""
        self._is_touched = False
        self._has_yielded = False

    def read(self, at: StreamPosition) -> Any | Literal[PassEnd.END]:
        self._has_yielded |= at.samples > 0
        if self._place != at.place:
            self._seek(at)
        return self._read_on()

    def is_at_end(self) -> bool:
        return False

    def capture(self, at: StreamPosition) -> SourceSnapshot | None:
        if self._place != at.place or not is_stateful(self._source):
            return None
        return SourceSnapshot(at.epoch, at.position, at.samples, _state_of(self._source))

    def lose_place(self) -> None:
        self._iterator = self._place = None

    def __getstate__(self) -> dict[str, Any]:
        # Iterators cannot be sent, and what is sent of the source stands wherever it was read to.
        return {**self.__dict__, "_iterator": None, "_place": None}

    def _seek(self, at: StreamPosition) -> None:
        self._open(at)
        while self._place is not None and self._place < at.place:
            self._read_on()
        if self._place != at.place:
            raise _too_short(self._source, at, None)

    def _open(self, at: StreamPosition) -> None:
        """Puts the source at the snapshot of `at`. Without one: at the start of the epoch of `at`, or of epoch 0 for a
        source that carries over.
        """
        self._iterator = self._place = None
        start = at.snapshot
        if start is None:
            start = SourceSnapshot(0 if carries_over(self._source) else at.epoch, 0, 0, None)
        if is_stateful(self._source):
            self._put(start.state)
        self._is_touched = True
        self._place = (start.epoch, start.position)

    def _put(self, state: Any) -> None:
        """Loads a state into the source; None stands for the state before anything was read."""
        if not self._is_touched:
            self._initial = _state_of(self._source)
            if state is None:
                return
            # torchdata's Loader keeps the iterator that its state_dict() made, and the next iter() returns that one,
            # whatever state was loaded in between.
            iter(self._source)
        state = self._initial if state is None else state
        self._source.load_state_dict(state if hasattr(self._source, "wrapped_source") else copy.deepcopy(state))

    def _read_on(self) -> Any | Literal[PassEnd.END]:
        epoch, position = self._place or (0, 0)
        # Until the sample is there the place is not known: a source that raised may stand anywhere.
        self._place = None
        if self._iterator is None:
            _set_epoch(self._source, epoch)
            self._iterator = iter(self._source)
        sample = next(self._iterator, END)
        if sample is END:
            self._iterator = None
            self._check_pass(epoch, position)
            self._place = (epoch + 1, 0)
            return END
        self._place = (epoch, position + 1)
        self._has_yielded = True
        return sample

    def _check_pass(self, epoch: int, num_samples: int) -> None:
        # Without this a source that does not begin anew would silently be missing from all later epochs. Not for a
        # ShuffleBuffer or Packer: the cursor in it checks its source, and an epoch may be too short for a Packer's row.
        if num_samples == 0 and self._has_yielded and not hasattr(self._source, "wrapped_source"):
            raise ValueError(
                f"a source of type {type(self._source).__name__} had samples before and yields none in epoch {epoch}: "
                "its __iter__ must begin a new pass each time, also after the state of a pass's end was loaded"
            )


def _state_of(source: Any) -> Any:
    state = source.state_dict()
    # Sources may go on changing what they returned. Buffers of this package do not, and may hold much.
    return state if hasattr(source, "wrapped_source") else copy.deepcopy(state)


def _set_epoch(source: Any, epoch: int) -> None:
    if (set_epoch := getattr(source, "set_epoch", None)) is not None:
        set_epoch(epoch)


def _too_short(source: Any, at: StreamPosition, length: int | None) -> CheckpointMismatchError:
    found = "fewer" if length is None else f"{length}"
    return CheckpointMismatchError(
        f"a stream stands at sample {at.position} of epoch {at.epoch}, and its source of type {type(source).__name__} "
        f"has {found} samples. Nothing was read from it. Give the stream the data that it had when it was saved",
        kind="conflict",
    )
