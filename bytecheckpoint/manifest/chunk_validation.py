"""Checks of the chunks of a manifest, because anyone may have written it: each lies in its tensor and in its file, and
no two share a byte. They work on numpy columns, because there may be millions; a load checks the chunks that it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.manifest.frames import CODECS, FRAME_BYTES, MAX_ENCODED_BYTES
from bytecheckpoint.manifest.records import Columns, DataFile
from bytecheckpoint.manifest.validation import (
    MAX_BYTES,
    bad_manifest,
    first_true,
    itemsizes_of,
    numels_of,
    reduce_runs,
    run_starts,
    shown,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bytecheckpoint.errors import CheckpointCorruptError

    Int64s = NDArray[np.int64]


_LARGE_GRID = 64
"""Number of chunks from which on a grid is looked at as a whole."""


class FileBounds:
    """The files of a manifest laid on one long line of bytes: the bounds of each, and of its extents."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.files = files

    @cached_property
    def byte_lengths(self) -> Int64s:
        return np.array([file.byte_length for file in self.files], dtype=np.int64)

    @cached_property
    def starts(self) -> Int64s:
        return run_starts(self.byte_lengths)

    @cached_property
    def extent_lengths(self) -> Int64s:
        """Lengths of the extents of all files. A file without extents counts as one."""
        cuts = [file.extent_lengths or [file.byte_length] * (file.byte_length > 0) for file in self.files]
        return np.array([length for of_file in cuts for length in of_file], dtype=np.int64)

    @cached_property
    def extent_bounds(self) -> Int64s:
        return np.concatenate([[0], np.cumsum(self.extent_lengths)])

    @cached_property
    def has_extents(self) -> NDArray[np.bool_]:
        return np.array([bool(file.extent_lengths) for file in self.files])


class Spans(NamedTuple):
    """Chunks, in any order, on the line of `FileBounds`: one sort would show all that overlap in any file."""

    starts: Int64s
    byte_lengths: Int64s


def check_chunks(columns: Columns, bounds: FileBounds, fqns: Sequence[str]) -> Spans:
    """Checks the chunks of these tensors, of a manifest that `check_manifest` has passed: each lies in its tensor and
    in its file, and those of a tensor have as many elements together as its shape. `find_shared_bytes` looks for
    shared bytes.

    Raises CheckpointCorruptError (bad_manifest).
    """
    for column in (columns.coordinates, columns.byte_offsets, columns.byte_lengths):
        if column.itemsize == 8 and column.max(initial=0) > MAX_BYTES:
            raise bad_manifest(f"it holds the number {column.max()} among the offsets and lengths of its chunks")
    itemsizes = itemsizes_of(columns, fqns)
    numels = numels_of(columns, itemsizes, fqns)
    tensors = np.repeat(np.arange(len(fqns)), columns.num_chunks)
    chunk_numels = _numels_by_chunk(columns, fqns)
    raw_bytes = chunk_numels * itemsizes[tensors]
    if len(columns.byte_lengths):
        _check_byte_lengths(columns, tensors, raw_bytes, fqns)
    else:
        columns = columns._replace(byte_lengths=raw_bytes)
    _check_volumes(columns, numels, chunk_numels, fqns)
    spans = _check_byte_ranges(columns, tensors, bounds, fqns)
    _check_frames(columns, tensors, raw_bytes, bounds, fqns)
    return spans


def _numels_by_chunk(columns: Columns, fqns: Sequence[str]) -> Int64s:
    """Returns the number of elements of each chunk. In large grids, which thousands of ranks write, it follows from the
    lengths of tensor and part; other chunks are looked at one by one.
    """
    is_large = columns.is_grid & (columns.num_chunks >= _LARGE_GRID)
    chunk_is_large = np.repeat(is_large, columns.num_chunks)
    numels = np.empty(len(chunk_is_large), np.int64)
    others = columns._replace(
        num_dims=columns.num_dims[~is_large],
        num_chunks=columns.num_chunks[~is_large],
        shapes=columns.shapes[np.repeat(~is_large, columns.num_dims)],
        is_grid=columns.is_grid[~is_large],
        grid_parts=columns.grid_parts[~np.repeat(is_large[columns.is_grid], columns.num_dims[columns.is_grid])],
    )
    others = others._replace(coordinates=all_coordinates(others))
    numbers = np.flatnonzero(~is_large)
    numels[~chunk_is_large] = numels_of_chunks(
        others, np.repeat(np.arange(len(numbers)), others.num_chunks), [fqns[number] for number in numbers.tolist()]
    )
    first_dims, first_chunks = run_starts(columns.num_dims), run_starts(columns.num_chunks)
    first_parts = run_starts(columns.num_dims * columns.is_grid)
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Int64s] = {}
    for tensor in np.flatnonzero(is_large).tolist():
        dims, chunk = int(columns.num_dims[tensor]), int(first_chunks[tensor])
        shape = tuple(columns.shapes[first_dims[tensor] :][:dims].tolist())
        part = tuple(columns.grid_parts[first_parts[tensor] :][:dims].tolist())
        if (shape, part) not in known:
            known[shape, part] = _numels_of_grid(shape, part)
        numels[chunk : chunk + int(columns.num_chunks[tensor])] = known[shape, part]
    return numels


