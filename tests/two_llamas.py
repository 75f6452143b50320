"""One small model twice: as Hugging Face names and computes Llama, and as Megatron does. Each is written after its own
framework's equations; neither knows the other, nor any name map. And what the frameworks save beside it.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, HIDDEN, FFN, HEADS, GROUPS, HEAD_SIZE, LAYERS = 11, 12, 20, 6, 3, 4, 2
THETA, EPSILON = 10000.0, 1e-5


class Named(nn.Module):
    """A module with just these parameters, called as they are to be called; a dot is a module inside."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64) / 4))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) * weight


class Llama(nn.Module):
    """Names and mathematics of transformers' LlamaForCausalLM."""

    def __init__(self) -> None:
        super().__init__()
        q, kv = HEADS * HEAD_SIZE, GROUPS * HEAD_SIZE
        self.model = nn.Module()
        self.model.embed_tokens = Named(weight=(VOCABULARY, HIDDEN))
        self.model.norm = Named(weight=(HIDDEN,))
        self.model.layers = nn.ModuleList()
        self.lm_head = Named(weight=(VOCABULARY, HIDDEN))
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.input_layernorm = Named(weight=(HIDDEN,))
            layer.post_attention_layernorm = Named(weight=(HIDDEN,))
            layer.self_attn = nn.Module()
            layer.self_attn.q_proj = Named(weight=(q, HIDDEN), bias=(q,))
            layer.self_attn.k_proj = Named(weight=(kv, HIDDEN), bias=(kv,))
            layer.self_attn.v_proj = Named(weight=(kv, HIDDEN), bias=(kv,))
            layer.self_attn.o_proj = Named(weight=(HIDDEN, q))
            layer.mlp = nn.Module()
            layer.mlp.gate_proj = Named(weight=(FFN, HIDDEN))
            layer.mlp.up_proj = Named(weight=(FFN, HIDDEN))
            layer.mlp.down_proj = Named(weight=(HIDDEN, FFN))
            self.model.layers.append(layer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, batch x time x vocabulary, of tokens, batch x time."""
        hidden = F.embedding(tokens, self.model.embed_tokens.weight)
        for layer in self.model.layers:
            hidden = hidden + self._attention(layer.self_attn, _rms_norm(hidden, layer.input_layernorm.weight))
            x = _rms_norm(hidden, layer.post_attention_layernorm.weight)
            gated = F.silu(x @ layer.mlp.gate_proj.weight.T) * (x @ layer.mlp.up_proj.weight.T)
            hidden = hidden + gated @ layer.mlp.down_proj.weight.T
        return _rms_norm(hidden, self.model.norm.weight) @ self.lm_head.weight.T

    def _attention(self, part: nn.Module, x: Tensor) -> Tensor:
        batch, time, _ = x.shape

        def heads_of(linear: nn.Module) -> Tensor:
            return F.linear(x, linear.weight, linear.bias).view(batch, time, -1, HEAD_SIZE).transpose(1, 2)

        q, k, v = heads_of(part.q_proj), heads_of(part.k_proj), heads_of(part.v_proj)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, time, -1) @ part.o_proj.weight.T

    def _rotated(self, x: Tensor) -> Tensor:
        frequencies = 1.0 / THETA ** (torch.arange(0, HEAD_SIZE, 2, dtype=x.dtype) / HEAD_SIZE)
        angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        half = HEAD_SIZE // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * angles.cos() + turned * angles.sin()


class Megatron(nn.Module):
    """Names and mathematics of megatron-core's GPTModel with Transformer Engine's fused norms."""

    def __init__(self, padding: int = 0) -> None:
        """`padding` is how many rows the vocabulary has more than tokens."""
        super().__init__()
        qkv, rows = (HEADS + 2 * GROUPS) * HEAD_SIZE, VOCABULARY + padding
        self.embedding = nn.Module()
        self.embedding.word_embeddings = Named(weight=(rows, HIDDEN))
        self.output_layer = Named(weight=(rows, HIDDEN))
        self.decoder = nn.Module()
        self.decoder.final_layernorm = Named(weight=(HIDDEN,))
        self.decoder.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.self_attention = nn.Module()
            layer.self_attention.linear_qkv = Named(weight=(qkv, HIDDEN), bias=(qkv,), layer_norm_weight=(HIDDEN,))
            layer.self_attention.linear_proj = Named(weight=(HIDDEN, HEADS * HEAD_SIZE))
            layer.mlp = nn.Module()
            layer.mlp.linear_fc1 = Named(weight=(2 * FFN, HIDDEN), layer_norm_weight=(HIDDEN,))
            layer.mlp.linear_fc2 = Named(weight=(HIDDEN, FFN))
            self.decoder.layers.append(layer)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, time x batch x padded vocabulary, of tokens, batch x time: Megatron has time first."""
        hidden = self.embedding.word_embeddings.weight[tokens].transpose(0, 1)
        for layer in self.decoder.layers:
            hidden = hidden + self._self_attention(layer.self_attention, hidden)
            fc1 = layer.mlp.linear_fc1
            first, second = torch.chunk(_rms_norm(hidden, fc1.layer_norm_weight) @ fc1.weight.T, 2, dim=-1)
            hidden = hidden + (first * torch.sigmoid(first) * second) @ layer.mlp.linear_fc2.weight.T
        return _rms_norm(hidden, self.decoder.final_layernorm.weight) @ self.output_layer.weight.T

    def _self_attention(self, part: nn.Module, hidden: Tensor) -> Tensor:
        time, batch, _ = hidden.shape
        linear, per_group = part.linear_qkv, HEADS // GROUPS
        mixed = _rms_norm(hidden, linear.layer_norm_weight) @ linear.weight.T + linear.bias
        mixed = mixed.view(time, batch, GROUPS, (per_group + 2) * HEAD_SIZE)
        query, key, value = mixed.split([per_group * HEAD_SIZE, HEAD_SIZE, HEAD_SIZE], dim=-1)
        query = _with_rotary(query.reshape(time, batch, HEADS, HEAD_SIZE))
        key = _with_rotary(key)
        context = torch.empty(time, batch, HEADS, HEAD_SIZE, dtype=hidden.dtype)
        masked = torch.ones(time, time, dtype=torch.bool).triu(1)
        for head in range(HEADS):
            group = head // per_group
            scores = torch.einsum("tbd,sbd->bts", query[:, :, head], key[:, :, group]) / HEAD_SIZE**0.5
            weights = scores.masked_fill(masked, float("-inf")).softmax(-1)
            context[:, :, head] = torch.einsum("bts,sbd->tbd", weights, value[:, :, group])
        return context.reshape(time, batch, -1) @ part.linear_proj.weight.T


def _with_rotary(x: Tensor) -> Tensor:
    """Rotary embeddings that turn element i of a head with element i + half of it, by complex numbers."""
    first, second = x.chunk(2, dim=-1)
    positions = torch.arange(x.shape[0], dtype=x.dtype)
    exponents = torch.arange(HEAD_SIZE // 2, dtype=x.dtype) * 2 / HEAD_SIZE
    turns = torch.polar(torch.ones((), dtype=x.dtype), positions[:, None] * THETA**-exponents)
    turned = torch.complex(first, second) * turns[:, None, None, :]
    return torch.cat([turned.real, turned.imag], dim=-1)


def megatron_arguments(padding: int = 0) -> Namespace:
    """Those of Megatron that matter here, and some that do not."""
    return Namespace(
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        group_query_attention=True,
        kv_channels=HEAD_SIZE,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        swiglu=True,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY + padding,
        lr=0.1,
        data_path=["a", "b"],
    )


def llama_configuration(**more: Any) -> dict[str, Any]:
    known = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
    return {**known, "num_key_value_heads": GROUPS, "head_dim": HEAD_SIZE, **more}


def write_safetensors(path: Path, llama: Llama, config: Mapping[str, Any] | None) -> Path:
    path.mkdir()
    save_file({name: tensor.detach() for name, tensor in llama.state_dict().items()}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def stacked(megatron: nn.Module) -> dict[str, Tensor]:
    """As Megatron's distributed checkpoints have it."""
    state = megatron.state_dict()
    first = "decoder.layers.0."
    whole = {name: tensor for name, tensor in state.items() if "layers." not in name}
    names = [name.removeprefix(first) for name in state if name.startswith(first)]
    return whole | {
        f"decoder.layers.{name}": torch.stack([state[f"decoder.layers.{layer}.{name}"] for layer in range(LAYERS)])
        for name in names
    }


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(2 * VOCABULARY).reshape(2, -1) % VOCABULARY
    model(tokens).square().sum().backward()
    optimizer.step()
    return optimizer
