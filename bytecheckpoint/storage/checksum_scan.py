"""A scan of data files: every byte read and compared with the checksum of its extent, many reads in flight, in bounded
memory. Unlike a load it does not stop at the first fault. Knows bytes and extents, and nothing of tensors.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import xxhash

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, listed_lengths

READ_BYTES = 8 << 20
"""Length of one read; a thread holds one buffer of this size."""


class ScanFault(NamedTuple):
    """A range of a file that has other bytes than were written, or could not be read."""

    kind: str
    """The kind of the error that a load would raise: missing_file, truncated, checksum, or the store's own."""
    file: int
    """Index into the scanned files."""
    byte_offset: int
    byte_length: int
    what: str
    """What was found and what was expected, or the store's message."""


class ScanRange(NamedTuple):
    """Consecutive extents of a file that are read at once."""

    file: int
    byte_offset: int
    extent_lengths: Sequence[int]
    extent_digests: Sequence[int]

    @property
    def byte_length(self) -> int:
        return sum(self.extent_lengths)


def find_files(store: Store, folder: str, files: Sequence[DataFile]) -> list[int | None]:
    """Returns the size of each file as the store lists it, in bytes; None for a missing one."""

    def list_folder(parent: str) -> Mapping[str, int | None]:
        try:
            return store.list(join_name(folder, parent))
        except CheckpointError as error:
            if error.kind == "not_found":  # a file is in the place of the folder
                return {}
            raise

    return listed_lengths([file.name for file in files], list_folder)


def size_faults(files: Sequence[DataFile], sizes: Sequence[int | None]) -> list[ScanFault]:
    """Returns faults for files that are missing, or have another size than in the manifest."""
    faults = []
    for index, (file, size) in enumerate(zip(files, sizes, strict=True)):
        if size is None:
            what = f"the file is not there; {file.byte_length} bytes expected"
            faults.append(ScanFault("missing_file", index, 0, file.byte_length, what))
        elif size != file.byte_length:
            start, end = sorted((size, file.byte_length))
            what = f"the file has {size} bytes; {file.byte_length} expected"
            faults.append(ScanFault("truncated", index, start, end - start, what))
    return faults


def sample_extents(file: DataFile, percent: float, rng: random.Random) -> Collection[int]:
    """Returns the numbers of a random sample of the extents of a file, at least one; of all for 100 percent."""
    extents = range(len(file.extent_lengths))
    if percent < 100 and extents:
        return set(rng.sample(extents, max(1, round(len(extents) * percent / 100))))
    return extents


def ranges_of(index: int, file: DataFile, *, end: int, chosen: Collection[int]) -> Iterator[ScanRange]:
    """Yields those of the `chosen` extents of a file that end at byte `end` or before, as ranges. Neighbours are one
    range while they are READ_BYTES at most; an extent that is larger is a range alone.
    """
    lengths: list[int] = []
    digests: list[int] = []
    start = position = 0
    for number, (length, digest) in enumerate(zip(file.extent_lengths, file.extent_digests, strict=True)):
        is_wanted = number in chosen and position + length <= end
        if lengths and (not is_wanted or position + length - start > READ_BYTES):
            yield ScanRange(index, start, lengths, digests)
            lengths, digests = [], []
        if is_wanted:
            start = start if lengths else position
            lengths.append(length)
            digests.append(digest)
        position += length
    if lengths:
        yield ScanRange(index, start, lengths, digests)


def scan(
    store: Store,
    names: Sequence[str],
    ranges: Iterable[ScanRange],
    *,
    threads: int,
    on_done: Callable[[ScanRange, Sequence[ScanFault]], None],
) -> None:
    """Reads all ranges and compares them with their digests. `names` are the files' names in the store, by index.

    `on_done` gets each range with its faults, from any thread, one call at a time. A range that the store cannot read
    has one fault of its whole length; ranges of that file that are not begun by then are skipped, without a call of
    `on_done`. Memory is `threads` buffers of READ_BYTES.
    """
    lock = threading.Lock()
    unreadable: set[int] = set()
    buffers = BufferPool(READ_BYTES, threads)

    def check(item: ScanRange) -> None:
        try:
            with buffers.lend() as buffer:
                digests = _digests(store, names[item.file], item, buffer)
        except CheckpointError as error:
            faults = [ScanFault(error.kind, item.file, item.byte_offset, item.byte_length, error.message)]
            unreadable.add(item.file)
        else:
            faults = _checksum_faults(item, digests)
        with lock:
            on_done(item, faults)

    run_jobs(check, (item for item in ranges if item.file not in unreadable), num_threads=threads)


def _checksum_faults(item: ScanRange, digests: Iterable[int]) -> list[ScanFault]:
    starts = accumulate(item.extent_lengths[:-1], initial=item.byte_offset)
    return [
        ScanFault("checksum", item.file, start, length, f"{found:016x} found, {expected:016x} expected")
        for start, length, expected, found in zip(
            starts, item.extent_lengths, item.extent_digests, digests, strict=True
        )
        if found != expected
    ]


def _digests(store: Store, name: str, item: ScanRange, buffer: memoryview) -> list[int]:
    """Returns the checksum of each extent of a range, as it is in the store now."""
    if item.byte_length <= buffer.nbytes:
        content = buffer[: item.byte_length]
        store.read_into(name, item.byte_offset, content)
        bounds = pairwise(accumulate(item.extent_lengths, initial=0))
        return [xxhash.xxh3_64_intdigest(content[start:end]) for start, end in bounds]
    # Only a single extent that is larger than the buffer makes a range of that size.
    hasher = xxhash.xxh3_64()
    end = item.byte_offset + item.byte_length
    for start in range(item.byte_offset, end, buffer.nbytes):
        content = buffer[: min(buffer.nbytes, end - start)]
        store.read_into(name, start, content)
        hasher.update(content)
    return [hasher.intdigest()]
