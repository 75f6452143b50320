"""Experts of a layer as one tensor, and taken apart again: names, shapes and regions, without a file."""

from __future__ import annotations

import pytest

from bytecheckpoint.manifest import Chunk, DataFile, Manifest, TensorRecord, tensor_record
from bytecheckpoint.name_maps.fused_experts import EXPERT_NAMES, with_fused_experts, with_separate_experts
from bytecheckpoint.planner.copy_plan import WantedTensor, check_wanted, same_tensor
from bytecheckpoint.region import Region, whole

ROWS, COLUMNS, ITEM_BYTES = 3, 2, 4


def manifest_of(shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str] | None = None) -> Manifest:
    """Tensors one after the other in one file."""
    tensors: dict[str, TensorRecord] = {}
    position = 0
    for name, shape in shapes.items():
        num_bytes = whole(shape).numel * ITEM_BYTES
        dtype = (dtypes or {}).get(name, "float32")
        tensors[name] = tensor_record(dtype, shape, [Chunk(whole(shape), 0, position, num_bytes)])
        position += num_bytes
    return Manifest(save_id="", foreign_format="safetensors", files=[DataFile("f", position)], tensors=tensors)


def expert_shapes(layer: str, gate: str, up: str, down: str, num_experts: int = 3) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for number in range(num_experts):
        shapes[f"{layer}experts.{number}.{down}.weight"] = (COLUMNS, ROWS)
        shapes[f"{layer}experts.{number}.{gate}.weight"] = (ROWS, COLUMNS)
        shapes[f"{layer}experts.{number}.{up}.weight"] = (ROWS, COLUMNS)
    return shapes


QWEN = expert_shapes("model.layers.0.mlp.", "gate_proj", "up_proj", "down_proj")
MIXTRAL = expert_shapes("model.layers.0.block_sparse_moe.", "w1", "w3", "w2")


@pytest.mark.parametrize(("shapes", "matrices"), [(QWEN, ("gate_proj", "up_proj")), (MIXTRAL, ("w1", "w3"))])
def test_each_expert_is_a_region_of_the_stack(shapes, matrices):
    stored = manifest_of(shapes)
    fused = with_fused_experts(stored)
    assert fused is not None
    prefix = next(iter(shapes)).partition("experts.")[0]
    stack = fused.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert stack.shape == (3, 2 * ROWS, COLUMNS)
    assert fused.tensors["model.layers.0.mlp.experts.down_proj"].shape == (3, COLUMNS, ROWS)
    placed = {chunk.region: chunk.byte_offset for chunk in stack.chunks}
    for number in range(3):
        for position, matrix in enumerate(matrices):
            (chunk,) = stored.tensors[f"{prefix}experts.{number}.{matrix}.weight"].chunks
            assert placed[Region((number, position * ROWS, 0), (1, ROWS, COLUMNS))] == chunk.byte_offset


def test_what_stands_beside_experts_keeps_its_name_or_gets_that_of_their_module():
    beside = {"model.layers.0.block_sparse_moe.gate.weight": (3, COLUMNS), "model.norm.weight": (COLUMNS,)}
    fused = with_fused_experts(manifest_of(MIXTRAL | beside))
    assert fused is not None
    assert {"model.layers.0.mlp.gate.weight", "model.norm.weight"} < set(fused.tensors)


def test_experts_without_a_gate_are_two_stacks():
    shapes = {name: shape for name, shape in QWEN.items() if "gate_proj" not in name}
    fused = with_fused_experts(manifest_of(shapes))
    assert fused is not None
    assert {name: record.shape for name, record in fused.tensors.items()} == {
        "model.layers.0.mlp.experts.up_proj": (3, ROWS, COLUMNS),
        "model.layers.0.mlp.experts.down_proj": (3, COLUMNS, ROWS),
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"model.layers.0.mlp.experts.1.up_proj.weight": None},
        {"model.layers.0.mlp.experts.1.up_proj.weight": (ROWS + 1, COLUMNS)},
        {"model.layers.0.mlp.experts.1.down_proj.weight": (ROWS, COLUMNS)},
        {f"model.layers.0.mlp.experts.{number}.down_proj.weight": None for number in range(3)},
    ],
    ids=["one is missing", "one has another shape", "not transposed", "half of each is missing"],
)
def test_experts_that_are_not_alike_are_left_as_they_are(changed):
    shapes = {name: shape for name, shape in (QWEN | changed).items() if shape is not None}
    assert with_fused_experts(manifest_of(shapes)) is None


def test_experts_of_several_dtypes_are_left_as_they_are():
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert with_fused_experts(manifest_of(QWEN, {name: "float8_e4m3fn"})) is None


