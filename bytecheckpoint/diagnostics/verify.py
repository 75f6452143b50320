"""Verification of a committed checkpoint: its manifest, its data files, the checksum of every byte, the chunks of every
tensor. Damage is collected, not raised. Reads bytes, makes no tensor and knows no torch.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.links import take_sample
from bytecheckpoint.loading.replacement import refuse_replaced
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, Sample
from bytecheckpoint.region import describe
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.checksum_scan import (
    ScanFault,
    ScanRange,
    find_files,
    ranges_of,
    sample_extents,
    scan,
    size_faults,
)
from bytecheckpoint.storage.layout import DATA_FOLDER
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.safetensors_header import (
    StoredEntry,
    chunk_entry,
    decode_header,
    encode_header,
    read_header,
)
from bytecheckpoint.storage.store import Store

_LOCAL_FAULTS = frozenset({"checksum", "bad_manifest"})
"""Kinds of faults that leave the rest of a file compared. After a fault of another kind the rest was not read, or a
load refuses the file for its length.
"""


class Damage(NamedTuple):
    """A part of a checkpoint that is not as it was written."""

    kind: str
    """Kind of the error that a load would raise for it. A header that contradicts the manifest is of the kind
    bad_manifest, though a load reads no header.
    """
    file: str | None
    """Name inside the checkpoint's folder; None if the manifest contradicts itself."""
    byte_offset: int
    byte_length: int
    tensors: Sequence[str]
    """FQNs of tensors with bytes there, or in an extent that reaches into it, in file order."""
    what: str
    """What was found and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of checking a checkpoint."""

    damage: Sequence[Damage]
    """Damage of no file first, then in the order of the manifest's files and by byte offset."""
    num_bytes_checked: int
    """Bytes compared with a checksum."""
    unchecked_files: Sequence[str]
    """Data files that are there, but without checksums in the manifest: only their size was checked, and samples of
    linked files.
    """
    num_hit: int
    """Tensors that the damage names; a tied one counts once."""
    num_sound: int | None
    """Tensors that a load reads as they were written: every byte was compared. None if only a sample was."""


def verify_checkpoint(
    store: Store,
    folder: str,
    manifest: Manifest,
    *,
    threads: int,
    sample_percent: float,
    rng: random.Random,
    on_progress: Callable[[int], None],
) -> Verification:
    """Checks the files of a checkpoint, and that chunks tile its tensors. Reading the manifest has validated the rest.

    Args:
        threads: Reads in flight; each takes READ_BYTES of memory.
        sample_percent: How much of each file to read, in random extents; 100 for every byte.
        rng: Chooses the extents.
        on_progress: Gets the number of bytes that were read since it was last called, one call at a time.

    Raises StorageError if the store cannot be listed, CheckpointNotFoundError (replaced) if files are missing because
    the checkpoint was replaced or deleted meanwhile. Any other failure to read a file is damage.
    """
    files = manifest.files
    sizes = find_files(store, folder, files)
    faults = size_faults(files, sizes)
    num_bytes_checked = 0

    def on_done(piece: ScanRange, found: Sequence[ScanFault]) -> None:
        nonlocal num_bytes_checked
        faults.extend(found)
        is_compared = all(fault.kind == "checksum" for fault in found)  # else it could not be read
        num_bytes_checked += piece.byte_length if is_compared else 0
        on_progress(piece.byte_length)

    pieces = (
        piece
        for index, (file, size) in enumerate(zip(files, sizes, strict=True))
        for piece in ranges_of(index, file, end=size or 0, chosen=sample_extents(file, sample_percent, rng))
    )
    names = [join_name(folder, file.name) for file in files]
    scan(store, names, pieces, threads=threads, on_done=on_done)
    contents = _FileContents(manifest)
    skipped = _with_known_header_faults(files, sizes, faults)
    faults += _sample_faults(store, names, files, sizes, threads=threads)
    faults += _header_faults(store, names, manifest, contents, skipped=skipped, threads=threads)
    if any(fault.kind == "missing_file" for fault in faults):
        refuse_replaced(store, folder, manifest, cause=None)
    ordered = sorted(faults, key=lambda fault: (fault.file, fault.byte_offset))
    damage = [*_tiling_damage(manifest), *(contents.describe(fault) for fault in ordered)]
    unchecked = [
        index
        for index, (file, size) in enumerate(zip(files, sizes, strict=True))
        if size is not None and file.byte_length and not file.extent_lengths
    ]
    hit = {fqn for item in damage for fqn in item.tensors}
    doubtful = {*unchecked, *(fault.file for fault in faults if fault.kind not in _LOCAL_FAULTS)}
    return Verification(
        damage=damage,
        num_bytes_checked=num_bytes_checked,
        unchecked_files=[files[index].name for index in unchecked],
        num_hit=len(hit),
        num_sound=_count_sound(manifest, hit, doubtful) if sample_percent >= 100 else None,
    )


