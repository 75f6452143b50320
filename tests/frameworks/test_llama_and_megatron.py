"""The real GPTModel of megatron-core and the real LlamaForCausalLM of transformers: weights of the one, seen through a
name map, make the other compute the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import bytecheckpoint as bcp
from distributed import truth
from distributed.workers import WorkerPool
from frameworks import real_megatron as spread
from frameworks.real_megatron import Layout, on_host

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # both warn of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

LAYERS, WIDTH, FFN, HEADS, GROUPS, HEAD_SIZE, VOCABULARY, PADDED = 3, 16, 24, 4, 2, 8, 29, 32
SIZES = {"heads": HEADS, "groups": GROUPS, "head_size": HEAD_SIZE, "vocab_size": VOCABULARY}


def real_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_SIZE,
        rms_norm_eps=1e-5,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


def real_megatron(vocab_size: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_SIZE,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocab_size,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    return model


@contextmanager
def without_random_state() -> Iterator[None]:
    """Megatron keeps its random state on a GPU; nothing here is random."""
    from megatron.core import tensor_parallel

    with mock.patch.object(tensor_parallel.random.CudaRNGStatesTracker, "fork"):
        yield


def check_same_logits(megatron: Any, llama: Any) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9).expand(2, -1)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1)
    with torch.no_grad(), without_random_state():
        found = megatron(tokens, positions, mask)[..., :VOCABULARY]
        expected = llama(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1


def test_weights_that_transformers_has_saved_make_megatron_compute_the_same(group: None, tmp_path: Path) -> None:
    llama = real_llama()
    llama.save_pretrained(tmp_path)
    with on_host(Layout()):
        megatron = real_megatron(VOCABULARY)
        options = bcp.LoadOptions(name_map="hf-llama-to-megatron-gpt")
        bcp.load(tmp_path, {"model": megatron}, options=options)
        check_same_logits(megatron, llama)


def test_weights_of_megatron_make_transformers_compute_the_same(group: None, tmp_path: Path) -> None:
    """Also when they were written as transformers writes them."""
    from click.testing import CliRunner
    from transformers import LlamaForCausalLM

    from bytecheckpoint.tools.main import cli

    llama = real_llama()
    with on_host(Layout()):
        megatron = real_megatron(PADDED)
        bcp.save(tmp_path / "megatron", {"model": megatron})
        to_llama = bcp.NameMap("megatron-gpt-to-hf-llama", SIZES)
        bcp.load(tmp_path / "megatron", {"model": llama}, options=bcp.LoadOptions(name_map=to_llama))
        check_same_logits(megatron, llama)
        llama.config.save_pretrained(tmp_path / "hf")
        options = [text for name, value in SIZES.items() for text in ("--map-option", f"{name}={value}")]
        ended = CliRunner().invoke(
            cli,
            ["convert", f"{tmp_path}/megatron", f"{tmp_path}/written", "--to", "hf", "--map", to_llama.name, *options],
        )
        assert ended.exit_code == 0, ended.output
        (tmp_path / "hf" / "model.safetensors").write_bytes((tmp_path / "written" / "model.safetensors").read_bytes())
        check_same_logits(megatron, LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval())


SPREAD = {
    "one": (1, Layout(is_llama=True)),
    "dp2": (2, Layout(is_llama=True)),
    "pp2": (2, Layout(pp=2, is_llama=True)),
    "tp2_dp2": (4, Layout(tp=2, is_llama=True)),
    "tp2_pp2": (4, Layout(tp=2, pp=2, is_llama=True)),
    "fp32_pp2_dp2": (4, Layout(pp=2, is_half=False, is_llama=True)),
    "replicated_pp2": (2, Layout(pp=2, is_distributed=False, is_llama=True)),
}
SPREAD_SIZES = {"heads": spread.HEADS, "groups": spread.GROUPS, "head_size": spread.WIDTH // spread.HEADS}
SPREAD_SIZES["vocab_size"] = spread.VOCABULARY


def small_llama() -> dict[str, Any]:
    """A state of the shape that models of many ranks have here, whose optimizer has nothing yet."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spread.VOCABULARY,
        hidden_size=spread.WIDTH,
        intermediate_size=4 * spread.WIDTH,
        num_hidden_layers=spread.LAYERS,
        num_attention_heads=spread.HEADS,
        num_key_value_heads=spread.GROUPS,
        max_position_embeddings=8,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    # As Megatron has it: what decays, and what does not.
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return {"model": model, "optimizer": torch.optim.AdamW([{"params": matrices}, {"params": norms}], lr=0.5)}


