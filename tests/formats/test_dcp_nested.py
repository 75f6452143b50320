"""Folders with one for the model and one for the optimizer: of the open-source ByteCheckpoint, and of Accelerate."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oss_files
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import Touch, assert_same
from migration_pages import assert_doctor_prints, assert_trained_alike, blocks_of, run
from plain_leaves import plain_leaves
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int, num_steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    model.register_buffer("count", torch.tensor(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(num_steps):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    return model, optimizer


def write_oss(folder: Path, *, by_name: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(0, 3)
    of_optimizer = get_state_dict(model, optimizer)[1] if by_name else optimizer.state_dict()
    oss_files.write_state(folder / "model", dict(model.state_dict()))
    oss_files.write_state(folder / "optimizer", {"state": of_optimizer["state"], "param_groups": Whole(of_optimizer)})
    (folder / "extra_state").mkdir()
    for rank in range(2):
        path = folder / "extra_state" / f"extra_state_rank_{rank}.pt"
        torch.save({"step": 3, "rank": rank, "rng": torch.full((2,), rank)}, path)
    return model, optimizer


class Whole:
    """Groups, which are one object of bytes there: torch.save of this is that of the list."""

    def __init__(self, optimizer: Any) -> None:
        self._groups = optimizer["param_groups"]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._groups,)


def write_accelerate(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(0, 3)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": of_optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return model, optimizer


def check_load(path: Path, wanted: tuple[torch.nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = trained(1, 0)
    bcp.load(path, {"model": model, "optimizer": optimizer})
    assert_same(model.state_dict(), wanted[0].state_dict())
    found, expected = optimizer.state_dict(), wanted[1].state_dict()
    for key, values in expected["state"].items():
        assert_same(found["state"][key], values)
    assert found["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]


@pytest.mark.parametrize("by_name", [True, False])
def test_the_open_source_bytecheckpoint_is_read(tmp_path: Path, by_name: bool) -> None:
    wanted = write_oss(tmp_path / "global_step_3", by_name=by_name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    check_load(tmp_path, wanted)
    checkpoint = bcp.open(tmp_path)
    assert (checkpoint.info.format, checkpoint.info.step) == ("torch.distributed.checkpoint folders", 3)
    assert plain_leaves(checkpoint)["extra_state.rank_1.rank"] == 1
    assert checkpoint["extra_state.rank_1.rng"][0] == 1
    assert_same(bcp.open(tmp_path / "global_step_3" / "model").state_dict(), wanted[0].state_dict())


def test_an_old_folder_loads_as_the_page_about_moving_over_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *_, load = blocks_of("from-open-source.md")
    saved = write_oss(tmp_path / "old" / "global_step_3")
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("3")
    names: dict[str, Any] = {"bcp": bcp, **dict(zip(("model", "optimizer"), trained(1, 0), strict=True))}
    run(load, names)
    assert_trained_alike(names, {"model": saved[0], "optimizer": saved[1]})
    assert names["extra_state"]["step"] == 3
    assert_doctor_prints("old", load)


def test_accelerates_folders_are_read(tmp_path: Path) -> None:
    wanted = write_accelerate(tmp_path / "checkpoint-20")
    check_load(tmp_path / "checkpoint-20", wanted)
    assert bcp.open(tmp_path, step=20).info.path == str(tmp_path / "checkpoint-20")


def test_accelerates_folders_are_read_beside_an_unrelated_folder_named_model(tmp_path: Path) -> None:
    wanted = write_accelerate(tmp_path / "c")
    (tmp_path / "c" / "model").mkdir()
    (tmp_path / "c" / "model" / "notes.txt").write_text("no checkpoint")
    check_load(tmp_path / "c", wanted)


def test_every_folder_beside_them_is_an_entry_of_its_name(tmp_path: Path) -> None:
    for number in range(2):
        for name in ("pytorch_model_fsdp", "optimizer"):
            state = {name[:5]: {"w": torch.full((2,), float(number))}}
            dcp.save(state, checkpoint_id=tmp_path / "accelerate" / f"{name}_{number}", no_dist=True)
    found = bcp.open(tmp_path / "accelerate").state_dict()
    names = {"pytor.w": 0, "optim.w": 0, "pytorch_model_fsdp_1.pytor.w": 1, "optimizer_1.optim.w": 1}
    assert {name: tensor[0] for name, tensor in found.items()} == names
    for name in ("model", "optimizer", "ema", "critic"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "own" / name, no_dist=True)
    assert set(bcp.open(tmp_path / "own")) == {"model.w", "optimizer.w", "ema.w", "critic.w"}


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    write_accelerate(tmp_path / "c")
    assert bcp.open(tmp_path / "c").info.metadata == {}
    (tmp_path / "c" / "scheduler.pt").write_bytes(b"1")
    (tmp_path / "c" / "tokenizer").mkdir()
    (tmp_path / "c" / "tokenizer" / "vocab.json").write_text("{}")
    left_out = bcp.open(tmp_path / "c").info.metadata["left_out"]
    assert left_out.startswith("scheduler.pt, tokenizer/: ")


def weights_beside(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")


def unfinished_beside(folder: Path) -> None:
    (folder / "ema").mkdir()
    (folder / "ema" / "__0_0.distcp").write_bytes(b"1")


def cut(folder: Path) -> None:
    path = folder / "model" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def cut_metadata(folder: Path) -> None:
    path = folder / "model" / ".metadata"
    path.write_bytes(path.read_bytes()[:-50])


def lost_data(folder: Path) -> None:
    (folder / "optimizer" / "__0_0.distcp").unlink()


def unfinished(folder: Path) -> None:
    (folder / "optimizer" / ".metadata").unlink()


def lost_extra_state(folder: Path) -> None:
    (folder / "extra_state" / "extra_state_rank_0.pt").unlink()


def lost_extra_state_of_a_hundred_million(folder: Path) -> None:
    path = folder / "extra_state" / "extra_state_rank_1.pt"
    path.rename(path.with_name("extra_state_rank_99999999.pt"))  # a set of all ranks took gigabytes


def cut_extra_state(folder: Path) -> None:
    (folder / "extra_state" / "extra_state_rank_1.pt").write_bytes(b"PK\x03\x04")


def hostile_extra_state(folder: Path) -> None:
    torch.save(Touch(folder / "marker"), folder / "extra_state" / "extra_state_rank_1.pt")


def hostile_tensor(folder: Path) -> None:
    change(folder, lambda tensors, key: tensors.update({key: pickle.dumps(Touch(folder / "marker"))}))


def other_tensor(folder: Path) -> None:
    change(folder, lambda tensors, key: tensors.update({key: pickle.dumps([1, 2])}))


def text_for_a_tensor(folder: Path) -> None:
    change(folder, lambda tensors, key: tensors.update({key: "text"}))


def change(folder: Path, rewrite: Callable[[dict[Any, Any], Any], None]) -> None:
    path = folder / "model" / ".metadata"
    with oss_files.stand_ins():
        metadata = pickle.loads(path.read_bytes())
        tensors = metadata.all_tensor_metadata
        rewrite(tensors, next(index for index in tensors if index.fqn == "0.weight"))
        path.write_bytes(pickle.dumps(metadata))


DAMAGE = {
    weights_beside: "conflict",
    unfinished_beside: "missing_file",
    cut: "truncated",
    cut_metadata: "bad_manifest",
    lost_data: "missing_file",
    unfinished: "missing_file",
    lost_extra_state: "missing_file",
    lost_extra_state_of_a_hundred_million: "missing_file",
    cut_extra_state: "truncated",
    hostile_extra_state: "pickle_refused",
    hostile_tensor: "pickle_refused",
    other_tensor: "bad_manifest",
    text_for_a_tensor: "bad_manifest",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_oss(tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(tmp_path / "c")
    assert caught.value.kind == DAMAGE[damage], caught.value.message
    assert str(tmp_path) in caught.value.message
    assert not (tmp_path / "c" / "marker").exists()