def _count_sound(manifest: Manifest, hit: AbstractSet[str], doubtful_files: AbstractSet[int]) -> int:
    """Counts the tensors that no damage names and that have no byte in a doubtful file."""
    if not doubtful_files:
        return len(manifest.tensors) - len(hit)
    others = (fqn for fqn in manifest.tensors if fqn not in hit)
    return sum(doubtful_files.isdisjoint(manifest.tensors[fqn].files) for fqn in others)


def _sample_faults(
    store: Store, names: Sequence[str], files: Sequence[DataFile], sizes: Sequence[int | None], *, threads: int
) -> list[ScanFault]:
    """Returns a fault for each sample of a linked file that has changed since the link was made, or cannot be read.
    Skips files that are missing or of another size, which have a fault already, and samples of a file that proved
    unreadable.
    """
    unreadable: set[int] = set()

    def compare(job: tuple[int, Sample]) -> ScanFault | None:
        number, (byte_offset, byte_length, digest) = job
        if number in unreadable:
            return None
        try:
            found = take_sample(store, names[number], byte_offset, byte_length).digest
        except CheckpointError as error:
            unreadable.add(number)
            return ScanFault(error.kind, number, byte_offset, byte_length, error.message)
        what = f"checksum {digest:016x} when the link was made, {found:016x} now"
        return None if found == digest else ScanFault("checksum", number, byte_offset, byte_length, what)

    jobs = [
        (number, sample)
        for number, (file, size) in enumerate(zip(files, sizes, strict=True))
        if size == file.byte_length
        for sample in file.samples
    ]
    return [fault for fault in map_jobs(compare, jobs, num_threads=threads) if fault is not None]


def bytes_to_read(manifest: Manifest, sample_percent: float) -> int:
    """Estimates how many bytes `verify_checkpoint` reads."""
    num_bytes = sum(file.byte_length for file in manifest.files if file.extent_lengths)
    return round(num_bytes * min(sample_percent, 100) / 100)


