"""Who reads what. The planner takes the manifest and the regions that are wanted, checks that stored chunks cover
them, and turns them into reads; it touches no file and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.frames import CODECS, unknown_codec
from bytecheckpoint.manifest import Chunk, DataFile, Manifest
from bytecheckpoint.planner.coalesce import BoxPart, ExtentIndex, Fetch, FlatPart, Frame, Part, coalesce
from bytecheckpoint.planner.frame_parts import frame_parts, frames_of
from bytecheckpoint.planner.holders import first_lines
from bytecheckpoint.region import (
    Region,
    describe,
    find_hole,
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


class _Packed(NamedTuple):
    """What is wanted of a compressed chunk."""

    chunk: Chunk
    item_bytes: int
    parts: dict[int, list[Part]]
    """By number of the frame."""


class _OfFile(NamedTuple):
    """What is wanted of a data file."""

    parts: list[Part]
    packed: dict[int, _Packed]
    """By byte offset of the chunk."""


def plan_load(
    manifest: Manifest, wants: Sequence[Want], *, verify: bool, max_gap_bytes: int, max_fetch_bytes: int
) -> list[Fetch]:
    """The reads that fill all wants, in file order.

    Raises CheckpointMismatchError (coverage) where chunks overlap or leave a part of a want uncovered; one error is
    about all. Raises CheckpointCorruptError (unsupported_version) where a chunk has a codec that is not known.
    """
    of_files: dict[int, _OfFile] = {}
    uncovered: list[str] = []
    uncovered += _find_overlaps(manifest, wants)
    used: list[tuple[str, Chunk]] = []
    for index, want in enumerate(wants):
        dtype, _ = manifest.describe(want.fqn)
        num_covered = 0
        for chunk in manifest.chunks_meeting(want.fqn, want.region):
            used.append((want.fqn, chunk))
            # Mostly a load has the layout of the save: nothing has to be cut then.
            common = chunk.region if chunk.region == want.region else intersect(chunk.region, want.region)
            if common is None or not common.numel:
                continue
            num_covered += common.numel
            of_file = of_files.setdefault(chunk.file, _OfFile([], {}))
            item_bytes = itemsize(dtype)
            if chunk.codec == "none":
                of_file.parts.extend(
                    _parts(index, want, chunk, common, item_bytes=item_bytes, max_fetch_bytes=max_fetch_bytes)
                )
            else:
                packed = of_file.packed.setdefault(chunk.byte_offset, _Packed(chunk, item_bytes, {}))
                _add_frames(packed, index, want, common)
        if num_covered < want.region.numel:
            uncovered.append(_describe_hole(want, manifest))
    if uncovered:
        raise _not_covered(uncovered)
    manifest.refuse_shared_bytes(used)
    return [
        fetch
        for file in sorted(of_files)
        for fetch in coalesce(
            file,
            of_files[file].parts,
            _frames(of_files[file].packed, manifest.files[file]),
            ExtentIndex(manifest.files[file], verify=verify),
            max_gap_bytes=max_gap_bytes,
            max_fetch_bytes=max_fetch_bytes,
        )
    ]


def _not_covered(lines: Sequence[str]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the checkpoint does not hold every element of {len(lines)} tensors exactly once; nothing was loaded. "
        "Take another step, or leave them out with exclude:\n" + first_lines(lines),
        kind="coverage",
    )


def _find_overlaps(manifest: Manifest, wants: Sequence[Want]) -> list[str]:
    """Overlaps between chunks of one tensor, of which nobody could say which one is right."""
    overlaps = {fqn: manifest.find_overlap(fqn) for fqn in dict.fromkeys(want.fqn for want in wants)}
    return [
        f"{fqn}{list(manifest.describe(fqn)[1])}: two chunks hold {describe(overlap)}"
        for fqn, overlap in overlaps.items()
        if overlap is not None
    ]


def _describe_hole(want: Want, manifest: Manifest) -> str:
    hole = find_hole(want.region, [chunk.region for chunk in manifest.chunks_meeting(want.fqn, want.region)])
    return f"{want.fqn}: {describe(hole) if hole else 'a part'} of {describe(want.region)} lies in no chunk"


def _add_frames(packed: _Packed, index: int, want: Want, common: Region) -> None:
    chunk, item_bytes, by_frame = packed
    if chunk.codec not in CODECS:
        raise unknown_codec(chunk.codec, want.fqn)
    flat_target = want.region if want.is_flat else None
    for number, part in frame_parts(index, chunk, common, flat_target=flat_target, item_bytes=item_bytes):
        by_frame.setdefault(number, []).append(part)


def _frames(packed: Mapping[int, _Packed], file: DataFile) -> list[Frame]:
    bounds = [0, *accumulate(file.extent_lengths)] if packed else []
    return [
        frame
        for chunk, item_bytes, parts in packed.values()
        for frame in frames_of(chunk, parts, bounds, item_bytes=item_bytes)
    ]


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
