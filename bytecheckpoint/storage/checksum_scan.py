"""Every byte of data files read and compared with the checksums of their extents, many reads in flight, in bounded
memory. Unlike a load it does not stop at the first fault. It knows bytes and extents, and nothing of tensors.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

READ_BYTES = 8 << 20
"""Of one read; a thread holds one buffer of this size."""


class ScanFault(NamedTuple):
    """Bytes of a file that are not those that were written, or could not be read."""

    kind: str
    """That of the error that a load would raise: missing_file, truncated, checksum, or what the store said."""
    file: int
    """Index into the files that were given."""
    byte_offset: int
    byte_length: int
    what: str
    """Found against expected."""


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
    """The size of each file as the store lists it, in bytes; None for one that is not there."""
    parents = {file.name.rpartition("/")[0] for file in files}
    listings = {parent: _list(store, join_name(folder, parent)) for parent in parents}
    return [listings[parent].get(last) for parent, _, last in (file.name.rpartition("/") for file in files)]


def _list(store: Store, folder: str) -> Mapping[str, int | None]:
    try:
        return store.list(folder)
    except CheckpointError as error:
        if error.kind == "not_found":  # a file stands where the folder should be
            return {}
        raise


def size_faults(files: Sequence[DataFile], sizes: Sequence[int | None]) -> list[ScanFault]:
    """The files that are not there, or do not have the size that the manifest gives."""
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


def pieces_of(
    index: int, file: DataFile, *, end: int, sample_percent: float, rng: random.Random
) -> Iterator[ScanRange]:
    """The extents of a file that lie before byte `end`, or a random sample of them, as pieces for `scan`.

    A sample has at least one extent; runs of neighbours in it are read at once, READ_BYTES at most.
    """
    chosen = _choose(len(file.extent_lengths), sample_percent, rng)
    lengths: list[int] = []
    digests: list[int] = []
    start = position = 0
    for number, (length, digest) in enumerate(zip(file.extent_lengths, file.extent_digests, strict=True)):
        is_wanted = (chosen is None or number in chosen) and position + length <= end
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


def _choose(num_extents: int, sample_percent: float, rng: random.Random) -> set[int] | None:
    """The numbers of the extents to read; None for all."""
    if sample_percent >= 100 or num_extents == 0:
        return None
    return set(rng.sample(range(num_extents), max(1, round(num_extents * sample_percent / 100))))


def scan(
    store: Store,
    names: Sequence[str],
    pieces: Iterable[ScanRange],
    *,
    threads: int,
    on_done: Callable[[ScanRange, Sequence[ScanFault]], None],
) -> None:
    """Reads and compares all pieces. `names` are those of the files in the store, by index.

    `on_done` gets each piece with what is wrong with it, from any thread, one call at a time. A file whose bytes the
    store cannot give is read no further: the fault reaches to the end of the piece. Memory is `threads` buffers of
    READ_BYTES.
    """
    lock = threading.Lock()
    given_up: set[int] = set()
    buffers = BufferPool(READ_BYTES, threads)

    def check(piece: ScanRange) -> None:
        with buffers.lend() as buffer:
            faults, is_readable = _check(store, names[piece.file], piece, buffer)
        with lock:
            if not is_readable:
                given_up.add(piece.file)
            on_done(piece, faults)

    run_jobs(check, (piece for piece in pieces if piece.file not in given_up), num_threads=threads)


def _check(store: Store, name: str, piece: ScanRange, buffer: memoryview) -> tuple[list[ScanFault], bool]:
    """What is wrong with a piece, and whether the store could give its bytes at all."""
    try:
        digests = _digests(store, name, piece, buffer)
    except CheckpointError as error:
        return [ScanFault(error.kind, piece.file, piece.byte_offset, piece.byte_length, error.message)], False
    faults = []
    position = piece.byte_offset
    for length, expected, found in zip(piece.extent_lengths, piece.extent_digests, digests, strict=True):
        if found != expected:
            what = f"{found:016x} found, {expected:016x} expected"
            faults.append(ScanFault("checksum", piece.file, position, length, what))
        position += length
    return faults, True


def _digests(store: Store, name: str, piece: ScanRange, buffer: memoryview) -> list[int]:
    if piece.byte_length <= buffer.nbytes:
        content = buffer[: piece.byte_length]
        store.read_into(name, piece.byte_offset, content)
        return [xxhash.xxh3_64_intdigest(part) for part in _cut(content, piece.extent_lengths)]
    # Only one extent that is larger than the buffer alone makes a piece of that size.
    hasher = xxhash.xxh3_64()
    end = piece.byte_offset + piece.byte_length
    for start in range(piece.byte_offset, end, buffer.nbytes):
        content = buffer[: min(buffer.nbytes, end - start)]
        store.read_into(name, start, content)
        hasher.update(content)
    return [hasher.intdigest()]


def _cut(content: memoryview, lengths: Iterable[int]) -> Iterator[memoryview]:
    position = 0
    for length in lengths:
        yield content[position : position + length]
        position += length
