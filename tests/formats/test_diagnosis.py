"""`bcp doctor --checkpoint` on what every program writes: it says what wrote it, and each line of code that it prints
runs and loads what was saved.
"""

from __future__ import annotations

import ast
import pickle
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_files
import msgspec
import pytest
import test_dcp_nested as groups
import test_deepspeed_folders as deepspeed
import test_megatron_dist as megatron_dist
import test_trainer_folders as trainer
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import Touch, assert_same
from low_bit import int8
from program_calls import call
from stream_loaders import StreamLoader, state_of
from test_deepspeed_folders import classes
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import bytecheckpoint as bcp
from bytecheckpoint.adapters.data.stream_wire import MARK
from bytecheckpoint.manifest import Manifest, encode_manifest
from bytecheckpoint.tools.analysis.diagnosis import parts
from bytecheckpoint.tools.analysis.diagnosis.load_code import quoted
from bytecheckpoint.tools.analysis.summary import TensorEntry

__all__ = ["call", "classes"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Names = dict[str, Any]


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def trained(seed: int, model: torch.nn.Module | None = None) -> Names:
    model = model or network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(seed):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def fresh() -> Names:
    names = trained(9)
    names["optimizer"].state.clear()
    return names


@dataclass
class Case:
    """A checkpoint that some program wrote."""

    path: Path
    saved: Names
    """Live objects that must be equal to those of `new` after the load."""
    new: Callable[[], Names] = fresh
    """Makes the live objects that the printed code names."""
    writer: str = "torch.save"
    step: int | None = None
    world_size: int | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    """Kinds of some parts by name."""


class Outer(torch.nn.Module):
    """Stands for a LightningModule."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = network(seed)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.net(value)


class AppState:
    """As torch's tutorials have it."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def state_dict(self) -> Names:
        model, optimizer = get_state_dict(self.names["model"], self.names["optimizer"])
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: Names) -> None:
        given = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(self.names["model"], self.names["optimizer"], **given)


def torch_file(folder: Path) -> Case:
    saved = trained(1)
    state = {name: each.state_dict() for name, each in saved.items()}
    torch.save({**state, "epoch": 3, "global_step": 70, "rng": torch.get_rng_state()}, folder / "x.pt")
    kinds = {"model": "model", "optimizer": "optimizer", "scheduler": "scheduler", "rng": "random numbers"}
    return Case(folder / "x.pt", saved, step=70, kinds={**kinds, "epoch": "values"})


def torch_file_with_other_names(folder: Path) -> Case:
    saved = trained(1)
    keys = {"net": "model", "optim": "optimizer", "lr_sched": "scheduler"}
    torch.save({key: saved[name].state_dict() for key, name in keys.items()}, folder / "x.pt")
    return Case(folder / "x.pt", saved)


def torch_file_of_ddp(folder: Path) -> Case:
    saved = trained(1)
    weights = {f"module._orig_mod.{name}": each for name, each in saved["model"].state_dict().items()}
    torch.save({"model": weights, "optimizer": saved["optimizer"].state_dict()}, folder / "x.pt")
    return Case(folder / "x.pt", {name: saved[name] for name in ("model", "optimizer")})


def torch_file_of_dicts_of_optimizers(folder: Path) -> Case:
    """Each kind in a dict of its own, as a program of two models has it."""
    live = {seed: trained(seed) for seed in (1, 2)}
    kinds = ("model", "optimizer", "scheduler")
    states = {f"{kind}s": {f"m{seed}": live[seed][kind].state_dict() for seed in live} for kind in kinds}
    torch.save(states, folder / "x")

    def named(names: dict[int, Names]) -> Names:
        model = torch.nn.ModuleDict({f"m{seed}": names[seed]["model"] for seed in names})
        others = {f"{kind}s_m{seed}": names[seed][kind] for seed in names for kind in kinds[1:]}
        return {"model": model, **others}

    parts = {f"{kind}s.m{seed}": kind for kind in kinds[1:] for seed in live}
    return Case(folder / "x", named(live), lambda: named({1: fresh(), 2: fresh()}), kinds=parts)


def bare_weights(folder: Path) -> Case:
    saved = {"model": network(1)}
    torch.save(saved["model"].state_dict(), folder / "x.pt")
    return Case(folder / "x.pt", saved, kinds={"": "model"})


