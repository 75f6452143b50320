"""Folders that DeepSpeed itself has saved, read in place: they hold what DeepSpeed says that its engines held; those
of universal checkpoints, which its own program makes of them, hold the same.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from formats.accounting import lost
from formats.foreign_files import convert

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_deepspeed import (
    SETUPS,
    Net,
    Setup,
    engine_of,
    join_deepspeed,
    optimizer_state_of,
    train,
    unequal,
    weights_of,
)

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # DeepSpeed warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(900),
]

READ = [
    "zero_1",
    "zero_1_fp32",
    "zero_1_round_robin",
    "zero_2",
    "zero_2_offloaded",
    "zero_3",
    "zero_3_fp32",
    "zero_3_in_sub_groups",
    "zero_3_offloaded",
    "bf16_optimizer",
]
MIXED_UP = {"zero_1_round_robin"}
"""Where DeepSpeed's own functions for single parameters give those of others."""
WITHOUT_ZERO = {"fp32": Setup(0, is_bf16=False), "bf16": Setup(0)}
UNIVERSAL = ["zero_1", "zero_2", "zero_3"]
Held = dict[str, dict[str, torch.Tensor]]


def train_and_save(rank: int, world_size: int, folder: str) -> tuple[Held, Held, Held]:
    """What each engine held: weights and optimizer state as DeepSpeed says, and what the modules have."""
    join_deepspeed(rank)
    weights, states, modules = {}, {}, {}
    for name in READ:
        engine = engine_of(SETUPS[name], seed=3)
        train(engine, 3)
        engine.save_checkpoint(f"{folder}/{name}")
        weights[name], states[name] = weights_of(engine), optimizer_state_of(engine)
        if "zero_3" not in name:
            modules[name] = {key: value.clone() for key, value in engine.module.state_dict().items()}
    return weights, states, modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def held(folder: Path) -> Iterator[tuple[Held, Held, Held]]:
    pool = WorkerPool()  # of its own, because DeepSpeed keeps the process group that it met first
    yield pool.run(train_and_save, str(folder), world_size=2, timeout_s=800)[0]
    pool.close()


@pytest.mark.parametrize("name", READ)
def test_a_folder_holds_what_deepspeed_says(folder: Path, held: tuple[Held, Held, Held], name: str) -> None:
    checkpoint = bcp.open(folder / name)
    assert checkpoint.info.format == "deepspeed"
    assert checkpoint.info.step == 3
    found = checkpoint.state_dict()
    weights, states, modules = (by_name.get(name, {}) for by_name in held)
    assert weights
    assert lost(folder / name / "global_step3", is_padded=True) == []
    if name not in MIXED_UP:
        assert unequal({fqn: found[f"model.{fqn}"] for fqn in weights}, weights) == []
        assert unequal({fqn: found[f"optimizer.state.{fqn}"] for fqn in states}, states) == []
    for fqn, tensor in modules.items():
        assert torch.equal(found[f"model.{fqn}"].to(tensor.dtype), tensor), fqn


@pytest.mark.parametrize("name", ["zero_1", "zero_3"])
def test_a_model_without_deepspeed_goes_on_from_it(folder: Path, held: tuple[Held, Held, Held], name: str) -> None:
    model = Net(seed=9)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.5)
    bcp.load(folder / name, {"model": model, "optimizer": optimizer}, cast=True)
    weights, states, _ = (by_name.get(name, {}) for by_name in held)
    assert unequal(dict(model.named_parameters()), weights) == []
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(optimizer.state[parameter]["exp_avg"], states[f"{fqn}.exp_avg"])
    assert optimizer.param_groups[0]["lr"] != 0.5


@pytest.mark.parametrize("name", UNIVERSAL)
def test_a_universal_checkpoint_holds_the_same(folder: Path, held: tuple[Held, Held, Held], name: str) -> None:
    source, target = folder / name / "global_step3", folder / f"universal_{name}"
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    arguments = ["--input_folder", str(source), "--output_folder", str(target), "--num_extract_workers", "1"]
    arguments += ["--num_merge_workers", "1"]
    subprocess.run([*program, *arguments], check=True, capture_output=True)
    found = bcp.open(target).state_dict()
    assert lost(target, is_padded=True) == []
    weights, states, _ = (by_name.get(name, {}) for by_name in held)
    assert unequal({fqn: found[f"model.{fqn}"] for fqn in weights}, weights) == []
    assert unequal({fqn: found[f"optimizer.state.{fqn}"] for fqn in states}, states) == []


def train_without_zero(rank: int, world_size: int, folder: str) -> Held:
    """Optimizer state of engines without ZeRO, by name of the parameter."""
    join_deepspeed(rank)
    held = {}
    for name, setup in WITHOUT_ZERO.items():
        engine = engine_of(setup, seed=3)
        train(engine, 3)
        engine.save_checkpoint(f"{folder}/without_zero_{name}")
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        trained = [fqn for fqn, each in engine.module.named_parameters() if each.requires_grad]
        states = zip(trained, inner.state.values(), strict=True)
        held[name] = {f"{fqn}.{key}": each[key].clone() for fqn, each in states for key in ("exp_avg", "exp_avg_sq")}
    return held


def test_training_without_zero_keeps_its_optimizer(folder: Path, tmp_path: Path) -> None:
    pool = WorkerPool()
    held = pool.run(train_without_zero, str(folder), world_size=2, timeout_s=800)[0]
    pool.close()
    for name in WITHOUT_ZERO:
        own = tmp_path / name
        assert lost(folder / f"without_zero_{name}" / "global_step3") == []
        source = folder / f"without_zero_{name}"
        convert(source, own)
        for path in (source, own):
            model = Net(seed=9)
            optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.5)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
            state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
            bcp.load(path, state, cast=name == "bf16")
            by_name = {fqn: optimizer.state[each] for fqn, each in model.named_parameters() if each.requires_grad}
            found = {f"{fqn}.{key}": each[key] for fqn, each in by_name.items() for key in ("exp_avg", "exp_avg_sq")}
            assert unequal(found, held[name]) == []
            assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (pytest.approx(0.001), 3)
