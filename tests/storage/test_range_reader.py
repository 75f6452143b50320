from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage import range_reader
from bytecheckpoint.storage.backends import posix_files
from bytecheckpoint.storage.backends.local_store import LocalStore

LENGTHS = (10, 1, 30, 7, 52)
CONTENT = bytes(range(100))
WAIT_S = 60.0


class Telling:
    """A store that tells how far a read has come every few bytes, or never."""

    def __init__(self, content: bytes, step_bytes: int | None) -> None:
        self._content = content
        self._step_bytes = step_bytes

    def read_into(self, _name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
        buffer[:] = self._content[byte_offset : byte_offset + buffer.nbytes]
        if self._step_bytes is not None and on_filled is not None:
            for filled in range(self._step_bytes, buffer.nbytes, self._step_bytes):
                on_filled(filled)


def read_all(content: bytes, *, step_bytes: int | None, into: memoryview | None) -> bytes:
    """The last four extents of the file, as they were placed."""
    file = DataFile("f", len(CONTENT), LENGTHS, digests())
    placed: list[bytes] = []
    target = None if into is None else (lambda: nullcontext(into))
    read = Fetch(
        0,
        10,
        90,
        (),
        is_direct=False,
        target=target,
        place=lambda found: placed.append(bytes(found)),
        wanted_by=lambda *_: "x",
    )
    memory = range_reader.HostMemory()
    store = Telling(content, step_bytes)
    range_reader.run_fetches(store, "", [file], [read], threads=1, verify=True, scratch_bytes=1000, memory=memory)
    return placed[0]


def digests() -> list[int]:
    found, position = [], 0
    for length in LENGTHS:
        found.append(xxhash.xxh3_64_intdigest(CONTENT[position : position + length]))
        position += length
    return found


def test_scratch_memory_begins_a_page() -> None:
    pool = range_reader.HostMemory().new_buffers(2, (20 << 20) + 5)
    with pool.lend() as first, pool.lend() as second:
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (first, second)]
    assert [address % mmap.PAGESIZE for address in addresses] == [0, 0]


@pytest.mark.parametrize("step_bytes", [None, 1, 7, 31, 89, 1000])
@pytest.mark.parametrize("is_direct", [True, False])
def test_every_extent_is_verified_however_a_store_tells_how_far_it_has_come(
    step_bytes: int | None, is_direct: bool
) -> None:
    into = memoryview(bytearray(90)) if is_direct else None
    assert read_all(CONTENT, step_bytes=step_bytes, into=into) == CONTENT[10:]
    for position in range(10, 100):
        damaged = bytearray(CONTENT)
        damaged[position] ^= 1
        with pytest.raises(CheckpointCorruptError, match="damaged") as caught:
            read_all(bytes(damaged), step_bytes=step_bytes, into=into)
        assert caught.value.kind == "checksum"


