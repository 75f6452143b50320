"""gpt-oss in MXFP4, loaded into a model in full precision: the values are those that transformers' own dequantization
makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from program_calls import call
from safetensors.torch import load_file, save_file

import bytecheckpoint as bcp

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

pytestmark = pytest.mark.frameworks

__all__ = ["call"]

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def write_in_mxfp4(folder: Path) -> Any:
    """Writes a folder in MXFP4, with any numbers and nearly any exponents; returns a model of its shapes."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES))
    model.save_pretrained(folder)
    files: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj"):
            files[name] = value.bfloat16()
            continue
        num_experts, num_rows, num_columns = value.shape
        shape = num_experts, num_columns, num_rows // 32
        files[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        files[f"{name}_scales"] = torch.randint(0, 250, shape, dtype=torch.uint8)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_folder_in_mxfp4_loads_and_converts_as_transformers_dequantizes_it(
    tmp_path: Path, call: Any, dtype: torch.dtype
) -> None:
    model = write_in_mxfp4(tmp_path / "mxfp4").to(dtype)
    dequantize = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mxfp4", quantization_config=dequantize, dtype=dtype)
    expected = {name: value.to(dtype) for name, value in theirs.state_dict().items()}
    report = bcp.load(tmp_path / "mxfp4", {"model": model}, cast=True)
    assert report.cast
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])] == []

    name = str(dtype).removeprefix("torch.")
    assert call("convert", tmp_path / "mxfp4", tmp_path / "hf", "--to", "hf", "--dtype", name).code == 0
    theirs.config.to_json_file(tmp_path / "hf" / "config.json")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype).state_dict()
    assert [name for name, value in opened.items() if not torch.equal(value, expected[name])] == []