def bare_weights_of_ddp(folder: Path) -> Case:
    saved = {"model": network(1)}
    weights = {f"module.{name}": each for name, each in saved["model"].state_dict().items()}
    torch.save({**weights, "epoch": 3}, folder / "x.pt")
    return Case(folder / "x.pt", saved)


def bare_weights_beside_a_value(folder: Path) -> Case:
    saved = {"model": network(1)}
    torch.save({**saved["model"].state_dict(), "epoch": 3}, folder / "x.pt")
    return Case(folder / "x.pt", saved, kinds={"": "model", "epoch": "values"})


def optimizer_alone(folder: Path) -> Case:
    saved = trained(1)
    torch.save(saved["optimizer"].state_dict(), folder / "optimizer.pt")
    return Case(folder / "optimizer.pt", {"optimizer": saved["optimizer"]}, kinds={"": "optimizer"})


def optimizer_with_a_name_and_no_model(folder: Path) -> Case:
    saved = trained(1)
    torch.save({"optimizer": saved["optimizer"].state_dict(), "epoch": 3}, folder / "optimizer.pt")
    return Case(folder / "optimizer.pt", {"optimizer": saved["optimizer"]})


def scheduler_alone(folder: Path) -> Case:
    saved = trained(2)
    torch.save(saved["scheduler"].state_dict(), folder / "scheduler.pt")
    return Case(folder / "scheduler.pt", {"scheduler": saved["scheduler"]}, kinds={"": "scheduler"})


def dcp_folder(folder: Path) -> Case:
    saved = trained(1)
    model, optimizer = get_state_dict(saved["model"], saved["optimizer"])
    state = {"model": model, "optimizer": optimizer, "scheduler": saved["scheduler"].state_dict(), "step": 7}
    dcp.save(state, checkpoint_id=folder / "x", no_dist=True)
    return Case(folder / "x", saved, writer="torch.distributed.checkpoint", step=7, world_size=1)


def dcp_folder_of_an_app(folder: Path) -> Case:
    saved = trained(1)
    dcp.save({"app": AppState(saved)}, checkpoint_id=folder / "x", no_dist=True)

    def new() -> Names:
        names = fresh()
        return {**names, "app": AppState(names)}

    found = {name: saved[name] for name in ("model", "optimizer")}
    return Case(folder / "x", found, new, "torch.distributed.checkpoint", kinds={"app": "object"})


def lightning_file(folder: Path) -> Case:
    saved = trained(2, Outer(2))
    lists = {"optimizer_states": [saved["optimizer"].state_dict()], "lr_schedulers": [saved["scheduler"].state_dict()]}
    facts = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 5, "callbacks": {"best": torch.ones(())}}
    torch.save({**facts, "state_dict": saved["model"].state_dict(), **lists}, folder / "x.ckpt")

    def new() -> Names:
        names = trained(9, Outer(9))
        names["optimizer"].state.clear()
        return names

    return Case(folder / "x.ckpt", saved, new, "Lightning", 5, kinds={"state_dict": "model", "callbacks": "tensors"})


def lightning_file_of_two_optimizers(folder: Path) -> Case:
    saved = trainer.write_lightning(folder / "x.ckpt", 2)
    by_name = {"model": saved[0]["model"]}
    by_name |= {f"optimizer_states_{number}": each["optimizer"] for number, each in enumerate(saved)}

    def new() -> Names:
        states = [trainer.new_state(9, 0.5) for _ in range(2)]
        names = {f"lr_schedulers_{number}": each["scheduler"] for number, each in enumerate(states)}
        names |= {f"optimizer_states_{number}": trainer.optimizer_of(states[0]["model"], 0.5) for number in range(2)}
        return {**names, "model": states[0]["model"]}

    return Case(folder / "x.ckpt", by_name, new, "Lightning", 3)


def lightning_folder(folder: Path) -> Case:
    saved = trained(1)
    model, optimizer = get_state_dict(saved["model"], saved["optimizer"])
    dcp.save({"model": model, "optimizer_0": optimizer}, checkpoint_id=folder / "x.ckpt", no_dist=True)
    torch.save({"epoch": 1, "global_step": 5}, folder / "x.ckpt" / "meta.pt")
    found = {name: saved[name] for name in ("model", "optimizer")}
    return Case(folder / "x.ckpt", found, writer="Lightning (sharded)")


