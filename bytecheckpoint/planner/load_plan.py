"""Plans a load: checks that stored chunks cover the regions that are wanted, and turns them into fetches. Touches no
file and no tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter, itemgetter, ne
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest import Chunk, DataFile, Manifest
from bytecheckpoint.manifest.frames import CODECS, unknown_codec
from bytecheckpoint.manifest.ranges import BoxPart, Fetch, FlatPart, FlatParts, Frame, Part
from bytecheckpoint.manifest.table import RowChunks
from bytecheckpoint.planner.coalesce import ExtentIndex, coalesce
from bytecheckpoint.planner.frame_ranges import frame_parts, frames_of
from bytecheckpoint.planner.shard_owners import first_lines
from bytecheckpoint.region import (
    Region,
    describe,
    find_hole,
    flat_span,
    intersect,
    is_contiguous_in,
    split_at_gaps,
    split_rows,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LENGTHS = attrgetter("lengths")
_SHAPE = itemgetter(1)


class Want(NamedTuple):
    """A region of a stored tensor, to be put into some memory."""

    fqn: str
    """The stored FQN; aliases are resolved."""
    region: Region
    """In global coordinates."""
    is_flat: bool
    """True if the memory can take raw bytes: row-major without gaps, of the stored dtype."""


class _PackedChunk(NamedTuple):
    """The wanted parts of a compressed chunk."""

    chunk: Chunk
    item_bytes: int
    parts: dict[int, list[Part]]
    """Parts by number of the frame."""


class _FileParts(NamedTuple):
    """The wanted parts of a data file."""

    rows: FlatParts
    """Parts of wants that are whole rows of tensors cut between rows."""
    parts: list[Part]
    packed: dict[int, _PackedChunk]
    """Compressed chunks by byte offset."""

    @classmethod
    def of(cls, rows: np.ndarray) -> _FileParts:
        """Returns the parts of a file of which so far only `rows` are known: one per part, with a FlatPart's fields."""
        return cls(FlatParts(rows), [], {})

    @property
    def flat_and_others(self) -> Sequence[Part]:
        return [*self.rows, *self.parts] if self.parts else self.rows


class _UsedChunks(NamedTuple):
    """Chunks that wants need, none twice, as columns."""

    wants: np.ndarray
    """Number of a want that needs the chunk."""
    files: np.ndarray
    byte_offsets: np.ndarray
    byte_lengths: np.ndarray


class Wants:
    """Wants as columns: there may be 100,000."""

    def __init__(self, fqns: Sequence[str], regions: Sequence[Region], are_flat: Sequence[bool]) -> None:
        self.fqns = fqns
        self.regions = regions
        self.are_flat = are_flat

    @classmethod
    def of(cls, wants: Sequence[Want] | Wants) -> Wants:
        if isinstance(wants, Wants):
            return wants
        fqns, regions, are_flat = zip(*wants, strict=True) if wants else ((), (), ())
        return cls(fqns, regions, are_flat)

    def __len__(self) -> int:
        return len(self.fqns)

    def __getitem__(self, index: int) -> Want:
        return Want(self.fqns[index], self.regions[index], self.are_flat[index])


class _Cutting(NamedTuple):
    """Sizes by which a strided region is cut."""

    item_bytes: int
    max_gap_bytes: int
    """Longest gap between rows that are read as one."""
    max_fetch_bytes: int


