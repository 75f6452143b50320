"""Columns of integers of which long runs rise by equal steps: tens of millions of chunks, as thousands of ranks write
them, lie in files and at offsets that a few thousand runs describe. A value is computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, overload

import numpy as np

from bytecheckpoint.manifest.validation import MAX_BYTES, bad_manifest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_AT_ONCE = 1 << 20
_FEWER_BY = 16
"""Least number of values for each run, on average, with which a column is written as runs."""


class RunColumn:
    """A column of integers as runs of equal differences, which is indexed like an array."""

    def __init__(self, counts: Int64s, steps: Int64s) -> None:
        """Run r has `counts[r]` values, each `steps[r]` more than the value before it. The very first value of the
        column is `steps[0]`: it counts from 0.
        """
        self.counts = counts
        self.steps = steps
        self._ends = np.cumsum(counts)
        rises = counts * steps
        self._before = np.cumsum(rises) - rises
        """The value before each run."""

    @classmethod
    def of(cls, values: np.ndarray | RunColumn) -> RunColumn | None:
        """Returns the column with these values, which an int64 holds; None for too many runs, or without values."""
        if isinstance(values, RunColumn):
            return values
        counts, steps = [], []
        last, num_runs = np.zeros(1, np.int64), 0
        for first in range(0, len(values), _AT_ONCE):
            some = values[first : first + _AT_ONCE].astype(np.int64)
            rises = np.diff(some, prepend=last)
            begins = np.flatnonzero(np.append(True, rises[1:] != rises[:-1]))
            counts.append(np.diff(begins, append=len(some)))
            steps.append(rises[begins])
            last, num_runs = some[-1:], num_runs + len(begins)
            if num_runs > len(values) // _FEWER_BY:
                return None
        return cls(np.concatenate(counts), np.concatenate(steps)) if counts else None

    @classmethod
    def decode(cls, data: memoryview, num_values: int, name: str) -> RunColumn:
        """Decodes what `encode` returns. Raises CheckpointCorruptError (bad_manifest) if that is not `num_values`
        values from 0 to MAX_BYTES.
        """
        if len(data) % 16:
            raise bad_manifest(f"{len(data)} bytes of {name} are no runs")
        counts, steps = np.frombuffer(data, "<i8").astype(np.int64).reshape(2, -1)
        ends = np.cumsum(counts.astype(np.float64) * steps)  # a float cannot wrap around
        is_right = counts.min(initial=1) > 0 and counts.sum(dtype=np.float64) == num_values
        is_right = is_right and np.abs(ends).max(initial=0) <= MAX_BYTES
        if not (is_right and np.cumsum(counts * steps).min(initial=0) >= 0):
            raise bad_manifest(f"the runs of its {name} are not {num_values} numbers from 0 on")
        return cls(counts, steps)

    def encode(self) -> memoryview:
        """Returns the lengths of all runs, then their steps, as little-endian int64."""
        return memoryview(np.stack([self.counts, self.steps]).astype("<i8").tobytes())

    def astype(self, kind: type[np.generic]) -> np.ndarray:
        """Returns all values, as an array of this type."""
        return self[:].astype(kind, copy=False)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[int]:
        return iter(self[:].tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunColumn):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.steps, other.steps)

    __hash__ = None  # type: ignore[assignment]  # as an array's

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice | np.ndarray) -> Int64s: ...
    def __getitem__(self, index: int | slice | np.ndarray) -> int | Int64s:
        if isinstance(index, slice):
            return self._between(*index.indices(len(self)))
        if np.asarray(index).dtype == bool or np.min(index, initial=0) < 0:
            raise IndexError("a column of runs takes places from 0 on, and no mask")
        places = np.asarray(index, np.int64)
        runs = np.searchsorted(self._ends, places, side="right")
        values: Int64s = self._before[runs] + self.steps[runs] * (places - self._ends[runs] + self.counts[runs] + 1)
        return values if values.ndim else int(values)

    def _between(self, start: int, stop: int, step: int) -> Int64s:
        if step != 1 or start >= stop:
            return self[np.arange(start, stop, step)]
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        counts, steps = self.counts[first : last + 1].copy(), self.steps[first : last + 1]
        counts[0] -= start - (self._ends[first] - self.counts[first])  # a run may be far longer than what is asked for
        counts[-1] -= self._ends[last] - stop
        values: Int64s = self[start] - steps[0] + np.cumsum(np.repeat(steps, counts))
        return values
