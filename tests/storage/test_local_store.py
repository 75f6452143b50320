from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from bytecheckpoint.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.backends import local_store as local_store_module
from bytecheckpoint.storage.backends import posix_files
from bytecheckpoint.storage.backends.local_store import LocalStore

from .open_files import open_below
from .store_contract import StoreContract, blocks_of, get, pattern, put

pytestmark = pytest.mark.usefixtures("synced")


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(str(tmp_path / "new" / "root"), writer_threads=3)


class TestLocalStoreWithoutHardLinks(StoreContract):
    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "link", _raising(errno.EOPNOTSUPP))
        return LocalStore(str(tmp_path), writer_threads=3)


def _raising(number):
    def call(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return call


def _failing_at(monkeypatch, name, number, *, call):
    """Makes the call number `call` of an os function fail; the others are real. Gives the list of all calls."""
    real, calls = getattr(os, name), []

    def wrapped(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, wrapped)
    return calls


def _everything(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "root"), writer_threads=2)


@pytest.fixture
def recorded(monkeypatch):
    """Every call that matters for durability, in order, with paths instead of descriptors."""
    events, paths = [], {}

    def record(name, describe):
        real = getattr(os, name)

        def wrapped(*args, **kwargs):
            result = real(*args, **kwargs)
            event = describe(result, *args)
            events.append((name, *event))
            return result

        monkeypatch.setattr(os, name, wrapped)

    def opened(fd, path, *_):
        paths[fd] = str(path)
        return (str(path),)

    record("open", opened)
    record("mkdir", lambda _, path, *_rest: (str(path),))
    record("pwritev", lambda _, fd, *_rest: (paths[fd],))
    record("fsync", lambda _, fd: (paths[fd],))
    record("link", lambda _, source, target: (source, target))
    record("rename", lambda _, source, target: (source, target))
    record("unlink", lambda _, path: (str(path),))
    return events


@pytest.mark.parametrize("replace", [False, True])
def test_order_that_survives_a_power_cut(store, recorded, tmp_path, replace):
    store.write("step/data/x", blocks_of(b"abcd" * 100, block_bytes=100), replace=replace)
    root = str(tmp_path / "root")
    temporary = next(path for name, path, *_ in recorded if name == "open" and ".tmp-" in path)
    assert os.path.dirname(temporary) == f"{root}/step/data"
    steps = [event for event in recorded if event[0] != "open"]
    publishing = (
        [("rename", temporary, f"{root}/step/data/x")]
        if replace
        else [("link", temporary, f"{root}/step/data/x"), ("unlink", temporary)]
    )
    assert steps == [
        ("mkdir", root),
        ("fsync", str(tmp_path)),
        ("mkdir", f"{root}/step"),
        ("fsync", root),
        ("mkdir", f"{root}/step/data"),
        ("fsync", f"{root}/step"),
        *[("pwritev", temporary)] * 4,
        ("fsync", temporary),
        *publishing,
        ("fsync", f"{root}/step/data"),
        ("fsync", f"{root}/step"),
        ("fsync", root),
        ("fsync", str(tmp_path)),
    ]


def test_a_large_file_is_durable_before_it_is_published(store, recorded):
    store.write("x", blocks_of(pattern((2 << 20) + 5), block_bytes=1 << 18), replace=False)
    names = [name for name, path, *_ in recorded if ".tmp-" in path]
    assert [name for name in names if name != "open"] == [*["pwritev"] * 9, "fsync", "link", "unlink"]


def test_deleting_is_durable_in_its_order(store, recorded, tmp_path):
    put(store, "step/manifest", b"m")
    recorded.clear()
    store.delete("step/manifest")
    root = str(tmp_path / "root")
    assert [event for event in recorded if event[0] != "open"] == [
        ("unlink", f"{root}/step/manifest"),
        ("fsync", f"{root}/step"),
    ]


