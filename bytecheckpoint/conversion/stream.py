"""The files of a target, in any format: planned as runs of bytes, divided over the ranks, and written from start to end
while windows are read ahead of the writer. It knows no format.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from math import prod
from threading import Condition
from typing import NamedTuple

from bytecheckpoint.conversion.assemble import Elements, Job
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.loading.select import LeftOut
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.planner.copy_plan import WantedTensor
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage.object_io import BLOCK_BYTES

NUM_WINDOWS = 3
"""Parts of a file in memory: one is written, one read, and one lies between."""


class TensorSpan(NamedTuple):
    """Elements of a tensor that follow one another."""

    tensor: int
    """Number of the tensor."""
    first: int
    """Number of the first element in the row-major flat tensor."""
    item_bytes: int
    byte_length: int


def tensor_span(number: int, tensor: WantedTensor) -> TensorSpan:
    """Returns the span of all elements of this tensor, which has this number."""
    item_bytes = itemsize(tensor.dtype)
    return TensorSpan(number, 0, item_bytes, prod(tensor.shape) * item_bytes)


class Late(NamedTuple):
    """Bytes that depend on the checksums of spans before them."""

    byte_length: int
    content: Callable[[Mapping[int, int]], bytes]
    """Returns the bytes for the CRC-32 of each span, by its number among the runs of the file."""


FileRun = bytes | TensorSpan | Late
"""Bytes of a file that follow one another."""


def run_bytes(run: FileRun) -> int:
    return len(run) if isinstance(run, bytes) else run.byte_length


class Stream:
    """A file made of runs. Its ranges are filled once each, from the first to the last."""

    def __init__(self, runs: Sequence[FileRun]) -> None:
        self._runs = runs
        self._ends = list(accumulate(map(run_bytes, runs)))
        self.byte_length = self._ends[-1] if runs else 0
        self._has_checksums = any(isinstance(run, Late) for run in runs)
        self._checksums: dict[int, int] = {}

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the file, of BLOCK_BYTES, without content or extents."""
        return [Block(at, min(BLOCK_BYTES, self.byte_length - at)) for at in range(0, self.byte_length, BLOCK_BYTES)]

    def fill(self, byte_offset: int, memory: memoryview, elements: Elements) -> None:
        """Fills the memory with the bytes of the file from `byte_offset` on. If the file has checksums (`Late` runs),
        calls must go through it in order, and read each byte once. The memory must be aligned as the file is: what
        begins at an aligned offset of the file is at an aligned address.
        """
        parts = list(self._parts(byte_offset, memory))
        elements.read(
            [
                Job(run.tensor, run.first + start // run.item_bytes, len(part) // run.item_bytes, part)
                for _, run, start, part in parts
                if isinstance(run, TensorSpan)
            ]
        )
        for number, run, start, part in parts:
            if isinstance(run, bytes):
                part[:] = run[start : start + len(part)]
            elif isinstance(run, Late):
                part[:] = run.content(self._checksums)[start : start + len(part)]
            elif self._has_checksums:
                self._checksums[number] = zlib.crc32(part, self._checksums.get(number, 0))

    def _parts(self, byte_offset: int, memory: memoryview) -> Iterator[tuple[int, FileRun, int, memoryview]]:
        """Yields (number of a run, run, offset in the run, memory to fill) for each run in the range."""
        position, end = byte_offset, byte_offset + len(memory)
        for number in range(bisect_right(self._ends, byte_offset), len(self._runs)):
            run_end = self._ends[number]
            run_start = run_end - run_bytes(self._runs[number])
            if run_start >= end:
                return
            stop = min(end, run_end)
            if stop > position:
                yield (
                    number,
                    self._runs[number],
                    position - run_start,
                    memory[position - byte_offset : stop - byte_offset],
                )
            position = stop


class TargetFile(NamedTuple):
    """A file of the target."""

    name: str
    """Name inside the target's folder."""
    runs: Sequence[FileRun]
    extent_lengths: Sequence[int] = ()
    """Lengths in bytes of the extents that get checksums, if the format has these."""

    @property
    def byte_length(self) -> int:
        return sum(map(run_bytes, self.runs))


class TargetPlan(NamedTuple):
    """A checkpoint in the target's format, planned."""

    files: Sequence[TargetFile]
    by_rank: Sequence[Sequence[int]]
    """Numbers of the files that each rank writes. A sole file, without a `last`, is always the coordinator's."""
    last_name: str
    """Name of the file that is written last: without it there is no checkpoint."""
    last: Callable[[Sequence[DataFile]], bytes] | None
    """Returns the content of that file, from the written files in the order of `files`. None if it is the only file."""
    left_out: Sequence[LeftOut] = ()


def spread(byte_lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assigns items to ranks, the largest first, so that each rank gets about as many bytes; returns the numbers of the
    items of each rank.
    """
    loads, numbers = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for number in sorted(range(len(byte_lengths)), key=lambda each: -byte_lengths[each]):
        rank = loads.index(min(loads))
        numbers[rank].append(number)
        loads[rank] += byte_lengths[number]
    return [sorted(of_rank) for of_rank in numbers]


def scratch_bytes_of(memory_bytes: int) -> int:
    """Returns the part of a conversion's memory for bytes that cannot be read straight into a window: an eighth, at
    most 64 MiB. A conversion has 64 MiB of memory or more.
    """
    return max(8 << 20, min(64 << 20, memory_bytes // 8))


def window_bytes_of(memory_bytes: int, longest_file: int) -> int:
    """Returns the length in bytes of each of the NUM_WINDOWS windows, which share the memory that `scratch_bytes_of`
    leaves: a multiple of BLOCK_BYTES, at most 128 MiB, and no more than the longest file needs.
    """
    room = (memory_bytes - scratch_bytes_of(memory_bytes)) // NUM_WINDOWS
    return max(1, min(128 << 20, room, longest_file + BLOCK_BYTES - 1) // BLOCK_BYTES) * BLOCK_BYTES


class ReadAhead:
    """Serves a stream to a store, block by block. While a window of it is written, the next ones are read."""

    def __init__(self, stream: Stream, elements: Elements, scratch: BufferPool, window_bytes: int) -> None:
        """Begins to read. `scratch` has NUM_WINDOWS free blocks of `window_bytes`."""
        self._stream = stream
        self._elements = elements
        self._scratch = scratch
        self._window_bytes = window_bytes
        self._num_windows = -(-stream.byte_length // window_bytes)
        # A thread of its own, which reads one window after another, and none of the remaining ones after `close`.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bcp-read-ahead")
        self._changed = Condition()
        self._left = {number: self._length(number) for number in range(self._num_windows)}
        """Bytes of each window that were not written yet."""
        self._loans: dict[int, ExitStack] = {}
        self._windows: dict[int, Future[memoryview]] = {}
        self._failure: BaseException | None = None
        """Error of the first block that was not written."""
        for number in range(min(NUM_WINDOWS, self._num_windows)):
            self._windows[number] = self._pool.submit(self._read, number)

    def close(self) -> None:
        """Waits for the read that is under way, if any, and frees all windows. Further windows are not read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for loan in self._loans.values():
            loan.close()

    @contextmanager
    def content(self, block: Block) -> Iterator[memoryview]:
        """Lends the bytes of a block, which counts as written when the context ends. Blocks have to be requested in
        ascending order.

        Waits until the block's window is read, and before that until earlier windows are written and free: so a store
        that has got blocks must write them without waiting for later ones. Raises the error of another block that was
        not written.
        """
        number, start = divmod(block.byte_offset, self._window_bytes)
        try:
            yield self._window(number)[start : start + block.byte_length]
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            raise
        with self._changed:
            self._left[number] -= block.byte_length
            if self._left[number]:
                return
            self._loans.pop(number).close()
            following = max(self._windows) + 1
            if following < self._num_windows:
                self._windows[following] = self._pool.submit(self._read, following)
                self._changed.notify_all()

    def _window(self, number: int) -> memoryview:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or number in self._windows)
            if self._failure is not None:
                raise self._failure
            window = self._windows[number]
        return window.result()

    def _length(self, number: int) -> int:
        return min(self._window_bytes, self._stream.byte_length - number * self._window_bytes)

    def _read(self, number: int) -> memoryview:
        loan = self._loans[number] = ExitStack()
        window = loan.enter_context(self._scratch.lend())[: self._length(number)]
        self._stream.fill(number * self._window_bytes, window, self._elements)
        return window
