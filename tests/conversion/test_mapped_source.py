"""`bcp convert --map`: what one framework has saved, written as another would have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats.foreign_files import assert_same
from safetensors.torch import load_file, save_file
from two_llamas import (
    GROUPS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    VOCABULARY,
    Llama,
    Megatron,
    llama_configuration,
    megatron_arguments,
    stacked,
    trained,
)

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TO_LLAMA, TO_MEGATRON = "megatron-gpt-to-hf-llama", "hf-llama-to-megatron-gpt"
SIZES = {"heads": HEADS, "groups": GROUPS, "head_size": HEAD_SIZE, "vocab_size": VOCABULARY}
GIVEN = [text for name, value in SIZES.items() for text in ("--map-option", f"{name}={value}")]


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama()


@pytest.fixture(scope="module")
def of_llama(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Hugging Face saves it; not to be changed."""
    path = tmp_path_factory.mktemp("llama")
    save_file({name: tensor.detach() for name, tensor in llama.state_dict().items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(llama_configuration()))
    return path


def all_of(path: Path) -> dict[str, torch.Tensor]:
    found = bcp.open(path)
    return {name: found[name][...] for name in found}


@pytest.mark.parametrize("to", ["bcp", "dcp", "torch"])
def test_llama_becomes_megatron_with_padding_and_stacks_and_llama_again(call, of_llama, llama, tmp_path, to) -> None:
    """Rows that pad the vocabulary are zeros, and are gone again on the way back."""
    options = ["--map-option", f"padded_vocab_size={VOCABULARY + 5}"]
    result = call("convert", of_llama, tmp_path / "megatron", "--to", to, "--map", TO_MEGATRON, *options, "--json")
    assert result.code == 0, result.out
    assert result.json["name_map"] == {"from": "hf-llama", "to": "megatron-gpt"}
    found = all_of(tmp_path / "megatron")
    assert found["decoder.layers.self_attention.linear_qkv.weight"].shape[0] == LAYERS
    assert not found["output_layer.weight"][VOCABULARY:].any()
    assert found["output_layer.weight"].shape[0] == VOCABULARY + 5
    back = call("convert", tmp_path / "megatron", tmp_path / "hf", "--to", "hf", "--map", TO_LLAMA, *GIVEN)
    assert back.code == 0, back.out
    assert "names and shapes of hf-llama, from those of megatron-gpt" in back.out
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), dict(llama.state_dict()))


def test_only_the_model_goes_to_hugging_face_and_the_rest_is_told(call, tmp_path) -> None:
    """Though it is saved as part of a state, with an optimizer, and is compressed."""
    megatron = Megatron(padding=300)
    state = {"model": megatron, "optimizer": trained(megatron), "args": vars(megatron_arguments(300))}
    bcp.save(tmp_path / "megatron", state, options=bcp.SaveOptions(codec="zstd"))
    result = call("convert", tmp_path / "megatron", tmp_path / "hf", "--to", "hf", "--map", TO_LLAMA, "--json")
    assert result.code == 0, result.out
    written = load_file(tmp_path / "hf" / "model.safetensors")
    llama = Llama()
    assert written.keys() == llama.state_dict().keys()
    assert result.json["dropped_prefix"] == "model."
    left_out = [(item["name"], item["why"]) for item in result.json["left_out"]]
    of_map = ("optimizer", "no part of the model, by the name map")
    assert sorted(left_out) == [("args", "plain data"), of_map, ("optimizer", "plain data")]
    dcp.save(stacked(megatron), checkpoint_id=tmp_path / "iter", no_dist=True)
    call("convert", tmp_path / "iter", tmp_path / "again", "--to", "hf", "--map", TO_LLAMA, *GIVEN)
    assert_same(load_file(tmp_path / "again" / "model.safetensors"), written)


def test_a_link_through_a_map_copies_nothing(call, of_llama, tmp_path) -> None:
    target = tmp_path / "linked"
    result = call("convert", of_llama, target, "--to", "bcp", "--link", "--map", TO_MEGATRON, "--json")
    assert result.code == 0, result.out
    assert [path.name for path in target.iterdir()] == ["manifest.bcp"]
    call("convert", of_llama, tmp_path / "copied", "--to", "bcp", "--map", TO_MEGATRON)
    found = bcp.open(target, options=bcp.LoadOptions(follow_links=True))
    assert_same({name: found[name][...] for name in found}, all_of(tmp_path / "copied"))
    padded = ["--map-option", f"padded_vocab_size={VOCABULARY + 1}"]
    refused = call("convert", of_llama, tmp_path / "no", "--to", "bcp", "--link", "--map", TO_MEGATRON, *padded)
    assert refused.code == 2
    assert "1 of its rows are zeros that no file holds" in refused.err
    assert not (tmp_path / "no").exists()


def test_choices_and_new_names_are_about_what_the_map_gives(call, of_llama, tmp_path) -> None:
    options = ["--include", "decoder.*", "--exclude", "*linear_fc*", "--rename", "^decoder=d", "--dtype", "bfloat16"]
    result = call("convert", of_llama, tmp_path / "m", "--to", "dcp", "--map", TO_MEGATRON, *options)
    assert result.code == 0, result.out
    found = all_of(tmp_path / "m")
    assert "d.layers.self_attention.linear_qkv.weight" in found
    assert all(name.startswith("d.") and "fc" not in name for name in found)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_what_the_map_drops_and_what_it_does_not_know(call, tmp_path) -> None:
    (tmp_path / "own.toml").write_text(
        'format = 1\nsides = ["a", "b"]\n[drop]\na = ["*.cache"]\n[[tensors]]\na = "m.x"\nb = "m.y"\n'
    )
    ones = torch.ones(2)
    bcp.save(tmp_path / "c", {"m.x": ones, "m.z": ones + 1, "m.x.cache": ones + 2, "rng": ones + 3})
    call_map = ("convert", tmp_path / "c", tmp_path / "t", "--to", "bcp", "--map", tmp_path / "own.toml")
    refused = call(*call_map)
    assert refused.code == 1
    assert "does not know 1 tensors of this model: m.z;" in refused.err
    kept = call(*call_map, "--keep-unmapped", "--json")
    assert call(*call_map[:2], tmp_path / "h", "--to", "hf", *call_map[5:], "--keep-unmapped").code == 0
    assert sorted(load_file(tmp_path / "h" / "model.safetensors")) == ["m.y", "m.z"]
    assert_same(all_of(tmp_path / "t"), {"m.y": ones, "m.z": ones + 1, "rng": ones + 3})
    assert kept.json["left_out"] == [
        {"name": "m.x.cache", "num_tensors": 1, "num_bytes": 8, "why": "left out by the name map"}
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--map", "no-such-map"], "there is no name map 'no-such-map'"),
        (["--map", TO_LLAMA], "knows none of its"),
        (["--map", TO_MEGATRON, "--map-option", "heads"], "'heads' is not NAME=VALUE"),
        (["--map", TO_MEGATRON, "--map-option", "head=3"], "'head' is not an option of it"),
        (["--map", ""], "--map takes a name or a file"),
        (["--map-option", "heads=3"], "--map-option and --keep-unmapped are for --map"),
        (["--keep-unmapped"], "--map-option and --keep-unmapped are for --map"),
    ],
)
def test_a_map_that_cannot_be_used_is_one_line(call, of_llama, tmp_path, options, expected) -> None:
    result = call("convert", of_llama, tmp_path / "t", "--to", "bcp", *options)
    assert result.code == 2
    assert expected in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "t").exists()
