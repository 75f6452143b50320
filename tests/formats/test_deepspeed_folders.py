"""Folders laid out as DeepSpeed lays them out, with the numbers of its sources: docs/foreign.md says which. Real ones
are in tests/frameworks.
"""

from __future__ import annotations

import enum
import math
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import assert_same, convert
from plain_leaves import plain_leaves

import bytecheckpoint as bcp
from bytecheckpoint.formats.find_checkpoint import Opening, find_checkpoint, manifest_of
from bytecheckpoint.tools.analysis.diagnosis.parts import find_parts

SHAPES = {"a.weight": (5,), "b.weight": (2, 3), "c.weight": (4, 2)}
"""5, 6 and 8 elements: on two ranks a part begins inside of `b.weight`, on four ranks inside of each."""


def value(name: str, key: str) -> torch.Tensor:
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name + key)))
    return torch.randn(shape, generator=generator)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Classes that DeepSpeed pickles, under their names."""

    class fragment_address:  # noqa: N801
        def __init__(self, numel: int, start: int) -> None:
            self.numel, self.start = numel, start

    class LossScaler:
        def __init__(self) -> None:
            self.cur_scale = 1

    stages = enum.IntEnum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3})
    homes = {
        "deepspeed.utils.tensor_fragment": fragment_address,
        "deepspeed.runtime.fp16.loss_scaler": LossScaler,
        "deepspeed.runtime.zero.config": stages,
    }
    for module, cls in homes.items():
        cls.__module__, cls.__qualname__ = module, cls.__name__
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            if name not in sys.modules or length == len(parts):
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        setattr(sys.modules[module], cls.__name__, cls)
    return types.SimpleNamespace(fragment_address=fragment_address, LossScaler=LossScaler, stages=stages)


def model_states(module: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": ["mean"],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {"tied.weight": "b.weight"},
        "lr_scheduler": {"last_epoch": 3},
        "global_steps": 7,
        "global_samples": 28,
        "skipped_steps": 0,
        "dp_world_size": 2,
        "ds_version": "0.19.8",
        "my_epoch": 4,
    }


def write_shared(folder: Path, num_ranks: int, classes: types.SimpleNamespace) -> None:
    """As ZeRO 1 and 2: fp32 without padding, the state of the optimizer with it."""
    folder.mkdir(parents=True)
    module = {name: value(name, "weight").bfloat16() for name in SHAPES} | {"mean": torch.ones(3)}
    module["tied.weight"] = module["b.weight"]
    torch.save(model_states(module), folder / "mp_rank_00_model_states.pt")
    total = sum(map(math.prod, SHAPES.values()))
    part = -(-total // (2 * num_ranks)) * 2
    flat = {
        key: torch.cat(
            [*(value(name, key).flatten() for name in SHAPES), torch.full((part * num_ranks - total,), 99.0)]
        )
        for key in ("weight", "exp_avg", "exp_avg_sq")
    }
    for rank in range(num_ranks):
        start, end = rank * part, (rank + 1) * part
        state = {key: flat[key][start:end].clone() for key in ("exp_avg", "exp_avg_sq")}
        optimizer = {
            "loss_scaler": classes.LossScaler(),
            "zero_stage": classes.stages.gradients,
            "partition_count": [num_ranks],
            "single_partition_of_fp32_groups": [flat["weight"][start : max(start, min(end, total))].clone()],
            "base_optimizer_state": {
                "state": {0: {**state, "step": torch.tensor(5.0)}},
                "param_groups": [{"lr": 0.25, "betas": (0.9, 0.99), "params": [0]}],
            },
            "param_slice_mappings": [OrderedDict(a=classes.fragment_address(5, 0))],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)


def write_divided(folder: Path, num_ranks: int, classes: types.SimpleNamespace, *, num_buffers: int = 1) -> None:
    """As ZeRO 3, where parameters are divided one by one, and buffers may end between them."""
    folder.mkdir(parents=True)
    names = list(SHAPES)
    groups = [names] if num_buffers == 1 else [names[:1], names[1:]]
    for rank in range(num_ranks):
        of_rank = {
            key: [torch.cat([shard(name, key, rank, num_ranks) for name in group]) for group in groups]
            for key in ("weight", "exp_avg")
        }
        empty = dict.fromkeys([*SHAPES, "tied.weight"], torch.empty(0))
        states = model_states({**empty, "mean": torch.ones(3)})
        states["param_shapes"] = [OrderedDict((name, torch.Size(SHAPES[name])) for name in group) for group in groups]
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optimizer = {
            "zero_stage": classes.stages.weights,
            "partition_count": num_ranks,
            "fp32_flat_groups": of_rank["weight"],
            "optimizer_state_dict": {
                "state": {index: {"exp_avg": each, "step": 5} for index, each in enumerate(of_rank["exp_avg"])},
                "param_groups": [{"lr": 0.25, "betas": (0.9, 0.99), "params": list(range(len(groups)))}],
            },
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, folder / name)


def shard(name: str, key: str, rank: int, num_ranks: int) -> torch.Tensor:
    flat = value(name, key).flatten()
    share = -(-flat.numel() // num_ranks)
    mine = flat[rank * share : (rank + 1) * share]
    return torch.cat([mine, torch.full((share - mine.numel(),), 99.0)])


def test_weights_in_nested_dicts_are_those_in_full_precision(tmp_path: Path, classes: types.SimpleNamespace) -> None:
    """As Megatron-DeepSpeed writes them."""
    write_shared(tmp_path / "ds", 1, classes)
    file = tmp_path / "ds" / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)
    saved["module"] = {"language_model": {name: saved["module"][name] for name in SHAPES}, "hook": {"n": 5}}
    saved["shared_params"] = {}
    torch.save(saved, file)
    stored = bcp.open(tmp_path / "ds")
    for name in SHAPES:
        assert torch.equal(stored[f"model.{name}"][...], value(name, "weight"))
    state = {"model": {"hook": {"n": 0}}}
    bcp.load(tmp_path / "ds", state, include=["model.hook.n"])
    assert state["model"]["hook"]["n"] == 5


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 11])
def test_parameters_are_found_in_what_ranks_share(tmp_path: Path, num_ranks: int, classes: Any) -> None:
    write_shared(tmp_path / "run" / "global_step7", num_ranks, classes)
    (tmp_path / "run" / "latest").write_text("global_step7")
    checkpoint = bcp.open(tmp_path / "run")
    found = checkpoint.state_dict()
    assert checkpoint.info.format == "deepspeed"
    assert checkpoint.info.step == 7
    for name in SHAPES:
        assert_same({"": found[f"model.{name}"]}, {"": value(name, "weight")})
        assert_same({"": found[f"module.{name}"]}, {"": value(name, "weight").bfloat16()})
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same({"": found[f"optimizer.state.{name}.{key}"]}, {"": value(name, key)})
        assert found[f"optimizer.state.{name}.step"] == 5.0
    assert_same({"": found["model.tied.weight"]}, {"": found["model.b.weight"]})  # in full precision
    assert torch.equal(found["model.mean"], torch.ones(3))
    objects = plain_leaves(checkpoint)
    assert objects["optimizer.groups.a.weight.values.lr"] == 0.25
    assert (objects["optimizer.facts.engine.global_steps"], objects["my_epoch"]) == (7, 4)


@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 11])
def test_parameters_are_found_that_are_divided_one_by_one(
    tmp_path: Path, num_ranks: int, num_buffers: int, classes: Any
) -> None:
    write_divided(tmp_path / "global_step7", num_ranks, classes, num_buffers=num_buffers)
    checkpoint = bcp.open(tmp_path / "global_step7")
    found = checkpoint.state_dict()
    for name in SHAPES:
        assert_same({"": found[f"model.{name}"]}, {"": value(name, "weight")})
        assert_same({"": found[f"optimizer.state.{name}.exp_avg"]}, {"": value(name, "exp_avg")})
        assert plain_leaves(checkpoint)[f"optimizer.state.{name}.step"] == 5
    assert_same({"": found["model.tied.weight"]}, {"": found["model.b.weight"]})  # not the empty tensor of ZeRO 3
    assert not any(fqn.startswith("module.") for fqn in found)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(2, 3), (4,), ()])
def test_a_frozen_parameter_that_zero_3_divided_has_its_shape(
    tmp_path: Path, num_ranks: int, shape: tuple[int, ...], classes: Any
) -> None:
    """That of one rank stayed flat."""
    write_divided(tmp_path / "c", num_ranks, classes)
    frozen = torch.arange(math.prod(shape)).reshape(shape)
    share = -(-frozen.numel() // num_ranks)
    padded = torch.cat([frozen.flatten(), torch.full((share * num_ranks - frozen.numel(),), 99)])
    for rank, part in enumerate(padded.split(share)):
        path = tmp_path / "c" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        states = torch.load(path) | {"frozen_param_shapes": {"frozen": frozen.shape}}
        torch.save(states | {"frozen_param_fragments": {"frozen": part.clone()}}, path)
    assert_same({"": bcp.open(tmp_path / "c").state_dict()["model.frozen"]}, {"": frozen})


@pytest.mark.parametrize(("dtype", "casts"), [(torch.bfloat16, True), (torch.int64, False)])
def test_the_lines_that_load_a_model_of_zero_3_in_several_precisions_cast(
    tmp_path: Path, classes: Any, dtype: torch.dtype, casts: bool
) -> None:
    write_divided(tmp_path / "c", 2, classes)
    for path in (tmp_path / "c").glob("*_model_states.pt"):
        states = torch.load(path)
        states["module"]["mean"] = states["module"]["mean"].to(dtype)
        torch.save(states, path)
    (model, *_) = find_parts(manifest_of(find_checkpoint(str(tmp_path / "c"), "latest", Opening({}))))
    assert (model.name, model.needs_cast) == ("model", casts)


class Part(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("write", [write_shared, write_divided], ids=["shared", "divided"])
def test_a_model_and_its_optimizer_go_on_without_deepspeed(tmp_path: Path, write: Any, classes: Any) -> None:
    write(tmp_path / "global_step7", 3, classes)
    model = torch.nn.ModuleDict({name[0]: Part(shape) for name, shape in SHAPES.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    bcp.load(tmp_path / "global_step7", {"model": model, "optimizer": optimizer}, exclude=["model.mean", "model.tied*"])
    for name in SHAPES:
        parameter = model[name[0]].weight
        assert torch.equal(parameter, value(name, "weight"))
        assert torch.equal(optimizer.state[parameter]["exp_avg"], value(name, "exp_avg"))
        assert optimizer.state[parameter]["step"] == 5.0
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_what_is_missing_or_cut_in_other_ways_is_said(tmp_path: Path, classes: Any) -> None:
    folder = tmp_path / "global_step7"
    write_shared(folder, 2, classes)

    def kind_of() -> str:
        with pytest.raises(bcp.CheckpointError) as caught:
            bcp.open(folder)
        return caught.value.kind

    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").rename(tmp_path / "kept")
    assert kind_of() == "missing_file"
    (tmp_path / "kept").rename(folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "kept")
    assert kind_of() == "missing_file"
    (tmp_path / "kept").rename(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert bcp.open(folder)
    (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(
        (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes()
    )
    assert kind_of() == "conflict"
    (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    (folder / "mp_rank_01_model_states.pt").write_bytes(b"")
    assert kind_of() == "unsupported_version"
    (folder / "mp_rank_01_model_states.pt").unlink()
    (folder / "layer_00-model_00-model_states.pt").write_bytes(b"")
    assert kind_of() == "unsupported_version"
    (folder / "layer_00-model_00-model_states.pt").unlink()
    first = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    of_first = torch.load(first, weights_only=False)
    of_first["optimizer_state_dict"]["ds_zero_partition_groups"] = [[0], [1]]
    torch.save(of_first, first)
    assert kind_of() == "unsupported_version"
    del of_first["optimizer_state_dict"]["ds_zero_partition_groups"]
    torch.save(of_first, first)
    (folder / "mp_rank_00_model_states.pt").unlink()
    assert kind_of() == "missing_file"
    torch.save({"module": {}, "param_shapes": [{"a.weight": (500,)}]}, folder / "mp_rank_00_model_states.pt")
    assert kind_of() == "bad_manifest"


def write_without_zero(folder: Path, *, is_wrapped: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """As training without ZeRO: torch's optimizer lies in the model states, in bfloat16 inside a wrapper's state."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    inner = optimizer.state_dict()
    masters = [[parameter.detach().clone() for parameter in model.parameters()]]
    wrapper = {"cur_scale": 1.0, "optimizer_state_dict": inner, "fp32_groups": masters}
    folder.mkdir(parents=True)
    states = model_states(dict(model.state_dict())) | {"optimizer": wrapper if is_wrapped else inner}
    states |= {"param_shapes": None, "shared_params": None, "ds_config": {"train_batch_size": 2}}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    return model, optimizer


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("is_converted", [False, True])
def test_the_optimizer_of_training_without_zero_is_kept(
    tmp_path: Path, *, is_wrapped: bool, is_converted: bool
) -> None:
    path = tmp_path / "global_step7"
    model, optimizer = write_without_zero(path, is_wrapped=is_wrapped)
    if is_converted:
        convert(path, tmp_path / "own")
        path = tmp_path / "own"
    new = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    new_optimizer = torch.optim.AdamW(new.parameters(), lr=0.5)
    report = bcp.load(path, {"model": new, "optimizer": new_optimizer})
    assert not report.missing
    assert_same(new.state_dict(), model.state_dict())
    for of_new, of_saved in zip(new.parameters(), model.parameters(), strict=True):
        assert_same(new_optimizer.state[of_new], optimizer.state[of_saved])
    assert new_optimizer.param_groups[0]["lr"] == 0.125
    tensors = bcp.open(path).state_dict()
    assert ("mixed_precision.fp32_groups.0.1" in tensors) == is_wrapped
    assert bcp.open(path).info.metadata["left_out"].startswith("ds_config: ")


