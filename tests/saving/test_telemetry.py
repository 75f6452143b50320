"""What a save tells about itself: the seconds of its phases, to the caller and in an object for each block of ranks."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seam, before, files_under, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from bytecheckpoint.diagnostics.telemetry import read_save_records
from bytecheckpoint.distributed.ranks import SoleRank, Subject
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.saving import report
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from bytecheckpoint.saving.target import SaveCall, open_target
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from distributed.workers import WorkerPool

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
OPTIONS = bcp.SaveOptions(timeout_s=30)
PHASES = {"wait", "plan", "stage", "checksum", "write", "commit", "stall", "total"}
TOLD_PHASES = {"wait", "plan", "stage", "checksum", "write"}
"""A file is written before the commit, so it knows nothing of that."""


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state(), "plans", PlanCache())


def told(path: Path) -> list[dict[str, Any]]:
    """The telemetry of a checkpoint, by rank."""
    return [record for file in sorted((path / "telemetry").iterdir()) for record in json.loads(file.read_text())]


def data_bytes(path: Path, save_id: str, rank: int) -> list[int]:
    return [file.stat().st_size for file in (path / "data").glob(f"{save_id}-{rank:05d}-*")]


def assert_plausible(record: dict[str, Any], info: bcp.CheckpointInfo) -> None:
    assert record["version"] == 1
    assert record["save_id"] == info.save_id
    assert record["host"]
    assert abs(record["started_at"] - time.time()) < 600
    seconds, spans = record["seconds"], record["spans"]
    assert seconds.keys() >= TOLD_PHASES
    assert all(value >= 0 for value in seconds.values())
    assert {span["phase"] for span in spans} <= seconds.keys()
    for span in spans:
        assert 0 <= span["start"] <= span["end"] <= info.seconds["total"]
    assert [span["end"] for span in spans] == sorted(span["end"] for span in spans)
    for phase in {span["phase"] for span in spans}:
        lasted = sum(span["end"] - span["start"] for span in spans if span["phase"] == phase)
        assert lasted == pytest.approx(seconds[phase])


@pytest.mark.parametrize("is_async", [False, True])
def test_the_caller_is_told_the_seconds_of_every_phase_whether_a_plan_was_known_or_not(
    tmp_path: Path, is_async: bool
) -> None:
    for number in range(3):
        started = time.perf_counter()
        info = bcp.save(tmp_path / str(number), state_of(0, 1.0), async_save=is_async).result()
        took = time.perf_counter() - started
        assert info.seconds.keys() == PHASES
        assert info.seconds["plan"] > 0
        assert all(0 <= value <= took for phase, value in info.seconds.items() if phase != "checksum")
        assert info.seconds["stall"] <= info.seconds["total"]
        assert info.seconds["wait"] + info.seconds["plan"] <= info.seconds["stall"]


def test_the_caller_is_told_what_compressing_took(tmp_path: Path) -> None:
    started = time.perf_counter()
    info = bcp.save(tmp_path, state_of(0, 1.0), options=bcp.SaveOptions(codec="zstd", writer_threads=1)).result()
    took = time.perf_counter() - started
    assert info.seconds.keys() == PHASES | {"compress"}
    assert 0 < info.seconds["checksum"] < took
    assert 0 < info.seconds["compress"] < took  # one thread compresses
    assert set(told(tmp_path)[0]["seconds"]) >= TOLD_PHASES | {"compress"}


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_bandwidth_is_that_of_all_files_from_the_call_to_the_commit(
    tmp_path: Path, codec: str, is_async: bool
) -> None:
    started = time.perf_counter()
    info = bcp.save(tmp_path, state_of(0, 1.0), async_save=is_async, options=bcp.SaveOptions(codec=codec)).result()
    took = time.perf_counter() - started
    num_bytes = sum(data_bytes(tmp_path, info.save_id, 0))
    assert info.bytes_per_s is not None
    assert info.bytes_per_s == pytest.approx(num_bytes / info.seconds["total"])
    assert info.bytes_per_s >= num_bytes / took
    assert bcp.open(tmp_path).info.bytes_per_s is None


def test_a_checkpoint_that_is_opened_knows_no_seconds(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    assert bcp.open(tmp_path).info.seconds == {}


@pytest.mark.parametrize("options", [{}, {"snapshot": "lazy"}, {"staging_bytes": 32 << 20}])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_file_of_a_sole_rank(tmp_path: Path, options: dict[str, Any], is_async: bool) -> None:
    save_options = bcp.SaveOptions(max_file_bytes=1 << 20, **options)
    info = bcp.save(tmp_path, state_of(0, 1.0), async_save=is_async, options=save_options).result()
    assert [name for name in files_under(tmp_path) if "telemetry" in name] == [f"telemetry/{info.save_id}-00000.json"]
    (record,) = told(tmp_path)
    assert_plausible(record, info)
    assert record["rank"] == 0
    sizes = data_bytes(tmp_path, info.save_id, 0)
    assert (record["num_bytes"], record["num_files"]) == (sum(sizes), len(sizes)) == (info.num_bytes, 2)


def test_a_rank_that_writes_nothing_tells_so(tmp_path: Path) -> None:
    info = bcp.save(tmp_path, {"plain": 1}).result()
    (record,) = told(tmp_path)
    assert_plausible(record | {"seconds": {"checksum": 0.0, **record["seconds"]}}, info)
    assert (record["num_bytes"], record["num_files"]) == (0, 0)


def save_on_each(rank: int, world_size: int, path: str) -> bcp.CheckpointInfo:
    return bcp.save(path, state_of(rank, 1.0), options=OPTIONS).result()


def test_every_rank_has_a_record_of_its_own(workers: WorkerPool, tmp_path: Path) -> None:
    infos = workers.run(save_on_each, str(tmp_path), world_size=3)
    records = told(tmp_path)
    assert [record["rank"] for record in records] == [0, 1, 2]
    for rank, (record, info) in enumerate(zip(records, infos, strict=True)):
        assert_plausible(record, info)
        assert info.seconds.keys() == PHASES
        assert record["num_bytes"] == sum(data_bytes(tmp_path, info.save_id, rank)) > 0
        assert record["num_files"] == 1
    assert len({info.save_id for info in infos}) == 1


def test_many_ranks_have_an_object_for_each_block(tmp_path: Path) -> None:
    store = open_store(tmp_path, storage_options=None, writer_threads=1)
    target = open_target(tmp_path, step=None, role=None, storage_options=None, options=OPTIONS)
    call = SaveCall(SoleRank(), Subject("", None, is_save=True), PhaseTimer())
    own = json.loads(report.telemetry_record(call, "5f3a9c", []))
    records = [json.dumps(own | {"rank": rank}).encode() if rank != 70 else b"" for rank in range(200)]
    report.write_telemetry(call, target, "5f3a9c", records)
    names = sorted(file.name for file in (tmp_path / "telemetry").iterdir())
    assert names == [f"5f3a9c-{first:05d}.json" for first in range(0, 200, 64)]
    # An earlier version wrote each rank's record as an object of its own.
    (tmp_path / "telemetry" / "5f3a9c-00070.json").write_text(json.dumps(own | {"rank": 70}))
    found = read_save_records(store, "", "5f3a9c")
    assert [record.rank for record in found.ranks] == list(range(200))
    assert not found.unreadable


def save_in_subgroup(rank: int, world_size: int, path: str) -> None:
    group = dist.new_group([1, 2])
    if rank:
        bcp.save(path, state_of(rank, 1.0), options=OPTIONS, process_group=group)


def test_an_object_is_numbered_in_the_group_like_data_and_names_global_ranks(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_in_subgroup, str(tmp_path), world_size=3)
    names = [file.name.partition("-")[2] for file in sorted((tmp_path / "telemetry").iterdir())]
    assert names == ["00000.json"]
    assert [record["rank"] for record in told(tmp_path)] == [1, 2]


def test_an_overwrite_removes_the_telemetry_of_what_it_replaces(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        info = bcp.save(tmp_path, state_of(0, value), options=bcp.SaveOptions(overwrite=True)).result()
        assert [record["save_id"] for record in told(tmp_path)] == [info.save_id]


def overwrite_and_fail(rank: int, world_size: int, root: str) -> bool:
    overwriting = bcp.SaveOptions(timeout_s=30, overwrite=True)
    for value in (1.0, 2.0):
        bcp.save(f"{root}/good", state_of(rank, value), options=overwriting)
    with before(Seam(report, "build_manifest"), raising(OSError("planted"))):
        error = seen(lambda: bcp.save(f"{root}/bad", state_of(rank, 1.0), options=OPTIONS))
    return error is not None and loads_as(f"{root}/good", rank, 2.0)


def test_telemetry_of_all_ranks_goes_with_an_overwritten_checkpoint_and_with_a_failed_save(
    workers: WorkerPool, tmp_path: Path
) -> None:
    assert workers.run(overwrite_and_fail, str(tmp_path), world_size=2) == [True, True]
    save_id = bcp.open(tmp_path / "good").info.save_id
    names = [name for name in files_under(tmp_path / "good") if "telemetry" in name]
    assert names == [f"telemetry/{save_id}-00000.json"]
    assert files_under(tmp_path / "bad") == []


@pytest.mark.parametrize("phase", ["building", "committing"])
def test_a_failed_save_leaves_no_telemetry(tmp_path: Path, phase: str) -> None:
    function = {
        "building": Seam(report, "build_manifest"),
        "committing": Seam(layout, "commit"),
    }[phase]
    error = bcp.StorageError("planted", kind="no_space")
    with before(function, raising(error)), pytest.raises(bcp.StorageError, match="planted"):
        bcp.save(tmp_path, state_of(0, 1.0))
    assert files_under(tmp_path) == []


def test_telemetry_that_cannot_be_written_is_told_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = bcp.StorageError("planted", kind="permission")
    with before(Seam(layout, "telemetry_name"), raising(error)):
        bcp.save(tmp_path, state_of(0, 1.0))
    assert not (tmp_path / "telemetry").exists()
    assert loads_as(tmp_path, 0, 1.0)
    assert "could not be written: planted" in caplog.text


def test_loading_needs_no_telemetry(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    (file,) = (tmp_path / "telemetry").iterdir()
    file.write_text("not JSON")
    assert loads_as(tmp_path, 0, 1.0)
    file.unlink()
    assert loads_as(tmp_path, 0, 1.0)


def test_the_page_documents_every_field(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    section = PAGE.read_text().partition("\n## Telemetry\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^(?:-|\|) `(\w+)`", section, flags=re.MULTILINE)
    (record,) = told(tmp_path)
    assert rows == list(record)
    assert all(f"`{key}`" in section for span in record["spans"] for key in span)
    assert all(f"`{phase}`" in section for phase in record["seconds"])


def test_the_times_are_those_of_the_wall_clock(tmp_path: Path) -> None:
    info = bcp.save(tmp_path, state_of(0, 1.0)).result()
    (record,) = told(tmp_path)
    assert info.created_at is not None
    started = datetime.fromtimestamp(record["started_at"], UTC)
    assert -2 < (info.created_at - started).total_seconds() < 60


def test_a_clock_adds_up_what_runs_twice_and_stalls_once() -> None:
    clock = PhaseTimer()
    for _ in range(2):
        with clock.phase("a"):
            clock.add("b", 0.5)
    clock.end_stall()
    stall = clock.seconds["stall"]
    clock.end_stall()
    assert clock.seconds["stall"] == stall <= clock.total
    assert clock.seconds["b"] == 1.0
    assert [span.phase for span in clock.spans] == ["a", "a"]
    assert clock.seconds["a"] == pytest.approx(sum(span.end - span.start for span in clock.spans))


def test_a_phase_that_fails_is_a_phase_all_the_same() -> None:
    clock = PhaseTimer()
    with pytest.raises(ValueError, match="planted"), clock.phase("a"):
        raise ValueError("planted")
    assert [span.phase for span in clock.spans] == ["a"]
    assert torch.isfinite(torch.tensor(clock.seconds["a"]))
