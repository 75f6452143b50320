"""Small models, and training steps that are the same each time: what is restored must go on to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sample_tensors import same_bits
from torch import nn


class Tied(nn.Module):
    """Embedding and head share a weight, as language models do."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


class Training:
    """A model and its optimizer, and steps whose loss `forward` gives."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def forward(self, step: int) -> torch.Tensor:
        raise NotImplementedError

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward(0)

    def step(self, step: int, between: Callable[[], Any] = lambda: None) -> None:
        loss = self.forward(step)
        between()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], num_steps: int, seed: int = 0) -> None:
    """Some steps on random data that the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        inputs = torch.randn(5, 4, generator=generator)

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            for parameter in model.parameters():
                parameter.grad = None
            result = model(inputs).square().sum()
            result.backward()
            return result

        for optimizer in optimizers:
            loss()
            optimizer.step(loss if isinstance(optimizer, torch.optim.LBFGS) else None)


def same_module(a: nn.Module, b: nn.Module) -> bool:
    """Parameters and buffers, those that are not persistent aside, have the same bits."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(same_value(left[name], right[name]) for name in left)


def same_optimizer(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    return same_value(a.state_dict(), b.state_dict())


def same_value(a: Any, b: Any) -> bool:
    """Equal down to the bits of every tensor; numbers and 0-d tensors are different things."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_value, a, b))
    return type(a) is type(b) and bool(a == b)