def trainer_folder(folder: Path) -> Case:
    saved = trainer.write(folder / "checkpoint-500")
    return Case(folder / "checkpoint-500", saved, lambda: trainer.new_state(9, 0.5), "the Trainer of transformers", 500)


def hugging_face_folder(folder: Path) -> Case:
    saved = trainer.trained(1)
    (folder / "m").mkdir()
    trainer.save_one(folder / "m", saved["model"].state_dict())
    (folder / "m" / "config.json").write_text("{}")
    found = {"model": saved["model"]}
    return Case(folder / "m", found, lambda: trainer.new_state(9, 0.5), "Hugging Face (safetensors)")


def hugging_face_folder_in_fp8(folder: Path) -> Case:
    found = hugging_face_folder(folder)
    tensors = dict(found.saved["model"].state_dict())
    for name in [name for name, value in tensors.items() if value.dim() == 2]:
        scales = torch.full((1, 1), 0.5)
        numbers = tensors[name].to(torch.float8_e4m3fn)
        tensors[name].copy_(numbers.float() * scales)
        tensors |= {name: numbers, f"{name}_scale_inv": scales}
    trainer.save_one(folder / "m", tensors)
    return found


def accelerate_folder(folder: Path) -> Case:
    saved = trainer.write(folder / "state", suffix="bin")
    (folder / "state" / "trainer_state.json").unlink()
    return Case(folder / "state", saved, lambda: trainer.new_state(9, 0.5), "Accelerate")


def other(seed: int) -> Names:
    model, optimizer = groups.trained(seed, 0)
    return {"model": model, "optimizer": optimizer}


def accelerate_folder_of_fsdp(folder: Path) -> Case:
    model, optimizer = groups.write_accelerate(folder / "x")
    saved = {"model": model, "optimizer": optimizer}
    return Case(folder / "x", saved, lambda: other(1), "Accelerate (FSDP)")


def open_source_root(folder: Path) -> Case:
    model, optimizer = groups.write_oss(folder / "global_step_3")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    saved = {"model": model, "optimizer": optimizer}
    kinds = {"extra_state": "values of ranks"}
    return Case(folder, saved, lambda: other(1), "the open-source ByteCheckpoint", 3, 2, kinds)


def deepspeed_without_zero(folder: Path) -> Case:
    model, optimizer = deepspeed.write_without_zero(folder / "global_step7", is_wrapped=True)
    (folder / "latest").write_text("global_step7")

    def new() -> Names:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}

    saved = {"model": model, "optimizer": optimizer}
    return Case(folder, saved, new, "DeepSpeed without ZeRO", 7, kinds={"mixed_precision": "tensors"})


def own_checkpoint(folder: Path) -> Case:
    saved = trained(1)
    loader = StreamLoader({"a": state_of("a", 3)})
    more = {"rng": bcp.RngState(), "data": bcp.DataLoaderState(loader, rank=0, size=1), "epoch": 3}
    more |= {"seen": bcp.RankLocal({"count": 4}), "limit": torch.ones(2)}
    bcp.save(folder, {**saved, **more}, step=5)

    def new() -> Names:
        return {**fresh(), "loader": StreamLoader({"a": state_of("a")}), "dp_rank": 0, "dp_size": 1}

    kinds = {"model": "model", "data": "data", "rng": "random numbers", "seen": "values of ranks", "limit": "tensors"}
    return Case(folder, saved, new, "this library", 5, 1, kinds)


def own_checkpoint_of_several_models(folder: Path) -> Case:
    saved = {"actor": network(1), "critic": network(2)}
    bcp.save(folder / "x", saved)
    kinds = {"actor": "model", "critic": "model"}
    return Case(folder / "x", saved, lambda: {"actor": network(8), "critic": network(9)}, "this library", kinds=kinds)


def own_checkpoint_of_two_models_and_their_optimizer(folder: Path) -> Case:
    def new(seed: int = 8) -> Names:
        model, head = network(seed), network(seed + 1)
        return {"model": model, "head": head, "optimizer": torch.optim.AdamW([*model.parameters(), *head.parameters()])}

    saved = new(1)
    sum(parameter.sum() for group in saved["optimizer"].param_groups for parameter in group["params"]).backward()
    saved["optimizer"].step()
    bcp.save(folder / "x", saved)
    kinds = {"model": "model", "head": "model", "optimizer": "optimizer"}
    return Case(folder / "x", saved, new, "this library", kinds=kinds)


