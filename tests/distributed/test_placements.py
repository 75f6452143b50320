"""Placements that are none of torch's: veScale's, and those that say themselves which regions a rank holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults.seams import Seen, seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

import bytecheckpoint as bcp
from bytecheckpoint.adapters.placements import MeshAxis, held_parts
from bytecheckpoint.region import Region
from distributed.ragged import Own, RaggedShard, flat_of_ragged
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)


@dataclass(frozen=True)
class Cyclic(Own):
    """Rows in turn, as no placement of torch has them, in the words of this library."""

    def checkpoint_regions(
        self, shape: tuple[int, ...], num_parts: int, index: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        rows = np.arange(index, shape[0], num_parts)
        return [((row, *[0] * (len(shape) - 1)), (1, *shape[1:])) for row in rows]


@dataclass(frozen=True)
class Wrong(Own):
    """Says what it is told to say."""

    regions: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def checkpoint_regions(self, *_: object) -> Any:
        return self.regions


def truth(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


def cut(value: torch.Tensor, placement: Placement, num_parts: int, index: int) -> torch.Tensor:
    """The truth about what a rank holds: flat where the placement makes it so."""
    if isinstance(placement, RaggedShard):
        return flat_of_ragged(value, placement, index)
    if isinstance(placement, Cyclic):
        return value[index::num_parts]
    if isinstance(placement, Shard):
        parts = value.chunk(num_parts, placement.dim)
        return parts[index] if index < len(parts) else value.narrow(placement.dim, 0, 0)
    return value


def placed(value: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    """Built by hand, since torch cannot: its own placements cut first."""
    mesh = init_device_mesh("cpu", mesh_shape)
    coordinate = mesh.get_coordinate()
    local = value
    for is_own in (True, False):
        for placement, num_parts, index in zip(placements, mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard | Replicate) == is_own:
                local = cut(local, placement, num_parts, index)
    spec = DTensorSpec(mesh, placements, TensorMeta(value.shape, value.stride(), value.dtype))
    return DTensor(local.clone(memory_format=torch.contiguous_format), spec, requires_grad=False)


Layout = tuple[tuple[int, ...], tuple[Placement, ...]]

CASES: list[tuple[tuple[int, ...], Layout]] = [
    ((2, 64), ((4,), (RaggedShard((0, 1), (21, 21, 22, 0)),))),
    ((5, 3, 6, 7), ((4,), (RaggedShard((0, 1), (3, 7, 4, 1)),))),
    ((5, 3, 6, 7), ((4,), (RaggedShard((0, 1, 2), (43, 23, 7, 17)),))),
    ((7, 3), ((4,), (RaggedShard((0,), (0, 3, 0, 4)),))),
    ((7, 3), ((4,), (RaggedShard((), (0, 0, 1, 0)),))),
    ((7, 3), ((2, 2), (Replicate(), RaggedShard((0,), (5, 2))))),
    ((8, 6), ((2, 2), (RaggedShard((0,), (1, 3)), Shard(0)))),
    ((8, 6), ((2, 2), (RaggedShard((0,), (1, 3)), Shard(1)))),
    ((9, 4), ((4,), (Cyclic(),))),
    ((2, 4), ((4,), (Cyclic(),))),
    ((9, 4), ((2, 2), (Cyclic(), Shard(1)))),
]
TARGETS: list[Layout] = [((4,), (Shard(0),)), ((2, 2), (Shard(0), Shard(1))), ((4,), (Cyclic(),))]


def there_and_back(rank: int, world_size: int, root: str) -> list[str]:
    """Each case saved, loaded into torch's placements and back into its own, the latter with state of an optimizer that
    the load creates. What came back wrong.
    """
    wrong = []
    for number, (shape, layout) in enumerate(CASES):
        source, path = placed(truth(shape), *layout), f"{root}/{number}"
        bcp.save(path, {"model": {"w": source}}, options=OPTIONS)
        for target in (*TARGETS, layout):
            expected = placed(truth(shape), *target)
            found = placed(torch.full(shape, -1.0), *target)
            bcp.load(path, {"model": {"w": found}})
            if not torch.equal(found.to_local(), expected.to_local()):
                wrong.append(f"{shape} {layout} into {target}")
    return wrong


def test_other_placements_load_into_torchs_and_back(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(there_and_back, str(tmp_path), world_size=4) == [[]] * 4
    for number, (shape, _) in enumerate(CASES):
        assert torch.equal(bcp.open(tmp_path / str(number))["model.w"][...], truth(shape))


def ragged_layer(value: torch.Tensor, units: tuple[int, ...]) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(placed(value, (4,), (RaggedShard((0,), units),)))
    return layer


def with_optimizer(rank: int, world_size: int, path: str) -> list[bool]:
    value = truth((10, 3))
    layer = ragged_layer(value, (1, 2, 3, 4))
    optimizer = torch.optim.AdamW(layer.parameters())
    own = optimizer.state[layer.weight]
    own["step"] = torch.tensor(3.0)
    own["exp_avg"] = placed(value * 2, (4,), (RaggedShard((0,), (1, 2, 3, 4)),))
    own["exp_avg_sq"] = placed(value * 3, (4,), (RaggedShard((0,), (1, 2, 3, 4)),))
    bcp.save(path, {"model": layer, "optimizer": optimizer}, options=OPTIONS)
    again = ragged_layer(torch.zeros(10, 3), (5, 0, 5, 0))
    fresh = torch.optim.AdamW(again.parameters())
    bcp.load(path, {"model": again, "optimizer": fresh})
    state = fresh.state[again.weight]
    expected = flat_of_ragged(value, RaggedShard((0,), (5, 0, 5, 0)), rank)
    return [
        torch.equal(again.weight.to_local(), expected),
        torch.equal(state["exp_avg"].to_local(), expected * 2),
        torch.equal(state["exp_avg_sq"].to_local(), expected * 3),
        float(state["step"]) == 3.0,
    ]


def test_a_fresh_optimizer_gets_state_that_lies_like_its_parameter(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(with_optimizer, str(tmp_path), world_size=4) == [[True] * 4] * 4


BOXES = {
    ((2, 64), (0, 1), (21, 21, 22, 0)): [
        [((0, 0), (1, 42))],
        [((0, 42), (1, 22)), ((1, 0), (1, 20))],
        [((1, 20), (1, 44))],
        [((0, 0), (0, 0))],
    ],
    ((5, 3, 6, 7), (0, 1), (3, 7, 4, 1)): [
        [((0, 0, 0, 0), (1, 3, 6, 7))],
        [((1, 0, 0, 0), (2, 3, 6, 7)), ((3, 0, 0, 0), (1, 1, 6, 7))],
        [((3, 1, 0, 0), (1, 2, 6, 7)), ((4, 0, 0, 0), (1, 2, 6, 7))],
        [((4, 2, 0, 0), (1, 1, 6, 7))],
    ],
    ((5, 3, 6, 7), (0, 1, 2), (43, 23, 7, 17)): [
        [((0, 0, 0, 0), (2, 3, 6, 7)), ((2, 0, 0, 0), (1, 1, 6, 7)), ((2, 1, 0, 0), (1, 1, 1, 7))],
        [((2, 1, 1, 0), (1, 1, 5, 7)), ((2, 2, 0, 0), (1, 1, 6, 7)), ((3, 0, 0, 0), (1, 2, 6, 7))],
        [((3, 2, 0, 0), (1, 1, 6, 7)), ((4, 0, 0, 0), (1, 1, 1, 7))],
        [((4, 0, 1, 0), (1, 1, 5, 7)), ((4, 1, 0, 0), (1, 2, 6, 7))],
    ],
}
"""What veScale itself makes of such tensors, by shape, dims and units: the boxes of each rank."""


@pytest.mark.parametrize(("shape", "dims", "units"), BOXES)
def test_ragged_shards_are_the_boxes_that_vescale_saves(
    shape: tuple[int, ...], dims: tuple[int, ...], units: tuple[int, ...]
) -> None:
    placement = RaggedShard(dims, units)
    for rank, boxes in enumerate(BOXES[shape, dims, units]):
        local = flat_of_ragged(truth(shape), placement, rank)
        parts = held_parts("w", shape, local, [MeshAxis(placement, len(units), rank)])
        assert [tuple(map(tuple, part.region)) for part in parts] == boxes
        for part in parts:
            view = truth(shape)
            for dim, (start, length) in enumerate(zip(*part.region, strict=True)):
                view = view.narrow(dim, start, length)
            assert torch.equal(part.of(local), view)


def random_ragged(chooser: random.Random) -> tuple[tuple[int, ...], RaggedShard]:
    shape = tuple(chooser.randrange(1, 6) for _ in range(chooser.randrange(1, 4)))
    num_dims = chooser.randrange(0, len(shape) + 1)
    num_units = chooser.choice([number for number in range(1, prod(shape) + 1) if prod(shape) % number == 0])
    ends = sorted(chooser.randrange(num_units + 1) for _ in range(chooser.randrange(0, 4)))
    units = tuple(end - start for start, end in zip([0, *ends], [*ends, num_units], strict=True))
    return shape, RaggedShard(tuple(range(num_dims)), units)


def test_random_ragged_shards_cover_every_element_once() -> None:
    chooser = random.Random(3)
    for _ in range(300):
        shape, placement = random_ragged(chooser)
        rebuilt = torch.full(shape, -1.0)
        num_parts = len(placement.local_units)
        for rank in range(num_parts):
            local = flat_of_ragged(truth(shape), placement, rank)
            for part in held_parts("w", shape, local, [MeshAxis(placement, num_parts, rank)]):
                within = tuple(slice(at, at + length) for at, length in zip(*part.region, strict=True))
                rebuilt[within] = part.of(local)
        assert torch.equal(rebuilt, truth(shape)), (shape, placement)


def parts_of(placement: Placement, local: torch.Tensor, *beside: Placement) -> Callable[[], object]:
    axes = [MeshAxis(each, 2, 0) for each in (placement, *beside)]
    return lambda: held_parts("w", (4, 3), local, axes)


WRONG = {
    "units for other ranks": (parts_of(RaggedShard((0,), (1, 1, 1)), torch.zeros(6)), "it has 3 local_units for 2"),
    "other dims": (parts_of(RaggedShard((1,), (1, 1)), torch.zeros(6)), "its dims must be the first ones"),
    "units that do not divide": (parts_of(RaggedShard((0,), (3, 2)), torch.zeros(6)), "cannot be divided into 5"),
    "a local tensor too small": (parts_of(RaggedShard((0,), (1, 1)), torch.zeros(5)), "but the local tensor has 5"),
    "gaps": (parts_of(RaggedShard((0,), (1, 1)), torch.zeros(6, 2)[:, 0]), "the local tensor has gaps"),
    "no integers": (parts_of(Wrong((((0.5, 0), (1, 2)),)), torch.zeros(2)), "cannot be interpreted as an integer"),
    "outside": (parts_of(Wrong((((0, 2), (1, 2)),)), torch.zeros(2)), "which lies outside"),
    "other dimensions": (parts_of(Wrong((((0,), (1,)),)), torch.zeros(1)), "which lies outside"),
    "two of them": (parts_of(RaggedShard((0,), (1, 1)), torch.zeros(3), Cyclic()), "beside it only Shard and"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_placement_that_does_not_fit_is_an_error_that_says_why(case: str) -> None:
    build, why = WRONG[case]
    with pytest.raises(bcp.CheckpointMismatchError, match=f"^w: the placement .* cannot be read: .*{why}") as caught:
        build()
    assert caught.value.kind == "conflict"


def save_overlapping(rank: int, world_size: int, path: str) -> Seen | None:
    placement = Wrong((((0, 0), (3, 3)),))
    mesh = init_device_mesh("cpu", (2,))
    spec = DTensorSpec(mesh, (placement,), TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32))
    tensor = DTensor(torch.zeros(9) + rank, spec, requires_grad=False)
    return seen(lambda: bcp.save(path, {"w": tensor}, options=OPTIONS))


def test_regions_that_leave_a_hole_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(save_overlapping, str(tmp_path), world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].kind, "w" in errors[0].message) == ("coverage", True)


def test_torchs_own_placements_are_not_asked_for_regions() -> None:
    parts = held_parts("w", (4, 3), torch.zeros(2, 3), [MeshAxis(Shard(0), 2, 1)])
    assert [part.region for part in parts] == [Region((2, 0), (2, 3))]
    assert parts[0].of(torch.ones(2, 3)).shape == (2, 3)


class Bare(Own):
    """Says what it is to say, and has neither equality nor a hash."""

    def __init__(self) -> None:
        super().__init__()

    def checkpoint_regions(self, shape: tuple[int, ...], num_parts: int, index: int) -> Any:
        return [((row, 0), (1, shape[1])) for row in range(index, shape[0], num_parts)]


def save_bare(rank: int, world_size: int, path: str) -> Seen | None:
    spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Bare(),), TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32))
    return seen(lambda: bcp.save(path, {"w": DTensor(torch.zeros(2, 3), spec, requires_grad=False)}, options=OPTIONS))


def test_a_placement_that_cannot_be_compared_is_refused_by_name(workers: WorkerPool, tmp_path: Path) -> None:
    for error in workers.run(save_bare, str(tmp_path), world_size=2):
        assert error.kind == "unsupported_value"
        assert "w is a DTensor with placements (Bare) of which one has no equality and hash" in error.message


@pytest.mark.parametrize("other", [Shard(1), Replicate()])
def test_placements_are_told_apart_without_comparing_them(other: Placement) -> None:
    local = torch.zeros(2, 3 if isinstance(other, Shard) else 6)
    parts = held_parts("w", (4, 6), local, [MeshAxis(Bare(), 2, 1), MeshAxis(other, 2, 0)])
    assert [part.region.offsets for part in parts] == [(1, 0), (3, 0)]


def save_cyclic_load_torch(rank: int, world_size: int, path: str) -> bool:
    bcp.save(path, {"w": placed(truth((5, 2)), (2,), (Cyclic(),))}, options=OPTIONS)
    target = distribute_tensor(torch.zeros(5, 2), init_device_mesh("cpu", (2,)), [Shard(1)], src_data_rank=None)
    bcp.load(path, {"w": target})
    expected = distribute_tensor(truth((5, 2)), init_device_mesh("cpu", (2,)), [Shard(1)], src_data_rank=None)
    return torch.equal(target.to_local(), expected.to_local())


def test_a_placement_of_ones_own_needs_only_to_say_its_regions(workers: WorkerPool, tmp_path: Path) -> None:
    assert all(workers.run(save_cyclic_load_torch, str(tmp_path), world_size=2))
