"""Weights in FP8 with scales beside them, as Hugging Face's folders hold them: loaded in full precision, they are the
products.
"""

from __future__ import annotations

import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_bit import differing
from program_calls import call
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.native import weight_scales
from bytecheckpoint.adapters.native.weight_scales import WeightScales, block_shape
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.conversion.assemble import Elements, Job
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_alone
from bytecheckpoint.planner.copy_plan import same_tensor
from bytecheckpoint.region import Region
from distributed.workers import WorkerPool

__all__ = ["call"]

FP8 = torch.float8_e4m3fn
NUM_EXPERTS, INNER, HIDDEN = 4, 128, 192


def product_of(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """The weight in float32, by spreading each scale over its block."""
    for dim, length in enumerate(block):
        scales = scales.repeat_interleave(length, dim).narrow(dim, 0, numbers.shape[dim])
    return numbers.float() * scales


def quantized(*shape: int, block: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers in FP8 and the scale of each square block; and their product."""
    numbers = torch.randn(shape).mul_(50).to(FP8)
    scales = torch.rand([-(-length // block) for length in shape]) + 0.01
    return numbers, scales, product_of(numbers, scales, (block,) * len(shape))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(300, 576, bias=False)
        self.down = nn.Linear(576, 300)
        self.norm = nn.LayerNorm(300)


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Writes a folder in FP8; returns what a model in this dtype is to hold."""
    torch.manual_seed(3)
    expected = {name: torch.randn_like(value).bfloat16() for name, value in Model().state_dict().items()}
    files = dict(expected)
    for name in ("up.weight", "down.weight"):
        files[name], files[f"{name}_scale_inv"], expected[name] = quantized(*expected[name].shape)
    folder.mkdir()
    save_file(files, folder / "model.safetensors")
    return {name: value.to(dtype) for name, value in expected.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_in_full_precision_are_multiplied_by_their_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = write_model(tmp_path / "fp8", dtype)
    model = Model().to(dtype)
    report = bcp.load(tmp_path / "fp8", {"model": model}, cast=True)
    assert differing(model, expected) == []
    assert report.num_tensors == len(expected)
    assert not report.unexpected


@pytest.mark.parametrize(
    "arguments",
    [{"exclude": "*_scale_inv"}, {"include": "*.weight", "strict": False}, {"key_map": [("^", "model.")]}],
    ids=str,
)
def test_the_scales_count_whatever_is_left_out_or_renamed(tmp_path: Path, arguments: dict[str, Any]) -> None:
    expected = write_model(tmp_path / "fp8")
    model = Model().bfloat16()
    bcp.load(tmp_path / "fp8", {"model": model}, cast=True, **arguments)
    assert {"up.weight", "down.weight"}.isdisjoint(differing(model, expected))


def test_a_model_on_the_meta_device_and_one_of_inference_mode_are_filled_too(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "fp8")
    with torch.device("meta"):
        on_meta = Model().bfloat16()
    with torch.inference_mode():
        inferring = Model().bfloat16()
    for model in (on_meta, inferring):
        bcp.load(tmp_path / "fp8", {"model": model}, cast=True)
        assert differing(model, expected) == []


def test_a_state_in_fp8_gets_numbers_and_scales_as_they_are(tmp_path: Path) -> None:
    numbers, scales, _ = quantized(200, 130)
    bcp.save(tmp_path, {"model": {"weight": numbers, "weight_scale_inv": scales}})
    state = {"model": {"weight": torch.zeros_like(numbers), "weight_scale_inv": torch.zeros_like(scales)}}
    bcp.load(tmp_path, state, cast=True)
    assert torch.equal(state["model"]["weight"].float(), numbers.float())
    assert torch.equal(state["model"]["weight_scale_inv"], scales)


def test_a_state_with_a_place_for_the_scales_gets_numbers_and_scales_as_they_are(tmp_path: Path) -> None:
    """Whoever multiplies these numbers by these scales would multiply the product a second time."""
    numbers, scales, _ = quantized(200, 130)
    bcp.save(tmp_path, {"model": {"weight": numbers, "weight_scale_inv": scales}})
    state = {"net": {"weight": torch.zeros(200, 130), "weight_scale_inv": torch.zeros_like(scales)}}
    report = bcp.load(tmp_path, state, cast=True, key_map=[("^model", "net")])
    assert torch.equal(state["net"]["weight"], numbers.float())
    assert torch.equal(state["net"]["weight_scale_inv"], scales)
    assert report.num_tensors == 2


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        ({"weight_scale": torch.full((6, 1), 127, dtype=torch.uint8)}, "dtype"),
        ({"weight_scale": torch.ones(3)}, "shape"),
        ({"weight_scale": torch.ones(6, 1), "weight_zero_point": torch.ones(6, 1, dtype=torch.int8)}, "conflict"),
    ],
    ids=["exponents", "one for each of three parts, of any number of rows", "zero points"],
)
def test_scales_whose_product_would_not_be_the_weight_are_refused(
    tmp_path: Path, call: Any, beside: dict[str, torch.Tensor], kind: str
) -> None:
    bcp.save(tmp_path / "run", {"model": {"weight": torch.ones(6, 8, dtype=torch.int8), **beside}})
    state = {"model": {"weight": torch.full((6, 8), 5.0)}}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"the scales 'model\.weight_scale' have") as caught:
        bcp.load(tmp_path / "run", state, cast=True, exclude="*_zero_point" if kind == "conflict" else None)
    assert caught.value.kind == kind
    assert bool((state["model"]["weight"] == 5).all())
    ended = call("convert", tmp_path / "run", tmp_path / "out", "--to", "bcp", "--dtype", "float32")
    assert ended.code != 0
    assert "the scales 'model.weight_scale' have" in ended.out + ended.err
    assert not (tmp_path / "out").exists()


