"""The commands on checkpoints that other programs wrote: the same calls, and one line where something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORMATS = ("safetensors", "torch.save", "torch.distributed.checkpoint")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """By format; not to be changed."""
    root = tmp_path_factory.mktemp("foreign")
    state = {"layers.0.weight": torch.randn(6, 4), "layers.1.weight": torch.zeros(6, 4)}
    paths = {name: root / folder for name, folder in zip(FORMATS, ("hf", "torch.pt", "dcp"), strict=True)}
    paths["safetensors"].mkdir()
    save_file(state, paths["safetensors"] / "model.safetensors", {"format": "pt"})
    torch.save({**state, "step": 3}, paths["torch.save"])
    dcp.save({**state, "step": 3}, checkpoint_id=paths["torch.distributed.checkpoint"], no_dist=True)
    return paths


@pytest.mark.parametrize("name", FORMATS)
def test_show_says_what_is_in_it(call, checkpoints, name) -> None:
    shown = call("show", checkpoints[name], "--json", "--stats").json
    assert [tensor["fqn"] for tensor in shown["tensors"]] == ["layers.0.weight", "layers.1.weight"]
    assert shown["tensors"][1]["stats"]["num_zeros"] == 24
    assert shown["path"] == str(checkpoints[name])
    ended = call("show", checkpoints[name], "--tree", "--files")
    assert ended.code == 0
    assert "layers.0-1.weight" in ended.out


@pytest.mark.parametrize("name", FORMATS)
def test_verify_says_that_there_are_no_checksums(call, checkpoints, name) -> None:
    ended = call("verify", checkpoints[name])
    assert ended.code == 5
    assert "0 B compared with their checksums\n" in ended.out
    assert "no checksums" in ended.out
    assert "all is as it was written" not in ended.out
    result = call("verify", checkpoints[name], "--json").json
    assert result["ok"]
    assert result["num_bytes_checked"] == 0
    assert len(result["unchecked_files"]) == result["num_files"] == 1


@pytest.mark.parametrize("name", FORMATS)
def test_ls_lists_it_with_its_format(call, checkpoints, name) -> None:
    (item,) = call("ls", checkpoints[name], "--json").json["checkpoints"]
    assert (item["format"], item["num_tensors"], item["committed"]) == (name, 2, True)
    assert (item["save_id"], item["world_size"], item["created_at"]) == ("", None, None)
    assert name in call("ls", checkpoints[name]).out


def test_ls_finds_folders_and_files_of_every_format_under_a_root(call, checkpoints) -> None:
    root = checkpoints["safetensors"].parent
    assert {item["format"] for item in call("ls", root, "--json").json["checkpoints"]} == set(FORMATS)


@pytest.mark.parametrize("command", ["show", "verify", "ls"])
def test_what_is_damaged_is_an_exit_code_and_one_line(call, tmp_path, command) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b'\x08\x00\x00\x00\x00\x00\x00\x00{"a": 1}')
    for place in (tmp_path, path):
        ended = call(command, place)
        assert ended.code == 1
        assert "Traceback" not in ended.err + ended.out
        if command != "ls":
            assert len(ended.err.splitlines()) == 1
            assert call(command, place, "--json").json["error"]["kind"] == "bad_manifest"


@pytest.mark.parametrize("name", FORMATS)
def test_show_begins_with_the_format(call, checkpoints, name) -> None:
    assert call("show", checkpoints[name], "--json").json["format"] == name
    first = call("show", checkpoints[name]).out.splitlines()[1]
    assert first.split(maxsplit=1) == ["format", name]


@pytest.mark.parametrize("name", FORMATS)
def test_show_has_no_row_of_which_nothing_is_known(call, checkpoints, name) -> None:
    lines = call("show", checkpoints[name]).out.split("\n\n")[0].splitlines()[1:]
    assert not {"step", "saved", "with", "written"} & {line.split()[0] for line in lines}
    assert not any(line.split()[-1] in {"-", "none"} for line in lines)


def test_show_of_an_own_checkpoint_has_its_format_in_json_only(call, saved_root) -> None:
    assert call("show", saved_root, "--json").json["format"] == "bytecheckpoint"
    assert "format" not in call("show", saved_root).out.split("\n\n")[0]


def test_a_link_shows_the_format_that_it_leads_to(call, checkpoints, tmp_path) -> None:
    assert call("convert", checkpoints["safetensors"], tmp_path / "link", "--to", "bcp", "--link").code == 0
    assert call("show", tmp_path / "link", "--json").json["format"] == "safetensors"
