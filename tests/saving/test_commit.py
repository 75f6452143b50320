"""The commit: nothing can be seen before it, everything is there after it, and of two savers one wins."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import COORDINATOR_PHASES, Seam, before, files_under, loads_as, raising, state_of

import bytecheckpoint as bcp
from bytecheckpoint.manifest import DataFile, decode_manifest, encode_manifest
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.saving import commit, report, target
from bytecheckpoint.saving.global_plan import AgreedPlan
from bytecheckpoint.saving.plans.rank_plan import RankPlan
from bytecheckpoint.saving.report import WrittenFile
from bytecheckpoint.staging import file_image
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends import fsspec_store
from bytecheckpoint.storage.store import Store

OVERWRITING = bcp.SaveOptions(overwrite=True)


class WatchedStore:
    """Tells of each write, after it."""

    def __init__(self, store: Store, watch: Callable[[str], object]) -> None:
        self._store = store
        self._watch = watch

    def __str__(self) -> str:
        return str(self._store)

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        self._store.write(name, blocks, replace=replace)
        self._watch(name)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: Any = None) -> None:
        self._store.read_into(name, byte_offset, buffer, on_filled=on_filled)

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self._store.list(folder)

    def delete(self, name: str) -> None:
        self._watch(f"delete {name}")
        self._store.delete(name)


def save_watched(watch: Callable[[str], object], *arguments: Any, **options: Any) -> None:
    open_store = target.open_store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "open_store", lambda *args, **kw: WatchedStore(open_store(*args, **kw), watch))
        bcp.save(*arguments, **options)


def test_no_reader_sees_a_checkpoint_before_its_manifest_which_is_written_last(tmp_path: Path) -> None:
    seen: list[tuple[str, list[int]]] = []
    bcp.save(tmp_path, state_of(0, 1.0), step=1)

    def watch(name: str) -> None:
        seen.append((name.rpartition("/")[2], bcp.steps(tmp_path)))

    options = bcp.SaveOptions(max_file_bytes=1 << 20)
    state = {name: torch.ones(200_000) for name in "abc"}
    save_watched(watch, tmp_path, state, step=2, options=options)
    names = [name for name, _ in seen]
    assert len(names) > 2
    assert names[-1] == "manifest.bcp"
    assert [steps for _, steps in seen] == [[1]] * (len(seen) - 1) + [[1, 2]]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_committed_is_refused_before_anything_is_staged(tmp_path: Path, is_async: bool) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    is_staged = before(Seam(file_image.LiveFile, "gather"), raising(RuntimeError("it was staged")))
    with is_staged, pytest.raises(bcp.CheckpointExistsError):
        bcp.save(tmp_path, state_of(0, 2.0), async_save=is_async)
    assert loads_as(tmp_path, 0, 1.0)


def test_an_overwrite_deletes_only_after_its_commit_and_only_what_it_replaced(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    old = [name for name in files_under(tmp_path) if name != "manifest.bcp"]
    assert [name.partition("/")[0] for name in old] == ["data", "telemetry"]
    seen: list[str] = []
    save_watched(seen.append, tmp_path, state_of(0, 2.0), options=OVERWRITING)
    assert seen[-len(old) - 1 :] == ["manifest.bcp", *(f"delete {name}" for name in old)]
    assert loads_as(tmp_path, 0, 2.0)


def test_nothing_is_deleted_where_the_store_reports_a_replacement_that_it_did_not_do() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    bcp.save(url, state_of(0, 1.0))
    send = fsspec_store.send

    def ignoring(fs: Any, upload: Any, *arguments: Any) -> None:
        if not (upload.replace and upload.path.endswith("manifest.bcp")):
            send(fs, upload, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec_store, "send", ignoring)
        with pytest.raises(bcp.CheckpointSaveError) as raised:
            bcp.save(url, state_of(0, 2.0), options=OVERWRITING)
    assert raised.value.kind == "storage"
    assert "another manifest stands there" in str(raised.value)
    assert loads_as(url, 0, 1.0)


def test_a_committed_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    before_it = files_under(tmp_path)
    with pytest.raises(bcp.CheckpointExistsError) as raised:
        bcp.save(tmp_path, state_of(0, 2.0))
    assert (raised.value.kind, raised.value.ranks) == ("exists", ())
    assert "overwrite" in str(raised.value)
    assert files_under(tmp_path) == before_it
    assert loads_as(tmp_path, 0, 1.0)


def test_of_two_that_save_to_one_place_one_wins_and_the_other_leaves_nothing(tmp_path: Path) -> None:
    """The other one commits while this one writes."""
    others = [threading.Thread(target=lambda: bcp.save(tmp_path, state_of(0, 2.0)))]

    def other(name: str) -> None:
        if name.startswith("data/") and others:
            thread = others.pop()
            thread.start()
            thread.join()

    with pytest.raises(bcp.CheckpointExistsError) as raised:
        save_watched(other, tmp_path, state_of(0, 1.0))
    assert raised.value.kind == "exists"
    assert loads_as(tmp_path, 0, 2.0)
    assert [name.partition("/")[0] for name in files_under(tmp_path)] == ["data", "manifest.bcp", "telemetry"]


@pytest.mark.parametrize("kind", ["no_space", "permission"])
def test_a_commit_that_is_refused_leaves_nothing(tmp_path: Path, kind: str) -> None:
    cls = bcp.StorageError if kind == "permission" else bcp.CheckpointSaveError
    with before(COORDINATOR_PHASES["committing"], raising(cls("refused", kind=kind))), pytest.raises(cls) as raised:
        bcp.save(tmp_path, state_of(0, 1.0))
    assert raised.value.kind == kind
    assert "whether" not in str(raised.value)
    assert files_under(tmp_path) == []


def test_a_commit_without_an_answer_keeps_its_data_and_says_that_it_may_stand(tmp_path: Path) -> None:
    lost = bcp.StorageError("connection reset", kind="unavailable")
    with before(COORDINATOR_PHASES["committing"], raising(lost)), pytest.raises(bcp.StorageError) as raised:
        bcp.save(tmp_path, state_of(0, 1.0))
    assert raised.value.kind == "unavailable"
    assert "whether the checkpoint was committed" in str(raised.value)
    assert [name.partition("/")[0] for name in files_under(tmp_path)] == ["data", "telemetry"]


@pytest.mark.parametrize("damage", ["gone", "half", "nothing"])
def test_a_save_that_was_held_up_until_its_data_was_cleared_away_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """As a job does that is stopped for days and goes on, when a clean-up has taken it for dead."""
    bcp.save(tmp_path, state_of(0, 1.0))
    old = set(files_under(tmp_path / "data"))

    def clear_away() -> None:
        (new,) = set(files_under(tmp_path / "data")) - old
        path = tmp_path / "data" / new
        if damage == "gone":
            path.unlink()
        elif damage == "half":
            path.write_bytes(path.read_bytes()[:1000])

    monkeypatch.setattr(commit, "_HELD_UP_S", -1.0)
    with before(COORDINATOR_PHASES["building"], clear_away):
        if damage == "nothing":
            bcp.save(tmp_path, state_of(0, 2.0), options=OVERWRITING)
        else:
            with pytest.raises(bcp.CheckpointSaveError, match=r"held up for 0\.0 hours.*Nothing was committed"):
                bcp.save(tmp_path, state_of(0, 2.0), options=OVERWRITING)
    assert loads_as(tmp_path, 0, 2.0 if damage == "nothing" else 1.0)


def test_an_overwrite_deletes_nothing_that_a_foreign_manifest_points_to(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    manifest_path = tmp_path / "manifest.bcp"
    manifest = decode_manifest(manifest_path.read_bytes())
    others = [DataFile("manifest.bcp", 1), DataFile("best/manifest.bcp", 1)]
    manifest_path.write_bytes(encode_manifest(replace(manifest, files=[*manifest.files, *others])))
    bcp.save(tmp_path / "best", state_of(0, 1.0))

    bcp.save(tmp_path, state_of(0, 2.0), options=OVERWRITING)

    assert loads_as(tmp_path, 0, 2.0)
    assert loads_as(tmp_path / "best", 0, 1.0)


def test_an_overwrite_of_a_damaged_checkpoint_mends_it(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    (tmp_path / "manifest.bcp").write_bytes(b"rubbish")
    bcp.save(tmp_path, state_of(0, 2.0), options=OVERWRITING)
    assert loads_as(tmp_path, 0, 2.0)


def test_what_a_dead_save_left_does_not_disturb_a_later_one(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0), step=1)
    folder = tmp_path / "step_00000002" / "data"
    folder.mkdir(parents=True)
    (folder / "0123456789abcdef-00000-0.safetensors").write_bytes(b"half")
    (folder / ".tmp-xyz").write_bytes(b"half")
    assert bcp.steps(tmp_path) == [1]
    assert bcp.latest(tmp_path) == 1
    assert loads_as(tmp_path, 0, 1.0)
    bcp.save(tmp_path, state_of(0, 2.0), step=2)
    assert loads_as(tmp_path, 0, 2.0, step=2)


def test_two_values_of_one_place_cannot_be_mixed(tmp_path: Path) -> None:
    """Data names carry a save id: a manifest never points to another save's bytes."""
    bcp.save(tmp_path, state_of(0, 1.0), step=1)
    bcp.save(tmp_path, state_of(0, 2.0), step=2)
    names = [next((tmp_path / f"step_0000000{step}" / "data").iterdir()).name for step in (1, 2)]
    assert names[0] != names[1]