def plan_load(
    manifest: Manifest, wants: Sequence[Want] | Wants, *, verify: bool, max_gap_bytes: int, max_fetch_bytes: int
) -> list[Fetch]:
    """Returns the fetches that fill all wants, file by file. Zeros that lie in no file get no fetch: see `zeros_in`.

    Raises one CheckpointMismatchError (coverage) if chunks overlap or leave a part of a want uncovered, and
    CheckpointCorruptError: unsupported_version if a chunk has an unknown codec, bad_manifest if chunks share bytes.
    """
    wants = Wants.of(wants)
    is_of_rows, of_files, used_rows = _plan_rows(manifest, wants)
    others = np.flatnonzero(~is_of_rows).tolist()
    uncovered = _find_overlaps(manifest, [wants[index] for index in others])
    used: list[tuple[str, Chunk]] = []
    for index in others:
        want = wants[index]
        item_bytes = itemsize(manifest.describe(want.fqn)[0])
        num_wanted, num_covered = want.region.numel, 0
        for chunk in manifest.table.chunks_meeting(want.fqn, want.region):
            used.append((want.fqn, chunk))
            # Mostly a load has the layout of the save: nothing has to be cut then.
            common = want.region if chunk.region == want.region else intersect(chunk.region, want.region)
            if common is None or not num_wanted:
                continue
            num_covered += common.numel
            file = manifest.files[chunk.file]
            # Reading is saved only where a gap that is left out is larger than an extent.
            mean_extent = file.byte_length // max(1, len(file.extent_lengths)) if verify else 0
            cutting = _Cutting(item_bytes, max_gap_bytes + mean_extent, max_fetch_bytes)
            _add_chunk(of_files[chunk.file], index, want, chunk=chunk, common=common, cutting=cutting)
        if num_covered < num_wanted:
            uncovered.append(_describe_hole(want, manifest))
    if uncovered:
        raise CheckpointMismatchError(
            f"the checkpoint does not hold every element of {len(uncovered)} tensors exactly once; nothing was loaded. "
            "Take another step, or leave them out with exclude:\n" + first_lines(uncovered),
            kind="coverage",
        )
    if manifest.map_notes.zeros_file is not None:
        of_files.pop(manifest.map_notes.zeros_file, None)  # nothing has to be read
    _refuse_shared_bytes(manifest, wants, used_rows, used)
    return [
        fetch
        for file in sorted(of_files)
        for fetch in coalesce(
            file,
            of_files[file].flat_and_others,
            _frames(of_files[file].packed, manifest.files[file]),
            ExtentIndex(manifest.files[file], verify=verify),
            max_gap_bytes=max_gap_bytes,
            max_fetch_bytes=max_fetch_bytes,
        )
    ]


def zeros_in(manifest: Manifest, fqn: str, region: Region) -> list[Region]:
    """Returns the parts of a region of a tensor that are zeros and lie in no file."""
    file = manifest.map_notes.zeros_file
    chunks = manifest.table.chunks_meeting(fqn, region) if file is not None else ()
    found = (intersect(chunk.region, region) for chunk in chunks if chunk.file == file)
    return [common for common in found if common is not None]


def _plan_rows(manifest: Manifest, wants: Wants) -> tuple[NDArray[np.bool_], defaultdict[int, _FileParts], _UsedChunks]:
    """Plans the wants that are whole rows, for memory that takes raw bytes, of tensors that are cut between rows: as
    FSDP cuts them, and whole tensors. They are nearly all, and are planned together, in operations on arrays.

    Returns an array that is True for each of these wants; their parts by file, of which there are none in any other;
    and the chunks that hold them.
    """
    cut, firsts, counts = _wanted_rows(manifest, wants)
    wanted_by = np.flatnonzero(cut.is_known & (counts > 0))
    of_chunks, first_rows, last_rows = cut.of(wanted_by), firsts[wanted_by], (firsts + counts - 1)[wanted_by]
    chunks = first_rows // of_chunks.chunk_rows
    num_chunks = last_rows // of_chunks.chunk_rows - chunks + 1
    if (num_chunks > 1).any():
        manifest.table.check_many([wants.fqns[number] for number in wanted_by.tolist()], num_chunks)
        # From here on there is an entry for each chunk of each of these wants.
        each = np.repeat(np.arange(len(wanted_by)), num_chunks)
        chunks = np.arange(len(each)) - np.repeat(np.cumsum(num_chunks) - num_chunks - chunks, num_chunks)
        wanted_by, first_rows, last_rows = wanted_by[each], first_rows[each], last_rows[each]
        of_chunks = of_chunks.of(each)
    starts = chunks * of_chunks.chunk_rows
    ends = np.minimum(starts + of_chunks.chunk_rows, of_chunks.num_rows)
    chunks, byte_lengths = of_chunks.first_chunks + chunks, (ends - starts) * of_chunks.row_bytes
    files, byte_offsets = manifest.table.places_of(chunks, byte_lengths)

    read_from, row_bytes = np.maximum(starts, first_rows), of_chunks.row_bytes
    read_bytes = (np.minimum(ends, last_rows + 1) - read_from) * row_bytes
    read_at, target_at = byte_offsets + (read_from - starts) * row_bytes, (read_from - first_rows) * row_bytes
    parts = np.column_stack([wanted_by, read_at, read_bytes, target_at])

    _, once = np.unique(chunks, return_index=True)
    used = _UsedChunks(*(column[once] for column in (wanted_by, files, byte_offsets, byte_lengths)))
    return cut.is_known, _by_file(files, parts), used


