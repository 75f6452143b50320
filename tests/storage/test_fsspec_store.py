from __future__ import annotations

import errno
import gc
import logging
import shutil
import traceback
import uuid
import warnings
from contextlib import contextmanager, nullcontext

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
)
from bytecheckpoint.storage.backends import fsspec_upload
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore
from bytecheckpoint.storage.store import SupportsReadBytes

from .s3_server import running_s3
from .store_contract import StoreContract, blocks_of, get, pattern, put

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries

SECRET = "s3cr3t/of+nobody"


@pytest.fixture
def memory_url():
    url = f"memory://test-{uuid.uuid4().hex}"
    yield url
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="module")
def s3_of_module():
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(s3_of_module):
    s3_of_module.objects.clear()
    s3_of_module.uploads.clear()
    s3_of_module.requests.clear()
    s3_of_module.lose_answers_to = s3_of_module.refuse = None
    return s3_of_module


def _s3_options(server):
    return {
        "key": "access",
        "secret": SECRET,
        "endpoint_url": server.url,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }


@pytest.fixture
def s3_store(s3):
    return FsspecStore("s3://bucket/runs/one", _s3_options(s3))


@pytest.fixture
def small_uploads(monkeypatch):
    """Multipart uploads from 1 byte on, in parts of S3's least size."""
    monkeypatch.setattr(fsspec_upload, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(fsspec_upload, "_part_bytes", lambda _: 5 << 20)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self, memory_url):
        return FsspecStore(memory_url, None)


class TestStoreOfUnknownBackend(StoreContract):
    """Any file system class that someone registers: here one that is memory without being MemoryFileSystem."""

    @pytest.fixture
    def store(self, memory_url):
        store = FsspecStore(memory_url.replace("memory://", "bcpunknown://"), None)
        yield store
        _Unknown.store.clear()

    @pytest.mark.skip(reason="such a backend looks before it writes, and no more")
    def test_of_many_writers_of_a_name_one_wins(self):
        pass


class _Unknown(MemoryFileSystem):
    protocol = "bcpunknown"
    store: dict = {}  # noqa: RUF012 - fsspec's own way
    pseudo_dirs = [""]  # noqa: RUF012 - fsspec's own way


fsspec.register_implementation("bcpunknown", _Unknown, clobber=True)