def own_checkpoint_of_models_with_other_names(folder: Path) -> Case:
    def new(seed: int = 8) -> Names:
        backbone, top = network(seed), network(seed + 1)
        return {
            "backbone": backbone,
            "top": top,
            "optimizer": torch.optim.AdamW([*top.parameters(), *backbone.parameters()]),
        }

    saved = new(1)
    sum(parameter.sum() for group in saved["optimizer"].param_groups for parameter in group["params"]).backward()
    saved["optimizer"].step()
    bcp.save(folder / "x", saved)
    kinds = {"backbone": "model", "top": "model", "optimizer": "optimizer"}
    return Case(folder / "x", saved, new, "this library", kinds=kinds)


def own_checkpoint_of_one_model_with_another_name(folder: Path) -> Case:
    saved = trained(1)
    del saved["scheduler"]
    bcp.save(folder / "x", {"net": saved["model"], "optimizer": saved["optimizer"]})
    return Case(folder / "x", saved, writer="this library", kinds={"net": "model"})


def own_checkpoint_of_a_dict_in_the_state(folder: Path) -> Case:
    saved = trained(1)
    bcp.save(folder / "x", {"train": {**saved, "epoch": 3}})
    kinds = {"train.model": "model", "train.optimizer": "optimizer", "train.epoch": "values"}
    return Case(folder / "x", saved, writer="this library", kinds=kinds)


def own_checkpoint_of_a_list_in_the_state(folder: Path) -> Case:
    def new(seed: int = 8) -> Names:
        return {"things_0": network(seed), "things_1": network(seed + 1)}

    saved = new(1)
    bcp.save(folder / "x", {"things": [*saved.values(), "other"]})
    kinds = {"things.0": "model", "things.1": "model", "things.2": "values"}
    return Case(folder / "x", saved, new, "this library", kinds=kinds)


class Hooked(torch.nn.Sequential):
    """A module whose state_dict has plain data below its modules, as that of some quantized ones."""

    def __init__(self, seed: int) -> None:
        super().__init__(network(seed), network(seed + 1))
        self[0].register_state_dict_post_hook(_add_kind)
        self[0].register_load_state_dict_pre_hook(lambda _, state, prefix, *__: state.pop(f"{prefix}0.kind", None))


def _add_kind(_module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[f"{prefix}0.kind"] = "nf4"


def own_checkpoint_of_a_module_with_plain_data(folder: Path) -> Case:
    def new(seed: int = 8) -> Names:
        model = Hooked(seed)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    saved = new(1)
    sum(parameter.sum() for parameter in saved["model"].parameters()).backward()
    saved["optimizer"].step()
    bcp.save(folder / "x", {"backbone": saved["model"], "optimizer": saved["optimizer"]})
    kinds = {"backbone": "model", "optimizer": "optimizer", "backbone.0.0.kind": "values"}
    return Case(folder / "x", saved, new, "this library", kinds=kinds)


def own_checkpoint_without_names(folder: Path) -> Case:
    saved = {"model": trainer.Net(1)}
    bcp.save(folder / "x", saved["model"].body.state_dict())
    return Case(folder / "x", {"model": saved["model"].body}, lambda: {"model": trainer.Net(9).body}, "this library")


def converted_checkpoint(folder: Path) -> Case:
    found = trainer_folder(folder)
    trainer.convert(found.path, folder / "own")
    found.path, found.writer = folder / "own", "this library"
    return found


CASES = [
    torch_file,
    torch_file_with_other_names,
    torch_file_of_ddp,
    torch_file_of_dicts_of_optimizers,
    bare_weights,
    bare_weights_of_ddp,
    bare_weights_beside_a_value,
    optimizer_alone,
    optimizer_with_a_name_and_no_model,
    scheduler_alone,
    dcp_folder,
    dcp_folder_of_an_app,
    lightning_file,
    lightning_file_of_two_optimizers,
    lightning_folder,
    trainer_folder,
    hugging_face_folder,
    hugging_face_folder_in_fp8,
    accelerate_folder,
    accelerate_folder_of_fsdp,
    open_source_root,
    deepspeed_without_zero,
    own_checkpoint,
    own_checkpoint_of_several_models,
    own_checkpoint_of_two_models_and_their_optimizer,
    own_checkpoint_of_models_with_other_names,
    own_checkpoint_of_one_model_with_another_name,
    own_checkpoint_of_a_dict_in_the_state,
    own_checkpoint_of_a_list_in_the_state,
    own_checkpoint_of_a_module_with_plain_data,
    own_checkpoint_without_names,
    converted_checkpoint,
]


def run(code: dict[str, Any], names: Names) -> Names:
    """Runs a code of the report with these live objects."""
    given = {name: names[name] for name in code["needs"]}
    exec("\n".join([*code["imports"], *code["lines"]]), given)
    return given


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.nn.Module):
        assert_same(tensors_of(found), tensors_of(expected))
        return
    found, expected = found.state_dict(), expected.state_dict()
    if "param_groups" not in expected:
        assert found == expected
        return
    assert found["state"].keys() == expected["state"].keys()
    for key, values in expected["state"].items():
        assert_same(found["state"][key], values)
    assert [group["lr"] for group in found["param_groups"]] == [group["lr"] for group in expected["param_groups"]]


