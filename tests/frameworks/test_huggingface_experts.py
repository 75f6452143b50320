"""Mixture-of-Experts models of the real transformers: the files that `save_pretrained` writes load in place, and
`bcp convert --to hf` writes files with the same names, from which `from_pretrained` makes the same logits.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

_ALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_NARROW = {"moe_intermediate_size": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 12, **_NARROW},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, **_NARROW},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 4,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        **_NARROW,
    },
    "minimax": {"num_local_experts": 4},
    "lfm2_moe": {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2, **_NARROW},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        **_NARROW,
    },
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}
TOKENS = torch.arange(12)[None] % 64


def model_of(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(_ALL | FAMILIES[family]))).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return model


def shapes_in(folder: Path) -> dict[str, list[int]]:
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_files_load_in_place_and_are_written_as_the_family_has_them(tmp_path, family) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model, other = model_of(family), model_of(family)
    logits = model(TOKENS).logits
    assert not torch.equal(other(TOKENS).logits, logits)
    model.save_pretrained(tmp_path / "files")
    bcp.load(tmp_path / "files", {"model": other})
    assert torch.equal(other(TOKENS).logits, logits)

    bcp.save(tmp_path / "run", {"model": model})
    (tmp_path / "out").mkdir()
    shutil.copy(tmp_path / "files" / "config.json", tmp_path / "out")
    arguments = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]
    assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    assert shapes_in(tmp_path / "out") == shapes_in(tmp_path / "files")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(TOKENS).logits, logits)
