"""The tensors of a manifest and the chunks that hold them: records to work with, columns to write down. A record is
made when it is asked for, because most ranks want few of a checkpoint's tensors. It knows no file's name or checksum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from bytecheckpoint.int_columns import decode_column, decode_counts, encode_column
from bytecheckpoint.manifest_check import (
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_TENSORS,
    Columns,
    bad_manifest,
    refuse_more_than,
)
from bytecheckpoint.region import Region


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


def encode_tensors(tensors: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """The `TensorFields` of these tensors, by name."""
    if isinstance(tensors, DecodedTensors):  # of a save with a known plan: they were columns before
        return tensors.encode()
    dtypes, shapes, coordinates, files, byte_offsets, byte_lengths, codecs = transpose(list(tensors.values()), 7)
    codec_names, codec_indices = _encode_codecs(codecs, files)
    dtype_indices = {dtype: index for index, dtype in enumerate(dict.fromkeys(dtypes))}
    refuse_more_than(MAX_CHUNKS, sum(map(len, files)), "chunks")
    return {
        "dtypes": list(dtype_indices),
        "tensor_dtypes": encode_column(map(dtype_indices.__getitem__, dtypes)),
        "tensor_num_dims": encode_column(map(len, shapes)),
        "tensor_num_chunks": encode_column(map(len, files)),
        "tensor_shapes": encode_column(chain.from_iterable(shapes)),
        "chunk_coordinates": encode_column(chain.from_iterable(coordinates)),
        "chunk_files": encode_column(chain.from_iterable(files)),
        "chunk_byte_offsets": encode_column(chain.from_iterable(byte_offsets)),
        "chunk_byte_lengths": encode_column(chain.from_iterable(byte_lengths)),
        "codecs": codec_names,
        "chunk_codecs": codec_indices,
    }


def _encode_codecs(codecs: Sequence[Sequence[str]], files: Sequence[Sequence[int]]) -> tuple[list[str], bytes]:
    """The names, and the column of indices into them, which is empty where no chunk of any tensor is compressed."""
    if not any(codecs):
        return [], b""
    of_chunks = [of_tensor or ["none"] * len(at) for of_tensor, at in zip(codecs, files, strict=True)]
    indices = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(of_chunks)))}
    return list(indices), encode_column(map(indices.__getitem__, chain.from_iterable(of_chunks)))


class TensorFields(Protocol):
    """The fields of a manifest's body about tensors and chunks, as docs/format.md lists them."""

    dtypes: list[str]
    tensor_dtypes: bytes
    tensor_num_dims: bytes
    tensor_num_chunks: bytes
    tensor_shapes: bytes
    chunk_coordinates: bytes
    chunk_files: bytes
    chunk_byte_offsets: bytes
    chunk_byte_lengths: bytes
    codecs: list[str]
    chunk_codecs: bytes


def decode_columns(wire: TensorFields, num_tensors: int) -> Columns:
    num_dims = decode_counts(wire.tensor_num_dims, num_tensors, "dimensions", MAX_DIMS * MAX_TENSORS)
    num_chunks = decode_counts(wire.tensor_num_chunks, num_tensors, "chunks", MAX_CHUNKS)
    total = int(num_chunks.sum())
    return Columns(
        dtype_names=wire.dtypes,
        dtypes=decode_column(wire.tensor_dtypes, num_tensors, "dtypes"),
        num_dims=num_dims,
        num_chunks=num_chunks,
        shapes=decode_column(wire.tensor_shapes, int(num_dims.sum()), "shapes"),
        coordinates=decode_column(wire.chunk_coordinates, int((2 * num_dims * num_chunks).sum()), "coordinates"),
        files=decode_column(wire.chunk_files, total, "file numbers"),
        byte_offsets=decode_column(wire.chunk_byte_offsets, total, "byte offsets"),
        byte_lengths=decode_column(wire.chunk_byte_lengths, total, "byte lengths"),
        codec_names=wire.codecs,
        codecs=decode_column(wire.chunk_codecs, total if wire.codecs else 0, "codecs"),
    )


class DecodedTensors(Mapping[str, TensorRecord]):
    """The tensors of a decoded manifest. A record is made when it is asked for: most ranks want few of them."""

    def __init__(self, fqns: Sequence[str], columns: Columns) -> None:
        self._indices = dict(zip(fqns, range(len(fqns)), strict=True))
        if len(self._indices) != len(fqns):
            raise bad_manifest("it lists a tensor twice")
        self._columns = columns
        self._first_dims = _starts(columns.num_dims)
        self._first_chunks = _starts(columns.num_chunks)
        self._first_coordinates = _starts(2 * columns.num_dims * columns.num_chunks)

    def __getitem__(self, fqn: str) -> TensorRecord:
        index, columns = self._indices[fqn], self._columns
        chunks = slice(self._first_chunks[index], self._first_chunks[index + 1])
        coordinates = columns.coordinates[self._first_coordinates[index] : self._first_coordinates[index + 1]]
        dtype, shape = self.describe(fqn)
        return TensorRecord(
            dtype,
            shape,
            coordinates.tolist(),
            columns.files[chunks].tolist(),
            columns.byte_offsets[chunks].tolist(),
            columns.byte_lengths[chunks].tolist(),
            self._codecs(chunks) if columns.codec_names else (),
        )

    def _codecs(self, chunks: slice) -> Sequence[str]:
        columns = self._columns
        codecs = [columns.codec_names[index] for index in columns.codecs[chunks].tolist()]
        return codecs if codecs.count("none") < len(codecs) else ()

    def encode(self) -> dict[str, Any]:
        """The `TensorFields` of these tensors, by name, made of whole columns."""
        columns = self._columns
        is_compressed = any(columns.codec_names[index] != "none" for index in np.unique(columns.codecs))
        return {
            "dtypes": list(columns.dtype_names),
            "tensor_dtypes": encode_column(columns.dtypes),
            "tensor_num_dims": encode_column(columns.num_dims),
            "tensor_num_chunks": encode_column(columns.num_chunks),
            "tensor_shapes": encode_column(columns.shapes),
            "chunk_coordinates": encode_column(columns.coordinates),
            "chunk_files": encode_column(columns.files),
            "chunk_byte_offsets": encode_column(columns.byte_offsets),
            "chunk_byte_lengths": encode_column(columns.byte_lengths),
            "codecs": list(columns.codec_names) if is_compressed else [],
            "chunk_codecs": encode_column(columns.codecs) if is_compressed else b"",
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._indices

    def describe(self, fqn: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and global shape, without making the record."""
        index, columns = self._indices[fqn], self._columns
        shape = columns.shapes[self._first_dims[index] : self._first_dims[index + 1]]
        return columns.dtype_names[columns.dtypes[index]], tuple(shape.tolist())


def _starts(counts: np.ndarray) -> list[int]:
    return [0, *np.cumsum(counts).tolist()]