class Meeting:
    """A store that does with each read, by its byte offset, what it is told to."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin = begin

    def read_into(self, _name: str, byte_offset: int, buffer: memoryview, **_: Any) -> None:
        self._begin(byte_offset)
        buffer[:] = CONTENT[byte_offset : byte_offset + buffer.nbytes]


def run_each(begin: Callable[[int], None], places: Sequence[Callable[[memoryview], None]], *, threads: int) -> None:
    """Reads of ten bytes each, from the begin of the file on."""
    file = DataFile("f", len(CONTENT))
    reads = [Fetch(0, 10 * number, 10, (), is_direct=False, place=place) for number, place in enumerate(places)]
    memory = range_reader.HostMemory()
    range_reader.run_fetches(
        Meeting(begin), "", [file], reads, threads=threads, verify=False, scratch_bytes=10_000, memory=memory
    )


def test_a_read_without_digests_asks_for_no_reports_on_the_way() -> None:
    asked: list[Any] = []

    class Noting(Telling):
        def read_into(self, _name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
            asked.append(on_filled)
            super().read_into(_name, byte_offset, buffer, on_filled=on_filled)

    for verify in (False, True):
        file = DataFile("f", len(CONTENT), LENGTHS, digests())
        read = Fetch(0, 0, 100, (), is_direct=False, place=len, wanted_by=lambda *_: "x")
        memory, store = range_reader.HostMemory(), Noting(CONTENT, 5)
        range_reader.run_fetches(store, "", [file], [read], threads=1, verify=verify, scratch_bytes=1000, memory=memory)
    assert [on_filled is None for on_filled in asked] == [True, False]


@pytest.mark.parametrize("gap_bytes", [0, 25_000])
def test_memory_for_gaps_is_a_part_of_the_scratch_memory(tmp_path: Path, gap_bytes: int) -> None:
    class Counting(range_reader.HostMemory):
        def new_buffers(self, num_buffers: int, byte_length: int) -> BufferPool:
            taken.append(num_buffers * byte_length)
            return super().new_buffers(num_buffers, byte_length)

    taken: list[int] = []
    content, threads = bytes(400_000), 4
    (tmp_path / "f").write_bytes(content)
    pieces = [memoryview(bytearray(gap_bytes)), memoryview(bytearray(100_000 - gap_bytes))]
    reads = [Fetch(0, first, 100_000, (), is_direct=False, place=len) for first in range(0, 300_000, 100_000)]
    reads.append(
        Fetch(0, 300_000, 100_000, (), is_direct=False, pieces=lambda: nullcontext(pieces), gap_bytes=gap_bytes)
    )
    range_reader.run_fetches(
        LocalStore(str(tmp_path), writer_threads=1),
        "",
        [DataFile("f", len(content))],
        reads,
        threads=threads,
        verify=False,
        scratch_bytes=400_000,
        memory=Counting(),
    )
    assert sum(taken) + threads * gap_bytes <= 400_000 + threads * range_reader.ALIGNMENT


def test_places_that_do_not_hold_the_bytes_of_a_read_are_refused_before_it(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    places = [memoryview(bytearray(b"-" * 50)), memoryview(bytearray(b"-" * 49))]
    file = DataFile("f", len(CONTENT), LENGTHS, digests())
    read = Fetch(
        0, 0, 100, (), is_direct=False, pieces=lambda: nullcontext(places), place=len, wanted_by=lambda *_: "x"
    )
    memory = range_reader.HostMemory()
    with pytest.raises(ValueError, match="100 bytes go into 99"):
        range_reader.run_fetches(
            LocalStore(str(tmp_path), writer_threads=1),
            "",
            [file],
            [read],
            threads=1,
            verify=True,
            scratch_bytes=1000,
            memory=memory,
        )
    assert b"".join(places) == b"-" * 99


@pytest.mark.parametrize("threads", [2, 4])
def test_as_many_reads_as_there_are_threads_are_in_flight(threads: int) -> None:
    together = threading.Barrier(threads, timeout=WAIT_S)
    placed: list[bytes] = []
    place = [lambda found: placed.append(bytes(found))] * (2 * threads)
    run_each(lambda _: together.wait() and None, place, threads=threads)
    assert sorted(placed) == [CONTENT[10 * number : 10 * number + 10] for number in range(2 * threads)]


def test_what_comes_first_is_placed_first_whatever_was_asked_for_before_it() -> None:
    is_second_placed = threading.Event()
    order: list[int] = []

    def begin(byte_offset: int) -> None:
        assert byte_offset or is_second_placed.wait(WAIT_S), "the first read is waited for before another one is placed"

    def place_second(_: memoryview) -> None:
        order.append(2)
        is_second_placed.set()

    run_each(begin, [lambda _: order.append(1), place_second], threads=2)
    assert order == [2, 1]


class Giving(Meeting):
    """One that has what is read in memory of its own."""

    def read_bytes(self, _name: str, byte_offset: int, byte_length: int) -> bytes:
        self._begin(byte_offset)
        return CONTENT[byte_offset : byte_offset + byte_length]


def test_what_waits_for_memory_does_not_read_after_another_read_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    asked, all_ask = [], threading.Event()
    take = range_reader.ByteBudget.take

    def take_told(budget: range_reader.ByteBudget, num_bytes: int) -> None:
        asked.append(num_bytes)
        if len(asked) == 4:
            all_ask.set()
        take(budget, num_bytes)

    def fail(byte_offset: int) -> None:
        begun.append(byte_offset)
        assert all_ask.wait(WAIT_S)
        raise OSError("gone")

    monkeypatch.setattr(range_reader.ByteBudget, "take", take_told)
    file = DataFile("f", len(CONTENT))
    reads = [Fetch(0, 25 * number, 25, (), is_direct=False, place=pytest.fail) for number in range(4)]
    memory = range_reader.HostMemory()
    with pytest.raises(OSError, match="gone"):
        range_reader.run_fetches(
            Giving(fail), "", [file], reads, threads=4, verify=False, scratch_bytes=1, memory=memory
        )
    assert len(begun) == 1


def test_of_several_damages_the_first_in_the_order_of_the_fetches_is_told() -> None:
    is_found = threading.Event()

    class Slow(Telling):
        """A store that gives what was asked for first after damage was found."""

        def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
            if byte_offset == 0:
                assert is_found.wait(WAIT_S)
            super().read_into(name, byte_offset, buffer, on_filled=on_filled)

    file = DataFile("f", len(CONTENT), LENGTHS, digests())
    starts = [0, *accumulate(LENGTHS)]
    reads = [
        Fetch(0, start, length, (), is_direct=False, wanted_by=lambda *_: "x")
        for start, length in zip(starts, LENGTHS, strict=False)
    ]
    memory, store = range_reader.HostMemory(), Slow(bytes(len(CONTENT)), None)
    with pytest.raises(CheckpointCorruptError, match=r"f: bytes 0 to 10 are damaged"):
        range_reader.run_fetches(
            store,
            "",
            [file],
            reads,
            threads=2,
            verify=True,
            scratch_bytes=1000,
            memory=memory,
            on_failure=is_found.set,
        )


def test_a_request_that_is_under_way_holds_no_scratch_memory() -> None:
    """Its bytes arrive in memory of the store's own: one buffer, to which they are copied, serves all threads."""
    threads = 4
    together = threading.Barrier(threads, timeout=WAIT_S)
    placed: list[bytes] = []
    file = DataFile("f", len(CONTENT))
    reads = [
        Fetch(0, 25 * number, 25, (), is_direct=False, place=lambda found: placed.append(bytes(found)))
        for number in range(threads)
    ]
    store, memory = Giving(lambda _: together.wait() and None), range_reader.HostMemory()
    range_reader.run_fetches(
        store, "", [file], reads, threads=threads, verify=False, scratch_bytes=25 * (threads + 2), memory=memory
    )
    assert sorted(placed) == [CONTENT[25 * number :][:25] for number in range(threads)]


