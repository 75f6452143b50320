"""What megatron-core itself has saved, read in place: its `torch_dist` folders hold what its sharded tensors hold, and
the model put together from its older format is the same.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from migration_pages import assert_doctor_prints, blocks_of, run

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_megatron import Layout, build, fill, on_host

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(600),
]

LAYOUTS = {
    "tp2": (2, Layout(tp=2, is_distributed=False)),
    "pp2_chunks": (2, Layout(pp=2, num_chunks=2, is_distributed=False)),
    "tp2_pp2": (4, Layout(tp=2, pp=2, is_distributed=False)),
    "named_layers": (2, Layout(tp=2, is_distributed=False, is_homogeneous=False)),
    "buckets": (2, Layout()),
}
FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Names of layer norms, which sharded tensors have as if they were parts of the layers that follow."""


class Held(NamedTuple):
    """What a rank has of a tensor."""

    key: str
    start: tuple[int, ...]
    value: torch.Tensor


def save(rank: int, world_size: int, layout: Layout, path: str) -> list[Held]:
    """In both formats, by one rank each; what this rank holds."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.utils import unwrap_model

    with on_host(layout):
        built = build(layout)
        fill(built)
        args = Namespace(
            num_layers=4,
            params_dtype=torch.bfloat16,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
        )
        common = {"args": args, "iteration": 7, "checkpoint_version": 3.0}
        tp, pp = (getattr(parallel_state, f"get_{axis}_model_parallel_rank")() for axis in ("tensor", "pipeline"))
        state: dict[str, Any] = dict(common)
        older: dict[str, Any] = dict(common)
        for index, chunk in enumerate(unwrap_model(built.chunks)):
            key = "model" if layout.num_chunks == 1 else f"model{index}"
            state[key] = chunk.sharded_state_dict()
            older[key] = chunk.state_dict_for_save_checkpoint()
        merged = {key: value for index in state if index.startswith("model") for key, value in state[index].items()}
        if layout.is_distributed:
            metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
            state["optimizer"] = built.optimizer.sharded_state_dict(merged, metadata=metadata)
        replica = parallel_state.get_data_parallel_rank()
        rng = [{"torch": torch.get_rng_state()}]
        state["rng_state"] = ShardedObject("rng_state", rng, (layout.pp, layout.tp), (pp, tp), replica_id=replica)
        held = list(_held(state))
        Path(path, "dist").mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, f"{path}/dist")
        folder = Path(path, "older", f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else ""))
        if replica == 0:
            folder.mkdir(parents=True)
            torch.save(older, folder / "model_optim_rng.pt")
        torch.distributed.barrier()
    return held


def _held(state: dict[str, Any]) -> Iterator[Held]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(state):
        pieces = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for piece in pieces:
            if isinstance(piece, ShardedTensor):
                shape = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
                yield Held(piece.key, tuple(piece.global_offset), piece.data.detach().reshape(shape).clone())


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Held]]]:
    found = {}
    for name, (world_size, layout) in LAYOUTS.items():
        path = tmp_path_factory.mktemp(name)
        of_ranks = workers.run(save, layout, str(path), world_size=world_size, timeout_s=300)
        found[name] = path, [held for of_rank in of_ranks for held in of_rank]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_holds_what_the_ranks_held(saved: dict[str, tuple[Path, list[Held]]], name: str) -> None:
    path, held = saved[name]
    checkpoint = bcp.open(path / "dist")
    assert {key for key, _, _ in held} <= set(checkpoint)
    for key, start, value in held:
        region = tuple(slice(first, first + length) for first, length in zip(start, value.shape, strict=True))
        # to the bit: what fills buckets up may be NaN
        assert torch.equal(checkpoint[key][region].view(torch.uint8), value.view(torch.uint8)), key
    assert checkpoint.info.step == 7
    assert checkpoint.objects["args"]["params_dtype"] == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "buckets"])
def test_the_older_format_holds_the_same_model(saved: dict[str, tuple[Path, list[Held]]], name: str) -> None:
    path, held = saved[name]
    stacked = bcp.open(path / "dist")
    older = bcp.open(path / "older")
    assert older.info.format == "megatron"
    found = {fqn.removeprefix("model."): older[fqn] for fqn in older if fqn.startswith("model.")}
    names = {key for key, _, _ in held if not key.startswith("optimizer.")}
    for older_name, view in found.items():
        fqn = older_name
        for module, name_in_dist in FUSED.items():
            fqn = fqn.replace(module, name_in_dist)
        parts = fqn.split(".layers.")
        if len(parts) == 2 and fqn not in names:
            index, _, rest = parts[1].partition(".")
            name, wanted = f"{parts[0]}.layers.{rest}", stacked[f"{parts[0]}.layers.{rest}"][int(index)]
        else:
            name, wanted = fqn, stacked[fqn][:]
        assert torch.equal(view[:], wanted), fqn
        names.discard(name)
    assert not names


def test_a_model_of_megatron_is_filled_from_it(workers: WorkerPool, saved: dict[str, tuple[Path, list[Held]]]) -> None:
    path = str(saved["tp2_pp2"][0] / "dist")
    for wrong in workers.run(load, Layout(), path, world_size=1, timeout_s=300):
        assert wrong == []


def test_weights_load_by_the_lines_of_the_page_about_moving_over(
    workers: WorkerPool, saved: dict[str, tuple[Path, list[Held]]], tmp_path: Path
) -> None:
    shutil.copytree(saved["tp2_pp2"][0] / "dist", tmp_path / "old" / "iter_0000010")
    assert workers.run(load_as_documented, str(tmp_path), world_size=1, timeout_s=300) == [[]]


def load_as_documented(rank: int, world_size: int, folder: str) -> list[str]:
    """What differs after a load by the page, into parameters in the precision of the checkpoint."""
    from frameworks.real_megatron import sharded_parameters, true_part

    os.chdir(folder)
    *_, block = blocks_of("from-megatron.md")
    with on_host(Layout()):
        built = build(Layout())
        run(block, {"bcp": bcp, "model": built.chunks})
        assert_doctor_prints("old/iter_0000010", block)
        return [
            sharded.key
            for parameter, sharded in sharded_parameters(built)
            if not torch.equal(parameter, true_part(sharded, "{}").to(parameter.dtype))
        ]


def load(rank: int, world_size: int, layout: Layout, path: str) -> list[str]:
    """What differs after a load of the model into another layout."""
    from frameworks.real_megatron import sharded_parameters, true_part

    with on_host(layout):
        built = build(layout)
        key_map = [("^(?=embedding|decoder|output_layer)", "model.")]
        bcp.load(path, {"model": built.chunks}, key_map=key_map, exclude=["*._extra_state*"], cast=True)
        return [
            sharded.key
            for parameter, sharded in sharded_parameters(built)
            if not torch.equal(parameter, true_part(sharded, "{}").to(parameter.dtype))
        ]