def _wanted_rows(manifest: Manifest, wants: Wants) -> tuple[RowChunks, np.ndarray, np.ndarray]:
    """Returns, for each want, how its tensor is cut, the first row, and the number of rows. `is_known` is False also
    for a want that is not whole rows of the tensor, or whose memory does not take raw bytes.
    """
    cut = manifest.table.row_chunks(wants.fqns)
    is_known, firsts, counts = cut.is_known & np.array(wants.are_flat, bool), np.zeros_like(cut.num_rows), cut.num_rows
    wanted, stored = list(map(_LENGTHS, wants.regions)), list(map(_SHAPE, manifest.describe_each(wants.fqns)))
    if wanted != stored:
        counts = counts.copy()
        for number in np.flatnonzero(is_known & np.fromiter(map(ne, wanted, stored), bool, len(wants))).tolist():
            lengths, shape, (first, *_) = wanted[number], stored[number], wants.regions[number].offsets
            # Hazard: rows behind the last are another tensor's.
            if lengths[1:] == shape[1:] and first + lengths[0] <= shape[0]:
                firsts[number], counts[number] = first, lengths[0]
            else:
                is_known[number] = False
    return cut._replace(is_known=is_known), firsts, counts


def _by_file(files: np.ndarray, parts: np.ndarray) -> defaultdict[int, _FileParts]:
    """Returns the parts, rows with the fields of a FlatPart, by the number of their file; none for any other file."""
    of_files: defaultdict[int, _FileParts] = defaultdict(
        partial(_FileParts.of, np.zeros((0, len(FlatPart._fields)), np.int64))
    )
    order = np.argsort(files, kind="stable")
    numbers, firsts = np.unique(files[order], return_index=True)
    of_files.update(zip(numbers.tolist(), map(_FileParts.of, np.split(parts[order], firsts)[1:]), strict=True))
    return of_files


def _add_chunk(
    of_file: _FileParts, number: int, want: Want, *, chunk: Chunk, common: Region, cutting: _Cutting
) -> None:
    """Adds the region `common` of a chunk, which the want of this number needs, to the parts of its file. Raises
    CheckpointCorruptError (unsupported_version) if the chunk has an unknown codec.
    """
    if chunk.codec != "none":
        if chunk.codec not in CODECS:
            raise unknown_codec(chunk.codec, want.fqn)
        packed = of_file.packed.setdefault(chunk.byte_offset, _PackedChunk(chunk, cutting.item_bytes, {}))
        flat_target = want.region if want.is_flat else None
        for frame, part in frame_parts(number, chunk, common, flat_target=flat_target, item_bytes=cutting.item_bytes):
            packed.parts.setdefault(frame, []).append(part)
    elif want.is_flat and common == want.region == chunk.region:
        of_file.parts.append(FlatPart(number, chunk.byte_offset, chunk.byte_length, 0))
    else:
        of_file.parts.extend(_parts(number, want, chunk, common, cutting))


