"""What a checkpoint is made of, and how that is written down: tensors by FQN, the chunks that hold them, the files
that hold the chunks, plain objects, checksums. It knows no rank, mesh or framework, reads no file, and trusts nothing
that it decodes.

The byte layout is documented in docs/format.md. Chunks and checksums are columns of little-endian unsigned integers
rather than records, so that a million of them encode and decode at the speed of an array copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.chunk_validation import FileBounds, Spans, find_shared_bytes, shared_bytes
from bytecheckpoint.manifest.envelope import seal, unseal
from bytecheckpoint.manifest.records import (
    Chunk,
    TensorRecord,
    columns_of,
    decode_column,
    decode_columns,
    decode_counts,
    encode_column,
    encode_columns,
    tensor_record,
    transpose,
)
from bytecheckpoint.manifest.table import ColumnTensors, SoleChunks
from bytecheckpoint.manifest.validation import (
    MAX_EXTENTS,
    MAX_FILES,
    MAX_METADATA_BYTES,
    MAX_OBJECTS,
    MAX_SAMPLES,
    MAX_TENSORS,
    Columns,
    bad_manifest,
    check_manifest,
    refuse_deep_nesting,
    refuse_more_than,
)
from bytecheckpoint.region import Region, find_tiling_fault

__all__ = [
    "Chunk",
    "DataFile",
    "Manifest",
    "MapNotes",
    "Sample",
    "SoleChunks",
    "TensorRecord",
    "decode_manifest",
    "encode_manifest",
    "open_manifest",
    "tensor_record",
]

_Items = TypeVar("_Items", bound=Sized)
_SAMPLE_COLUMNS = ("file_num_samples", "sample_byte_offsets", "sample_byte_lengths", "sample_digests")
_NOTHING = memoryview(b"")
"""A column that is left out of the file."""


class Sample(NamedTuple):
    """A few bytes of a file, by which one that was written again is told from the one that was linked to."""

    byte_offset: int
    byte_length: int
    digest: int
    """The xxh3-64 of these bytes."""


class DataFile(NamedTuple):
    """A file that holds chunks. Its checksums are of consecutive extents that together are the whole file."""

    name: str
    """Relative to the checkpoint's folder, with forward slashes."""
    byte_length: int
    extent_lengths: Sequence[int] = ()
    """In bytes, adding up to `byte_length`; empty where the file's writer left no checksums."""
    extent_digests: Sequence[int] = ()
    """The xxh3-64 of each extent."""
    samples: Sequence[Sample] = ()
    """Of a file of another format that a link points to, which has no extents."""