def test_scales_that_do_not_tell_their_blocks_are_refused(tmp_path: Path) -> None:
    weight = torch.zeros(96, 7).to(FP8)
    bcp.save(tmp_path, {"model": {"weight": weight, "weight_scale": torch.ones(3, 5)}})
    state = {"model": {"weight": torch.full((96, 7), 5.0)}}
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.weight: the scales .* shape \[3, 5\]") as caught:
        bcp.load(tmp_path, state, cast=True)
    assert caught.value.kind == "shape"
    assert bool((state["model"]["weight"] == 5).all())
    assert bcp.load(tmp_path, state | {"other": 1}, cast=True, strict=False).mismatched
    assert bool((state["model"]["weight"] == 5).all())


@pytest.mark.parametrize(
    ("shape", "scales", "block"),
    [
        ((7168, 576), (56, 5), (128, 128)),
        ((64, 100), (1, 1), (64, 100)),
        ((64, 100), (), (64, 100)),
        ((64, 100), (64,), (1, 100)),
        ((64, 100), (64, 1), (1, 100)),
        ((8, 256, 96), (8, 2, 1), (1, 128, 96)),
        ((192, 4), (2, 4), (128, 1)),
        ((96, 7), (3, 5), None),
        ((64, 100), (100,), None),
        ((64, 100), (4,), None),
        ((), (1,), ()),
    ],
)
def test_blocks_are_told_by_the_shapes(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, ...] | None
) -> None:
    assert block_shape(shape, scales) == block


