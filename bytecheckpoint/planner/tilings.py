"""Proofs that many regions tile a shape, for the layouts that thousands of ranks have: regular grids, and runs of the
flat tensor. What is proved here costs a few operations on arrays; what is not has to be looked at region by region.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from bytecheckpoint.region import grid_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


def flat_starts(shape: Sequence[int], offsets: Int64s) -> Int64s:
    """The number of each region's first element in the row-major flat tensor. Sorts regions as their offsets do."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return offsets @ np.array(strides, np.int64)


def find_grid(shape: Sequence[int], offsets: Int64s, lengths: Int64s) -> tuple[int, ...] | None:
    """The lengths of a part where the regions, sorted by offsets and none empty, are a regular grid; see region.py."""
    part = lengths[0]
    counts = grid_counts(shape, part.tolist())
    if prod(counts) != len(offsets):
        return None
    indices = np.stack(np.unravel_index(np.arange(len(offsets)), counts), axis=1) if counts else offsets
    expected = indices * part
    is_grid = np.array_equal(offsets, expected) and np.array_equal(
        lengths, np.minimum(part, np.array(shape, np.int64) - expected)
    )
    return tuple(part.tolist()) if is_grid else None


def are_runs(shape: Sequence[int], starts: Int64s, lengths: Int64s) -> bool:
    """Whether the regions, sorted and none empty, are runs of the flat tensor that follow one another to its end."""
    ends = np.cumsum(lengths.prod(axis=1))
    if ends[-1] != prod(shape) or not np.array_equal(starts, np.concatenate([[0], ends[:-1]])):
        return False
    is_partial = lengths != np.array(shape, np.int64)
    # A run has one row of every dimension that lies before one of which it has only a part.
    partial_after = np.cumsum(is_partial[:, ::-1], axis=1)[:, ::-1] - is_partial > 0
    return bool((lengths[partial_after] == 1).all())
