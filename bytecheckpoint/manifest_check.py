"""What must hold in a manifest before anything is done with it, whoever wrote it: every number is in its range, every
chunk in its tensor and in its file, every name inside the checkpoint's folder. It looks at the manifest alone: whether
the files exist is the reader's question, whether chunks tile a tensor exactly the planner's.

Chunks are checked as numpy columns, all at once, because there may be millions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.frames import CODECS, FRAME_BYTES, MAX_ENCODED_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bytecheckpoint.manifest import DataFile, Manifest

    Int64s = NDArray[np.int64]

MAX_TENSORS = 1 << 22
MAX_CHUNKS = 1 << 25
MAX_FILES = 1 << 20
MAX_EXTENTS = 1 << 25
MAX_OBJECTS = 1 << 22
"""Plain objects, those of single ranks and aliases: of each so many."""
MAX_METADATA_BYTES = 1 << 22
"""Of the user's metadata, and of the provenance, encoded."""
MAX_DIMS = 64
MAX_DEPTH = 64
"""Of lists and dicts inside one another in metadata."""
MAX_BYTES = 1 << 62
"""Of one tensor, and of all files together. Half of what fits an int64, so that rounding cannot reach its end."""

_UNSAFE_NAME = re.compile(r"\A\Z|[\\:\x00]|\A/|/\Z|//|(?:\A|/)\.\.?(?:/|\Z)")


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
    codec_names: Sequence[str]
    """Those in use; empty where no chunk is compressed, and so is `codecs`."""
    codecs: np.ndarray
    """An index into `codec_names`."""


def bad_manifest(what: str) -> CheckpointCorruptError:
    """The error for a manifest that cannot be right."""
    return CheckpointCorruptError(
        f"the manifest is damaged: {what}; nothing was loaded: take another step, or another copy of this checkpoint",
        kind="bad_manifest",
    )


def refuse_more_than(limit: int, found: int, what: str) -> None:
    """Raises UnsafeCheckpointError (limits_exceeded) where there are more than `limit` of something."""
    if found > limit:
        raise UnsafeCheckpointError(
            f"the manifest has {found} {what}, more than the {limit} that are accepted; nothing was loaded or "
            "committed: if the checkpoint is meant to be so large, divide the state over several checkpoints",
            kind="limits_exceeded",
        )


def refuse_deep_nesting(value: object, what: str) -> None:
    """Raises UnsafeCheckpointError (limits_exceeded) where containers lie more than MAX_DEPTH deep in one another."""
    layer: list[object] = [value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in layer if isinstance(item, Mapping | list | tuple)]
        layer = [part for item in containers for part in (item.values() if isinstance(item, Mapping) else item)]
    if any(isinstance(item, Mapping | list | tuple) for item in layer):
        refuse_more_than(MAX_DEPTH, MAX_DEPTH + 1, f"levels of nesting in its {what}")


def check_manifest(manifest: Manifest, columns: Columns) -> None:
    """Checks all that can be said about a decoded manifest without looking at any other file.

    Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError (path_escape, limits_exceeded).
    """
    _check_identity(manifest)
    refuse_deep_nesting(manifest.metadata, "metadata")
    refuse_deep_nesting(manifest.provenance, "provenance")
    _check_aliases(manifest)
    for file in manifest.files:
        _check_file(file)
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise bad_manifest("it lists a file twice")
    _check_columns(columns, manifest.files, list(manifest.tensors))


def _check_identity(manifest: Manifest) -> None:
    if not manifest.save_id:
        raise bad_manifest("its save id is empty")
    if "/" in manifest.save_id or _UNSAFE_NAME.search(manifest.save_id):
        raise _path_escape("save id", manifest.save_id)
    if manifest.step is not None and not 0 <= manifest.step < MAX_BYTES:
        raise bad_manifest(f"its step is {manifest.step}, not a number from 0 on")
    for fqn, by_rank in manifest.rank_objects.items():
        if any(rank < 0 for rank in by_rank):
            raise bad_manifest(f"it holds {_shown(fqn)} for rank {min(by_rank)}")


