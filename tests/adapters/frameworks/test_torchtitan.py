"""torchtitan's own OptimizersContainer and ModelWrapper, where torchtitan is installed: what its checkpointer passes to
torch.distributed.checkpoint goes through the library, there and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from training import mlp, same_module, same_value, train

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli

optimizer_of_titan = pytest.importorskip("torchtitan.components.optimizer")
base = pytest.importorskip("torchtitan.components.checkpointer.base")
pytestmark = pytest.mark.filterwarnings("ignore")


def build(seed: int, *, is_mixed: bool) -> tuple[nn.Module, list[nn.Module], Any]:
    model = mlp(seed)
    parts = [nn.ModuleDict({"0": model[0], "1": model[1]}), nn.ModuleDict({"3": model[3]})]
    config = optimizer_of_titan.default_adamw(lr=0.01)
    config.implementation = "foreach"
    if is_mixed:
        settings = {"optimizer_name": "Adam", "optimizer_kwargs": {"lr": 0.02}}
        config.param_groups.insert(0, optimizer_of_titan.ParamGroupConfig(pattern=r".*bias$", **settings))
    return model, parts, optimizer_of_titan.OptimizersContainer(config, model_parts=parts)


@pytest.mark.parametrize("is_mixed", [True, False])
def test_what_torchtitan_checkpoints_goes_there_and_back(tmp_path: Path, is_mixed: bool) -> None:
    model, parts, container = build(0, is_mixed=is_mixed)
    train(model, [container], 3)
    bcp.save(tmp_path / "own", {"model": base.ModelWrapper(parts), "optimizer": container})
    other, other_parts, restored = build(1, is_mixed=is_mixed)
    bcp.load(tmp_path / "own", {"model": base.ModelWrapper(other_parts), "optimizer": restored})
    assert same_module(model, other)
    assert same_value(container.state_dict(), restored.state_dict())

    arguments = ["convert", tmp_path / "own", tmp_path / "dcp", "--to", "dcp", "--flatten-optimizer"]
    assert CliRunner().invoke(cli, [*map(str, arguments), "--rename", r"^model\.="]).exit_code == 0
    other, other_parts, restored = build(2, is_mixed=is_mixed)
    wrapper = base.ModelWrapper(other_parts)
    state = {**wrapper.state_dict(), "optimizer": restored}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    wrapper.load_state_dict({key: value for key, value in state.items() if key != "optimizer"})
    assert same_module(model, other)
    assert same_value(container.state_dict(), restored.state_dict())

    saved = {**base.ModelWrapper(parts).state_dict(), "optimizer": container}
    dcp.save(saved, checkpoint_id=tmp_path / "titan", no_dist=True)
    other, other_parts, restored = build(3, is_mixed=is_mixed)
    bare = {"model": other_parts, "optimizer": restored.optimizers}
    bcp.load(tmp_path / "titan", bare, key_map=[(r"^(?!optimizer\b)", "model.")])
    assert same_module(model, other)
    assert same_value(container.state_dict(), restored.state_dict())
