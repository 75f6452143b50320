"""`bcp du`."""

from __future__ import annotations

import fractions
import json
import weakref
from collections import UserDict

import pytest
import torch
from checkpoint_files import flip
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.tools.analysis.checkpoint_list import list_checkpoints
from bytecheckpoint.tools.listing import space


def bytes_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_all_bytes_of_a_root_are_counted_once(call, root) -> None:
    dead = root / "step_00000005" / "data" / "00000000deadbeef-00000-0.safetensors"
    dead.write_bytes(b"1" * 1000)
    found = call("du", root, "--json").json
    assert found["num_bytes"] + found["other_num_bytes"] == bytes_of(root)
    by_step = {item["step"]: item for item in found["checkpoints"]}
    for step in (5, 1000):
        item = by_step[step]
        assert item["num_bytes"] == bcp.open(root, step=step).info.num_bytes
        assert item["num_bytes"] + item["other_num_bytes"] == bytes_of(root / f"step_{step:08d}")
    assert by_step[5]["other_num_bytes"] - by_step[1000]["other_num_bytes"] >= 900
    assert [item["step"] for item in found["checkpoints"]] == [5, 1000]


def test_checkpoints_in_folders_of_a_checkpoint_are_counted_once(call, tmp_path) -> None:
    bcp.save(tmp_path / "c", {"w": torch.zeros(1000)})
    bcp.save(tmp_path / "c" / "run", {"w": torch.zeros(100_000)}, step=1)
    found = call("du", tmp_path / "c", "--json").json
    assert len(found["checkpoints"]) == 2
    assert found["num_bytes"] + found["other_num_bytes"] == bytes_of(tmp_path / "c")


def test_data_files_that_are_gone_or_cut_short_count_what_is_there(call, root) -> None:
    for step, change in ((5, lambda path: path.unlink()), (1000, lambda path: path.write_bytes(b"1" * 100))):
        folder = root / f"step_{step:08d}"
        change(max((folder / "data").iterdir(), key=lambda path: path.stat().st_size))
        (item,) = call("du", folder, "--json").json["checkpoints"]
        assert item["num_bytes"] == bytes_of(folder / "data")
        assert item["num_bytes"] + item["other_num_bytes"] == bytes_of(folder)


def test_links_in_a_circle_are_not_followed(call, root) -> None:
    before = call("du", root, "--json").json
    (root / "step_00000005" / "of_a_user").mkdir()
    for name in "ab":
        (root / "step_00000005" / "of_a_user" / name).symlink_to(".")
    assert call("du", root, "--json").json == before


def test_entries_add_up_and_tied_names_take_nothing(call, saved_root) -> None:
    found = call("du", saved_root / "step_00001000", "--json").json
    entries = {entry["name"]: entry for entry in found["entries"]}
    assert entries["large"]["num_bytes"] == 4 << 20
    assert entries["model"]["tied_num_bytes"] == 16 * 8 * 4
    assert found["checkpoints"][0]["folder"] == "."
    twice = call("du", saved_root, "--json").json["entries"]
    assert {entry["name"]: entry["num_bytes"] for entry in twice} == {
        name: 2 * entry["num_bytes"] for name, entry in entries.items()
    }


def test_a_large_tensor_of_ranks_is_under_its_name_in_the_state(call, tmp_path) -> None:
    """It is stored under a hash of its content, and there may be one for each rank."""
    large = torch.ones(20_000)
    bcp.save(tmp_path, {"noise": bcp.RankLocal(large), "a@b": torch.ones(2), "c@d": {"e": torch.ones(2)}})
    for command in ("du", "show"):
        entries = {entry["name"]: entry["num_bytes"] for entry in call(command, tmp_path, "--json").json["entries"]}
        assert entries == {"noise": large.nbytes, "a@b": 8, "c@d": 8}


def test_what_a_link_reads_counts_where_it_lies(call, root, tmp_path) -> None:
    assert call("convert", root / "step_00001000", tmp_path / "link", "--to", "bcp", "--link").code == 0
    (item,) = call("du", tmp_path / "link", "--json").json["checkpoints"]
    assert item["num_bytes"] == 0
    assert item["shared_num_bytes"] == bcp.open(root).info.num_bytes
    assert item["other_num_bytes"] == bytes_of(tmp_path / "link")
    assert "more are read through links" in call("du", tmp_path / "link").out


@pytest.mark.parametrize("path", ["link", "."])
def test_the_manifest_of_a_link_to_another_format_counts(call, tmp_path, path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "w.pt")
    assert call("convert", tmp_path / "w.pt", tmp_path / "links" / "link", "--to", "bcp", "--link").code == 0
    (item,) = call("du", tmp_path / "links" / path, "--json").json["checkpoints"]
    assert (item["num_bytes"], item["shared_num_bytes"]) == (0, (tmp_path / "w.pt").stat().st_size)
    assert item["other_num_bytes"] == bytes_of(tmp_path / "links")


def test_a_damaged_file_counts_its_own_bytes_and_no_others(call, tmp_path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:2000])
    alone, listed = call("du", tmp_path / "cut.pt", "--json"), call("du", tmp_path, "--json")
    assert (alone.code, listed.code) == (1, 1)
    assert (alone.json["num_bytes"], alone.json["other_num_bytes"]) == (0, 2000)
    assert listed.json["num_bytes"] + listed.json["other_num_bytes"] == bytes_of(tmp_path)


def test_a_step_that_did_not_commit_is_counted_and_marked(call, root) -> None:
    (root / "step_00001000" / "manifest.bcp").unlink()
    found = call("du", root, "--json").json
    assert found["num_bytes"] + found["other_num_bytes"] == bytes_of(root)
    assert "step_00001000 (not committed)" in call("du", root).out