class TestFileSystemThatMoves(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return FsspecStore(f"file://{tmp_path}/new/root", None)

    @pytest.mark.skip(reason="a move replaces: two writers at once may both succeed")
    def test_of_many_writers_of_a_name_one_wins(self):
        pass

    def test_deleting(self, tmp_path):
        """Unlike elsewhere, folders stay when their last file goes."""
        store = FsspecStore(f"file://{tmp_path}", None)
        put(store, "a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        assert store.list("a") == {}

    def test_what_is_not_finished_is_not_listed(self, store, tmp_path):
        put(store, "x", b"1")
        (tmp_path / "new" / "root" / ".tmp-123").write_bytes(b"")
        assert store.list("") == {"x": 1}


def test_bytes_in_memory_of_the_store_are_those_asked_for_or_an_error(memory_url):
    store = FsspecStore(memory_url, None)
    put(store, "x", pattern(100))
    assert isinstance(store, SupportsReadBytes)
    assert store.read_bytes("x", 7, 50) == pattern(100)[7:57]
    assert store.read_bytes("x", 0, 0) == b""
    with pytest.raises(CheckpointCorruptError, match="ends at byte 100") as caught:
        store.read_bytes("x", 90, 20)
    assert caught.value.kind == "truncated"
    with pytest.raises(CheckpointNotFoundError):
        store.read_bytes("y", 0, 1)


def test_an_object_that_was_cut_short_is_damaged_though_a_listing_is_remembered(memory_url, monkeypatch):
    """Of backends, many remember sizes, and many have an error of their own for a range behind the end."""
    store, ask, read = FsspecStore(memory_url, None), MemoryFileSystem.info, MemoryFileSystem.cat_file
    put(store, "x", pattern(10))
    remembered = {"size": 100}

    def info(fs, path, **kwargs):
        return {**ask(fs, path, **kwargs), **remembered}

    def cat_file(fs, path, start=None, end=None, **kwargs):
        if start is not None and start >= ask(fs, path)["size"]:
            raise OSError(errno.EINVAL, "the range is behind the end", path)
        return read(fs, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda *_: remembered.clear())
    with pytest.raises(CheckpointCorruptError, match="ends at byte 10") as caught:
        get(store, "x", 20, 50)
    assert caught.value.kind == "truncated"


class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, s3_store):
        return s3_store


@pytest.mark.usefixtures("small_uploads")
class TestS3StoreWithMultipartUploads(StoreContract):
    @pytest.fixture
    def store(self, s3_store):
        return s3_store

    @pytest.fixture(autouse=True)
    def no_upload_is_left(self, s3):
        yield
        assert s3.uploads == {}


@pytest.mark.usefixtures("small_uploads")
def test_many_parts(s3, s3_store):
    data = pattern((12 << 20) + 5)
    s3_store.write("x", blocks_of(data, block_bytes=3 << 20), replace=False)
    assert s3.objects == {"bucket/runs/one/x": data}
    assert sum("partNumber" in request for request in s3.requests) >= 2


@pytest.mark.usefixtures("small_uploads")
@pytest.mark.parametrize("num_bytes", [100, 6 << 20])
def test_a_block_that_fails_in_mid_upload_publishes_nothing_ever(s3, s3_store, num_bytes):
    blocks = blocks_of(pattern(2 * num_bytes), block_bytes=num_bytes)
    blocks[1] = blocks[1]._replace(content=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        s3_store.write("x", blocks, replace=False)
    gc.collect()  # a file object's finalizer completes the upload of what it has
    assert s3.objects == {}
    assert s3.uploads == {}


@pytest.mark.usefixtures("small_uploads")
def test_a_part_that_fails_publishes_nothing_ever(s3, s3_store):
    s3.refuse = ("partNumber", 403, "AccessDenied")
    with pytest.raises(StorageError) as caught:
        put(s3_store, "x", pattern(6 << 20))
    assert caught.value.kind == "permission"
    s3.refuse = None
    del caught
    gc.collect()
    assert s3.objects == {}
    assert s3.uploads == {}


@pytest.mark.usefixtures("small_uploads")
def test_a_block_is_left_before_the_error_of_the_backend_is_raised(s3, s3_store):
    s3.refuse = ("partNumber", 403, "AccessDenied")
    block, open_blocks = blocks_of(pattern(6 << 20))[0], []

    @contextmanager
    def content():
        open_blocks.append(block)
        with block.content() as view:
            try:
                yield view
            finally:
                open_blocks.remove(block)

    with pytest.raises(StorageError):
        s3_store.write("x", [block._replace(content=content)], replace=False)
    assert open_blocks == []


@pytest.mark.parametrize("replace", [False, True])
def test_an_answer_that_is_lost_is_a_success(s3, s3_store, replace):
    s3.lose_answers_to = "PUT /bucket/runs/one/manifest"
    put(s3_store, "manifest", b"mine", replace=replace)
    assert s3.lose_answers_to is None
    assert s3.objects == {"bucket/runs/one/manifest": b"mine"}


@pytest.mark.usefixtures("small_uploads")
def test_a_completed_upload_whose_answer_is_lost_is_a_success(s3, s3_store):
    s3.lose_answers_to = r"POST /bucket/runs/one/x\?uploadId"
    data = pattern(11 << 20)
    put(s3_store, "x", data)
    assert s3.lose_answers_to is None
    assert s3.objects == {"bucket/runs/one/x": data}


def test_losing_to_another_writer_is_told_from_a_lost_answer(s3, s3_store):
    def late():
        s3.objects["bucket/runs/one/m"] = b"theirs"
        return nullcontext(memoryview(b"mine!!"))

    block = blocks_of(b"mine!!")[0]._replace(content=late)
    with pytest.raises(CheckpointExistsError):
        s3_store.write("m", [block], replace=False)
    assert s3.objects == {"bucket/runs/one/m": b"theirs"}


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_an_answer_that_is_lost_with_looks_for_it_is_no_other_writer(monkeypatch, num_lost):
    store = FsspecStore(f"memory://lost-{uuid.uuid4().hex}", None)
    look, send = MemoryFileSystem.info, fsspec_upload._put
    sent, lost = [], []

    def failing_look(fs, path, **kwargs):
        if sent and len(lost) < num_lost:
            lost.append(path)
            raise TimeoutError
        return look(fs, path, **kwargs)

    def unanswered(fs, upload, data):
        send(fs, upload, data)
        sent.append(upload)
        raise ConnectionResetError

    monkeypatch.setattr(MemoryFileSystem, "info", failing_look)
    monkeypatch.setattr(fsspec_upload, "_put", unanswered)
    if num_lost == 1:
        put(store, "x", b"mine")
    else:
        with pytest.raises(CheckpointSaveError, match="it may have been published all the same") as caught:
            put(store, "x", b"mine")
        assert caught.value.kind == "storage"
        assert isinstance(caught.value.__cause__, ConnectionResetError)
    assert len(lost) == num_lost
    assert store.read_whole("x", max_bytes=10) == b"mine"


def test_a_server_without_conditional_writes_is_still_written_to(s3, s3_store, monkeypatch):
    real, refused = type(s3_store._fs).pipe_file, []

    def pipe_file(self, path, data, **kwargs):
        if kwargs.get("mode") == "create":
            refused.append(path)
            raise OSError(errno.ENOSYS, "NotImplemented")
        return real(self, path, data, **kwargs)

    monkeypatch.setattr(s3_store._fs, "pipe_file", pipe_file.__get__(s3_store._fs))
    put(s3_store, "x", b"1")
    assert refused
    assert s3_store.list("") == {"x": 1}


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(403, "AccessDenied", "permission"), (400, "InvalidRequest", "unavailable")]
)
def test_refused_reads_are_typed(s3, s3_store, status, code, kind):
    put(s3_store, "x", b"1")
    s3.refuse = ("", status, code)
    for call in (lambda: get(s3_store, "x", 1), lambda: s3_store.list("")):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.kind == kind
        assert caught.value.path.startswith("s3://bucket/runs/one")


