"""How the state is kept as it was at the call while its bytes are written: not at all where the caller waits, in
staging memory, or in staging memory that is smaller than the state.

Each kind gives the bytes of the data files, range by range, to whatever writes them; it knows nothing of stores.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from bytecheckpoint.memory.device_to_host import DeviceCopies, DeviceRanges
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.staging.file_image import LiveFile, PlannedFile
from bytecheckpoint.storage.object_io import BLOCK_BYTES

_PAGE_BYTES = 4096
_Range = tuple[int, int, int]
"""Number of the file, byte offset and byte length in it."""
_GATHERED = object()


class Snapshot(Protocol):
    """The bytes of the data files that one rank writes."""

    def stage(self) -> None:
        """Returns when the state may change. Called once, while others may wait in `content` already."""

    def fail(self, error: BaseException) -> None:
        """Staging has failed: `content` raises this from now on, or what it failed with before."""

    def wait(self) -> None:
        """Returns when writing may begin without taking time from staging, for which training may be waiting."""

    def content(self, file: int, byte_offset: int, byte_length: int) -> AbstractContextManager[memoryview]:
        """A range of a file, as the state was, for as long as the context lasts. Entered in file order, from any
        thread, one at a time.
        """

    def close(self) -> None:
        """The bytes are needed no longer, written or not."""


class LiveState:
    """The state itself, which does not change while the caller waits: gathered block by block through scratch."""

    def __init__(self, files: Sequence[LiveFile], scratch: BufferPool) -> None:
        self._files = files
        self._scratch = scratch
        self._on_device = DeviceRanges(file.leave_out_devices() for file in files)

    def stage(self) -> None:
        """Nothing is staged."""

    def fail(self, error: BaseException) -> None:
        """Nothing can fail."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    @contextmanager
    def content(self, file: int, byte_offset: int, byte_length: int) -> Iterator[memoryview]:
        with self._scratch.lend() as block:
            self._files[file].gather(byte_offset, block[:byte_length])
            self._on_device.gather(file, byte_offset, block[:byte_length])
            yield block[:byte_length]

    def close(self) -> None:
        self._files = ()  # an error that is kept must not keep the state
        self._on_device.close()


def staged_bytes(planned: Sequence[PlannedFile]) -> int:
    """How much staging memory takes all of these files."""
    return sum(_whole_pages(file.byte_length) for file in planned)