def true_layer(key: str, layer: int) -> torch.Tensor:
    """What every layout of Megatron has as `linear_fc2`, or as a part of its state."""
    shape = (spread.LAYERS, spread.WIDTH, 4 * spread.WIDTH)
    return truth.value(f"decoder.layers.mlp.linear_fc2.weight{key}", torch.empty(shape))[layer]


@pytest.mark.parametrize("name", SPREAD)
def test_training_of_any_layout_of_megatron_goes_on_in_llama(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    """Ranks of a distributed optimizer and stages have each saved groups, of parts of the same parameters."""
    world_size, layout = SPREAD[name]
    workers.run(spread.save_truth, layout, str(tmp_path / "c"), world_size=world_size, timeout_s=300)
    state = small_llama()
    name_map = bcp.NameMap("megatron-gpt-to-hf-llama", SPREAD_SIZES)
    report = bcp.load(tmp_path / "c", state, options=bcp.LoadOptions(name_map=name_map))
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    moments = state["optimizer"].state
    for layer in range(spread.LAYERS):
        weight = state["model"].model.layers[layer].mlp.down_proj.weight
        assert torch.equal(weight, true_layer("", layer))
        assert torch.equal(moments[weight]["exp_avg"], true_layer(".exp_avg", layer))
        assert torch.equal(moments[weight]["exp_avg_sq"], true_layer(".exp_avg_sq", layer))
    assert {int(moments[parameter]["step"]) for parameter in state["model"].parameters()} == {3}
    groups = state["optimizer"].param_groups
    rate = spread.LEARNING_RATE
    assert [(group["lr"], group["wd_mult"]) for group in groups] == [(rate, 1.0), (rate, 0.0)]


def load_and_save(rank: int, world_size: int, layout: Layout, source: str, target: str) -> None:
    with on_host(layout):
        built = spread.build(layout)
        spread.fill(built, "noise.")
        options = bcp.LoadOptions(name_map=bcp.NameMap("hf-llama-to-megatron-gpt", SPREAD_SIZES))
        bcp.load(source, built.state, options=options)
        bcp.save(target, built.state)


@pytest.mark.parametrize("name", SPREAD)
def test_training_of_llama_goes_to_any_layout_of_megatron_and_back(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    """Rows that pad a vocabulary are zeros there, and no option has to say how many there are."""
    state = small_llama()
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    state["optimizer"].step()
    bcp.save(tmp_path / "llama", state)
    world_size, layout = SPREAD[name]
    args = layout, str(tmp_path / "llama"), str(tmp_path / "megatron")
    workers.run(load_and_save, *args, world_size=world_size, timeout_s=300)
    embedding = bcp.open(tmp_path / "megatron")["model.embedding.word_embeddings.weight"]
    assert embedding.shape[0] > spread.VOCABULARY
    assert not embedding[spread.VOCABULARY :].any()
    back = bcp.LoadOptions(name_map=bcp.NameMap("megatron-gpt-to-hf-llama", SPREAD_SIZES))
    found, wanted = bcp.open(tmp_path / "megatron", options=back), bcp.open(tmp_path / "llama")
    assert set(found.keys()) == set(wanted.keys())
    wrong = [fqn for fqn in wanted.keys() if not torch.equal(found[fqn][...], wanted[fqn][...])]
    assert not wrong
