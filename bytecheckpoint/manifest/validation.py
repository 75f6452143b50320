"""Limits of a manifest, and checks of its contents, because anyone may have written it: every number is in its range,
every name inside the checkpoint's folder. chunk_validation.py checks chunks, the reader that files exist, the planner
that chunks tile a tensor exactly.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.manifest.records import Columns, DataFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

MAX_TENSORS = 1 << 22
MAX_CHUNKS = 1 << 26
MAX_FILES = 1 << 20
MAX_EXTENTS = 1 << 25
MAX_SAMPLES = 1 << 22
"""Samples of all files that a link points to."""
MAX_SAMPLE_BYTES = 1 << 24
"""Length of one sample, which is read at once."""
MAX_OBJECTS = 1 << 22
"""Limit of each: plain objects, objects of single ranks, aliases."""
MAX_METADATA_BYTES = 1 << 22
"""Limit of each, encoded: the user's metadata, the provenance."""
MAX_DIMS = 64
MAX_DEPTH = 64
"""Levels of nested lists and dicts in metadata."""
MAX_BYTES = 1 << 62
"""Limit of one tensor, and of all files together: half of what fits an int64, so that rounding cannot exceed it."""

_MANY_EXTENTS = 64
"""Extents of one file from which on an array of them is looked at as one."""
_FOLDER = re.compile(r"\A(?:/(?!(?:.*/)?\.\.(?:/|\Z))|[a-z][a-z0-9+.-]*://).{0,4096}\Z", re.DOTALL)
"""An absolute path or a URL."""
_CONTAINERS = (dict, list, tuple)
"""The types of containers that msgpack decodes to and encodes."""
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})
UNSAFE_NAME = re.compile(r"\A\Z|[\\:\x00]|\A/|/\Z|//|(?:\A|/)\.\.?(?:/|\Z)")


def bad_manifest(what: str) -> CheckpointCorruptError:
    """Returns the error for a manifest that cannot be right."""
    return CheckpointCorruptError(
        f"the manifest is damaged: {what}; nothing was loaded: take another step, or another copy of this checkpoint",
        kind="bad_manifest",
    )


def refuse_more_than(limit: int, count: int, what: str) -> None:
    """Raises UnsafeCheckpointError (limits_exceeded) if there are more than `limit` of something."""
    if count > limit:
        raise UnsafeCheckpointError(
            f"the manifest has {count} {what}, more than the {limit} that are accepted; nothing was loaded or "
            "committed: if the checkpoint is meant to be so large, divide the state over several checkpoints",
            kind="limits_exceeded",
        )


def refuse_deep_nesting(value: object, what: str) -> None:
    """Raises UnsafeCheckpointError (limits_exceeded) if containers are nested more than MAX_DEPTH deep."""
    if is_too_deep(value):
        refuse_more_than(MAX_DEPTH, MAX_DEPTH + 1, f"levels of nesting in its {what}")


def is_too_deep(value: object) -> bool:
    """Returns True if containers are nested more than MAX_DEPTH deep."""
    if type(value) is dict and _LEAVES.issuperset(map(type, value.values())):  # as most metadata is
        return False
    # There may be millions of items: a check for exact classes takes a tenth of one for `Mapping`.
    layer: list[Any] = [dict(value) if isinstance(value, Mapping) else value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in layer if isinstance(item, _CONTAINERS)]
        layer = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
        if not layer:
            return False
    return any(isinstance(item, _CONTAINERS) for item in layer)


def check_save_id(save_id: str) -> None:
    """Raises UnsafeCheckpointError (path_escape) if a save id cannot be a part of a file name."""
    if "/" in save_id or UNSAFE_NAME.search(save_id):
        raise _path_escape(
            f"the save id {shown(save_id)}: as a part of file names, it has no '/', ':', backslash or NUL, and is not "
            "empty, '.' or '..'"
        )


