from __future__ import annotations

import os
import tempfile
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manifest import DataFile, Manifest, encode_manifest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.deletion import discard, files_of_checkpoint
from bytecheckpoint.storage.layout import (
    MANIFEST_NAME,
    check_files,
    commit,
    committed_steps,
    data_file_name,
    data_files_of,
    find_checkpoint,
    newest_steps,
    parse_step,
    read_manifest,
    read_manifest_bytes,
    step_folder,
    steps_below,
)

from .faulty_store import Fault, FaultyStore, unavailable
from .store_contract import put


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "local":
        yield LocalStore(str(tmp_path), writer_threads=1)
        return
    yield FsspecStore(f"memory://layout-{uuid.uuid4().hex}", None)
    MemoryFileSystem.store.clear()


def _commit(store, step, **fields):
    folder = "" if step is None else step_folder(step)
    commit(store, folder, encode_manifest(Manifest(save_id="abc", step=step, **fields)), replace=False)


def _not_found(store, step):
    with pytest.raises(CheckpointNotFoundError) as caught:
        find_checkpoint(store, step, location="HERE")
    assert "HERE" in str(caught.value)
    assert caught.value.path == "HERE"
    return caught.value


@given(st.integers(0, 10**30))
def test_a_step_survives_its_name(step):
    assert parse_step(step_folder(step)) == step


def test_names_of_steps():
    assert step_folder(1000) == "step_00001000"
    assert step_folder(123_456_789) == "step_123456789"
    with pytest.raises(ValueError):
        step_folder(-1)
    odd = ["step_1", "step_0000100", "step_000001000", "step_-0001000", "xstep_00001000", "step_00001000 ", "step_"]
    for name in [*odd, "step_00001000\n", "step_٠٠٠٠١٠٠٠", "Step_00001000", "step_0000_1000", "step_" + "9" * 5000]:
        assert parse_step(name) is None


def test_names_of_data_files():
    assert data_file_name("5f1e", 3, 0) == "data/5f1e-00003-0.safetensors"


def test_the_latest_step_is_the_newest_that_is_committed(store):
    assert next(newest_steps(store), None) is None
    assert committed_steps(store) == []
    for step in (200, 1000, 30):
        _commit(store, step)
    put(store, "step_00002000/data/x", b"its save did not finish")
    put(store, "step_99999999", b"a file with the name of a step")
    put(store, "step_00003000/manifest.bcp/x", b"a folder with the name of a manifest")
    put(store, "step_5/manifest.bcp", b"no folder of ours")
    put(store, "other/manifest.bcp", b"nor this")
    assert committed_steps(store) == [30, 200, 1000]
    assert next(newest_steps(store), None) == 1000
    assert find_checkpoint(store, "latest", location="HERE") == "step_00001000"
    assert find_checkpoint(store, 30, location="HERE") == "step_00000030"


def test_the_latest_step_costs_one_look_a_folder(store):
    for step in (1, 2, 3):
        _commit(store, step)
    put(store, "step_00000004/data/x", b"")
    counting = FaultyStore(store)
    assert next(newest_steps(counting), None) == 3
    assert counting.operations == ["list ", "list step_00000004", "list step_00000003"]


def test_steps_below_a_folder(store):
    put(store, "runs/a/step_00000007/manifest.bcp", b"")
    assert list(steps_below(store, "runs/a", store.list("runs/a"))) == [7]


def test_a_checkpoint_at_the_path_itself(store):
    _commit(store, None)
    assert find_checkpoint(store, None, location="HERE") == ""
    assert find_checkpoint(store, "latest", location="HERE") == ""


def test_nothing_at_the_path(store):
    for step in (None, "latest"):
        error = _not_found(store, step)
        assert error.kind == "not_found"
        assert "does not exist" in str(error)
    error = _not_found(store, 7)
    assert (error.kind, error.step) == ("not_found", 7)