def write_with_config(folder: Path, block: object) -> torch.Tensor:
    """Writes a weight of 192 rows and 128 columns with two scales along each; returns its product if a scale is for 96
    rows and 64 columns.
    """
    torch.manual_seed(6)
    numbers, scales = torch.randn(192, 128).mul(50).to(FP8), torch.rand(2, 2) + 0.01
    folder.mkdir()
    save_file({"weight": numbers, "weight_scale_inv": scales}, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return product_of(numbers, scales, (96, 64))


@pytest.mark.parametrize("place", ["folder", "file", "fsspec", "bcp", "hf"])
def test_blocks_of_any_length_are_told_by_the_configuration_of_the_folder(
    tmp_path: Path, call: Any, place: str
) -> None:
    expected = write_with_config(tmp_path / "fp8", [96, 64])
    path = {"file": "fp8/model.safetensors", "bcp": "out", "hf": "out"}.get(place, "fp8")
    if path == "out":
        ended = call("convert", tmp_path / "fp8", tmp_path / "out", "--to", place)
        assert (ended.code, "left out" in ended.out) == (0, False)
        assert bcp.open(tmp_path / "out").metadata["weight_block_size"] == [96, 64]
    state = {"weight": torch.zeros(192, 128)}
    bcp.load(f"{'file://' if place == 'fsspec' else ''}{tmp_path}/{path}", state, cast=True)
    assert torch.equal(state["weight"], expected)
    assert call("convert", tmp_path / path, tmp_path / "hf", "--to", "hf", "--dtype", "float32").code == 0
    assert torch.equal(bcp.open(tmp_path / "hf").state_dict()["weight"], expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_conversion_that_would_lose_the_blocks_is_refused_where_a_load_would_take_others(
    tmp_path: Path, call: Any, to: str
) -> None:
    write_with_config(tmp_path / "fp8", [96, 64])
    ended = call("convert", tmp_path / "fp8", tmp_path / "out", "--to", to)
    assert ended.code != 0
    assert "the scales 'weight_scale_inv' are for blocks of [96, 64]" in ended.out + ended.err
    assert not (tmp_path / "out").exists()
    write_with_config(tmp_path / "told", [128, 64])
    assert call("convert", tmp_path / "told", tmp_path / "out", "--to", to).code == 0


@pytest.mark.parametrize("block", [None, [96], [128, 32], [96.0, 64], [0, 64], "96", [True, 64]], ids=str)
def test_a_configuration_that_does_not_fit_the_scales_tells_no_blocks(tmp_path: Path, block: object) -> None:
    expected = write_with_config(tmp_path / "fp8", block)
    state = {"weight": torch.zeros(192, 128)}
    bcp.load(tmp_path / "fp8", state, cast=True)
    assert not torch.equal(state["weight"], expected)
    assert torch.equal(state["weight"][:96], expected[:96])  # blocks of 128 rows by the shapes


def test_a_configuration_that_cannot_be_read_is_no_reason_to_guess(tmp_path: Path) -> None:
    write_with_config(tmp_path / "fp8", [96, 64])
    (tmp_path / "fp8" / "config.json").write_text('{"quantization_config":')
    with pytest.raises(bcp.CheckpointCorruptError, match=r"config\.json is damaged: it is no JSON"):
        bcp.load(tmp_path / "fp8", {"weight": torch.zeros(192, 128)}, cast=True)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_region_of_any_blocks_is_the_product(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), max_size=4))
    blocks = [data.draw(st.sampled_from([1, 2, 4, 8, length])) for length in lengths]
    grid = [-(-length // block) for length, block in zip(lengths, blocks, strict=True)]
    offsets = [data.draw(st.integers(0, length - 1)) for length in lengths]
    parts = [data.draw(st.integers(0, length - first)) for first, length in zip(offsets, lengths, strict=True)]
    region = Region(tuple(offsets), tuple(parts))
    numbers, scales = torch.randn(lengths).mul(20).to(FP8), torch.rand(grid) + 0.1
    inside = tuple(slice(first, first + length) for first, length in zip(offsets, parts, strict=True))
    target = numbers.bfloat16()[inside].clone()
    shard = LocalShard("w", "bfloat16", tuple(lengths), region, target)
    saved = {"w": StoredTensor("w", "float8_e4m3fn", tuple(lengths))}
    saved["w_scale"] = StoredTensor("w_scale", "float32", tuple(grid))
    added = WeightScales(saved, {})
    assert added.add(shard, "w") == (shard, "w")
    for place in added.places.values():
        place.tensor.copy_(
            scales[tuple(slice(first, first + length) for first, length in zip(*place.region, strict=True))]
        )
    with patch.object(weight_scales, "_MULTIPLIED_NUMEL", data.draw(st.sampled_from([1, 100, 1 << 21]))):
        added.multiply()
    assert torch.equal(target, product_of(numbers, scales, tuple(blocks)).bfloat16()[inside])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["bcp", "hf", "dcp", "torch"])
def test_a_conversion_to_full_precision_writes_the_products(tmp_path: Path, call: Any, to: str) -> None:
    expected = write_model(tmp_path / "fp8")
    ended = call("convert", tmp_path / "fp8", tmp_path / "out", "--to", to, "--dtype", "bfloat16")
    assert ended.code == 0, ended.out
    assert ended.out.count("(scales: the weights are written multiplied by them)") == 2
    found = bcp.open(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_weights_that_share_their_scales_are_all_converted(tmp_path: Path, call: Any) -> None:
    model = nn.Module()
    scale = torch.tensor(2.0)
    for name in ("key", "value"):
        part = nn.Module()
        part.register_buffer("weight", torch.randn(4, 8).to(FP8))
        part.register_buffer("weight_scale", scale)
        model.add_module(name, part)
    bcp.save(tmp_path / "run", {"model": model})
    assert call("convert", tmp_path / "run", tmp_path / "out", "--to", "bcp", "--dtype", "float32").code == 0
    found = bcp.open(tmp_path / "out").state_dict()
    weights = {f"model.{name}": value for name, value in model.state_dict().items() if name.endswith("weight")}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value.float() * 2) for name, value in weights.items())


def test_parts_of_a_weight_are_converted_one_by_one(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "fp8", torch.float32)["up.weight"]
    source = open_alone(LoadTarget(str(tmp_path / "fp8"), "latest", None), bcp.LoadOptions())
    elements = Elements(source, [same_tensor("w", "float32", tuple(expected.shape), stored_fqn="up.weight")])
    found = torch.zeros(expected.numel())
    ends = [0, 7, 300, 301, 40_000, 123_456, expected.numel()]
    memory = memoryview(found.numpy()).cast("B")
    elements.read([Job(0, first, end - first, memory[4 * first : 4 * end]) for first, end in pairwise(ends)])
    assert torch.equal(found.view_as(expected), expected)


