"""The bytes of a manifest file: encoding and decoding. It reads no file, and trusts nothing that it decodes.

docs/format.md documents the byte layout. Chunks and checksums are columns of little-endian unsigned integers rather
than records, so that a million of them encode and decode at the speed of an array copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.envelope import FORMAT_VERSION, RUNS_VERSION, seal, unseal
from bytecheckpoint.manifest.manifest import Manifest, check_manifest
from bytecheckpoint.manifest.records import Columns, DataFile, Sample, joined
from bytecheckpoint.manifest.run_column import RunColumn
from bytecheckpoint.manifest.table import TensorTable
from bytecheckpoint.manifest.validation import (
    MAX_CHUNKS,
    MAX_DIMS,
    MAX_EXTENTS,
    MAX_FILES,
    MAX_METADATA_BYTES,
    MAX_OBJECTS,
    MAX_SAMPLES,
    MAX_TENSORS,
    bad_manifest,
    refuse_deep_nesting,
    refuse_more_than,
)

_Items = TypeVar("_Items", bound=Sized)
_NOTHING = memoryview(b"")
"""A column that is left out of the file."""
_NO_DIGEST = bytes(16)
_MANY_CHUNKS = 1 << 20
"""Chunks from which on their places are written as runs, if they are regular."""


class _Wire(msgspec.Struct, omit_defaults=True):
    """The body of the file, as docs/format.md lists it. Fields may be added; a reader ignores fields that it does not
    know.

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
    file_content_digests: memoryview = _NOTHING
    chunk_file_runs: memoryview = _NOTHING
    chunk_byte_offset_runs: memoryview = _NOTHING


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest file: header, compressed body, checksum of both. Manifests that are equal, with their dicts in
    the same order, give equal bytes.

    Raises UnsafeCheckpointError (limits_exceeded) for what is beyond a limit of readers, and CheckpointSaveError
    (unsupported_value) for what msgpack cannot hold. Names and numbers are not checked here, but by `check_manifest`.
    """
    refuse_deep_nesting(manifest.metadata, "metadata")
    refuse_deep_nesting(manifest.provenance, "provenance")
    try:
        wire = _to_wire(manifest)
        return seal(msgspec.msgpack.encode(wire), version=RUNS_VERSION if wire.chunk_file_runs else FORMAT_VERSION)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise CheckpointSaveError(
            f"the manifest cannot be written: {error}; nothing was committed: keep metadata to None, bool, 64-bit int, "
            "float, str, bytes, list and dict, and names to valid Unicode",
            kind="unsupported_value",
        ) from error


def _to_wire(manifest: Manifest) -> _Wire:
    files, columns = manifest.files, manifest.table.columns
    extent_lengths = [file.extent_lengths for file in files]
    rank_objects = [(fqn, *item) for fqn, by_rank in manifest.rank_objects.items() for item in by_rank.items()]
    refuse_more_than(MAX_CHUNKS, len(columns.files), "chunks")
    refuse_more_than(MAX_EXTENTS, sum(map(len, extent_lengths)), "extents")
    return _Wire(
        save_id=manifest.save_id,
        step=manifest.step,
        file_names=_encode_items([file.name for file in files], MAX_FILES, "files"),
        file_byte_lengths=encode_column(file.byte_length for file in files),
        file_num_extents=encode_column(map(len, extent_lengths)),
        extent_lengths=encode_column(joined(extent_lengths)),
        extent_digests=encode_column(joined(file.extent_digests for file in files)),
        tensor_fqns=_encode_items(list(manifest.tensors), MAX_TENSORS, "tensors"),
        **_encode_columns(columns),
        aliases=_encode_items(dict(manifest.aliases), MAX_OBJECTS, "tied tensors"),
        objects=_encode_items(dict(manifest.objects), MAX_OBJECTS, "objects"),
        rank_objects=_encode_items(rank_objects, MAX_OBJECTS, "objects of single ranks"),
        metadata=_encode_metadata(manifest.metadata),
        provenance=_encode_metadata(manifest.provenance),
        foreign_format=manifest.foreign_format,
        linked_to=manifest.linked_to,
        file_content_digests=_encode_content_digests(files),
        **_sample_columns(files),
    )


def _encode_columns(columns: Columns) -> dict[str, Any]:
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
        **_encode_places(columns),
        "chunk_byte_lengths": encode_column(columns.byte_lengths) if is_compressed else _NOTHING,
        "codecs": list(columns.codec_names) if is_compressed else [],
        "chunk_codecs": encode_column(columns.codecs) if is_compressed else _NOTHING,
    }


def _encode_places(columns: Columns) -> dict[str, memoryview]:
    """Returns the columns of files and offsets, as runs only if there are very many chunks, because older
    releases cannot read runs.
    """
    if len(columns.files) >= _MANY_CHUNKS:
        files, byte_offsets = RunColumn.of(columns.files), RunColumn.of(columns.byte_offsets)
        if files is not None and byte_offsets is not None:
            runs = {"chunk_file_runs": files.encode(), "chunk_byte_offset_runs": byte_offsets.encode()}
            return {"chunk_files": _NOTHING, "chunk_byte_offsets": _NOTHING, **runs}
    return {
        "chunk_files": encode_column(columns.files[:]),
        "chunk_byte_offsets": encode_column(columns.byte_offsets[:]),
    }


def _sample_columns(files: Sequence[DataFile]) -> dict[str, Any]:
    samples = [sample for file in files for sample in file.samples]
    if not samples:
        return {}
    refuse_more_than(MAX_SAMPLES, len(samples), "samples of files")
    return {
        "file_num_samples": encode_column(len(file.samples) for file in files),
        "sample_byte_offsets": encode_column(sample.byte_offset for sample in samples),
        "sample_byte_lengths": encode_column(sample.byte_length for sample in samples),
        "sample_digests": encode_column(sample.digest for sample in samples),
    }


def _encode_content_digests(files: Sequence[DataFile]) -> memoryview:
    if not any(file.content_digest for file in files):
        return _NOTHING
    return memoryview(b"".join(file.content_digest or _NO_DIGEST for file in files))


def _encode_items(items: Sequence[Any] | dict[str, Any], limit: int, what: str) -> msgspec.Raw:
    refuse_more_than(limit, len(items), what)
    return msgspec.Raw(msgspec.msgpack.encode(items))


def _encode_metadata(metadata: Mapping[str, Any]) -> msgspec.Raw:
    encoded = msgspec.msgpack.encode(dict(metadata))
    refuse_more_than(MAX_METADATA_BYTES, len(encoded), "bytes of metadata")
    return msgspec.Raw(encoded)


def decode_manifest(data: bytes) -> Manifest:
    """Decodes a manifest and checks all of it.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version) or UnsafeCheckpointError (path_escape,
    limits_exceeded).
    """
    manifest = open_manifest(data)
    manifest.table.check_all()
    return manifest


def open_manifest(data: bytes) -> Manifest:
    """Decodes a manifest of which few chunks are needed, and checks all of it but its chunks: `TensorTable` checks a
    chunk when it is used. Raises the errors of `decode_manifest`.
    """
    body = unseal(data)
    try:
        wire = msgspec.msgpack.decode(body, type=_Wire)
        fqns = _decode_items(wire.tensor_fqns, list[str], MAX_TENSORS, "tensors")
        columns, files = _decode_columns(wire, len(fqns)), _decode_files(wire)
        manifest = Manifest(
            save_id=wire.save_id,
            step=wire.step,
            foreign_format=wire.foreign_format,
            linked_to=wire.linked_to,
            files=files,
            tensors=TensorTable(fqns, columns, files, may_share_bytes=bool(wire.foreign_format)),
            aliases=_decode_items(wire.aliases, dict[str, str], MAX_OBJECTS, "tied tensors"),
            objects=_decode_items(wire.objects, dict[str, bytes], MAX_OBJECTS, "objects"),
            rank_objects=_decode_rank_objects(wire.rank_objects),
            metadata=decode_metadata(wire.metadata),
            provenance=decode_metadata(wire.provenance),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_manifest(f"its body cannot be decoded: {error}") from error
    check_manifest(manifest)
    return manifest


def _decode_columns(wire: _Wire, num_tensors: int) -> Columns:
    num_dims = _decode_counts(wire.tensor_num_dims, num_tensors, "dimensions", MAX_DIMS * MAX_TENSORS)
    num_chunks = _decode_counts(wire.tensor_num_chunks, num_tensors, "chunks", MAX_CHUNKS)
    is_grid = decode_column(wire.tensor_is_grid, num_tensors if wire.tensor_is_grid else 0, "marks of grids")
    if is_grid.max(initial=0) > 1:
        raise bad_manifest(f"it marks a grid with {is_grid.max()}")
    is_grid = is_grid.astype(bool) if len(is_grid) else np.zeros(num_tensors, bool)
    total = int(num_chunks.sum())
    num_coordinates = int((2 * num_dims * num_chunks)[~is_grid].sum())
    has_byte_lengths = bool(wire.chunk_byte_lengths or wire.codecs)
    return Columns(
        dtype_names=wire.dtypes,
        dtypes=decode_column(wire.tensor_dtypes, num_tensors, "dtypes"),
        num_dims=num_dims,
        num_chunks=num_chunks,
        shapes=decode_column(wire.tensor_shapes, int(num_dims.sum()), "shapes"),
        is_grid=is_grid,
        grid_parts=decode_column(wire.grid_parts, int(num_dims[is_grid].sum()), "parts of grids"),
        coordinates=decode_column(wire.chunk_coordinates, num_coordinates, "coordinates"),
        files=_decode_places(wire.chunk_files, wire.chunk_file_runs, total, "file numbers"),
        byte_offsets=_decode_places(wire.chunk_byte_offsets, wire.chunk_byte_offset_runs, total, "byte offsets"),
        byte_lengths=decode_column(wire.chunk_byte_lengths, total if has_byte_lengths else 0, "byte lengths"),
        codec_names=wire.codecs,
        codecs=decode_column(wire.chunk_codecs, total if wire.codecs else 0, "codecs"),
    )


def _decode_places(column: memoryview, runs: memoryview, num_chunks: int, name: str) -> Any:
    return RunColumn.decode(runs, num_chunks, name) if len(runs) else decode_column(column, num_chunks, name)


def _decode_items(raw: msgspec.Raw, kind: type[_Items], limit: int, what: str) -> _Items:
    """Decodes a list or dict. `raw` is known to be well-formed msgpack.

    Raises UnsafeCheckpointError (limits_exceeded) if it has more than `limit` items, and CheckpointCorruptError
    (bad_manifest) for a dict that repeats a key; the errors of msgspec for what is not of this `kind`.
    """
    num_items = count_items(raw, limit, what)
    items = msgspec.msgpack.decode(raw, type=kind)
    if len(items) != num_items:
        raise bad_manifest(f"two of its {what} have the same name")
    return items


def count_items(raw: msgspec.Raw, limit: int, what: str) -> int:
    """Returns the number of items of a list or dict. Raises UnsafeCheckpointError (limits_exceeded) beyond `limit`."""
    # The head of a msgpack array or map has the number of its items, which msgspec compares with no limit of our own
    # error kind. Undecoded, because the body's 2**30 bytes can hold as many empty strings, of 8 bytes each in a list.
    head = memoryview(raw)[:5]
    width = {0xDC: 2, 0xDE: 2, 0xDD: 4, 0xDF: 4}.get(head[0])
    num_items = int.from_bytes(head[1 : 1 + width], "big") if width else head[0] & 15
    refuse_more_than(limit, num_items, what)
    return num_items


def _decode_rank_objects(raw: msgspec.Raw) -> dict[str, dict[int, bytes]]:
    rank_objects: dict[str, dict[int, bytes]] = {}
    for fqn, rank, value in _decode_items(raw, list[tuple[str, int, bytes]], MAX_OBJECTS, "objects of single ranks"):
        by_rank = rank_objects.setdefault(fqn, {})
        if rank in by_rank:
            raise bad_manifest(f"two objects of rank {rank} have the same name")
        by_rank[rank] = value
    return rank_objects


def decode_metadata(raw: msgspec.Raw) -> dict[str, Any]:
    """Decodes metadata. Raises UnsafeCheckpointError (limits_exceeded) if it is too long, and the errors of msgspec,
    which the callers turn into bad_manifest, if it is no dict with names as keys.
    """
    refuse_more_than(MAX_METADATA_BYTES, len(memoryview(raw)), "bytes of metadata")
    return msgspec.msgpack.decode(raw, type=dict[str, Any])


def _decode_files(wire: _Wire) -> list[DataFile]:
    names = _decode_items(wire.file_names, list[str], MAX_FILES, "files")
    byte_lengths = decode_column(wire.file_byte_lengths, len(names), "file lengths")
    counts = _decode_counts(wire.file_num_extents, len(names), "extents", MAX_EXTENTS)
    lengths = decode_column(wire.extent_lengths, int(counts.sum()), "extent lengths").astype(np.uint64, copy=False)
    digests = decode_column(wire.extent_digests, int(counts.sum()), "checksums").astype(np.uint64, copy=False)
    files, stops = [], np.cumsum(counts).tolist()
    for name, byte_length, start, stop in zip(names, byte_lengths.tolist(), [0, *stops], stops, strict=False):
        # A load asks for the extents of few files: as lists of int all of them would take many times the memory.
        extents = slice(start, stop)
        arrays = array("Q", lengths[extents].tobytes()), array("Q", digests[extents].tobytes())
        files.append(DataFile(name, byte_length, *arrays))
    files = _with_samples(files, wire) if len(wire.file_num_samples) else files
    return _with_content_digests(files, wire.file_content_digests) if len(wire.file_content_digests) else files


def _with_content_digests(files: Sequence[DataFile], column: memoryview) -> list[DataFile]:
    width = len(_NO_DIGEST)
    if len(column) != width * len(files):
        raise bad_manifest(f"{len(column)} bytes of digests of whole files do not hold those of {len(files)} files")
    digests = (bytes(column[start : start + width]) for start in range(0, len(column), width))
    pairs = zip(files, digests, strict=True)
    return [file if digest == _NO_DIGEST else file._replace(content_digest=digest) for file, digest in pairs]


def _with_samples(files: Sequence[DataFile], wire: _Wire) -> list[DataFile]:
    counts = _decode_counts(wire.file_num_samples, len(files), "samples of files", MAX_SAMPLES)
    num_samples = int(counts.sum())
    columns = [
        decode_column(column, num_samples, "samples of files").tolist()
        for column in (wire.sample_byte_offsets, wire.sample_byte_lengths, wire.sample_digests)
    ]
    samples = iter(map(Sample, *columns))
    return [file._replace(samples=tuple(islice(samples, count))) for file, count in zip(files, counts, strict=True)]


def encode_column(values: Iterable[int]) -> memoryview:
    """Encodes integers as unsigned little-endian ones, all as wide as the largest needs: 1, 2, 4 or 8 bytes."""
    column = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    largest = int(column.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if largest < 1 << (8 * width))
    return memoryview(column.astype(f"<u{width}").tobytes())


def decode_column(data: memoryview, num_values: int, name: str) -> np.ndarray:
    """Decodes `num_values` integers that `encode_column` has encoded. Raises CheckpointCorruptError (bad_manifest) if
    the bytes do not hold that many.
    """
    width = len(data) // num_values if num_values else 1
    if width not in {1, 2, 4, 8} or len(data) != width * num_values:
        raise bad_manifest(f"{len(data)} bytes of {name} do not hold {num_values} integers")
    return np.frombuffer(data, dtype=f"<u{width}")


def _decode_counts(data: memoryview, num_values: int, name: str, limit: int) -> np.ndarray:
    """Decodes counts. Raises UnsafeCheckpointError (limits_exceeded) if their sum is more than `limit`."""
    counts = decode_column(data, num_values, name)
    # A float cannot wrap around, and is exact where the sum is within any limit.
    refuse_more_than(limit, int(counts.sum(dtype=np.float64)), name)
    return counts.astype(np.int64)
