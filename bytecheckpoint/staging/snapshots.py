"""Snapshots of the state, from which its data files are written: the live state itself if the caller waits, a copy in
staging memory, or a copy in waves through staging memory that is smaller than the state. Stores are unknown here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Protocol

import torch

from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.memory.device_to_host import DeviceCopies, DeviceRanges
from bytecheckpoint.runtime.buffers import BufferPool, CopyEvent
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.staging.file_image import LiveFile, PlannedFile
from bytecheckpoint.storage.object_io import BLOCK_BYTES

Ready = Mapping[torch.device, CopyEvent]
"""By device, the event after which its tensors are as they were at the call, made on the caller's thread."""

_PAGE_BYTES = 4096


class Snapshot(Protocol):
    """The bytes of the data files that one rank writes."""

    def stage(self) -> None:
        """Returns once the state may change. Called once, while other threads may wait in `content` already."""

    def fail(self, error: BaseException) -> None:
        """Ends staging with an error: `content` raises the first one from now on."""

    def wait(self) -> None:
        """Waits until writing may begin without slowing down staging, for which training may be waiting."""

    def content(self, block: Block) -> AbstractContextManager[memoryview]:
        """Yields the bytes of a planned block, as the state was when the save began. Blocks are entered one by one, in
        file order, from any thread; several may be open at once.
        """

    def close(self) -> None:
        """Drops the bytes, written or not."""


class LiveState:
    """The state itself, which cannot change while the caller waits, gathered block by block."""

    def __init__(self, files: Sequence[LiveFile], scratch: BufferPool, ready: Ready) -> None:
        self._files = files
        self._scratch = scratch
        self._on_device = DeviceRanges((file.leave_out_devices() for file in files), ready)

    def stage(self) -> None:
        """Does nothing."""

    def fail(self, error: BaseException) -> None:
        """Does nothing."""

    def wait(self) -> None:
        """Does nothing."""

    @contextmanager
    def content(self, block: Block) -> Iterator[memoryview]:
        with self._scratch.lend() as memory:
            into = memory[: block.byte_length]
            self._files[block.file].gather(block.byte_offset, into)
            self._on_device.gather(block.file, block.byte_offset, into)
            yield into

    def close(self) -> None:
        self._files = ()  # a kept error must not keep the state
        self._on_device.close()


def staged_bytes(planned: Sequence[PlannedFile]) -> int:
    """Returns the number of bytes of staging memory that a copy of all of these files takes."""
    return sum(_whole_pages(file.byte_length) for file in planned)


class StagedState:
    """A copy of all of the state in staging memory, made by several threads."""

    def __init__(self, files: Sequence[LiveFile], memory: memoryview, ready: Ready, *, threads: int) -> None:
        """Each call of `stage` uses `threads` threads."""
        self._files = files
        self._threads = threads
        self._places: list[memoryview] = []
        start = 0
        for file in files:
            self._places.append(memory[start : start + file.planned.byte_length])
            start += _whole_pages(file.planned.byte_length)
        on_devices = zip((file.leave_out_devices() for file in files), self._places, strict=True)
        self._on_device = DeviceCopies(on_devices, ready)
        self._blocks = list(_blocks_of(files))
        self._left = deque(range(len(self._blocks)))
        """Blocks that no thread has begun."""
        self._begun: dict[object, int] = {}
        """The block that each thread gathers now."""
        self._is_staged = False
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def stage(self) -> None:
        """Unlike `Snapshot.stage`, several threads may call it and share the work. Raises the error of `fail`."""
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
        """Gathers blocks that no other thread has begun, until all are gathered or staging has failed. If interrupted,
        it leaves its block to others.
        """
        holder = object()
        try:
            while (index := self._begin_one(holder)) is not None:
                block = self._blocks[index]
                self._files[block.file].gather(block.byte_offset, self._bytes_of(block))
                with self._changed:
                    del self._begun[holder]
                    self._changed.notify_all()
        except BaseException:
            with self._changed:
                if holder in self._begun:
                    self._left.append(self._begun[holder])
                    del self._begun[holder]
                self._changed.notify_all()
            raise

    def _begin_one(self, holder: object) -> int | None:
        """Returns the next block to gather; None if all are gathered or staging has failed. While other threads gather
        the last ones, waits: they may leave theirs.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._left or not self._begun)
            if self._error is not None or not self._left:
                return None
            # In this order: if an interrupt comes between the two, the block is gathered twice, and not left out.
            index = self._begun[holder] = self._left[0]
            self._left.popleft()
            return index

    def fail(self, error: BaseException) -> None:
        """Ends staging with an error. Waits until no thread writes to the memory: another save may then use it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.wait()
        self._on_device.wait()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_staged or (self._error and not self._begun))

    @contextmanager
    def content(self, block: Block) -> Iterator[memoryview]:
        self.wait()
        self._raise_error()
        yield self._bytes_of(block)

    def _bytes_of(self, block: Block) -> memoryview:
        return self._places[block.file][block.byte_offset :][: block.byte_length]

    def close(self) -> None:
        self._files, self._places = (), []  # a kept error must not keep the state
        self._on_device.close()


