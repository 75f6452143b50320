"""Folders as the Trainer of transformers and Accelerate write them, and files of Lightning: model, optimizer and
scheduler in one load. Real ones are in tests/frameworks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import Touch, assert_same, convert
from safetensors.torch import save_file

import bytecheckpoint as bcp

SHARDS = {"body.0.weight": 1, "body.0.bias": 1, "body.1.weight": 2, "body.1.bias": 2}


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def optimizer_of(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """As the Trainer makes it: parameters that decay in a group before the others."""
    decaying = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr)


def new_state(seed: int, lr: float) -> dict[str, Any]:
    model = Net(seed)
    optimizer = optimizer_of(model, lr)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def trained(seed: int) -> dict[str, Any]:
    state = new_state(seed, 0.125)
    for _ in range(3):
        state["model"].body(torch.randn(2, 4)).square().sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
    return state


def save_one(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    for number in (1, 2):
        part = {name: tensor for name, tensor in tensors.items() if SHARDS[name] == number}
        save_file(part, folder / f"model-{number:05d}-of-00002.safetensors")
    names = {name: f"model-{number:05d}-of-00002.safetensors" for name, number in SHARDS.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def save_torch(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def save_torch_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    for number in (1, 2):
        part = {name: tensor for name, tensor in tensors.items() if SHARDS[name] == number}
        torch.save(part, folder / f"pytorch_model-{number:05d}-of-00002.bin")
    names = {name: f"pytorch_model-{number:05d}-of-00002.bin" for name, number in SHARDS.items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


WAYS = [save_one, save_sharded, save_torch, save_torch_sharded]


def write(folder: Path, save_model: Callable[..., None] = save_one, suffix: str = "pt") -> dict[str, Any]:
    state = trained(1)
    folder.mkdir(parents=True)
    save_model(folder, state["model"].state_dict())
    for name in ("optimizer", "scheduler"):
        torch.save(state[name].state_dict(), folder / f"{name}.{suffix}")
    torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    return state


def assert_loads(path: Path, saved: dict[str, Any], **options: Any) -> bcp.LoadReport:
    state = new_state(2, 0.5)
    report = bcp.load(path, state, **options)
    assert_same(state["model"].state_dict(), saved["model"].state_dict())
    for of_new, of_saved in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        assert_same(state["optimizer"].state[of_new], saved["optimizer"].state[of_saved])
    groups = [(group["lr"], group["weight_decay"]) for group in state["optimizer"].param_groups]
    assert groups == [(pytest.approx(0.0125), 0.1), (pytest.approx(0.0125), 0.0)]
    assert state["scheduler"].state_dict() == saved["scheduler"].state_dict()
    return report


@pytest.mark.parametrize("save_model", WAYS)
@pytest.mark.parametrize("suffix", ["pt", "bin"])
def test_model_optimizer_and_scheduler_load_from_one_folder(
    tmp_path: Path, save_model: Callable[..., None], suffix: str
) -> None:
    path = tmp_path / "run" / "checkpoint-3"
    saved = write(path, save_model, suffix)
    assert assert_loads(path, saved).step == 3
    assert_loads(tmp_path / "run", saved, step=3)
    convert(path, tmp_path / "own")
    assert_loads(tmp_path / "own", saved)
    convert(path, path, "--to", "bcp", "--link")
    assert_loads(path, saved)


@pytest.mark.parametrize("save_model", WAYS)
def test_the_model_alone_has_the_names_of_its_files(tmp_path: Path, save_model: Callable[..., None]) -> None:
    saved = write(tmp_path / "c", save_model)
    for name in ("model", "net"):
        model = Net(5)
        assert not bcp.load(tmp_path / "c", {name: model}).unexpected
        assert_same(model.state_dict(), saved["model"].state_dict())
    bare = Net(5).state_dict()
    bcp.load(tmp_path / "c", bare)
    assert_same(bare, saved["model"].state_dict())
    convert(tmp_path / "c", tmp_path / "hf", "--to", "hf")
    assert_same(bcp.open(tmp_path / "hf").state_dict(), saved["model"].state_dict())


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "c")
    torch.save({}, tmp_path / "c" / "training_args.bin")
    save_file({"x": torch.ones(2)}, tmp_path / "c" / "consolidated.safetensors")
    (tmp_path / "c" / "config.json").write_text("{}")
    (tmp_path / "c" / "global_step3").mkdir()
    torch.save({}, tmp_path / "c" / "global_step3" / "mp_rank_00_model_states.pt")
    left_out = bcp.open(tmp_path / "c").info.metadata["left_out"]
    assert "consolidated.safetensors, global_step3/, rng_state.pth, training_args.bin: not among" in left_out
    assert left_out.startswith("trainer_state.json: ")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_models_that_accelerate_has_numbered_have_these_names(tmp_path: Path, kind: str) -> None:
    saved = write(tmp_path / "c", save_one if kind == "safetensors" else save_torch, "bin")
    second = Net(7)
    second_optimizer = optimizer_of(second, 0.75)
    second.body(torch.randn(2, 4)).sum().backward()
    second_optimizer.step()
    torch.save(second_optimizer.state_dict(), tmp_path / "c" / "optimizer_1.bin")
    if kind == "bin":
        torch.save(second.state_dict(), tmp_path / "c" / "pytorch_model_1.bin")
    else:
        save_file(second.state_dict(), tmp_path / "c" / "model_1.safetensors")
    convert(tmp_path / "c", tmp_path / "own")
    for path in (tmp_path / "c", tmp_path / "own"):
        state = new_state(3, 0.5)
        state["model_1"] = Net(4)
        state["optimizer_1"] = optimizer_of(state["model_1"], 0.5)
        bcp.load(path, state)
        assert_same(state["model"].state_dict(), saved["model"].state_dict())
        assert_same(state["model_1"].state_dict(), second.state_dict())
        assert state["optimizer_1"].param_groups[0]["lr"] == 0.75


def test_a_scheduler_that_is_refused_is_left_out_and_the_rest_loads(tmp_path: Path) -> None:
    saved = write(tmp_path / "c")
    torch.save({"lr_lambdas": [Touch(tmp_path / "touched")]}, tmp_path / "c" / "scheduler.pt")
    assert "scheduler.pt: refused (pickle_refused)" in bcp.open(tmp_path / "c").info.metadata["left_out"]
    state = new_state(2, 0.5)
    del state["scheduler"]
    bcp.load(tmp_path / "c", state)
    assert_same(state["model"].state_dict(), saved["model"].state_dict())
    assert not (tmp_path / "touched").exists()


def test_a_sound_scheduler_with_values_that_are_not_read_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "c")
    torch.save({"started": np.array(["2026-01-01"], dtype="datetime64[D]")}, tmp_path / "c" / "scheduler.pt")
    assert "scheduler.pt: of a form that this release does not read" in bcp.open(tmp_path / "c").metadata["left_out"]


def test_a_scheduler_with_a_tensor_that_lies_in_too_many_pieces_is_left_out_and_the_model_loads(tmp_path: Path) -> None:
    saved = write(tmp_path / "c")
    torch.save({"kept": torch.ones(2), "x": torch.randn(400, 400).t()}, tmp_path / "c" / "scheduler.pt")
    checkpoint = bcp.open(tmp_path / "c")
    assert "scheduler.pt: of a form that this release does not read" in checkpoint.metadata["left_out"]
    assert not [name for name in (*checkpoint, *checkpoint.objects) if name.startswith("scheduler")]
    model = Net(5)
    bcp.load(tmp_path / "c", {"model": model})
    assert_same(model.state_dict(), saved["model"].state_dict())


def test_an_optimizer_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "c")
    path = tmp_path / "c" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        bcp.open(tmp_path / "c")
    assert str(path) in caught.value.message


def test_an_optimizer_with_other_groups_is_refused(tmp_path: Path) -> None:
    """All parameters have one shape: nothing else would show that they stand in another order."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(3)) for name in "abcd"})
    saved = torch.optim.AdamW([{"params": [model["a"], model["c"]]}, {"params": [model["b"], model["d"]]}])
    for number, parameter in enumerate(model.values()):
        parameter.grad = torch.full((3,), float(number))
    saved.step()
    torch.save({"model": model.state_dict(), "optimizer": saved.state_dict()}, tmp_path / "x.pt")
    same = torch.optim.AdamW([{"params": [model["a"], model["c"]]}, {"params": [model["b"], model["d"]]}])
    bcp.load(tmp_path / "x.pt", {"model": model, "optimizer": same})
    assert same.state[model["b"]]["exp_avg"][0] == pytest.approx(0.1)
    for groups in (model.values(), [{"params": [each]} for each in model.values()]):
        with pytest.raises(bcp.CheckpointMismatchError) as caught:
            bcp.load(tmp_path / "x.pt", {"model": model, "optimizer": torch.optim.AdamW(groups)})
        assert "stand in groups of [2, 2], in the state in groups of" in caught.value.message


