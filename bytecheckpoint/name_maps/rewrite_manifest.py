"""Tensors made of regions of stored ones, in the same files: no byte is copied. Rows of a chunk lie together in its
file, so that a region of it is one chunk again, or a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError, UnsafeCheckpointError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, TensorRecord, tensor_record
from bytecheckpoint.planner.copy_plan import CopySource, WantedTensor
from bytecheckpoint.region import Region, flat_span, intersect, relative, split_at_gaps

MAX_CHUNKS = 1 << 22
_ZEROS = "@zeros"


class Relinked(NamedTuple):
    """Tensors under new names, as chunks in the files of an existing manifest."""

    records: Mapping[str, TensorRecord]
    """By name."""
    zeros: DataFile | None
    """A data file to list after those of the manifest. It does not exist: chunks in it are zeros."""


def relink(manifest: Manifest, tensors: Sequence[WantedTensor]) -> Relinked:
    """Returns these tensors as chunks in the files of the manifest.

    Raises CheckpointMismatchError (conflict) if elements are compressed together with others, or are wanted in
    another dtype; and UnsafeCheckpointError (limits_exceeded) for more than MAX_CHUNKS chunks.
    """
    found: dict[str, TensorRecord] = {}
    num_chunks = 0
    for tensor in tensors:
        chunks: list[Chunk] = []
        for piece in tensor.pieces:
            for chunk in _chunks(manifest, tensor, piece):
                chunks.append(chunk)
                num_chunks += 1
                _refuse_too_many(num_chunks)
        found[tensor.fqn] = tensor_record(tensor.dtype, tensor.shape, chunks)
    pieces = ((tensor.dtype, piece) for tensor in tensors for piece in tensor.pieces)
    num_zero_bytes = [piece.region.numel * itemsize(dtype) for dtype, piece in pieces if piece.fqn is None]
    return Relinked(found, DataFile(_ZEROS, max(num_zero_bytes)) if num_zero_bytes else None)


def refuse_zeros(manifest: Manifest) -> None:
    """Raises CheckpointMismatchError (conflict) if a part of a tensor is zeros that no file holds: a manifest that is
    written can only point into files.
    """
    zeros_file = manifest.map_notes.zeros_file
    for fqn in manifest.tensors if zeros_file is not None else ():
        for chunk in manifest.tensors[fqn].chunks:
            if chunk.file == zeros_file:
                raise _not_in_place(fqn, f"{chunk.region.lengths[0]} of its rows are zeros that no file holds")


def _chunks(manifest: Manifest, tensor: WantedTensor, piece: CopySource) -> Iterator[Chunk]:
    """Yields the parts of stored chunks that hold a piece, as chunks of the tensor."""
    if piece.fqn is None:
        yield Chunk(piece.region, len(manifest.files), 0, piece.region.numel * itemsize(tensor.dtype))
        return
    dtype, _ = manifest.describe(piece.fqn)
    if dtype != tensor.dtype:
        raise _not_in_place(tensor.fqn, f"it is stored as {dtype} and wanted as {tensor.dtype}")
    item_bytes = itemsize(dtype)
    for chunk in manifest.table.chunks_meeting(piece.fqn, piece.source_region):
        common = intersect(chunk.region, piece.source_region)
        if common is None:
            continue
        if common == chunk.region:
            yield chunk._replace(region=_moved(common, piece))
        elif chunk.codec != "none":
            raise _not_in_place(tensor.fqn, f"a part of {piece.fqn} is wanted of what is compressed together")
        else:
            yield from _cut(chunk, common, piece, item_bytes)


def _cut(chunk: Chunk, common: Region, piece: CopySource, item_bytes: int) -> Iterator[Chunk]:
    """Yields the region `common` of a chunk as chunks of the tensor, one for each run of bytes."""
    for run in split_at_gaps(common, chunk.region, 0):
        first, last = flat_span(run, chunk.region)
        at = chunk.byte_offset + first * item_bytes
        yield Chunk(_moved(run, piece), chunk.file, at, (last - first) * item_bytes)


def _moved(region: Region, piece: CopySource) -> Region:
    """Returns a region of the piece's source in the coordinates of the target.

    Raises ValueError if source and target differ in more than leading dimensions of length 1.
    """
    source, target = piece.source_region, piece.region
    num_more = len(source.lengths) - len(target.lengths)
    inside = relative(region, source)
    if num_more >= 0:
        offsets, lengths = inside.offsets[num_more:], inside.lengths[num_more:]
        are_alike = set(source.lengths[:num_more]) <= {1} and source.lengths[num_more:] == target.lengths
    else:
        offsets, lengths = (0,) * -num_more + inside.offsets, (1,) * -num_more + inside.lengths
        are_alike = (1,) * -num_more + source.lengths == target.lengths
    if not are_alike:
        raise ValueError(f"a region of lengths {source.lengths} cannot stand for one of lengths {target.lengths}")
    return Region(tuple(map(int.__add__, target.offsets, offsets)), lengths)


def _refuse_too_many(num_chunks: int) -> None:
    if num_chunks > MAX_CHUNKS:
        raise UnsafeCheckpointError(
            f"the name map cuts the checkpoint into more than {MAX_CHUNKS} chunks; nothing was loaded: convert the "
            "checkpoint with the map instead",
            kind="limits_exceeded",
        )


def _not_in_place(fqn: str, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{fqn} cannot be read in place through the name map: {why}; nothing was loaded: write the checkpoint "
        "anew with `bcp convert --map`",
        kind="conflict",
    )