class MapNotes(NamedTuple):
    """What a name map says of a checkpoint that is seen through it, besides names, dtypes and shapes. No manifest on a
    disk holds it.
    """

    zeros_file: int | None = None
    """The number of a file that does not exist: chunks in it are zeros, as rows that pad a vocabulary."""
    left_out: Mapping[str, str] = {}
    """By FQN, why plain data of the checkpoint is not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint but for its data."""

    save_id: str
    """Empty where the files are of another format, which has none."""
    step: int | None = None
    foreign_format: str = ""
    """What the files are, where no save of this library wrote them: a name of storage/foreign. Chunks may share bytes
    then, because tensors there may be views of one memory."""
    linked_to: str = ""
    """The folder, as absolute path or URL, below which the files are; empty where that is the checkpoint's own. Only
    who asks for it is led there."""
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
    map_notes: MapNotes = field(default_factory=MapNotes)
    """Empty where the checkpoint is seen as it is."""

    def describe(self, fqn: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and global shape of a tensor, without looking at its chunks."""
        if isinstance(self.tensors, ColumnTensors):
            return self.tensors.describe(fqn)
        return self.tensors[fqn].dtype, self.tensors[fqn].shape

    def describe_all(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """The same of every tensor, by FQN."""
        if isinstance(self.tensors, ColumnTensors):
            return self.tensors.describe_all()
        return {fqn: (record.dtype, record.shape) for fqn, record in self.tensors.items()}

    def describe_each(self, fqns: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
        """The same of these tensors."""
        if isinstance(self.tensors, ColumnTensors):
            return self.tensors.describe_each(fqns)
        return [self.describe(fqn) for fqn in fqns]

    def sole_chunks(self, fqns: Sequence[str]) -> SoleChunks:
        """The chunks of those of these tensors that consist of one, where they can be looked at together."""
        if isinstance(self.tensors, ColumnTensors):
            return self.tensors.sole_chunks(fqns)
        nothing = np.zeros(len(fqns), np.int64)
        return SoleChunks(nothing.astype(bool), nothing, nothing, nothing)

    def chunks_meeting(self, fqn: str, region: Region) -> list[Chunk]:
        """The chunks of a tensor that hold elements of the region, without looking at the others where that can be."""
        if isinstance(self.tensors, ColumnTensors):
            return self.tensors.chunks_meeting(fqn, region)
        return self.tensors[fqn].chunks_meeting(region)

    def find_overlap(self, fqn: str) -> Region | None:
        """What two chunks of a tensor both hold, of which nobody could say which one is right."""
        if isinstance(self.tensors, ColumnTensors) and not self.tensors.may_overlap(fqn):
            return None
        record = self.tensors[fqn]
        fault = find_tiling_fault(record.shape, [chunk.region for chunk in record.chunks])
        return fault.overlap if fault is not None else None

    def refuse_shared_bytes(
        self, fqns: Sequence[str], files: np.ndarray, byte_offsets: np.ndarray, byte_lengths: np.ndarray
    ) -> None:
        """Raises CheckpointCorruptError (bad_manifest) where two chunks share a byte that must not. They are given as
        columns, with the FQN of each, and none twice.
        """
        if self.foreign_format:
            return
        found = find_shared_bytes(Spans(FileBounds(self.files).starts[files] + byte_offsets, byte_lengths))
        if found is not None:
            first, second = found
            raise shared_bytes((fqns[first], fqns[second]), self.files[files[second]], int(byte_offsets[second]))


class _Wire(msgspec.Struct, omit_defaults=True):
    """The body of the file. Fields may be added; a reader ignores those that it does not know.

    `memoryview` are columns of integers, and stay where they are in the body. `Raw` has a number of items and is
    decoded in a second step, after that number was compared with its limit, because an item takes far more memory as
    an object than in the file.
    """

    save_id: str
    step: int | None
    file_names: msgspec.Raw
    file_byte_lengths: memoryview
    file_num_extents: memoryview
    extent_lengths: memoryview
    extent_digests: memoryview
    dtypes: Annotated[list[str], msgspec.Meta(max_length=1000)]
    tensor_fqns: msgspec.Raw
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
    codecs: Annotated[list[str], msgspec.Meta(max_length=1000)]
    chunk_codecs: memoryview
    aliases: msgspec.Raw
    objects: msgspec.Raw
    rank_objects: msgspec.Raw
    metadata: msgspec.Raw
    provenance: msgspec.Raw
    foreign_format: str = ""
    linked_to: str = ""
    file_num_samples: memoryview = _NOTHING
    sample_byte_offsets: memoryview = _NOTHING
    sample_byte_lengths: memoryview = _NOTHING
    sample_digests: memoryview = _NOTHING


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
    names, file_byte_lengths, extent_lengths, extent_digests, _ = transpose(manifest.files, 5)
    rank_objects = [(fqn, *item) for fqn, by_rank in manifest.rank_objects.items() for item in by_rank.items()]
    refuse_more_than(MAX_EXTENTS, sum(map(len, extent_lengths)), "extents")
    return _Wire(
        save_id=manifest.save_id,
        step=manifest.step,
        file_names=_encode_items(names, MAX_FILES, "files"),
        file_byte_lengths=encode_column(file_byte_lengths),
        file_num_extents=encode_column(map(len, extent_lengths)),
        extent_lengths=encode_column(chain.from_iterable(extent_lengths)),
        extent_digests=encode_column(chain.from_iterable(extent_digests)),
        tensor_fqns=_encode_items(list(manifest.tensors), MAX_TENSORS, "tensors"),
        **encode_columns(_columns(manifest.tensors)),
        aliases=_encode_items(dict(manifest.aliases), MAX_OBJECTS, "tied tensors"),
        objects=_encode_items(dict(manifest.objects), MAX_OBJECTS, "objects"),
        rank_objects=_encode_items(rank_objects, MAX_OBJECTS, "objects of single ranks"),
        metadata=_encode_metadata(manifest.metadata),
        provenance=_encode_metadata(manifest.provenance),
        foreign_format=manifest.foreign_format,
        linked_to=manifest.linked_to,
        **_sample_columns(manifest.files),
    )


def _sample_columns(files: Sequence[DataFile]) -> dict[str, Any]:
    counts = [len(file.samples) for file in files]
    if not any(counts):
        return {}
    refuse_more_than(MAX_SAMPLES, sum(counts), "samples of files")
    offsets, lengths, digests = transpose([sample for file in files for sample in file.samples], 3)
    columns = map(encode_column, (counts, offsets, lengths, digests))
    return dict(zip(_SAMPLE_COLUMNS, columns, strict=True))


def _columns(tensors: Mapping[str, TensorRecord]) -> Columns:
    # Those of a manifest that was decoded, or planned, were never anything else.
    return tensors.columns if isinstance(tensors, ColumnTensors) else columns_of(tensors)


def _encode_items(items: Sequence[Any] | dict[str, Any], limit: int, what: str) -> msgspec.Raw:
    refuse_more_than(limit, len(items), what)
    return msgspec.Raw(msgspec.msgpack.encode(items))


def _encode_metadata(metadata: Mapping[str, Any]) -> msgspec.Raw:
    encoded = msgspec.msgpack.encode(dict(metadata))
    refuse_more_than(MAX_METADATA_BYTES, len(encoded), "bytes of metadata")
    return msgspec.Raw(encoded)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in these bytes, checked in itself, all of it.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version) or UnsafeCheckpointError (path_escape,
    limits_exceeded).
    """
    manifest = open_manifest(data)
    if isinstance(manifest.tensors, ColumnTensors):
        manifest.tensors.check_all()
    return manifest


def open_manifest(data: bytes) -> Manifest:
    """The same for those who use few of its chunks: each is checked when it is asked for."""
    body = unseal(data)
    try:
        wire = msgspec.msgpack.decode(body, type=_Wire)
        fqns = _decode_items(wire.tensor_fqns, list[str], MAX_TENSORS, "tensors")
        columns, files = decode_columns(wire, len(fqns)), _decode_files(wire)
        manifest = Manifest(
            save_id=wire.save_id,
            step=wire.step,
            foreign_format=wire.foreign_format,
            linked_to=wire.linked_to,
            files=files,
            tensors=ColumnTensors(fqns, columns, FileBounds(files), may_share_bytes=bool(wire.foreign_format)),
            aliases=_decode_items(wire.aliases, dict[str, str], MAX_OBJECTS, "tied tensors"),
            objects=_decode_items(wire.objects, dict[str, bytes], MAX_OBJECTS, "objects"),
            rank_objects=_decode_rank_objects(wire.rank_objects),
            metadata=_decode_metadata(wire.metadata),
            provenance=_decode_metadata(wire.provenance),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_manifest(f"its body cannot be decoded: {error}") from error
    check_manifest(manifest, columns)
    return manifest


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
    lengths = decode_column(wire.extent_lengths, int(counts.sum()), "extent lengths").astype(np.uint64)
    digests = decode_column(wire.extent_digests, int(counts.sum()), "checksums").astype(np.uint64)
    files, stops = [], np.cumsum(counts).tolist()
    for name, byte_length, start, stop in zip(names, byte_lengths.tolist(), [0, *stops], stops, strict=False):
        # A load asks for the extents of few files: as lists of int those of all would take many times the memory.
        of_file = slice(start, stop)
        extents = array("Q", lengths[of_file].tobytes()), array("Q", digests[of_file].tobytes())
        files.append(DataFile(name, byte_length, *extents))
    return _with_samples(files, wire) if len(wire.file_num_samples) else files


def _with_samples(files: Sequence[DataFile], wire: _Wire) -> list[DataFile]:
    counts = decode_counts(wire.file_num_samples, len(files), "samples of files", MAX_SAMPLES)
    num_samples = int(counts.sum())
    columns = [
        decode_column(column, num_samples, "samples of files").tolist()
        for column in (wire.sample_byte_offsets, wire.sample_byte_lengths, wire.sample_digests)
    ]
    samples = iter(map(Sample, *columns))
    return [file._replace(samples=tuple(islice(samples, count))) for file, count in zip(files, counts, strict=True)]
