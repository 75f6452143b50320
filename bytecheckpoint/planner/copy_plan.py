"""The plan of a conversion: the tensors of the target, and the regions of stored tensors from which their elements
come. Name maps make it from a manifest, and writers of formats carry it out. No file is touched here, and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.region import (
    Region,
    describe,
    find_tiling_fault,
    flat_span,
    intersect,
    is_contiguous_in,
    rows,
    split_flat_range,
    whole,
)


class CopySource(NamedTuple):
    """A region of a target's tensor, and the stored region of its elements."""

    region: Region
    """In the coordinates of the target's tensor."""
    fqn: str | None
    """The stored tensor, aliases resolved. None where the elements are zeros that no file holds, as those that pad a
    vocabulary."""
    source_region: Region
    """In the global coordinates of the stored tensor. It has as many elements as `region`, which correspond to each
    other in row-major order, whatever the dimensions. Equal to `region` if `fqn` is None.
    """


class WantedTensor(NamedTuple):
    """A tensor of the target."""

    fqn: str
    """Its name in the target."""
    dtype: str
    """torch's name without `torch.`. Elements of another dtype are converted, as `Tensor.to` does it."""
    shape: tuple[int, ...]
    pieces: Sequence[CopySource]
    """In any order. Their regions cover every element of the shape exactly once."""


class CopyRun(NamedTuple):
    """Elements to be copied into a range of the flat tensor of the target, and the stored region to copy them from."""

    first: int
    """Start of `block`, in elements from the start of the range."""
    block: Region
    """Elements of the range that follow one another."""
    region: Region
    """The part of the block that is copied. Both are in the coordinates of the target's tensor; if its dimensions are
    not those of the source, both are equal: from 0 on, with the dimensions of the source."""
    fqn: str | None
    source_region: Region
    """As in CopySource. Its lengths are those of `region`, except for dimensions of length 1."""


def same_tensor(fqn: str, dtype: str, shape: tuple[int, ...], *, stored_fqn: str) -> WantedTensor:
    """Returns the target's tensor `fqn` as a copy of a whole stored tensor."""
    region = whole(shape)
    return WantedTensor(fqn, dtype, shape, [CopySource(region, stored_fqn, region)])


def check_wanted(wanted: Sequence[WantedTensor], manifest: Manifest) -> None:
    """Raises CheckpointMismatchError (coverage) if the checkpoint lacks the tensor or region of a piece, if the two
    regions of a piece differ in number of elements, or if the pieces of a tensor overlap, leave a hole or reach out of
    its shape.
    """
    for tensor in wanted:
        for piece in tensor.pieces:
            _check_piece(tensor, piece, manifest)
        fault = find_tiling_fault(tensor.shape, [piece.region for piece in tensor.pieces])
        if fault is not None:
            hole = fault.hole and f"there is nothing for {describe(fault.hole)}"
            why = hole or "two parts overlap, or one reaches out of it"
            raise _not_made(tensor, why)


def _check_piece(tensor: WantedTensor, piece: CopySource, manifest: Manifest) -> None:
    if piece.fqn is None:
        return
    if piece.fqn not in manifest.tensors:
        raise _not_made(tensor, f"the checkpoint has no {piece.fqn!r:.200}")
    shape = manifest.describe(piece.fqn)[1]
    source = piece.source_region
    if (
        len(source.offsets) != len(shape)
        or any(map(int.__gt__, source.ends, shape))
        or min(source.offsets, default=0) < 0
    ):
        raise _not_made(tensor, f"{describe(source)} is not in {piece.fqn!r:.200} of shape {list(shape)}")
    if source.numel != piece.region.numel:
        raise _not_made(tensor, f"{describe(source)} of {piece.fqn!r:.200} is to fill {describe(piece.region)}")


def _not_made(tensor: WantedTensor, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{tensor.fqn!r:.200} of shape {list(tensor.shape)} cannot be made of the checkpoint: {why}; nothing was "
        "written: the rules that make it are for another model",
        kind="coverage",
    )


def copies_of(wanted: WantedTensor, first: int, numel: int) -> Iterator[CopyRun]:
    """Yields the copies that make up elements `first` to `first + numel` of the row-major flat tensor."""
    position = 0
    for block in split_flat_range(wanted.shape, first, numel):
        for piece in wanted.pieces:
            common = intersect(piece.region, block)
            if common is not None:
                yield from _copies(position, block, common, piece)
        position += block.numel


def _copies(first: int, block: Region, common: Region, piece: CopySource) -> Iterator[CopyRun]:
    source = same_part(common, piece)
    if source is not None:
        yield CopyRun(first, block, common, piece.fqn, source)
    elif is_contiguous_in(common, piece.region) and is_contiguous_in(common, block):
        yield from _flat_copies(first, block, common, piece)
    else:
        dim = next(dim for dim, length in enumerate(common.lengths) if length > 1)
        for row in range(common.lengths[dim]):
            yield from _copies(first, block, rows(common, dim, row, 1), piece)


def same_part(common: Region, piece: CopySource) -> Region | None:
    """Returns the region of the stored tensor that fills `common`, a part of the piece; None if piece and source differ
    in more than dimensions of length 1. For zeros, which no tensor holds, returns `common`.
    """
    source = piece.source_region
    if piece.fqn is None:
        return common
    if [length for length in source.lengths if length != 1] != [n for n in piece.region.lengths if n != 1]:
        return None
    spans = (
        (start - offset, length)
        for start, length, offset, of_piece in zip(*common, *piece.region, strict=True)
        if of_piece != 1
    )
    offsets, lengths = list(source.offsets), list(source.lengths)
    for dim, length in enumerate(source.lengths):
        if length != 1:
            start, lengths[dim] = next(spans)
            offsets[dim] += start
    return Region(tuple(offsets), tuple(lengths))


def _flat_copies(first: int, block: Region, common: Region, piece: CopySource) -> Iterator[CopyRun]:
    """Yields copies where the dimensions differ: run by run, each a block of its own."""
    start, _ = flat_span(common, piece.region)
    at, _ = flat_span(common, block)
    origin = piece.source_region.offsets
    for part in split_flat_range(piece.source_region.lengths, start, common.numel):
        source = Region(tuple(map(int.__add__, part.offsets, origin)), part.lengths)
        run = Region((0,) * len(part.lengths), part.lengths)
        yield CopyRun(first + at, run, run, piece.fqn, source)
        at += part.numel
