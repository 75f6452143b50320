"""Programs as users of torch.distributed.checkpoint write them: an AppState around model and optimizer, a stateful
loader, random numbers in the state. `dcp` is the module that they import.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTH, NUM_SAMPLES, BATCH = 10, 24, 4


class AppState(Stateful):
    """Model and optimizer as torch's tutorials wrap them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


class RandomNumbers:
    """The state of torch's generator, which differs from rank to rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])


class ShuffledBatches:
    """Batches of this rank, in another order each epoch, that go on where their state says."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(100 + rank)
        self._order = torch.randperm(NUM_SAMPLES, generator=self._generator)
        self._position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self._position >= NUM_SAMPLES:
                self._order = torch.randperm(NUM_SAMPLES, generator=self._generator)
                self._position = 0
            numbers = self._order[self._position : self._position + BATCH]
            self._position += BATCH
            yield torch.sin(numbers[:, None] * torch.arange(1, WIDTH + 1) / WIDTH)

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self._generator.get_state(),
            "order": self._order.tolist(),
            "position": self._position,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._generator.set_state(state_dict["generator"])
        self._order = torch.tensor(state_dict["order"])
        self._position = state_dict["position"]


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 5, bias=False))


def sharded(world_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An FSDP2 model, of which some rank has nothing of some parameter, and its optimizer."""
    model = mlp(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def replicated(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


class Run:
    """Training on one rank, with everything that a resume needs in its state."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.model, self.optimizer = sharded(world_size, seed)
        self.batches = ShuffledBatches(rank)
        torch.manual_seed(1000 * seed + rank)
        self.next_step = 0
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        return {
            "app": AppState(self.model, self.optimizer),
            "data": self.batches,
            "rng": RandomNumbers(),
            "next_step": self.next_step,
        }

    def train(self, end: int, after_step: Callable[[int], object] = lambda _: None) -> None:
        batches = iter(self.batches)
        while self.next_step < end:
            self.losses.append(step(self.model, self.optimizer, next(batches)))
            self.next_step += 1
            after_step(self.next_step)

    def outcome(self) -> tuple[list[float], str]:
        return self.losses, digest(AppState(self.model, self.optimizer).state_dict())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(value: Any) -> str:
    """The bits of all tensors and the text of all else, the same in every layout. Collective."""
    if isinstance(value, torch.Tensor):
        full = whole(value.detach()).contiguous()
        return hashlib.sha256(full.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return hashlib.sha256("".join(f"{key}={digest(value[key])};" for key in sorted(value)).encode()).hexdigest()
    return repr(value)


def same_on_all_ranks(text: str) -> bool:
    """Collective."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1


def filled(shape: tuple[int, ...], first: int) -> torch.Tensor:
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)
