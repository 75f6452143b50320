"""`bcp rm`, `bcp pin` and `bcp unpin`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faults.seams import files_under

import bytecheckpoint as bcp
from bytecheckpoint.manager import abandoned_steps, retention, step_records
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store


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
    }
    assert bcp.steps(run) == [10, 15]
    assert call("gc", run, "--older-than", "0", "--json").json["leftovers"] == []
    assert set(store_at(run).list("")) == {"step_00000010", "step_00000015"}
    assert call("rm", *args).code == 3


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


def test_an_interrupted_rm_says_what_is_known(call, tmp_path: Path, monkeypatch) -> None:
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    bcp.save(tmp_path, {"x": 1})
    monkeypatch.setattr(retention, "delete_one", interrupt)
    ended = call("rm", tmp_path)
    assert ended.code == 130
    assert f"{tmp_path} is whole, or no longer a checkpoint" in ended.err
