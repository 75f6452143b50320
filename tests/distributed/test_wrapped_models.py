"""Models as training scripts wrap them and in the middle of what these do: names and values must be those of the
model, and training must go on as if nobody had looked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import Training

import bytecheckpoint as bcp
from bytecheckpoint.adapters.native.module_walk import tree_of
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FSDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept whole": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": BFLOAT16},
    "kept whole, mixed precision": {"reshard_after_forward": False, "mp_policy": BFLOAT16},
}


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 3))


class Sharded(Training):
    """A model of which fully_shard has the first layer and the whole, and its optimizer, after two steps or none."""

    def __init__(self, rank: int, options: dict[str, Any], *, seed: int, num_steps: int) -> None:
        self._rank = rank
        self.model = layers(seed)
        fully_shard(self.model[0], **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for step in range(num_steps):
            self.step(step)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + self._rank)
        return self.model(torch.randn(6, 4, generator=generator)).float().square().sum()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them whole, with the shards in place again."""
        whole = {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, tensor in self.optimizer.state[parameter].items():
                whole[f"{name}.{key}"] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        return whole


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_after_forward(rank: int, world_size: int, path: str, case: str, *, in_mid_step: bool) -> list[bool]:
    options = FSDP_OPTIONS[case]
    undisturbed = Sharded(rank, options, seed=0, num_steps=2)
    expected = undisturbed.tensors()
    saved = Sharded(rank, options, seed=0, num_steps=2)
    if in_mid_step:
        saved.step(2, lambda: bcp.save(path, saved.state, options=OPTIONS))
    else:
        saved.evaluate()
        bcp.save(path, saved.state, options=OPTIONS)
        saved.step(2)
    undisturbed.step(2)
    restored = Sharded(rank, options, seed=1, num_steps=1)
    restored.evaluate()
    bcp.load(path, restored.state)
    is_as_saved = same(restored.tensors(), expected)
    restored.step(2)
    return [
        is_as_saved,
        same(saved.tensors(), undisturbed.tensors()),
        same(restored.tensors(), undisturbed.tensors()),
    ]


def save_after_evaluation(rank: int, world_size: int, path: str, case: str) -> list[bool]:
    return save_after_forward(rank, world_size, path, case, in_mid_step=False)


def save_before_backward(rank: int, world_size: int, path: str, case: str) -> list[bool]:
    return save_after_forward(rank, world_size, path, case, in_mid_step=True)


@pytest.mark.parametrize("case", FSDP_OPTIONS)
@pytest.mark.parametrize("save", [save_after_evaluation, save_before_backward])
def test_saving_and_loading_after_a_forward_pass_without_a_backward_pass(
    workers: WorkerPool, tmp_path: Path, save: Any, case: str
) -> None:
    assert workers.run(save, str(tmp_path), case, world_size=2) == [[True] * 3] * 2
    checkpoint = bcp.open(tmp_path)
    assert checkpoint["model.0.weight"].dtype == torch.float32
    assert checkpoint["optimizer.state.0.weight.exp_avg"].shape == (7, 4)


def is_walked(rank: int, world_size: int) -> bool:
    return tree_of(Sharded(rank, {}, seed=0, num_steps=1).model).is_saved_as_usual


def test_a_sharded_model_is_walked_and_its_state_dict_not_called(workers: WorkerPool) -> None:
    assert workers.run(is_walked, world_size=1) == [True]


class Tower(nn.Module):
    """A model of which only a part is trained with DistributedDataParallel, and has a part called `module` itself."""

    def __init__(self, seed: int, *, wrap: bool) -> None:
        super().__init__()
        trunk = nn.ModuleDict({"module": layers(seed)})
        self.trunk = DistributedDataParallel(trunk) if wrap else trunk
        self.head = nn.Linear(3, 2)


class Compiled(nn.Module):
    """Names as torch.compile gives them, without compiling."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def wrapped(kind: str, seed: int, *, wrap: bool) -> nn.Module:
    if kind == "child":
        return Tower(seed, wrap=wrap)
    model = DistributedDataParallel(layers(seed)) if wrap else layers(seed)
    if kind == "averaged":
        return torch.optim.swa_utils.AveragedModel(model)
    return Compiled(model) if wrap and kind == "compiled" else model


def reload_wrapped(rank: int, world_size: int, root: str, kind: str) -> list[bool]:
    """Saved with DistributedDataParallel and loaded without, and the other way round: that all values arrive."""
    is_same = []
    for wrap in (True, False):
        path = f"{root}/{wrap}"
        source, target = wrapped(kind, 0, wrap=wrap), wrapped(kind, 1, wrap=not wrap)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for model, lr in ((source, 0.5), (target, 0.1))]
        for parameter in source.parameters():
            optimizers[0].state[parameter] = {"exp_avg": parameter.detach() * 2}
        bcp.save(path, {"model": source, "optimizer": optimizers[0]}, options=OPTIONS)
        bcp.load(path, {"model": target, "optimizer": optimizers[1]})
        pairs = list(zip(source.parameters(), target.parameters(), strict=True))
        is_same.append(all(torch.equal(a, b) for a, b in pairs))
        is_same.append(all(torch.equal(a * 2, optimizers[1].state[b]["exp_avg"]) for a, b in pairs))
    return is_same


NAMES = {
    "top": "model.2.weight",
    "compiled": "model.2.weight",
    "averaged": "model.module.2.weight",
    "child": "model.trunk.module.2.weight",
}


@pytest.mark.parametrize("kind", NAMES)
def test_distributed_data_parallel_changes_no_names_wherever_it_stands(
    workers: WorkerPool, tmp_path: Path, kind: str
) -> None:
    assert workers.run(reload_wrapped, str(tmp_path), kind, world_size=2) == [[True] * 4] * 2
    names = [bcp.open(tmp_path / str(wrap)).keys() for wrap in (True, False)]
    assert names[0] == names[1]
    assert NAMES[kind] in names[0]