def test_extra_state_of_a_module_is_kept(tmp_path: Path) -> None:
    tmp_path.joinpath("c").mkdir()
    states = model_states({"weight": torch.ones(2), "norm._extra_state": {"amax": torch.full((3,), 2.0)}})
    torch.save(states | {"param_shapes": None, "shared_params": None}, tmp_path / "c" / "mp_rank_00_model_states.pt")
    assert torch.equal(bcp.open(tmp_path / "c").state_dict()["model.norm._extra_state.amax"], torch.full((3,), 2.0))


class WithTensorAsExtraState(torch.nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return self.amax

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = state


def test_extra_state_that_is_a_tensor_is_loaded_into_its_module(tmp_path: Path) -> None:
    module, loaded = WithTensorAsExtraState(2, 2), WithTensorAsExtraState(2, 2)
    module.amax, loaded.amax = torch.ones(3), torch.zeros(3)
    tmp_path.joinpath("c").mkdir()
    states = model_states(dict(module.state_dict())) | {"param_shapes": None, "shared_params": None}
    torch.save(states, tmp_path / "c" / "mp_rank_00_model_states.pt")
    bcp.load(tmp_path / "c", {"model": loaded})
    assert torch.equal(loaded.amax, module.amax)


def test_a_value_of_a_module_that_is_no_tensor_is_kept(tmp_path: Path) -> None:
    tmp_path.joinpath("c").mkdir()
    states = model_states({"weight": torch.ones(2), "num_updates": 3}) | {"param_shapes": None, "shared_params": None}
    torch.save(states, tmp_path / "c" / "mp_rank_00_model_states.pt")
    assert plain_leaves(bcp.open(tmp_path / "c"))["model.num_updates"] == 3


def test_a_dynamic_loss_scale_is_kept_and_what_other_ranks_have_of_their_own_is_named(
    tmp_path: Path, classes: Any
) -> None:
    write_shared(tmp_path / "c", 2, classes)
    for rank in range(2):
        name = tmp_path / "c" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        states = torch.load(name, weights_only=False)
        scaler = states["optimizer_state_dict"]["loss_scaler"]
        scaler.cur_scale, scaler.cur_iter, scaler.dynamic = 512.0, 9, True
        states["optimizer_state_dict"]["residuals"] = [torch.ones(2)]
        torch.save(states, name)
    first = tmp_path / "c" / "mp_rank_00_model_states.pt"
    states = torch.load(first, weights_only=False) | {"noise": torch.ones(2)}
    for rank in range(2):
        torch.save(states, first.with_name(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
    first.unlink()
    checkpoint = bcp.open(tmp_path / "c")
    scaler = "optimizer.facts.loss_scaler"
    found = plain_leaves(checkpoint)
    assert (found[f"{scaler}.cur_scale"], found[f"{scaler}.cur_iter"]) == (512.0, 9)
    left_out = checkpoint.info.metadata["left_out"]
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: residuals" in left_out
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt: noise" in left_out
    assert "zero_pp_rank_0_mp_rank_00_model_states.pt" not in left_out


def test_parameters_that_only_begin_at_one_address_are_not_tied(tmp_path: Path, classes: Any) -> None:
    """DeepSpeed names them as tied: those got the shape of the other one."""
    write_shared(tmp_path / "c", 1, classes)
    path = tmp_path / "c" / "mp_rank_00_model_states.pt"
    states = torch.load(path)
    frozen = {"whole": torch.arange(3.0), "part": torch.arange(2.0), "none": torch.ones(0, 3)}
    frozen["nothing"] = torch.ones(0, 5)
    states["module"] |= frozen
    states["shared_params"] |= {"part": "whole", "nothing": "none"}
    torch.save(states, path)
    found = bcp.open(tmp_path / "c").state_dict()
    assert_same({name: found[f"model.{name}"] for name in frozen}, frozen)


def test_a_rank_whose_weights_have_another_dtype_is_refused(tmp_path: Path, classes: Any) -> None:
    """Its bytes were read as elements of the first rank's dtype."""
    write_shared(tmp_path / "c", 2, classes)
    path = tmp_path / "c" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=False)
    groups = states["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[:] = [each.half() for each in groups]
    torch.save(states, path)
    with pytest.raises(bcp.CheckpointCorruptError, match=r"is float16, and float32 in .*rank_0_"):
        bcp.open(tmp_path / "c")


def test_buffers_of_several_dtypes_are_refused(tmp_path: Path, classes: Any) -> None:
    """The bytes of the second were read as elements of the first one's dtype."""
    write_divided(tmp_path / "c", 1, classes, num_buffers=2)
    path = tmp_path / "c" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=False)
    of_second = states["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]
    of_second["exp_avg"] = of_second["exp_avg"].half()
    torch.save(states, path)
    with pytest.raises(bcp.CheckpointCorruptError, match=r"exp_avg are not all float32"):
        bcp.open(tmp_path / "c")


@pytest.mark.parametrize("kind", ["model_states", "optim_states"])
def test_two_files_of_one_rank_are_refused(tmp_path: Path, classes: Any, kind: str) -> None:
    """One of them was read, now this one and now that one."""
    write_shared(tmp_path / "c", 1, classes)
    old = next(path for path in (tmp_path / "c").iterdir() if kind in path.name)
    (tmp_path / "c" / f"zero_pp_rank_0_mp_rank_00_{kind}.pt").write_bytes(old.read_bytes())
    with pytest.raises(bcp.CheckpointMismatchError, match="which are of one rank"):
        bcp.open(tmp_path / "c")


def test_a_users_value_under_a_name_that_the_entries_have_is_named_as_left_out(tmp_path: Path) -> None:
    write_without_zero(tmp_path / "c", is_wrapped=False)
    path = tmp_path / "c" / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path) | {"engine": "a V8", 1: "a", "1": "b"}, path)
    left_out = bcp.open(tmp_path / "c").info.metadata["left_out"]
    assert left_out.startswith(f"{path.name}: engine, {path.name}: 1: another entry has this name; ")


def test_a_weight_without_dimensions_in_a_universal_checkpoint_is_a_weight(tmp_path: Path) -> None:
    model_file = {
        "module": {"scale": torch.tensor(2.5).bfloat16()},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict(scale=torch.Size(()))],
        "shared_params": {},
    }
    torch.save(model_file, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "zero" / "scale").mkdir(parents=True)
    for key, number in {"fp32": 2.5625, "exp_avg": 0.5}.items():
        torch.save({"param": torch.tensor(number)}, tmp_path / "zero" / "scale" / f"{key}.pt")
    stored = bcp.open(tmp_path)
    assert stored["model.scale"][...].item() == 2.5625
    assert stored["optimizer.state.scale.exp_avg"][...].item() == 0.5
