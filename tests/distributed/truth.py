"""The true training state that every layout of the matrix holds a part of: a small transformer with sizes that divide
badly, and the state of its optimizer. Each value is a pure function of the FQN alone, so any process can make it, and
nothing here knows how it is spread over ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

NUM_LAYERS = 2
VOCABULARY = 37
WIDTH = 14
HIDDEN = 22
OPTIMIZERS = ("adamw", "sgd")
HYPERPARAMETERS = {
    "adamw": {"lr": 0.0123, "betas": (0.85, 0.97), "eps": 3e-7},
    "adamw_even": {"lr": 0.0123, "betas": (0.85, 0.97), "eps": 3e-7},
    "sgd": {"lr": 0.0321, "momentum": 0.87},
}
WEIGHT_DECAY = 0.07
"""Of matrices; vectors are in a group of their own, without any."""
STATE_TENSORS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw_even": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
"""What an optimizer keeps for each parameter in the parameter's own shape."""


class Attention(nn.Module):
    """Projections only: nothing of this is ever run."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH)
        self.wk = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()
        self.gain = nn.Parameter(torch.empty(1))
        self.register_buffer("positions", torch.empty(5))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3), persistent=False)


class Transformer(nn.Module):
    """Layers are kept by their global index, so a pipeline stage deletes those of others and renames nothing.

    `frozen` never trains, so it has no optimizer state. With `tied`, `head.weight` is `embedding.weight`.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, 3, bias=False)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(NUM_LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.frozen.requires_grad_(requires_grad=False)
        if tied:
            self.head.weight = self.embedding.weight


def value(fqn: str, like: Tensor) -> Tensor:
    """The true value under an FQN, in the shape and dtype of `like`."""
    seed = int.from_bytes(hashlib.sha256(fqn.encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    if not like.dtype.is_floating_point:
        return torch.randint(1, 1 << 40, like.shape, generator=generator, dtype=like.dtype)
    values = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
    return values.square() if fqn.endswith("exp_avg_sq") else values


def step(fqn: str, optimizer: str = "adamw") -> Tensor:
    """AdamW's count of steps of a parameter, as the scalar tensor that torch keeps. Parameters differ on purpose.

    In "adamw_even", for layouts that keep several parameters as one, they do not.
    """
    if optimizer == "adamw_even":
        return torch.tensor(99.0 if fqn.startswith("noise.") else 1234.0)
    return torch.tensor(float(100 + hashlib.sha256(fqn.encode()).digest()[0]))


def fill(model: nn.Module, source: Callable[[str, Tensor], Tensor] = value) -> None:
    """Writes `source(fqn, tensor)` over every parameter and buffer of an unsharded model."""
    with torch.no_grad():
        for fqn, tensor in named_tensors(model):
            tensor.copy_(source(fqn, tensor))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by FQN, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """With the true hyperparameters and no state yet."""
    trained = {unwrapped(fqn): parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    if name == "adamw_even":
        return torch.optim.AdamW([*trained.values()], weight_decay=WEIGHT_DECAY, **HYPERPARAMETERS[name])
    with torch.device("meta"):  # because what a rank has of a matrix may be flat
        matrices = {fqn for fqn, parameter in Transformer().named_parameters() if parameter.ndim > 1}
    groups: list[dict[str, Any]] = [
        {"params": [trained[fqn] for fqn in trained if fqn in matrices], "weight_decay": WEIGHT_DECAY},
        {"params": [trained[fqn] for fqn in trained if fqn not in matrices], "weight_decay": 0.0},
    ]
    cls: type[torch.optim.Optimizer] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    return cls(groups, **HYPERPARAMETERS[name])


def unwrapped(fqn: str) -> str:
    """The FQN without what DistributedDataParallel and FullyShardedDataParallel put into it."""
    return fqn.removeprefix("module.").replace("_fsdp_wrapped_module.", "")
