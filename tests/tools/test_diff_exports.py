"""`bcp diff` proves an export: A is compared as `bcp convert` writes it, with the same options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from two_llamas import VOCABULARY, Llama, Megatron, llama_configuration, megatron_arguments, trained, write_safetensors

import bytecheckpoint as bcp
from bytecheckpoint.tools.analysis import tensor_diff

TO_LLAMA, TO_MEGATRON = "megatron-gpt-to-hf-llama", "hf-llama-to-megatron-gpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in training; not to be changed."""
    path = tmp_path_factory.mktemp("exports") / "run"
    llama = Llama()
    bcp.save(path, {"model": llama, "optimizer": trained(llama), "epoch": 3, "rng": bcp.RngState()})
    return path


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exports") / "megatron"
    model = Megatron(padding=3)
    bcp.save(path, {"model": model, "optimizer": trained(model), "args": vars(megatron_arguments(3))})
    return path


def change_one_element(folder: Path) -> str:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, path, {"format": "pt"})
    return name


def test_an_export_to_hugging_face_is_the_same_as_its_source(call, run, tmp_path) -> None:
    assert call("diff", run, convert(call, run, tmp_path / "hf", "--to", "hf")).code == 1
    ended = call("diff", run, tmp_path / "hf", "--to", "hf")
    assert ended.code == 0, ended.out
    assert f"the same: {len(Llama().state_dict())} tensors and 0 plain values" in ended.out
    assert "not compared: optimizer: " in ended.out
    result = call("diff", run, tmp_path / "hf", "--to", "hf", "--json").json
    assert {item["name"] for item in result["left_out"]} == {"optimizer", "epoch", "rng"}
    assert result["read_num_bytes"] > 0


def convert(call, source: Path, target: Path, *options: object) -> Path:
    ended = call("convert", source, target, *options)
    assert ended.code == 0, ended.err
    return target


def test_an_element_that_differs_in_an_export_is_found(call, run, tmp_path) -> None:
    name = change_one_element(convert(call, run, tmp_path / "hf", "--to", "hf"))
    result = call("diff", run, tmp_path / "hf", "--to", "hf", "--json")
    assert result.code == 1
    assert [(item["fqn"], item["num_differing"]) for item in result.json["tensors"]] == [(name, 1)]


def test_a_tensor_that_an_export_lacks_is_found(call, run, tmp_path) -> None:
    convert(call, run, tmp_path / "hf", "--to", "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    result = call("diff", run, tmp_path / "hf", "--to", "hf", "--json")
    assert (result.code, result.json["only_in_a"]) == (1, ["lm_head.weight"])


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "hf", "--keep-names"],
        ["--to", "hf", "--rename", "^model\\.=net."],
        ["--to", "bcp", "--rename", "^model\\.=net.", "--exclude", "optimizer*"],
        ["--to", "dcp", "--exclude", "rng*"],
        ["--to", "torch", "--exclude", "rng*"],
        ["--to", "bcp"],
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_options_of_the_conversion_are_those_of_the_comparison(call, run, tmp_path, options) -> None:
    convert(call, run, tmp_path / "out", *options)
    ended = call("diff", run, tmp_path / "out", *options)
    assert ended.code == 0, ended.out


@pytest.mark.parametrize("to", ["hf", "bcp"])
def test_an_export_through_a_name_map_is_the_same_as_its_source(call, megatron, tmp_path, to) -> None:
    options = ["--to", to, "--map", TO_LLAMA]
    convert(call, megatron, tmp_path / "llama", *options)
    ended = call("diff", megatron, tmp_path / "llama", *options)
    assert ended.code == 0, ended.out
    if to == "hf":
        assert load_file(tmp_path / "llama" / "model.safetensors").keys() == Llama().state_dict().keys()
        name = change_one_element(tmp_path / "llama")
        result = call("diff", megatron, tmp_path / "llama", *options, "--json")
        assert (result.code, [item["fqn"] for item in result.json["tensors"]]) == (1, [name])