def test_a_conversion_without_a_dtype_keeps_numbers_and_scales(tmp_path: Path, call: Any) -> None:
    write_model(tmp_path / "fp8")
    assert call("convert", tmp_path / "fp8", tmp_path / "out", "--to", "bcp").code == 0
    stored, found = (bcp.open(tmp_path / name).state_dict() for name in ("fp8", "out"))
    assert stored.keys() == found.keys()
    assert all(torch.equal(value.view(torch.uint8), found[name].view(torch.uint8)) for name, value in stored.items())


def test_a_conversion_refuses_a_product_that_would_become_infinite(tmp_path: Path, call: Any) -> None:
    bcp.save(tmp_path / "run", {"weight": torch.full((4, 4), 400.0).to(FP8), "weight_scale": torch.tensor(1000.0)})
    ended = call("convert", tmp_path / "run", tmp_path / "out", "--to", "bcp", "--dtype", "float16")
    assert ended.code != 0
    assert "it would become infinite" in ended.out + ended.err
    assert not (tmp_path / "out" / "manifest.bcp").exists()


class Experts(nn.Module):
    """A layer of experts as transformers 5 has it in memory."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * rows, HIDDEN))
        self.down_proj = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, rows))


def experts_model(rows: int = INNER) -> nn.Module:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = Experts(rows)
    return model.bfloat16()


def write_experts(folder: Path, rows: int = INNER, kind: str = "blocks", block: int = 128) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    files: dict[str, torch.Tensor] = {}
    products: dict[str, list[torch.Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for number, (name, of_experts) in product(range(NUM_EXPERTS), products.items()):
        shape = (HIDDEN, rows) if name == "down_proj" else (rows, HIDDEN)
        numbers, scales, weight = quantized(*shape, block=block)
        if kind == "rows":
            scales = torch.rand(shape[0], 1) + 0.1
            weight = product_of(numbers, scales, (1, shape[1]))
        fqn = f"mlp.experts.{number}.{name}.weight"
        files[fqn], files[f"{fqn}_scale{'_inv' if kind == 'blocks' else ''}"] = numbers, scales
        of_experts.append(weight)
    folder.mkdir()
    save_file(files, folder / "model.safetensors")
    gate, up, down = (torch.stack(each).bfloat16() for each in products.values())
    return {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_experts_in_files_fill_stacks_with_their_products(tmp_path: Path, kind: str) -> None:
    expected = write_experts(tmp_path / "fp8", kind=kind)
    model = experts_model()
    bcp.load(tmp_path / "fp8", {"model": model}, cast=True)
    assert differing(model, expected) == []


def test_experts_whose_blocks_would_not_be_whole_in_a_stack_are_refused(tmp_path: Path) -> None:
    """Two blocks of 96 rows cannot be told from one of 128 and one of 64."""
    write_experts(tmp_path / "fp8", rows=96)
    model = experts_model(96)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"gate_up_proj: not in the checkpoint"):
        bcp.load(tmp_path / "fp8", {"model": model}, cast=True)


@pytest.mark.parametrize(
    ("rows", "block", "is_whole"), [(192, 96, True), (192, 128, False), (256, 160, False), (64, 128, True)]
)
def test_experts_whose_blocks_the_configuration_tells_fill_stacks_if_these_are_whole(
    tmp_path: Path, rows: int, block: int, *, is_whole: bool
) -> None:
    """Of 256 rows, blocks of 160 are two, as those of 128 would be. Of 64 rows, a block of 128 is one of 64."""
    expected = write_experts(tmp_path / "fp8", rows=rows, block=block)
    quantization = {"quantization_config": {"weight_block_size": [block, block]}}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(quantization))
    model = experts_model(rows)
    if is_whole:
        bcp.load(tmp_path / "fp8", {"model": model}, cast=True)
        assert differing(model, expected) == []
        return
    with pytest.raises(bcp.CheckpointMismatchError, match=r"gate_up_proj: not in the checkpoint"):
        bcp.load(tmp_path / "fp8", {"model": model}, cast=True)


def load_on_ranks(rank: int, world_size: int, path: str, layout: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    expected = {name: value.clone() for name, value in torch.load(f"{path}/expected.pt").items()}
    model: nn.Module = experts_model() if layout == "experts" else Model().bfloat16()
    if layout == "columns":
        for module in (model.up, model.down):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(1)]))
    else:
        fully_shard(model, mesh=mesh)
    assert any(isinstance(value, DTensor) for value in model.parameters())
    bcp.load(f"{path}/fp8", {"model": model}, cast=True)
    return differing(model, expected)


@pytest.mark.parametrize("layout", ["fsdp2", "columns", "experts"])
def test_each_rank_multiplies_its_part(tmp_path: Path, workers: WorkerPool, layout: str) -> None:
    write = write_experts if layout == "experts" else write_model
    torch.save(write(tmp_path / "fp8"), tmp_path / "expected.pt")
    assert workers.run(load_on_ranks, str(tmp_path), layout, world_size=3) == [[]] * 3