def test_a_bucket_that_does_not_exist(s3):
    store = FsspecStore("s3://nobucket/x", _s3_options(s3))
    assert store.list("") == {}
    with pytest.raises(CheckpointSaveError) as caught:
        put(store, "m", b"1")
    assert caught.value.kind == "storage"
    assert "NoSuchBucket" in str(caught.value)


def test_an_object_that_marks_a_folder_is_no_entry(s3, s3_store):
    s3.objects["bucket/runs/one/"] = b""
    s3.objects["bucket/runs/one/step/"] = b""
    assert s3_store.list("") == {"step": None}
    assert s3_store.list("step") == {}


def test_what_others_wrote_is_seen_at_once(s3, s3_store):
    assert s3_store.list("step") == {}
    put(s3_store, "step/a", b"1")
    assert s3_store.list("step") == {"a": 1}
    s3.objects["bucket/runs/one/step/b"] = b"22"
    assert s3_store.list("step") == {"a": 1, "b": 2}
    with pytest.raises(CheckpointExistsError):
        put(s3_store, "step/b", b"22")


def test_credentials_never_show(s3, caplog):
    caplog.set_level(logging.DEBUG, logger="bytecheckpoint")
    options = {**_s3_options(s3), "endpoint_url": "http://127.0.0.1:9"}  # nobody listens there
    store = FsspecStore("s3://bucket/x", {**options, "config_kwargs": {"retries": {"max_attempts": 0}}})
    store._fs.retries = 1
    for call in (lambda: put(store, "m", b"1"), lambda: store.list("")):
        with pytest.raises(StorageError) as caught:
            call()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in caplog.text