@pytest.mark.parametrize("write", CASES, ids=lambda write: write.__name__)
def test_the_code_for_a_checkpoint_runs_and_loads_what_was_saved(tmp_path: Path, call: Any, write: Any) -> None:
    case = write(tmp_path)
    ended = call("doctor", "--checkpoint", case.path, "--json")
    assert ended.code == 0, ended.out
    found = ended.json
    assert (found["writer"], found["step"]) == (case.writer, case.step)
    assert case.world_size in {None, found["world_size"]}
    assert case.kinds.items() <= {part["name"]: part["kind"] for part in found["parts"]}.items()
    assert found["code"]
    for number, code in enumerate(found["code"]):
        if "that it has as" in code["does"]:
            continue  # which is another module
        names = case.new()
        run(code, names)
        if number == 0:
            for name, saved in case.saved.items():
                assert_equal(names[name], saved)
    printed = call("doctor", "--checkpoint", case.path)
    assert printed.code == 0
    for code in found["code"]:
        assert all(f"    {line}\n" in printed.out for line in code["lines"])


@pytest.mark.parametrize("write", [torch_file, lightning_file, trainer_folder], ids=lambda write: write.__name__)
def test_the_model_alone_is_loaded_by_its_own_code(tmp_path: Path, call: Any, write: Any) -> None:
    case = write(tmp_path)
    codes = call("doctor", "--checkpoint", case.path, "--json").json["code"]
    (alone,) = [code for code in codes if code["does"].endswith("alone") and "that it has" not in code["does"]]
    names = case.new()
    run(alone, names)
    assert_equal(names["model"], case.saved["model"])


def test_the_module_in_a_lightning_module_is_loaded_by_its_own_code(tmp_path: Path, call: Any) -> None:
    case = lightning_file(tmp_path)
    codes = call("doctor", "--checkpoint", case.path, "--json").json["code"]
    (inner,) = [code for code in codes if "'net'" in code["does"]]
    names = {"model": network(9)}
    run(inner, names)
    assert_equal(names["model"], case.saved["model"].net)


def test_values_and_generators_are_read_by_their_code(tmp_path: Path, call: Any) -> None:
    case = torch_file(tmp_path)
    codes = call("doctor", "--checkpoint", case.path, "--json").json["code"]
    drawn = torch.rand(3)  # as after the save
    found: Names = {}
    for code in codes:
        if not code["needs"]:
            found |= run(code, {})
    assert (found["epoch"], found["global_step"]) == (3, 70)
    assert torch.equal(torch.rand(3), drawn)


def test_values_of_ranks_are_read_by_their_code(tmp_path: Path, call: Any) -> None:
    case = own_checkpoint(tmp_path)
    codes = call("doctor", "--checkpoint", case.path, "--json").json["code"]
    found: Names = {}
    for code in codes:
        if not code["needs"]:
            found |= run(code, {})
    assert found["by_rank"] == {0: {"count": 4}}
    assert torch.equal(found["tree"]["limit"], torch.ones(2))


def test_large_tensors_of_ranks_are_no_model(tmp_path: Path, call: Any) -> None:
    large = torch.ones(20_000)
    bcp.save(tmp_path, {"alone": bcp.RankLocal(large), "nested": bcp.RankLocal({"weight": large}), "x": torch.ones(2)})
    found = call("doctor", "--checkpoint", tmp_path, "--json").json
    parts = {part["name"]: (part["kind"], part["num_bytes"]) for part in found["parts"]}
    of_ranks = ("values of ranks", large.nbytes)
    assert parts == {"alone": of_ranks, "nested": of_ranks, "x": ("tensors", 8)}
    assert not any(code["needs"] for code in found["code"])