class ProposedState:
    """A copy that is begun by a cached plan, before the ranks have agreed on it. Until they have, the state may not
    change.
    """

    def __init__(self, proposed: StagedState) -> None:
        self.proposed = proposed
        """Other threads may help to stage this one."""
        self._right: Snapshot = proposed
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        """Guards `_right` and `_error`, so that a failure reaches the right snapshot, whichever comes first."""
        self._is_agreed = threading.Event()

    def agree(self, other: Snapshot | None) -> None:
        """Ends the wait for the plan. With None, the proposed snapshot is right; else `other` is staged in its place,
        which may use the memory of the proposed one.
        """
        with self._lock:
            self._right = other or self.proposed
            error = self._error
        if error is not None:
            self._right.fail(error)
        self._is_agreed.set()

    def stage(self) -> None:
        # The proposed copy is completed even if it is wrong: no thread may still write to its memory when the right one
        # is staged.
        self.proposed.stage()
        self._is_agreed.wait()
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
        self._is_agreed.set()

    def wait(self) -> None:
        self._right.wait()

    def content(self, block: Block) -> AbstractContextManager[memoryview]:
        return self._right.content(block)

    def close(self) -> None:
        self._is_agreed.set()
        self.proposed.close()
        self._right.close()


class StateInWaves:
    """A copy in waves, through staging memory smaller than the state: each written block makes room for another."""

    def __init__(self, files: Sequence[LiveFile], memory: memoryview, ready: Ready) -> None:
        self._files = files
        self._on_device = DeviceRanges((file.leave_out_devices() for file in files), ready)
        starts = range(0, memory.nbytes - BLOCK_BYTES + 1, BLOCK_BYTES)
        self._free = deque(memory[start : start + BLOCK_BYTES] for start in starts)
        self._staged: dict[Block, memoryview] = {}
        """Memory of the blocks that are staged and not yet written."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_gathering = False
        self._changed = threading.Condition()

    def stage(self) -> None:
        for block in _blocks_of(self._files):
            with self._changed:
                self._changed.wait_for(lambda: self._free or self._is_closed)
                if self._is_closed:  # writing has failed, with an error of its own
                    return
                memory = self._free.popleft()
                self._is_gathering = True
            try:
                self._files[block.file].gather(block.byte_offset, memory[: block.byte_length])
                self._on_device.gather(block.file, block.byte_offset, memory[: block.byte_length])
            finally:
                with self._changed:
                    self._is_gathering = False
                    self._changed.notify_all()
            with self._changed:
                self._staged[block] = memory
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        """Does nothing: writing must begin before staging ends, because it makes room."""

    @contextmanager
    def content(self, block: Block) -> Iterator[memoryview]:
        with self._changed:
            self._changed.wait_for(lambda: block in self._staged or self._error)
            if self._error is not None:
                raise self._error
            memory = self._staged.pop(block)
        try:
            yield memory[: block.byte_length]
        finally:
            with self._changed:
                self._free.append(memory)
                self._changed.notify_all()

    def close(self) -> None:
        """Stops staging, and waits until no thread writes to the memory, so that another save may use it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_gathering)
        self._files = ()  # a kept error must not keep the state
        self._on_device.close()


def _blocks_of(files: Sequence[LiveFile]) -> Iterator[Block]:
    return chain.from_iterable(file.planned.blocks for file in files)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
