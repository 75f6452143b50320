"""Shuffles a source in a buffer whose content is saved with it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from bytecheckpoint.data.sources import END, PassEnd, check_source, cursor_of, read_next, source_name, state_after
from bytecheckpoint.data.stream_position import StreamPosition, position_of
from bytecheckpoint.data.streams import Streams
from bytecheckpoint.runtime.integers import integer_of

_MASK = (1 << 64) - 1
_ATOMS = frozenset({int, float, str, bytes, bool, type(None)})


class ShuffleBuffer:
    """The samples of one source in a random order: each is drawn from a buffer of `size` samples, and the next one of
    the source takes its place.

    The buffer is drained at the end of an epoch. The order follows from seed and epoch. State is the buffer's content,
    the number of draws, and the state of the source: after a load no sample comes twice, and none is lost.
    """

    def __init__(self, source: Any, size: int, *, seed: int = 0) -> None:
        """Reads nothing yet.

        Args:
            source: a sequence or an iterable, as in `Streams`. Its samples are saved while they are in the buffer:
                plain data, tensors and arrays.
            size: the number of samples to draw from.
            seed: another order for another seed. A load needs the same `size` and `seed`; `Streams` refuses others.

        Raises:
            ValueError: `size` is below 1, it or `seed` is no integer, or the source cannot be read, or is `Streams`:
                wrap the source of each stream instead.
        """
        refuse_streams("ShuffleBuffer", source)
        check_source("the source of a ShuffleBuffer", source)
        num_samples, seed_number = integer_of(size), integer_of(seed)
        if num_samples is None or seed_number is None:
            raise ValueError(f"size and seed of a ShuffleBuffer are integers, not {size!r} and {seed!r}")
        if num_samples < 1:
            raise ValueError(f"a ShuffleBuffer has room for {size} samples; it needs 1 or more")
        self.wrapped_source = source
        self.name_of_positions = f"{type(self).__name__}[{num_samples}, seed {seed_number}]"
        """Name that is saved with positions: the samples before one follow from size and seed."""
        self.snapshot_interval = num_samples
        """Least number of samples between two snapshots in the course of an epoch, since each holds the whole buffer.
        Its end and a save take others."""
        self._size, self._seed = num_samples, seed_number
        self._cursor = cursor_of(source)
        self._source_position = StreamPosition()
        self._epoch = self._num_draws = 0
        self._buffer: list[Any] = []
        self._shared: set[int] = set()
        """Identities of the samples that a state holds too: a training loop may change in place what it is given."""

    def __iter__(self) -> Iterator[Any]:
        while (sample := self._next()) is not END:
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """Returns the buffer's content and what it takes to go on. A sample is copied when it is drawn, not here."""
        self._shared = set(map(id, self._buffer))
        return {
            "epoch": self._epoch,
            "draws": self._num_draws,
            "buffer": list(self._buffer),
            "source": state_after(self.wrapped_source, self._cursor, self._source_position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where this state was taken. Raises CheckpointMismatchError (conflict) if it is of another source;
        does not check `size` and `seed`.
        """
        self._source_position = position_of("in a ShuffleBuffer", state["source"], source_name(self.wrapped_source))
        self._cursor.lose_place()
        self._epoch, self._num_draws = state["epoch"], state["draws"]
        self._buffer = list(state["buffer"])
        self._shared = set(map(id, self._buffer))

    def _next(self) -> Any | Literal[PassEnd.END]:
        while len(self._buffer) < self._size and self._source_position.epoch == self._epoch:
            sample, self._source_position = read_next(self.wrapped_source, self._cursor, self._source_position)
            if sample is not END:
                self._buffer.append(sample)
        if not self._buffer:
            self._epoch, self._num_draws = self._epoch + 1, 0
            return END
        index = _random_number(self._seed, self._epoch, self._num_draws) % len(self._buffer)
        self._num_draws += 1
        self._buffer[index], self._buffer[-1] = self._buffer[-1], self._buffer[index]
        sample = self._buffer.pop()
        return _copied(sample) if id(sample) in self._shared else sample


def refuse_streams(wrapper: str, source: Any) -> None:
    """Raises ValueError if a buffer is put around all streams, where its content would belong to none of them."""
    if isinstance(source, Streams):
        raise ValueError(
            f"{wrapper} is put around Streams, so that its content would belong to no stream and could not be shared "
            f"out to other ranks. Wrap the source of each stream: Streams({{id: {wrapper}(source, ...), ...}}, ...)"
        )


def _copied(sample: Any) -> Any:
    if isinstance(sample, torch.Tensor):
        return sample.clone()
    if isinstance(sample, np.ndarray):
        return sample.copy()
    if type(sample) in {dict, OrderedDict}:
        return type(sample)((key, _copied(value)) for key, value in sample.items())
    if type(sample) in {list, tuple}:
        return type(sample)(value if type(value) in _ATOMS else _copied(value) for value in sample)
    return sample


def _random_number(seed: int, epoch: int, number: int) -> int:
    """Returns a number below 2**64 that follows from these alone, so that a place in the order needs no state.

    Each is mixed in by a round of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
    """
    mixed = 0
    for part in (seed, epoch, number):
        mixed = (mixed + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed
