"""A slot: one file of a memory root with the image of data files of one save, in most slots those of one rank. Its
pages are kept from save to save, because the first touch of a page costs more than the copy into it.

    header: magic, length, checksum, then a SlotHeader; up to a page boundary
    image: the data files, each from a page boundary on, as staging lays them out

A slot belongs to the process that holds its lock. `is_filled` in its header is False before a byte of the image
changes, and True after the last one: a slot whose process is killed in between is not taken for whole.
"""

# ruff: noqa: PTH108, PTH116, PTH118, PTH123, PTH208 - the calls of `os` by name, as in posix_files.py

from __future__ import annotations

import mmap
import os
import re
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

import msgspec
import xxhash

from bytecheckpoint.runtime.buffers import advise
from bytecheckpoint.storage.backends.file_lock import ProcessLock, create_locked
from bytecheckpoint.storage.layout import data_file_name
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX

PAGE_BYTES = 4096
_PREFIX = struct.Struct("<8sIQ")  # magic, length and checksum of the header
_MAGIC = b"BCPSLOT1"
_NAME = re.compile(r"\A[0-9a-f]{16}\Z")
_FIXED_BYTES = 256
"""Most bytes of a header without the lengths of its files."""
_FILE_BYTES = 24
"""Most bytes of a file in the header: its length, rank and number."""
_MAX_HEADER_BYTES = 64 << 20
_STEP_BYTES = 64 << 20