class _Broken(AbstractFileSystem):
    """A backend that repeats what it was given and whose errors are no OSError."""

    protocol = "bcpbroken"

    class ClientError(Exception):
        pass

    def ls(self, path, **_kwargs):
        raise self.ClientError(f"{self.storage_options['password']} was refused for {path}")

    info = cat_file = ls

    def rm_file(self, _path):
        raise self.ClientError("no reason")


fsspec.register_implementation("bcpbroken", _Broken, clobber=True)


def test_errors_of_client_libraries_are_translated_and_their_secrets_cut_off():
    url = "bcpbroken://joe:hunter2@host/path?token=t0k3n"
    store = FsspecStore(url, {"password": "pa$$word", "nested": {"deep": b"d33p"}})
    assert str(store) == "bcpbroken://host/path"
    for call in (lambda: store.list(""), lambda: get(store, "x", 1), lambda: put(store, "x", b"1")):
        with pytest.raises(StorageError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value))
        assert caught.value.kind == "unavailable"
        assert "ClientError" in str(caught.value)
        for secret in ("pa$$word", "hunter2", "t0k3n", "d33p"):
            assert secret not in shown
    with pytest.raises(StorageError, match="no reason") as caught:
        store.delete("x")
    assert isinstance(caught.value.__cause__, _Broken.ClientError)


def _caused_by(cause):
    error = RuntimeError("Failed to upload block")
    error.__cause__ = cause
    return error


def _answer(name, status):
    error = type("HttpError", (Exception,), {})("an answer")
    setattr(error, name, status)
    return error


class _AiohttpError(Exception):
    status = 503

    @property
    def code(self):
        warnings.warn("code property is deprecated, use status instead", DeprecationWarning, stacklevel=2)
        return self.status


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (_answer("status_code", 403), True),  # azure.core
        (_AiohttpError(), False),
        (_caused_by(_answer("status_code", 403)), True),  # adlfs, of a block
        (_answer("code", 401), True),  # gcsfs
        (OSError("Forbidden: b/run\njoe does not have storage.objects.get access"), True),  # gcsfs
        (_answer("status", 403), True),  # aiohttp, of http://
        (_answer("status", 503), False),
        (_answer("code", lambda: 403), False),
    ],
)
def test_refusals_of_every_client_library_are_of_one_kind(memory_url, monkeypatch, error, is_refusal):
    def refused(*_, **__):
        raise error

    for name in ("cat_file", "pipe_file", "rm_file"):
        monkeypatch.setattr(_Unknown, name, refused)
    store = FsspecStore(memory_url.replace("memory", "bcpunknown"), None)
    for call in (lambda: get(store, "x", 1), lambda: put(store, "x", b"1"), lambda: store.delete("x")):
        with pytest.raises((StorageError, CheckpointSaveError)) as caught:
            call()
        assert (caught.value.kind == "permission") == is_refusal


class _UploadFile(AbstractBufferedFile):
    def _initiate_upload(self):
        self.fs.begun += 1

    def _upload_chunk(self, final=False):
        if self.fs.fail:
            raise OSError(errno.EIO, "cut off")
        if final:
            self.fs.published.append(self.path)
        return True

    def discard(self):
        self.fs.discarded += 1
        raise ConnectionError("discarding fails too")


class _Multipart(AbstractFileSystem):
    protocol = "oss"
    cachable = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.begun = self.discarded = 0
        self.published = []
        self.fail = False

    def info(self, path, **_kwargs):
        raise FileNotFoundError(path)

    def _open(self, path, mode="rb", block_size=None, **_kwargs):
        return _UploadFile(self, path, mode, block_size=block_size)


