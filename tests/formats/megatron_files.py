"""Folders as Megatron's older format has them, made of a whole model: every rank's file has its part, under its own
numbers for layers and experts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTH, FFN, VOCABULARY, GROUPS, HEAD = 8, 12, 16, 4, 2


class Grid(NamedTuple):
    """How many ranks there are along each axis."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    num_chunks: int = 1

    def folder(self, tp: int, pp: int, ep: int) -> str:
        stage = f"_{pp:03d}" if self.pp > 1 else ""
        expert = f"_{ep:03d}" if self.ep > 1 else ""
        return f"mp_rank_{tp:02d}{stage}{expert}"


def truth(num_layers: int = 4, num_experts: int = 0, *, gated: bool = True) -> dict[str, Tensor]:
    """A whole model, by the names that it has in one file; of first layers of an MLP the gate comes first."""
    torch.manual_seed(num_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embedding.position_embeddings.weight": (5, WIDTH),
    }
    for layer in range(num_layers):
        name = f"decoder.layers.{layer}"
        shapes[f"{name}.self_attention.linear_qkv.layer_norm_weight"] = (WIDTH,)
        shapes[f"{name}.self_attention.linear_qkv.weight"] = (GROUPS * 4 * HEAD, WIDTH)
        shapes[f"{name}.self_attention.linear_qkv.bias"] = (GROUPS * 4 * HEAD,)
        shapes[f"{name}.self_attention.linear_proj.weight"] = (WIDTH, 2 * GROUPS * HEAD)
        shapes[f"{name}.self_attention.linear_proj.bias"] = (WIDTH,)
        shapes[f"{name}.pre_mlp_layernorm.weight"] = (WIDTH,)
        mlps = [f"{name}.mlp.experts.local_experts.{index}" for index in range(num_experts)] or [f"{name}.mlp"]
        if num_experts:
            shapes[f"{name}.mlp.router.weight"] = (num_experts, WIDTH)
        for mlp in mlps:
            shapes[f"{mlp}.linear_fc1.weight"] = ((2 if gated else 1) * FFN, WIDTH)
            shapes[f"{mlp}.linear_fc1.bias"] = ((2 if gated else 1) * FFN,)
            shapes[f"{mlp}.linear_fc2.weight"] = (WIDTH, FFN)
    shapes |= {"decoder.final_layernorm.weight": (WIDTH,), "output_layer.weight": (VOCABULARY, WIDTH)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


def part_of(name: str, whole: Tensor, rank: int, size: int, *, gated: bool) -> Tensor:
    """What a rank of tensor parallelism has."""
    if "linear_fc1" in name and gated:
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(size, dim=1)[rank].contiguous()
    is_cut = any(key in name for key in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer"))
    return whole.chunk(size)[rank].clone() if is_cut and "layer_norm" not in name else whole.clone()


def write(
    folder: Path, model: dict[str, Tensor], grid: Grid, *, num_layers: int = 4, num_experts: int = 0, gated: bool = True
) -> Path:
    """The folder of a step, for which every rank has written a file."""
    args = {
        "num_layers": num_layers,
        "hidden_size": WIDTH,
        "swiglu": gated,
        "params_dtype": torch.bfloat16,
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "expert_model_parallel_size": grid.ep,
    }
    for tp in range(grid.tp):
        for pp in range(grid.pp):
            for ep in range(grid.ep):
                chunks = list(_chunks(model, grid, (tp, pp, ep), num_layers, num_experts, gated))
                keys = ["model"] if grid.num_chunks == 1 else [f"model{index}" for index in range(grid.num_chunks)]
                state: dict[str, Any] = {
                    "args": Namespace(**args, rank=tp),
                    "checkpoint_version": 3.0,
                    "iteration": 20,
                    **dict(zip(keys, chunks, strict=True)),
                    "rng_state": [{"torch_rng_state": torch.full((4,), tp, dtype=torch.uint8), "python": (3, (1, 2))}],
                }
                at = folder / grid.folder(tp, pp, ep)
                at.mkdir(parents=True)
                torch.save(state, at / "model_optim_rng.pt")
    return folder


def _chunks(
    model: dict[str, Tensor], grid: Grid, rank: tuple[int, int, int], num_layers: int, num_experts: int, gated: bool
) -> Iterator[dict[str, Any]]:
    tp, pp, ep = rank
    per_chunk, per_rank = num_layers // (grid.pp * grid.num_chunks), num_experts // grid.ep
    for number in range(grid.num_chunks):
        first = (number * grid.pp + pp) * per_chunk
        chunk: dict[str, Any] = {}
        for name, whole in model.items():
            local = name
            if ".layers." in name:
                layer = int(name.split(".")[2])
                if not first <= layer < first + per_chunk:
                    continue
                local = name.replace(f"layers.{layer}.", f"layers.{layer - first}.")
            elif (first > 0) if "embedding" in name else (first + per_chunk < num_layers):
                continue
            if ".local_experts." in name:
                expert = int(name.split("local_experts.")[1].split(".")[0])
                if expert // per_rank != ep:
                    continue
                local = local.replace(f"local_experts.{expert}.", f"local_experts.{expert % per_rank}.")
            chunk[local] = part_of(name, whole, tp, grid.tp, gated=gated)
        chunk["decoder.final_layernorm._extra_state"] = None
        yield chunk