def check_link(folder: str) -> None:
    """Raises UnsafeCheckpointError (path_escape) unless a link is a URL, or an absolute path without `..`."""
    if "\0" in folder or not _FOLDER.match(folder):
        raise _path_escape(
            f"a link to another folder, {shown(folder)}: a link leads to a URL, or to an absolute path without '..' or "
            "NUL, of at most 4096 characters"
        )


def check_files(files: Sequence[DataFile]) -> None:
    """Checks names, lengths, extents and samples. Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError
    (path_escape).
    """
    for file in files:
        _check_file(file)
    if len({file.name for file in files}) != len(files):
        raise bad_manifest("it lists a file twice")
    if sum(file.byte_length for file in files) > MAX_BYTES:
        raise bad_manifest(f"its files have more than {MAX_BYTES} bytes together")


def _check_file(file: DataFile) -> None:
    if UNSAFE_NAME.search(file.name):
        raise _path_escape(
            f"a data file {shown(file.name)}: names must be relative, with forward slashes, without empty parts, '.', "
            "'..', ':', backslash or NUL, so that they stay inside the checkpoint's folder"
        )
    if not 0 <= file.byte_length <= MAX_BYTES:
        raise bad_manifest(f"file {shown(file.name)} is said to have {file.byte_length} bytes")
    lengths = file.extent_lengths
    if len(lengths) != len(file.extent_digests):
        raise bad_manifest(f"file {shown(file.name)} has {len(lengths)} extents, {len(file.extent_digests)} checksums")
    if isinstance(lengths, array) and len(lengths) > _MANY_EXTENTS:
        numbers = np.frombuffer(lengths, np.uint64)
        # A float cannot wrap around.
        if numbers.all() and numbers.sum(dtype=np.float64) < 2 * MAX_BYTES and int(numbers.sum()) == file.byte_length:
            lengths = ()
    if lengths and (min(lengths) <= 0 or sum(lengths) != file.byte_length):
        raise bad_manifest(
            f"the extents of file {shown(file.name)} have {sum(lengths)} bytes, the shortest {min(lengths)}; "
            f"the file has {file.byte_length}"
        )
    for byte_offset, byte_length, _ in file.samples:
        if not 0 < byte_length <= MAX_SAMPLE_BYTES or byte_offset + byte_length > file.byte_length:
            what = f"a sample of {byte_length} bytes at byte {byte_offset}, and the file has {file.byte_length}"
            raise bad_manifest(f"file {shown(file.name)} has {what}")


def _path_escape(what: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"the manifest has {what}; no file was opened: do not trust this checkpoint", kind="path_escape"
    )


def itemsizes_of(columns: Columns, fqns: Sequence[str]) -> Int64s:
    """Returns the item size of each tensor. Raises CheckpointCorruptError (bad_manifest) for an unknown dtype."""
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
    """Returns the number of elements of each tensor. Raises CheckpointCorruptError (bad_manifest) for a shape that is
    too large.
    """
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


def check_tensors(columns: Columns, fqns: Sequence[str]) -> None:
    """Checks dtypes, shapes, codec numbers and grids, but not where chunks lie. Raises CheckpointCorruptError
    (bad_manifest).
    """
    numels = numels_of(columns, itemsizes_of(columns, fqns), fqns)
    if columns.codecs.max(initial=0) >= max(1, len(columns.codec_names)):
        raise bad_manifest(f"it has {len(columns.codec_names)} codecs and a chunk of codec {columns.codecs.max()}")
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
    """Returns the start of each run when runs of these lengths follow one another."""
    return np.cumsum(counts) - counts


def reduce_runs(function: np.ufunc, values: NDArray[Any], counts: Int64s, *, empty: int) -> NDArray[Any]:
    """Returns what `function` reduces each run of `values` to; `empty` for a run without values. `counts` has the
    lengths of the runs.
    """
    results = np.full(len(counts), empty, dtype=values.dtype)
    filled = counts > 0
    if filled.any():
        results[filled] = function.reduceat(values, run_starts(counts)[filled])
    return results


def first_true(mask: NDArray[np.bool_]) -> int:
    return int(np.argmax(mask))


def shown(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:200] + "...")
