"""Finds the byte ranges of a file that wanted parts consist of, without the gaps between rows, and names their tensors
for errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bytecheckpoint.errors import and_more
from bytecheckpoint.manifest import Chunk
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, Frame, Part
from bytecheckpoint.region import Region, flat_span, intersect, shifted, split_flat_range


class ByteRange(NamedTuple):
    """Bytes of a file, in rows of equal length and distance, in as many dimensions as it takes."""

    byte_offset: int
    """Offset of the first byte, from the start of the file."""
    lengths: tuple[int, ...]
    """Number of rows in each dimension; the last one in bytes."""
    strides: tuple[int, ...]
    """Distance of rows in each dimension, in bytes; the last one is 1."""

    @property
    def byte_length(self) -> int:
        """Number of bytes, without gaps."""
        total = 1
        for length in self.lengths:
            total *= length
        return total

    @property
    def end(self) -> int:
        """Offset behind the last byte, from the start of the file."""
        return self.byte_offset + 1 + sum((n - 1) * step for n, step in zip(self.lengths, self.strides, strict=True))

    def touches(self, start: int, end: int) -> bool:
        """Returns True if any of its bytes lies in this range of the file."""
        if not self.byte_length or start >= min(end, self.end) or end <= self.byte_offset:
            return False
        if len(self.lengths) == 1:
            return True
        first = ByteRange(self.byte_offset, self.lengths[1:], self.strides[1:])
        stride, row_bytes = self.strides[0], first.end - self.byte_offset
        # Only the first and last of the rows that overlap the range may have no byte of their own in it.
        low = max(0, -(-(start + 1 - self.byte_offset - row_bytes) // stride))
        high = min(self.lengths[0] - 1, (end - 1 - self.byte_offset) // stride)
        if low > high:
            return False
        return high - low > 1 or any(
            first._replace(byte_offset=self.byte_offset + number * stride).touches(start, end) for number in (low, high)
        )


def piece_of(item: Part | Frame) -> ByteRange:
    """Returns the bytes of the file that an item consists of."""
    if not isinstance(item, BoxPart):
        return ByteRange(item.byte_offset, (item.byte_length,), (1,))
    lengths, strides = [item_bytes_of(item)], [1]
    stride = lengths[0]
    for length, chunk_length in zip(reversed(item.region.lengths), reversed(item.chunk.region.lengths), strict=True):
        if stride == lengths[0] * strides[0]:
            lengths[0] *= length
        elif length > 1:
            lengths.insert(0, length)
            strides.insert(0, stride)
        stride *= chunk_length
    return ByteRange(item.byte_offset, tuple(lengths), tuple(strides))


def item_bytes_of(part: BoxPart) -> int:
    """Returns the number of bytes of an element of the part, whose chunk is not compressed."""
    return part.chunk.byte_length // part.chunk.region.numel


def boxes_in_run(
    want: int, chunk: Chunk, wanted: Region, elements: range, *, byte_offset: int, item_bytes: int
) -> Iterator[BoxPart]:
    """Yields, as a few boxes, the elements of the region `wanted` that a chunk has at the row-major indices `elements`.
    `want` is the number of the want; the chunk's first element is at `byte_offset`.
    """
    for box in split_flat_range(chunk.region.lengths, elements.start, len(elements)):
        region = intersect(shifted(box, chunk.region.offsets), wanted)
        if region is not None:
            first, end = flat_span(region, chunk.region)
            yield BoxPart(want, byte_offset + first * item_bytes, (end - first) * item_bytes, region, chunk)


def names_in(fetch: Fetch, fqns: Sequence[str], start: int, end: int) -> str:
    """Names the tensors for which a fetch needs bytes of this range of the file; "" if there is none. `fqns` are those
    of the wants of the load plan.
    """
    touching = [item for item in (*fetch.parts, *fetch.frames) if piece_of(item).touches(start, end)]
    parts = [part for item in touching for part in (item.parts if isinstance(item, Frame) else (item,))]
    return first_names(fqns[part.want] for part in parts)


def first_names(fqns: Iterable[str]) -> str:
    """Returns the distinct names as text, sorted: the first three, and how many follow."""
    return and_more(sorted(set(fqns)), 3)
