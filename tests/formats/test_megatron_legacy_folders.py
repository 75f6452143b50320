"""Folders of Megatron's older format: put together to the whole model, whatever ranks have saved it."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import Touch, assert_same
from megatron_files import Grid, truth, write
from plain_leaves import plain_leaves

import bytecheckpoint as bcp

GRIDS = {
    "one": Grid(),
    "tp2": Grid(tp=2),
    "pp2": Grid(pp=2),
    "tp2_pp2": Grid(tp=2, pp=2),
    "tp4": Grid(tp=4),
    "pp2_chunks": Grid(tp=2, pp=2, num_chunks=2),
}


def model_of(path: Path) -> dict[str, torch.Tensor]:
    found = bcp.open(path).state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in found.items() if name.startswith("model.")}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_whole_model_is_put_together(tmp_path: Path, name: str, gated: bool) -> None:
    expected = truth(gated=gated)
    write(tmp_path / "iter_0000020", expected, GRIDS[name], gated=gated)
    assert_same(model_of(tmp_path / "iter_0000020"), expected)


@pytest.mark.parametrize("grid", [Grid(ep=2), Grid(tp=2, ep=2), Grid(tp=2, pp=2, ep=2)], ids=str)
def test_experts_are_numbered_through(tmp_path: Path, grid: Grid) -> None:
    expected = truth(num_experts=4)
    write(tmp_path / "iter_0000020", expected, grid, num_experts=4)
    assert_same(model_of(tmp_path / "iter_0000020"), expected)


def test_a_model_is_filled_from_it_and_a_root_is_read_at_its_newest_step(tmp_path: Path) -> None:
    expected = truth()
    write(tmp_path / "iter_0000020", expected, Grid(tp=2))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    bcp.load(tmp_path, {"model": loaded}, exclude=["*._extra_state"])
    assert_same(loaded, expected)
    shutil.move(tmp_path / "iter_0000020", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert bcp.open(tmp_path).info.path == str(tmp_path / "release")


def test_what_is_no_tensor_of_the_model_is_there_too(tmp_path: Path) -> None:
    checkpoint = bcp.open(write(tmp_path / "c", truth(), Grid(tp=2)))
    assert (checkpoint.info.format, checkpoint.info.step) == ("megatron", 20)
    assert plain_leaves(checkpoint)["args.hidden_size"] == 8
    assert plain_leaves(checkpoint)["args.params_dtype"] == torch.bfloat16
    assert plain_leaves(checkpoint)["rng_state.0.python"] == (3, (1, 2))
    assert checkpoint["rng_state.0.torch_rng_state"][0] == 0
    assert checkpoint["mp_rank_01.rng_state.0.torch_rng_state"][0] == 1
    assert checkpoint.info.metadata == {}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    "others", [["optimizer"], ["distrib_optim.pt"], ["layer_wise_optimizer_0.pt", "layer_wise_optimizer_1.pt"]]
)
def test_optimizer_state_is_left_out_and_that_is_said(tmp_path: Path, others: list[str]) -> None:
    folder = write(tmp_path / "c", truth(), Grid(tp=2))
    if others == ["optimizer"]:
        rewrite(folder / "mp_rank_00", lambda state: state.update(optimizer={"state": {0: torch.ones(3)}}))
    else:
        for other in others:
            torch.save({}, folder / "mp_rank_00" / other)
    checkpoint = bcp.open(folder)
    assert all(other in checkpoint.info.metadata["left_out"] for other in others)
    assert not [name for name in checkpoint if name.startswith("optimizer")]


def test_values_of_other_ranks_that_the_first_lacks_or_has_otherwise_are_named_as_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", truth(), Grid(tp=2))
    for rank in range(2):
        own: dict[str, Any] = {f"only_{rank}": 1, "differs": [rank], "same": {"lr": 0.5}, "tensor": torch.ones(2)}
        rewrite(folder / f"mp_rank_0{rank}", lambda state, own=own: state.update(own))
    left_out = bcp.open(folder).info.metadata["left_out"]
    assert left_out.startswith("mp_rank_01.only_1, mp_rank_01.differs: the first rank has another value, or none")
    rewrite(folder / "mp_rank_01", lambda state: setattr(state["args"], "hidden_size", 9))
    assert bcp.open(folder).info.metadata["left_out"].startswith("mp_rank_01.args, ")
    assert bcp.open(folder / "mp_rank_01" / "model_optim_rng.pt").objects["only_1"] == 1


def test_models_of_releases_that_nested_them_are_read(tmp_path: Path) -> None:
    expected = {
        "language_model.embedding.word_embeddings.weight": torch.randn(16, 4),
        "language_model.encoder.layers.0.self_attention.query_key_value.weight": torch.randn(12, 4),
        "language_model.encoder.layers.0.self_attention.dense.weight": torch.randn(4, 4),
        "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight": torch.randn(16, 4),
        "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight": torch.randn(4, 16),
        "language_model.encoder.layers.0.input_layernorm.weight": torch.randn(4),
    }
    for rank in range(2):
        nested: dict[str, Any] = {"embedding": {"word_embeddings": {}}, "encoder": {}}
        for name, whole in expected.items():
            dim = 1 if name.endswith(("dense.weight", "4h_to_h.weight")) else 0
            part = whole if "layernorm" in name else whole.chunk(2, dim=dim)[rank].contiguous()
            if "embedding" in name:
                nested["embedding"]["word_embeddings"]["weight"] = part
            else:
                nested["encoder"][name.removeprefix("language_model.encoder.")] = part
        at = tmp_path / "c" / f"mp_rank_0{rank}"
        at.mkdir(parents=True)
        args = Namespace(tensor_model_parallel_size=2)
        state = {"model": {"language_model": nested}, "args": args, "iteration": 3, "checkpoint_version": 3.0}
        torch.save(state, at / "model_optim_rng.pt")
    assert_same(model_of(tmp_path / "c"), expected)


def write_ranks(folder: Path, models: list[dict[str, Any]], *, axis: str = "expert", **settings: Any) -> Path:
    """A file of each rank along one axis, each with these names."""
    for rank, model in enumerate(models):
        at = folder / (f"mp_rank_00_{rank:03d}" if axis == "expert" else f"mp_rank_{rank:02d}")
        at.mkdir(parents=True)
        args = Namespace(**{f"{axis}_model_parallel_size": len(models), **settings})
        torch.save({"model": model, "args": args, "iteration": 3, "checkpoint_version": 3.0}, at / "model_optim_rng.pt")
    return folder


MLP = "decoder.layers.0.mlp"


@pytest.mark.parametrize("name", ["experts.weight1", "experts.linear_fc1.lora_a", "local_experts.weight"])
def test_weights_of_experts_that_no_name_tells_apart_are_refused(tmp_path: Path, name: str) -> None:
    models = [{f"{MLP}.{name}": torch.full((4, 6), float(rank))} for rank in range(2)]
    with pytest.raises(bcp.CheckpointError, match=name) as caught:
        bcp.open(write_ranks(tmp_path / "c", models))
    assert caught.value.kind == "unsupported_version"


@pytest.mark.parametrize("middle", ["local_experts", "experts.local_experts"])
def test_experts_are_numbered_through_in_the_older_layout_too(tmp_path: Path, middle: str) -> None:
    models = [
        {f"{MLP}.{middle}.{index}.dense_h_to_4h.weight": torch.full((2,), 2.0 * rank + index) for index in range(2)}
        for rank in range(2)
    ]
    found = model_of(write_ranks(tmp_path / "c", models, num_experts=4))
    expected = {f"{MLP}.{middle}.{index}.dense_h_to_4h.weight": torch.full((2,), float(index)) for index in range(4)}
    assert_same(found, expected)


def test_extra_state_of_all_ranks_of_experts_is_kept(tmp_path: Path) -> None:
    name = f"{MLP}.experts.linear_fc1._extra_state"
    models = [{name: torch.full((3,), float(rank))} for rank in range(2)]
    checkpoint = bcp.open(write_ranks(tmp_path / "c", models))
    assert checkpoint[f"model.{name}"][0] == 0
    assert checkpoint[f"mp_rank_00_001.model.{name}"][0] == 1


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_plain_values_of_one_name_on_several_stages_are_kept_or_named_as_left_out(
    tmp_path: Path, num_chunks: int
) -> None:
    path = write(tmp_path / "c", truth(), Grid(pp=2, num_chunks=num_chunks))
    for stage, file in enumerate(sorted(path.rglob("*.pt"))):
        state = torch.load(file, weights_only=False)
        for number, key in enumerate(sorted(key for key in state if key.startswith("model"))):
            state[key]["decoder._extra_state"] = {"chunk": 10 * number + stage}
        torch.save(state, file)
    checkpoint = bcp.open(path)
    found = [value for name, value in plain_leaves(checkpoint).items() if name.endswith("._extra_state.chunk")]
    left_out = checkpoint.info.metadata.get("left_out", "")
    assert sorted(found) == [0, 1, 10][: num_chunks + 1]
    assert ("mp_rank_00_001.model.decoder._extra_state" in left_out) == (num_chunks == 2)


@pytest.mark.parametrize("axis", ["expert", "tensor"])
@pytest.mark.parametrize("crc", [True, False])
def test_copies_on_other_ranks_that_differ_are_refused(tmp_path: Path, axis: str, crc: bool) -> None:
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    torch.serialization.set_crc32_options(crc)
    try:
        write_ranks(tmp_path / "same", [{name: torch.ones(4)}] * 2, axis=axis)
        write_ranks(tmp_path / "other", [{name: torch.full((4,), float(rank))} for rank in range(2)], axis=axis)
        write_ranks(tmp_path / "shape", [{name: torch.ones(4 + rank)} for rank in range(2)], axis=axis)
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(model_of(tmp_path / "same"), {name: torch.ones(4)})
    for folder in ("other", "shape"):
        with pytest.raises(bcp.CheckpointError, match="q_layernorm") as caught:
            bcp.open(tmp_path / folder)
        assert caught.value.kind in {"conflict", "bad_manifest"}


def test_copies_that_are_views_of_different_buffers_are_compared(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    buffers = [torch.cat([torch.full((2,), float(rank)), torch.ones(4)]) for rank in range(2)]
    write_ranks(tmp_path / "c", [{name: buffer[2:]} for buffer in buffers], axis="tensor")
    assert_same(model_of(tmp_path / "c"), {name: torch.ones(4)})
    # With as many bytes as their buffers, of which they have a part.
    buffers = [torch.cat([torch.ones(2), torch.full((2,), float(rank))]) for rank in range(2)]
    write_ranks(tmp_path / "d", [{name: buffer[:2].expand(2, 2)} for buffer in buffers], axis="tensor")
    assert_same(model_of(tmp_path / "d"), {name: torch.ones(2, 2)})


def test_a_second_copy_of_the_embedding_that_differs_is_refused(tmp_path: Path) -> None:
    name = "embedding.word_embeddings.weight"
    models = [{name: torch.ones(4, 2)}, {name: torch.zeros(4, 2)}]
    write_ranks(tmp_path / "c", models, pipeline_model_parallel_size=2, expert_model_parallel_size=1)
    with pytest.raises(bcp.CheckpointMismatchError, match="word_embeddings"):
        bcp.open(tmp_path / "c")


ONE = {f"{MLP}.experts.linear_fc2.weight{index}": torch.ones(2, 2) for index in range(2)}
ATTENTION = "language_model.encoder.layers.0.attention.query_key_value.weight"
ARGUMENTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str, str]] = {
    "layers": ([ONE], {"num_layers": 24}, "num_layers=24", "bad_manifest"),
    "experts": ([ONE] * 2, {"num_experts": 8}, "num_experts=8", "bad_manifest"),
    "ranks": ([ONE] * 4, {"expert_model_parallel_size": 2}, "expert_model_parallel_size=2", "conflict"),
    "cuts": ([ONE], {"expert_tensor_parallel_size": 2}, "split over 2 ranks", "unsupported_version"),
    "gap": ([{"decoder.layers.1.w": torch.ones(2)}], {}, "no tensors", "unsupported_version"),
    "one_expert_less": ([{**ONE, f"{MLP}.experts.linear_fc1.weight1": torch.ones(2)}], {}, "experts", "bad_manifest"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_the_arguments_say_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    models, settings, message, kind = ARGUMENTS[name]
    with pytest.raises(bcp.CheckpointError, match=message) as caught:
        bcp.open(write_ranks(tmp_path / "c", models, **settings))
    assert caught.value.kind == kind


def test_files_whose_arguments_are_of_another_save_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", truth(), Grid(tp=2))
    rewrite(folder / "mp_rank_01", lambda state: setattr(state["args"], "tensor_model_parallel_size", 4))
    with pytest.raises(bcp.CheckpointCorruptError, match="tensor_model_parallel_size=4"):
        bcp.open(folder)


@pytest.mark.parametrize("version", [0, 1.0, None, float("nan")])
def test_the_old_order_of_attention_is_refused_of_one_rank_as_well(tmp_path: Path, version: Any) -> None:
    folder = write_ranks(tmp_path / "c", [{ATTENTION: torch.ones(6, 2)}], axis="tensor")
    rewrite(folder / "mp_rank_00", lambda state: state.update(checkpoint_version=version))
    with pytest.raises(bcp.CheckpointError, match="orders the rows") as caught:
        bcp.open(folder)
    assert caught.value.kind == "unsupported_version"


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def other_iteration(folder: Path) -> None:
    rewrite(folder / "mp_rank_01_000", lambda state: state.update(iteration=30))


def lost_rank(folder: Path) -> None:
    shutil.rmtree(folder / "mp_rank_01_000")


def lost_last_stage(folder: Path) -> None:
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        shutil.rmtree(folder / name)


def lost_file(folder: Path) -> None:
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").unlink()


def truncated(folder: Path) -> None:
    path = folder / "mp_rank_01_001" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-100])


def empty(folder: Path) -> None:
    (folder / "mp_rank_01_001" / "model_optim_rng.pt").write_bytes(b"")


def same_rank_twice(folder: Path) -> None:
    shutil.copytree(folder / "mp_rank_00_000", folder / "mp_rank_00")


def unknown_kind(folder: Path) -> None:
    for rank in range(2):
        change = {"decoder.layers.0.mixer.in_proj.weight": torch.zeros(4, 4)}
        rewrite(folder / f"mp_rank_0{rank}_000", lambda state, change=change: state["model"].update(change))


def without_second_layer(folder: Path) -> None:
    for rank in range(2):
        rewrite(folder / f"mp_rank_0{rank}_000", lambda state: state["model"].pop(FC2))


def other_names(folder: Path) -> None:
    rewrite(folder / "mp_rank_01_000", lambda state: state["model"].pop(FC2))


def other_shape(folder: Path) -> None:
    rewrite(folder / "mp_rank_01_000", lambda state: state["model"].update({FC2: torch.zeros(8, 7)}))


def other_dtype(folder: Path) -> None:
    rewrite(folder / "mp_rank_01_000", lambda state: state["model"].update({QKV: state["model"][QKV].float()}))


def old_order(folder: Path) -> None:
    for path in folder.iterdir():
        rewrite(path, lambda state: state.update(checkpoint_version=1.0))


def no_model(folder: Path) -> None:
    rewrite(folder / "mp_rank_00_000", lambda state: state.pop("model"))


def no_dict(folder: Path) -> None:
    torch.save([1], folder / "mp_rank_00_000" / "model_optim_rng.pt")


def model_of_numbers(folder: Path) -> None:
    rewrite(folder / "mp_rank_00_000", lambda state: state.update(model=[1, 2]))


def same_name_on_two_stages(folder: Path) -> None:
    for path in folder.iterdir():
        rewrite(path, lambda state: state["model"].update({"output_layer.weight": torch.zeros(8, 8)}))


def impossible_sizes(folder: Path) -> None:
    rewrite(folder / "mp_rank_00_000", lambda state: setattr(state["args"], "pipeline_model_parallel_size", 1 << 70))


def hostile(folder: Path) -> None:
    change = {"hook": Touch(folder.parent / "marker")}
    rewrite(folder / "mp_rank_01_001", lambda state: state.update(change))


DAMAGE = {
    other_iteration: "bad_manifest",
    lost_rank: "missing_file",
    lost_last_stage: "missing_file",
    lost_file: "missing_file",
    truncated: "truncated",
    empty: "truncated",
    same_rank_twice: "conflict",
    unknown_kind: "unsupported_version",
    without_second_layer: "unsupported_version",
    other_names: "bad_manifest",
    other_shape: "bad_manifest",
    other_dtype: "bad_manifest",
    old_order: "unsupported_version",
    no_model: "bad_manifest",
    no_dict: "bad_manifest",
    model_of_numbers: "bad_manifest",
    same_name_on_two_stages: "conflict",
    impossible_sizes: "missing_file",
    hostile: "pickle_refused",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = write(tmp_path / "c", truth(), Grid(tp=2, pp=2))
    damage(folder)
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(folder)
    assert caught.value.kind == DAMAGE[damage], caught.value.message
    assert str(folder) in caught.value.message
    assert not (tmp_path / "marker").exists()


def test_what_is_said_a_billion_times_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", truth(), Grid())
    value: dict[str, Any] = {}
    for _ in range(4):
        value = dict.fromkeys(map(str, range(300)), value)
    rewrite(folder / "mp_rank_00", lambda state: state.update(model=value))
    with pytest.raises(bcp.UnsafeCheckpointError) as caught:
        bcp.open(folder)
    assert caught.value.kind == "limits_exceeded"
