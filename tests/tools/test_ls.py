"""`bcp ls`."""

from __future__ import annotations

from checkpoint_files import flip

import bytecheckpoint as bcp


def test_it_lists_steps_in_order(call, saved_root) -> None:
    ended = call("ls", saved_root)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"{saved_root}: 2 checkpoints, ")
    assert [line.split()[0] for line in lines[3:]] == ["5", "1000"]
    assert all(line.endswith("committed") for line in lines[3:])


def test_json_has_the_facts_of_the_manifests(call, saved_root) -> None:
    listed = call("ls", saved_root, "--json").json
    assert listed["root"] == str(saved_root)
    for item, step in zip(listed["checkpoints"], (5, 1000), strict=True):
        info = bcp.open(saved_root, step=step).info
        assert item == {
            "path": info.path,
            "step": step,
            "committed": True,
            "num_bytes": info.num_bytes,
            "num_tensors": info.num_tensors,
            "world_size": 1,
            "created_at": info.created_at.isoformat(),
            "save_id": info.save_id,
            "format": "bytecheckpoint",
            "problem": None,
        }


def test_a_step_that_was_not_committed_is_listed_as_such(call, root) -> None:
    (root / "step_00001000" / "manifest.bcp").unlink()
    (root / "step_00002000").mkdir()
    ended = call("ls", root)
    assert ended.code == 0
    assert "1 checkpoint, 2 not committed" in ended.out
    assert ended.out.count("not committed\n") == 2
    items = call("ls", root, "--json").json["checkpoints"]
    assert [(item["step"], item["committed"]) for item in items] == [(5, True), (1000, False), (2000, False)]
    assert items[1]["num_bytes"] == items[0]["num_bytes"]
    assert items[2]["num_bytes"] == 0


def test_the_checkpoint_at_the_path_itself_is_listed(call, saved_root) -> None:
    (item,) = call("ls", saved_root / "step_00001000", "--json").json["checkpoints"]
    assert item["step"] == 1000
    assert item["path"] == str(saved_root / "step_00001000")


def test_an_uncommitted_folder_given_itself_is_listed(call, root) -> None:
    (root / "step_00001000" / "manifest.bcp").unlink()
    (item,) = call("ls", root / "step_00001000", "--json").json["checkpoints"]
    assert not item["committed"]


def test_checkpoints_with_names_are_listed_after_steps(call, tmp_path) -> None:
    bcp.save(tmp_path / "best", {"x": 1})
    bcp.save(tmp_path, {"x": 1})
    bcp.save(tmp_path / "steps", {"x": 1}, step=3)
    (tmp_path / "steps" / "step_00000003").rename(tmp_path / "step_00000003")  # as earlier versions let it be saved
    items = call("ls", tmp_path, "--json").json["checkpoints"]
    assert [item["path"] for item in items] == [
        str(tmp_path / name) if name else str(tmp_path) for name in ("", "step_00000003", "best")
    ]


def test_a_damaged_manifest_does_not_hide_the_others(call, root) -> None:
    flip(root / "step_00001000" / "manifest.bcp", 50)
    ended = call("ls", root)
    assert ended.code == 1
    assert "damaged" in ended.out
    items = call("ls", root, "--json").json["checkpoints"]
    assert [item["problem"] is None for item in items] == [True, False]
