"""`bcp convert --to hf` of models that hold all experts of a layer in one tensor: names of the files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import bytecheckpoint as bcp
from distributed.test_fused_experts import Model, write_files


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a model with stacks, and the stacks."""
    expected = write_files(tmp_path / "files", "qwen2_moe")
    model = Model()
    model.load_state_dict(expected)
    bcp.save(tmp_path / "run", {"model": model})
    return tmp_path / "run"


@pytest.mark.parametrize("names", ["qwen2_moe", "mixtral"])
def test_experts_have_the_names_of_their_family(call, saved, tmp_path, names) -> None:
    write_files(tmp_path / "expected", names)
    ended = call("convert", saved, tmp_path / "out", "--to", "hf", "--experts", names)
    assert ended.code == 0, ended.err
    assert f"experts are named as those of {names}" in ended.out
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_config_at_the_target_says_which_family(call, saved, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    assert call("convert", saved, tmp_path / "out", "--to", "hf", "--json").json["experts"] == "mixtral"


def test_without_any_hint_the_commonest_names_are_taken_and_told(call, saved, tmp_path) -> None:
    ended = call("convert", saved, tmp_path / "out", "--to", "hf")
    assert "experts are named as those of qwen2_moe" in ended.out
    assert "layers.1.mlp.experts.5.gate_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_stacks_stay_where_that_is_asked_for(call, saved, tmp_path) -> None:
    assert (
        call("convert", saved, tmp_path / "out", "--to", "hf", "--experts", "fused", "--json").json["experts"] is None
    )
    assert "layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_family_with_transposed_experts_is_refused_before_anything_is_written(call, saved, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    ended = call("convert", saved, tmp_path / "out", "--to", "hf")
    assert ended.code == 2
    assert "qwen3_vl_moe" in ended.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_experts_are_for_hf_targets(call, saved, tmp_path) -> None:
    assert call("convert", saved, tmp_path / "out", "--to", "dcp", "--experts", "mixtral").code == 2


def test_what_was_converted_with_separate_experts_still_fills_stacks(call, saved, tmp_path) -> None:
    assert call("convert", tmp_path / "files", tmp_path / "own", "--to", "bcp").code == 0
    model = Model()
    bcp.load(tmp_path / "own", {"model": model}, key_map=[("^", "model.")])
    expected = bcp.open(saved).state_dict("model.")
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("names", ["qwen2_moe", "mixtral"])
def test_an_export_with_separate_experts_is_compared_with_its_source(call, saved, tmp_path, names) -> None:
    call("convert", saved, tmp_path / "out", "--to", "hf", "--experts", names)
    same = call("diff", saved, tmp_path / "out", "--to", "hf", "--experts", names, "--json")
    assert same.code == 0
    assert same.json["num_tensors"] == 2 * (1 + 3 * 6)
    other = load_file(tmp_path / "out" / "model.safetensors")
    next(value for name, value in other.items() if ".experts.3." in name)[0, 0] += 1
    save_file(other, tmp_path / "out" / "model.safetensors")
    assert call("diff", saved, tmp_path / "out", "--to", "hf", "--experts", names).code == 1