class StagedState:
    """A copy of all of the state in staging memory, made by several threads."""

    def __init__(self, files: Sequence[LiveFile], memory: memoryview, *, threads: int) -> None:
        """`threads` is how many there are for each call of `stage`."""
        self._files = files
        self._threads = threads
        self._places: list[memoryview] = []
        start = 0
        for file in files:
            self._places.append(memory[start : start + file.planned.byte_length])
            start += _whole_pages(file.planned.byte_length)
        self._on_device = DeviceCopies(zip((file.leave_out_devices() for file in files), self._places, strict=True))
        self._ranges = list(_ranges_of(files))
        self._held_by: list[object] = [None] * len(self._ranges)
        """Of each range who gathers it, `_GATHERED`, or None."""
        self._is_staged = False
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def stage(self) -> None:
        """Other than the protocol says, several threads may call it: they share the work. Raises what staging has
        failed with.
        """
        with self._changed:
            self._raise_error()
            self._on_device.start()
        run_jobs(lambda _: self._gather_all(), range(self._threads), num_threads=self._threads)
        self._on_device.wait()
        with self._changed:
            self._raise_error()
            self._is_staged = True
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _gather_all(self) -> None:
        """Gathers what no other thread has begun; returns when everything is gathered or staging has failed. Where it
        is interrupted, it leaves what it had begun to the others.
        """
        holder = object()
        try:
            while (index := self._begin_one(holder)) is not None:
                number, start, length = self._ranges[index]
                self._files[number].gather(start, self._places[number][start : start + length])
                with self._changed:
                    self._held_by[index] = _GATHERED
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._held_by = [None if other is holder else other for other in self._held_by]
                self._changed.notify_all()
            raise

    def _begin_one(self, holder: object) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or None in self._held_by or self._is_all_gathered())
            if self._error is not None or None not in self._held_by:
                return None
            index = self._held_by.index(None)
            self._held_by[index] = holder  # in one step: an interrupt finds the range free, or held
            return index

    def _is_all_gathered(self) -> bool:
        return self._held_by.count(_GATHERED) == len(self._held_by)

    def fail(self, error: BaseException) -> None:
        """Returns when nobody writes to the memory any more, nor will: another save may then have it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.wait()
        self._on_device.wait()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_staged or (self._error and not self._is_being_written()))

    def _is_being_written(self) -> bool:
        return any(holder not in (None, _GATHERED) for holder in self._held_by)

    @contextmanager
    def content(self, file: int, byte_offset: int, byte_length: int) -> Iterator[memoryview]:
        self.wait()
        self._raise_error()
        yield self._places[file][byte_offset : byte_offset + byte_length]

    def close(self) -> None:
        self._files, self._places = (), []  # an error that is kept must not keep the state


class ProposedState:
    """A copy that is begun before it is certain that it is the right one: until it is settled which one is, the state
    may not change.
    """

    def __init__(self, proposed: StagedState) -> None:
        self.proposed = proposed
        """Others may help to stage this one."""
        self._right: Snapshot = proposed
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        """On these two: a failure reaches the right one, whichever comes first."""
        self._is_settled = threading.Event()

    def settle(self, other: Snapshot | None) -> None:
        """The proposed one is right, or this other one is, which may use the same memory."""
        with self._lock:
            self._right = other or self.proposed
            error = self._error
        if error is not None:
            self._right.fail(error)
        self._is_settled.set()

    def stage(self) -> None:
        # What is wrong is completed as well: nobody may still write to its memory when the right one comes.
        self.proposed.stage()
        self._is_settled.wait()
        if self._error is not None:
            raise self._error
        if self._right is not self.proposed:
            self._right.stage()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            right = self._right
        self.proposed.fail(error)
        right.fail(error)
        self._is_settled.set()

    def wait(self) -> None:
        self._right.wait()

    def content(self, file: int, byte_offset: int, byte_length: int) -> AbstractContextManager[memoryview]:
        return self._right.content(file, byte_offset, byte_length)

    def close(self) -> None:
        self._is_settled.set()
        self.proposed.close()
        self._right.close()


class WavesState:
    """The state on its way through staging memory that is smaller than it: what is written makes room for more."""

    def __init__(self, files: Sequence[LiveFile], memory: memoryview) -> None:
        self._files = files
        self._on_device = DeviceRanges(file.leave_out_devices() for file in files)
        starts = range(0, memory.nbytes - BLOCK_BYTES + 1, BLOCK_BYTES)
        self._free = deque(memory[start : start + BLOCK_BYTES] for start in starts)
        self._staged: dict[tuple[int, int], memoryview] = {}
        """By number of the file and byte offset."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_gathering = False
        self._changed = threading.Condition()

    def stage(self) -> None:
        for file, byte_offset, byte_length in _ranges_of(self._files):
            with self._changed:
                self._changed.wait_for(lambda: self._free or self._is_closed)
                if self._is_closed:  # writing has failed, and says so elsewhere
                    return
                block = self._free.popleft()
                self._is_gathering = True
            try:
                self._files[file].gather(byte_offset, block[:byte_length])
                self._on_device.gather(file, byte_offset, block[:byte_length])
            finally:
                with self._changed:
                    self._is_gathering = False
                    self._changed.notify_all()
            with self._changed:
                self._staged[file, byte_offset] = block
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        """Staging waits for what is written."""

    @contextmanager
    def content(self, file: int, byte_offset: int, byte_length: int) -> Iterator[memoryview]:
        with self._changed:
            self._changed.wait_for(lambda: (file, byte_offset) in self._staged or self._error)
            if self._error is not None:
                raise self._error
            block = self._staged.pop((file, byte_offset))
        try:
            yield block[:byte_length]
        finally:
            with self._changed:
                self._free.append(block)
                self._changed.notify_all()

    def close(self) -> None:
        """Returns when nobody writes to the memory any more: another save may then have it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_gathering)


def _ranges_of(files: Sequence[LiveFile]) -> Iterator[_Range]:
    """The ranges in which the files are asked for."""
    for number, file in enumerate(files):
        for byte_offset, byte_length in file.planned.blocks:
            yield number, byte_offset, byte_length


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