def test_a_damaged_manifest_does_not_hide_the_others(call, root) -> None:
    flip(root / "step_00001000" / "manifest.bcp", 50)
    ended = call("du", root, "--json")
    assert ended.code == 1
    assert ended.json["num_bytes"] + ended.json["other_num_bytes"] == bytes_of(root)
    assert [item["problem"] is None for item in sorted(ended.json["checkpoints"], key=lambda item: item["step"])] == [
        True,
        False,
    ]


def test_a_folder_that_leads_out_of_the_root_does_not_hide_the_others(call, root, tmp_path) -> None:
    data = root / "step_00001000" / "data"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    ended = call("du", root, "--json")
    assert ended.code == 1
    assert {item["step"]: "outside of it" in (item["problem"] or "") for item in ended.json["checkpoints"]} == {
        5: False,
        1000: True,
    }


def test_a_file_that_is_never_loaded_is_no_damage_as_in_the_other_lists(call, root, tmp_path) -> None:
    torch.save(fractions.Fraction(1, 3), root / "arguments.bin")
    ended = call("du", root, "--json")
    assert [item["problem"] is None for item in ended.json["checkpoints"]] == [True, True, False]
    assert "fractions.Fraction" in call("du", root).out
    commands = [("du", root), ("ls", root), ("report", root, "--out", tmp_path / "page.html")]
    assert [call(*command).code for command in commands] == [0, 0, 0]
    assert [call(command, root / "arguments.bin").code for command in ("du", "ls")] == [0, 0]
    flip(root / "step_00001000" / "manifest.bcp", 50)
    assert [call(*command).code for command in commands] == [1, 1, 1]


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_file_of_another_format(call, tmp_path, where) -> None:
    torch.save({"w": torch.ones(50)}, tmp_path / "w.pt")
    found = call("du", tmp_path / "w.pt" if where == "file" else tmp_path, "--json").json
    assert found["num_bytes"] == (tmp_path / "w.pt").stat().st_size
    assert found["entries"] == [{"name": "w", "num_bytes": 200, "tied_num_bytes": 0}]


def test_one_that_is_deleted_meanwhile_does_not_hide_the_others(call, root, monkeypatch) -> None:
    bcp.save(root, {"x": 1}, step=7)
    read = space.manifest_of

    def read_without_7(found: FoundCheckpoint) -> Manifest:
        if found.folder.endswith("7"):
            bcp.delete(root, step=7)
        return read(found)

    monkeypatch.setattr(space, "manifest_of", read_without_7)
    assert sorted(item["step"] for item in call("du", root, "--json").json["checkpoints"]) == [5, 1000]


def test_one_that_is_deleted_meanwhile_and_was_alone_is_not_found(call, tmp_path, monkeypatch) -> None:
    bcp.save(tmp_path / "alone", {"x": 1})
    read = space.manifest_of

    def read_none(found: FoundCheckpoint) -> Manifest:
        bcp.delete(tmp_path / "alone")
        return read(found)

    monkeypatch.setattr(space, "manifest_of", read_none)
    ended = call("du", tmp_path / "alone")
    assert ended.code == 3
    assert "there is nothing at" in ended.err


def test_the_listings_of_many_steps_are_not_kept(tmp_path, monkeypatch) -> None:
    """A run of thousands of steps and ranks has millions of files."""
    for step in range(200):
        (tmp_path / f"step_{step:08d}" / "data").mkdir(parents=True)
    live: weakref.WeakSet[Listing] = weakref.WeakSet()
    most = 0

    class Listing(UserDict[str, int | None]):
        __hash__ = object.__hash__

    def list_counted(store: LocalStore, name: str) -> Listing:
        nonlocal most
        listing = Listing(list_folder(store, name))
        live.add(listing)
        most = max(most, len(live))
        return listing

    list_folder = LocalStore.list
    items = list_checkpoints(store := LocalStore(str(tmp_path), writer_threads=1)).checkpoints
    monkeypatch.setattr(LocalStore, "list", list_counted)
    assert len(space.spaces_of(store, items)) == 200
    assert most < 100


@pytest.mark.parametrize("command", ["ls", "du"])
def test_files_beside_one_another_are_read_without_a_listing_for_each(call, tmp_path, monkeypatch, command) -> None:
    for number in range(20):
        torch.save({"weight": torch.ones(2)}, tmp_path / f"{number}.pt")
    listed = []
    list_folder = LocalStore.list
    monkeypatch.setattr(LocalStore, "list", lambda store, name: (listed.append(name), list_folder(store, name))[1])
    assert len(call(command, tmp_path, "--json").json["checkpoints"]) == 20
    assert len(listed) < 10


def test_what_is_left_of_a_folder_of_another_format_is_counted(call, tmp_path) -> None:
    shards = {name: f"model-{number}-of-2.safetensors" for number, name in enumerate("ab", 1)}
    for name, file in shards.items():
        save_file({name: torch.ones(50)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (tmp_path / shards["b"]).unlink()
    ended = call("du", tmp_path, "--json")
    assert ended.code == 1
    assert ended.json["num_bytes"] + ended.json["other_num_bytes"] == bytes_of(tmp_path)


def test_the_table_has_the_largest_first_and_shares(call, saved_root) -> None:
    lines = call("du", saved_root, "--limit", 1).out.splitlines()
    assert lines[2].split() == ["checkpoint", "data", "other", "shared", "stored"]
    assert lines[4] == "  ... and 1 more: --limit 0 shows all"
    assert lines[7].split()[0] == "large"


def test_what_is_not_there_is_exit_code_3(call, tmp_path) -> None:
    assert call("du", tmp_path / "nowhere").code == 3