def _check_aliases(manifest: Manifest) -> None:
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors:
            raise bad_manifest(f"{_shown(alias)} is said to be tied to {_shown(target)}, which is no tensor in it")
        if alias in manifest.tensors:
            raise bad_manifest(f"{_shown(alias)} is both a tensor of its own and tied to {_shown(target)}")


def _check_file(file: DataFile) -> None:
    if _UNSAFE_NAME.search(file.name):
        raise _path_escape("data file", file.name)
    if not 0 <= file.byte_length <= MAX_BYTES:
        raise bad_manifest(f"file {_shown(file.name)} is said to have {file.byte_length} bytes")
    lengths = file.extent_lengths
    if len(lengths) != len(file.extent_digests):
        raise bad_manifest(f"file {_shown(file.name)} has {len(lengths)} extents, {len(file.extent_digests)} checksums")
    if lengths and (min(lengths) <= 0 or sum(lengths) != file.byte_length):
        raise bad_manifest(
            f"the extents of file {_shown(file.name)} have {sum(lengths)} bytes, the shortest {min(lengths)}; "
            f"the file has {file.byte_length}"
        )


def _path_escape(what: str, name: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"the manifest has a {what} {_shown(name)}: names must be relative, with forward slashes, without empty parts, "
        "'.', '..', ':', backslash or NUL, so that they stay inside the checkpoint's folder; no file was opened: "
        "do not trust this checkpoint",
        kind="path_escape",
    )


def _check_columns(columns: Columns, files: Sequence[DataFile], fqns: Sequence[str]) -> None:
    itemsizes = _itemsizes(columns, fqns)
    numels = _tensor_numels(columns, itemsizes, fqns)
    for column in (columns.coordinates, columns.byte_offsets, columns.byte_lengths):
        if column.itemsize == 8 and column.max(initial=0) > MAX_BYTES:
            raise bad_manifest(f"it holds the number {column.max()} among the offsets and lengths of its chunks")
    tensors = np.repeat(np.arange(len(fqns)), columns.num_chunks)
    chunk_numels = _chunk_numels(columns, tensors, fqns)
    raw_bytes = chunk_numels * itemsizes[tensors]
    _check_byte_lengths(columns, tensors, raw_bytes, fqns)
    _check_volumes(columns, numels, chunk_numels, fqns)
    _check_byte_ranges(columns, tensors, files, fqns)
    _check_frames(columns, tensors, raw_bytes, files, fqns)


def _itemsizes(columns: Columns, fqns: Sequence[str]) -> Int64s:
    if len(fqns) and columns.dtypes.max() >= len(columns.dtype_names):
        raise bad_manifest(f"it has {len(columns.dtype_names)} dtypes and a tensor of dtype {columns.dtypes.max()}")
    known = np.array([DTYPE_ITEMSIZES.get(name, 0) for name in columns.dtype_names], dtype=np.int64)
    sizes: Int64s = known[columns.dtypes]
    if not sizes.all():
        tensor = _first(sizes == 0)
        dtype = columns.dtype_names[columns.dtypes[tensor]]
        raise bad_manifest(f"{_shown(fqns[tensor])} has the dtype {_shown(dtype)}, which this release does not know")
    return sizes


def _tensor_numels(columns: Columns, itemsizes: Int64s, fqns: Sequence[str]) -> Int64s:
    if columns.num_dims.max(initial=0) > MAX_DIMS:
        tensor = _first(columns.num_dims > MAX_DIMS)
        raise bad_manifest(f"{_shown(fqns[tensor])} has {columns.num_dims[tensor]} dimensions; at most {MAX_DIMS}")
    if columns.shapes.max(initial=0) > MAX_BYTES:
        raise bad_manifest(f"a tensor has a dimension of {columns.shapes.max()} elements")
    shapes = columns.shapes.astype(np.int64)
    # In int64 a product that is too large would wrap around unseen, in floats it cannot. An empty tensor has 0 bytes
    # whatever its other dimensions are.
    with np.errstate(over="ignore", invalid="ignore"):
        num_bytes = itemsizes * _reduce(np.multiply, shapes.astype(np.float64), columns.num_dims, empty=1)
    is_empty = _reduce(np.minimum, shapes, columns.num_dims, empty=1) == 0
    too_large = (num_bytes > MAX_BYTES) & ~is_empty
    if too_large.any():
        raise bad_manifest(f"{_shown(fqns[_first(too_large)])} has a shape of more than {MAX_BYTES} bytes")
    return np.where(is_empty, 0, _reduce(np.multiply, shapes, columns.num_dims, empty=1))