@pytest.mark.parametrize(
    ("function", "number", "kind"),
    [
        ("pwritev", errno.EIO, "storage"),
        ("pwritev", errno.ENOSPC, "no_space"),
        ("pwritev", errno.EDQUOT, "no_space"),
        ("fsync", errno.EIO, "storage"),
        ("fsync", errno.ENOSPC, "no_space"),
        ("close", errno.EIO, "storage"),
        ("link", errno.EIO, "storage"),
        ("link", errno.ENOSPC, "no_space"),
    ],
)
def test_a_failing_call_fails_the_write_and_leaves_nothing(tmp_path, monkeypatch, function, number, kind):
    store = LocalStore(str(tmp_path), writer_threads=2)
    calls = _failing_at(monkeypatch, function, number, call=1)
    with pytest.raises(CheckpointSaveError) as caught:
        put(store, "x", b"data")
    monkeypatch.undo()
    assert caught.value.kind == kind
    assert caught.value.path == str(tmp_path / "x")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number
    assert _everything(tmp_path) == []
    assert len(calls) == 1  # a failed fsync above all is never tried again: the kernel has dropped the pages
    if function != "close":
        assert open_below(tmp_path) == []


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_any_failing_fsync_fails_the_write_and_leaves_nothing(tmp_path, monkeypatch, call):
    (tmp_path / "root" / "step").mkdir(parents=True)
    store = LocalStore(str(tmp_path / "root"), writer_threads=1)
    _failing_at(monkeypatch, "fsync", errno.EIO, call=call)
    with pytest.raises(CheckpointSaveError) as caught:
        put(store, "step/manifest", b"data")
    assert caught.value.kind == "storage"
    assert set(_everything(tmp_path)) <= {"root", "root/step"}


def test_a_failing_fsync_keeps_what_was_to_be_replaced(store, monkeypatch):
    put(store, "m", b"old")
    _failing_at(monkeypatch, "fsync", errno.EIO, call=1)
    with pytest.raises(CheckpointSaveError):
        put(store, "m", b"newer", replace=True)
    assert store.list("") == {"m": 3}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_fsync_after_a_replacement_says_that_it_may_be_there(store, monkeypatch, number):
    put(store, "a/b", b"old")
    monkeypatch.setattr(local_store_module, "sync_folder", _raising(number))
    with pytest.raises(CheckpointSaveError, match="it may have been published all the same"):
        put(store, "a/b", b"new", replace=True)
    assert get(store, "a/b", 3) == b"new"


def test_folders_that_cannot_be_synced_are_no_error(store, monkeypatch):
    real = os.fsync

    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "not supported")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    put(store, "a/x", b"1")
    assert store.list("a") == {"x": 1}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_permission_is_its_own_kind(store, monkeypatch, number):
    monkeypatch.setattr(os, "mkdir", _raising(number))
    with pytest.raises(StorageError) as caught:
        put(store, "x", b"1")
    assert caught.value.kind == "permission"


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, "permission"), (errno.EIO, "unavailable"), (errno.EMFILE, "unavailable")],
)
def test_reading_errors(store, monkeypatch, number, kind):
    put(store, "x", b"1")
    monkeypatch.setattr(os, "preadv", _raising(number))
    with pytest.raises(StorageError) as caught:
        get(store, "x", 1)
    assert caught.value.kind == kind
    assert ("ulimit" in str(caught.value)) == (number == errno.EMFILE)


