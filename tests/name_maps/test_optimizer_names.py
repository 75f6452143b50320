"""Optimizers seen through a name map: each parameter keeps its state, whatever module of the state it is in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bytecheckpoint as bcp

AROUND = """
[[around]]
one = "{0}"
other = "{0}"
"""
STATE = """
[[around]]
one = "optimizer.state.{0}.exp_avg"
other = "optimizer.state.{0}.exp_avg"
[[around]]
one = "optimizer.state.{0}.exp_avg_sq"
other = "optimizer.state.{0}.exp_avg_sq"
[[around]]
one = "optimizer.state.{0}.step"
other = "optimizer.state.{0}.step"
equal_parts = true
"""
MAP = """
format = 1
sides = ["one", "other"]
[[tensors]]
one = "layers.{n}.whole"
other = "h.{n}.whole"
[[tensors]]
one = "layers.{n}.qk"
other = ["h.{n}.q", "h.{n}.k"]
interleave = {}
"""


def module(container: str, names: Sequence[str]) -> nn.Module:
    """Two layers with tensors of these names."""
    lengths = {name: 4 if name == "qk" else 2 for name in names}
    layers = [nn.ParameterDict({name: torch.rand(length, 3) for name, length in lengths.items()}) for _ in range(2)]
    return nn.ModuleDict({container: nn.ModuleList(layers)})


def training(container: str, names: Sequence[str], shared: Sequence[str]) -> dict[str, Any]:
    """A model, another module that has some tensors of it, and an optimizer of both, after a step."""
    model, teacher = module(container, names), module(container, names)
    teacher[container][0].update({name: model[container][0][name] for name in shared})
    parameters = list(dict.fromkeys([*model.parameters(), *teacher.parameters()]))
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return {"model": model, "teacher": teacher, "optimizer": optimizer}


def assert_same(name: str, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Compares the tensors of a module, and their moments and steps, across the map."""
    for one, other in ((["whole"], ["whole"]), (["qk"], ["q", "k"])):
        for layer, of_map in zip(saved[name]["layers"], loaded[name]["h"], strict=True):
            expected, found = of_layer(saved, layer, one), of_layer(loaded, of_map, other)
            assert all(map(torch.equal, found, expected))


def of_layer(state: dict[str, Any], layer: nn.ParameterDict, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
    states = [state["optimizer"].state[layer[name]] for name in names]
    moments = torch.cat([each["exp_avg"] for each in states])
    return torch.cat([layer[name] for name in names]), moments, states[-1]["step"]


def test_parameters_of_a_module_beside_the_model_and_of_both_keep_their_state(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    around = "".join(AROUND.replace("{0}", each) for each in ("{name}", "model.{name}", "teacher.{name}"))
    around += "".join(STATE.replace("{0}", each) for each in ("{name}", "teacher.{name}"))
    path.write_text(MAP + around)
    options = bcp.LoadOptions(name_map=bcp.NameMap(path))
    saved = training("layers", ["whole", "qk"], ["qk"])
    bcp.save(tmp_path / "saved", saved)
    loaded = training("h", ["whole", "q", "k"], ["q", "k"])
    bcp.load(tmp_path / "saved", loaded, options=options)
    assert_same("model", saved, loaded)
    assert_same("teacher", saved, loaded)
    alone = training("h", ["whole", "q", "k"], [])
    alone["optimizer"] = torch.optim.AdamW(alone["teacher"].parameters())
    del alone["model"]
    bcp.load(tmp_path / "saved", alone, options=options, strict=False)
    assert_same("teacher", saved, alone)