def _refuse_shared_bytes(
    manifest: Manifest, wants: Wants, of_rows: _UsedChunks, used: Sequence[tuple[str, Chunk]]
) -> None:
    """Raises CheckpointCorruptError (bad_manifest) if two of the wanted chunks share a byte. A chunk may be in
    both `of_rows` and `used`.
    """
    others: list[tuple[str, *tuple[int, ...]]] = []
    known: set[tuple[str, *tuple[int, ...]]] = set()
    if used:
        fqns = [wants.fqns[number] for number in of_rows.wants.tolist()]
        known.update(zip(fqns, *(column.tolist() for column in of_rows[1:]), strict=True))
    for fqn, _, place in dict.fromkeys((fqn, chunk.region, chunk[1:4]) for fqn, chunk in used):
        if (fqn, *place) in known:
            known.remove((fqn, *place))  # once: two chunks of a tensor may claim one place
        else:
            others.append((fqn, *place))
    rows = np.array([place[1:] for place in others], np.int64).reshape(-1, 3)
    files, starts, lengths = (np.concatenate(columns) for columns in zip(of_rows[1:], rows.T, strict=True))

    def fqn_of(index: int) -> str:
        num_rows = len(of_rows.wants)
        return wants.fqns[of_rows.wants[index]] if index < num_rows else others[index - num_rows][0]

    manifest.table.refuse_shared_bytes(fqn_of, files, starts, lengths)


def _find_overlaps(manifest: Manifest, wants: Sequence[Want]) -> list[str]:
    """Returns a line for each wanted tensor of which two chunks overlap: it is unknown which of them is right."""
    faults = {fqn: manifest.table.find_fault(fqn) for fqn in dict.fromkeys(want.fqn for want in wants)}
    overlaps = {fqn: fault.overlap if fault else None for fqn, fault in faults.items()}
    return [
        f"{fqn}{list(manifest.describe(fqn)[1])}: two chunks hold {describe(overlap)}"
        for fqn, overlap in overlaps.items()
        if overlap is not None
    ]


def _describe_hole(want: Want, manifest: Manifest) -> str:
    hole = find_hole(want.region, [chunk.region for chunk in manifest.table.chunks_meeting(want.fqn, want.region)])
    return f"{want.fqn}: {describe(hole) if hole else 'a part'} of {describe(want.region)} lies in no chunk"


def _frames(packed: Mapping[int, _PackedChunk], file: DataFile) -> list[Frame]:
    bounds = [0, *accumulate(file.extent_lengths)] if packed else []
    return [
        frame
        for chunk, item_bytes, parts in packed.values()
        for frame in frames_of(chunk, parts, bounds, item_bytes=item_bytes)
    ]


def _parts(index: int, want: Want, chunk: Chunk, common: Region, cutting: _Cutting) -> Iterator[Part]:
    """Yields the wanted part of one chunk without gaps that are better left out: flat parts of any length, and boxes
    that a fetch can hold.
    """
    item_bytes = cutting.item_bytes
    for region in split_at_gaps(common, chunk.region, cutting.max_gap_bytes // item_bytes):
        first, last = flat_span(region, chunk.region)
        start, num_bytes = chunk.byte_offset + first * item_bytes, (last - first) * item_bytes
        if want.is_flat and is_contiguous_in(region, chunk.region) and is_contiguous_in(region, want.region):
            target, _ = flat_span(region, want.region)
            yield FlatPart(index, start, num_bytes, target * item_bytes)
        elif num_bytes <= cutting.max_fetch_bytes:
            yield BoxPart(index, start, num_bytes, region, chunk)
        else:
            # Gaps count too: of a strided region fewer elements fit into a fetch.
            max_numel = max(1, region.numel * cutting.max_fetch_bytes // num_bytes)
            yield from (_box(index, chunk, part, item_bytes) for part in split_rows(region, max_numel))


def _box(index: int, chunk: Chunk, region: Region, item_bytes: int) -> BoxPart:
    first, last = flat_span(region, chunk.region)
    return BoxPart(index, chunk.byte_offset + first * item_bytes, (last - first) * item_bytes, region, chunk)


def box_layout(part: BoxPart) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns lengths and strides, in elements, of a part's region in the bytes that were read for it."""
    strides, stride = [], 1
    for length in reversed(part.chunk.region.lengths):
        strides.append(stride)
        stride *= length
    return part.region.lengths, tuple(reversed(strides))


def wanted_files(fetches: Sequence[Fetch]) -> Mapping[int, int]:
    """Returns how many bytes are read of each file that is read at all, by its number in the manifest."""
    sizes: dict[int, int] = {}
    for fetch in fetches:
        sizes[fetch.file] = sizes.get(fetch.file, 0) + fetch.byte_length
    return sizes
