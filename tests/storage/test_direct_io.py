"""Writing past the page cache: which bytes go which way, and what happens where a file system does not take that."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.storage.backends import direct_io, posix_files
from bytecheckpoint.storage.backends.direct_io import MIN_DIRECT_BYTES, PAGE_BYTES
from bytecheckpoint.storage.backends.local_store import LocalStore

from .open_files import open_below
from .store_contract import StoreContract, blocks_of, get, pattern, put

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no O_DIRECT")

REFUSALS = [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EFAULT]
MiB = 1 << 20


def refuse_to_open(monkeypatch, number):
    real = os.open

    def open_(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)


def allow_to_open(monkeypatch):
    """The descriptors for direct writes. Where the file system refuses those, a plain one is opened in their place, so
    that the tests show the same on any file system.
    """
    real, direct = os.open, set()

    def open_(path, flags, *args, **kwargs):
        try:
            fd = real(path, flags, *args, **kwargs)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fd = real(path, flags & ~os.O_DIRECT, *args, **kwargs)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    monkeypatch.setattr(os, "open", open_)
    return direct


def refuse_to_write(monkeypatch, number, *, after=0):
    """Direct writes fail but for the first `after` of them."""
    direct, real, lock, count = allow_to_open(monkeypatch), os.pwritev, threading.Lock(), [0]

    def pwritev(fd, pieces, at):
        if fd in direct:
            with lock:
                count[0] += 1
                fails = count[0] > after
            if fails:
                raise OSError(number, os.strerror(number))
        return real(fd, pieces, at)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return count


@pytest.fixture
def writes(monkeypatch):
    """Every write: whether it was direct, its first byte and the one behind its last."""
    direct, real, calls = allow_to_open(monkeypatch), os.pwritev, []

    def pwritev(fd, pieces, at):
        count = real(fd, pieces, at)
        calls.append((fd in direct, at, at + count))
        return count

    monkeypatch.setattr(os, "pwritev", pwritev)
    return calls


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path), writer_threads=3)


class TestWhereDirectFilesCannotBeOpened(StoreContract):
    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        refuse_to_open(monkeypatch, errno.EINVAL)
        return LocalStore(str(tmp_path), writer_threads=3)


class TestWhereDirectWritesAreRefused(StoreContract):
    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        refuse_to_write(monkeypatch, errno.EINVAL, after=2)
        return LocalStore(str(tmp_path), writer_threads=3)


@pytest.mark.parametrize(
    ("num_bytes", "block_bytes", "shift"),
    [
        (2 * MiB, 1 * MiB, 0),
        (2 * MiB + 5, 1 * MiB, 0),
        (2 * MiB + 5, 1 * MiB, 512),
        (2 * MiB + 5, 100_000, 0),
        (2 * MiB + 5, 100_000, 2400),
        (2 * MiB, 4096, 0),
        (2 * MiB + 4095, 4608, 0),
        (MIN_DIRECT_BYTES, 1 * MiB, 0),
    ],
)
def test_no_page_is_written_both_ways(store, writes, num_bytes, block_bytes, shift):
    data = pattern(num_bytes)
    store.write("x", blocks_of(data, block_bytes=block_bytes, shift=shift), replace=False)
    assert get(store, "x", num_bytes) == data
    ways = {page: set() for page in range(-(-num_bytes // PAGE_BYTES))}
    for way, start, end in writes:
        for page in range(start // PAGE_BYTES, -(-end // PAGE_BYTES)):
            ways[page].add(way)
        assert not way or (start % PAGE_BYTES, end % PAGE_BYTES) == (0, 0)
    assert all(len(found) == 1 for found in ways.values())
    if shift == 0 and block_bytes % PAGE_BYTES == 0:
        assert sum(found == {True} for found in ways.values()) == num_bytes // PAGE_BYTES


def test_memory_that_is_aligned_as_the_file_is_goes_to_the_disk_directly(store, writes):
    """The block starts within a page, and so does its memory."""
    data = pattern(3 * MiB)
    first, second = blocks_of(data[:100])[0], blocks_of(data[100:], shift=100)[0]
    store.write("x", [first, second._replace(byte_offset=100)], replace=False)
    assert get(store, "x", len(data)) == data
    assert sorted(writes) == [(False, 0, 100), (False, 100, 4096), (True, 4096, 3 * MiB)]


def test_some_blocks_of_a_file_may_be_aligned_and_others_not(store, writes):
    data = pattern(4 * MiB + 9)
    aligned, other = (blocks_of(data, block_bytes=1 << 17, shift=shift) for shift in (0, 8))
    mixed = [pair[number % 2] for number, pair in enumerate(zip(aligned, other, strict=True))]
    store.write("x", mixed, replace=False)
    assert get(store, "x", len(data)) == data
    assert {(way, at // (1 << 17) % 2) for way, at, _ in writes} == {(True, 0), (False, 1), (False, 0)}


def test_a_small_file_goes_through_the_page_cache(store, writes, monkeypatch):
    monkeypatch.setattr(direct_io, "preallocate", lambda *_: 1 / 0)
    put(store, "x", pattern(MIN_DIRECT_BYTES - 1))
    assert [way for way, _, _ in writes] == [False]


@pytest.mark.parametrize("number", [*REFUSALS, errno.EACCES, errno.EMFILE])
def test_a_second_descriptor_that_is_not_to_be_had_is_no_error(store, monkeypatch, number):
    refuse_to_open(monkeypatch, number)
    data = pattern(2 * MiB + 3)
    put(store, "x", data)
    assert get(store, "x", len(data)) == data


def test_a_system_that_has_no_such_thing(store, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    data = pattern(2 * MiB + 3)
    put(store, "x", data)
    assert get(store, "x", len(data)) == data


@pytest.mark.parametrize("number", REFUSALS)
def test_a_direct_write_that_is_refused_goes_another_way(store, monkeypatch, number):
    count = refuse_to_write(monkeypatch, number)
    data = pattern(4 * MiB + 3)
    store.write("x", blocks_of(data, block_bytes=1 << 16), replace=False)
    assert get(store, "x", len(data)) == data
    assert 1 <= count[0] <= 3  # those of the threads that had begun; no more is tried in this file
    put(store, "y", data)
    assert count[0] <= 4


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, "storage"), (errno.ENOSPC, "no_space")])
def test_a_direct_write_that_fails_leaves_nothing(store, monkeypatch, tmp_path, number, kind):
    refuse_to_write(monkeypatch, number, after=3)
    with pytest.raises(CheckpointSaveError) as caught:
        store.write("x", blocks_of(pattern(4 * MiB), block_bytes=1 << 18), replace=False)
    assert caught.value.kind == kind
    assert os.listdir(tmp_path) == []
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("most", [0, 1, 511, 4096, 5000, 65536, 70_000])
def test_a_short_direct_write_goes_on(store, monkeypatch, most):
    direct, real = allow_to_open(monkeypatch), os.pwritev

    def pwritev(fd, pieces, at):
        if fd not in direct:
            return real(fd, pieces, at)
        count = min(most, pieces[0].nbytes)
        whole = -(-count // PAGE_BYTES) * PAGE_BYTES  # what lies behind a short write's end may be anything
        return min(count, real(fd, [pieces[0][:whole]], at)) if count else 0

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = pattern(2 * MiB + 7)
    store.write("x", blocks_of(data, block_bytes=1 << 19), replace=False)
    assert get(store, "x", len(data)) == data


def test_calls_are_kept_below_what_the_kernel_takes(store, writes, monkeypatch):
    monkeypatch.setattr(posix_files, "_MAX_CALL_BYTES", 1 << 18)
    put(store, "x", pattern(MiB))
    assert writes == [(True, at, at + (1 << 18)) for at in range(0, MiB, 1 << 18)]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_close_of_either_descriptor_fails_the_write(store, monkeypatch, tmp_path, failing):
    allow_to_open(monkeypatch)
    real, closed = os.close, []

    def close(fd):
        is_folder = os.path.isdir(f"/proc/self/fd/{fd}")
        real(fd)
        closed.append(is_folder)
        if closed.count(False) == failing and not is_folder:
            raise OSError(errno.EIO, "reported late")

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(CheckpointSaveError) as caught:
        put(store, "x", pattern(2 * MiB))
    monkeypatch.undo()
    assert caught.value.kind == "storage"
    assert os.listdir(tmp_path) == []
    assert open_below(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_is_found_before_any_block_is_entered(store, monkeypatch, tmp_path, number):
    _fake_fallocate(monkeypatch, number)
    with pytest.raises(CheckpointSaveError) as caught:
        store.write("x", [blocks_of(pattern(2 * MiB))[0]._replace(content=lambda: 1 / 0)], replace=False)
    assert caught.value.kind == "no_space"
    assert f"{2 * MiB} bytes are needed" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [None, *REFUSALS[:4], errno.ENODEV, errno.EINTR])
def test_without_preallocation_it_goes_on(store, monkeypatch, number):
    _fake_fallocate(monkeypatch, number)
    data = pattern(2 * MiB + 3)
    put(store, "x", data)
    assert get(store, "x", len(data)) == data


def _fake_fallocate(monkeypatch, number):
    """It fails with this number; with None, the C library does not have it."""

    def fallocate(*_args):
        ctypes.set_errno(number)
        return -1

    library = SimpleNamespace() if number is None else SimpleNamespace(fallocate=fallocate)
    monkeypatch.setattr(posix_files.ctypes, "CDLL", lambda *_args, **_kwargs: library)


def test_preallocation_takes_the_space_of_the_file_and_no_more(tmp_path):
    fd = os.open(tmp_path / "x", os.O_CREAT | os.O_WRONLY)
    try:
        posix_files.preallocate(fd, 2 * MiB + 1)
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if status.st_size == 0:
        pytest.skip("this file system cannot preallocate")
    assert status.st_size == 2 * MiB + 1
    assert 2 * MiB < status.st_blocks * 512 < 3 * MiB


def test_a_direct_write_leaves_nothing_in_the_page_cache(store, tmp_path):
    data = pattern(4 * MiB)
    put(store, "x", data)
    with (tmp_path / "x").open("rb") as file:
        if not _takes_direct_writes(tmp_path):
            pytest.skip("this file system has no O_DIRECT, or keeps its files in the page cache")
        assert _cached_pages(file, len(data)) == 0


def _takes_direct_writes(folder):
    if os.statvfs(folder).f_blocks == 0 or _filesystem_of(folder) not in {"ext4", "xfs"}:
        return False
    fd = os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.close(fd)
    return True


def _filesystem_of(folder):
    best = ("", "")
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, where, kind, *_ = line.split()
            if str(folder).startswith(where) and len(where) >= len(best[0]):
                best = (where, kind)
    return best[1]


def _cached_pages(file, num_bytes):
    num_pages = num_bytes // mmap.PAGESIZE
    states = (ctypes.c_ubyte * num_pages)()
    with mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        library = ctypes.CDLL(None, use_errno=True)
        result = library.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(num_bytes), states)
        del view
    assert result == 0, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in states)
