"""The model, the text and the three ways to lay the model out over processes, for train_gpt.py. Nothing here knows
that checkpoints exist.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY = 256  # a token is a byte
HEAD_WIDTH = 32


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    The number of heads follows from what the projections return: a tensor-parallel process sees only its own heads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape."""
        batch, length, _ = x.shape
        heads = [project(x).view(batch, length, -1, HEAD_WIDTH) for project in (self.query, self.key, self.value)]
        query, key, value = (head.transpose(1, 2) for head in heads)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer over bytes; the output layer shares its weight with the embedding."""

    def __init__(self, *, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:  # the layers that add to the residual stream start smaller, as in GPT-2
            nn.init.normal_(block.attention.out.weight, std=0.02 / (2 * depth) ** 0.5)
            nn.init.normal_(block.mlp.down.weight, std=0.02 / (2 * depth) ** 0.5)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of int64 -> logits of (batch, length, VOCABULARY)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotate(x: Tensor) -> Tensor:
    """Turns (batch, heads, length, HEAD_WIDTH) by angles that grow with the position."""
    half = HEAD_WIDTH // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), frequencies)
    cosine, sine = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def shard_fsdp(model: GPT, mesh: DeviceMesh) -> None:
    """FSDP2: every process holds a slice of the rows of every parameter."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Attention heads and MLP columns are divided over the processes, and so are the rows of the embedding; between
    the blocks each process holds a part of every sequence.
    """
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    model_plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    parallelize_module(model, mesh, model_plan)
    model.tie_weights()  # parallelize_module made two parameters of the one: both are cut along dimension 0


def read_corpus() -> Tensor:
    """Reads the source text of Python's standard library, the same on every process of a machine: (bytes,) of uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 1 << 20:
        raise SystemExit(f"found {len(text)} bytes of Python source in {folder}, at least 1 MiB is needed to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(corpus: Tensor, *, seed: int, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of the whole global batch: each (batch, length) of int64.

    Nothing but the seed and the step decides what is drawn, so every layout sees the same text at the same step.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus) - length - 1, (batch,), generator=generator)
    windows = corpus[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