def _chunk_numels(columns: Columns, tensors: Int64s, fqns: Sequence[str]) -> Int64s:
    """Elements of each chunk; raises where one reaches out of its tensor's shape."""
    num_dims = columns.num_dims[tensors]
    first_coordinates = _starts(2 * num_dims)
    first_dims = _starts(columns.num_dims)[tensors]
    numels = np.ones(len(tensors), dtype=np.int64)
    for dim in range(int(num_dims.max(initial=0))):
        chunks = np.flatnonzero(num_dims > dim)
        at = first_coordinates[chunks] + dim
        offsets = columns.coordinates[at].astype(np.int64)
        lengths = columns.coordinates[at + num_dims[chunks]].astype(np.int64)
        outside = lengths > columns.shapes[first_dims[chunks] + dim].astype(np.int64) - offsets
        if outside.any():
            first = _first(outside)
            raise bad_manifest(
                f"a chunk of {_shown(fqns[tensors[chunks[first]]])} has elements {offsets[first]} to "
                f"{int(offsets[first]) + int(lengths[first])} of dimension {dim}, which the shape has not"
            )
        numels[chunks] *= lengths
    return numels


def _check_byte_lengths(columns: Columns, tensors: Int64s, raw_bytes: Int64s, fqns: Sequence[str]) -> None:
    if columns.codecs.max(initial=0) >= max(1, len(columns.codec_names)):
        raise bad_manifest(f"it has {len(columns.codec_names)} codecs and a chunk of codec {columns.codecs.max()}")
    byte_lengths = columns.byte_lengths.astype(np.int64)
    # Of a codec that only a later release knows nothing can be said; the planner refuses the chunk.
    wrong = _is_stored_by(columns, ("none",)) & (byte_lengths != raw_bytes)
    wrong |= _is_stored_by(columns, CODECS) & (byte_lengths > raw_bytes)
    if wrong.any():
        chunk = _first(wrong)
        raise bad_manifest(
            f"a chunk of {_shown(fqns[tensors[chunk]])} has {columns.byte_lengths[chunk]} bytes, "
            f"its region takes {raw_bytes[chunk]}"
        )


def _is_stored_by(columns: Columns, codecs: Collection[str]) -> NDArray[np.bool_]:
    if not columns.codec_names:
        return np.full(len(columns.files), "none" in codecs)
    stored: NDArray[np.bool_] = np.array([name in codecs for name in columns.codec_names])[columns.codecs]
    return stored


def _check_volumes(columns: Columns, numels: Int64s, chunk_numels: Int64s, fqns: Sequence[str]) -> None:
    # Halves are summed apart: a sum of many chunks that wrapped around could look right.
    low = _reduce(np.add, chunk_numels & 0xFFFFFFFF, columns.num_chunks, empty=0)
    high = _reduce(np.add, chunk_numels >> 32, columns.num_chunks, empty=0) + (low >> 32)
    wrong = (high != numels >> 32) | (low & 0xFFFFFFFF != numels & 0xFFFFFFFF)
    if wrong.any():
        tensor = _first(wrong)
        raise bad_manifest(
            f"the chunks of {_shown(fqns[tensor])} have {(int(high[tensor]) << 32) + (int(low[tensor]) & 0xFFFFFFFF)} "
            f"elements, its shape has {numels[tensor]}"
        )


