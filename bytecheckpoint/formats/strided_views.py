"""Chunks of raw bytes for a view of a storage: one if it lies row-major, else one for each run of elements. Every
view here must have elements: callers know that one without has no chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import Region

MAX_CHUNKS = 1 << 16
"""Most chunks of one tensor. A transposed matrix of more elements is refused rather than read element by element."""


def end_item(shape: Sequence[int], strides: Sequence[int], item_offset: int) -> int:
    """Returns the index after the last element of the storage that a view uses."""
    reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return item_offset + reach + 1


def num_outer_dims(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the least number of leading dimensions over which a view has to be split so that each part lies row-major
    without gaps.
    """
    expected = 1
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1 and strides[dim] != expected:
            return dim + 1
        expected *= shape[dim]
    return 0


def num_chunks(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of chunks of `strided_chunks`."""
    return prod(shape[: num_outer_dims(shape, strides)])


def strided_chunks(
    shape: Sequence[int], strides: Sequence[int], *, file: int, byte_offset: int, item_bytes: int
) -> Iterator[Chunk]:
    """Yields the chunks of a view whose first element is at `byte_offset` of its file. Strides are in elements."""
    num_outer = num_outer_dims(shape, strides)
    inner = tuple(shape[num_outer:])
    lengths = (1,) * num_outer + inner
    num_bytes = prod(inner) * item_bytes
    for indices in product(*map(range, shape[:num_outer])):
        at = byte_offset + item_bytes * sum(map(int.__mul__, indices, strides))
        yield Chunk(Region(indices + (0,) * len(inner), lengths), file, at, num_bytes)
