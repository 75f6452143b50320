"""Which indices of a dimension a rank holds, against how torch itself cuts a real tensor, for many lengths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import bytecheckpoint as bcp
from bytecheckpoint.adapters.placements import MeshAxis, held_parts, left_to_right, right_to_left

LENGTHS = [*range(20), 37, 100]
MESHES: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    *(((parts,), (Shard(0),)) for parts in (1, 2, 3, 5)),
    *((mesh, (Shard(0), Shard(0))) for mesh in ((2, 2), (3, 2), (2, 4))),
    *(
        (mesh, (_StridedShard(0, split_factor=mesh[1]), Shard(0)))
        for mesh in ((2, 2), (3, 2), (4, 2), (2, 3), (4, 3), (3, 4))
    ),
    ((2, 3, 2), (_StridedShard(0, split_factor=2), Replicate(), Shard(0))),
    ((3, 2, 2), (_StridedShard(0, split_factor=4), Shard(0), Shard(0))),
    ((2, 3, 2), (Shard(0), _StridedShard(0, split_factor=2), Shard(0))),
]
STANDALONE: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    *(((parts,), (_StridedShard(0, split_factor=factor),)) for parts in (2, 4) for factor in (2, 3, 5)),
    ((2, 3), (_StridedShard(0, split_factor=4), Shard(0))),
    ((2, 3, 2), (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0))),
]
"""Strided as fully_shard makes none: by another factor than later axes have cut, or along two axes."""


def indices(intervals: Sequence[tuple[int, int]]) -> list[int]:
    return [index for start, length in intervals for index in range(start, start + length)]


def held_indices(length: int, local_length: int, axes: Sequence[MeshAxis]) -> list[int]:
    """The indices of a tensor with one dimension that a rank with so long a local tensor holds."""
    parts = held_parts("x", (length,), torch.empty(local_length), axes)
    return indices([(part.region.offsets[0], part.region.lengths[0]) for part in parts])


def cut_left_to_right(length: int, axes: Sequence[tuple[Any, int, int]]) -> list[int]:
    held = torch.arange(length)
    for placement, num_parts, coordinate in axes:
        if not isinstance(placement, Replicate):
            held = placement._split_tensor(held, num_parts, with_padding=False)[0][coordinate]
    return held.tolist()


def nth_chunk(tensor: torch.Tensor, num_parts: int, coordinate: int) -> torch.Tensor:
    chunks = tensor.chunk(num_parts)
    return chunks[coordinate] if coordinate < len(chunks) else tensor[:0]


def cut_right_to_left(length: int, axes: Sequence[tuple[Any, int, int]]) -> list[int]:
    return cut_by(torch.arange(length), axes).tolist()


def cut_by(held: torch.Tensor, axes: Sequence[tuple[Any, int, int]]) -> torch.Tensor:
    """A strided axis cuts last, as fully_shard does with what is sharded already; another one cuts first."""
    if not axes:
        return held
    (placement, num_parts, coordinate), *later = axes
    if isinstance(placement, Replicate):
        return cut_by(held, later)
    if isinstance(placement, _StridedShard):
        return nth_chunk(cut_by(held, later), num_parts, coordinate)
    return cut_by(nth_chunk(held, num_parts, coordinate), later)


def all_axes(mesh: tuple[int, ...], placements: tuple[Any, ...]) -> list[list[MeshAxis]]:
    """The mesh axes as each rank sees them."""
    return [list(map(MeshAxis, placements, mesh, rank)) for rank in product(*map(range, mesh))]


@pytest.mark.parametrize(("mesh", "placements"), [*MESHES, *STANDALONE], ids=str)
def test_left_to_right_is_what_distribute_tensor_does(mesh: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    for length, axes in product(LENGTHS, all_axes(mesh, placements)):
        expected = cut_left_to_right(length, axes)
        assert indices(left_to_right(0, length, axes)) == expected, (length, axes)


@pytest.mark.parametrize(("mesh", "placements"), MESHES, ids=str)
def test_right_to_left_is_what_fully_shard_does_with_cut_tensors(
    mesh: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    for length, axes in product(LENGTHS, all_axes(mesh, placements)):
        assert indices(right_to_left(0, length, axes)) == cut_right_to_left(length, axes), (length, axes)


@pytest.mark.parametrize("cut", [cut_left_to_right, cut_right_to_left])
@pytest.mark.parametrize(("mesh", "placements"), MESHES, ids=str)
def test_what_a_local_tensor_holds_is_told_or_refused_and_never_guessed(
    mesh: tuple[int, ...], placements: tuple[Any, ...], cut: Any
) -> None:
    for length, axes in product(LENGTHS, all_axes(mesh, placements)):
        expected = cut(length, axes)
        is_clear = len(cut_left_to_right(length, axes)) != len(cut_right_to_left(length, axes))
        if is_clear or cut_left_to_right(length, axes) == cut_right_to_left(length, axes):
            assert held_indices(length, len(expected), axes) == expected
            continue
        with pytest.raises(bcp.CheckpointMismatchError, match="cannot be told which of the two it is") as error:
            held_indices(length, len(expected), axes)
        assert error.value.kind == "conflict"


def test_the_layouts_of_nine_rows_over_two_by_four_are_told_apart() -> None:
    """Left to right the last row lies on the wrong rank; both fill the mesh, with other shapes."""
    axes = all_axes((4, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    rows = [[indices(rule(0, 9, of_rank)) for of_rank in axes] for rule in (left_to_right, right_to_left)]
    assert rows[0] == [[0, 1], [5], [2, 3], [6], [4], [7], [8], []]
    assert rows[1] == [[0, 1], [5], [2, 3], [6], [4], [7], [], [8]]


@pytest.mark.parametrize(("mesh", "placements"), STANDALONE, ids=str)
def test_strides_of_another_origin_are_read_from_left_to_right_only(
    mesh: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    for length, axes in product(LENGTHS, all_axes(mesh, placements)):
        expected = cut_left_to_right(length, axes)
        assert held_indices(length, len(expected), axes) == expected


def test_a_local_tensor_that_fits_no_rule_is_refused() -> None:
    for axes in all_axes((4, 2), (_StridedShard(0, split_factor=2), Shard(0))):
        with pytest.raises(bcp.CheckpointMismatchError, match="build the DTensor from shards that follow") as error:
            held_indices(9, 4, axes)
        assert error.value.kind == "conflict"
