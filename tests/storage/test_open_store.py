from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.errors import CheckpointMismatchError, StorageError, UnsafeCheckpointError
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import absolute_path, is_local, open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import full_location

from .store_contract import put


def _open(path, options=None):
    return open_store(path, storage_options=options, writer_threads=1)


def test_local_paths_and_file_urls(tmp_path):
    for path in (str(tmp_path), tmp_path, f"file://{tmp_path}", f"local://{tmp_path}", f"{tmp_path}/"):
        store = _open(path, {} if path is tmp_path else None)
        assert isinstance(store, LocalStore)
        assert str(store) == str(tmp_path)


def test_capitals_in_the_scheme_of_a_url_mean_the_same(tmp_path):
    assert str(_open(f"FILE://{tmp_path}")) == str(tmp_path)
    assert str(_open("Memory://A/b")) == "memory://A/b"
    assert str(_open("S3://Bucket/Key", S3_KEYS)) == "s3://Bucket/Key"


def test_a_local_url_with_capitals_in_its_scheme_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_local("FILE:///ckpt")
    assert absolute_path("FILE://ckpt") == absolute_path("file://ckpt") == str(tmp_path / "ckpt")


@pytest.mark.parametrize("url", ["memory://a/b", "simplecache::memory://a", "memory://"])
def test_urls(url):
    store = _open(url)
    assert isinstance(store, FsspecStore)
    assert str(store) == url


S3_KEYS = {"key": "access", "secret": "secret"}
ENDPOINTS = {
    "s3://b": [
        ({"endpoint_url": "http://MinIO.example:9000/"}, "minio.example:9000"),
        ({"client_kwargs": {"endpoint_url": "https://minio.example/s3"}}, "minio.example/s3"),
        ({"client_kwargs": {"region_name": "us-west-2"}}, ""),
        ({"client_kwargs": {"region_name": "cn-north-1"}}, ""),
        ({"endpoint_url": "https://bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com"}, ""),
    ],
    "memory://b": [
        (None, ""),
        ({"endpoint_url": "http://user:password@minio.example:9000/?token=x"}, "http://minio.example:9000"),
        ({"client_kwargs": {"endpoint_url": "http://minio.example"}}, "http://minio.example"),
        ({"account_name": "mine", "account_key": "secret"}, "mine"),
        ({"host": "files.example", "port": 22, "password": "secret"}, "files.example, 22"),
    ],
}


@pytest.mark.parametrize(
    ("url", "options", "endpoint"), [(url, *case) for url, cases in ENDPOINTS.items() for case in cases]
)
def test_a_place_is_its_url_and_whose_it_is(url, options, endpoint):
    store = _open(url, {**S3_KEYS, **options} if url.startswith("s3") else options)
    assert full_location(store, "step") == f"{url}/step" + (f" at {endpoint}" if endpoint else "")


def test_the_root_of_a_url():
    store = _open("memory://")
    put(store, "opening-test/x", b"1")
    assert store.list("opening-test") == {"x": 1}
    assert store.list("")["opening-test"] is None
    store.delete("opening-test/x")


def test_options_for_a_local_path_are_refused_without_showing_them(tmp_path):
    with pytest.raises(CheckpointMismatchError) as caught:
        _open(tmp_path, {"key": "hunter2"})
    assert isinstance(caught.value, ValueError)
    assert caught.value.kind == "conflict"
    assert "key" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("path", [Path("s3://bucket/x"), "s3:/bucket/x", Path("memory://x")])
def test_a_url_that_lost_a_slash_makes_no_local_folder(path):
    with pytest.raises(StorageError, match="lost a slash") as caught:
        _open(path)
    assert caught.value.kind == "unsupported"


def test_paths_that_merely_look_odd(tmp_path):
    assert isinstance(_open(f"{tmp_path}/s3:/x"), LocalStore)
    assert isinstance(_open(f"{tmp_path}/what:/x"), LocalStore)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_are_none(path):
    with pytest.raises((StorageError, UnsafeCheckpointError)):
        _open(path)


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("s3://b/x", "step_1", "m"), "s3://b/x/step_1/m"),
        (("memory://", "x"), "memory://x"),
        (("/", "x"), "/x"),
        (("/a/", "x"), "/a/x"),
        (("", "x"), "x"),
        (("x", "", "y"), "x/y"),
        (("", ""), ""),
    ],
)
def test_joining_names(parts, joined):
    assert join_name(*parts) == joined
