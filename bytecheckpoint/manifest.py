"""What a checkpoint is made of, and how that is written down: tensors by FQN, the chunks that hold them, the files
that hold the chunks, plain objects, checksums. It knows no rank, mesh or framework, reads no file, and trusts nothing
that it decodes.

The byte layout is documented in docs/format.md. Chunks and checksums are columns of little-endian unsigned integers
rather than records, so that a million of them encode and decode at the speed of an array copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.int_columns import decode_column, decode_counts, encode_column
from bytecheckpoint.manifest_check import (
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_EXTENTS,
    MAX_FILES,
    MAX_METADATA_BYTES,
    MAX_OBJECTS,
    MAX_TENSORS,
    bad_manifest,
    check_manifest,
    refuse_deep_nesting,
    refuse_more_than,
)
from bytecheckpoint.manifest_envelope import seal, unseal
from bytecheckpoint.region import Region

_Items = TypeVar("_Items", bound=Sized)


class Chunk(NamedTuple):
    """The region of a tensor that one place in a file holds, row-major and little-endian."""

    region: Region
    file: int
    """Index into `Manifest.files`."""
    byte_offset: int
    """From the start of the file."""
    byte_length: int


class DataFile(NamedTuple):
    """A file that holds chunks. Its checksums are of consecutive extents that together are the whole file."""

    name: str
    """Relative to the checkpoint's folder, with forward slashes."""
    byte_length: int
    extent_lengths: Sequence[int] = ()
    """In bytes, adding up to `byte_length`; empty where the file's writer left no checksums."""
    extent_digests: Sequence[int] = ()
    """The xxh3-64 of each extent."""


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
        return list(map(Chunk, regions, self.files, self.byte_offsets, self.byte_lengths))


