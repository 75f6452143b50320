"""`bcp convert`: every format that can be read, written in every format, equal to the bit."""

from __future__ import annotations

import datetime as dt
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from packed_checkpoints import compress_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TARGETS = ("bcp", "hf", "dcp", "torch")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors() -> dict[str, torch.Tensor]:
    """Names within a model; every shape and dtype that all formats hold."""
    torch.manual_seed(1)
    return {
        "embed.weight": torch.randn(33, 7),
        "layers.0.weight": torch.randn(5, 3, 2, dtype=torch.bfloat16),
        "layers.0.scale": torch.tensor(1.5, dtype=torch.float64),
        "layers.10.ids": torch.arange(11, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "quantized": torch.randn(9, 5).to(torch.float8_e4m3fn),
        "other.quantized": torch.randn(4).to(torch.float8_e5m2),
        "empty": torch.zeros(0, 3),
        "u16": torch.arange(7, dtype=torch.int32).to(torch.uint16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(3, dtype=torch.float16),
        "complex": torch.randn(4, dtype=torch.complex64),
    }


def write_own(path: Path) -> None:
    bcp.save(path, {"model": tensors(), "epoch": 3})


def write_compressed(path: Path) -> None:
    bcp.save(path, {"model": {**tensors(), "long": torch.zeros(1 << 15)}, "epoch": 3})
    compress_checkpoint(path)


def write_hf(path: Path) -> None:
    path.mkdir()
    save_file(tensors(), path / "model.safetensors", {"format": "pt"})


def write_torch(path: Path) -> None:
    torch.save({"model": tensors(), "epoch": 3}, path)


def write_dcp(path: Path) -> None:
    dcp.save({"model": tensors(), "epoch": 3}, checkpoint_id=path, no_dist=True)


SOURCES = {"bcp": write_own, "zstd": write_compressed, "hf": write_hf, "torch": write_torch, "dcp": write_dcp}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """By format; not to be changed."""
    root = tmp_path_factory.mktemp("sources")
    for name, write in SOURCES.items():
        write(root / name)
    return {name: root / name for name in SOURCES}


def model_of(path: Path) -> dict[str, torch.Tensor]:
    found = bcp.open(path)
    return {fqn.removeprefix("model."): found[fqn][...] for fqn in found.keys()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_in_every_other(call, sources, tmp_path, source, to) -> None:
    result = call("convert", sources[source], tmp_path / "target", "--to", to, "--json")
    assert result.code == 0, result.out
    expected = model_of(sources[source])
    assert_same(model_of(tmp_path / "target"), expected)
    assert result.json["num_tensors"] == len(expected)
    if to != "hf" and source != "hf":
        assert bcp.open(tmp_path / "target").objects["epoch"] == 3
    assert call("verify", tmp_path / "target").code == (0 if to == "bcp" else 5)  # without checksums


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Tied, torch.optim.Optimizer]:
    """A checkpoint of a training run, and what was saved; not to be changed."""
    path = tmp_path_factory.mktemp("trained") / "run"
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rest = {"extra": {"t": torch.ones(2), "n": [1, torch.zeros(1)]}, "epoch": 3, "rng": bcp.RankLocal(torch.ones(3))}
    bcp.save(path, {"model": model, "optimizer": optimizer, **rest}, metadata={"run": "demo"})
    return path, model, optimizer


def assert_same_optimizer(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for a, b in zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True):
        assert found.state[a].keys() == expected.state[b].keys()
        assert all(torch.equal(found.state[a][key], expected.state[b][key]) for key in expected.state[b])
    assert found.param_groups[0]["lr"] == expected.param_groups[0]["lr"]


@pytest.mark.parametrize("to", ["bcp", "dcp", "torch"])
def test_a_training_run_goes_on_from_every_format_that_holds_one(call, trained, tmp_path, to) -> None:
    path, model, optimizer = trained
    assert call("convert", path, tmp_path / "target", "--to", to).code == 0
    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    bcp.load(tmp_path / "target", {"model": other, "optimizer": other_optimizer})
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert_same_optimizer(other_optimizer, optimizer)
    assert bcp.open(tmp_path / "target").objects["epoch"] == 3


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_an_optimizer_of_parameters_in_two_modules_loads_from_formats_of_torch(call, tmp_path, to) -> None:
    saved, loaded = [{"model": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)} for _ in range(2)]
    for state in (saved, loaded):
        state["model"].tied = state["head"]  # `elsewhere` in the optimizer's tree says so
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), momentum=0.9)
    saved["head"](saved["model"](torch.ones(1, 2))).sum().backward()
    saved["optimizer"].step()
    bcp.save(tmp_path / "c", saved)
    assert call("convert", tmp_path / "c", tmp_path / "target", "--to", to).code == 0
    bcp.load(tmp_path / "target", loaded)
    for a, b in zip(saved["model"].parameters(), loaded["model"].parameters(), strict=True):
        momentum = saved["optimizer"].state[a]["momentum_buffer"]
        assert torch.equal(momentum, loaded["optimizer"].state[b]["momentum_buffer"])