def _check_byte_ranges(columns: Columns, tensors: Int64s, files: Sequence[DataFile], fqns: Sequence[str]) -> None:
    if columns.files.max(initial=0) >= len(files) and len(tensors):
        chunk = int(np.argmax(columns.files))
        raise bad_manifest(
            f"a chunk of {_shown(fqns[tensors[chunk]])} lies in file {columns.files[chunk]} of {len(files)}"
        )
    if sum(file.byte_length for file in files) > MAX_BYTES:
        raise bad_manifest(f"its files have more than {MAX_BYTES} bytes together")
    file_lengths = np.array([file.byte_length for file in files], dtype=np.int64)
    offsets, lengths = columns.byte_offsets.astype(np.int64), columns.byte_lengths.astype(np.int64)
    outside = lengths > file_lengths[columns.files] - offsets
    if outside.any():
        chunk = _first(outside)
        file = files[columns.files[chunk]]
        raise bad_manifest(
            f"a chunk of {_shown(fqns[tensors[chunk]])} has {lengths[chunk]} bytes from byte {offsets[chunk]} on "
            f"of file {_shown(file.name)}, which has {file.byte_length}"
        )
    # Every file gets its own stretch of one long line of bytes, so that one sort shows the overlaps in all of them.
    starts = _starts(file_lengths)[columns.files] + offsets
    order = np.argsort(starts)
    order = order[lengths[order] > 0]
    overlaps = starts[order[1:]] < (starts + lengths)[order[:-1]]
    if overlaps.any():
        first, second = order[_first(overlaps) :][:2]
        raise bad_manifest(
            f"a chunk of {_shown(fqns[tensors[first]])} and one of {_shown(fqns[tensors[second]])} share bytes of file "
            f"{_shown(files[columns.files[first]].name)}, at {offsets[second]}"
        )


def _check_frames(
    columns: Columns, tensors: Int64s, raw_bytes: Int64s, files: Sequence[DataFile], fqns: Sequence[str]
) -> None:
    """Each compressed chunk is a run of whole extents of its file, one for each frame and none longer than a frame."""
    chunks = np.flatnonzero(_is_stored_by(columns, CODECS[1:]))
    if not len(chunks):
        return
    # As with byte ranges, every file has its own stretch of one long line, here cut where an extent ends.
    cuts = [file.extent_lengths or [file.byte_length] * (file.byte_length > 0) for file in files]
    lengths = np.array([length for of_file in cuts for length in of_file], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    file_starts = _starts(np.array([file.byte_length for file in files], dtype=np.int64))
    of_files = columns.files[chunks]
    starts = file_starts[of_files] + columns.byte_offsets[chunks].astype(np.int64)
    ends = starts + columns.byte_lengths[chunks].astype(np.int64)
    first, last = np.searchsorted(bounds, starts), np.searchsorted(bounds, ends)
    too_long = np.flatnonzero(lengths > MAX_ENCODED_BYTES)
    wrong = (bounds[first] != starts) | (bounds[last] != ends) | (last - first != -(-raw_bytes[chunks] // FRAME_BYTES))
    wrong |= np.searchsorted(too_long, last) > np.searchsorted(too_long, first)
    wrong |= ~np.array([bool(file.extent_lengths) for file in files])[of_files]
    if wrong.any():
        chunk = chunks[_first(wrong)]
        raise bad_manifest(
            f"a compressed chunk of {_shown(fqns[tensors[chunk]])} has {columns.byte_lengths[chunk]} bytes from byte "
            f"{columns.byte_offsets[chunk]} on of file {_shown(files[columns.files[chunk]].name)}, which are not one "
            f"whole extent of at most {MAX_ENCODED_BYTES} bytes for every {FRAME_BYTES} of its {raw_bytes[chunk]} bytes"
        )


def _starts(counts: Int64s) -> Int64s:
    """Where each run begins when runs of these lengths follow one another."""
    return np.cumsum(counts) - counts


def _reduce(function: np.ufunc, values: NDArray[Any], counts: Int64s, *, empty: int) -> NDArray[Any]:
    """The function over each of the runs of these lengths that `values` consists of; `empty` for an empty run."""
    results = np.full(len(counts), empty, dtype=values.dtype)
    filled = counts > 0
    if filled.any():
        results[filled] = function.reduceat(values, _starts(counts)[filled])
    return results


def _first(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:200] + "...")