def test_facts_of_quantized_weights_are_no_values_beside_the_model(tmp_path: Path, call: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 2))
    model[0].weight = torch.nn.Parameter(int8(1), requires_grad=False)
    bcp.save(tmp_path, {"model": model, "net.@subclass": [1]})
    found = call("doctor", "--checkpoint", tmp_path, "--json").json["parts"]
    assert [(part["name"], part["kind"]) for part in found] == [("model", "model"), ("net.@subclass", "values")]


def test_many_tensors_without_a_module_are_not_compared_with_one_another(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("two tensors were compared")

    bcp.save(tmp_path / "c", {f"t{number}": torch.zeros(2) for number in range(3)})
    monkeypatch.setattr(TensorEntry, "__eq__", refuse)
    report = call("doctor", "--checkpoint", tmp_path / "c", "--json").json
    assert [part["name"] for part in report["parts"]] == ["t0", "t1", "t2"]


def test_plain_data_is_looked_at_once_and_not_for_each_tensor(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(parts, "is_model_state", looks.append)
    layers = {f"layer{number}.weight": torch.ones(2) for number in range(3)}
    torch.save({**layers, "w0": torch.ones(2), "w1": torch.ones(2), "v0": {"a": 1}, "v1": {"a": 1}}, tmp_path / "c.pt")
    assert call("doctor", "--checkpoint", tmp_path / "c.pt").code == 0
    assert len(looks) == 2


def test_weights_of_zero_load_into_a_model_and_a_torch_optimizer(tmp_path: Path, call: Any, classes: Any) -> None:
    deepspeed.write_shared(tmp_path / "global_step7", 3, classes)
    found = call("doctor", "--checkpoint", tmp_path / "global_step7", "--json").json
    assert (found["writer"], found["step"], found["world_size"]) == ("DeepSpeed (ZeRO)", 7, 2)
    model = torch.nn.ModuleDict({name[0]: deepspeed.Part(shape) for name, shape in deepspeed.SHAPES.items()})
    model.register_buffer("mean", torch.zeros(3))
    model.register_module("tied", model["b"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    run(found["code"][0], {"model": model, "optimizer": optimizer})
    for name in deepspeed.SHAPES:
        parameter = model[name[0]].weight
        assert torch.equal(parameter, deepspeed.value(name, "weight"))
        assert torch.equal(optimizer.state[parameter]["exp_avg"], deepspeed.value(name, "exp_avg"))


def test_buffers_of_another_precision_are_cast(tmp_path: Path, call: Any, classes: Any) -> None:
    deepspeed.write_shared(tmp_path / "c", 2, classes)
    path = tmp_path / "c" / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    states["module"]["mean"] = states["module"]["mean"].bfloat16()
    torch.save(states, path)
    code = call("doctor", "--checkpoint", tmp_path / "c", "--json").json["code"]
    model = modules_of({**{name: torch.zeros(shape) for name, shape in deepspeed.SHAPES.items()}})
    model.register_buffer("mean", torch.zeros(3))
    model.register_module("tied", model.b)
    (alone,) = [each for each in code if each["does"] == "load the model alone"]
    run(alone, {"model": model})
    assert model.mean.tolist() == [1.0, 1.0, 1.0]


def modules_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose parameters have these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *above, last = name.split(".")
        at = root
        for part in above:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(torch.zeros_like(tensor)))
    return root


def test_megatrons_older_folders_load_into_modules_of_its_names(tmp_path: Path, call: Any) -> None:
    expected = megatron_files.truth()
    megatron_files.write(tmp_path / "iter_0000020", expected, megatron_files.Grid(tp=2))
    found = call("doctor", "--checkpoint", tmp_path / "iter_0000020", "--json").json
    assert (found["writer"], found["step"], found["world_size"]) == ("Megatron (--ckpt-format torch)", 20, 2)
    model = modules_of(expected)
    run(found["code"][0], {"model": model})
    assert_same(dict(model.named_parameters()), expected)
    for code in found["code"][1:]:
        run(code, {})


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_megatrons_torch_dist_loads_and_says_that_its_optimizer_does_not(
    tmp_path: Path, call: Any, *, has_optimizer: bool
) -> None:
    name = "decoder.layers.mlp.linear_fc1.weight"
    weights = {name: megatron_dist.WEIGHT, "embedding.word_embeddings.weight": torch.ones(3, 2)}
    moments = {f"optimizer.state.exp_avg.{key}": torch.ones_like(each) for key, each in weights.items()}
    dcp.save({**weights, **(moments if has_optimizer else {})}, checkpoint_id=tmp_path / "c", no_dist=True)
    torch.save({**megatron_dist.COMMON, "opt_param_scheduler": megatron_dist.SCHEDULE}, tmp_path / "c" / "common.pt")
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    found = call("doctor", "--checkpoint", tmp_path / "c", "--json").json
    assert (found["writer"], found["step"]) == ("Megatron (torch_dist)", 10)
    into = {part["name"]: part["into"] for part in found["parts"] if part["kind"] == "optimizer"}
    assert into == ({"optimizer": None} if has_optimizer else {})
    (alone,) = [code for code in found["code"] if code["needs"] == ["model"]]
    model = modules_of(weights)
    run(alone, {"model": model})
    assert_same(dict(model.named_parameters()), weights)


def test_what_a_save_did_not_finish_is_named(tmp_path: Path, call: Any) -> None:
    for step in (1, 2, 3):
        bcp.save(tmp_path / "run", {"model": network(1)}, step=step)
    (tmp_path / "run" / "step_00000003" / "manifest.bcp").unlink()
    found = call("doctor", "--checkpoint", tmp_path / "run", "--json").json
    assert found["step"] == 2
    assert [(each["step"], each["committed"]) for each in found["neighbours"]] == [(3, False), (1, True)]
    ended = call("doctor", "--checkpoint", tmp_path / "run" / "step_00000003", "--json")
    assert (ended.code, ended.json["error"]["kind"], ended.json["code"]) == (3, "not_committed", [])
    assert "did not finish" in call("doctor", "--checkpoint", tmp_path / "run" / "step_00000003").out


def test_a_folder_of_checkpoints_names_them(tmp_path: Path, call: Any) -> None:
    for step in (500, 1000):
        trainer.write(tmp_path / f"checkpoint-{step}")
    ended = call("doctor", "--checkpoint", tmp_path, "--json")
    assert ended.code == 3
    assert [each["step"] for each in ended.json["neighbours"]] == [500, 1000]
    assert str(tmp_path / "checkpoint-500") in call("doctor", "--checkpoint", tmp_path).out


def test_a_folder_that_is_nothing_of_these_says_what_it_may_be(tmp_path: Path, call: Any) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "x", no_dist=True)
    (tmp_path / "x" / ".metadata").unlink()
    ended = call("doctor", "--checkpoint", tmp_path / "x", "--json")
    assert (ended.code, ended.json["format"]) == (3, None)
    assert "did not finish" in ended.json["looks_like"]
    (tmp_path / "text").write_text("a text, and no checkpoint")
    ended = call("doctor", "--checkpoint", tmp_path / "text", "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "not_found")
    assert call("doctor", "--checkpoint", tmp_path / "nothing").err.startswith("error: there is nothing")


def test_no_pickle_is_run(tmp_path: Path, call: Any) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"model": Touch(tmp_path / "touched")}))
    torch.save({"model": Touch(tmp_path / "touched")}, tmp_path / "y.pt")
    ended = [call("doctor", "--checkpoint", tmp_path / name, "--json") for name in ("x.pt", "y.pt")]
    assert [each.json["error"]["kind"] for each in ended] == ["not_found", "pickle_refused"]
    assert [each.code for each in ended] == [3, 1]
    assert not (tmp_path / "touched").exists()