def test_a_report_that_lacks_a_planned_chunk_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_locations = report.pack_locations

    def without_the_last_chunk(locations: Iterable[Any], plan: RankPlan) -> bytes:
        return pack_locations(list(locations)[:-1], plan)

    monkeypatch.setattr(report, "pack_locations", without_the_last_chunk)
    with pytest.raises(bcp.CheckpointSaveError, match="nothing was committed") as error:
        bcp.save(tmp_path, {"never": {"saved": torch.ones(3), "before": torch.ones(2)}})
    assert error.value.kind == "storage"
    assert files_under(tmp_path) == []


def with_files_shorter_by(num_bytes: int) -> Callable[[AgreedPlan, Sequence[WrittenFile]], bytes]:
    encode_report = commit.encode_report

    def shortened(agreed: AgreedPlan, written: Sequence[WrittenFile]) -> bytes:
        files = [each.file._replace(byte_length=each.file.byte_length - num_bytes) for each in written]
        return encode_report(agreed, [each._replace(file=file) for each, file in zip(written, files, strict=True)])

    return shortened


def test_a_report_of_files_too_short_for_their_chunks_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "encode_report", with_files_shorter_by(5000))
    with pytest.raises(
        bcp.CheckpointSaveError, match=r"rank 0 was to write 1 chunks and reports 1 in \d+ bytes"
    ) as error:
        bcp.save(tmp_path, {"too": {"long": torch.ones(3000)}})
    assert (error.value.kind, error.value.ranks) == ("storage", (0,))
    assert files_under(tmp_path) == []


def test_a_file_of_another_length_than_before_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chunks lie is known from the first save with a plan, and only true for files like those."""
    bcp.save(tmp_path, state_of(0, 1.0), step=1)
    monkeypatch.setattr(commit, "encode_report", with_files_shorter_by(1))
    with pytest.raises(bcp.CheckpointSaveError, match="nothing was committed") as error:
        bcp.save(tmp_path, state_of(0, 2.0), step=2)
    assert error.value.kind == "storage"
    assert bcp.steps(tmp_path) == [1]


def test_a_library_that_is_not_installed_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a source tree on the path, which has no metadata that names its version."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(report, "version", version)
    bcp.save(tmp_path, state_of(0, 1.0))
    manifest = decode_manifest((tmp_path / layout.MANIFEST_NAME).read_bytes())
    assert manifest.provenance["bytecheckpoint"] == "unknown"
    assert loads_as(tmp_path, 0, 1.0)