def test_short_reads_and_writes_go_on(store, monkeypatch):
    data = pattern(10_000)
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, at: real_write(fd, [pieces[0][:7]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real_read(fd, [buffers[0][:13]], at))
    store.write("x", blocks_of(data, block_bytes=3_000), replace=False)
    assert get(store, "x", len(data)) == data


def test_short_reads_into_many_places_go_on(store, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
    data = pattern(10_000)
    put(store, "x", data)
    places = [memoryview(bytearray(length)) for length in (5, 7, 20, 900, 1)]
    store.read_pieces("x", 11, places, on_filled=lambda _: None)
    assert b"".join(places) == data[11 : 11 + 933]


def test_calls_are_kept_below_what_the_kernel_takes(store, monkeypatch):
    monkeypatch.setattr(posix_files, "_MAX_CALL_BYTES", 100)
    sizes = []
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, pieces, at: sizes.append(sum(map(len, pieces))) or real(fd, pieces, at)
    )
    data = pattern(1_010)
    store.write("x", blocks_of(data), replace=False)
    assert get(store, "x", len(data)) == data
    assert max(sizes) == 100


def test_offsets_beyond_2_gib(tmp_path):
    data = memoryview(bytearray(1))
    with (tmp_path / "big").open("wb") as file:  # of holes: it takes no space
        file.truncate((2 << 30) + 8192)
        file.seek((2 << 30) + 8191)
        file.write(b"z")
    store = LocalStore(str(tmp_path), writer_threads=1)
    store.read_into("big", (2 << 30) + 8191, data)
    assert bytes(data) == b"z"


def test_a_write_that_no_file_takes(store, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(CheckpointSaveError):
        put(store, "x", b"1")


def test_signals_during_a_write_do_no_harm(store):
    hits = []
    previous = signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        data = pattern(1 << 22)
        for number in range(5):
            store.write(f"x{number}", blocks_of(data, block_bytes=1 << 18), replace=False)
            assert get(store, f"x{number}", len(data)) == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits


def test_a_link_out_of_the_root_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "near").symlink_to(tmp_path / "root-not")  # its path starts with the root's, but is not in it
    store = LocalStore(str(root), writer_threads=1)
    for call in (
        lambda: get(store, "file", 6),
        lambda: get(store, "folder/secret", 6),
        lambda: get(store, "near", 6),
        lambda: put(store, "folder/new", b"x"),
        lambda: store.delete("folder/secret"),
        lambda: store.list("folder"),
    ):
        with pytest.raises(UnsafeCheckpointError) as caught:
            call()
        assert caught.value.kind == "path_escape"
    assert os.listdir(outside) == ["secret"]
    store.delete("file")
    assert (outside / "secret").exists()


def test_links_inside_the_root_and_a_root_that_is_a_link(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "root").symlink_to(real)
    store = LocalStore(str(tmp_path / "root"), writer_threads=1)
    put(store, "a/x", b"1")
    (real / "b").symlink_to("a")
    assert get(store, "b/x", 1) == b"1"
    assert store.list("b") == {"x": 1}


@pytest.mark.parametrize("target", ["nowhere", "link", "folder/x/below"])
def test_a_link_that_leads_to_nothing_is_not_listed(store, tmp_path, target):
    put(store, "folder/x", b"1")
    (tmp_path / "root" / "link").symlink_to(target)  # to nothing, to itself, to a name below a file
    assert store.list("") == {"folder": None}


def test_what_is_no_file_is_not_read(store, tmp_path):
    put(store, "folder/x", b"1")
    os.mkfifo(tmp_path / "root" / "pipe")  # opening it plainly would wait for ever
    for name in ("folder", "pipe"):
        with pytest.raises(CheckpointNotFoundError) as caught:
            get(store, name, 1)
        assert caught.value.kind == "missing_file"
    assert store.list("") == {"folder": None}


def test_a_folder_under_the_name_is_not_replaced(store):
    put(store, "m/x", b"1")
    with pytest.raises(CheckpointExistsError):
        put(store, "m", b"1")
    with pytest.raises(CheckpointSaveError) as caught:
        put(store, "m", b"1", replace=True)
    assert caught.value.kind == "storage"
    assert store.list("") == {"m": None}


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = LocalStore(str(tmp_path / "file" / "root"), writer_threads=1)
    with pytest.raises(CheckpointSaveError, match=f"{tmp_path}/file is a file"):
        put(store, "x", b"1")
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path}/file is a file"):
        store.list("step_00000001")