def test_files_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    write(tmp_path / "c", save_torch_sharded)
    (tmp_path / "c" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        bcp.open(tmp_path / "c")
    assert caught.value.kind == "missing_file"
    torch.save({"other": torch.ones(1)}, tmp_path / "c" / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(bcp.CheckpointCorruptError) as damaged:
        bcp.open(tmp_path / "c")
    assert damaged.value.kind == "bad_manifest"


def test_a_file_of_an_optimizer_or_scheduler_alone_loads(tmp_path: Path) -> None:
    saved = write(tmp_path / "c")
    state = new_state(2, 0.5)
    bcp.load(tmp_path / "c" / "scheduler.pt", {"scheduler": state["scheduler"]})
    assert state["scheduler"].state_dict() == saved["scheduler"].state_dict()
    key_map = [("^", "optimizer.")]
    report = bcp.load(tmp_path / "c" / "optimizer.pt", state, key_map=key_map, strict=False)
    assert not report.unexpected
    weight, of_saved = state["model"].body[0].weight, saved["model"].body[0].weight
    assert_same(state["optimizer"].state[weight], saved["optimizer"].state[of_saved])


def write_lightning(path: Path, num_optimizers: int = 1) -> list[dict[str, Any]]:
    saved = [trained(seed) for seed in range(num_optimizers)]
    checkpoint = {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": saved[0]["model"].state_dict(),
        "optimizer_states": [state["optimizer"].state_dict() for state in saved],
        "lr_schedulers": [state["scheduler"].state_dict() for state in saved],
        "callbacks": {"Best": {"best_model_score": torch.tensor(0.5)}},
        "history": [{"loss": 1.0}],
    }
    torch.save(checkpoint, path)
    return saved


KEY_MAP = [("^state_dict", "model"), ("^optimizer_states", "optimizer"), ("^lr_schedulers", "scheduler")]
NUMBERED = [KEY_MAP[0], (r"^optimizer_states\.0", "optimizer"), (r"^lr_schedulers\.0", "scheduler")]


@pytest.mark.parametrize("spelling", ["as it is", "lists", "key_map", "numbers"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_a_file_of_lightning_loads_whole(tmp_path: Path, spelling: str, *, is_converted: bool) -> None:
    path = tmp_path / "x.ckpt"
    (saved,) = write_lightning(path)
    if is_converted:
        convert(path, tmp_path / "own")
        path = tmp_path / "own"
    state = new_state(2, 0.5)
    if spelling in {"key_map", "numbers"}:
        report = bcp.load(path, state, key_map=KEY_MAP if spelling == "key_map" else NUMBERED)
    else:
        items = {key: state[key] if spelling == "as it is" else [state[key]] for key in ("optimizer", "scheduler")}
        named = {"state_dict": state["model"], "optimizer_states": items["optimizer"]}
        report = bcp.load(path, {**named, "lr_schedulers": items["scheduler"]})
    assert not report.unexpected
    assert_same(state["model"].state_dict(), saved["model"].state_dict())
    for of_new, of_saved in zip(state["model"].parameters(), saved["model"].parameters(), strict=True):
        assert_same(state["optimizer"].state[of_new], saved["optimizer"].state[of_saved])
    assert state["scheduler"].state_dict() == saved["scheduler"].state_dict()


def test_a_list_of_plain_dicts_stays_a_list(tmp_path: Path) -> None:
    write_lightning(tmp_path / "x.ckpt")
    state = {"history": [], "epoch": 0}
    bcp.load(tmp_path / "x.ckpt", state)
    assert state == {"history": [{"loss": 1.0}], "epoch": 1}


def test_an_object_that_takes_a_dict_is_not_given_a_list(tmp_path: Path) -> None:
    """It would fail when the state is already overwritten."""
    saved = trained(0)
    torch.save({"model": saved["model"].state_dict(), "scheduler": [saved["scheduler"].state_dict()]}, tmp_path / "x")
    state = new_state(2, 0.5)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"a list in the checkpoint.*LR takes a dict") as caught:
        bcp.load(tmp_path / "x", {key: state[key] for key in ("model", "scheduler")})
    assert caught.value.kind == "conflict"


def test_several_optimizers_of_one_list_load_by_number(tmp_path: Path) -> None:
    saved = write_lightning(tmp_path / "x.ckpt", 2)
    model = Net(5)
    optimizers = [optimizer_of(model, 0.5) for _ in range(2)]
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path / "x.ckpt", {"state_dict": model, "optimizer_states": optimizers[0]})
    assert 'as in {"optimizer_states": {"0": first, "1": second}}' in caught.value.message
    by_number = {str(number): optimizer for number, optimizer in enumerate(optimizers)}
    bcp.load(tmp_path / "x.ckpt", {"state_dict": model, "optimizer_states": by_number})
    for optimizer, of_saved in zip(optimizers, saved, strict=True):
        weight = of_saved["model"].body[1].weight
        assert_same(optimizer.state[model.body[1].weight], of_saved["optimizer"].state[weight])


def test_an_object_does_not_take_a_checkpoint_of_something_else_for_its_state(tmp_path: Path) -> None:
    saved = write(tmp_path / "c")
    with pytest.raises(bcp.CheckpointMismatchError, match="the state of this StepLR is not in the checkpoint"):
        bcp.load(tmp_path / "c" / "rng_state.pth", {"scheduler": saved["scheduler"]})
    before = dict(saved["scheduler"].state_dict())
    torch.save({"last_epoch": 9}, tmp_path / "x.pt")
    with pytest.raises(bcp.CheckpointMismatchError):
        bcp.load(tmp_path / "x.pt", {"scheduler": saved["scheduler"]})
    assert saved["scheduler"].state_dict() == before
