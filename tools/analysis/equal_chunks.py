"""Finds chunks of two checkpoints that hold the same bytes, by the checksums of the extents in which they lie. It
works on columns, because there may be a million chunks, and reads no data file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bytecheckpoint.manifest import DataFile, Manifest
from bytecheckpoint.manifest.chunk_validation import all_coordinates, numels_of_chunks
from bytecheckpoint.manifest.validation import itemsizes_of
from bytecheckpoint.region import Region


class ChunkColumns:
    """All chunks of a checkpoint, tensor by tensor, as columns."""

    def __init__(self, manifest: Manifest) -> None:
        columns, fqns = manifest.table.columns, list(manifest.tensors)
        columns = columns._replace(coordinates=all_coordinates(columns), is_grid=np.zeros(len(fqns), bool))
        of_tensors = np.repeat(np.arange(len(fqns)), columns.num_chunks)
        raw_bytes = numels_of_chunks(columns, of_tensors, fqns) * itemsizes_of(columns, fqns)[of_tensors]
        names = np.array(columns.codec_names or ["none"])
        self.manifest = manifest
        self.files = columns.files.astype(np.int64)
        self.byte_offsets = columns.byte_offsets.astype(np.int64)
        self.byte_lengths = columns.byte_lengths.astype(np.int64) if len(columns.byte_lengths) else raw_bytes
        self.codecs = names[columns.codecs.astype(np.int64)] if len(columns.codecs) else np.full(len(raw_bytes), "none")
        self._indices = {fqn: index for index, fqn in enumerate(fqns)}
        self._starts = np.cumsum([0, *columns.num_chunks.tolist()]).tolist()
        self._coordinates = columns.coordinates
        self._coordinate_starts = np.cumsum([0, *(2 * columns.num_dims * columns.num_chunks).tolist()]).tolist()

    def chunk_numbers(self, fqn: str) -> range:
        """Returns the numbers of the chunks of a tensor, counted over all chunks of the checkpoint."""
        index = self._indices[fqn]
        return range(self._starts[index], self._starts[index + 1])

    def coordinates(self, fqn: str) -> np.ndarray:
        """Returns the offsets and then the lengths of each chunk of a tensor, one chunk after the other."""
        index = self._indices[fqn]
        return self._coordinates[self._coordinate_starts[index] : self._coordinate_starts[index + 1]]

    def regions(self, fqn: str, numbers: Sequence[int]) -> list[Region]:
        """Returns the regions of some chunks of a tensor, by their numbers within it."""
        num_dims = len(self.manifest.describe(fqn)[1])
        rows = self.coordinates(fqn).reshape(len(self.chunk_numbers(fqn)), 2, num_dims)
        return [Region(tuple(offsets), tuple(lengths)) for offsets, lengths in rows[list(numbers)].tolist()]


def are_cut_alike(a: ChunkColumns, fqn_a: str, b: ChunkColumns, fqn_b: str) -> bool:
    """Returns True if two tensors of one shape have chunks of the same regions, in the same order."""
    return len(a.chunk_numbers(fqn_a)) == len(b.chunk_numbers(fqn_b)) and np.array_equal(
        a.coordinates(fqn_a), b.coordinates(fqn_b)
    )


def known_equal(a: ChunkColumns, b: ChunkColumns, chunks_a: np.ndarray, chunks_b: np.ndarray) -> np.ndarray:
    """Returns, for pairs of chunks with one region and dtype, True where the manifests show that they hold the same,
    and False where they do not show it.

    They show it where both have one codec and length, and lie at the same place in runs of extents that have the same
    lengths and checksums.
    """
    files_a, files_b = a.files[chunks_a], b.files[chunks_b]
    equal: np.ndarray = (a.codecs[chunks_a] == b.codecs[chunks_b]) & (
        a.byte_lengths[chunks_a] == b.byte_lengths[chunks_b]
    )
    order = np.lexsort((files_b, files_a))
    changes = np.flatnonzero((np.diff(files_a[order]) != 0) | (np.diff(files_b[order]) != 0)) + 1
    for pairs in np.split(order, changes) if len(order) else ():
        first = pairs[0]
        files = a.manifest.files[files_a[first]], b.manifest.files[files_b[first]]
        starts = a.byte_offsets[chunks_a[pairs]], b.byte_offsets[chunks_b[pairs]]
        equal[pairs] &= _equal_in(files, starts, a.byte_lengths[chunks_a[pairs]])
    return equal


def _equal_in(
    files: tuple[DataFile, DataFile], starts: tuple[np.ndarray, np.ndarray], byte_lengths: np.ndarray
) -> np.ndarray:
    """Returns True for each pair of chunks at the same place in equal extents. All pairs lie in one file on each side;
    no pair is equal if one of the files has no extents.
    """
    equal = np.zeros(len(byte_lengths), bool)
    if not (files[0].extent_lengths and files[1].extent_lengths):
        return equal
    lengths_a, lengths_b = (np.array(file.extent_lengths, np.uint64) for file in files)
    digests_a, digests_b = (np.array(file.extent_digests, np.uint64) for file in files)
    (first_a, stop_a, lead_a), (first_b, stop_b, lead_b) = (
        _extents_around(lengths, start, byte_lengths)
        for lengths, start in zip((lengths_a, lengths_b), starts, strict=True)
    )
    candidates = np.flatnonzero((lead_a == lead_b) & (stop_a - first_a == stop_b - first_b))
    shifts = first_b[candidates] - first_a[candidates]
    for shift in np.unique(shifts).tolist():
        chosen = candidates[shifts == shift]
        low, high = int(first_a[chosen].min()), int(stop_a[chosen].max())
        range_a, range_b = slice(low, high), slice(low + shift, high + shift)
        differs = (lengths_a[range_a] != lengths_b[range_b]) | (digests_a[range_a] != digests_b[range_b])
        num_differing = np.concatenate([[0], np.cumsum(differs)])
        equal[chosen] = num_differing[stop_a[chosen] - low] == num_differing[first_a[chosen] - low]
    return equal


def _extents_around(
    lengths: np.ndarray, starts: np.ndarray, byte_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each chunk the index of its first extent, the index after that of its last, and its start within the
    first, in bytes.
    """
    bounds = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
    first = np.searchsorted(bounds, starts, side="right") - 1
    stop = np.maximum(np.searchsorted(bounds, starts + byte_lengths, side="left"), first)
    return first, stop, starts - bounds[first]
