"""Shardings beyond the matrix of training layouts: every placement that a DTensor can have, on meshes of any shape,
loaded into every other one and compared with what torch itself makes of the true tensor.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seen, seen
from torch.distributed._shard.sharded_tensor import Shard as LocalPart
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.metadata import ShardMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)


class Placed(NamedTuple):
    """How a tensor lies: a mesh over some ranks, and a placement for each of its axes."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[str, ...]
    """`R`, `S<dim>`, or `SS<dim>/<split factor>`."""


def placement_of(text: str) -> Placement:
    if text == "R":
        return Replicate()
    if text.startswith("SS"):
        dim, factor = map(int, text[2:].split("/"))
        return _StridedShard(dim, split_factor=factor)
    return Shard(int(text[1:]))


def truth(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = 1
    for length in shape:
        count *= length
    return torch.arange(count, dtype=torch.int32).reshape(shape).to(dtype)


class Meshes:
    """Every process makes every mesh, in the same order: that is a collective."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], tuple[int, ...]], DeviceMesh] = {}

    def of(self, placed: Placed) -> DeviceMesh:
        key = placed.mesh, placed.ranks
        if key not in self._made:
            self._made[key] = DeviceMesh("cpu", torch.tensor(placed.ranks).reshape(placed.mesh))
        return self._made[key]

    def place(self, tensor: torch.Tensor, placed: Placed) -> DTensor:
        placements = [placement_of(text) for text in placed.placements]
        return distribute_tensor(tensor, self.of(placed), placements, src_data_rank=None)


SHAPES = [(7,), (8, 6), (5, 3), (1, 9), (12, 4, 5), (3, 0, 2), (2, 2, 2, 3), (16, 16)]


MESHES = [
    ((4,), (0, 1, 2, 3)),
    ((4,), (2, 0, 3, 1)),
    ((2, 2), (0, 1, 2, 3)),
    ((2, 2), (3, 1, 2, 0)),
    ((3,), (3, 0, 2)),
    ((2,), (1, 2)),
    ((2, 1, 2), (0, 1, 2, 3)),
    ((1, 3), (1, 2, 3)),
]
"""Shapes, and the ranks on them; a rank that is on none holds nothing."""


def random_placed(chooser: random.Random, num_dims: int) -> Placed:
    mesh, ranks = chooser.choice(MESHES)
    kinds = ["R"] + [f"S{dim}" for dim in range(num_dims)] * 2
    placements = [chooser.choice(kinds) for _ in mesh]
    return Placed(mesh, ranks, tuple(placements))


def strided_placed(chooser: random.Random, num_dims: int) -> Placed:
    """A dimension sharded over one mesh axis with strides, as FSDP over tensor parallelism has it."""
    dim = chooser.randrange(num_dims)
    if chooser.random() < 0.4:
        return Placed((4,), (0, 1, 2, 3), (f"SS{dim}/{chooser.choice([2, 3])}",))
    return Placed((2, 2), (0, 1, 2, 3), (f"SS{dim}/2", chooser.choice([f"S{dim}", "R"])))


def make_cases(seed: int, count: int) -> list[tuple[tuple[int, ...], Placed, Placed]]:
    chooser = random.Random(seed)
    cases = []
    for number in range(count):
        shape = chooser.choice(SHAPES)
        makers = [random_placed, strided_placed if number % 3 == 0 else random_placed]
        chooser.shuffle(makers)
        cases.append((shape, *(make(chooser, len(shape)) for make in makers)))
    return cases


def reshard(
    rank: int, world_size: int, path: str, cases: list[tuple[tuple[int, ...], Placed, Placed]]
) -> list[tuple[int, str]]:
    """All cases in one checkpoint. Which ones came back wrong on this rank."""
    meshes = Meshes()
    sources = {f"t{number}": meshes.place(truth(shape), source) for number, (shape, source, _) in enumerate(cases)}
    expected = {f"t{number}": meshes.place(truth(shape), target) for number, (shape, _, target) in enumerate(cases)}
    targets = {name: torch.full_like(tensor, -1.0) for name, tensor in expected.items()}
    bcp.save(path, {"model": sources}, options=OPTIONS)
    bcp.load(path, {"model": targets}, options=bcp.LoadOptions(timeout_s=60))
    wrong = []
    for number, name in enumerate(sources):
        found, right = targets[name].to_local(), expected[name].to_local()
        if found.shape != right.shape or not torch.equal(found, right):
            wrong.append((number, f"{found.flatten().tolist()[:20]} is not {right.flatten().tolist()[:20]}"))
    return wrong


@pytest.mark.parametrize("seed", [1, 2])
def test_any_placement_loads_into_any_other(workers: WorkerPool, tmp_path: Path, seed: int) -> None:
    cases = make_cases(seed, 25)
    wrong = workers.run(reshard, str(tmp_path), cases, world_size=4)
    assert not any(wrong), [(cases[number], text) for of_rank in wrong for number, text in of_rank]
    checkpoint = bcp.open(tmp_path)
    for number, (shape, _, _) in enumerate(cases):
        assert torch.equal(checkpoint[f"model.t{number}"][...], truth(shape)), cases[number]


EVERY_DIM = [
    ((5, 7, 3), Placed(mesh, tuple(range(4)), placements), Placed((3,), (1, 2, 3), ("S1",)))
    for mesh, axes in (((4,), 1), ((2, 2), 2))
    for placements in itertools.product(["R", "S0", "S1", "S2"], repeat=axes)
]


def test_every_dim_of_every_mesh_axis(workers: WorkerPool, tmp_path: Path) -> None:
    wrong = workers.run(reshard, str(tmp_path), EVERY_DIM, world_size=4)
    assert not any(wrong), [(EVERY_DIM[number], text) for of_rank in wrong for number, text in of_rank]


CUBE = [
    ((6, 5, 4), Placed((2, 2, 2), tuple(range(8)), ("S0", "S0", "S1")), Placed((2, 4), tuple(range(8)), ("S2", "S1"))),
    ((9, 5), Placed((2, 2, 2), tuple(range(8)), ("R", "S0", "R")), Placed((8,), tuple(range(8)), ("S0",))),
    ((3, 5), Placed((8,), tuple(range(8)), ("S0",)), Placed((2, 2, 2), (7, 6, 5, 4, 3, 2, 1, 0), ("S1", "S1", "S1"))),
    ((13, 3), Placed((2, 2, 2), tuple(range(8)), ("SS0/4", "SS0/2", "S0")), Placed((2,), (3, 6), ("S0",))),
]


def test_a_mesh_with_three_axes(workers: WorkerPool, tmp_path: Path) -> None:
    wrong = workers.run(reshard, str(tmp_path), CUBE, world_size=8)
    assert not any(wrong), [(CUBE[number], text) for of_rank in wrong for number, text in of_rank]


def uneven_linear(rows: int) -> torch.nn.Module:
    """Tensor parallel over two ranks within fully_shard over four, with rows that divide by neither."""
    model = torch.nn.Sequential(torch.nn.Linear(3, rows))
    torch.nn.init.zeros_(model[0].bias)
    model[0].weight.data.copy_(truth((rows, 3)))
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    return model


def save_uneven(rank: int, world_size: int, root: str, all_rows: list[int]) -> list[bool]:
    """Whether what is loaded into such a layout again is, on this rank, what was there."""
    is_same = []
    for rows in all_rows:
        model = uneven_linear(rows)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"] = parameter.detach() * 2
        bcp.save(f"{root}/{rows}", {"model": model, "optimizer": optimizer}, options=OPTIONS)
        again = uneven_linear(rows)
        torch.nn.init.zeros_(again[0].weight)
        restored = torch.optim.AdamW(again.parameters())
        bcp.load(f"{root}/{rows}", {"model": again, "optimizer": restored})
        weight, found = model[0].weight, again[0].weight
        is_same.append(torch.equal(weight.to_local(), found.to_local()))
        is_same.append(torch.equal(weight.to_local() * 2, restored.state[found]["exp_avg"].to_local()))
    return is_same


def test_fully_shard_over_tensor_parallel_with_uneven_rows(workers: WorkerPool, tmp_path: Path) -> None:
    all_rows = [9, 13, 57]
    is_same = workers.run(save_uneven, str(tmp_path), all_rows, world_size=8)
    assert is_same == [[True] * 2 * len(all_rows)] * 8
    for rows in all_rows:
        checkpoint = bcp.open(tmp_path / str(rows))
        assert torch.equal(checkpoint["model.0.weight"][...], truth((rows, 3)))
        assert torch.equal(checkpoint["optimizer.state.0.weight.exp_avg"][...], truth((rows, 3)) * 2)


def save_partial(rank: int, world_size: int, path: str) -> Seen | None:
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    return seen(lambda: bcp.save(path, {"model": {"grad": partial, "fine": torch.ones(2)}}, options=OPTIONS))


def test_partial_is_refused_by_name(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(save_partial, str(tmp_path), world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].cls, errors[0].kind) == ("CheckpointSaveError", "unsupported_value")
    assert "model.grad" in errors[0].message
    assert "a Partial placement, P(sum)" in errors[0].message
    assert bcp.steps(tmp_path) == []


def sharded_tensor(rank: int, rows: list[int], columns: int, value: torch.Tensor) -> ShardedTensor:
    first = sum(rows[:rank])
    metadata = ShardMetadata([first, 0], [rows[rank], columns], placement=f"rank:{rank}/cpu")
    part = LocalPart(value[first : first + rows[rank]].clone(), metadata)
    return init_from_local_shards([part], [sum(rows), columns])


def use_sharded_tensors(rank: int, world_size: int, path: str) -> list[bool]:
    value = truth((10, 3))
    bcp.save(path, {"table": sharded_tensor(rank, [7, 3], 3, value)}, options=OPTIONS)
    again = sharded_tensor(rank, [1, 9], 3, torch.zeros(10, 3))
    bcp.load(path, {"table": again})
    placed = distribute_tensor(torch.zeros(10, 3), init_device_mesh("cpu", (2,)), [Shard(1)], src_data_rank=None)
    bcp.load(path, {"table": placed})
    whole = torch.zeros(10, 3)
    bcp.load(path, {"table": whole})
    first, last = (0, 1) if rank == 0 else (1, 10)
    expected = distribute_tensor(value, init_device_mesh("cpu", (2,)), [Shard(1)], src_data_rank=None)
    return [
        torch.equal(again.local_shards()[0].tensor, value[first:last]),
        torch.equal(placed.to_local(), expected.to_local()),
        torch.equal(whole, value),
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sharded_tensors_save_and_load(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(use_sharded_tensors, str(tmp_path), world_size=2) == [[True] * 3] * 2


def save_overlapping(rank: int, world_size: int, path: str) -> Seen | None:
    """Two ranks that each think they hold another, overlapping part."""
    mesh = init_device_mesh("cpu", (2,))
    placed = distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)
    state: dict[str, Any] = {"x": placed if rank == 0 else torch.zeros(8)}
    return seen(lambda: bcp.save(path, state, options=OPTIONS))


def save_with_a_hole(rank: int, world_size: int, path: str) -> Seen | None:
    mesh = init_device_mesh("cpu", (2,))
    placed = distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)
    state: dict[str, Any] = {"x": placed} if rank == 0 else {}
    return seen(lambda: bcp.save(path, state, options=OPTIONS))


def test_shards_that_overlap_or_leave_a_hole_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    for function, kind in ((save_overlapping, "conflict"), (save_with_a_hole, "coverage")):
        errors = workers.run(function, str(tmp_path), world_size=2)
        assert errors[0] == errors[1]
        assert (errors[0].cls, errors[0].kind) == ("CheckpointMismatchError", kind)
        assert "x[8]" in errors[0].message
        assert "rank 0 on" not in errors[0].message
    assert bcp.steps(tmp_path) == []


def save_balanced(rank: int, world_size: int, root: str) -> list[int]:
    """How many bytes this rank's data files have, for plain replicas and for replicas of shards."""
    large = {"a": torch.ones(3000, 1000), "b": torch.ones(2000, 500), "c": torch.ones(700, 31)}
    bcp.save(f"{root}/ddp", large, options=OPTIONS)
    mesh = init_device_mesh("cpu", (2, 2))
    both = [Replicate(), Shard(0)]
    hybrid = {name: distribute_tensor(tensor, mesh, both, src_data_rank=None) for name, tensor in large.items()}
    bcp.save(f"{root}/hsdp", hybrid, options=OPTIONS)
    dist.barrier()
    return [
        sum(file.stat().st_size for file in Path(root, name, "data").glob(f"*-{rank:05d}-*"))
        for name in ("ddp", "hsdp")
    ]


def test_replicas_are_written_in_equal_parts(workers: WorkerPool, tmp_path: Path) -> None:
    by_rank = workers.run(save_balanced, str(tmp_path), world_size=4)
    for sizes in zip(*by_rank, strict=True):
        mean = sum(sizes) / len(sizes)
        assert all(abs(size - mean) < 0.02 * mean for size in sizes), sizes