@pytest.mark.parametrize("seed", range(40))
def test_damage_is_found_however_the_bytes_of_extents_come_in_pieces(seed: int) -> None:
    chosen = random.Random(seed)
    lengths = [chosen.choice((1, 2, 3, 7, 20, 50, 300)) for _ in range(chosen.randint(1, 8))]
    content = bytearray(chosen.randbytes(sum(lengths)))
    ends = [*accumulate(lengths)]
    digests = [xxhash.xxh3_64_intdigest(content[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    is_damaged, is_gap = chosen.random() < 0.5, chosen.random() < 0.2
    if is_damaged:
        content[chosen.randrange(len(content))] ^= 1
    cuts = sorted({0, len(content), *(chosen.randint(0, len(content)) for _ in range(chosen.randint(0, 30)))})
    pieces = [memoryview(content)[start:end] for start, end in pairwise(cuts)]
    fetch = Fetch(0, 0, len(content), (), is_direct=False, wanted_by=lambda *_: "" if is_gap else "w")
    check = range_reader._Check(range_reader._extents_of(DataFile("f", len(content), lengths, digests)), "f", fetch)
    while pieces:
        count = chosen.randint(1, 6)
        if count == 1:
            check.add(pieces[0])
        else:
            check.add_all(pieces[:count])
        del pieces[:count]
    with pytest.raises(CheckpointCorruptError) if is_damaged and not is_gap else nullcontext():
        check.raise_damage()


@pytest.mark.parametrize("seed", range(40))
def test_short_reads_into_many_places_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    content = chosen.randbytes(chosen.randint(0, 5000))
    (tmp_path / "x").write_bytes(content)
    monkeypatch.setattr(posix_files, "_CACHED_BYTES", chosen.choice((1, 10, 100, 1000)))
    monkeypatch.setattr(posix_files, "_MAX_BUFFERS", chosen.choice((1, 2, 5)))
    preadv = os.preadv

    def short(fd: int, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Reads less than it could, now and then, as a signal makes it."""
        if chosen.random() < 0.6:
            return preadv(fd, buffers, byte_offset)
        count = chosen.randint(1, len(buffers))
        *others, last = buffers[:count]
        return preadv(fd, [*others, last[: chosen.randint(1, len(last))]], byte_offset)

    monkeypatch.setattr(os, "preadv", short)
    start = chosen.randint(0, len(content))
    buffers = [memoryview(bytearray(chosen.randint(1, 200))) for _ in range(chosen.randint(0, 40))]
    filled: list[memoryview] = []
    with (tmp_path / "x").open("rb") as file:
        found = posix_files.read_pieces(file.fileno(), start, buffers, filled.extend)
    wanted = sum(map(len, buffers))
    assert found == min(wanted, len(content) - start)
    assert b"".join(buffers)[:found] == content[start : start + found]
    if found == wanted:
        assert filled == buffers
