"""Files with a tensor for each expert, loaded into models that hold all experts of a layer in one, on ranks that share
them in several ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

NUM_EXPERTS, INNER, HIDDEN = 6, 4, 8
NAMES = {"qwen2_moe": ("mlp", "gate_proj", "up_proj", "down_proj"), "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, INNER))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.gate = torch.nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.mlp.experts = Experts()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))


def write_files(path: Path, names: str) -> dict[str, torch.Tensor]:
    """Writes the files; returns what a model is to hold."""
    torch.manual_seed(7)
    block, gate, up, down = NAMES[names]
    files: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for layer in range(2):
        router = torch.randn(NUM_EXPERTS, HIDDEN)
        files[f"layers.{layer}.{block}.gate.weight"] = expected[f"layers.{layer}.mlp.gate.weight"] = router
        gates, ups, downs = (torch.randn(NUM_EXPERTS, *shape) for shape in ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),))
        for number in range(NUM_EXPERTS):
            for name, stack in ((gate, gates), (up, ups), (down, downs)):
                files[f"layers.{layer}.{block}.experts.{number}.{name}.weight"] = stack[number].clone()
        expected[f"layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gates, ups], 1)
        expected[f"layers.{layer}.mlp.experts.down_proj"] = downs
    path.mkdir()
    save_file(files, path / "model.safetensors")
    return expected


def sharded(layout: str, world_size: int) -> Model:
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    if layout == "fsdp2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    for layer in model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            dim = {"experts": 0, "rows": 1, "columns": 2}[layout]
            experts.register_parameter(
                name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
            )
    return model


def load_on(rank: int, world_size: int, path: str, layout: str) -> dict[str, torch.Tensor]:
    model = sharded(layout, world_size)
    bcp.load(path, {"model": model})
    return {name: _whole(value) for name, value in model.state_dict().items()}


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("layout", ["fsdp2", "experts", "rows", "columns"])
@pytest.mark.parametrize("names", list(NAMES))
def test_experts_in_files_fill_stacks_in_any_layout(workers: WorkerPool, tmp_path, names, layout):
    expected = write_files(tmp_path / "files", names)
    for found in workers.run(load_on, str(tmp_path / "files"), layout, world_size=2):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_state_with_separate_experts_gets_them_as_they_are(tmp_path):
    write_files(tmp_path / "files", "qwen2_moe")
    separate = bcp.open(tmp_path / "files").state_dict()
    state = {"model": {name: torch.zeros_like(value) for name, value in separate.items()}}
    bcp.load(tmp_path / "files", state)
    assert all(torch.equal(value, separate[name]) for name, value in state["model"].items())


def test_a_layer_that_lacks_an_expert_is_refused_by_the_names_in_the_file(tmp_path):
    write_files(tmp_path / "files", "qwen2_moe")
    names = bcp.open(tmp_path / "files").state_dict()
    del names["layers.1.mlp.experts.2.up_proj.weight"]
    save_file(names, tmp_path / "files" / "model.safetensors")
    model = Model()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        bcp.load(tmp_path / "files", {"model": model})
    assert not any(value.any() for name, value in model.state_dict().items() if "experts" in name)
