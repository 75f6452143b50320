"""Folders in FP8, loaded into models in bfloat16: the values are those that transformers' own dequantization makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bytecheckpoint as bcp

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

pytestmark = pytest.mark.frameworks

BLOCK = 128
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, "num_experts": 4},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def model_of(family: str) -> Any:
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    return AutoModelForCausalLM.from_config(config).bfloat16()


def write_in_fp8(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    files: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        files[name] = value
        if name.endswith("_proj.weight"):
            grid = [-(-length // BLOCK) for length in value.shape]
            files[name] = value.float().mul(900).clamp(-448, 448).to(torch.float8_e4m3fn)
            files[f"{name}_scale_inv"] = torch.rand(grid) / 200 + 1e-4
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_in_fp8_loads_as_transformers_dequantizes_it(tmp_path: Path, family: str) -> None:
    torch.manual_seed(5)
    model = model_of(family)
    write_in_fp8(tmp_path, model)
    dequantize = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=dequantize, dtype=torch.bfloat16)
    report = bcp.load(tmp_path, {"model": model}, cast=True)
    assert report.cast
    expected = theirs.state_dict()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])] == []
