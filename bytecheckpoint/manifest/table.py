"""The tensors of a manifest as columns. Records are made and checked on demand, because most ranks want few chunks of a
checkpoint's millions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest.chunk_validation import (
    FileBounds,
    Spans,
    all_coordinates,
    check_chunks,
    find_shared_bytes,
    outside_file,
    shared_bytes,
)
from bytecheckpoint.manifest.records import Chunk, Columns, DataFile, TensorRecord
from bytecheckpoint.manifest.validation import bad_manifest, first_true, itemsizes_of, numels_of, run_starts, shown
from bytecheckpoint.region import (
    Region,
    TilingFault,
    count_parts_meeting,
    find_tiling_fault,
    grid_regions,
    parts_meeting,
    whole,
)

_CHUNKS_AT_ONCE = 1 << 20
"""Number of chunks that are checked at once, which bounds the memory that the check of millions takes."""
_CHUNKS_SORTED = 1 << 22
"""About how many chunks are sorted at once to find bytes that two of them share."""

_MANY_CHUNKS = 64
"""Chunks of a tensor, on average, from which on a look at each tensor in turn takes less time than to sort them."""
_CHUNKS_ONE_BY_ONE = 4096
"""Limit for chunks of one tensor that are checked as they are found. If more are asked for, all are checked first."""


class RowChunks(NamedTuple):
    """How each tensor that was asked for is cut, as columns: known only where it is cut between its rows, in equal
    parts, or not at all. A row is an index of the first dimension; a 0-d tensor has one.
    """

    is_known: np.ndarray
    """True where the tensor is cut so, in a manifest where no chunk is compressed. Elsewhere the other columns mean
    nothing."""
    num_rows: np.ndarray
    chunk_rows: np.ndarray
    """Rows of each chunk; the last one may have fewer."""
    row_bytes: np.ndarray
    first_chunks: np.ndarray
    """Number of the tensor's first chunk in the table."""

    def of(self, tensors: np.ndarray) -> RowChunks:
        """Returns the entries of these tensors, which are given by their index into the columns."""
        return RowChunks(*(column[tensors] for column in self))


class ChunkPlaces(NamedTuple):
    """Places of chunks in data files, as columns."""

    files: np.ndarray
    byte_offsets: np.ndarray


class TensorSizes(NamedTuple):
    """Sizes of all tensors, uncompressed, as columns with an entry a tensor."""

    num_elements: np.ndarray
    byte_lengths: np.ndarray