class _FileContents:
    """The chunks of tensors in each file. Collected once, at first use."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._by_file: dict[int, list[tuple[int, str, Chunk]]] = {}

    def of_file(self, index: int) -> list[tuple[int, str, Chunk]]:
        """Returns byte offset, FQN and chunk of everything in a file, in file order."""
        if not self._by_file:
            self._by_file = {number: [] for number in range(len(self._manifest.files))}
            for fqn, record in self._manifest.tensors.items():
                for chunk in record.chunks:
                    self._by_file[chunk.file].append((chunk.byte_offset, fqn, chunk))
            for items in self._by_file.values():
                items.sort(key=lambda item: (item[0], item[2].byte_length, item[1]))
        return self._by_file[index]

    def describe(self, fault: ScanFault) -> Damage:
        """Returns the fault as damage, with the tensors that it hits."""
        items = self.of_file(fault.file)
        start, end = self._first_unread_byte(fault), fault.byte_offset + fault.byte_length
        # Chunks do not overlap, so all before the chunk that reaches into the range end before it. Chunks of other
        # formats may overlap.
        first = max(bisect_right(items, start, key=lambda item: item[0]) - 1, 0)
        first = 0 if self._manifest.foreign_format else first
        last = bisect_left(items, end, key=lambda item: item[0])
        tensors = [fqn for at, fqn, chunk in items[first:last] if chunk.byte_length and at + chunk.byte_length > start]
        name = self._manifest.files[fault.file].name
        unique = list(dict.fromkeys(tensors))
        return Damage(fault.kind, name, fault.byte_offset, fault.byte_length, unique, fault.what)

    def _first_unread_byte(self, fault: ScanFault) -> int:
        """Returns the offset of the fault. If the file is cut off inside an extent, returns the start of this extent,
        because its checksum covers bytes that are gone.
        """
        position = 0
        for length in self._manifest.files[fault.file].extent_lengths if fault.kind == "truncated" else ():
            if position + length > fault.byte_offset:
                return position
            position += length
        return fault.byte_offset


def _with_known_header_faults(
    files: Sequence[DataFile], sizes: Sequence[int | None], faults: Iterable[ScanFault]
) -> set[int]:
    """Returns the indices of the files that are missing, or of whose header, in the first extent, a fault is known."""
    first_extents = {index: file.extent_lengths[0] for index, file in enumerate(files) if file.extent_lengths}
    missing = {index for index, size in enumerate(sizes) if size is None}
    return missing | {fault.file for fault in faults if fault.byte_offset < first_extents.get(fault.file, 1)}


def _header_faults(
    store: Store,
    names: Sequence[str],
    manifest: Manifest,
    contents: _FileContents,
    *,
    skipped: set[int],
    threads: int,
) -> Iterator[ScanFault]:
    """Yields faults for data files whose header cannot be read, or contradicts the manifest, which would mislead other
    readers of safetensors. Only files of this save are read: a manifest may point into other formats as well. Those in
    `skipped` have a fault in their header already.
    """
    own = f"{DATA_FOLDER}/{manifest.save_id}-"
    wanted = [index for index, file in enumerate(manifest.files) if index not in skipped and file.name.startswith(own)]

    def check_header(index: int) -> ScanFault | None:
        try:
            header = read_header(store, names[index])
        except CheckpointError as error:
            return ScanFault(error.kind, index, 0, 8, error.message)
        what = _compare(manifest, contents.of_file(index), header.metadata, header.entries)
        return ScanFault("bad_manifest", index, 0, header.data_offset, what) if what else None

    if wanted:
        contents.of_file(wanted[0])  # collects the chunks of all files, once
    # On several threads, because most of the time of a remote store is latency.
    yield from filter(None, map_jobs(check_header, wanted, num_threads=threads))


def _compare(
    manifest: Manifest,
    items: Sequence[tuple[int, str, Chunk]],
    metadata: Mapping[str, str],
    found: Sequence[StoredEntry],
) -> str | None:
    """Returns the difference between a header, with the entries `found`, and the one that the writer makes for `items`,
    which are those of `_FileContents.of_file`; None if they are equal.
    """
    expected = []
    for _, fqn, chunk in items:
        dtype, shape = manifest.describe(fqn)
        byte_length, codec = chunk.byte_length, chunk.codec
        expected.append(chunk_entry(fqn, dtype, shape, region=chunk.region, byte_length=byte_length, codec=codec))
    rewritten = decode_header(encode_header(expected, metadata)).entries
    placed = {
        entry.name: (entry.dtype, entry.shape, offset, entry.byte_length)
        for entry, (offset, _, _) in zip(rewritten, items, strict=True)
    }
    listed = {entry.name: (entry.dtype, entry.shape, entry.byte_offset, entry.byte_length) for entry in found}
    differing = [name for name in {**placed, **listed} if placed.get(name) != listed.get(name)]
    if not differing:
        return None
    name = differing[0]
    return (
        f"the file's header and the manifest differ about {len(differing)} chunks, the first {name!r:.200}: "
        f"header {listed.get(name)}, manifest {placed.get(name)} (dtype, shape, first byte, bytes)"
    )


def _tiling_damage(manifest: Manifest) -> Iterator[Damage]:
    """Yields damage for each tensor whose chunks leave a hole or overlap."""
    for fqn in manifest.tensors:
        hole, overlap = manifest.table.find_fault(fqn) or (None, None)
        if (region := hole or overlap) is not None:
            state = "no chunk holds" if hole else "two chunks hold"
            what = f"{state} {fqn}{describe(region)} of shape {list(manifest.describe(fqn)[1])}"
            yield Damage("coverage", None, 0, 0, [fqn], what)
