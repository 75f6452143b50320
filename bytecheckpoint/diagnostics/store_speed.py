"""Speed of a store: latency of small requests, and rates by the length of a part and the number in flight."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from bytecheckpoint.diagnostics.store_guarantees import ProbeStore, get, put
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import block_of, one_block

_MiB = 1 << 20
WRITE_PART_BYTES = (4 * _MiB, 16 * _MiB, 32 * _MiB)
WRITE_THREADS = (1, 3, 8)
READ_PART_BYTES = (1 * _MiB, 8 * _MiB)
READ_THREADS = (1, 4, 8, 16)
_ROUNDS = 9


class Latency(NamedTuple):
    """Medians, in seconds."""

    read_s: float
    """Read of 4 KiB."""
    write_s: float
    """Write of 4 KiB."""
    list_s: float


class Speed(NamedTuple):
    """One measurement."""

    part_bytes: int
    """Length of a block of a write, or of the range of a read."""
    threads: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9)


def measure_latency(store: ProbeStore) -> Latency:
    """Measures writes, reads and listings, one request at a time. Deletes the objects that it has written."""
    content = os.urandom(4096)
    names = [f"latency-{number}" for number in range(_ROUNDS)]
    writes = [_seconds(partial(put, store, name, content)) for name in names]
    reads = [_seconds(partial(get, store, name, 0, 4096)) for name in names]
    lists = [_seconds(partial(store.list, "")) for _ in names]
    for name in names:
        store.delete(name)
    return Latency(*map(statistics.median, (reads, writes, lists)))


def measure_writes(open_store: Callable[[int], ProbeStore], *, seconds: float, max_bytes: int) -> Iterator[Speed]:
    """Writes one object for each part length and each number of `writer_threads`, the argument of `open_store`; yields
    the speed of each.

    An object is as long as `seconds` allow at the speed of the object before, but has at least a part for each thread;
    it never has more than `max_bytes`, even if these are too few for that.
    """
    content = _page_aligned(os.urandom(min(max_bytes, max(WRITE_PART_BYTES))))
    bytes_per_s = 0.0
    for part_bytes in _up_to(WRITE_PART_BYTES, max_bytes):
        for threads in WRITE_THREADS:
            wanted = max(int(bytes_per_s * seconds), part_bytes * threads)
            num_parts = max(1, min(wanted, max_bytes) // part_bytes)
            view = content[:part_bytes]
            starts = range(0, num_parts * part_bytes, part_bytes)
            blocks = [block_of(view, start) for start in starts]
            store = open_store(threads)
            took = _seconds(partial(store.write, "written", blocks, replace=False))
            store.delete("written")
            speed = Speed(part_bytes, threads, num_parts * part_bytes, took)
            bytes_per_s = speed.bytes_per_s
            yield speed


def measure_reads(store: ProbeStore, *, seconds: float, max_bytes: int) -> Iterator[Speed]:
    """Yields the speed of reading ranges of one object, for each length of a range and each number of threads. Each
    measurement takes about `seconds`. Writes the object first, and deletes it after the last measurement.
    """
    part_lengths = _up_to(READ_PART_BYTES, max_bytes)
    num_bytes = max(part_lengths[-1], min(max_bytes, 64 * _MiB))
    content = memoryview(os.urandom(num_bytes))
    store.write("read", one_block(content), replace=False)
    for part_bytes in part_lengths:
        for threads in READ_THREADS:
            _drop_cache(store)
            yield _measure_reads(store, num_bytes // part_bytes, part_bytes, threads, seconds)
    store.delete("read")


def _measure_reads(store: ProbeStore, num_parts: int, part_bytes: int, threads: int, seconds: float) -> Speed:
    started = time.perf_counter()

    def read(reader: int) -> int:
        buffer = _page_aligned(bytes(part_bytes))
        count = 0
        while count == 0 or time.perf_counter() - started < seconds:
            store.read_into("read", (reader + count * threads) % num_parts * part_bytes, buffer)
            count += 1
        return count * part_bytes

    num_bytes = sum(map_jobs(read, range(threads), num_threads=threads))
    return Speed(part_bytes, threads, num_bytes, time.perf_counter() - started)


def _up_to(lengths: Sequence[int], max_bytes: int) -> list[int]:
    return [length for length in lengths if length <= max_bytes] or [max_bytes]


def _seconds(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def _page_aligned(content: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memoryview(memory)


def _drop_cache(store: ProbeStore) -> None:
    """Evicts the object "read" of a local store from the page cache, as far as the kernel does."""
    if isinstance(store.store, LocalStore):
        with suppress(OSError, AttributeError):  # macOS has no posix_fadvise
            fd = os.open(join_name(str(store), "read"), os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