class TensorTable(Mapping[str, TensorRecord]):
    """The tensors of a manifest by FQN, as columns, and the files in which their chunks lie.

    Methods raise CheckpointCorruptError (bad_manifest) if the chunks that they look at cannot be right. In a table made
    with `is_checked` the chunks are taken to be right, and most checks are left out.
    """

    def __init__(
        self,
        fqns: Sequence[str],
        columns: Columns,
        files: Sequence[DataFile],
        *,
        may_share_bytes: bool = False,
        is_checked: bool = False,
    ) -> None:
        self._indices = dict(zip(fqns, range(len(fqns)), strict=True))
        if len(self._indices) != len(fqns):
            raise bad_manifest("it lists a tensor twice")
        self.columns = columns
        self._bounds = FileBounds(files)
        self._may_share_bytes = may_share_bytes
        self._first_dims = _starts(columns.num_dims)
        self._first_chunks = _starts(columns.num_chunks)
        self._first_parts = _starts(columns.num_dims * columns.is_grid)
        self._first_coordinates = _starts(2 * columns.num_dims * columns.num_chunks * ~columns.is_grid)
        self._checked = set(range(len(fqns))) if is_checked else set()
        """Tensors whose own chunks are right. Bytes that two tensors share are found when all are checked."""
        self._is_all_checked = is_checked or not fqns
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}

    def check_all(self) -> None:
        """Checks every chunk, unless that was done. Raises CheckpointCorruptError (bad_manifest)."""
        if self._is_all_checked:
            return
        fqns = list(self._indices)
        spans = [check_chunks(self._slice(*batch), self._bounds, fqns[slice(*batch)]) for batch in self._batches()]
        if not self._may_share_bytes and not self._lie_in_order(spans):
            self._refuse_bytes_shared_by_any(spans)
        self._checked.update(range(len(fqns)))
        self._is_all_checked = True

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Yields (first, end) of ranges of tensors: each has few enough chunks, or is one tensor."""
        bounds = [0]
        while bounds[-1] < len(self):
            limit = self._first_chunks[bounds[-1]] + _CHUNKS_AT_ONCE
            bounds.append(max(bounds[-1] + 1, int(np.searchsorted(self._first_chunks, limit, side="right")) - 1))
        return pairwise(bounds)

    def _lie_in_order(self, spans: Sequence[Spans]) -> bool:
        """Returns True if no two chunks of a tensor lie in one file, and the tensors follow one another in one order in
        all files, as thousands of ranks write them: no two chunks share bytes then, which is known without sorting the
        chunks. False where that is not so, or takes longer than sorting because the tensors have few chunks.
        """
        if sum(len(each.starts) for each in spans) < _MANY_CHUNKS * len(self):
            return False
        tensors: list[tuple[np.ndarray, Spans]] = []
        """Files and spans of the chunks of each tensor that has any."""
        for (first, last), each in zip(self._batches(), spans, strict=True):
            before = self._first_chunks[first]
            bounds = pairwise(self._first_chunks[first : last + 1])
            slices = [slice(start - before, end - before) for start, end in bounds if end > start]
            files = self.columns.files[before : self._first_chunks[last]]
            tensors += [(files[some], Spans(each.starts[some], each.byte_lengths[some])) for some in slices]
        ends = self._bounds.starts.copy()
        """End of what was seen so far of each file, on the line of `FileBounds`."""
        last_chunks = np.zeros(len(ends), np.int64)
        for files, (starts, lengths) in sorted(tensors, key=lambda tensor: int(tensor[1].starts[0])):
            numbers = np.arange(len(files))
            last_chunks[files] = numbers
            if (last_chunks[files] != numbers).any() or (starts < ends[files]).any():
                return False
            ends[files] = starts + lengths
        return True

    def _refuse_bytes_shared_by_any(self, spans: Sequence[Spans]) -> None:
        """Raises CheckpointCorruptError (bad_manifest) if any two chunks share bytes. Looks at some files at a time:
        sorting fifty million chunks takes gigabytes.
        """
        total = sum(len(each.starts) for each in spans)
        firsts = [*accumulate((len(each.starts) for each in spans), initial=0)][:-1]
        num_parts = min(-(-total // _CHUNKS_SORTED) or 1, len(self._bounds.files) or 1)
        cuts = [self._bounds.starts[len(self._bounds.files) * part // num_parts] for part in range(1, num_parts)]
        for start, end in pairwise([-1, *cuts, np.iinfo(np.int64).max]):
            picked = [(each.starts >= start) & (each.starts < end) for each in spans]
            some = [Spans(*(column[mask] for column in each)) for each, mask in zip(spans, picked, strict=True)]
            found = find_shared_bytes(Spans(*map(np.concatenate, zip(*some, strict=True))))
            if found is not None:
                chunks = np.concatenate(
                    [first + np.flatnonzero(mask) for first, mask in zip(firsts, picked, strict=True)]
                )
                raise self._shared_bytes([int(chunks[number]) for number in found])

    def _shared_bytes(self, chunks: Sequence[int]) -> CheckpointCorruptError:
        """Makes the error for two chunks that share bytes."""
        owners = self._owners(chunks)
        file = self._bounds.files[self.columns.files[chunks[0]]]
        return shared_bytes((owners[0], owners[1]), file, int(self.columns.byte_offsets[chunks[1]]))

    def refuse_shared_bytes(
        self, fqn_of: Callable[[int], str], files: np.ndarray, byte_offsets: np.ndarray, byte_lengths: np.ndarray
    ) -> None:
        """Raises CheckpointCorruptError (bad_manifest) if two of these chunks share a byte; does nothing for files of
        another format, in which they may. The chunks are given as columns, none twice; `fqn_of` returns the FQN of the
        one at an index.
        """
        if self._may_share_bytes:
            return
        found = find_shared_bytes(Spans(self._bounds.starts[files] + byte_offsets, byte_lengths))
        if found is not None:
            first, second = found
            file = self._bounds.files[files[second]]
            raise shared_bytes((fqn_of(first), fqn_of(second)), file, int(byte_offsets[second]))

    def _slice(self, first: int, last: int) -> Columns:
        """Returns the columns of the tensors from `first` on, before `last`."""
        columns = self.columns
        chunks = slice(self._first_chunks[first], self._first_chunks[last])
        return columns._replace(
            dtypes=columns.dtypes[first:last],
            num_dims=columns.num_dims[first:last],
            num_chunks=columns.num_chunks[first:last],
            shapes=columns.shapes[self._first_dims[first] : self._first_dims[last]],
            is_grid=columns.is_grid[first:last],
            grid_parts=columns.grid_parts[self._first_parts[first] : self._first_parts[last]],
            coordinates=columns.coordinates[self._first_coordinates[first] : self._first_coordinates[last]],
            files=columns.files[chunks],
            byte_offsets=columns.byte_offsets[chunks],
            byte_lengths=columns.byte_lengths[chunks],
            codecs=columns.codecs[chunks],
        )

    def _checked_slice(self, fqn: str) -> Columns:
        """Returns the columns of one tensor. The first call for a tensor checks its chunks, and that no two of them
        share bytes, unless chunks may. Raises CheckpointCorruptError (bad_manifest).
        """
        index = self._indices[fqn]
        columns = self._slice(index, index + 1)
        if index not in self._checked:
            spans = check_chunks(columns, self._bounds, [fqn])
            found = None if self._may_share_bytes else find_shared_bytes(spans)
            if found is not None:
                raise self._shared_bytes([self._first_chunks[index] + chunk for chunk in found])
            self._checked.add(index)
        return columns

    def __getitem__(self, fqn: str) -> TensorRecord:
        columns = self._checked_slice(fqn)
        dtype, shape = self.describe(fqn)
        if columns.is_grid[0]:
            regions = grid_regions(shape, columns.grid_parts.tolist())
            coordinates = [number for region in regions for number in (*region.offsets, *region.lengths)]
        else:
            coordinates = columns.coordinates.tolist()
        files, byte_lengths = columns.files.tolist(), columns.byte_lengths.tolist()
        if not byte_lengths:
            width, item_bytes = len(shape), itemsize(dtype)
            starts = range(width, width + 2 * width * len(files), 2 * width) if width else [0] * len(files)
            byte_lengths = [item_bytes * prod(coordinates[start : start + width]) for start in starts]
        return TensorRecord(
            dtype, shape, coordinates, files, columns.byte_offsets.tolist(), byte_lengths, _codecs(columns)
        )

    def chunks_meeting(self, fqn: str, region: Region) -> list[Chunk]:
        """Returns the chunks that hold elements of the region, once they are checked. Others of a grid cost nothing."""
        index = self._indices[fqn]
        columns = self.columns
        if not columns.is_grid[index] or len(columns.byte_lengths):
            return self._select(self._checked_slice(fqn), fqn, region)
        dtype, shape = self.describe(fqn)
        if self._first_chunks[index + 1] - self._first_chunks[index] == 1:
            # Nearly all of many small tensors are like this, and mostly the whole tensor is asked for.
            found = region if region.lengths == shape else whole(shape)
            num_bytes = found.numel * itemsize(dtype)
            return [self._checked_chunk(fqn, self._first_chunks[index], found, num_bytes)] if region.numel else []
        part = columns.grid_parts[self._first_parts[index] : self._first_parts[index + 1]].tolist()
        if count_parts_meeting(part, region) > _CHUNKS_ONE_BY_ONE:
            self._checked_slice(fqn)  # a small file can claim millions, which share bytes
        return [
            self._checked_chunk(fqn, self._first_chunks[index] + number, found, found.numel * itemsize(dtype))
            for number, found in parts_meeting(shape, part, region)
        ]

    def _checked_chunk(self, fqn: str, chunk: int, region: Region, byte_length: int) -> Chunk:
        """Returns an uncompressed chunk of a grid, once its place in the file is checked."""
        columns, files = self.columns, self._bounds.files
        number, byte_offset = int(columns.files[chunk]), int(columns.byte_offsets[chunk])
        if number >= len(files):
            raise bad_manifest(f"a chunk of {shown(fqn)} lies in file {number} of {len(files)}")
        if byte_offset + byte_length > files[number].byte_length:
            raise outside_file(fqn, files[number], byte_offset, byte_length)
        return Chunk(region, number, byte_offset, byte_length)

    def _select(self, columns: Columns, fqn: str, region: Region) -> list[Chunk]:
        dtype, shape = self.describe(fqn)
        boxes = all_coordinates(columns).reshape(len(columns.files), 2, len(shape)).astype(np.int64)
        starts, lengths = boxes[:, 0], boxes[:, 1]
        meets = np.minimum(starts + lengths, region.ends) > np.maximum(starts, region.offsets)
        codecs = _codecs(columns)
        chunks = []
        for chunk in np.flatnonzero(meets.all(axis=1)).tolist():
            found = Region(tuple(starts[chunk].tolist()), tuple(lengths[chunk].tolist()))
            chunks.append(
                Chunk(
                    found,
                    int(columns.files[chunk]),
                    int(columns.byte_offsets[chunk]),
                    int(columns.byte_lengths[chunk]) if len(columns.byte_lengths) else found.numel * itemsize(dtype),
                    codecs[chunk] if codecs else "none",
                )
            )
        return chunks

    def row_chunks(self, fqns: Sequence[str]) -> RowChunks:
        """Returns how each of these tensors is cut, without a check of its chunks."""
        return self._row_chunks.of(np.fromiter(map(self._indices.__getitem__, fqns), np.int64, len(fqns)))

    @cached_property
    def _row_chunks(self) -> RowChunks:
        columns = self.columns
        has_rows = columns.num_dims > 0
        num_rows = np.ones(len(self), np.int64)
        num_rows[has_rows] = columns.shapes[run_starts(columns.num_dims)[has_rows]]
        is_cut = columns.is_grid & has_rows
        chunk_rows = num_rows.copy()
        chunk_rows[is_cut] = columns.grid_parts[run_starts(columns.num_dims * columns.is_grid)[is_cut]]
        num_rows, chunk_rows = np.maximum(num_rows, 1), np.maximum(chunk_rows, 1)
        is_known = (
            columns.is_grid & (columns.num_chunks == -(-num_rows // chunk_rows)) & (not len(columns.byte_lengths))
        )
        row_bytes, first_chunks = self.sizes.byte_lengths // num_rows, run_starts(columns.num_chunks)
        return RowChunks(is_known, num_rows, chunk_rows, row_bytes, first_chunks)

    def check_many(self, fqns: Sequence[str], num_chunks: np.ndarray) -> None:
        """Checks all chunks of each tensor of which thousands (`num_chunks`) are wanted: a file can claim millions."""
        for number in np.flatnonzero(num_chunks > _CHUNKS_ONE_BY_ONE).tolist():
            self._checked_slice(fqns[number])

    def places_of(self, chunks: np.ndarray, byte_lengths: np.ndarray) -> ChunkPlaces:
        """Returns the places of uncompressed chunks, given by number and with the bytes that their regions take, once
        it is checked that they lie in their files.
        """
        columns, bounds = self.columns, self._bounds
        files, byte_offsets = columns.files[chunks].astype(np.int64), columns.byte_offsets[chunks].astype(np.int64)
        # A number that an int64 does not hold has become negative.
        known_files = np.where(files < 0, len(bounds.files), np.minimum(files, len(bounds.files)))
        lengths_of_files = np.append(bounds.byte_lengths, -1)[known_files]
        wrong = (byte_offsets < 0) | (byte_offsets > lengths_of_files - byte_lengths)
        if wrong.any():
            first = first_true(wrong)
            chunk, (fqn,) = int(chunks[first]), self._owners([int(chunks[first])])
            self._checked_chunk(fqn, chunk, whole(self.describe(fqn)[1]), int(byte_lengths[first]))
        return ChunkPlaces(files, byte_offsets)

    def _owners(self, chunks: Sequence[int]) -> list[str]:
        """Returns the FQNs of the tensors that these chunks belong to."""
        fqns = list(self._indices)
        return [fqns[int(np.searchsorted(self._first_chunks, chunk, side="right")) - 1] for chunk in chunks]

    @cached_property
    def sizes(self) -> TensorSizes:
        """The sizes of all tensors. Raises CheckpointCorruptError (bad_manifest) for an impossible shape."""
        columns, fqns = self.columns, list(self._indices)
        itemsizes = itemsizes_of(columns, fqns)
        num_elements = numels_of(columns, itemsizes, fqns)
        return TensorSizes(num_elements, itemsizes * num_elements)

    def find_fault(self, fqn: str) -> TilingFault | None:
        """Returns a part that no chunk of a tensor holds or that two hold, else None. Raises CheckpointCorruptError."""
        if self.columns.is_grid[self._indices[fqn]]:
            return None
        record = self[fqn]
        return find_tiling_fault(record.shape, [chunk.region for chunk in record.chunks])

    def describe(self, fqn: str) -> tuple[str, tuple[int, ...]]:
        """Returns the dtype and the global shape of a tensor without looking at its chunks."""
        described = self._described.get(fqn)
        if described is None:
            index, columns = self._indices[fqn], self.columns
            shape = columns.shapes[self._first_dims[index] : self._first_dims[index + 1]]
            described = columns.dtype_names[columns.dtypes[index]], tuple(shape.tolist())
            self._described[fqn] = described
        return described

    def describe_all(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and global shape of every tensor, by FQN."""
        if len(self._described) < len(self):
            columns, shapes = self.columns, self.columns.shapes.tolist()
            dtypes = map(columns.dtype_names.__getitem__, columns.dtypes.tolist())
            of_tensors = [tuple(shapes[start:stop]) for start, stop in pairwise(self._first_dims)]
            self._described = dict(zip(self._indices, zip(dtypes, of_tensors, strict=True), strict=True))
        return self._described

    def describe_each(self, fqns: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
        """Returns dtype and global shape of each of these tensors."""
        if len(self._described) == len(self):
            return list(map(self._described.__getitem__, fqns))
        return list(map(self.describe, fqns))

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._indices


def _codecs(columns: Columns) -> Sequence[str]:
    """Returns the codecs of one tensor's chunks; nothing where none is compressed."""
    codecs = [columns.codec_names[index] for index in columns.codecs.tolist()]
    return codecs if codecs.count("none") < len(codecs) else ()


def _starts(counts: np.ndarray) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]