def _numels_of_grid(shape: tuple[int, ...], part: tuple[int, ...]) -> Int64s:
    """Returns the number of elements of each part of a grid, in row-major order."""
    numels = np.ones(1, np.int64)
    for length, part_length in zip(shape, part, strict=True):
        lengths = np.full(-(-length // part_length), part_length, np.int64)
        lengths[-1] = length - (len(lengths) - 1) * part_length
        numels = np.multiply.outer(numels, lengths).reshape(-1)
    return numels


def all_coordinates(columns: Columns) -> np.ndarray:
    """Returns the coordinates of every chunk of these tensors, chunks of grids included, laid out as in
    `Columns.coordinates`: int64 if any tensor is a grid, else the column itself, whose integers may be unsigned.
    """
    if not columns.is_grid.any():
        return columns.coordinates
    counts = 2 * columns.num_dims * columns.num_chunks
    coordinates = np.empty(int(counts.sum()), np.int64)
    from_grid = np.repeat(columns.is_grid, counts)
    coordinates[~from_grid] = columns.coordinates
    coordinates[from_grid] = _grid_coordinates(columns)
    return coordinates


def _grid_coordinates(columns: Columns) -> Int64s:
    num_dims, num_chunks = columns.num_dims[columns.is_grid], columns.num_chunks[columns.is_grid]
    shapes = columns.shapes[np.repeat(columns.is_grid, columns.num_dims)].astype(np.int64)
    parts = columns.grid_parts.astype(np.int64)
    tensors = np.repeat(np.arange(len(num_dims)), num_chunks)
    left = np.arange(len(tensors)) - run_starts(num_chunks)[tensors]
    first_dims, dims_of_chunks = run_starts(num_dims), num_dims[tensors]
    first_coordinates = run_starts(2 * dims_of_chunks)
    coordinates = np.empty(int((2 * dims_of_chunks).sum()), np.int64)
    for dim_from_end in range(1, int(num_dims.max(initial=0)) + 1):
        chunks = np.flatnonzero(dims_of_chunks >= dim_from_end)
        dim = dims_of_chunks[chunks] - dim_from_end
        at = first_dims[tensors[chunks]] + dim
        left[chunks], index = np.divmod(left[chunks], -(-shapes[at] // parts[at]))
        target = first_coordinates[chunks] + dim
        coordinates[target] = index * parts[at]
        coordinates[target + dims_of_chunks[chunks]] = np.minimum(parts[at], shapes[at] - index * parts[at])
    return coordinates


def numels_of_chunks(columns: Columns, tensors: Int64s, fqns: Sequence[str]) -> Int64s:
    """Returns the number of elements of each chunk. Raises CheckpointCorruptError (bad_manifest) if one reaches out of
    its tensor's shape.
    """
    num_dims = columns.num_dims[tensors]
    first_coordinates = run_starts(2 * num_dims)
    first_dims = run_starts(columns.num_dims)[tensors]
    numels = np.ones(len(tensors), dtype=np.int64)
    for dim in range(int(num_dims.max(initial=0))):
        chunks = np.flatnonzero(num_dims > dim)
        at = first_coordinates[chunks] + dim
        offsets = columns.coordinates[at].astype(np.int64)
        lengths = columns.coordinates[at + num_dims[chunks]].astype(np.int64)
        outside = lengths > columns.shapes[first_dims[chunks] + dim].astype(np.int64) - offsets
        if outside.any():
            first = first_true(outside)
            raise bad_manifest(
                f"a chunk of {shown(fqns[tensors[chunks[first]]])} has elements {offsets[first]} to "
                f"{int(offsets[first]) + int(lengths[first])} of dimension {dim}, which its shape does not have"
            )
        numels[chunks] *= lengths
    return numels


def _check_byte_lengths(columns: Columns, tensors: Int64s, raw_bytes: Int64s, fqns: Sequence[str]) -> None:
    byte_lengths = columns.byte_lengths.astype(np.int64)
    # Of a codec that only a later release knows nothing can be said; the planner refuses the chunk.
    wrong = _is_stored_by(columns, ("none",)) & (byte_lengths != raw_bytes)
    wrong |= _is_stored_by(columns, CODECS) & (byte_lengths > raw_bytes)
    if wrong.any():
        chunk = first_true(wrong)
        raise bad_manifest(
            f"a chunk of {shown(fqns[tensors[chunk]])} has {columns.byte_lengths[chunk]} bytes, "
            f"its region takes {raw_bytes[chunk]}"
        )


def _is_stored_by(columns: Columns, codecs: Collection[str]) -> NDArray[np.bool_]:
    if not columns.codec_names:
        return np.full(len(columns.files), "none" in codecs)
    stored: NDArray[np.bool_] = np.array([name in codecs for name in columns.codec_names])[columns.codecs]
    return stored


def _check_volumes(columns: Columns, numels: Int64s, chunk_numels: Int64s, fqns: Sequence[str]) -> None:
    # Halves are summed apart: a sum of many chunks that wrapped around could look right.
    low = reduce_runs(np.add, chunk_numels & 0xFFFFFFFF, columns.num_chunks, empty=0)
    high = reduce_runs(np.add, chunk_numels >> 32, columns.num_chunks, empty=0) + (low >> 32)
    wrong = (high != numels >> 32) | (low & 0xFFFFFFFF != numels & 0xFFFFFFFF)
    if wrong.any():
        tensor = first_true(wrong)
        raise bad_manifest(
            f"the chunks of {shown(fqns[tensor])} have {(int(high[tensor]) << 32) + (int(low[tensor]) & 0xFFFFFFFF)} "
            f"elements, its shape has {numels[tensor]}"
        )


def _check_byte_ranges(columns: Columns, tensors: Int64s, bounds: FileBounds, fqns: Sequence[str]) -> Spans:
    files = bounds.files
    if columns.files.max(initial=0) >= len(files) and len(tensors):
        chunk = int(np.argmax(columns.files))
        raise bad_manifest(
            f"a chunk of {shown(fqns[tensors[chunk]])} lies in file {columns.files[chunk]} of {len(files)}"
        )
    offsets, lengths = columns.byte_offsets.astype(np.int64), columns.byte_lengths.astype(np.int64, copy=False)
    outside = lengths > bounds.byte_lengths[columns.files] - offsets
    if outside.any():
        chunk = first_true(outside)
        raise outside_file(fqns[tensors[chunk]], files[columns.files[chunk]], offsets[chunk], lengths[chunk])
    return Spans(bounds.starts[columns.files] + offsets, lengths)


def outside_file(fqn: str, file: DataFile, byte_offset: int, byte_length: int) -> CheckpointCorruptError:
    """Returns the error for a chunk that reaches beyond the end of its file."""
    return bad_manifest(
        f"a chunk of {shown(fqn)} has {byte_length} bytes from byte {byte_offset} on "
        f"of file {shown(file.name)}, which has {file.byte_length}"
    )


def find_shared_bytes(spans: Spans) -> tuple[int, int] | None:
    """Returns the numbers of two chunks that have a byte in common; None where there are none."""
    starts, ends = spans.starts, spans.starts + spans.byte_lengths
    numbers = np.flatnonzero(spans.byte_lengths > 0)
    if len(numbers) < len(starts):
        starts, ends = starts[numbers], ends[numbers]
    order = np.argsort(starts, kind="stable")
    overlaps = starts[order[1:]] < ends[order[:-1]]
    if not overlaps.any():
        return None
    first = first_true(overlaps)
    return int(numbers[order[first]]), int(numbers[order[first + 1]])


def shared_bytes(fqns: tuple[str, str], file: DataFile, byte_offset: int) -> CheckpointCorruptError:
    """Returns the error for chunks of two tensors that have a byte in common."""
    return bad_manifest(
        f"a chunk of {shown(fqns[0])} and one of {shown(fqns[1])} share bytes of file {shown(file.name)}, at "
        f"{byte_offset}"
    )


def _check_frames(
    columns: Columns, tensors: Int64s, raw_bytes: Int64s, bounds: FileBounds, fqns: Sequence[str]
) -> None:
    """Raises CheckpointCorruptError (bad_manifest) for a compressed chunk that does not consist of whole extents, one
    for each frame and none longer than a compressed frame can be.
    """
    chunks = np.flatnonzero(_is_stored_by(columns, CODECS[1:]))
    if not len(chunks):
        return
    # As with byte ranges, every file has its own stretch of one long line, here cut where an extent ends.
    cuts, of_files = bounds.extent_bounds, columns.files[chunks]
    starts = bounds.starts[of_files] + columns.byte_offsets[chunks].astype(np.int64)
    ends = starts + columns.byte_lengths[chunks].astype(np.int64)
    first, last = np.searchsorted(cuts, starts), np.searchsorted(cuts, ends)
    too_long = np.flatnonzero(bounds.extent_lengths > MAX_ENCODED_BYTES)
    wrong = (cuts[first] != starts) | (cuts[last] != ends) | (last - first != -(-raw_bytes[chunks] // FRAME_BYTES))
    wrong |= np.searchsorted(too_long, last) > np.searchsorted(too_long, first)
    wrong |= ~bounds.has_extents[of_files]
    if wrong.any():
        chunk = chunks[first_true(wrong)]
        file = bounds.files[columns.files[chunk]]
        raise bad_manifest(
            f"a compressed chunk of {shown(fqns[tensors[chunk]])} has {columns.byte_lengths[chunk]} bytes from byte "
            f"{columns.byte_offsets[chunk]} on of file {shown(file.name)}, which are not one "
            f"whole extent of at most {MAX_ENCODED_BYTES} bytes for every {FRAME_BYTES} of its {raw_bytes[chunk]} bytes"
        )