@pytest.mark.usefixtures("small_uploads")
@pytest.mark.parametrize("failing", ["content", "upload"])
def test_a_file_that_cannot_even_be_discarded_is_not_finished_by_its_finalizer(monkeypatch, failing):
    monkeypatch.setitem(_registry, "oss", _Multipart)
    store = FsspecStore("oss://bucket/x", None)
    fs = store._fs
    blocks = blocks_of(pattern(11 << 20), block_bytes=6 << 20)
    fs.fail = failing == "upload"
    if failing == "content":
        blocks[1] = blocks[1]._replace(content=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError if failing == "content" else CheckpointSaveError) as caught:
        store.write("x", blocks, replace=False)
    fs.fail = False
    del caught
    gc.collect()
    assert (fs.begun, fs.discarded, fs.published) == (1, 1, [])


@pytest.mark.parametrize("url", ["nosuchthing://x/y", "simplecache::nosuchthing://x"])
def test_unknown_protocols(url):
    with pytest.raises(StorageError, match="pip install") as caught:
        FsspecStore(url, None)
    assert caught.value.kind == "unsupported"


def test_a_backend_that_is_not_installed_names_its_package(monkeypatch):
    monkeypatch.setitem(known_implementations, "gs", {"class": "no_such_gcsfs.F", "err": "gcsfs, please"})
    monkeypatch.delitem(_registry, "gs", raising=False)
    with pytest.raises(StorageError, match=r"pip install 'bytecheckpoint\[gcs\]'") as caught:
        FsspecStore("gs://bucket/x", None)
    assert caught.value.kind == "unsupported"


def test_options_that_a_backend_does_not_take():
    with pytest.raises(StorageError) as caught:
        FsspecStore("s3://bucket/x", {"key": "a", "username": "b"})
    assert caught.value.kind == "unavailable"


def test_chained_urls(memory_url, tmp_path):
    put(FsspecStore(memory_url, None), "x", b"1")
    store = FsspecStore(f"simplecache::{memory_url}", {"simplecache": {"cache_storage": str(tmp_path)}})
    assert get(store, "x", 1) == b"1"


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("inner", ["", "run"])
def test_a_root_in_an_archive_whose_path_has_no_protocol_is_read(tmp_path, kind, inner):
    bcp.save(tmp_path / "in" / inner, {"w": torch.ones(3)}, step=5)
    archive = shutil.make_archive(str(tmp_path / "packed"), kind, tmp_path / "in", inner or "step_00000005")
    assert bcp.steps(f"{kind}://{inner}::{archive}") == [5]
    assert bcp.load_tree(f"{kind}://{inner}::{archive}")["w"].tolist() == [1, 1, 1]
    with pytest.raises(StorageError, match="No such file") as caught:
        bcp.steps(f"{kind}://::{archive}.gone")
    assert caught.value.kind == "unavailable"


def test_many_folders_of_memory_are_listed_in_one_pass(memory_url, monkeypatch):
    store = FsspecStore(memory_url, None)
    for step in range(20):
        put(store, f"step_{step}/manifest.bcp", b"12")
        put(store, f"step_{step}/data/x", b"1")
    passes = []
    for name in ("find", "ls"):
        real = getattr(MemoryFileSystem, name)
        monkeypatch.setattr(
            MemoryFileSystem,
            name,
            lambda self, *args, real=real, **given: passes.append(1) or real(self, *args, **given),
        )
    folders = [f"step_{step}" for step in range(20)]
    assert store.list_many(folders) == [{"manifest.bcp": 2, "data": None}] * 20
    assert len(passes) == 1


def test_a_store_that_refuses_deletions_alone_is_writable(memory_url, monkeypatch):
    def refuse(_self, path):
        raise PermissionError(13, "deletions are denied", path)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    monkeypatch.setattr(MemoryFileSystem, "_rm", refuse)
    store = FsspecStore(memory_url, None)
    with pytest.warns(UserWarning, match="-writable, .* stays, because deleting is not allowed"):
        store.check_writable()
    put(store, "x", b"1")
    assert store.list("") == {"x": 1}