def test_a_save_that_did_not_finish(store):
    put(store, "data/abc-00000-0.safetensors", b"x")
    for step in (None, "latest"):
        error = _not_found(store, step)
        assert error.kind == "not_committed"
        assert "did not finish" in str(error)


def test_a_step_whose_save_did_not_finish(store):
    put(store, "step_00000007/data/x", b"x")
    assert _not_found(store, "latest").kind == "not_committed"
    for step in range(100, 115):
        _commit(store, step)
    error = _not_found(store, 7)
    assert (error.kind, error.step) == ("not_committed", 7)
    assert "114, 113, 112, 111, 110, 109, 108, 107, 106, 105, and up to 6 older ones" in str(error)


def test_a_step_that_is_not_there(store):
    _commit(store, 5)
    error = _not_found(store, 6)
    assert (error.kind, error.step) == ("not_found", 6)
    assert "newest first: 5" in str(error)


def test_a_missing_step_is_told_without_a_look_at_all_steps(store):
    for step in range(100):
        _commit(store, step)
    counting = FaultyStore(store)
    assert _not_found(counting, 500).kind == "not_found"
    assert len(counting.operations) <= 20


def test_many_steps_are_found_without_a_listing_of_each(store, monkeypatch):
    for step in range(50):
        _commit(store, step)
    put(store, "step_00000025/data/x", b"")
    put(store, "step_00000100/data/x", b"its save did not finish")
    lists = []
    real = type(store).list
    monkeypatch.setattr(type(store), "list", lambda self, folder: lists.append(folder) or real(self, folder))
    assert committed_steps(store) == list(range(50))
    assert next(newest_steps(store)) == 49
    assert lists == ["", ""]


def test_steps_where_a_checkpoint_was_expected(store):
    _commit(store, 5)
    error = _not_found(store, None)
    assert error.kind == "not_found"
    assert "step=..." in str(error)


def test_step_0_alone_is_a_finished_save_where_a_checkpoint_was_expected(store):
    _commit(store, 0)
    error = _not_found(store, None)
    assert error.kind == "not_found"
    assert "newest first: 0" in str(error)


def test_something_else_at_the_path(store):
    put(store, "holiday.jpg", b"x")
    error = _not_found(store, "latest")
    assert error.kind == "not_found"
    assert "holiday.jpg" in str(error)


def test_a_file_as_path(tmp_path):
    (tmp_path / "file.pt").write_bytes(b"x")
    put(FsspecStore("memory://layout-file", None), "file.pt", b"x")
    for store in (
        LocalStore(str(tmp_path / "file.pt"), writer_threads=1),
        FsspecStore("memory://layout-file/file.pt", None),
    ):
        for step in (None, "latest", 7):
            with pytest.raises(CheckpointNotFoundError, match="is a file") as caught:
                find_checkpoint(store, step, location=str(store))
            assert caught.value.kind == "not_found"
    MemoryFileSystem.store.clear()


def test_a_manifest_comes_back(store):
    _commit(store, 7, metadata={"a": 1}, files=[DataFile("data/x", 3)])
    manifest = read_manifest(store, step_folder(7))
    assert (manifest.save_id, manifest.step, manifest.metadata) == ("abc", 7, {"a": 1})


def test_a_manifest_that_cannot_be_read_is_named(store):
    _commit(store, 7)
    name = "step_00000007/manifest.bcp"
    for content in (b"", b"nonsense", b"BCPMANIF" + b"\0" * 100):
        put(store, name, content, replace=True)
        with pytest.raises(CheckpointCorruptError) as caught:
            read_manifest(store, "step_00000007")
        assert caught.value.kind == "bad_manifest"
        assert caught.value.path == f"{store}/{name}"
        assert f"{store}/{name}" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError) as missing:
        read_manifest(store, "step_00000008")
    assert missing.value.kind == "not_committed"


