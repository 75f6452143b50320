"""Experts in MXFP4, as gpt-oss's files hold them: 4-bit numbers, two in a byte, and an exponent for each 32 of them.
Loaded in full precision, they are the products, transposed.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

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
from bytecheckpoint.adapters.native.weight_scales import WeightScales
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.conversion.assemble import Elements, Job
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_alone
from bytecheckpoint.name_maps.fused_experts import packed_weights, with_packed_weights
from bytecheckpoint.planner.copy_plan import same_tensor
from bytecheckpoint.region import Region
from distributed.workers import WorkerPool

__all__ = ["call"]

NUM_EXPERTS, HIDDEN, INNER = 5, 96, 64
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def packed(num_matrices: int, num_columns: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers and exponents as files hold them."""
    blocks = torch.randint(0, 256, (num_matrices, num_columns, num_blocks, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 130, blocks.shape[:3], dtype=torch.uint8)


def product_of(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weight in float32: the low half of a byte is the first of its two numbers."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(3).long()
    factors = 2.0 ** (scales.double() - 127)
    return (torch.tensor(NUMBERS)[codes] * factors.unsqueeze(-1)).float().flatten(2).transpose(1, 2)


class Experts(nn.Module):
    """A layer of experts as transformers has gpt-oss in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, 2 * INNER))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * INNER))
        self.down_proj = nn.Parameter(torch.zeros(NUM_EXPERTS, INNER, HIDDEN))


def new_model() -> nn.Module:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = Experts()
    return model.bfloat16()


def write_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Writes a folder in MXFP4; returns what a model in this dtype is to hold."""
    torch.manual_seed(3)
    files = {f"{UP}_bias": torch.randn(NUM_EXPERTS, 2 * INNER).bfloat16()}
    expected = dict(files)
    for name, columns, rows in ((UP, 2 * INNER, HIDDEN), (DOWN, HIDDEN, INNER)):
        blocks, scales = packed(NUM_EXPERTS, columns, rows // 32)
        files |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = product_of(blocks, scales)
    folder.mkdir()
    save_file(files, folder / "model.safetensors")
    return {name: value.to(dtype) for name, value in expected.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_packed_weights_are_unpacked_and_multiplied_by_their_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = write_model(tmp_path / "mxfp4", dtype)
    model = new_model().to(dtype)
    versions = [parameter._version for parameter in model.parameters()]
    report = bcp.load(tmp_path / "mxfp4", {"model": model}, cast=True)
    assert differing(model, expected) == []
    assert report.num_tensors == len(expected)
    assert not report.unexpected
    assert all(each._version > before for each, before in zip(model.parameters(), versions, strict=True))


@pytest.mark.parametrize("where", [torch.device("meta"), torch.inference_mode()], ids=["meta", "inference"])
def test_models_on_the_meta_device_and_of_inference_mode_are_filled_too(tmp_path: Path, where: Any) -> None:
    expected = write_model(tmp_path / "mxfp4")
    expected.pop(f"{UP}_bias")
    with where:
        model = new_model()
        model.mlp.experts.gate_up_proj_bias = None
    bcp.load(tmp_path / "mxfp4", {"model": model}, cast=True, include="*_proj")
    assert differing(model, expected) == []


@pytest.mark.parametrize(
    "arguments",
    [{"exclude": ["*_scales", "*_bias"]}, {"include": "*_proj"}, {"key_map": [("^", "net.")]}],
    ids=["parts are left out", "names in memory", "renamed"],
)
def test_packed_weights_go_by_their_names_in_memory(tmp_path: Path, arguments: dict[str, Any]) -> None:
    expected = write_model(tmp_path / "mxfp4")
    model = new_model()
    bcp.load(tmp_path / "mxfp4", {"net": model}, cast=True, **arguments)
    assert {UP, DOWN}.isdisjoint(differing(model, expected))


def test_a_load_without_cast_says_that_the_weights_are_packed(tmp_path: Path) -> None:
    write_model(tmp_path / "mxfp4")
    model = new_model()
    with pytest.raises(bcp.CheckpointMismatchError, match=rf"{DOWN}: dtype mxfp4 .* \(cast=True converts\)"):
        bcp.load(tmp_path / "mxfp4", {"model": model})
    assert not model.mlp.experts.down_proj.any()
    state = {
        name: torch.zeros(NUM_EXPERTS, rows, columns, dtype=torch.int8) for name, rows, columns in [(DOWN, 64, 96)]
    }
    with pytest.raises(bcp.CheckpointMismatchError, match="torch cannot convert mxfp4"):
        bcp.load(tmp_path / "mxfp4", state, cast=True, include=f"{DOWN}*")


def test_a_state_with_places_for_packed_numbers_gets_them_as_they_are(tmp_path: Path) -> None:
    write_model(tmp_path / "mxfp4")
    stored = bcp.open(tmp_path / "mxfp4").state_dict()
    state = {name: torch.zeros_like(value) for name, value in stored.items()}
    bcp.load(tmp_path / "mxfp4", state, cast=True)
    assert [name for name, value in stored.items() if not torch.equal(value, state[name])] == []


def test_a_state_with_places_for_products_and_for_scales_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "mxfp4")
    scales = bcp.open(tmp_path / "mxfp4").state_dict()[f"{DOWN}_scales"]
    state = {DOWN: torch.zeros(NUM_EXPERTS, INNER, HIDDEN), f"{DOWN}_scales": torch.zeros_like(scales)}
    report = bcp.load(tmp_path / "mxfp4", state, cast=True, strict=False)
    assert len(report.mismatched) == 1
    assert f"the state has a place for the scales '{DOWN}_scales' too" in report.mismatched[0]
    assert not state[DOWN].any()
    assert torch.equal(state[f"{DOWN}_scales"], scales)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_packed_weights_are_the_products_under_both_names(tmp_path: Path, call: Any) -> None:
    stored = dict(zip(("a.experts.w_blocks", "a.experts.w_scales"), packed(2, 8, 1), strict=True))
    tied = {name.replace("a.", "b.", 1): name for name in stored}
    save_file(stored, tmp_path / "model.safetensors", tied)
    assert call("convert", tmp_path, tmp_path / "out", "--to", "bcp", "--dtype", "float32").code == 0
    expected = product_of(*stored.values())
    for path in (tmp_path / "out", tmp_path / "model.safetensors"):
        state = {name: torch.zeros_like(expected) for name in ("a.experts.w", "b.experts.w")}
        bcp.load(path, state, cast=True)
        assert all(torch.equal(value, expected) for value in state.values())


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (("uint8", (4, 8, 2, 8)), ("uint8", (4, 8, 2))),
        (("uint8", (4, 8, 2, 16)), ("uint8", (4, 8, 1))),
        (("uint8", (4, 8, 2, 16)), ("bfloat16", (4, 8, 2))),
        (("int8", (4, 8, 2, 16)), ("int8", (4, 8, 2))),
        (("uint8", (8, 2, 16)), ("uint8", (8, 2))),
    ],
    ids=["blocks of 16", "scales of two blocks", "scales with a fraction", "signed", "one matrix"],
)
def test_what_is_not_laid_out_as_mxfp4_is_not_taken_for_it(blocks: Any, scales: Any) -> None:
    assert packed_weights({"w_blocks": blocks, "w_scales": scales}) == {}


def test_a_weight_that_is_there_is_not_replaced_by_packed_numbers() -> None:
    stored = {"w_blocks": ("uint8", (4, 8, 2, 16)), "w_scales": ("uint8", (4, 8, 2))}
    assert packed_weights(stored) == {"w": (4, 64, 8)}
    assert packed_weights({**stored, "w": ("bfloat16", (4, 64, 8))}) == {}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_region_is_made_of_the_blocks_that_it_touches(data: st.DataObject) -> None:
    num_matrices, num_columns, num_blocks = (data.draw(st.integers(1, most)) for most in (3, 9, 3))
    stored = packed(num_matrices, num_columns, num_blocks)
    shape = num_matrices, 32 * num_blocks, num_columns
    offsets = [data.draw(st.integers(0, length - 1)) for length in shape]
    lengths = [data.draw(st.integers(1, length - first)) for first, length in zip(offsets, shape, strict=True)]
    inside = tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))
    target = torch.full(lengths, 7.0, dtype=torch.bfloat16)
    saved = {"w": StoredTensor("w", "mxfp4", shape)}
    for name, tensor in zip(("w_blocks", "w_scales"), stored, strict=True):
        saved[name] = StoredTensor(name, "uint8", tuple(tensor.shape))
    added = WeightScales(saved, {})
    shard = LocalShard("w", "bfloat16", shape, Region(tuple(offsets), tuple(lengths)), target)
    filled, fqn = added.add(shard, "w")
    places = [filled, *added.places.values()]
    assert [fqn, *(place.fqn for place in places[1:])] == ["w_blocks", "w_scales"]
    touched = len({number // 32 for number in range(offsets[1], offsets[1] + lengths[1])})
    for place, source in zip(places, stored, strict=True):
        assert place.region.lengths[:3] == (lengths[0], lengths[2], touched)
        region = tuple(slice(first, first + length) for first, length in zip(*place.region, strict=True))
        place.tensor.copy_(source[region])
    added.multiply()
    assert torch.equal(target, product_of(*stored).bfloat16()[inside])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["bcp", "hf", "dcp", "torch"])
def test_a_conversion_to_full_precision_writes_the_products(tmp_path: Path, call: Any, to: str) -> None:
    expected = write_model(tmp_path / "mxfp4")
    ended = call("convert", tmp_path / "mxfp4", tmp_path / "out", "--to", to, "--dtype", "bfloat16")
    assert ended.code == 0, ended.out
    assert "4 tensors" in ended.out
    assert "(packed numbers and their scales: the weights are written, their products)" in ended.out
    found = bcp.open(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def test_parts_of_a_packed_weight_are_converted_one_by_one(tmp_path: Path) -> None:
    expected = write_model(tmp_path / "mxfp4", torch.float32)[UP]
    source = open_alone(LoadTarget(str(tmp_path / "mxfp4"), "latest", None), bcp.LoadOptions())
    source = source.showing(with_packed_weights(source.manifest))
    elements = Elements(source, [same_tensor("w", "float32", tuple(expected.shape), stored_fqn=UP)])
    found = torch.zeros(expected.numel())
    ends = [0, 7, 128, 129, 5_000, 23_456, expected.numel()]
    memory = memoryview(found.numpy()).cast("B")
    elements.read([Job(0, first, end - first, memory[4 * first : 4 * end]) for first, end in pairwise(ends)])
    assert torch.equal(found.view_as(expected), expected)


def test_a_conversion_without_a_dtype_keeps_packed_numbers(tmp_path: Path, call: Any) -> None:
    expected = write_model(tmp_path / "mxfp4")
    assert call("convert", tmp_path / "mxfp4", tmp_path / "out", "--to", "bcp").code == 0
    stored, found = (bcp.open(tmp_path / name).state_dict() for name in ("mxfp4", "out"))
    assert stored.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in stored.items())
    model = new_model()
    bcp.load(tmp_path / "out", {"model": model}, cast=True)
    assert differing(model, expected) == []


def test_a_conversion_counts_what_it_leaves_out_as_it_is_stored(tmp_path: Path, call: Any) -> None:
    write_model(tmp_path / "mxfp4")
    arguments = ("--to", "bcp", "--dtype", "bfloat16", "--exclude", f"{UP}*")
    ended = call("convert", tmp_path / "mxfp4", tmp_path / "out", *arguments)
    assert ended.code == 0, ended.out
    assert "left out: mlp: 3 tensors, 33.1 KiB (not chosen by include and exclude)" in ended.out
    assert list(bcp.open(tmp_path / "out")) == [DOWN]


def test_a_conversion_refuses_products_that_would_become_infinite(tmp_path: Path, call: Any) -> None:
    blocks, scales = packed(1, 8, 1)
    save_file({"w_blocks": blocks, "w_scales": scales.fill_(150)}, tmp_path / "model.safetensors")
    ended = call("convert", tmp_path, tmp_path / "out", "--to", "bcp", "--dtype", "float16")
    assert ended.code != 0
    assert "it would become infinite" in ended.out + ended.err
    assert not (tmp_path / "out" / "manifest.bcp").exists()


def test_doctor_says_that_packed_weights_take_a_cast(tmp_path: Path, call: Any) -> None:
    write_model(tmp_path / "mxfp4")
    ended = call("doctor", "--checkpoint", tmp_path / "mxfp4")
    assert "quantized, with scales: cast=True loads the products" in ended.out


def load_on_ranks(rank: int, world_size: int, path: str, layout: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    expected = torch.load(f"{path}/expected.pt")
    model = new_model()
    experts = model.mlp.experts
    if layout == "fsdp2":
        fully_shard(model, mesh=mesh)
    for name in (UP, DOWN) if layout != "fsdp2" else ():
        value = getattr(experts, name.rpartition(".")[2])
        sharded = distribute_tensor(value.detach(), mesh, [Shard(1 if layout == "rows" else 2)])
        setattr(experts, name.rpartition(".")[2], nn.Parameter(sharded))
    sharded = [value for value in model.parameters() if isinstance(value, DTensor)]
    versions = [value._version for value in sharded]
    bcp.load(f"{path}/mxfp4", {"model": model}, cast=True)
    assert versions
    assert all(value._version > before for value, before in zip(sharded, versions, strict=True))
    return differing(model, expected)


@pytest.mark.parametrize("layout", ["fsdp2", "rows", "columns"])
def test_each_rank_unpacks_its_part(tmp_path: Path, workers: WorkerPool, layout: str) -> None:
    """Of 96 rows or 64, three ranks have parts that do not begin where a block does."""
    torch.save(write_model(tmp_path / "mxfp4"), tmp_path / "expected.pt")
    assert workers.run(load_on_ranks, str(tmp_path), layout, world_size=3) == [[]] * 3