def test_temporary_files_are_hidden(store, tmp_path):
    put(store, "x", b"1")
    (tmp_path / "root" / ".tmp-0123").write_bytes(b"left by a dead process")
    assert store.list("") == {"x": 1}


def test_the_root_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = LocalStore("root", writer_threads=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    put(store, "x", b"1")
    assert (tmp_path / "root" / "x").exists()


def test_a_folder_that_a_delete_takes_in_between_is_made_again(store, monkeypatch, tmp_path):
    real, raced = os.open, []

    def open_(path, *args, **kwargs):
        if ".tmp-" in str(path) and not raced:
            raced.append(path)
            os.rmdir(os.path.dirname(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    put(store, "a/x", b"1")
    assert raced
    assert get(store, "a/x", 1) == b"1"


def test_a_folder_that_a_delete_takes_before_the_one_below_it_is_made_is_made_again(store, monkeypatch, tmp_path):
    real, raced = posix_files.sync_folder, []

    def sync_folder(folder):
        real(folder)
        if not raced and os.path.isdir(taken := os.path.join(folder, "step")):
            raced.append(taken)
            os.rmdir(taken)

    monkeypatch.setattr(posix_files, "sync_folder", sync_folder)
    put(store, "step/data/x", b"1")
    assert raced
    assert get(store, "step/data/x", 1) == b"1"


@pytest.mark.parametrize(
    "name", ["e" * 255, "\u00e9" * 127, "\U0001f600" * 63], ids=["1 byte each", "2 bytes each", "4 bytes each"]
)
def test_a_name_as_long_as_the_file_system_takes_is_written(store, name):
    put(store, f"folder/{name}", b"1")
    assert store.list("folder") == {name: 1}


def test_a_look_into_a_folder_outside_the_root_is_refused(store, tmp_path):
    put(store, "step/manifest.bcp", b"1")
    (tmp_path / "manifest.bcp").write_bytes(b"1")
    with pytest.raises(UnsafeCheckpointError):
        store.in_folders([".."], "manifest.bcp")
    assert store.in_folders(["step", ""], "manifest.bcp") == [True, False]


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [(os, "pwritev", errno.ENOSPC), (local_store_module, "sync_folder", errno.EIO)],
    ids=["data", "name that is not durable"],
)
def test_a_write_that_fails_leaves_no_empty_folders(store, monkeypatch, tmp_path, owner, name, code):
    put(store, "other", b"1")
    monkeypatch.setattr(owner, name, _raising(code))
    with pytest.raises(CheckpointSaveError):
        put(store, "step/data/x", b"1")
    assert os.listdir(tmp_path / "root") == ["other"]


def test_a_deletion_takes_the_folders_that_a_killed_one_left_empty(store, tmp_path):
    put(store, "other", b"1")
    (tmp_path / "root" / "step" / "metrics").mkdir(parents=True)
    store.delete_many(["step/metrics/x", "step/data/y", "other/z"])
    assert os.listdir(tmp_path / "root") == ["other"]


def test_a_write_that_may_not_make_its_second_folder_leaves_not_the_first(store, monkeypatch, tmp_path):
    put(store, "other", b"1")
    _failing_at(monkeypatch, "mkdir", errno.ENOSPC, call=2)
    with pytest.raises(CheckpointSaveError):
        put(store, "step/data/x", b"1")
    assert os.listdir(tmp_path / "root") == ["other"]


def test_a_write_that_is_not_permitted_leaves_an_empty_folder_that_was_there(store, monkeypatch, tmp_path):
    (tmp_path / "root" / "step").mkdir(parents=True)
    monkeypatch.setattr(os, "mkdir", _raising(errno.EACCES))
    with pytest.raises(StorageError):
        put(store, "step/data/x", b"1")
    assert os.listdir(tmp_path / "root") == ["step"]


def test_a_folder_that_others_take_while_it_is_empty_is_made_again(store, monkeypatch):
    real, left = os.mkdir, ["step", "data", "data"]

    def mkdir(path, *args):
        real(path, *args)
        if left and left[0] == os.path.basename(path):
            left.pop(0)
            os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    put(store, "step/data/x", b"1")
    assert not left
    assert get(store, "step/data/x", 1) == b"1"


def test_an_error_that_is_handled_meanwhile_is_not_the_reason_of_a_failed_write(store, monkeypatch):
    refused = RuntimeError("of another program")
    refused.code = 403
    monkeypatch.setattr(os, "pwritev", _raising(errno.EIO))
    try:
        raise refused
    except RuntimeError:
        with pytest.raises(CheckpointSaveError) as caught:
            put(store, "x", b"1")
    assert caught.value.kind == "storage"


def test_an_inventory_that_cannot_list_a_folder_names_it(store, monkeypatch, tmp_path):
    put(store, "step/data/x", b"1")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("data"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match="step/data") as caught:
        list(store.inventory("step/data"))
    assert caught.value.kind == "permission"


def test_an_inventory_names_folders_that_it_may_not_list_and_lists_the_others(store, monkeypatch, tmp_path):
    for name in ("lost+found/x", "step/data/x", "y"):
        put(store, name, b"1")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.warns(UserWarning, match="lost.found was not looked into: Permission denied"):
        assert sorted(name for name, *_ in store.inventory("")) == ["step/data/x", "y"]


@pytest.mark.parametrize("renameat2", [True, False])
def test_without_hard_links_a_taken_name_is_still_refused(tmp_path, monkeypatch, renameat2):
    monkeypatch.setattr(os, "link", _raising(errno.EPERM))
    if not renameat2:
        monkeypatch.setattr(posix_files, "_renameat2", lambda *_: False)
    store = LocalStore(str(tmp_path), writer_threads=1)

    def late() -> AbstractContextManager[memoryview]:
        (tmp_path / "x").write_bytes(b"other")
        return nullcontext(memoryview(b"mine"))

    with pytest.raises(CheckpointExistsError):
        store.write("x", [Block(0, 4, late)], replace=False)
    assert (tmp_path / "x").read_bytes() == b"other"
    put(store, "y", b"1")
    assert _everything(tmp_path) == ["x", "y"]


def test_a_link_whose_answer_was_lost_is_a_success(store, monkeypatch):
    real = os.link

    def link(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "sent again, found there")

    monkeypatch.setattr(os, "link", link)
    put(store, "x", b"1")
    assert store.list("") == {"x": 1}


def test_no_thread_writes_to_a_closed_descriptor(tmp_path):
    store = LocalStore(str(tmp_path), writer_threads=4)
    waiting, failed = threading.Semaphore(0), threading.Event()
    late = []

    @contextmanager
    def slow():
        yield memoryview(b"abcd")
        waiting.release()
        failed.wait()
        time.sleep(0.05)
        late.append(1)

    def fail():
        for _ in range(3):
            waiting.acquire()
        failed.set()
        raise KeyError("this block")

    blocks = [Block(4 * at, 4, fail if at == 3 else slow) for at in range(40)]
    with pytest.raises(KeyError):
        store.write("x", blocks, replace=False)
    assert len(late) == 3  # those that were entered; the others never are
    assert _everything(tmp_path) == []


def test_the_first_error_in_time_is_raised(tmp_path):
    store = LocalStore(str(tmp_path), writer_threads=2)
    second_is_entered, first_has_failed = threading.Event(), threading.Event()

    @contextmanager
    def slow():
        yield memoryview(b"abcd")
        second_is_entered.wait()
        first_has_failed.wait()
        time.sleep(0.05)
        raise KeyError("later")

    @contextmanager
    def fast():
        second_is_entered.set()
        yield memoryview(b"abcd")
        first_has_failed.set()
        raise IndexError("first")

    with pytest.raises(IndexError):
        store.write("x", [Block(0, 4, slow), Block(4, 4, fast)], replace=False)
    assert _everything(tmp_path) == []


_PRELUDE = """
import os, resource, signal, sys, threading, time, types
from contextlib import nullcontext
# Storage needs no torch, which takes seconds to import: a bare package stands in for the one that imports it.
sys.modules["bytecheckpoint"] = types.ModuleType("bytecheckpoint")
sys.modules["bytecheckpoint"].__path__ = [sys.argv[2]]
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.manifest.ranges import Block
store = LocalStore(sys.argv[1], writer_threads=2)
data = memoryview(bytes(range(256)) * 256)
def blocks(content=lambda: nullcontext(data), count=4):
    return [Block(at * data.nbytes, data.nbytes, content) for at in range(count)]
"""


def _run(script, folder):
    package = Path(__file__).parents[2] / "bytecheckpoint"
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(script), str(folder), str(package)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("count", [4, 32])
def test_a_limit_of_file_size_is_an_error_not_a_short_file(tmp_path, count):
    script = f"""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        store.write("x", blocks(count={count}), replace=False)
    except Exception as error:
        print(type(error).__name__, error.kind)
    """
    result = _run(script, tmp_path)
    assert result.stdout == "CheckpointSaveError storage\n", result.stderr
    assert _everything(tmp_path) == []


def test_a_limit_of_open_files_says_what_to_do(tmp_path):
    script = """
    soft = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    try:
        store.write("x", blocks(), replace=False)
    except Exception as error:
        print(type(error).__name__, error.kind, "ulimit" in str(error))
    """
    result = _run(script, tmp_path)
    assert result.stdout == "StorageError unavailable True\n", result.stderr


@pytest.mark.parametrize(
    ("moment", "visible"), [("pwritev", False), ("fsync", False), ("link", False), ("unlink", True)]
)
def test_a_kill_leaves_all_or_nothing_visible(tmp_path, moment, visible):
    script = f"""
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    os.{moment} = die
    store.write("x", blocks(), replace=False)
    """
    result = _run(script, tmp_path)
    assert result.returncode == -signal.SIGKILL, result.stderr
    store = LocalStore(str(tmp_path), writer_threads=1)
    assert store.list("") == ({"x": 4 * 65536} if visible else {})
    if not visible:
        put(store, "x", b"the next save")


def test_a_write_in_flight_when_the_interpreter_exits_ends_well(tmp_path):
    script = """
    def slow():
        time.sleep(0.05)
        return nullcontext(data)
    def write():
        time.sleep(0.2)  # the main thread is gone by then
        store.write("x", blocks(slow), replace=False)
    threading.Thread(target=write).start()
    """
    result = _run(script, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Error" not in result.stderr
    assert LocalStore(str(tmp_path), writer_threads=1).list("") == {"x": 4 * 65536}


@pytest.fixture
def mounted(tmp_path):
    """Mounts and afterwards unmounts. Skips where that is not allowed."""
    folders = []

    def mount(*arguments):
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        command = ["mount", *arguments, str(folder)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if result.returncode:
            pytest.skip(f"mounting is not allowed here: {result.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.privileged
@pytest.mark.parametrize("num_bytes", [1_000_003, 3_000_003])
def test_a_full_disk(mounted, num_bytes):
    """The larger file is refused before its first byte is written."""
    folder = mounted("-t", "tmpfs", "-o", "size=1m", "none")
    store = LocalStore(str(folder), writer_threads=2)
    put(store, "old", b"o" * 500_000)
    with pytest.raises(CheckpointSaveError) as caught:
        store.write("step/new", blocks_of(pattern(num_bytes), block_bytes=1 << 16), replace=False)
    assert caught.value.kind == "no_space"
    free_bytes = (1 << 20) - 500_000 // 4096 * 4096 - 4096
    assert f"{num_bytes} bytes are needed" in str(caught.value)
    assert f"{free_bytes} bytes were free" in str(caught.value)
    assert store.list("") == {"old": 500_000}
    assert store.list("step") == {}
    put(store, "step/small", b"fits again" * 1000)


@pytest.mark.privileged
@pytest.mark.parametrize("arguments", [("-t", "tmpfs", "-o", "size=0", "none"), ("-t", "ramfs", "none")])
def test_the_free_space_of_a_file_system_without_a_limit_is_unknown(mounted, arguments):
    assert LocalStore(str(mounted(*arguments) / "new"), writer_threads=1).free_bytes is None


@pytest.mark.privileged
def test_a_folder_that_is_mounted_read_only(mounted, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "x").write_bytes(b"readable")
    folder = mounted("-o", "bind,ro", str(source))
    store = LocalStore(str(folder), writer_threads=2)
    for call in (lambda: put(store, "y", b"1"), lambda: put(store, "new/y", b"1"), lambda: store.delete("x")):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.kind == "permission"
        assert str(folder) in caught.value.path
    assert get(store, "x", 8) == b"readable"


def test_a_file_system_without_inodes_is_told_from_one_without_space(tmp_path, monkeypatch):
    store, statvfs = LocalStore(str(tmp_path), writer_threads=1), os.statvfs

    def open_nothing(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    def without_inodes(path):
        fields = list(statvfs(path))
        fields[7] = 0  # f_favail
        return os.statvfs_result(fields)

    monkeypatch.setattr(local_store_module.os, "open", open_nothing)
    monkeypatch.setattr(local_store_module.os, "statvfs", without_inodes)
    with pytest.raises(CheckpointSaveError, match="no inodes left") as caught:
        put(store, "x", b"1")
    assert caught.value.kind == "no_space"


def test_files_and_folders_are_synced_to_the_disk_where_fsync_does_not_do_that(tmp_path, monkeypatch):
    """As on macOS, whose fsync leaves data in the cache of the drive."""
    full_sync, synced = 51, []

    def fcntl_call(fd, command):
        synced.append((stat.S_ISDIR(os.fstat(fd).st_mode), command))

    monkeypatch.setattr(posix_files.fcntl, "F_FULLFSYNC", full_sync, raising=False)
    monkeypatch.setattr(posix_files.fcntl, "fcntl", fcntl_call)
    monkeypatch.setattr(posix_files.os, "fsync", lambda _: pytest.fail("that is not enough"))
    put(LocalStore(str(tmp_path), writer_threads=1), "x", b"1")
    assert (False, full_sync) in synced
    assert (True, full_sync) in synced


def test_of_hundreds_of_objects_in_several_folders_each_is_deleted(tmp_path):
    store = LocalStore(str(tmp_path), writer_threads=1)
    names = [f"{folder}/{number}" for folder in ("a", "b/c") for number in range(150)]
    for name in (*names, "b/kept"):
        put(store, name, b"1")
    store.delete_many([*names, "b/c/never"])
    assert set(store.list("")) == {"b"}
    assert set(store.list("b")) == {"kept"}


def test_of_hundreds_of_deletions_one_that_fails_is_an_error(tmp_path):
    store = LocalStore(str(tmp_path), writer_threads=1)
    names = [f"a/{number}" for number in range(150)]
    for name in names:
        put(store, name, b"1")
    (tmp_path / "a" / "149").unlink()
    (tmp_path / "a" / "149").mkdir()
    with pytest.raises(StorageError, match="a/149"):
        store.delete_many(names)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_a_deletion_that_may_have_been_carried_out_does_not_promise_that_nothing_changed(store, monkeypatch, number):
    put(store, "a/x", b"1")
    monkeypatch.setattr(local_store_module, "sync_folder", _raising(number))
    with pytest.raises(StorageError, match="what was to be deleted may be gone"):
        store.delete("a/x")
    assert store.list("a") == {}


def test_a_look_into_a_folder_follows_no_link(tmp_path):
    store = LocalStore(str(tmp_path), writer_threads=1)
    put(store, "real/manifest.bcp", b"1")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "manifest.bcp").symlink_to(tmp_path / "real" / "manifest.bcp")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert store.in_folders(["real", "linked", "link"], "manifest.bcp") == [True, None, None]