def test_a_manifest_beyond_the_limit_is_not_read(store, monkeypatch):
    _commit(store, 7)
    monkeypatch.setattr(layout, "MAX_MANIFEST_BYTES", 10)
    counting = FaultyStore(store)
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_manifest(counting, step_folder(7))
    assert caught.value.kind == "limits_exceeded"
    assert counting.operations == ["list step_00000007"]


def test_files_are_checked_up_front(store):
    manifest = Manifest(save_id="abc", files=[DataFile(f"data/{at}", 3) for at in range(15)])
    for at in range(15):
        put(store, f"s/data/{at}", b"abc")
    counting = FaultyStore(store)
    check_files(counting, "s", manifest, range(15))
    assert counting.operations == ["list s/data"]
    put(store, "s/data/1", b"ab", replace=True)
    put(store, "s/data/2", b"abcd", replace=True)
    with pytest.raises(CheckpointCorruptError) as cut:
        check_files(store, "s", manifest, [0, 1, 2])
    assert cut.value.kind == "truncated"
    assert "data/1 (2 bytes, 3 expected), data/2 (4 bytes, 3 expected)" in str(cut.value)
    for at in range(3, 15):
        store.delete(f"s/data/{at}")
    with pytest.raises(CheckpointNotFoundError) as missing:
        check_files(store, "s", manifest, [14, 13, *range(13), 3])
    assert missing.value.kind == "missing_file"
    assert "misses 12 of 15" in str(missing.value)
    assert "data/12 and 2 more" in str(missing.value)
    assert "data/1 (2 bytes" in str(missing.value)
    check_files(store, "s", manifest, [0])


def test_a_committed_checkpoint_is_replaced_only_when_asked(store):
    _commit(store, 7)
    with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
        _commit(store, 7, metadata={"of": "another"})
    assert (caught.value.kind, caught.value.path) == ("exists", f"{store}/step_00000007")
    commit(store, step_folder(7), encode_manifest(Manifest(save_id="new", step=7)), replace=True)
    assert read_manifest(store, step_folder(7)).save_id == "new"


def test_the_data_files_of_one_save(store):
    assert data_files_of(store, "s", "abc") == []
    for name in ("data/abc-00000-0.safetensors", "data/abc-00001-0.safetensors", "data/abcd-00000-0.safetensors"):
        put(store, f"s/{name}", b"x")
    names = data_files_of(store, "s", "abc")
    assert sorted(names) == ["data/abc-00000-0.safetensors", "data/abc-00001-0.safetensors"]
    discard(store, "s", names)
    assert store.list("s/data") == {"abcd-00000-0.safetensors": 1}


def test_a_checkpoint_is_made_of_what_its_own_save_has_written(store):
    own = data_file_name("abc", 0, 0)
    others = ["manifest.bcp", "step_00000005/manifest.bcp", data_file_name("abcd", 0, 0), "abc-00000-0.safetensors"]
    _commit(store, None, files=[DataFile(name=name, byte_length=1) for name in [own, *others]])
    put(store, "telemetry/abc-00000.json", b"{}")
    assert files_of_checkpoint(store, "") == [own, "telemetry/abc-00000.json"]


def test_discarding_goes_on_where_one_file_stays_and_logs_it(store, caplog):
    for at in range(3):
        put(store, f"s/data/{at}", b"x")
    with caplog.at_level("WARNING", "bytecheckpoint"):
        discard(FaultyStore(store, fail_at=2), "s", ["data/0", "data/1", "data/2", "data/never"])
    assert len(store.list("s/data")) <= 1
    assert "1 of 4 files in" in caplog.text
    assert "bcp gc" in caplog.text


def test_discarding_ends_where_the_store_is_out_of_reach(store):
    put(store, "s/data/0", b"x")
    faulty = FaultyStore(store, fail_at=1, broken_from_then_on=True)
    discard(faulty, "s", [f"data/{at}" for at in range(500)])
    assert len(faulty.operations) < 100