def tensor_record(dtype: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> TensorRecord:
    """The record of a tensor that lies in these chunks."""
    coordinates: list[int] = []
    files, byte_offsets, byte_lengths = [], [], []
    for region, file, byte_offset, byte_length in chunks:
        coordinates += region.offsets
        coordinates += region.lengths
        files.append(file)
        byte_offsets.append(byte_offset)
        byte_lengths.append(byte_length)
    return TensorRecord(dtype, shape, coordinates, files, byte_offsets, byte_lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint but for its data."""

    save_id: str
    step: int | None = None
    files: Sequence[DataFile] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """FQN of a tied tensor -> the FQN in `tensors` under which it is stored."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """Plain data by FQN, each encoded on its own: see adapters/plain_data.py and docs/format.md."""
    rank_objects: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
    """Plain data that differs from rank to rank: FQN -> rank -> encoded value."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the user gave to `save`."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How the checkpoint came about (versions, world size, time). Loading never reads it."""

    def describe(self, fqn: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and global shape of a tensor, without looking at its chunks."""
        if isinstance(self.tensors, _DecodedTensors):
            return self.tensors.describe(fqn)
        return self.tensors[fqn].dtype, self.tensors[fqn].shape


class _Wire(msgspec.Struct, frozen=True):
    """The body of the file. Fields may be added; a reader ignores those that it does not know.

    `bytes` are columns of integers. `Raw` has a number of items and is decoded in a second step, after that number was
    compared with its limit, because an item takes far more memory as an object than in the file.
    """

    save_id: str
    step: int | None
    file_names: msgspec.Raw
    file_byte_lengths: bytes
    file_num_extents: bytes
    extent_lengths: bytes
    extent_digests: bytes
    dtypes: Annotated[list[str], msgspec.Meta(max_length=1000)]
    tensor_fqns: msgspec.Raw
    tensor_dtypes: bytes
    tensor_num_dims: bytes
    tensor_num_chunks: bytes
    tensor_shapes: bytes
    chunk_coordinates: bytes
    chunk_files: bytes
    chunk_byte_offsets: bytes
    chunk_byte_lengths: bytes
    aliases: msgspec.Raw
    objects: msgspec.Raw
    rank_objects: msgspec.Raw
    metadata: msgspec.Raw
    provenance: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest file: header, compressed body, checksum of both. The same manifest gives the same bytes.

    Raises UnsafeCheckpointError (limits_exceeded) for what no reader would accept, and CheckpointSaveError
    (unsupported_value) for what msgpack cannot hold.
    """
    refuse_deep_nesting(manifest.metadata, "metadata")
    refuse_deep_nesting(manifest.provenance, "provenance")
    try:
        return seal(msgspec.msgpack.encode(_to_wire(manifest)))
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise CheckpointSaveError(
            f"the manifest cannot be written: {error}; nothing was committed: keep metadata to None, bool, 64-bit int, "
            "float, str, bytes, list and dict, and names to valid Unicode",
            kind="unsupported_value",
        ) from error


def _to_wire(manifest: Manifest) -> _Wire:
    names, file_byte_lengths, extent_lengths, extent_digests = _transpose(manifest.files, 4)
    dtypes, shapes, coordinates, files, byte_offsets, byte_lengths = _transpose(list(manifest.tensors.values()), 6)
    dtype_indices = {dtype: index for index, dtype in enumerate(dict.fromkeys(dtypes))}
    rank_objects = [(fqn, *item) for fqn, by_rank in manifest.rank_objects.items() for item in by_rank.items()]
    refuse_more_than(MAX_EXTENTS, sum(map(len, extent_lengths)), "extents")
    refuse_more_than(MAX_CHUNKS, sum(map(len, files)), "chunks")
    return _Wire(
        save_id=manifest.save_id,
        step=manifest.step,
        file_names=_encode_items(names, MAX_FILES, "files"),
        file_byte_lengths=encode_column(file_byte_lengths),
        file_num_extents=encode_column(map(len, extent_lengths)),
        extent_lengths=encode_column(chain.from_iterable(extent_lengths)),
        extent_digests=encode_column(chain.from_iterable(extent_digests)),
        dtypes=list(dtype_indices),
        tensor_fqns=_encode_items(list(manifest.tensors), MAX_TENSORS, "tensors"),
        tensor_dtypes=encode_column(map(dtype_indices.__getitem__, dtypes)),
        tensor_num_dims=encode_column(map(len, shapes)),
        tensor_num_chunks=encode_column(map(len, files)),
        tensor_shapes=encode_column(chain.from_iterable(shapes)),
        chunk_coordinates=encode_column(chain.from_iterable(coordinates)),
        chunk_files=encode_column(chain.from_iterable(files)),
        chunk_byte_offsets=encode_column(chain.from_iterable(byte_offsets)),
        chunk_byte_lengths=encode_column(chain.from_iterable(byte_lengths)),
        aliases=_encode_items(dict(manifest.aliases), MAX_OBJECTS, "tied tensors"),
        objects=_encode_items(dict(manifest.objects), MAX_OBJECTS, "objects"),
        rank_objects=_encode_items(rank_objects, MAX_OBJECTS, "objects of single ranks"),
        metadata=_encode_metadata(manifest.metadata),
        provenance=_encode_metadata(manifest.provenance),
    )


def _transpose(records: Collection[tuple[Any, ...]], num_fields: int) -> list[list[Any]]:
    """Each field of all records. Not by zip, whose iterators would each be a case for the garbage collector."""
    return [list(map(itemgetter(index), records)) for index in range(num_fields)]


def _encode_items(items: Sequence[Any] | dict[str, Any], limit: int, what: str) -> msgspec.Raw:
    refuse_more_than(limit, len(items), what)
    return msgspec.Raw(msgspec.msgpack.encode(items))


def _encode_metadata(metadata: Mapping[str, Any]) -> msgspec.Raw:
    encoded = msgspec.msgpack.encode(dict(metadata))
    refuse_more_than(MAX_METADATA_BYTES, len(encoded), "bytes of metadata")
    return msgspec.Raw(encoded)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes, checked in itself.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version) or UnsafeCheckpointError (path_escape,
    limits_exceeded).
    """
    body = unseal(data)
    try:
        manifest, columns = _from_wire(msgspec.msgpack.decode(body, type=_Wire))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_manifest(f"its body cannot be decoded: {error}") from error
    check_manifest(manifest, columns)
    return manifest


def _from_wire(wire: _Wire) -> tuple[Manifest, Columns]:
    fqns = _decode_items(wire.tensor_fqns, list[str], MAX_TENSORS, "tensors")
    columns = _decode_columns(wire, len(fqns))
    manifest = Manifest(
        save_id=wire.save_id,
        step=wire.step,
        files=_decode_files(wire),
        tensors=_DecodedTensors(fqns, columns),
        aliases=_decode_items(wire.aliases, dict[str, str], MAX_OBJECTS, "tied tensors"),
        objects=_decode_items(wire.objects, dict[str, bytes], MAX_OBJECTS, "objects"),
        rank_objects=_decode_rank_objects(wire.rank_objects),
        metadata=_decode_metadata(wire.metadata),
        provenance=_decode_metadata(wire.provenance),
    )
    return manifest, columns


def _decode_items(raw: msgspec.Raw, kind: type[_Items], limit: int, what: str) -> _Items:
    """The list or dict in this msgpack, which was found well-formed, if it has at most `limit` items."""
    head = memoryview(raw)[:5]
    width = {0xDC: 2, 0xDE: 2, 0xDD: 4, 0xDF: 4}.get(head[0])
    num_items = int.from_bytes(head[1 : 1 + width], "big") if width else head[0] & 15
    refuse_more_than(limit, num_items, what)
    items = msgspec.msgpack.decode(raw, type=kind)
    if len(items) != num_items:
        raise bad_manifest(f"two of its {what} have the same name")
    return items


def _decode_rank_objects(raw: msgspec.Raw) -> dict[str, dict[int, bytes]]:
    rank_objects: dict[str, dict[int, bytes]] = {}
    for fqn, rank, value in _decode_items(raw, list[tuple[str, int, bytes]], MAX_OBJECTS, "objects of single ranks"):
        by_rank = rank_objects.setdefault(fqn, {})
        if rank in by_rank:
            raise bad_manifest(f"two objects of rank {rank} have the same name")
        by_rank[rank] = value
    return rank_objects


def _decode_metadata(raw: msgspec.Raw) -> dict[str, Any]:
    refuse_more_than(MAX_METADATA_BYTES, len(memoryview(raw)), "bytes of metadata")
    return msgspec.msgpack.decode(raw, type=dict[str, Any])


def _decode_files(wire: _Wire) -> list[DataFile]:
    names = _decode_items(wire.file_names, list[str], MAX_FILES, "files")
    byte_lengths = decode_column(wire.file_byte_lengths, len(names), "file lengths")
    counts = decode_counts(wire.file_num_extents, len(names), "extents", MAX_EXTENTS)
    lengths = decode_column(wire.extent_lengths, int(counts.sum()), "extent lengths")
    digests = decode_column(wire.extent_digests, int(counts.sum()), "checksums")
    files, stops = [], np.cumsum(counts).tolist()
    for name, byte_length, start, stop in zip(names, byte_lengths.tolist(), [0, *stops], stops, strict=False):
        files.append(DataFile(name, byte_length, lengths[start:stop].tolist(), digests[start:stop].tolist()))
    return files


class Columns(NamedTuple):
    """Everything about all tensors and chunks of a manifest, as arrays: one entry each, if nothing else is said."""

    dtype_names: Sequence[str]
    """Those in use."""
    dtypes: np.ndarray
    """Of each tensor, an index into `dtype_names`."""
    num_dims: np.ndarray
    """Of each tensor."""
    num_chunks: np.ndarray
    """Of each tensor."""
    shapes: np.ndarray
    """`num_dims` entries a tensor."""
    coordinates: np.ndarray
    """`2 * num_dims` entries a chunk: its offsets, then its lengths."""
    files: np.ndarray
    byte_offsets: np.ndarray
    byte_lengths: np.ndarray


def _decode_columns(wire: _Wire, num_tensors: int) -> Columns:
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
    )


class _DecodedTensors(Mapping[str, TensorRecord]):
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
        )

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
