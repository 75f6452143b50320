"""Computes statistics of the values of tensors, read once, chunk by chunk, in bounded memory. The parts are read as a
load reads them: few large ranges of a file, each verified.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from bytecheckpoint.loading.replacement import detect_replacement
from bytecheckpoint.manifest.ranges import Fetch, Part
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planner.byte_ranges import names_in
from bytecheckpoint.planner.load_plan import Want, plan_load
from bytecheckpoint.region import whole
from bytecheckpoint.storage.layout import check_files
from bytecheckpoint.storage.range_reader import HostMemory, run_fetches

from ..arguments import Opened
from .element_values import decode_values, has_values

_PART_BYTES = 2 << 20
"""Bytes that are decoded at once. They are converted to float64, so a thread takes several times this."""
_FETCH_BYTES = 8 << 20
_NUM_BINS = 64


class TensorStats:
    """Statistics of the values seen so far. Infinities and NaN are counted, and left out of everything else. Where sums
    of huge values overflow float64, `mean` and `std` are NaN or infinite.
    """

    def __init__(self) -> None:
        self.min: float | int | None = None
        self.max: float | int | None = None
        self.num_nan = self.num_inf = self.num_zeros = 0
        self._count = 0
        self._mean = self._squares = 0.0

    @property
    def mean(self) -> float | None:
        return self._mean if self._count else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the finite values, taken as a population; None without any."""
        return math.sqrt(max(self._squares, 0.0) / self._count) if self._count else None

    def as_json(self) -> dict[str, float | int | None]:
        """Returns the statistics by the names of docs/cli.md."""
        numbers = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        return {**numbers, "num_nan": self.num_nan, "num_inf": self.num_inf, "num_zeros": self.num_zeros}

    def add(self, values: np.ndarray) -> None:
        """Adds values. Of complex ones only NaN, infinities and zeros are counted: they have no order."""
        self.num_zeros += int(values.size - np.count_nonzero(values))
        if values.dtype.kind not in "iu":
            is_nan = np.isnan(values)
            is_finite = np.isfinite(values)
            self.num_nan += int(np.count_nonzero(is_nan))
            self.num_inf += int(np.count_nonzero(~is_finite & ~is_nan))
            values = values if is_finite.all() else values[is_finite]
        if values.size and values.dtype.kind != "c":
            self._add_finite(values)

    def _add_finite(self, values: np.ndarray) -> None:
        low, high = values.min().item(), values.max().item()
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        # Chan, Golub, LeVeque (1983): means and sums of squared differences of two parts as those of the whole.
        with np.errstate(over="ignore", invalid="ignore"):
            wide = values.astype(np.float64)
            mean = float(wide.mean())
            wide -= mean
            squares = float(np.dot(wide, wide))
        total = self._count + values.size
        delta = mean - self._mean
        self._mean += delta * values.size / total
        self._squares += squares + delta * delta * self._count * values.size / total
        self._count = total


class Histogram:
    """Counts of the finite values from `low` to `high`, in bins of equal width: from the least to the largest value, or
    around the only one.
    """

    def __init__(self, stats: TensorStats) -> None:
        self.stats = stats
        self.low, self.high = float(stats.min or 0.0), float(stats.max or 0.0)
        if self.low == self.high:
            margin, limit = max(abs(self.low) / 2, 0.5), sys.float_info.max
            self.low, self.high = max(self.low - margin, -limit), min(self.high + margin, limit)
        self.counts = np.zeros(_NUM_BINS, np.int64)

    def add(self, values: np.ndarray) -> None:
        """Adds values; leaves out those that are not finite."""
        wide = values.astype(np.float64)
        # Not by np.histogram, which refuses values so close that bins would be narrower than a float64 can tell.
        bins = (wide[np.isfinite(wide)] - self.low) / (self.high - self.low) * _NUM_BINS
        # Values beyond, of a file that was replaced since the statistics were taken, fall into the first and last bins.
        self.counts += np.bincount(np.clip(bins, 0, _NUM_BINS - 1).astype(np.int64), minlength=_NUM_BINS)


def tensor_stats(opened: Opened, fqns: Sequence[str], *, on_progress: Callable[[int], None]) -> dict[str, TensorStats]:
    """Returns the statistics of these stored tensors; dtypes without numbers (packed bits) are left out.

    Raises the errors of a load. `on_progress` gets the number of bytes read since its last call.
    """
    found = {fqn: TensorStats() for fqn in fqns if has_values(opened.manifest.describe(fqn)[0])}
    _read_values(opened, found, on_progress)
    return found


def histograms_of(
    opened: Opened, stats: Mapping[str, TensorStats], *, on_progress: Callable[[int], None]
) -> dict[str, Histogram]:
    """Reads these tensors once more, and returns histograms of their values. Tensors without a finite real value, or
    whose values span more than a float64 can hold, are left out. Raises like `tensor_stats`.
    """
    found = {fqn: Histogram(of_fqn) for fqn, of_fqn in stats.items() if of_fqn.min is not None}
    found = {fqn: histogram for fqn, histogram in found.items() if math.isfinite(histogram.high - histogram.low)}
    _read_values(opened, found, on_progress)
    return found


def _read_values(
    opened: Opened, accumulators: Mapping[str, TensorStats | Histogram], on_progress: Callable[[int], None]
) -> None:
    """Adds all values of each of these tensors to its accumulator."""
    manifest, options = opened.manifest, LoadOptions()
    wanted = list(accumulators)
    # Before anything is planned: a manifest may claim a tensor of any size.
    with detect_replacement(opened.store, opened.folder, manifest):
        files = {file for fqn in wanted for file in manifest.tensors[fqn].files}
        check_files(opened.store, opened.folder, manifest, files)
    lock = threading.Lock()
    wants = [Want(fqn, whole(manifest.describe(fqn)[1]), is_flat=False) for fqn in wanted]
    fetches = plan_load(manifest, wants, verify=options.verify, max_gap_bytes=0, max_fetch_bytes=_FETCH_BYTES)

    def add(parts: Sequence[Part], byte_offset: int, content: memoryview) -> None:
        for part in parts:
            fqn = wanted[part.want]
            stored = content[part.byte_offset - byte_offset :][: part.byte_length]
            for start in range(0, part.byte_length, _PART_BYTES):
                values = decode_values(manifest.describe(fqn)[0], stored[start : start + _PART_BYTES])
                with lock:
                    accumulators[fqn].add(values)
        with lock:
            on_progress(sum(part.byte_length for part in parts))

    run_fetches(
        opened.store,
        opened.folder,
        manifest.files,
        [_placed_by(fetch, add, wanted) for fetch in fetches],
        threads=options.reader_threads,
        verify=options.verify,
        scratch_bytes=options.scratch_bytes,
        memory=HostMemory(),
    )


def _placed_by(fetch: Fetch, add: Callable[[Sequence[Part], int, memoryview], None], fqns: Sequence[str]) -> Fetch:
    return fetch._replace(
        place=partial(add, fetch.parts, fetch.byte_offset),
        wanted_by=partial(names_in, fetch, fqns),
        frames=tuple(frame._replace(place=partial(add, frame.parts, 0)) for frame in fetch.frames),
    )
