"""The contract of a store on HDFS over WebHDFS, and overwriting saves there."""

from __future__ import annotations

import uuid
from contextlib import nullcontext

import pytest
import torch
from faults.seams import Seam, before, raising

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointExistsError, CheckpointSaveError, StorageError
from bytecheckpoint.saving import local_stage as local_stage_module
from bytecheckpoint.saving import recover as recover_module
from bytecheckpoint.staging import file_image
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore

from .store_contract import StoreContract, blocks_of, get, put
from .webhdfs_server import running_webhdfs

OVERWRITING = bcp.SaveOptions(overwrite=True)


@pytest.fixture(scope="module")
def server_of_module():
    with running_webhdfs() as server:
        yield server


@pytest.fixture
def server(server_of_module):
    server_of_module.knows_overwrite = True
    return server_of_module


@pytest.fixture
def url(server):
    return f"{server.url}/root-{uuid.uuid4().hex}"


def _values(path: str) -> list[float]:
    return bcp.open(path)["w"][:].unique().tolist()


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), value)}


class TestWebHdfsStore(StoreContract):
    @pytest.fixture
    def store(self, url):
        return FsspecStore(f"{url}/new", None)

    @pytest.mark.parametrize(("num_bytes", "block_bytes"), [(1, 4096), (100_003, 5000), ((2 << 20) + 5, 1 << 19)])
    def test_blocks_land_in_order(self, store, num_bytes, block_bytes):
        super().test_blocks_land_in_order(store, num_bytes, block_bytes, 0)

    def test_deleting(self, store):
        """Unlike elsewhere, folders stay when their last file goes."""
        put(store, "a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/was")
        assert store.list("a") == {}


def test_a_writer_that_loses_a_race_hears_of_it(url):
    store = FsspecStore(url, None)

    def late():
        put(store, "m", b"theirs")
        return nullcontext(memoryview(b"mine!!"))

    block = blocks_of(b"mine!!")[0]._replace(content=late)
    with pytest.raises(CheckpointExistsError):
        store.write("m", [block], replace=False)
    assert get(store, "m", 6) == b"theirs"


def test_an_overwriting_save_replaces_the_checkpoint(url):
    bcp.save(url, _state(1.0))
    info = bcp.save(url, _state(2.0), options=OVERWRITING).result()
    assert bcp.open(url).info.save_id == info.save_id
    assert _values(url) == [2.0]


def test_a_server_that_cannot_replace_keeps_what_stands_and_the_save_says_so(url, server):
    bcp.save(url, _state(1.0))
    server.knows_overwrite = False
    with pytest.raises(CheckpointSaveError) as raised:
        bcp.save(url, _state(2.0), options=OVERWRITING)
    assert raised.value.kind == "storage"
    assert "cannot replace" in str(raised.value)
    assert _values(url) == [1.0]
    root = url.rpartition("/")[2]  # other tests share the server
    assert not [name for name in server.files if root in name and ".tmp-" in name]


@pytest.mark.parametrize("protocol", ["hdfs", "arrow_hdfs", "smb", "ftp", "dbfs"])
def test_overwriting_is_refused_by_name_where_a_store_cannot_replace_in_one_step(url, monkeypatch, protocol):
    bcp.save(url, _state(1.0))
    monkeypatch.setattr("fsspec.implementations.webhdfs.WebHDFS.protocol", (protocol,))
    monkeypatch.setattr(file_image.LiveFile, "gather", lambda *_: pytest.fail("it was staged"))
    with pytest.raises(StorageError, match=protocol) as raised:
        bcp.save(url, _state(2.0), options=OVERWRITING)
    assert raised.value.kind == "unsupported"
    assert _values(url) == [1.0]


def test_a_recovery_that_failed_is_done_again_where_a_store_cannot_replace(url, monkeypatch, tmp_path):
    """Its first attempt has left the object that says that the save is being finished."""
    monkeypatch.setattr("fsspec.implementations.webhdfs.WebHDFS.protocol", ("hdfs",))
    options = bcp.SaveOptions(local_stage=tmp_path)
    gone = raising(StorageError("gone", kind="unavailable"))
    with before(Seam(local_stage_module, "upload_files"), gone), pytest.raises(StorageError):
        bcp.save(url, _state(1.0), options=options)
    with before(Seam(recover_module, "upload_files"), gone), pytest.raises(StorageError, match="gone"):
        bcp.recover(url, options=options)
    (save,) = bcp.recover(url, options=options)
    assert save.outcome == "committed"
    assert _values(url) == [1.0]
