"""Folders that other programs have not finished, or that were copied in part: the error says what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MARKER = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})


def write_dcp(folder: Path, *, finished: bool = False) -> None:
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=folder, no_dist=True)
    if not finished:
        (folder / ".metadata").unlink()


def in_member(folder: Path) -> None:
    write_dcp(folder / "pytorch_model_fsdp_0")
    (folder / "trainer_state.json").write_text("{}")


def tracked(folder: Path) -> None:
    write_dcp(folder / "iter_0000010")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")


def tracked_empty(folder: Path) -> None:
    (folder / "global_step5").mkdir()
    (folder / "latest").write_text("global_step5")


def of_trainer(folder: Path) -> None:
    torch.save({}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")


def numbered(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model-00001-of-00003.bin")


def index_alone(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))


@pytest.mark.parametrize(
    ("write", "missing"),
    [
        (write_dcp, r"\(__0_0.distcp\), and not the .metadata that is written last: its save did not finish"),
        (in_member, r"in its 'pytorch_model_fsdp_0' .* not the .metadata"),
        (tracked, r"iter_0000010, the step that latest_checkpointed_iteration.txt names, .* not the .metadata"),
        (tracked_empty, "global_step5, the step that latest names, is empty"),
        (of_trainer, "and no model: its save did not finish"),
        (numbered, r"1 of 3 files pytorch_model-\*-of-00003.bin"),
        (index_alone, "none of the 1 files that it names"),
    ],
)
def test_a_folder_that_was_not_finished_says_what_is_missing(
    write: Callable[[Path], None], missing: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(bcp.CheckpointNotFoundError, match=missing) as error:
        bcp.open(tmp_path)
    assert error.value.kind == "not_committed"
    assert "nothing was loaded" in str(error.value)


def test_a_step_that_was_not_finished_says_what_is_missing(tmp_path: Path) -> None:
    write_dcp(tmp_path / "checkpoint-7")
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"checkpoint-7 has data .* not the .metadata"):
        bcp.load(tmp_path, {"w": torch.ones(2, 3)}, step=7)


@pytest.mark.parametrize("name", ["global_step", "step-"])
def test_a_root_of_steps_without_a_tracker_names_the_newest(name: str, tmp_path: Path) -> None:
    for step in (9, 10):
        write_dcp(tmp_path / f"{name}{step}", finished=True)
    with pytest.raises(bcp.CheckpointNotFoundError, match=rf"such as .*/{name}10\Z"):
        bcp.open(tmp_path)
    assert bcp.open(tmp_path, step=9)["w"].shape == (2, 3)


def test_a_tracker_that_names_a_missing_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step5")
    with pytest.raises(bcp.CheckpointNotFoundError, match="no folder 'global_step5', which its file 'latest' names"):
        bcp.open(tmp_path)


def test_a_save_of_this_library_that_did_not_finish_is_named_as_such(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "manifest.bcp").unlink()
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"no manifest\.bcp, so its save did not finish"):
        bcp.open(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_files_that_an_index_names_and_that_are_missing_are_counted(suffix: str, tmp_path: Path) -> None:
    model = "model" if suffix == "safetensors" else "pytorch_model"
    weights = {name: f"{model}-{name}.{suffix}" for name in "abc"}
    (tmp_path / f"{model}.{suffix}.index.json").write_text(json.dumps({"weight_map": weights}))
    state = {"a": torch.ones(2)}
    if suffix == "bin":
        torch.save(state, tmp_path / weights["a"])
    else:
        save_file(state, tmp_path / weights["a"])
    with pytest.raises(bcp.CheckpointNotFoundError, match=rf"lacks 2 of the 3 files .* the first '{model}-b") as error:
        bcp.open(tmp_path)
    assert error.value.kind == "missing_file"


def test_a_folder_of_megatron_without_its_common_state_is_refused(tmp_path: Path) -> None:
    write_dcp(tmp_path, finished=True)
    (tmp_path / "metadata.json").write_text(MARKER)
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"has no common.pt") as error:
        bcp.open(tmp_path)
    assert error.value.kind == "missing_file"


def test_a_folder_of_megatron_without_its_marker_is_read_whole(tmp_path: Path) -> None:
    write_dcp(tmp_path, finished=True)
    torch.save({"iteration": 4, "args": {"hidden_size": 8}}, tmp_path / "common.pt")
    checkpoint = bcp.open(tmp_path)
    assert (checkpoint.step, checkpoint.objects["args"]) == (4, {"hidden_size": 8})


@pytest.mark.parametrize("value", [[1, 2], {"w": 1}, torch.ones(2), None])
def test_a_file_named_as_megatrons_common_state_in_another_folder_is_left_out(tmp_path: Path, value: object) -> None:
    write_dcp(tmp_path, finished=True)
    if value is None:
        (tmp_path / "common.pt").write_bytes(b"of another program")
    else:
        torch.save(value, tmp_path / "common.pt")
    checkpoint = bcp.open(tmp_path)
    assert (list(checkpoint), dict(checkpoint.objects)) == (["w"], {})
    assert "common.pt" in checkpoint.info.metadata["left_out"]


def test_a_trainers_root_of_steps_is_no_save_that_did_not_finish(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-500").mkdir()
    for step, told in (("latest", "give the path of one"), (None, "is not a checkpoint")):
        with pytest.raises(bcp.CheckpointNotFoundError, match=told) as error:
            bcp.load(tmp_path, {}, step=step)
        assert error.value.kind == "not_found"
