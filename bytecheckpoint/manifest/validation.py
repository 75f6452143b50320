"""Checks of a decoded manifest, whoever wrote it: every number is in its range, every name inside the checkpoint's
folder. It looks at the manifest alone: chunk_validation.py checks chunks, the reader whether files exist, the planner
whether chunks tile a tensor exactly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bytecheckpoint.manifest.encoding import DataFile, Manifest

    Int64s = NDArray[np.int64]

MAX_TENSORS = 1 << 22
MAX_CHUNKS = 1 << 25
MAX_FILES = 1 << 20
MAX_EXTENTS = 1 << 25
MAX_SAMPLES = 1 << 22
"""Of all files that a link points to."""
MAX_SAMPLE_BYTES = 1 << 24
"""Of one, because it is read at once."""
MAX_OBJECTS = 1 << 22
"""Plain objects, those of single ranks and aliases: of each so many."""
MAX_METADATA_BYTES = 1 << 22
"""Of the user's metadata, and of the provenance, encoded."""
MAX_DIMS = 64
MAX_DEPTH = 64
"""Of lists and dicts inside one another in metadata."""
MAX_BYTES = 1 << 62
"""Of one tensor, and of all files together. Half of what fits an int64, so that rounding cannot reach its end."""

_FOLDER = re.compile(r"\A(?:/(?!.*(?:\A|/)\.\.(?:/|\Z))|[a-z][a-z0-9+.-]*://).{0,4096}\Z", re.DOTALL)
"""An absolute path or a URL."""
_CONTAINERS = (dict, list, tuple)
"""What msgpack gives, and takes, as containers."""
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
    is_grid: NDArray[np.bool_]
    """Of each tensor: whether its chunks are a regular grid, in row-major order; see region.py."""
    grid_parts: np.ndarray
    """`num_dims` entries for each tensor that is a grid: the lengths of a part."""
    coordinates: np.ndarray
    """`2 * num_dims` entries for each chunk of the other tensors: its offsets, then its lengths."""
    files: np.ndarray
    byte_offsets: np.ndarray
    byte_lengths: np.ndarray
    """Empty where every chunk has the bytes that its elements take."""
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
    # Of millions of items each is looked at: exact classes, where `Mapping` would cost ten times as much.
    layer: list[Any] = [dict(value) if isinstance(value, Mapping) else value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in layer if isinstance(item, _CONTAINERS)]
        layer = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
        if not layer:
            return
    if any(isinstance(item, _CONTAINERS) for item in layer):
        refuse_more_than(MAX_DEPTH, MAX_DEPTH + 1, f"levels of nesting in its {what}")