def test_a_hugging_face_folder_is_compared_with_what_became_of_it(call, tmp_path) -> None:
    write_safetensors(tmp_path / "llama", Llama(), llama_configuration(vocab_size=VOCABULARY))
    convert(call, tmp_path / "llama", tmp_path / "megatron", "--to", "bcp", "--map", TO_MEGATRON)
    assert call("diff", tmp_path / "llama", tmp_path / "megatron", "--map", TO_MEGATRON).code == 0
    assert call("diff", tmp_path / "megatron", tmp_path / "llama").code == 1


def test_an_export_of_another_dtype_is_near(call, run, tmp_path) -> None:
    convert(call, run, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16")
    options = ["--to", "hf", "--ignore-dtype", "--rtol", 0.004]
    assert call("diff", run, tmp_path / "hf", "--to", "hf").code == 1
    assert call("diff", run, tmp_path / "hf", *options).code == 0
    change_one_element(tmp_path / "hf")
    assert call("diff", run, tmp_path / "hf", *options).code == 1


def test_an_export_of_another_dtype_is_the_same_to_the_bit_with_its_dtype(call, run, tmp_path) -> None:
    convert(call, run, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16")
    assert call("diff", run, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16").code == 0
    result = call("diff", run, tmp_path / "hf", "--to", "hf", "--dtype", "float16", "--limit", 1)
    assert (result.code, "float16" in result.out) == (1, True)


def write_quantized(folder: Path) -> None:
    """Writes weights in FP8, with blocks that the configuration alone tells, in int8 and in MXFP4."""
    torch.manual_seed(8)
    folder.mkdir()
    tensors = {
        "fp8.weight": torch.randn(192, 160).to(torch.float8_e4m3fn),
        "fp8.weight_scale_inv": torch.rand(2, 2),
        "int8.weight": torch.randint(-128, 128, (40, 30), dtype=torch.int8),
        "int8.weight_scale": torch.rand(40, 1),
        "experts.up_blocks": torch.randint(0, 256, (3, 24, 2, 16), dtype=torch.uint8),
        "experts.up_scales": torch.randint(120, 130, (3, 24, 2), dtype=torch.uint8),
        "norm.weight": torch.rand(30),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"quantization_config": {"weight_block_size": [96, 96]}}')


@pytest.mark.parametrize("to", ["hf", "bcp"])
def test_products_of_quantized_weights_are_the_same_as_the_weights_and_their_scales(
    call, tmp_path, monkeypatch, to
) -> None:
    monkeypatch.setattr(tensor_diff, "_TILE_BYTES", 1000)
    a, b = tmp_path / "quantized", tmp_path / "products"
    write_quantized(a)
    convert(call, a, b, "--to", to, "--dtype", "bfloat16")
    ended = call("diff", a, b, "--dtype", "bfloat16")
    assert ended.code == 0, ended.out
    assert "the same: 4 tensors and 0 plain values" in ended.out
    ended = call("diff", a, b)
    assert (ended.code, "--dtype compares these" in ended.out) == (1, True)
    assert (
        "  B may have quantized weights and A their products: diff B A with --dtype compares these"
        in call("diff", b, a).out
    )
    weights = bcp.open(b).state_dict()
    for weight in weights.values():
        weight.view(-1)[-1] += 1
    bcp.save(tmp_path / "changed", weights)
    result = call("diff", a, tmp_path / "changed", "--dtype", "bfloat16", "--json").json
    assert {item["fqn"]: item["num_differing"] for item in result["tensors"]} == dict.fromkeys(weights, 1)
    assert result["only_in_a"] == result["only_in_b"] == []


def test_tied_weights_of_an_export_are_the_same(call, tmp_path) -> None:
    llama = Llama()
    llama.lm_head.weight = llama.model.embed_tokens.weight
    bcp.save(tmp_path / "run", {"model": llama})
    convert(call, tmp_path / "run", tmp_path / "hf", "--to", "hf")
    ended = call("diff", tmp_path / "run", tmp_path / "hf", "--to", "hf")
    assert ended.code == 0, ended.out


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_values_that_an_export_holds_in_another_form_are_the_same(call, tmp_path, to) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([("w", weight)], lr=torch.tensor(0.5))  # a small tensor in plain data
    weight.grad = torch.ones(3)
    optimizer.step()
    values = {"loss": np.float64(0.25), "table": np.arange(3), "seen": [{2, 1}, Path("/a")], "last": np.str_("x")}
    bcp.save(tmp_path / "run", {"w": weight, "optimizer": optimizer, "values": values})
    convert(call, tmp_path / "run", tmp_path / "export", "--to", to)
    ended = call("diff", tmp_path / "run", tmp_path / "export", "--to", to)
    assert ended.code == 0, ended.out
    values["table"][1] = optimizer.param_groups[0]["lr"][...] = 2
    bcp.save(tmp_path / "other", {"w": weight, "optimizer": optimizer, "values": values})
    result = call("diff", tmp_path / "other", tmp_path / "export", "--to", to, "--json").json
    assert [item["fqn"] for item in result["objects"]] == ["optimizer.groups.w.values.lr", "values.table"]
    assert not result["only_in_b"]


def test_empty_dicts_that_an_export_lacks_are_named_as_not_compared(call, tmp_path) -> None:
    optimizer = torch.optim.Adam([("w", torch.nn.Parameter(torch.ones(3)))])  # without state
    bcp.save(
        tmp_path / "run", {"optimizer": optimizer, "run": {"notes": {}, "name": "a", "inner": {"x": {}}}, "all": {}}
    )
    convert(call, tmp_path / "run", tmp_path / "dcp", "--to", "dcp")
    ended = call("diff", tmp_path / "run", tmp_path / "dcp", "--to", "dcp")
    assert ended.code == 0, ended.out
    for name in ("run.notes", "run.inner", "all"):
        assert f"not compared: {name} (empty, " in ended.out


def test_empty_containers_in_lists_that_an_export_lacks_are_named_as_not_compared(call, tmp_path) -> None:
    lists = {
        "only": [{}],
        "first": [{}, 1],
        "last": [1, {"a": {}}],
        "deep": [[{}], [2, {}]],
        "inner": [{"a": 1, "b": {}}, 3],
        "tensor": [{}, torch.ones(2)],
        "kept": [[], [1], ({}, 1)],
    }
    bcp.save(tmp_path / "run", {"run": lists, "name": "a"})
    convert(call, tmp_path / "run", tmp_path / "dcp", "--to", "dcp")
    ended = call("diff", tmp_path / "run", tmp_path / "dcp", "--to", "dcp")
    assert ended.code == 0, ended.out
    for name in ("only", "first.0", "last.1", "deep.0", "deep.1.1", "inner.0.b", "tensor.0"):
        assert f"not compared: run.{name} (empty, " in ended.out
    assert "kept" not in ended.out


def test_values_that_hugging_face_has_no_place_for_do_not_keep_it_from_a_comparison(call, tmp_path) -> None:
    model = {"a": torch.ones(2), "b": torch.ones(3)}
    bcp.save(tmp_path / "run", {"model": model, "others": {"pair": [torch.ones(2), 1]}})
    options = ["--to", "hf", "--exclude", "*.b"]
    convert(call, tmp_path / "run", tmp_path / "hf", *options)
    ended = call("diff", tmp_path / "run", tmp_path / "hf", *options)
    assert ended.code == 0, ended.out + ended.err
    assert "not compared: others (plain data)" in ended.out


def test_stripping_a_prefix_is_a_rename(call, run, tmp_path) -> None:
    convert(call, run, tmp_path / "hf", "--to", "hf")
    torch.save(load_file(tmp_path / "hf" / "model.safetensors"), tmp_path / "bare.pt")
    options = ["--rename", "^model\\.=", "--exclude", "optimizer*", "--exclude", "epoch", "--exclude", "rng*"]
    ended = call("diff", run, tmp_path / "bare.pt", *options)
    assert ended.code == 0, ended.out + ended.err


@pytest.mark.parametrize(
    "options",
    [["--map-option", "heads=4"], ["--keep-unmapped"], ["--keep-names"], ["--to", "nonsense"], ["--rename", "x"]],
)
def test_an_option_that_does_nothing_is_wrong_usage(call, run, options) -> None:
    assert call("diff", run, run, *options).code == 2
