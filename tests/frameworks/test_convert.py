"""Hugging Face folders that `bcp convert` has written, opened by transformers itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]


def tiny(*, tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("shard_size", ["5GB", "1MB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("source", ["bcp", "torch"])
def test_from_pretrained_opens_the_hf_target(tmp_path: Path, source: str, tied: bool, shard_size: str) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(tied=tied)
    if shard_size == "1MB":  # several files
        model.resize_token_embeddings(20_000)
    if source == "bcp":
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(4)[None]).logits.sum().backward()
        bcp.save(tmp_path / "run", {"model": model, "optimizer": optimizer})
    else:
        torch.save(model.state_dict(), tmp_path / "run")
    target = tmp_path / "hf"
    arguments = ["convert", str(tmp_path / "run"), str(target), "--to", "hf", "--max-shard-size", shard_size]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert (target / "model.safetensors.index.json").exists() == (shard_size == "1MB")
    model.config.save_pretrained(target)
    found, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    ids = torch.arange(8)[None]
    assert torch.equal(found.eval()(ids).logits, model(ids).logits)
