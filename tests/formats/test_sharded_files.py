"""Files that each rank has written with torch.save, with torch's sharded tensors in them."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from foreign_files import Touch, assert_same
from hand_pickles import dtensor as hand_dtensor
from hand_pickles import encoded, named, shared, view
from hand_pickles import write as write_by_hand
from plain_leaves import plain_leaves
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import bytecheckpoint as bcp
from bytecheckpoint.formats.torch_save import duplicates, sharded_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of what it saves itself

NUM_RANKS = 4
WHOLE = {
    "layers.0.weight": torch.arange(60.0).reshape(10, 6),
    "layers.0.bias": torch.arange(3, dtype=torch.bfloat16),  # fewer elements than ranks
    "layers.1.weight": torch.randn(7, 4),
}
BUFFER = torch.tensor([5, 6, 7])


@contextmanager
def as_rank(rank: int, world_size: int = NUM_RANKS) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_tensor(whole: torch.Tensor, rank: int, world_size: int = NUM_RANKS) -> ShardedTensor:
    """As FSDP1 makes it: rows, as torch.chunk cuts them."""
    shards, start = [], 0
    for owner, part in enumerate(whole.chunk(world_size)):
        offsets = [start] + [0] * (whole.dim() - 1)
        shards.append((ShardMetadata(offsets, list(part.shape), f"rank:{owner}/cpu"), part))
        start += part.shape[0]
    properties = TensorProperties(dtype=whole.dtype)
    metadata = ShardedTensorMetadata([shard for shard, _ in shards], whole.shape, properties)
    mine = [Shard(part.clone(), shard) for shard, part in shards[rank : rank + 1]]
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def dtensor(whole: torch.Tensor, mesh: Any, placements: list[Placement]) -> DTensor:
    local = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Cut):
            parts = local.chunk(mesh.size(dim), dim=placement.dim)
            at = mesh.get_local_rank(dim)
            local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def write_sharded_tensors(folder: Path) -> None:
    folder.mkdir()
    for rank in range(NUM_RANKS):
        with as_rank(rank):
            state = {name: sharded_tensor(whole, rank) for name, whole in WHOLE.items()}
            torch.save({**state, "buffer": BUFFER}, folder / f"pytorch_model_fsdp_rank{rank}.bin")


PLACEMENTS = {
    "rows": [Replicate(), Cut(0)],
    "both": [Cut(0), Cut(0)],
    "columns": [Cut(0), Cut(-1)],
    "whole": [Replicate(), Replicate()],
}


def write_dtensors(folder: Path, placements: list[Any]) -> None:
    folder.mkdir()
    for rank in range(NUM_RANKS):
        with as_rank(rank):
            mesh = init_device_mesh("cpu", (2, 2))
            state: dict[str, Any] = {"count": BUFFER}
            for name, whole in WHOLE.items():
                of_tensor = [Cut(min(1, whole.dim() - 1)) if each == Cut(-1) else each for each in placements]
                state[name] = dtensor(whole, mesh, of_tensor)
            torch.save(state, folder / f"model_world_size_4_rank_{rank}.pt")
            moments = {name: {"exp_avg": state[name], "step": torch.tensor(3.0)} for name in WHOLE}
            groups = [{"lr": 0.5, "params": list(WHOLE)}]
            torch.save({"state": moments, "param_groups": groups}, folder / f"optim_world_size_4_rank_{rank}.pt")
            torch.save(
                {"rank": rank, "rng": torch.full((2,), rank)}, folder / f"extra_state_world_size_4_rank_{rank}.pt"
            )


def test_sharded_tensors_are_put_together(tmp_path: Path) -> None:
    write_sharded_tensors(tmp_path / "c")
    checkpoint = bcp.open(tmp_path / "c")
    assert_same(checkpoint.state_dict(), {**WHOLE, "buffer": BUFFER})
    assert checkpoint.info.format == "torch.save of ranks"
    loaded = {name: torch.zeros_like(whole) for name, whole in {**WHOLE, "buffer": BUFFER}.items()}
    bcp.load(tmp_path / "c", {"model": loaded})
    assert_same(loaded, {**WHOLE, "buffer": BUFFER})


@pytest.mark.parametrize("name", PLACEMENTS)
def test_dtensors_are_put_together(tmp_path: Path, name: str) -> None:
    write_dtensors(tmp_path / "c", PLACEMENTS[name])
    checkpoint = bcp.open(tmp_path / "c")
    found = checkpoint.state_dict()
    assert_same({fqn: found[f"model.{fqn}"] for fqn in WHOLE}, WHOLE)
    assert_same({fqn: found[f"optimizer.state.{fqn}.exp_avg"] for fqn in WHOLE}, WHOLE)
    assert torch.equal(found["model.count"], BUFFER)
    assert plain_leaves(checkpoint)["extra_state.rank_3.rank"] == 3
    assert plain_leaves(checkpoint)["optimizer.groups.layers.0.weight.values.lr"] == 0.5
    assert torch.equal(found["extra_state.rank_2.rng"], torch.tensor([2, 2]))


def test_what_a_rank_has_of_its_own_is_kept(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for rank in range(2):
        with as_rank(rank, 2):
            state = {"w": sharded_tensor(WHOLE["layers.1.weight"], rank, 2), "seed": rank, "rng": torch.tensor([rank])}
            inside = argparse.Namespace(noise=torch.tensor([rank]))
            torch.save({**state, "same": [1, 2], "args": inside}, tmp_path / "c" / f"rank_{rank}.pt")
    checkpoint = bcp.open(tmp_path / "c")
    assert (plain_leaves(checkpoint)["seed"], plain_leaves(checkpoint)["rank_1.seed"]) == (0, 1)
    assert (checkpoint["rng"][0], checkpoint["rank_1.rng"][0]) == (0, 1)
    assert (checkpoint["args.noise"][0], checkpoint["rank_1.args.noise"][0]) == (0, 1)
    assert "rank_1.same.0" not in plain_leaves(checkpoint)


def test_the_tensors_of_a_set_are_kept_for_each_rank(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            state = {"w": sharded_tensor(WHOLE["layers.1.weight"], rank, 2), "seen": {torch.tensor([rank])}}
            torch.save(state, folder_of(tmp_path) / f"rank_{rank}.pt", pickle_protocol=4)  # has sets
    checkpoint = bcp.open(tmp_path / "c")
    assert (checkpoint["seen.0"][0], checkpoint["rank_1.seen.0"][0]) == (0, 1)


def test_an_ordered_dict_stays_one_beside_tensors_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for rank in range(2):
        with as_rank(rank, 2):
            state = {"w": sharded_tensor(WHOLE["layers.1.weight"], rank, 2), "ordered": OrderedDict(b=1, a=2)}
            torch.save(state, tmp_path / "c" / f"rank_{rank}.pt")
    found = bcp.load_tree(tmp_path / "c")["ordered"]
    assert (type(found), list(found.items())) == (OrderedDict, [("b", 1), ("a", 2)])


def test_what_a_rank_has_of_its_own_is_kept_of_every_group_of_files(tmp_path: Path) -> None:
    for rank in range(2):
        with as_rank(rank, 2):
            weight = {"w": sharded_tensor(WHOLE["layers.1.weight"], rank, 2)}
            torch.save({**weight, "seed": 10 + rank}, folder_of(tmp_path) / f"model_rank_{rank}.pt")
            torch.save({**weight, "other": 20 + rank}, folder_of(tmp_path) / f"optim_rank_{rank}.pt")
    objects = plain_leaves(bcp.open(tmp_path / "c"))
    assert (objects["model.seed"], objects["rank_1.model.seed"]) == (10, 11)
    assert (objects["optimizer.other"], objects["rank_1.optimizer.other"]) == (20, 21)


def folder_of(path: Path) -> Path:
    (path / "c").mkdir(exist_ok=True)
    return path / "c"


def two_of_one_rank(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_rank00.bin").write_bytes((folder / "pytorch_model_fsdp_rank0.bin").read_bytes())


def lost_rank(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_rank1.bin").unlink()


def lost_last_rank(folder: Path) -> None:
    (folder / "pytorch_model_fsdp_rank3.bin").unlink()


def cut(folder: Path) -> None:
    path = folder / "pytorch_model_fsdp_rank2.bin"
    path.write_bytes(path.read_bytes()[:-30])


def another_save(folder: Path) -> None:
    with as_rank(2):
        state = {name: sharded_tensor(whole, 2) for name, whole in WHOLE.items()}
        state["layers.1.weight"] = sharded_tensor(torch.zeros(9, 4), 2)
        torch.save({**state, "buffer": BUFFER}, folder / "pytorch_model_fsdp_rank2.bin")


def other_names(folder: Path) -> None:
    with as_rank(2):
        state = {name: sharded_tensor(whole, 2) for name, whole in WHOLE.items()}
        torch.save({**state, "more": BUFFER}, folder / "pytorch_model_fsdp_rank2.bin")


def plain_on_the_first_rank(folder: Path) -> None:
    """Taken by the first rank alone, the shards of the others would be left out."""
    with as_rank(0):
        state = {name: sharded_tensor(whole, 0) for name, whole in WHOLE.items()}
        torch.save({**state, "layers.0.bias": None, "buffer": BUFFER}, folder / "pytorch_model_fsdp_rank0.bin")


def no_shards(folder: Path) -> None:
    for path in folder.iterdir():
        torch.save({"w": torch.ones(2)}, path)


def partial(folder: Path) -> None:
    for rank, path in enumerate(sorted(folder.iterdir())):
        with as_rank(rank):
            mesh = init_device_mesh("cpu", (NUM_RANKS,))
            torch.save({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)}, path)


def hostile(folder: Path) -> None:
    torch.save({"hook": Touch(folder.parent / "marker")}, folder / "pytorch_model_fsdp_rank0.bin")


DAMAGE = {
    two_of_one_rank: "conflict",
    lost_rank: "missing_file",
    lost_last_rank: "missing_file",
    cut: "truncated",
    another_save: "bad_manifest",
    other_names: "unsupported_version",
    plain_on_the_first_rank: "bad_manifest",
    no_shards: "unsupported_version",
    partial: "bad_manifest",
    hostile: "pickle_refused",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_sharded_tensors(tmp_path / "c")
    damage(tmp_path / "c")
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(tmp_path / "c")
    assert caught.value.kind == DAMAGE[damage], caught.value.message
    assert str(tmp_path) in caught.value.message
    assert not (tmp_path / "marker").exists()


class Repeated:
    """Pickled, it is a list of lists of lists, each a thousand times the same: no work to write, and much to walk."""

    def __reduce__(self) -> tuple[Any, ...]:
        value: list[Any] = []
        for _ in range(4):
            value = [value] * 1000
        return list, (value,)


def test_what_is_said_a_billion_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    torch.save({"again": Repeated()}, tmp_path / "c" / "rank_0.pt")
    with pytest.raises(bcp.UnsafeCheckpointError) as caught:
        bcp.open(tmp_path / "c")
    assert caught.value.kind == "limits_exceeded"


GOOD = hand_dtensor(view((4,), 4), (4,), (1,), [0])
UNKNOWN = named("torch.distributed.tensor", "Foo")
HOSTILE = {
    "a_mesh_of_no_ranks": ({"w": hand_dtensor(view((4,), 4), (4,), (0,), [0])}, "bad_manifest"),
    "a_huge_shape": ({"w": hand_dtensor(view((4,), 4), (1 << 70,), (1,), [0])}, "bad_manifest"),
    "many_dimensions": ({"w": hand_dtensor(view((4,), 4), (0, *(1,) * 20000), (2048,), None)}, "bad_manifest"),
    "many_axes": ({"w": hand_dtensor(view((4,), 4), (4,), (1,) * 2000, [0] * 2000)}, "bad_manifest"),
    "an_unknown_class": ({"w": GOOD, "x": UNKNOWN}, "pickle_refused"),
    "an_unknown_class_as_a_key": ({"w": GOOD, UNKNOWN: 1}, "pickle_refused"),
    "a_known_class_as_a_key": ({"w": GOOD, named("torch.distributed.tensor", "DTensor"): 1}, "pickle_refused"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_mesh_or_class_that_torch_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    state, kind = HOSTILE[name]
    write_by_hand(tmp_path / "c" / "rank_0.pt", encoded(state), 4)
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(tmp_path / "c")
    assert caught.value.kind == kind, caught.value.message


def test_a_dtensor_that_was_written_by_hand_is_read(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "c" / "rank_0.pt", encoded({"w": GOOD}), 4)
    assert torch.equal(bcp.open(tmp_path / "c")["w"][:], torch.zeros(4))


def test_a_mesh_of_many_ranks_under_many_names_is_refused_at_once(tmp_path: Path) -> None:
    of_many = hand_dtensor(view((1,), 1), (1 << 17,), (1 << 17,), [0])
    write_by_hand(tmp_path / "c" / "rank_0.pt", shared(of_many, [f"n{number}" for number in range(1000)]), 1)
    regions = sharded_tensors._everywhere
    num_asked = 0

    def counted(*args: Any) -> Iterator[Any]:
        nonlocal num_asked
        for region in regions(*args):
            num_asked += 1
            yield region

    with (
        mock.patch.object(sharded_tensors, "_everywhere", counted),
        pytest.raises(bcp.CheckpointNotFoundError, match="has no file with a part of 'n0'"),
    ):
        bcp.open(tmp_path / "c")
    assert num_asked <= 4


def test_a_mesh_of_more_ranks_than_elements_is_read(tmp_path: Path) -> None:
    one = hand_dtensor(view((1,), 1), (1,), (1 << 17,), [0])
    names = [f"n{number}" for number in range(50)]
    write_by_hand(tmp_path / "c" / "rank_0.pt", shared(one, names), 1)
    assert sorted(bcp.open(tmp_path / "c")) == sorted(names)


def write_without_checksums(folder: Path, values: Callable[[int], dict[str, Any]]) -> Path:
    folder.mkdir()
    torch.serialization.set_crc32_options(False)
    try:
        for rank in range(2):
            with as_rank(rank, 2):
                state = {"w": sharded_tensor(WHOLE["layers.1.weight"], rank, 2), **values(rank)}
                torch.save(state, folder / f"rank_{rank}.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return folder


def test_tensors_of_ranks_are_told_apart_without_checksums(tmp_path: Path) -> None:
    same = torch.ones(64)
    folder = write_without_checksums(tmp_path / "c", lambda rank: {"rng": torch.full((64,), rank), "same": same})
    found = bcp.open(folder).state_dict()
    assert (found["rng"][0], found["rank_1.rng"][0]) == (0, 1)
    assert "rank_1.same" not in found


def test_a_large_tensor_that_cannot_be_compared_is_kept_for_each_rank(tmp_path: Path) -> None:
    large = torch.zeros(100)
    folder = write_without_checksums(tmp_path / "c", lambda _: {"large": large})
    with mock.patch.object(duplicates, "_MAX_TENSOR_BYTES", 100):
        assert {"large", "rank_1.large"} < set(bcp.open(folder))


def test_copies_of_a_part_that_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            copy = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Replicate()], run_check=False)
            torch.save({"w": copy}, tmp_path / "c" / f"rank_{rank}.pt")
    with pytest.raises(bcp.CheckpointMismatchError, match="has other elements in its part of 'w'") as caught:
        bcp.open(tmp_path / "c")
    assert caught.value.kind == "conflict"