def taken():
    return CheckpointExistsError("there is one", kind="exists")


def test_a_commit_that_meets_itself_is_a_success(store):
    """Its answer was lost, and the store has tried again."""
    commit(FaultyStore(store, fail_at=1, fault=Fault.AFTER, make_error=taken), "s", b"mine", replace=False)
    assert read_manifest_bytes(store, "s") == b"mine"


def test_a_commit_that_meets_another_is_refused(store):
    commit(store, "s", b"theirs", replace=False)
    with pytest.raises(CheckpointExistsError):
        commit(store, "s", b"mine", replace=False)
    assert read_manifest_bytes(store, "s") == b"theirs"


def test_a_commit_that_cannot_tell_whom_it_meets_does_not_say_that_it_is_another(store):
    errors = iter([taken(), unavailable(), unavailable()])
    faulty = FaultyStore(store, fail_at=1, fault=Fault.AFTER, make_error=lambda: next(errors), broken_from_then_on=True)
    with pytest.raises(StorageError):
        commit(faulty, "s", b"mine", replace=False)


@pytest.mark.privileged
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_step_that_leads_where_the_user_may_not_look_hides_no_other_step(tmp_path):
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies below a folder that only its owner may open
        store = LocalStore(f"{folder}/root", writer_threads=1)
        _commit(store, 1)
        os.makedirs(f"{folder}/private/step")
        os.symlink(f"{folder}/private/step", f"{folder}/root/{step_folder(9)}")
        for path, mode in ((folder, 0o755), (f"{folder}/private", 0o700)):
            os.chmod(path, mode)
        os.seteuid(65534)
        try:
            if not os.access(f"{folder}/root/{step_folder(1)}", os.R_OK | os.X_OK, effective_ids=True):
                pytest.skip("folders for temporary files are private here")
            with pytest.warns(UserWarning, match="step_00000009 is left out"):
                assert find_checkpoint(store, "latest", location="root") == step_folder(1)
        finally:
            os.seteuid(0)


@pytest.mark.privileged
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("place", "kind"), [("private", "path_escape"), ("root/private", "permission")], ids=["outside", "inside"]
)
def test_a_manifest_that_leads_where_the_user_may_not_look_is_not_taken_for_none(place, kind):
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(f"{folder}/root")
        os.makedirs(f"{folder}/{place}")
        os.symlink(f"{folder}/{place}/{MANIFEST_NAME}", f"{folder}/root/{MANIFEST_NAME}")
        for path, mode in ((folder, 0o755), (f"{folder}/{place}", 0o700)):
            os.chmod(path, mode)
        store = LocalStore(f"{folder}/root", writer_threads=1)
        os.seteuid(65534)
        try:
            if not os.access(f"{folder}/root", os.R_OK | os.X_OK, effective_ids=True):
                pytest.skip("folders for temporary files are private here")
            for step in (None, "latest"):
                with pytest.raises(CheckpointError) as caught:
                    find_checkpoint(store, step, location="root")
                assert caught.value.kind == kind
        finally:
            os.seteuid(0)


def test_a_step_that_leads_elsewhere_hides_no_other_step(tmp_path):
    store = LocalStore(str(tmp_path / "root"), writer_threads=1)
    _commit(store, 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root" / step_folder(9)).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / step_folder(8)).symlink_to(tmp_path / "root" / step_folder(8))
    with pytest.warns(UserWarning, match="step_00000009 is left out"):
        assert next(newest_steps(store), None) == 1
    with pytest.warns(UserWarning, match="step_00000009 is left out"):
        assert committed_steps(store) == [1]
    with pytest.warns(UserWarning, match="step_00000009 is left out"):
        assert find_checkpoint(store, "latest", location="root") == step_folder(1)
    with pytest.raises(UnsafeCheckpointError):
        find_checkpoint(store, 9, location="root")