def test_experts_whose_scales_are_empty_are_left_as_they_are():
    """A damaged file raised ZeroDivisionError."""
    scales = {f"{name}_scale_inv": (0, 1) for name in QWEN}
    assert with_fused_experts(manifest_of(QWEN | scales)) is None


@pytest.mark.parametrize(
    ("shapes", "taken"),
    [(QWEN, "model.layers.0.mlp.experts.gate_up_proj"), (MIXTRAL, "model.layers.0.mlp.gate.weight")],
)
def test_experts_are_left_as_they_are_where_a_name_of_a_stack_or_beside_it_is_taken(shapes, taken):
    """The tensor that had the name was lost."""
    beside = {"model.layers.0.block_sparse_moe.gate.weight": (3, COLUMNS), taken: (1,)}
    assert with_fused_experts(manifest_of(shapes | beside)) is None


@pytest.mark.parametrize("taken", ["block_sparse_moe.experts.1.w3.weight", "block_sparse_moe.gate.weight"])
def test_stacks_stay_stacks_where_a_name_of_an_expert_or_beside_it_is_taken(taken):
    """A file had the name once in its header, and the bytes of two tensors."""
    stacks = {"gate_up_proj": (3, 2 * ROWS, COLUMNS), "down_proj": (3, COLUMNS, ROWS)}
    shapes = {f"mlp.experts.{name}": shape for name, shape in stacks.items()} | {"mlp.gate.weight": (3,), taken: (1,)}
    wanted = [same_tensor(fqn, "float32", shape, stored_fqn=fqn) for fqn, shape in shapes.items()]
    assert with_separate_experts(wanted, EXPERT_NAMES["mixtral"]) == wanted


def test_a_checkpoint_without_experts_is_none():
    assert with_fused_experts(manifest_of({"model.norm.weight": (2,)})) is None


@pytest.mark.parametrize(("names", "shapes"), [("qwen2_moe", QWEN), ("mixtral", MIXTRAL)])
def test_there_and_back_are_the_same_bytes(names, shapes):
    beside = {"model.norm.weight": (COLUMNS,)}
    stored = manifest_of(shapes | beside)
    fused = with_fused_experts(stored)
    assert fused is not None
    wanted = [same_tensor(fqn, "float32", record.shape, stored_fqn=fqn) for fqn, record in fused.tensors.items()]
    separate = with_separate_experts(wanted, EXPERT_NAMES[names])
    assert {tensor.fqn: tensor.shape for tensor in separate} == shapes | beside
    check_wanted(separate, fused)
    for tensor in separate:
        (piece,) = tensor.pieces
        (chunk,) = fused.table.chunks_meeting(piece.fqn, piece.source_region)
        assert chunk.byte_offset == stored.tensors[tensor.fqn].chunks[0].byte_offset


@pytest.mark.parametrize(
    "shapes",
    [
        {"gate_up_proj": (3, COLUMNS, 2 * ROWS), "down_proj": (3, ROWS, COLUMNS)},
        {"gate_up_proj": (3, 2 * ROWS, COLUMNS), "down_proj": (3, COLUMNS, ROWS), "down_proj_bias": (3, COLUMNS)},
        {"gate_up_proj": (3, 2 * ROWS, COLUMNS)},
    ],
    ids=["transposed, as Llama 4's", "with a bias, as GPT-OSS's", "one of the two"],
)
def test_stacks_of_another_layout_stay_stacks(shapes):
    wanted = [same_tensor(f"mlp.experts.{name}", "float32", shape, stored_fqn=name) for name, shape in shapes.items()]
    assert with_separate_experts(wanted, EXPERT_NAMES["qwen2_moe"]) == wanted


def test_a_stack_of_pieces_is_taken_apart_piece_by_piece():
    """As it comes out of a name map: here each half of the experts lies in a tensor of its own."""
    halves = [
        (Region((first, 0, 0), (2, 2 * ROWS, COLUMNS)), f"half{first}", whole((2, 2 * ROWS, COLUMNS)))
        for first in (0, 2)
    ]
    down = same_tensor("mlp.experts.down_proj", "float32", (4, COLUMNS, ROWS), stored_fqn="down")
    stack = same_tensor("mlp.experts.gate_up_proj", "float32", (4, 2 * ROWS, COLUMNS), stored_fqn="")
    piece = type(stack.pieces[0])
    stack = WantedTensor(stack.fqn, stack.dtype, stack.shape, [piece(*half) for half in halves])
    separate = {tensor.fqn: tensor for tensor in with_separate_experts([stack, down], EXPERT_NAMES["qwen2_moe"])}
    (found,) = separate["mlp.experts.3.up_proj.weight"].pieces
    assert found.fqn == "half2"
    assert found.source_region == Region((1, ROWS, 0), (1, ROWS, COLUMNS))
    assert found.region == whole((ROWS, COLUMNS))
