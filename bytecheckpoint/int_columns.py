"""Columns of integers as bytes: little-endian, unsigned, all of the same width, so that a million of them encode and
decode at the speed of an array copy. It does not know what the integers count.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bytecheckpoint.manifest_check import bad_manifest, refuse_more_than


def encode_column(values: Iterable[int] | np.ndarray) -> memoryview:
    """The integers as little-endian unsigned ones, each of the fewest bytes (1, 2, 4, 8) that hold the largest."""
    column = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    largest = int(column.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width))
    return memoryview(column.astype(f"<u{width}").tobytes())


def decode_column(data: memoryview, num_values: int, name: str) -> np.ndarray:
    """What `encode_column` wrote. Raises CheckpointCorruptError (bad_manifest) where there are not so many integers."""
    width = len(data) // num_values if num_values else 1
    if width not in {1, 2, 4, 8} or len(data) != width * num_values:
        raise bad_manifest(f"{len(data)} bytes of {name} do not hold {num_values} integers")
    return np.frombuffer(data, dtype=f"<u{width}")


def decode_counts(data: memoryview, num_values: int, name: str, limit: int) -> np.ndarray:
    """A column of numbers of things, of which there are at most `limit` in all.

    Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError (limits_exceeded).
    """
    counts = decode_column(data, num_values, name)
    # A float cannot wrap around, and is exact where the sum is within any limit.
    refuse_more_than(limit, int(counts.sum(dtype=np.float64)), name)
    return counts.astype(np.int64)