def test_a_link_is_loaded_by_code_that_follows_it(tmp_path: Path, call: Any) -> None:
    case = trainer_folder(tmp_path)
    assert call("convert", case.path, tmp_path / "link", "--to", "bcp", "--link").code == 0
    found = call("doctor", "--checkpoint", tmp_path / "link", "--json").json
    assert found["writer"] == "bcp convert --link, of safetensors"
    names = case.new()
    run(found["code"][0], names)
    assert_equal(names["model"], case.saved["model"])


def test_the_command_to_convert_is_one(tmp_path: Path, call: Any) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    case = torch_file(folder)
    _, *command = shlex.split(call("doctor", "--checkpoint", case.path, "--json").json["convert"])
    assert call(*command).code == 0
    assert bcp.open(f"{case.path}-bcp").objects["epoch"] == 3


def test_a_checkpoint_or_a_storage_is_examined_and_not_both(tmp_path: Path, call: Any) -> None:
    for arguments in ([], [tmp_path, "--checkpoint", tmp_path], ["--checkpoint", tmp_path, "--seconds", 0]):
        assert call("doctor", *arguments).code == 2


def test_the_code_is_right_and_safe_for_names_with_any_character(tmp_path: Path, call: Any) -> None:
    names = ['a"+x()+"_model', "b\\1_model", "c'\n\"\n_model", "d\\_model", "d/_model"]
    saved = {name: network(number) for number, name in enumerate(names)}
    states = {name: {f"module.{key}": item for key, item in each.state_dict().items()} for name, each in saved.items()}
    torch.save(states, tmp_path / "x.pt")
    found = call("doctor", "--checkpoint", tmp_path / "x.pt", "--json").json["code"]
    codes = {each["does"]: each for each in found}
    assert len(set(found[0]["needs"])) == len(names)
    for name in names:
        code = codes[f"load {name!r} alone"]
        model = network(9)
        run(code, {code["needs"][0]: model})
        assert_same(model.state_dict(), saved[name].state_dict())
    printed = call("doctor", "--checkpoint", tmp_path / "x.pt").out
    assert all(f"    {line}\n" in printed for code in found for line in code["lines"])


