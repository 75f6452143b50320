"""`bcp doctor`: what a storage really does is what it says, it leaves nothing behind, and its advice follows from what
it measured.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator

import pytest
from broken_stores import ForgetfulStore
from faults.seams import Seam, before, files_under, raising
from fsspec.implementations.memory import MemoryFileSystem

from bytecheckpoint.diagnostics import filesystem_features
from bytecheckpoint.diagnostics.filesystem_features import probe_filesystem
from bytecheckpoint.diagnostics.store_speed import Latency, Speed
from bytecheckpoint.errors import StorageError
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.storage import open_store
from bytecheckpoint.storage.backends import local_store as local_store_module
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.tools import doctor
from bytecheckpoint.tools.analysis.recommend import CompressionSpeed, recommend

QUICK = ("--seconds", 0, "--max-mib", 1)


@pytest.fixture
def memory_url() -> Iterator[str]:
    yield f"memory://test-{uuid.uuid4().hex}"
    MemoryFileSystem.store.clear()


def test_a_folder_is_examined_and_left_as_it_was(call, tmp_path) -> None:
    (tmp_path / "mine").write_text("x")
    found = call("doctor", tmp_path, *QUICK, "--json")
    assert found.code == 0, found.out
    assert found.json["ok"]
    assert all(check["kept"] for check in found.json["checks"])
    assert found.json["folder"]["free_bytes"] > 0
    assert found.json["folder"]["hard_links"]
    assert found.json["folder"]["locks"]
    assert files_under(tmp_path) == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_system_without_a_limit_is_not_full(call, tmp_path, monkeypatch) -> None:
    status = os.statvfs_result((4096, 4096, *[0] * 7, 255))  # of a tmpfs with size=0
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    assert "no limit" in call("doctor", tmp_path, *QUICK).out
    assert probe_filesystem(str(tmp_path)).free_bytes is None


def test_a_folder_that_does_not_exist_is_not_made(call, tmp_path) -> None:
    ended = call("doctor", tmp_path / "new" / "run", *QUICK, "--local-stage", tmp_path / "nvme")
    assert ended.code == 0
    assert "good for checkpoints" in ended.out
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_examined_and_left_as_it_was(call, memory_url) -> None:
    found = call("doctor", memory_url, *QUICK, "--json")
    assert found.code == 0, found.out
    assert found.json["folder"] is None
    assert not [name for name in MemoryFileSystem.store if "doctor" in name]


def test_its_advice_can_be_taken(call, memory_url, tmp_path) -> None:
    advice = {
        item["option"]: item["value"]
        for item in call("doctor", memory_url, *QUICK, "--local-stage", tmp_path, "--json").json["advice"]
    }
    SaveOptions(writer_threads=advice["SaveOptions.writer_threads"], codec=advice["SaveOptions.codec"])
    LoadOptions(reader_threads=advice["LoadOptions.reader_threads"], max_gap_bytes=advice["LoadOptions.max_gap_bytes"])
    assert advice["SaveOptions.local_stage"] in {True, False}


def test_a_storage_that_refuses_is_an_error(call, tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    ended = call("doctor", tmp_path / "file" / "run", *QUICK)
    assert ended.code in {3, 4}
    assert ended.err.startswith("error: ")
    ended = call("doctor", tmp_path / ("x" * 300), *QUICK)
    assert ended.code == 4
    assert "File name too long" in ended.err
    with before(Seam(local_store_module.LocalStore, "write"), raising(StorageError("no", kind="permission"))):
        assert call("doctor", tmp_path / "run", *QUICK).code == 4


@pytest.mark.parametrize(("name", "why"), [("file/stage", "is a file"), ("x" * 300, "File name too long")])
def test_a_stage_that_cannot_be_written_is_an_error_of_a_write(call, tmp_path, name, why) -> None:
    (tmp_path / "file").write_text("x")
    ended = call("doctor", tmp_path / "run", "--local-stage", tmp_path / name, *QUICK)
    assert ended.code == 4
    assert ended.err.startswith(f"error: cannot write {tmp_path / name}/")
    assert why in ended.err
    assert files_under(tmp_path) == ["file"]


def test_the_error_of_a_write_is_not_hidden_by_one_of_the_removal(call, tmp_path) -> None:
    seam = Seam(local_store_module.LocalStore, "write"), Seam(local_store_module.LocalStore, "delete")
    with (
        before(seam[0], raising(StorageError("no writing", kind="permission"))),
        before(seam[1], raising(StorageError("no deleting", kind="permission"))),
    ):
        assert call("doctor", tmp_path / "run", *QUICK).err == "error: no writing\n"


def test_a_file_system_that_is_full_is_no_failure_to_print(call, tmp_path) -> None:
    with before(Seam(filesystem_features, "_write_and_sync"), raising(OSError(errno.ENOSPC, "full"))):
        ended = call("doctor", tmp_path, *QUICK)
    assert ended.code == 4
    assert ended.err.startswith(f"error: cannot write {tmp_path}/.tmp-doctor-")
    assert list(tmp_path.iterdir()) == []


def test_uploads_that_may_not_be_listed_lose_no_finding(call, tmp_path, monkeypatch) -> None:
    def refuse(_store: LocalStore, _folder: str) -> None:
        raise StorageError("not allowed to list uploads", kind="permission")

    monkeypatch.setattr(LocalStore, "pending_uploads", refuse, raising=False)
    monkeypatch.setattr(LocalStore, "abort_upload", lambda *_: None, raising=False)
    found = call("doctor", tmp_path, *QUICK, "--json")
    assert found.code == 0
    (check,) = (each for each in found.json["checks"] if each["name"] == "whole_or_nothing")
    assert check["kept"]
    assert check["what"].endswith("uploads were not looked for: not allowed to list uploads")


def test_an_interruption_leaves_nothing(call, tmp_path) -> None:
    with before(Seam(doctor, "measure_latency"), raising(KeyboardInterrupt())):
        assert call("doctor", tmp_path / "run", *QUICK).code == 130
    assert list(tmp_path.iterdir()) == []


def s3_arguments(service) -> list[str]:
    return [
        part for key, value in service.options.items() for part in ("--storage-option", f"{key}={json.dumps(value)}")
    ]


def test_a_bucket_is_examined_and_left_as_it_was(call, s3, s3_prefix) -> None:
    found = call("doctor", f"s3://{s3.bucket}/{s3_prefix}", *QUICK, *s3_arguments(s3), "--json")
    assert found.code == 0, found.out
    assert {check["name"] for check in found.json["checks"] if not check["kept"]} == set()
    assert s3.objects(s3_prefix) == s3.uploads(s3_prefix) == []


def test_a_bucket_that_does_not_exist_is_exit_code_4(call, s3) -> None:
    ended = call("doctor", "s3://nosuchbucket/run", *QUICK, *s3_arguments(s3))
    assert ended.code == 4
    assert ended.err.startswith("error: ")
    assert s3.secret not in ended.err


def test_a_broken_promise_ends_with_1(call, tmp_path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_store, "LocalStore", ForgetfulStore)
        ended = call("doctor", tmp_path, *QUICK)
    assert ended.code == 1
    assert "NOT SAFE" in ended.out


# What follows from measurements.


def speeds(**by_threads: float) -> list[Speed]:
    """Returns megabytes a second of 16 MiB parts by number of threads."""
    return [Speed(16 << 20, int(name[1:]), int(mb * 1e6), 1.0) for name, mb in by_threads.items()]


USUAL = CompressionSpeed(1e9, 0.7, 2)


def values(writes, reads, *, latency_s=0.02, compression=USUAL, local=None) -> dict[str, object]:
    advice = recommend(Latency(latency_s, latency_s, latency_s), writes, reads, compression, local)
    return {item.option.partition(".")[2]: item.value for item in advice}


def test_the_fewest_threads_that_are_fast_enough_are_taken() -> None:
    found = values(speeds(t1=50, t3=95, t8=100), speeds(t1=100, t4=300, t8=800, t16=810))
    assert (found["writer_threads"], found["reader_threads"]) == (3, 8)


def test_a_gap_is_what_is_read_while_a_request_is_under_way() -> None:
    assert values(speeds(t1=50), speeds(t1=100, t8=500), latency_s=0.02)["max_gap_bytes"] == 2_000_000


def test_what_is_written_faster_than_compressed_is_not_compressed() -> None:
    assert values(speeds(t1=2000), speeds(t1=100))["codec"] == "none"
    assert values(speeds(t1=100), speeds(t1=100))["codec"] == "zstd"
    assert values(speeds(t1=100), speeds(t1=100), compression=CompressionSpeed(1e9, 1.01, 2))["codec"] == "none"


def test_a_stage_is_for_storage_that_is_slower() -> None:
    assert values(speeds(t1=100), speeds(t1=100))["local_stage"] is None
    assert values(speeds(t1=100), speeds(t1=100), local=speeds(t1=150))["local_stage"] is False
    assert values(speeds(t1=100), speeds(t1=100), local=speeds(t1=1500))["local_stage"] is True
