"""The blocks of docs/integrations/recipes.md: Composer's and nanotron's by stand-ins, Levanter's with JAX."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "recipes.md"
SAMPLES = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(2))


def run_block(number: int, names: dict[str, Any]) -> dict[str, Any]:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    exec(compile(block, str(PAGE), "exec"), names)
    return names


class Timestamp:
    """Composer's, as far as the callback meets it."""

    def __init__(self) -> None:
        self.batch = SimpleNamespace(value=0)

    def state_dict(self) -> dict[str, Any]:
        return {"Timestamp": {"batch": self.batch.value}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch.value = state["Timestamp"]["batch"]


def train_like_composer(callback: Any, num_batches: int) -> tuple[list[float], nn.Module]:
    """Calls the events in the order of Composer's Trainer."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = SimpleNamespace(model=model, optimizers=[optimizer], schedulers=[scheduler], timestamp=Timestamp())
    callback.after_load(state, None)
    order = torch.randperm(len(SAMPLES), generator=torch.Generator().manual_seed(1))
    torch.rand(1)  # a loader draws its seed
    losses = []
    for batch in SAMPLES[order][state.timestamp.batch.value : num_batches]:
        callback.batch_start(state, None)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.timestamp.batch.value += 1
        callback.batch_checkpoint(state, None)
        losses.append(loss.item())
    return losses, model


def test_a_callback_of_composer_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composer = ModuleType("composer")
    composer.Callback = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "composer", composer)
    callbacks = run_block(0, {})["BcpCheckpoints"]
    train_like_composer(callbacks(tmp_path / "stopped", 3), 3)
    while bcp.latest(tmp_path / "stopped") != 3:  # it is written in the background
        time.sleep(0.01)
    losses, model = train_like_composer(callbacks(tmp_path / "stopped", 3), 6)
    wanted, uninterrupted = train_like_composer(callbacks(tmp_path / "whole", 3), 6)
    assert losses == wanted[3:]
    assert all(map(torch.equal, model.parameters(), uninterrupted.parameters()))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_a_tree_of_jax_comes_back(tmp_path: Path) -> None:
    import jax
    from jax import numpy as jnp

    tree = {"embed": jnp.arange(6.0).reshape(2, 3), "layers": [jnp.ones((2, 2), jnp.bfloat16), jnp.int32(4)]}
    names = run_block(1, {"bcp": bcp, "trainer_state": tree, "root": tmp_path, "step": 3})
    restored = names["trainer_state"]
    assert jax.tree_util.tree_structure(restored) == jax.tree_util.tree_structure(tree)
    for one, other in zip(jax.tree_util.tree_leaves(restored), jax.tree_util.tree_leaves(tree), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bool((one == other).all())
    assert bcp.open(tmp_path)["model.['embed']"].shape == (2, 3)


class TensorParallelTrainer:
    """What the recipe takes of nanotron's DistributedTrainer: parts of tensors, under one name on all ranks of `tp`."""

    def __init__(self, seed: int) -> None:
        rank = dist.get_rank()
        alone = [dist.new_group([each]) for each in range(dist.get_world_size())]
        self.parallel_context = SimpleNamespace(tp_pg=dist.group.WORLD, pp_pg=alone[rank], dp_pg=alone[rank])
        torch.manual_seed(seed + rank)
        self.unwrapped_model = nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.unwrapped_model.parameters(), lr=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.metadata = SimpleNamespace(consumed_train_samples=24)
        self.iteration_step = 3

    def step(self) -> list[torch.Tensor]:
        self.optimizer.zero_grad()
        self.unwrapped_model(SAMPLES[0]).square().mean().backward()
        self.optimizer.step()
        self.lr_scheduler.step()
        return [parameter.detach().clone() for parameter in self.unwrapped_model.parameters()]


def resume_like_nanotron(rank: int, world_size: int, folder: str) -> bool:
    save, load = run_halves()
    trainer = TensorParallelTrainer(seed=1)
    trainer.step()
    names = {"bcp": bcp, "dist": dist, "torch": torch, "root": folder, "trainer": trainer}
    exec(save, names)
    wanted = trainer.step()
    names["trainer"] = resumed = TensorParallelTrainer(seed=7)
    exec(save.split("bcp.save")[0], names)
    exec(load, names)
    return all(map(torch.equal, resumed.step(), wanted))


def run_halves() -> Sequence[str]:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[2]
    return block.split("\n\n")


def test_places_of_nanotron_come_back_with_a_role_each(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(resume_like_nanotron, str(tmp_path), world_size=2) == [True, True]
    weights = [bcp.open(tmp_path / f"pp0-tp{place}")["model.weight"][...] for place in (0, 1)]
    assert not torch.equal(*weights)
