"""`bcp gc`: a dry run unless told otherwise, and what is alive or committed stays."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from faults.seams import Seam, before, files_under, raising, state_of

import bytecheckpoint as bcp
from bytecheckpoint.saving import local_stage as local_stage_module
from bytecheckpoint.storage import garbage
from bytecheckpoint.storage.store import Store

DEAD, YOUNG = "00000000deadbeef", "00000000aaaaaaaa"
DAY_S = 86400


def leave(root: Path, step: int, save_id: str, *, age_s: float) -> Path:
    path = root / f"step_{step:08d}" / "data" / f"{save_id}-00000-0.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(1000))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_root_in_order(call, root) -> None:
    ended = call("gc", root)
    assert ended.code == 0
    assert ended.out.endswith("nothing is left of saves that did not commit\n")
    assert call("gc", root, "--delete", "--json").json["leftovers"] == []


def test_nothing_changes_without_delete(call, root) -> None:
    leave(root, 7, DEAD, age_s=2 * DAY_S)
    before_it = files_under(root)
    ended = call("gc", root)
    assert ended.code == 0
    assert "1 leftover of abandoned saves, 1000 B, to be removed with --delete" in ended.out
    assert DEAD in ended.out
    assert "dead (old)" in ended.out
    assert files_under(root) == before_it


def test_delete_removes_the_dead_only(call, root) -> None:
    dead, young = leave(root, 7, DEAD, age_s=2 * DAY_S), leave(root, 1000, YOUNG, age_s=DAY_S / 2)
    found = call("gc", root, "--delete", "--json").json
    assert found["deleted"]
    assert found["failures"] == []
    assert {(item["save_id"], item["dead"], item["why"]) for item in found["leftovers"]} == {
        (DEAD, True, "old"),
        (YOUNG, False, "young"),
    }
    assert not dead.exists()
    assert not dead.parent.parent.exists()
    assert young.exists()
    assert call("verify", root).code == 0
    assert [item["committed"] for item in call("ls", root, "--json").json["checkpoints"]] == [True, True]


@pytest.mark.parametrize(("age", "is_dead"), [("5h", True), ("7h", False), ("300m", True), ("1d", False), ("0", True)])
def test_how_old_is_dead_can_be_said(call, root, age, is_dead) -> None:
    leave(root, 7, DEAD, age_s=6 * 3600)
    (item,) = call("gc", root, "--older-than", age, "--json").json["leftovers"]
    assert item["dead"] is is_dead


def test_a_change_in_a_year_that_no_calendar_has_is_shown_as_unknown(call, root, monkeypatch) -> None:
    leave(root, 7, DEAD, age_s=0)
    add = garbage.Leftover.add  # not every file system takes such a time
    monkeypatch.setattr(garbage.Leftover, "add", lambda item, name, size, _: add(item, name, size, 2.0**40))
    (item,) = call("gc", root, "--json").json["leftovers"]
    assert (item["changed_at"], item["dead"], item["why"]) == (None, False, "young")


def test_a_save_can_be_named_whatever_its_age(call, root) -> None:
    dead, young = leave(root, 7, DEAD, age_s=0), leave(root, 8, YOUNG, age_s=2 * DAY_S)
    (item,) = call("gc", root, "--save-id", DEAD, "--delete", "--json").json["leftovers"]
    assert item["why"] == "named"
    assert not dead.exists()
    assert young.exists()


def test_an_empty_save_id_names_nothing(call, root) -> None:
    """As of a variable that is not set. Otherwise it would name what has no save id: also of saves that run."""
    young = root / "step_00000007" / ".tmp-00000000aaaaaaaa-manifest.bcp"
    young.parent.mkdir()
    young.write_bytes(bytes(10))
    assert call("gc", root, "--json").json["leftovers"][0]["save_id"] is None
    ended = call("gc", root, "--save-id", "", "--delete")
    assert (ended.code, "--save-id is empty" in ended.err) == (2, True)
    assert young.exists()


def test_a_memory_root_without_memory_is_refused(call, root) -> None:
    """Ignored, it would let the leftovers of ROOT be removed where those in memory were meant."""
    ended = call("gc", root, "--memory-root", root.parent, "--delete")
    assert (ended.code, "--memory-root is for --memory" in ended.err) == (2, True)


def test_a_committed_save_cannot_be_named_away(call, root) -> None:
    save_id = bcp.open(root).info.save_id
    assert call("gc", root, "--save-id", save_id, "--delete", "--json").json["leftovers"] == []
    assert call("verify", root).code == 0


@pytest.mark.parametrize("age", ["soon", "-5h", "5y"])
def test_an_age_that_is_none_is_refused(call, root, age) -> None:
    ended = call("gc", root, "--older-than", age)
    assert ended.code == 2
    assert "is no length of time" in ended.err


def test_a_damaged_checkpoint_is_named_and_left_alone(call, root) -> None:
    leave(root, 1000, DEAD, age_s=2 * DAY_S)
    (root / "step_00001000" / "manifest.bcp").write_bytes(b"damaged")
    before_it = files_under(root)
    found = call("gc", root, "--delete", "--json").json
    assert found["leftovers"] == []
    assert found["unreadable"] == [str(root / "step_00001000")]
    assert files_under(root) == before_it
    assert "the manifest there is damaged: step_00001000" in call("gc", root).out


def test_what_cannot_be_removed_is_told_and_the_rest_removed(call, root) -> None:
    leave(root, 7, DEAD, age_s=2 * DAY_S)
    with before(Seam(garbage, "remove"), raising(bcp.StorageError("you may not", kind="permission"))):
        ended = call("gc", root, "--delete", "--json")
    assert ended.code == 4
    assert ended.json["failures"] == ["you may not"]


def test_what_could_not_be_removed_is_not_called_removed(call, root, monkeypatch) -> None:
    for step, save_id in ((7, DEAD), (8, YOUNG)):
        leave(root, step, save_id, age_s=2 * DAY_S)
    remove = garbage.remove

    def refuse(store: Store, leftover: garbage.Leftover) -> int:
        if leftover.save_id == DEAD:
            raise bcp.StorageError("you may not", kind="permission")
        return remove(store, leftover)

    monkeypatch.setattr(garbage, "remove", refuse)
    shown = call("gc", root, "--delete").out
    assert "1 leftover of abandoned saves, 1000 B, removed" in shown
    states = {line.split()[0]: line.rsplit("  ", 1)[1] for line in shown.splitlines() if "(old)" in line}
    assert states == {DEAD: "dead (old)", YOUNG: "removed (old)"}
    assert call("gc", root, "--delete", "--json").json["deleted"] is False


def test_several_are_removed_at_once(call, root, monkeypatch) -> None:
    for step in (7, 8):
        leave(root, step, DEAD, age_s=2 * DAY_S)
    together, remove = threading.Barrier(2, timeout=60), garbage.remove
    monkeypatch.setattr(garbage, "remove", lambda *arguments: (together.wait(), remove(*arguments))[1])
    assert "2 leftovers of abandoned saves, 2.0 KiB, removed" in call("gc", root, "--delete").out


def test_uploads_that_may_not_be_listed_are_told_and_the_rest_is_done(call, root, monkeypatch) -> None:
    dead = leave(root, 7, DEAD, age_s=2 * DAY_S)
    monkeypatch.setattr(garbage, "pending_uploads", lambda _store, _folder: ([], "not allowed to list uploads"))
    assert "unfinished uploads were not looked for: not allowed to list uploads" in call("gc", root).out
    ended = call("gc", root, "--delete", "--json")
    assert ended.code == 0
    assert ended.json["uploads_not_looked_for"] == "not allowed to list uploads"
    assert not dead.exists()


def failed_upload(root: Path, stage: Path, step: int) -> None:
    options = bcp.SaveOptions(local_stage=stage)
    with before(Seam(local_stage_module, "copy_file"), raising(bcp.StorageError("gone", kind="unavailable"))):
        assert bcp.save(root, state_of(0, 1.0), step=step, async_save=True, options=options).exception(60)


def test_a_local_stage_is_looked_into_where_asked(call, root, tmp_path) -> None:
    stage = tmp_path / "nvme"
    failed_upload(root, stage, 2000)
    failed_upload(tmp_path / "other", stage, 1)
    assert call("gc", root, "--json").json["leftovers"] == []
    (item,) = call("gc", root, "--local-stage", stage, "--json").json["leftovers"]
    assert item["local"]
    assert (item["dead"], item["why"]) == (False, "young")
    ended = call("gc", root, "--local-stage", stage, "--older-than", "0", "--delete")
    assert ended.code == 0
    assert "1 leftover of abandoned saves" in ended.out
    assert call("gc", root, "--local-stage", stage, "--json").json["leftovers"] == []
    assert len(list(stage.iterdir())) == 1
