"""Engines of DeepSpeed on gloo, without a GPU, and what DeepSpeed itself says that they hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

import bytecheckpoint as bcp

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
STATES = ("exp_avg", "exp_avg_sq")


class Setup(NamedTuple):
    stage: int
    is_bf16: bool = True
    zero: Mapping[str, Any] = MappingProxyType({})
    more: Mapping[str, Any] = MappingProxyType({})
    """Of the configuration."""


SETUPS = {
    "zero_1": Setup(1),
    "zero_1_fp32": Setup(1, is_bf16=False),
    "zero_1_round_robin": Setup(1, zero={"round_robin_gradients": True, "parameter_alignment": True}),
    "zero_2": Setup(2),
    "zero_2_offloaded": Setup(2, zero=OFFLOADED),
    "zero_3": Setup(3),
    "zero_3_fp32": Setup(3, is_bf16=False),
    "zero_3_in_sub_groups": Setup(3, zero={"sub_group_size": 20, "stage3_param_persistence_threshold": 10}),
    "zero_3_offloaded": Setup(3, zero=OFFLOADED | {"offload_param": {"device": "cpu"}}),
    "bf16_without_zero": Setup(0),
    "bf16_optimizer": Setup(1, more={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero_3_hpz": Setup(3, zero={"zero_hpz_partition_size": 2}),
}


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        self.gain = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs) * self.gain + self.frozen


def join_deepspeed(rank: int) -> None:
    """Uses the process group that there is. An op that DeepSpeed would compile first is left out."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed(dist_backend="gloo")


def engine_of(setup: Setup, *, seed: int) -> Any:
    import deepspeed

    model = Net(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": setup.stage, **setup.zero},
        "bf16": {"enabled": setup.is_bf16},
        **setup.more,
    }
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=0.01),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
    )[0]


def state_of(engine: Any) -> dict[str, Any]:
    return {"model": engine, "optimizer": engine.optimizer}


def train(engine: Any, num_steps: int) -> list[float]:
    """The losses on this rank. What it trains on depends on how many steps the engine says it took."""
    losses = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(100 * engine.global_steps + dist.get_rank())
        inputs = torch.randn(2, 7, generator=generator).to(next(engine.module.parameters()).dtype)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_of(engine: Any) -> dict[str, Tensor]:
    """In full precision, of what trains; nothing without ZeRO, where DeepSpeed does not say."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {name: safe_get_full_fp32_param(each) for name, each in _trained(engine).items()}
    return {name: value.clone() for name, value in found.items() if value is not None}


def optimizer_state_of(engine: Any) -> dict[str, Tensor]:
    """Only after a step. DeepSpeed mixes them up where gradients go round robin."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {
        f"{name}.{key}": safe_get_full_optimizer_state(each, key)
        for name, each in _trained(engine).items()
        for key in STATES
    }
    return {name: value.clone() for name, value in found.items() if value is not None}


def _trained(engine: Any) -> dict[str, Any]:
    return {name: each for name, each in engine.module.named_parameters() if each.requires_grad}


def unlike_checkpoint(engine: Any, path: str) -> list[str]:
    """The parameters that are not what is stored, in the precision that the model has."""
    import deepspeed

    checkpoint = bcp.open(path)
    wrong = []
    for name, parameter in engine.module.named_parameters():
        is_partitioned = hasattr(parameter, "ds_tensor")
        with deepspeed.zero.GatheredParameters([parameter]) if is_partitioned else nullcontext():
            if not torch.equal(parameter.data, checkpoint[f"model.{name}"][...].to(parameter.dtype)):
                wrong.append(name)
    return wrong


def unequal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]
