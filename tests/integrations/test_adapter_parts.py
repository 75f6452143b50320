"""The part of a model that its adapters train: what is in it, and that it saves and loads the live model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import bytecheckpoint as bcp
from bytecheckpoint.integrations.shared.adapter_parts import adapters_of, has_adapters


class Adapted(nn.Module):
    """A frozen layer with an adapter called `default`, one that is not active, and running statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.peft_config = {"default": object(), "spare": object()}
        self.base = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(4).requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2), "spare": nn.Linear(4, 2).requires_grad_(False)})
        self.head = nn.Linear(2, 4)
        self.register_buffer("frequencies", torch.ones(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.norm(self.base(values) + self.head(self.lora_A["default"](values)))
        return changed


EXPECTED = {
    *("lora_A.default.weight", "lora_A.default.bias", "lora_A.spare.weight", "lora_A.spare.bias"),
    *("head.weight", "head.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
}


def test_it_holds_what_is_trained_other_adapters_and_running_statistics() -> None:
    assert has_adapters(Adapted(0))
    assert not has_adapters(nn.Linear(2, 2))
    assert set(adapters_of(Adapted(0)).state_dict()) == EXPECTED


def test_it_saves_and_loads_the_live_model_with_its_optimizer(tmp_path: Path) -> None:
    model, other = Adapted(0), Adapted(1)
    optimizer, fresh = (torch.optim.AdamW(adapters_of(each).parameters(), lr=0.1) for each in (model, other))
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": adapters_of(model), "optimizer": optimizer})
    bcp.load(tmp_path, {"model": adapters_of(other), "optimizer": fresh})
    loaded, saved = other.state_dict(), model.state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in EXPECTED)
    assert not torch.equal(other.base.weight, model.base.weight)
    assert torch.equal(fresh.state[other.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("default")  # of FSDP1 on one rank
def test_adapters_in_flat_parameters_are_refused() -> None:
    model = Adapted(0)
    model.base = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(
        bcp.CheckpointMismatchError, match=r"under FSDP1 .*bcp_save_base = True.*save_lora_only=False of verl"
    ) as refused:
        adapters_of(model)
    assert refused.value.kind == "conflict"