class SlotHeader(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a slot."""

    save_id: str
    step: int
    rank: int
    is_filled: bool
    image_offset: int
    """First byte of the image in the file."""
    lengths: list[int]
    """Bytes of each data file, in their order."""
    files: list[tuple[int, int]] = []
    """Rank and number in the name of each data file; empty if all are of `rank`, in the order of their numbers. A rank
    of -1 marks bytes that are not a valid file."""

    def names(self) -> list[tuple[int, int]]:
        """Returns rank and number in the name of each data file; rank -1 for bytes that are no valid file."""
        return self.files or [(self.rank, number) for number in range(len(self.lengths))]


class FilePlace(NamedTuple):
    """A data file inside another file."""

    path: str
    byte_offset: int
    byte_length: int


class FoundSlot(NamedTuple):
    """A slot file of the folder."""

    path: str
    capacity: int
    """Length of the file, in bytes."""
    header: SlotHeader | None
    """None for a slot that was never filled, or whose header is torn."""

    @property
    def save_id(self) -> str:
        """Id of the save whose image is whole here; empty if there is none, also while a new image is being written."""
        return self.header.save_id if self.header is not None else ""

    def places(self) -> dict[str, FilePlace]:
        """Returns the data files that are whole here, by their names in the checkpoint."""
        header = self.header
        if header is None or not header.is_filled:
            return {}
        starts = image_starts(header.lengths)
        return {
            data_file_name(header.save_id, rank, number): FilePlace(self.path, header.image_offset + start, byte_length)
            for (rank, number), start, byte_length in zip(header.names(), starts, header.lengths, strict=False)
            if rank >= 0
        }


class Slot:
    """A slot that this process holds."""

    def __init__(self, path: str, lock: ProcessLock) -> None:
        self.path = path
        self._lock = lock
        self._memory: mmap.mmap | None = None
        self._header: SlotHeader | None = None

    @property
    def capacity(self) -> int:
        """Length of the file now, in bytes."""
        return os.stat(self.path).st_size

    @property
    def save_id(self) -> str:
        """Id of the save that this process has filled it with; empty while it is being filled, and for a slot that was
        taken over, whatever that holds.
        """
        return self._header.save_id if self._header is not None else ""

    def reserve(self, num_bytes: int, mapping: type[mmap.mmap] = mmap.mmap) -> None:
        """Makes the slot at least `num_bytes` long, with its pages allocated, and maps it. Raises OSError if there is
        no room; the slot is then as long as before, and not mapped.
        """
        if self._memory is not None and len(self._memory) >= num_bytes:
            return
        self._memory = None  # before the file grows; views of it keep the old mapping
        held_bytes, fd = self.capacity, os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Hazard: without it, a store into a page for which tmpfs has no room kills the process.
            _allocate(fd, num_bytes)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mapping(fd, os.fstat(fd).st_size, flags=flags)
        except OSError:
            os.ftruncate(fd, held_bytes)  # a part that nobody can use would keep the root full
            raise
        finally:
            os.close(fd)
        advise(self._memory, large_pages=False)

    def begin(self, lengths: Sequence[int]) -> memoryview:
        """Marks the slot as being filled, and returns the memory for an image with files of these lengths."""
        self._write_header(SlotHeader("", 0, 0, False, header_bytes(len(lengths)), []))
        return self.image(lengths)

    def mark_whole(
        self, save_id: str, step: int, rank: int, lengths: Sequence[int], *, files: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Marks the image as whole, with files of these lengths of a save; `files` is as in SlotHeader."""
        offset = header_bytes(len(lengths))
        self._write_header(SlotHeader(save_id, step, rank, True, offset, list(lengths), list(files)))

    def image(self, lengths: Sequence[int]) -> memoryview:
        """Returns the memory of an image with files of these lengths. Changes nothing."""
        offset = header_bytes(len(lengths))
        return memoryview(self.memory)[offset : offset + image_bytes(lengths)]

    @property
    def memory(self) -> mmap.mmap:
        """The memory of the whole file. Raises RuntimeError before `reserve`."""
        if self._memory is None:
            raise RuntimeError("the slot has no memory: call reserve before filling it")
        return self._memory

    def _write_header(self, header: SlotHeader) -> None:
        encoded, memory = msgspec.msgpack.encode(header), self.memory
        memory[: _PREFIX.size] = bytes(_PREFIX.size)  # the content counts only once its checksum is written
        memory[_PREFIX.size : _PREFIX.size + len(encoded)] = encoded
        memory[: _PREFIX.size] = _PREFIX.pack(_MAGIC, len(encoded), xxhash.xxh3_64_intdigest(encoded))
        self._header = header

    def release(self) -> None:
        """Unmaps the slot and releases its lock. The file stays for the next process that takes it."""
        self._memory = None
        self._lock.release()

    def remove(self) -> None:
        """Deletes the slot, whose memory the host gets back, and releases its lock."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self.release()


def _allocate(fd: int, num_bytes: int) -> None:
    # In steps: when a signal comes, tmpfs takes back all that a call has allocated.
    for start in range(os.fstat(fd).st_size, num_bytes, _STEP_BYTES):
        os.posix_fallocate(fd, start, min(_STEP_BYTES, num_bytes - start))


def whole_pages(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def header_bytes(num_files: int) -> int:
    """Returns the number of bytes before the image of this number of files."""
    return whole_pages(_PREFIX.size + _FIXED_BYTES + _FILE_BYTES * num_files)


def image_bytes(lengths: Sequence[int]) -> int:
    """Returns the length, in bytes, of an image with files of these lengths."""
    return sum(map(whole_pages, lengths))


def slot_bytes(lengths: Sequence[int]) -> int:
    """Returns the length, in bytes, of a slot for files of these lengths."""
    return header_bytes(len(lengths)) + image_bytes(lengths)


def image_starts(lengths: Sequence[int]) -> list[int]:
    """Returns the byte offset of each file in the image, and after them the length of the image."""
    return list(accumulate(map(whole_pages, lengths), initial=0))


def create(folder: str) -> Slot:
    """Makes a new slot of 0 bytes, held by this process. The caller holds the folder's lock."""
    path = os.path.join(folder, secrets.token_hex(8))
    return Slot(path, create_locked(path, mode=0o600))


def take(path: str) -> Slot | None:
    """Takes a slot over; None if a living process holds it, or it is gone. The caller holds the folder's lock."""
    with suppress(BlockingIOError, FileNotFoundError):
        return Slot(path, ProcessLock(path))
    return None


def without_lost(slots: Sequence[Slot]) -> list[Slot]:
    """Returns the slots whose files are there. Releases the others: somebody has deleted their files, so no process
    finds what they hold, and the host gets their memory back.
    """
    lost = [slot for slot in slots if not os.path.lexists(slot.path)]
    for slot in lost:
        slot.release()
    return [slot for slot in slots if slot not in lost]


def take_best_fit(slots: Iterable[FoundSlot], num_bytes: int) -> Slot | None:
    """Takes over one of these slots: of those that no living process holds, the one that fits best, as `fit` says. None
    if there is none. The caller holds the folder's lock.
    """
    by_fit = sorted(slots, key=lambda each: fit(each.capacity, num_bytes))
    return next((slot for each in by_fit if (slot := take(each.path)) is not None), None)


def fit(capacity: int, num_bytes: int) -> tuple[bool, int]:
    """Returns the sort key of a slot that is to hold `num_bytes`: the smallest that is large enough comes first, then
    the largest of the others.
    """
    return capacity < num_bytes, abs(capacity - num_bytes)


def scan(folder: str) -> Iterator[FoundSlot]:
    """Yields the slots of a folder. Nothing is changed."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in filter(_NAME.match, names):
        path = os.path.join(folder, name)
        with suppress(FileNotFoundError), open(path, "rb") as file:
            capacity = os.fstat(file.fileno()).st_size
            header = _decode(file.read(PAGE_BYTES), capacity)
            if isinstance(header, int):
                file.seek(0)
                header = _decode(file.read(header), capacity)
            yield FoundSlot(path, capacity, header if isinstance(header, SlotHeader) else None)


def remove_stale_temporaries(folder: str) -> None:
    """Removes slots whose making was interrupted. The caller holds the folder's lock."""
    for name in os.listdir(folder):
        if name.startswith(TEMPORARY_PREFIX) and (slot := take(os.path.join(folder, name))) is not None:
            slot.remove()


def _decode(content: bytes, capacity: int) -> SlotHeader | int | None:
    """Returns the header at the start of a slot; the number of bytes that it needs, if `content` is exactly one page
    and too short; None if it is torn or does not fit the file.
    """
    if len(content) < _PREFIX.size:
        return None
    magic, num_bytes, digest = _PREFIX.unpack_from(content)
    end = _PREFIX.size + num_bytes
    if magic != _MAGIC or end > min(capacity, _MAX_HEADER_BYTES):
        return None
    if end > len(content):
        return end if len(content) == PAGE_BYTES else None
    encoded = content[_PREFIX.size : end]
    if xxhash.xxh3_64_intdigest(encoded) != digest:
        return None
    with suppress(msgspec.MsgspecError):
        header = msgspec.msgpack.decode(encoded, type=SlotHeader)
        if _fits(header, capacity):
            return header
    return None


def _fits(header: SlotHeader, capacity: int) -> bool:
    return (
        min([header.image_offset, *header.lengths, header.rank]) >= 0
        and len(header.files) in {0, len(header.lengths)}
        and header.image_offset + image_bytes(header.lengths) <= capacity
    )
