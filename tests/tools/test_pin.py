"""`bcp rm`, `bcp pin` and `bcp unpin`."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import pytest
import torch
from faults.seams import files_under

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manager import abandoned_steps, retention, step_records
from bytecheckpoint.manifest import envelope
from bytecheckpoint.storage import garbage, layout
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX
from bytecheckpoint.tools.render.number_format import size_text


@pytest.fixture(params=["folder", "memory"])
def run(request, tmp_path) -> str:
    """Steps 5, 10 and 15."""
    root = str(tmp_path / "run") if request.param == "folder" else f"memory://pins-{tmp_path.name}"
    for step in (5, 10, 15):
        bcp.save(root, {"x": 1}, step=step)
    return root


def store_at(root: object):
    return open_store(str(root), storage_options=None, writer_threads=1)


def pins(call, root: object) -> list[bool]:
    return [item["pinned"] for item in call("ls", root, "--json").json["checkpoints"]]


@pytest.mark.parametrize("form", ["--step", "folder"])
def test_rm_deletes_one_step(call, run, form) -> None:
    save_id = bcp.open(run, step=5).info.save_id
    args = [run, "--step", 5] if form == "--step" else [f"{run}/step_00000005"]
    result = call("rm", *args, "--json").json
    assert result == {
        "path": f"{run}/step_00000005",
        "step": 5,
        "save_id": save_id,
        "num_bytes": result["num_bytes"],
        "deleted": True,
        "problem": None,
        "left": [],
    }
    assert bcp.steps(run) == [10, 15]
    assert call("gc", run, "--older-than", "0", "--json").json["leftovers"] == []
    assert set(store_at(run).list("")) == {"step_00000010", "step_00000015"}
    assert call("rm", *args).code == 3


@pytest.mark.parametrize("words", ["rm --step 5", "rm --step 5 --force", "keep --latest 1 --delete", "gc --delete"])
def test_a_full_disk_does_not_keep_what_fills_it(call, tmp_path, monkeypatch, words) -> None:
    def is_full(_store, name: str, *_args, **_options) -> None:
        raise CheckpointSaveError(f"cannot write {name}: no space", kind="no_space")

    for step in (5, 10):
        bcp.save(tmp_path, {"x": torch.zeros(100)}, step=step)
    if words == "gc --delete":
        for name in files_under(tmp_path / "step_00000005"):
            os.utime(tmp_path / "step_00000005" / name, (0, 0))
        (tmp_path / "step_00000005" / "manifest.bcp").unlink()
    else:
        step_records.lease(store_at(tmp_path), "step_00000005", until=1.0)  # rm asks the storage for its time
    monkeypatch.setattr(LocalStore, "write", is_full)
    command, *options = words.split()
    assert call(command, tmp_path, *options).code == 0
    assert bcp.steps(tmp_path) == [10]
    assert files_under(tmp_path / "step_00000005") == []


def test_rm_says_what_it_deleted(call, run) -> None:
    size = bcp.open(run, step=5).info.num_bytes
    assert call("rm", run, "--step", 5).out == f"deleted {run}/step_00000005: {size} B\n"


@pytest.mark.parametrize("form", ["latest", "--step", "folder"])
def test_rm_refuses_the_newest(call, run, form) -> None:
    args = {"latest": [run], "--step": [run, "--step", 15], "folder": [f"{run}/step_00000015"]}[form]
    ended = call("rm", *args)
    assert ended.code == 2
    assert "is the newest committed step of its root; nothing was changed" in ended.err
    assert bcp.steps(run) == [5, 10, 15]
    assert call("rm", *args, "--force").code == 0
    assert bcp.steps(run) == [5, 10]


def test_rm_of_a_link_counts_no_file_that_stays(call, tmp_path) -> None:
    source, link = tmp_path / "source", tmp_path / "link"
    bcp.save(source, {"x": torch.ones(1000)})
    stays = bcp.open(source).info.num_bytes
    assert call("convert", source, link, "--to", "bcp", "--link").code == 0
    expected = f"deleted {link}: 0 B; {size_text(stays)} that it pointed to stay where they are\n"
    assert call("rm", link).out == expected
    assert call("verify", source).code == 0


def test_rm_refuses_the_newest_behind_a_link(call, tmp_path) -> None:
    bcp.save(tmp_path / "run", {"x": 1}, step=5)
    (tmp_path / "run" / "latest").symlink_to("step_00000005")
    assert call("rm", tmp_path / "run" / "latest").code == 2
    assert bcp.steps(tmp_path / "run") == [5]


def test_the_newest_is_the_one_with_which_a_restart_goes_on(call, run) -> None:
    store = store_at(run)
    abandoned_steps.write_branch(store, abandoned_steps.Branch({15: layout.committed_save_id(store, "step_00000015")}))
    assert call("rm", run, "--step", 10).code == 2
    assert call("rm", run, "--step", 15).code == 0


def test_rm_refuses_a_pinned_one(call, run) -> None:
    assert call("pin", run, "--step", 5).code == 0
    ended = call("rm", run, "--step", 5)
    assert ended.code == 2
    assert "it is pinned; nothing was changed" in ended.err
    assert call("rm", run, "--step", 5, "--force").code == 0
    assert "step_00000005" not in store_at(run).list("")


def test_rm_refuses_a_leased_one_until_the_lease_ends(call, run) -> None:
    name = step_records.lease(store_at(run), "step_00000005", until=time.time() + 1000)
    ended = call("rm", run, "--step", 5)
    assert ended.code == 2
    assert "it is leased until " in ended.err
    store_at(run).delete(name)
    step_records.lease(store_at(run), "step_00000005", until=time.time() - 1000)
    assert call("rm", run, "--step", 5).code == 0
    assert bcp.steps(run) == [10, 15]


def test_a_checkpoint_that_stands_alone_is_pinned_and_deleted(call, tmp_path) -> None:
    bcp.save(tmp_path / "final", {"x": 1})
    (tmp_path / "final" / "notes.txt").write_text("of the user")
    call("pin", tmp_path / "final")
    assert call("rm", tmp_path / "final").code == 2
    assert call("rm", tmp_path / "final", "--force").code == 0
    assert files_under(tmp_path / "final") == ["notes.txt"]


def test_one_of_a_root_that_is_a_checkpoint_as_well(call, tmp_path) -> None:
    bcp.save(tmp_path, {"x": 1})
    bcp.save(tmp_path / "steps", {"x": 1}, step=3)
    (tmp_path / "steps" / "step_00000003").rename(tmp_path / "step_00000003")  # as earlier versions let it be saved
    assert call("rm", tmp_path).code == 2
    assert call("rm", tmp_path, "--step", "none").code == 0
    assert bcp.steps(tmp_path) == [3]


def test_pins_come_and_go(call, run) -> None:
    assert call("pin", run, "--step", 10).out == f"pinned {run}/step_00000010\n"
    assert call("pin", f"{run}/step_00000010").out == f"{run}/step_00000010 is pinned already\n"
    assert pins(call, run) == [False, True, False]
    assert call("unpin", f"{run}/step_00000010").out == f"unpinned {run}/step_00000010\n"
    assert call("unpin", run, "--step", 10).out == f"{run}/step_00000010 is not pinned\n"
    assert pins(call, run) == [False, False, False]


def test_json_of_pins(call, run) -> None:
    common = {"path": f"{run}/step_00000015", "step": 15, "save_id": bcp.open(run).info.save_id}
    assert call("pin", run, "--json").json == {**common, "pinned": True, "was_pinned": False}
    assert call("pin", run, "--json").json == {**common, "pinned": True, "was_pinned": True}
    assert call("unpin", run, "--json").json == {**common, "pinned": False, "was_pinned": True}


def test_checkpoints_of_other_programs_are_not_touched(call, tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    for command in ("rm", "pin", "unpin"):
        assert call(command, tmp_path).code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def damaged(root: Path, step: int, *, age_s: float = 0) -> str:
    """Saves a step, cuts its manifest short and puts all its files back by an age. Returns its save id."""
    save_id = bcp.save(root, {"x": torch.zeros(100), "n": 1}, step=step).result().save_id
    folder = root / layout.step_folder(step)
    (folder / "manifest.bcp").write_bytes((folder / "manifest.bcp").read_bytes()[:-1])
    (folder / "notes.txt").write_text("of the user")
    for name in files_under(folder):
        os.utime(folder / name, (time.time() - age_s, time.time() - age_s))
    return save_id


def test_rm_deletes_one_whose_manifest_is_damaged(call, tmp_path) -> None:
    damaged(tmp_path, 5, age_s=2 * garbage.MIN_AGE_S)
    bcp.save(tmp_path, {"x": torch.zeros(100)}, step=10)
    ended = call("rm", tmp_path, "--step", 5)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(f"deleted {tmp_path}/step_00000005, whose manifest was damaged: ")
    assert files_under(tmp_path / "step_00000005") == ["notes.txt"]
    assert call("rm", tmp_path, "--step", 5).code == 3
    assert call("verify", tmp_path, "--step", 10).code == 0


def test_rm_of_a_damaged_one_leaves_what_a_save_may_still_write(call, tmp_path) -> None:
    tmp_path = tmp_path / "my run"
    save_id = damaged(tmp_path, 5)
    bcp.save(tmp_path, {"x": 1}, step=10)
    ended = call("rm", tmp_path / "step_00000005")
    assert ended.code == 0
    assert bcp.steps(tmp_path) == [10]
    (command,) = re.findall(r"`bcp (gc .*)`", ended.out)
    assert save_id in command
    assert call(*shlex.split(command)).code == 0
    assert files_under(tmp_path / "step_00000005") == ["notes.txt"]


def test_rm_of_a_damaged_one_advises_no_command_that_takes_what_other_saves_write(call, tmp_path) -> None:
    damaged(tmp_path, 5)
    bcp.save(tmp_path, {"x": 1}, step=10)
    for step in (5, 15):
        (tmp_path / layout.step_folder(step)).mkdir(exist_ok=True)
        (tmp_path / layout.step_folder(step) / f"{TEMPORARY_PREFIX}{step:016}-manifest.bcp").write_bytes(b"1")
    commands = re.findall(r"`bcp (gc .*)`", call("rm", tmp_path, "--step", 5).out)
    assert len(commands) == 2
    for command in commands:
        assert call(*shlex.split(command)).code == 0
    assert len(files_under(tmp_path / "step_00000015")) == 1


def test_rm_of_a_damaged_one_spares_what_a_save_has_committed_there_meanwhile(call, tmp_path, monkeypatch) -> None:
    def listed_late(*args) -> list[str]:
        bcp.save(tmp_path, {"x": 2}, step=5, options=bcp.SaveOptions(overwrite=True))
        return side_objects(*args)

    side_objects = garbage.side_objects
    damaged(tmp_path, 5, age_s=2 * garbage.MIN_AGE_S)
    bcp.save(tmp_path, {"x": 1}, step=10)
    monkeypatch.setattr(garbage, "side_objects", listed_late)
    ended = call("rm", tmp_path, "--step", 5)
    assert (ended.code, "nothing was deleted" in ended.err) == (2, True)
    assert call("verify", tmp_path, "--step", 5).code == 0


def test_json_of_rm_of_a_damaged_one(call, tmp_path) -> None:
    save_id = damaged(tmp_path, 5)
    result = call("rm", tmp_path, "--step", 5, "--force", "--json").json
    assert (result["save_id"], result["deleted"], result["num_bytes"], result["left"]) == (None, True, 0, [save_id])
    assert "manifest.bcp" in result["problem"]


@pytest.mark.parametrize("by", ["newest", "pin", "lease"])
def test_rm_refuses_a_damaged_one_as_any_other(call, tmp_path, by) -> None:
    bcp.save(tmp_path, {"x": 1}, step=5)
    if by == "pin":
        call("pin", tmp_path, "--step", 5)
    elif by == "lease":
        step_records.lease(store_at(tmp_path), "step_00000005", until=time.time() + 1000)
    if by != "newest":
        bcp.save(tmp_path, {"x": 1}, step=10)
    (tmp_path / "step_00000005" / "manifest.bcp").write_bytes(b"")
    ended = call("rm", tmp_path, "--step", 5)
    assert (ended.code, "nothing was changed" in ended.err) == (2, True)
    assert ("though its manifest is damaged" in ended.err) == (by == "newest")
    assert call("rm", tmp_path, "--step", 5, "--force").code == 0
    assert {"manifest.bcp", "pin.json", "leases"}.isdisjoint(store_at(tmp_path).list("step_00000005"))


def test_rm_of_a_step_that_is_not_committed_names_the_command_that_removes_it(call, run) -> None:
    store_at(run).delete("step_00000005/manifest.bcp")
    ended = call("rm", run, "--step", 5)
    assert (ended.code, "`bcp gc` lists and removes" in ended.err) == (3, True)
    assert "bcp gc" not in call("rm", run, "--step", 6).err


def test_rm_leaves_one_of_a_later_release(call, tmp_path) -> None:
    bcp.save(tmp_path, {"x": 1})
    (tmp_path / "manifest.bcp").write_bytes(envelope.seal(b"", version=(9, 0)))
    ended = call("rm", tmp_path, "--force")
    assert (ended.code, "nothing is wrong with the checkpoint" in ended.err) == (1, True)
    assert (tmp_path / "manifest.bcp").exists()


def test_an_interrupted_rm_says_what_is_known(call, tmp_path: Path, monkeypatch) -> None:
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    bcp.save(tmp_path, {"x": 1})
    monkeypatch.setattr(retention, "delete_one", interrupt)
    ended = call("rm", tmp_path)
    assert ended.code == 130
    assert f"{tmp_path} is whole, or no longer a checkpoint" in ended.err