@pytest.mark.parametrize("options", [["bcp"], ["bcp", "--link"], ["hf"], ["dcp"], ["torch"]])
def test_a_conversion_tells_which_files_of_the_source_its_reader_leaves_out(call, tmp_path, options) -> None:
    source = tmp_path / "checkpoint-5"
    source.mkdir()
    save_file({"weight": torch.ones(2)}, source / "model.safetensors")
    torch.save({"state": {}, "param_groups": [], "since": dt.date(2026, 1, 1)}, source / "optimizer.pt")
    torch.save({"last_epoch": 3, "base_lrs": [0.1]}, source / "scheduler.pt")
    left_out = call("convert", source, tmp_path / "target", "--to", *options, "--json").json["left_out"]
    assert "optimizer.pt: refused (pickle_refused)" in left_out[0]["why"]
    assert not any(item["name"].startswith("metadata") for item in left_out)


def test_stock_torch_load_opens_the_torch_target(call, trained, tmp_path) -> None:
    path, model, optimizer = trained
    result = call("convert", path, tmp_path / "model.pt", "--to", "torch", "--json")
    assert [item["name"] for item in result.json["left_out"]] == ["metadata run"]
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None
    for mmap in (False, True):
        state = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
    Tied().load_state_dict(state["model"])
    assert state["model"]["head.weight"].data_ptr() == state["model"]["embed.weight"].data_ptr()
    assert torch.equal(state["model"]["embed.weight"], model.embed.weight)
    assert state["optimizer"]["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    moments = state["optimizer"]["state"]["embed.weight"]
    assert torch.equal(moments["exp_avg"], optimizer.state[model.embed.weight]["exp_avg"])
    assert (state["epoch"], state["extra"]["n"][0], state["rng"][0].tolist()) == (3, 1, [1, 1, 1])


def test_stock_dcp_load_opens_the_dcp_target(call, trained, tmp_path) -> None:
    path, model, optimizer = trained
    assert call("convert", path, tmp_path / "dcp", "--to", "dcp").code == 0
    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": 0, "extra": {"t": torch.zeros(2)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert_same_optimizer(other_optimizer, optimizer)
    assert (state["epoch"], state["extra"]["t"].tolist()) == (3, [1, 1])


@pytest.mark.parametrize("is_at_root", [True, False])
def test_a_flat_optimizer_is_what_dcp_load_asks_for(call, trained, tmp_path, is_at_root) -> None:
    """As torchtitan does: the optimizer flat, by names of parameters, and the model without a name."""
    path, model, optimizer = trained
    rename = ("--rename", r"^model\.=") if is_at_root else ()
    result = call("convert", path, tmp_path / "dcp", "--to", "dcp", "--flatten-optimizer", *rename)
    assert result.code == 0, result.err
    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(other, other_optimizer, options=options)
    state = {**(model_state if is_at_root else {"model": model_state}), "optimizer": optimizer_state}
    assert any(key.startswith("param_groups.embed.weight.") for key in optimizer_state)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    given = {"model_state_dict": model_state, "optim_state_dict": state["optimizer"]}
    set_state_dict(other, other_optimizer, **given, options=options)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert_same_optimizer(other_optimizer, optimizer)
    again = Tied()
    again_optimizer = torch.optim.AdamW(again.parameters())
    key_map = [(r"^(?!optimizer|epoch|extra|rng)", "model.")] if is_at_root else None
    bcp.load(tmp_path / "dcp", {"model": again, "optimizer": again_optimizer}, key_map=key_map)
    assert_same_optimizer(again_optimizer, optimizer)


def test_a_flat_optimizer_needs_names(call, tmp_path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    result = call("convert", tmp_path / "a.pt", tmp_path / "dcp", "--to", "dcp", "--flatten-optimizer")
    assert (result.code, "have no names" in result.err) == (2, True)
    assert not (tmp_path / "dcp").exists()
    assert call("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "bcp", "--flatten-optimizer").code == 2


def test_the_hf_target_has_one_model_and_says_what_is_left_out(call, trained, tmp_path) -> None:
    path, model, _ = trained
    result = call("convert", path, tmp_path / "hf", "--to", "hf", "--json").json
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict()) - {"head.weight"}
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert result["aliases"] == [{"fqn": "head.weight", "alias_of": "embed.weight"}]
    assert result["dropped_prefix"] == "model."
    left = {(item["name"], item["why"]) for item in result["left_out"]}
    assert {("optimizer", "state of an optimizer"), ("extra", "no part of 'model'"), ("epoch", "plain data")} <= left
    assert {("rng", "plain data"), ("metadata run", "metadata")} <= left
    assert "left out: optimizer: " in call("convert", path, tmp_path / "again", "--to", "hf").out


def test_shards_have_the_index_that_hugging_face_reads(call, sources, tmp_path) -> None:
    state = {f"layers.{number}.weight": torch.full((300, 300), float(number)) for number in range(9)}
    save_file(state, tmp_path / "one.safetensors")
    target = tmp_path / "hf"
    assert call("convert", tmp_path / "one.safetensors", target, "--to", "hf", "--max-shard-size", "1MB").code == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 9 * 360000
    assert set(index["weight_map"]) == set(state)
    names = {f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)}
    assert {path.name for path in target.iterdir()} == names | {"model.safetensors.index.json"}
    for fqn, name in index["weight_map"].items():
        with safe_open(target / name, "pt") as file:
            assert torch.equal(file.get_tensor(fqn), state[fqn])
    assert_same(model_of(target), state)


def test_dtype_converts_what_is_floating_point_and_nothing_else(call, sources, tmp_path) -> None:
    result = call("convert", sources["bcp"], tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--json").json
    expected = tensors()
    for name in ("embed.weight", "layers.0.scale", "half", "empty"):
        expected[name] = expected[name].to(torch.bfloat16)
    assert_same(model_of(tmp_path / "hf"), expected)
    assert result["num_cast"] == 4


def test_include_exclude_and_rename(call, sources, tmp_path) -> None:
    rules = ("--rename", "^model\\.=net.", "--rename", r"layers\.(\d+)=blocks.\1")
    chosen = ("--include", "model.layers.*", "--include", "epoch", "--exclude", "*.ids")
    assert call("convert", sources["bcp"], tmp_path / "target", "--to", "bcp", *rules, *chosen).code == 0
    found = bcp.open(tmp_path / "target")
    assert list(found) == ["net.blocks.0.weight", "net.blocks.0.scale"]
    assert bits(found["net.blocks.0.weight"][...]) == bits(tensors()["layers.0.weight"])
    assert found.objects == {"epoch": 3}


def test_what_ties_are_to_stays_when_one_name_is_excluded(call, trained, tmp_path) -> None:
    path, model, _ = trained
    assert call("convert", path, tmp_path / "hf", "--to", "hf", "--exclude", "model.embed.*").code == 0
    assert torch.equal(model_of(tmp_path / "hf")["head.weight"], model.embed.weight)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--to", "dcp", "--link"), "--link writes a manifest"),
        (("--to", "bcp", "--keep-names"), "--keep-names is for"),
        (("--to", "torch", "--max-shard-size", "1GB"), "--max-shard-size is for"),
        (("--to", "bcp", "--link", "--dtype", "float32"), "a link copies no data"),
        (("--to", "hf", "--include", "nothing"), "none of the"),
        (("--to", "hf", "--rename", "^.+=same"), "would both be 'same'"),
        (("--to", "hf", "--rename", "(=x"), "not a pattern"),
        (("--to", "hf", "--rename", r"x=\g<name>"), "unknown group name"),
        (("--to", "hf", "--rename", "x{99999999999}=y"), "repetition number"),
        (("--to", "hf", "--rename", "x"), "OLD=NEW"),
        (("--to", "hf", "--memory", "1MB"), "less than 64MiB"),
        (("--to", "hf", "--memory", "much"), "not a size"),
        (("--to", "hf", "--memory", "9" * 400), "not a size"),
        (("--to", "zip"), "zip"),
        ((), "--to"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(call, sources, tmp_path, arguments, expected) -> None:
    ended = call("convert", sources["bcp"], tmp_path / "target", *arguments)
    assert ended.code == 2
    assert expected in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not (tmp_path / "target").exists()


def test_rename_does_not_tear_an_optimizer_from_its_parameters(call, trained, tmp_path) -> None:
    path, _, _ = trained
    ended = call("convert", path, tmp_path / "target", "--to", "bcp", "--rename", "^model=net")
    assert (ended.code, "by which the optimizer 'optimizer' knows" in ended.err) == (2, True)
    assert call("convert", path, tmp_path / "t", "--to", "bcp", "--rename", "^model=net", "--exclude", "opt*").code == 0
    assert "net.embed.weight" in bcp.open(tmp_path / "t").keys()


@pytest.mark.parametrize("to", TARGETS)
def test_what_stands_there_is_replaced_only_when_asked_to_and_whole(call, sources, trained, tmp_path, to) -> None:
    target = tmp_path / "target"
    shards = ("--max-shard-size", "1MB") if to == "hf" else ()
    assert call("convert", trained[0], target, "--to", to, *shards).code == 0
    before = model_of(target)
    refused = call("convert", sources["bcp"], target, "--to", to, "--json")
    assert (refused.code, refused.json["error"]["kind"]) == (2, "exists")
    assert_same(model_of(target), before)
    assert call("convert", sources["bcp"], target, "--to", to, "--overwrite").code == 0
    assert_same(model_of(target), tensors() if to == "hf" else model_of(sources["bcp"]))
    num_files = {"bcp": 2, "hf": 1, "dcp": 2, "torch": 1}[to]  # nothing of the old one is left
    assert sum(path.is_file() for path in [target, *target.rglob("*")]) == num_files


def test_another_format_is_never_replaced(call, sources, trained, tmp_path) -> None:
    call("convert", sources["bcp"], tmp_path / "target", "--to", "dcp")
    ended = call("convert", sources["bcp"], tmp_path / "target", "--to", "hf", "--overwrite")
    assert (ended.code, "another format" in ended.err) == (2, True)
    file = tmp_path / "file"
    file.write_text("mine")
    assert call("convert", sources["bcp"], file, "--to", "dcp", "--overwrite").code == 2
    assert call("convert", sources["bcp"], tmp_path, "--to", "torch", "--overwrite").code == 2
    assert file.read_text() == "mine"


def test_a_folder_with_other_files_is_a_target_too(call, sources, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert call("convert", sources["bcp"], tmp_path, "--to", "hf").code == 0
    assert (tmp_path / "config.json").read_text() == "{}"
    assert_same(model_of(tmp_path), tensors())


def test_names_of_safetensors_are_those_of_a_model_and_stay(call, tmp_path) -> None:
    save_file({"model.embed.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    assert call("convert", tmp_path / "a.safetensors", tmp_path / "b", "--to", "hf").code == 0
    assert list(model_keys(tmp_path / "b")) == ["model.embed.weight"]


def test_keep_names(call, sources, tmp_path) -> None:
    assert call("convert", sources["bcp"], tmp_path / "b", "--to", "hf", "--keep-names").code == 0
    assert all(name.startswith("model.") for name in model_keys(tmp_path / "b"))


def model_keys(path: Path) -> list[str]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(call, tmp_path) -> None:
    bcp.save(tmp_path / "a", {"w": torch.zeros(2, dtype=torch.complex128)})
    ended = call("convert", tmp_path / "a", tmp_path / "b", "--to", "hf")
    assert (ended.code, "'w' of complex128" in ended.err) == (2, True)
    assert call("convert", tmp_path / "a", tmp_path / "c", "--to", "torch").code == 0
    assert torch.load(tmp_path / "c", weights_only=True)["w"].dtype == torch.complex128


def test_numpy_and_odd_values_in_a_torch_file(call, tmp_path) -> None:
    odd = {
        "a": np.arange(3),
        "s": np.array(["x"]),
        "f": np.float32(2),
        "t": (1, torch.Size([2])),
        "c": 1j,
        "b": b"\x80",
    }
    bcp.save(tmp_path / "a", {"odd": odd, "w": torch.ones(1)})
    assert call("convert", tmp_path / "a", tmp_path / "b", "--to", "torch").code == 0
    found = torch.load(tmp_path / "b", weights_only=True)["odd"]
    assert (found["a"].tolist(), found["s"], found["f"]) == ([0, 1, 2], ["x"], 2.0)
    assert (found["t"], found["c"], found["b"]) == ((1, torch.Size([2])), 1j, b"\x80")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries
def test_s3_to_s3_and_credentials_are_never_shown(call, s3, s3_prefix, sources, tmp_path) -> None:
    options = [f"--storage-option={key}={json.dumps(value)}" for key, value in s3.options.items()]
    root = f"s3://{s3.bucket}/{s3_prefix}"
    steps = [
        (sources["bcp"], f"{root}/hf", "--to", "hf"),
        (f"{root}/hf", f"{root}/dcp", "--to", "dcp"),
        (f"{root}/dcp", f"{root}/again.pt", "--to", "torch"),
        (f"{root}/again.pt", f"{root}/bcp", "--to", "bcp"),
        (f"{root}/bcp", f"{root}/bcp", "--to", "bcp"),
        (f"{root}/bcp", f"{root}/bcp", "--to", "bcp", "--overwrite"),
        (f"{root}/hf", f"{root}/link", "--to", "bcp", "--link"),
        (f"{root}/link", tmp_path / "hf", "--to", "hf", "--follow-links"),
        (f"{root}/bcp", tmp_path / "bcp", "--to", "bcp"),
    ]
    ended = [call("convert", *step, *options) for step in steps]
    assert [each.code for each in ended] == [0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert not any(s3.secret in each.out + each.err for each in ended)
    for name in ("hf", "bcp"):
        assert_same(model_of(tmp_path / name), tensors())


def test_flat_names_of_torch_are_names_within_a_model(call, tmp_path) -> None:
    """The first part of a name is not an entry where nothing says so: a model may have a module named `model`."""
    state = {"model.embed.weight": torch.ones(2), "lm_head.weight": torch.zeros(2)}
    torch.save(state, tmp_path / "a.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("a.pt", "dcp"):
        assert call("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf").code == 0
        assert set(model_keys(tmp_path / f"{name}-hf")) == set(state)


def test_which_of_two_models_is_meant_is_asked(call, tmp_path) -> None:
    bcp.save(tmp_path / "a", {"model": torch.nn.Linear(2, 2), "ema": torch.nn.Linear(2, 2)})
    ended = call("convert", tmp_path / "a", tmp_path / "b", "--to", "hf")
    assert (ended.code, "--include 'model.*'" in ended.err) == (2, True)
    assert call("convert", tmp_path / "a", tmp_path / "b", "--to", "hf", "--include", "ema.*").code == 0
    assert set(model_keys(tmp_path / "b")) == {"weight", "bias"}


def assert_same_states(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a["param_groups"] == b["param_groups"]
        assert a["state"].keys() == b["state"].keys()
        assert_same(a["state"][0], b["state"][0])


def test_lists_of_optimizers_are_lists_again_in_a_file_of_torch(call, tmp_path) -> None:
    """Lightning looks for `optimizer_states`, and the file had `optimizer_states.0`."""
    module = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=lr) for lr in (0.1, 0.2, 0.3)]
    module(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    state = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [{"last_epoch": 1}],
        "pytorch-lightning_version": "2.6.6",
    }
    torch.save(state, tmp_path / "a.ckpt")
    assert call("convert", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--to", "torch").code == 0
    found = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert (found.keys(), found["lr_schedulers"]) == (state.keys(), state["lr_schedulers"])
    assert_same_states(found["optimizer_states"], state["optimizer_states"])
    assert call("diff", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--to", "torch").code == 0
    exclude = ["--exclude", "optimizer_states.1*"]
    assert call("convert", tmp_path / "a.ckpt", tmp_path / "c.ckpt", "--to", "torch", *exclude).code == 0
    part = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert {"optimizer_states.0", "optimizer_states.2"} <= part.keys()
    assert_same_states([part["optimizer_states.2"]], state["optimizer_states"][2:])
