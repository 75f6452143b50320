"""Ranges of tensors in flat buffers, of which each rank has written a part.

Ranges are in elements. A run is consecutive elements of a tensor that lie in consecutive bytes of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from bytecheckpoint.manifest import Chunk
from bytecheckpoint.region import split_flat_range


class FlatBuffer(NamedTuple):
    """Consecutive elements in a file."""

    file: int
    byte_offset: int
    num_items: int


class FlatRun(NamedTuple):
    """Elements `start` to `start + length` of a flat tensor, and where in a file the first one lies."""

    start: int
    length: int
    file: int
    byte_offset: int


def runs_of(start: int, length: int, buffers: Sequence[FlatBuffer], at: int, *, item_bytes: int) -> Iterator[FlatRun]:
    """Yields the runs of elements `start` to `start + length` of a tensor. Element `start` of the tensor is element
    `at` of these buffers, which are counted through as one.

    Raises ValueError, after the last run, if the buffers end before the last of these elements.
    """
    end = at + length
    first = 0
    for buffer in buffers:
        low, high = max(at, first), min(end, first + buffer.num_items)
        if low < high:
            yield FlatRun(start + low - at, high - low, buffer.file, buffer.byte_offset + (low - first) * item_bytes)
        first += buffer.num_items
    if length and first < end:
        raise ValueError(f"elements {at} to {end} are asked for, and there are {first}")


def chunks_of_runs(shape: Sequence[int], runs: Iterable[FlatRun], *, item_bytes: int) -> list[Chunk]:
    """Returns the chunks of a tensor that lies in these runs."""
    chunks = []
    for start, length, file, byte_offset in runs:
        at = byte_offset
        for region in split_flat_range(shape, start, length):
            num_bytes = region.numel * item_bytes
            chunks.append(Chunk(region, file, at, num_bytes))
            at += num_bytes
    return chunks


class FlatTensor(NamedTuple):
    """A tensor's place in flat memory. That memory is divided over ranks in equal parts."""

    shape: tuple[int, ...]
    first: int
    """Where its first element is in the flat memory of all ranks together, in elements."""


def lay_out(shapes: Sequence[Sequence[int]], paddings: Sequence[int] | None) -> tuple[list[FlatTensor], int]:
    """Places tensors one after the other, each followed by its padding, in elements (none if `paddings` is None).
    Returns the tensors, and the number of elements with all padding.
    """
    lengths = [prod(shape) + padding for shape, padding in zip(shapes, paddings or [0] * len(shapes), strict=True)]
    ends = list(accumulate(lengths, initial=0))
    return [FlatTensor(tuple(shape), first) for shape, first in zip(shapes, ends, strict=False)], ends[-1]


def partition_length(num_items: int, num_ranks: int, alignment: int) -> int:
    """Returns the number of elements of flat memory that each rank has: padded to a multiple of `alignment`."""
    return -(-num_items // (alignment * num_ranks)) * alignment


def shared_runs(placed: FlatTensor, part: int, buffers: Sequence[FlatBuffer], *, item_bytes: int) -> Iterator[FlatRun]:
    """Yields the runs of a tensor in flat memory, as in ZeRO 1 and 2: the buffer of each rank has `part` elements of
    that memory.
    """
    numel = prod(placed.shape)
    for rank, buffer in enumerate(buffers):
        low, high = max(placed.first, rank * part), min(placed.first + numel, (rank + 1) * part)
        if low < high:
            yield from runs_of(low - placed.first, high - low, [buffer], low - rank * part, item_bytes=item_bytes)


def divided_runs(
    shape: Sequence[int], at: int, buffers_by_rank: Sequence[Sequence[FlatBuffer]], *, item_bytes: int
) -> Iterator[FlatRun]:
    """Yields the runs of a tensor that ZeRO 3 has divided: each rank's share begins at element `at` of its buffers."""
    numel = prod(shape)
    share = divided_share(shape, len(buffers_by_rank))
    for rank, buffers in enumerate(buffers_by_rank):
        start = rank * share
        length = max(0, min(share, numel - start))
        yield from runs_of(start, length, buffers, at, item_bytes=item_bytes)


def divided_share(shape: Sequence[int], num_ranks: int) -> int:
    """Returns the number of elements, with padding, that each rank has of a tensor which ZeRO 3 has divided."""
    return -(-prod(shape) // num_ranks)
