"""Which chunks of two checkpoints hold the same bytes, as far as their manifests can tell: by the checksums of the
extents that the chunks lie in. It reads no data file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from bytecheckpoint.manifest import Chunk, Manifest, TensorRecord


class Checksums:
    """Those of a checkpoint's files, by place."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.files
        self._bounds: dict[int, Sequence[int]] = {}

    def around(self, chunk: Chunk) -> tuple[Any, ...] | None:
        """What says that two chunks of one region and dtype hold the same: the checksums of all extents that a chunk
        touches, how long those are, and where in the first of them it begins. None where its file has no checksums.
        """
        file = self._files[chunk.file]
        if not file.extent_lengths:
            return None
        bounds = self._bounds.get(chunk.file)
        if bounds is None:
            bounds = self._bounds[chunk.file] = [0, *accumulate(file.extent_lengths)]
        first = bisect_right(bounds, chunk.byte_offset) - 1
        last = bisect_left(bounds, chunk.byte_offset + chunk.byte_length)
        lengths, digests = tuple(file.extent_lengths[first:last]), tuple(file.extent_digests[first:last])
        return chunk.codec, chunk.byte_length, chunk.byte_offset - bounds[first], lengths, digests


def have_same_regions(a: TensorRecord, b: TensorRecord) -> bool:
    """Whether two tensors of one shape are cut alike, so that their chunks can be set beside each other."""
    return a.num_chunks == b.num_chunks and list(a.coordinates) == list(b.coordinates)


def unequal_chunks(a: TensorRecord, b: TensorRecord, checksums_a: Checksums, checksums_b: Checksums) -> list[Chunk]:
    """The chunks of the first tensor that may differ from those of the second, which is cut alike and has its dtype."""
    unequal = []
    for chunk_a, chunk_b in zip(a.chunks, b.chunks, strict=True):
        known_a = checksums_a.around(chunk_a)
        if known_a is None or known_a != checksums_b.around(chunk_b):
            unequal.append(chunk_a)
    return unequal
