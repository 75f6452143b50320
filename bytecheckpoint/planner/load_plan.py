"""Who reads what. The planner takes the manifest and the regions that are wanted, checks that stored chunks cover
them, and turns them into reads; it touches no file and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest import Chunk, Manifest
from bytecheckpoint.planner.coalesce import BoxPart, ExtentIndex, Fetch, FlatPart, Part, coalesce
from bytecheckpoint.planner.save_plan import describe, first_lines
from bytecheckpoint.region import (
    Region,
    find_hole,
    find_tiling_fault,
    flat_span,
    intersect,
    is_contiguous_in,
    split_rows,
)


class Want(NamedTuple):
    """A region of a stored tensor that is wanted in some memory."""

    fqn: str
    """As it is stored; aliases are resolved."""
    region: Region
    """Global coordinates."""
    is_flat: bool
    """The memory can take raw bytes: on the host, row-major without gaps, of the stored dtype."""


def plan_load(
    manifest: Manifest, wants: Sequence[Want], *, verify: bool, max_gap_bytes: int, max_fetch_bytes: int
) -> list[Fetch]:
    """The reads that fill all wants, in file order.

    Raises CheckpointMismatchError (coverage) where chunks overlap or leave a part of a want uncovered; one error is
    about all.
    """
    parts_by_file: dict[int, list[Part]] = {}
    uncovered: list[str] = []
    chunks_by_fqn: dict[str, list[Chunk]] = {}
    for index, want in enumerate(wants):
        record = manifest.tensors[want.fqn]
        if want.fqn not in chunks_by_fqn:
            chunks_by_fqn[want.fqn] = record.chunks
            uncovered += _check_stored(want.fqn, record.shape, record.chunks)
        num_covered = 0
        for chunk in chunks_by_fqn[want.fqn]:
            # Mostly a load has the layout of the save: nothing has to be cut then.
            common = chunk.region if chunk.region == want.region else intersect(chunk.region, want.region)
            if common is None or not common.numel:
                continue
            num_covered += common.numel
            parts = _parts(
                index, want, chunk, common, item_bytes=itemsize(record.dtype), max_fetch_bytes=max_fetch_bytes
            )
            parts_by_file.setdefault(chunk.file, []).extend(parts)
        if num_covered < want.region.numel:
            uncovered.append(_describe_hole(want, chunks_by_fqn[want.fqn]))
    if uncovered:
        raise CheckpointMismatchError(
            f"the checkpoint does not hold every element of {len(uncovered)} tensors exactly once; nothing was loaded. "
            "Take another step, or leave them out with exclude:\n" + first_lines(uncovered),
            kind="coverage",
        )
    return [
        fetch
        for file in sorted(parts_by_file)
        for fetch in coalesce(
            file,
            parts_by_file[file],
            ExtentIndex(manifest.files[file], verify=verify),
            max_gap_bytes=max_gap_bytes,
            max_fetch_bytes=max_fetch_bytes,
        )
    ]


def _check_stored(fqn: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> list[str]:
    """An overlap between chunks of a tensor, of which nobody could say which one is right."""
    if len(chunks) == 1:
        return []
    fault = find_tiling_fault(shape, [chunk.region for chunk in chunks])
    if fault is None or fault.overlap is None:
        return []
    return [f"{fqn}{list(shape)}: two chunks hold {describe(fault.overlap)}"]


def _describe_hole(want: Want, chunks: Sequence[Chunk]) -> str:
    hole = find_hole(want.region, [chunk.region for chunk in chunks])
    return f"{want.fqn}: {describe(hole) if hole else 'a part'} of {describe(want.region)} lies in no chunk"


def _parts(
    index: int, want: Want, chunk: Chunk, common: Region, *, item_bytes: int, max_fetch_bytes: int
) -> list[Part]:
    """The wanted part of one chunk, in pieces that a fetch can hold."""
    if want.is_flat and common == chunk.region == want.region:
        return [FlatPart(index, chunk.byte_offset, chunk.byte_length, 0)]
    first, last = flat_span(common, chunk.region)
    start, num_bytes = chunk.byte_offset + first * item_bytes, (last - first) * item_bytes
    if want.is_flat and is_contiguous_in(common, chunk.region) and is_contiguous_in(common, want.region):
        target, _ = flat_span(common, want.region)
        return [FlatPart(index, start, num_bytes, target * item_bytes)]
    if num_bytes <= max_fetch_bytes:
        return [BoxPart(index, start, num_bytes, common, chunk)]
    # Gaps count too: of a strided region fewer elements fit into a fetch.
    max_numel = max(1, common.numel * max_fetch_bytes // num_bytes)
    return [_box(index, chunk, part, item_bytes) for part in split_rows(common, max_numel)]


def _box(index: int, chunk: Chunk, region: Region, item_bytes: int) -> BoxPart:
    first, last = flat_span(region, chunk.region)
    return BoxPart(index, chunk.byte_offset + first * item_bytes, (last - first) * item_bytes, region, chunk)


def box_layout(part: BoxPart) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and strides, in elements, of a part's region in the bytes that were read for it."""
    strides, stride = [], 1
    for length in reversed(part.chunk.region.lengths):
        strides.append(stride)
        stride *= length
    return part.region.lengths, tuple(reversed(strides))


def wanted_files(fetches: Sequence[Fetch]) -> Mapping[int, int]:
    """How many bytes of each file are read."""
    sizes: dict[int, int] = {}
    for fetch in fetches:
        sizes[fetch.file] = sizes.get(fetch.file, 0) + fetch.byte_length
    return sizes
