"""The tensors of a manifest and the chunks that hold them, as records to work with and as the columns that are written
down. It knows no file's name or checksum.

Columns of integers as bytes: little-endian, unsigned, all of the same width, so that a million of them encode and
decode at the speed of an array copy. It does not know what the integers count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from bytecheckpoint.manifest.validation import (
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_TENSORS,
    Columns,
    bad_manifest,
    refuse_more_than,
)
from bytecheckpoint.region import Region, intersect, part_of_grid


class Chunk(NamedTuple):
    """The region of a tensor that one place in a file holds, row-major and little-endian."""

    region: Region
    file: int
    """Index into `Manifest.files`."""
    byte_offset: int
    """From the start of the file."""
    byte_length: int
    """In the file."""
    codec: str = "none"
    """How its bytes are stored: one of `frames.CODECS`, or one of a later release."""


class TensorRecord(NamedTuple):
    """A tensor: what it is, and the chunks that hold it, as columns with one entry (or row) a chunk."""

    dtype: str
    """torch's name of it without `torch.`: `bfloat16`."""
    shape: tuple[int, ...]
    """The global shape."""
    coordinates: Sequence[int]
    """Of each chunk, one after the other: its offsets, then its lengths."""
    files: Sequence[int]
    byte_offsets: Sequence[int]
    byte_lengths: Sequence[int]
    codecs: Sequence[str] = ()
    """Empty where no chunk is compressed."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_chunks(self) -> int:
        return len(self.files)

    @property
    def chunks(self) -> list[Chunk]:
        num_dims, at = len(self.shape), self.coordinates
        starts = range(0, 2 * num_dims * self.num_chunks, 2 * num_dims) if num_dims else [0] * self.num_chunks
        regions = [
            Region(tuple(at[start : start + num_dims]), tuple(at[start + num_dims : start + 2 * num_dims]))
            for start in starts
        ]
        codecs = (self.codecs,) if self.codecs else ()
        return list(map(Chunk, regions, self.files, self.byte_offsets, self.byte_lengths, *codecs))

    def chunks_meeting(self, region: Region) -> list[Chunk]:
        """Those that hold elements of the region."""
        return [chunk for chunk in self.chunks if has_common(chunk.region, region)]


def has_common(a: Region, b: Region) -> bool:
    """Whether two regions share an element."""
    return (a == b and bool(a.numel)) or intersect(a, b) is not None


def tensor_record(dtype: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> TensorRecord:
    """The record of a tensor that lies in these chunks."""
    coordinates: list[int] = []
    files, byte_offsets, byte_lengths, codecs = [], [], [], []
    for region, file, byte_offset, byte_length, codec in chunks:
        coordinates += region.offsets
        coordinates += region.lengths
        files.append(file)
        byte_offsets.append(byte_offset)
        byte_lengths.append(byte_length)
        codecs.append(codec)
    is_compressed = codecs.count("none") < len(codecs)
    return TensorRecord(dtype, shape, coordinates, files, byte_offsets, byte_lengths, codecs if is_compressed else ())


def transpose(records: Collection[tuple[Any, ...]], num_fields: int) -> list[list[Any]]:
    """Each field of all records. Not by zip, whose iterators would each be a case for the garbage collector."""
    return [list(map(itemgetter(index), records)) for index in range(num_fields)]


def columns_of(tensors: Mapping[str, TensorRecord]) -> Columns:
    """The columns of these tensors. Raises UnsafeCheckpointError (limits_exceeded)."""
    dtypes, shapes, coordinates, files, byte_offsets, byte_lengths, codecs = transpose(list(tensors.values()), 7)
    refuse_more_than(MAX_CHUNKS, sum(map(len, files)), "chunks")
    parts = list(map(part_of_grid, shapes, coordinates, map(len, files)))
    codec_names, codec_column = _codec_column(codecs, files)
    dtype_indices = {dtype: index for index, dtype in enumerate(dict.fromkeys(dtypes))}
    explicit = [of_tensor for of_tensor, part in zip(coordinates, parts, strict=True) if part is None]
    return Columns(
        dtype_names=list(dtype_indices),
        dtypes=_array(map(dtype_indices.__getitem__, dtypes)),
        num_dims=_array(map(len, shapes)).astype(np.int64),
        num_chunks=_array(map(len, files)).astype(np.int64),
        shapes=_array(chain.from_iterable(shapes)),
        is_grid=np.fromiter((part is not None for part in parts), bool),
        grid_parts=_array(chain.from_iterable(part for part in parts if part is not None)),
        coordinates=_array(chain.from_iterable(explicit)),
        files=_array(chain.from_iterable(files)),
        byte_offsets=_array(chain.from_iterable(byte_offsets)),
        byte_lengths=_array(chain.from_iterable(byte_lengths) if codec_names else ()),
        codec_names=codec_names,
        codecs=codec_column,
    )


def _array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.uint64)


def _codec_column(codecs: Sequence[Sequence[str]], files: Sequence[Sequence[int]]) -> tuple[list[str], np.ndarray]:
    """The names, and an index into them for each chunk; nothing where no chunk of any tensor is compressed."""
    if not any(codecs):
        return [], _array(())
    of_chunks = [of_tensor or ["none"] * len(at) for of_tensor, at in zip(codecs, files, strict=True)]
    indices = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(of_chunks)))}
    return list(indices), _array(map(indices.__getitem__, chain.from_iterable(of_chunks)))


class TensorFields(Protocol):
    """The fields of a manifest's body about tensors and chunks, as docs/format.md lists them."""

    dtypes: list[str]
    tensor_dtypes: memoryview
    tensor_num_dims: memoryview
    tensor_num_chunks: memoryview
    tensor_shapes: memoryview
    tensor_is_grid: memoryview
    grid_parts: memoryview
    chunk_coordinates: memoryview
    chunk_files: memoryview
    chunk_byte_offsets: memoryview
    chunk_byte_lengths: memoryview
    codecs: list[str]
    chunk_codecs: memoryview