@pytest.mark.parametrize(
    ("values", "variables"),
    [
        ({"values": 1, "x\u00b2": 2, "bcp": 3}, ["value_values", "x2", "value_bcp"]),
        ({"\u6b65": 1, "\u8f6e": 2, "\uff42\uff43\uff50": 3}, ["\u6b65", "\u8f6e", "value_bcp"]),
        ({"a-b": 1, "a_b": 2, "\u0f33": 3}, ["a_b", "a_b_2", "value_"]),
    ],
)
def test_values_whose_names_are_no_variables_are_read_all_the_same(
    tmp_path: Path, call: Any, values: dict[str, int], variables: Sequence[str]
) -> None:
    torch.save(values, tmp_path / "x.pt")
    (code,) = call("doctor", "--checkpoint", tmp_path / "x.pt", "--json").json["code"]
    found = run(code, {})
    assert [found[variable] for variable in variables] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("", '""'),
        ("it's", '"it\'s"'),
        ('say "x"', "'say \"x\"'"),
        ("it's \"x", '"it\'s \\"x"'),
        ('it\'s "x"', "'it\\'s \"x\"'"),
        ("a\\b\n\u202e", '"a\\\\b\\n\\u202e"'),
    ],
)
def test_a_literal_has_the_quotes_that_formatters_choose(text: str, literal: str) -> None:
    assert quoted(text) == literal
    assert ast.literal_eval(literal) == text


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"state": {}, "groups": {"a": {"params": 5}}}, "values"),
        ({"state": {}, "groups": {"a": {"params": {"x": None}}}}, "optimizer"),
        ({MARK: 1, "size": "many"}, "data"),
    ],
)
def test_a_value_of_almost_the_form_of_another_ends_no_report(tmp_path: Path, call: Any, value: Any, kind: str) -> None:
    manifest = Manifest(save_id="abc", step=None, files=[], tensors={}, objects={"x": msgspec.msgpack.encode(value)})
    (tmp_path / "manifest.bcp").write_bytes(encode_manifest(manifest))
    (part,) = call("doctor", "--checkpoint", tmp_path, "--json").json["parts"]
    assert part["kind"] == kind


def test_the_code_needs_the_storage_options_that_were_given(call: Any) -> None:
    bcp.save("memory://with_options/run", {"model": network(1), "epoch": 3})
    arguments = ("doctor", "--checkpoint", "memory://with_options/run", "--storage-option", "use_listings_cache=false")
    codes = call(*arguments, "--json").json["code"]
    assert [code["needs"] for code in codes] == [["model", "storage_options"], ["storage_options"]]
    assert "with your model and storage_options:" in call(*arguments).out


def test_no_credentials_of_a_url_are_shown(call: Any) -> None:
    url = "memory://name:secret@diagnosed/run"
    bcp.save(url, trained(1))
    for options in ([], ["--json"]):
        ended = call("doctor", "--checkpoint", url, *options)
        assert ended.code == 0
        assert "memory://diagnosed/run" in ended.out
        assert "secret" not in ended.out