def check_manifest(manifest: Manifest, columns: Columns) -> None:
    """Checks all that can be said about a decoded manifest without looking at any chunk or any other file.

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
    if sum(file.byte_length for file in manifest.files) > MAX_BYTES:
        raise bad_manifest(f"its files have more than {MAX_BYTES} bytes together")
    fqns = list(manifest.tensors)
    numels = numels_of(columns, itemsizes_of(columns, fqns), fqns)
    _check_grids(columns, numels, fqns)
    if columns.codecs.max(initial=0) >= max(1, len(columns.codec_names)):
        raise bad_manifest(f"it has {len(columns.codec_names)} codecs and a chunk of codec {columns.codecs.max()}")


def _check_identity(manifest: Manifest) -> None:
    if not manifest.save_id and not manifest.foreign_format:
        raise bad_manifest("its save id is empty")
    if manifest.save_id and ("/" in manifest.save_id or _UNSAFE_NAME.search(manifest.save_id)):
        raise _path_escape("save id", manifest.save_id)
    if manifest.linked_to and ("\0" in manifest.linked_to or not _FOLDER.match(manifest.linked_to)):
        raise _path_escape("link to another folder", manifest.linked_to)
    if manifest.step is not None and not 0 <= manifest.step < MAX_BYTES:
        raise bad_manifest(f"its step is {manifest.step}, not a number from 0 on")
    for fqn, by_rank in manifest.rank_objects.items():
        if any(rank < 0 for rank in by_rank):
            raise bad_manifest(f"it holds {shown(fqn)} for rank {min(by_rank)}")


def _check_aliases(manifest: Manifest) -> None:
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors:
            raise bad_manifest(f"{shown(alias)} is said to be tied to {shown(target)}, which is no tensor in it")
        if alias in manifest.tensors:
            raise bad_manifest(f"{shown(alias)} is both a tensor of its own and tied to {shown(target)}")


def _check_file(file: DataFile) -> None:
    if _UNSAFE_NAME.search(file.name):
        raise _path_escape("data file", file.name)
    if not 0 <= file.byte_length <= MAX_BYTES:
        raise bad_manifest(f"file {shown(file.name)} is said to have {file.byte_length} bytes")
    lengths = file.extent_lengths
    if len(lengths) != len(file.extent_digests):
        raise bad_manifest(f"file {shown(file.name)} has {len(lengths)} extents, {len(file.extent_digests)} checksums")
    if lengths and (min(lengths) <= 0 or sum(lengths) != file.byte_length):
        raise bad_manifest(
            f"the extents of file {shown(file.name)} have {sum(lengths)} bytes, the shortest {min(lengths)}; "
            f"the file has {file.byte_length}"
        )
    for byte_offset, byte_length, _ in file.samples:
        if not 0 < byte_length <= MAX_SAMPLE_BYTES or byte_offset + byte_length > file.byte_length:
            what = f"a sample of {byte_length} bytes at byte {byte_offset}, and the file has {file.byte_length}"
            raise bad_manifest(f"file {shown(file.name)} has {what}")


def _path_escape(what: str, name: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"the manifest has a {what} {shown(name)}: names must be relative, with forward slashes, without empty parts, "
        "'.', '..', ':', backslash or NUL, so that they stay inside the checkpoint's folder; no file was opened: "
        "do not trust this checkpoint",
        kind="path_escape",
    )


def itemsizes_of(columns: Columns, fqns: Sequence[str]) -> Int64s:
    """Bytes of an element of each tensor. Raises CheckpointCorruptError (bad_manifest) for a dtype that is unknown."""
    if len(fqns) and columns.dtypes.max() >= len(columns.dtype_names):
        raise bad_manifest(f"it has {len(columns.dtype_names)} dtypes and a tensor of dtype {columns.dtypes.max()}")
    known = np.array([DTYPE_ITEMSIZES.get(name, 0) for name in columns.dtype_names], dtype=np.int64)
    sizes: Int64s = known[columns.dtypes]
    if not sizes.all():
        tensor = first_true(sizes == 0)
        dtype = columns.dtype_names[columns.dtypes[tensor]]
        raise bad_manifest(f"{shown(fqns[tensor])} has the dtype {shown(dtype)}, which this release does not know")
    return sizes


def numels_of(columns: Columns, itemsizes: Int64s, fqns: Sequence[str]) -> Int64s:
    """Elements of each tensor. Raises CheckpointCorruptError (bad_manifest) for a shape that cannot be."""
    if columns.num_dims.max(initial=0) > MAX_DIMS:
        tensor = first_true(columns.num_dims > MAX_DIMS)
        raise bad_manifest(f"{shown(fqns[tensor])} has {columns.num_dims[tensor]} dimensions; at most {MAX_DIMS}")
    if columns.shapes.max(initial=0) > MAX_BYTES:
        raise bad_manifest(f"a tensor has a dimension of {columns.shapes.max()} elements")
    shapes = columns.shapes.astype(np.int64)
    # In int64 a product that is too large would wrap around unseen, in floats it cannot. An empty tensor has 0 bytes
    # whatever its other dimensions are.
    with np.errstate(over="ignore", invalid="ignore"):
        num_bytes = itemsizes * reduce_runs(np.multiply, shapes.astype(np.float64), columns.num_dims, empty=1)
    is_empty = reduce_runs(np.minimum, shapes, columns.num_dims, empty=1) == 0
    too_large = (num_bytes > MAX_BYTES) & ~is_empty
    if too_large.any():
        raise bad_manifest(f"{shown(fqns[first_true(too_large)])} has a shape of more than {MAX_BYTES} bytes")
    return np.where(is_empty, 0, reduce_runs(np.multiply, shapes, columns.num_dims, empty=1))


def _check_grids(columns: Columns, numels: Int64s, fqns: Sequence[str]) -> None:
    grids = np.flatnonzero(columns.is_grid)
    parts = columns.grid_parts
    shapes = columns.shapes[np.repeat(columns.is_grid, columns.num_dims)]
    num_dims = columns.num_dims[grids]
    if not numels[grids].all() or not parts.all() or (parts > shapes).any():
        raise bad_manifest("it has a grid without elements, or one whose parts are empty or larger than their tensor")
    counts = -(-shapes.astype(np.int64) // parts.astype(np.int64))
    with np.errstate(over="ignore"):  # as above: in floats a product cannot wrap around
        expected = reduce_runs(np.multiply, counts.astype(np.float64), num_dims, empty=1)
    wrong = expected != columns.num_chunks[grids]
    if wrong.any():
        tensor = grids[first_true(wrong)]
        raise bad_manifest(
            f"{shown(fqns[tensor])} has {columns.num_chunks[tensor]} chunks, its grid {expected[first_true(wrong)]:.0f}"
        )


def run_starts(counts: Int64s) -> Int64s:
    """Where each run begins when runs of these lengths follow one another."""
    return np.cumsum(counts) - counts


def reduce_runs(function: np.ufunc, values: NDArray[Any], counts: Int64s, *, empty: int) -> NDArray[Any]:
    """The function over each of the runs of these lengths that `values` consists of; `empty` for an empty run."""
    results = np.full(len(counts), empty, dtype=values.dtype)
    filled = counts > 0
    if filled.any():
        results[filled] = function.reduceat(values, run_starts(counts)[filled])
    return results


def first_true(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


def shown(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:200] + "...")