def encode_columns(columns: Columns) -> dict[str, Any]:
    """The `TensorFields` of these columns, by name."""
    is_compressed = any(columns.codec_names[index] != "none" for index in np.unique(columns.codecs))
    return {
        "dtypes": list(columns.dtype_names),
        "tensor_dtypes": encode_column(columns.dtypes),
        "tensor_num_dims": encode_column(columns.num_dims),
        "tensor_num_chunks": encode_column(columns.num_chunks),
        "tensor_shapes": encode_column(columns.shapes),
        "tensor_is_grid": encode_column(columns.is_grid.astype(np.uint8)),
        "grid_parts": encode_column(columns.grid_parts),
        "chunk_coordinates": encode_column(columns.coordinates),
        "chunk_files": encode_column(columns.files),
        "chunk_byte_offsets": encode_column(columns.byte_offsets),
        "chunk_byte_lengths": encode_column(columns.byte_lengths) if is_compressed else memoryview(b""),
        "codecs": list(columns.codec_names) if is_compressed else [],
        "chunk_codecs": encode_column(columns.codecs) if is_compressed else memoryview(b""),
    }


def decode_columns(wire: TensorFields, num_tensors: int) -> Columns:
    """Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError (limits_exceeded)."""
    num_dims = decode_counts(wire.tensor_num_dims, num_tensors, "dimensions", MAX_DIMS * MAX_TENSORS)
    num_chunks = decode_counts(wire.tensor_num_chunks, num_tensors, "chunks", MAX_CHUNKS)
    is_grid = decode_column(wire.tensor_is_grid, num_tensors if wire.tensor_is_grid else 0, "marks of grids")
    if is_grid.max(initial=0) > 1:
        raise bad_manifest(f"it marks a grid with {is_grid.max()}")
    is_grid = is_grid.astype(bool) if len(is_grid) else np.zeros(num_tensors, bool)
    total = int(num_chunks.sum())
    return Columns(
        dtype_names=wire.dtypes,
        dtypes=decode_column(wire.tensor_dtypes, num_tensors, "dtypes"),
        num_dims=num_dims,
        num_chunks=num_chunks,
        shapes=decode_column(wire.tensor_shapes, int(num_dims.sum()), "shapes"),
        is_grid=is_grid,
        grid_parts=decode_column(wire.grid_parts, int(num_dims[is_grid].sum()), "parts of grids"),
        coordinates=decode_column(
            wire.chunk_coordinates, int((2 * num_dims * num_chunks)[~is_grid].sum()), "coordinates"
        ),
        files=decode_column(wire.chunk_files, total, "file numbers"),
        byte_offsets=decode_column(wire.chunk_byte_offsets, total, "byte offsets"),
        byte_lengths=decode_column(
            wire.chunk_byte_lengths, total if wire.chunk_byte_lengths or wire.codecs else 0, "byte lengths"
        ),
        codec_names=wire.codecs,
        codecs=decode_column(wire.chunk_codecs, total if wire.codecs else 0, "codecs"),
    )


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
