"""Tensors that ranks hold as the parts of a regular grid, which is the usual case: shards, replicas of the whole, or
both. They are found by operations on arrays over tensors and ranks, because a loop over thousands takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.planner.write_items import ItemTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bytecheckpoint.planner.shard_owners import TensorItems

    Int64s = NDArray[np.int64]

_ITEMS_AT_ONCE = 1 << 17


class GridShards(NamedTuple):
    """Tensors that the same ranks hold as grids, every part of a tensor by equally many ranks."""

    fqns: Sequence[str]
    items: Int64s
    """Index of each tensor among the write items of each rank."""
    num_parts: Int64s
    num_replicas: Int64s
    """Ranks that hold each part."""
    holders: NDArray[np.int32]
    """The ranks in ascending order."""
    order: NDArray[np.intp]
    """Indices into `holders`: of the ranks that hold the first part, in row-major order, then the second, ...;
    ascending for each part; at the end ranks without elements. Shape (tensors, ranks).
    """
    boxes: Int64s
    """Offsets and lengths of the regions of the ranks, as `order` has them. Shape (tensors, ranks, 2, dimensions)."""

    @property
    def ranks(self) -> NDArray[np.int32]:
        """The ranks in the order of the parts that they hold, for each tensor. Shape (tensors, ranks)."""
        return self.holders[self.order]


def find_grid_shards(tensors: Mapping[str, TensorItems]) -> Iterator[GridShards]:
    """Yields the tensors whose shards form a grid, in batches, of which some may be empty. The other tensors may be
    complete as well: `find_owners` checks those.
    """
    tables: dict[tuple[int, int], list[str]] = {}
    for fqn, tensor in tensors.items():
        if len(tensor.sources) == 1 and 0 not in tensor.shape:
            tables.setdefault((id(tensor.sources[0][0]), len(tensor.shape)), []).append(fqn)
    for fqns in tables.values():
        table, _ = tensors[fqns[0]].sources[0]
        step = max(1, _ITEMS_AT_ONCE // len(table.ranks))
        for first in range(0, len(fqns), step):
            some = fqns[first : first + step]
            items = np.array([tensors[fqn].sources[0][1] for fqn in some], np.int64)
            shapes = np.array([tensors[fqn].shape for fqn in some], np.int64).reshape(len(some), -1)
            yield _find(some, table, items, shapes)


def _find(fqns: Sequence[str], table: ItemTable, items: Int64s, shapes: Int64s) -> GridShards:
    """Returns those of the tensors whose shards form a grid."""
    boxes = table.boxes_of(items)
    is_filled = (boxes[:, :, 1] != 0).all(axis=2)
    num_filled = np.count_nonzero(is_filled, axis=1)
    order = _order(boxes[:, :, 0], is_filled, shapes)
    if order is None:
        order = np.broadcast_to(np.arange(len(table.ranks)), is_filled.shape)
    else:
        boxes = np.take_along_axis(boxes, order[:, :, None, None], axis=1)
    counts = -(-shapes // np.maximum(boxes[:, 0, 1], 1))
    num_parts = np.maximum(counts.prod(axis=1), 1)
    num_replicas = np.maximum(num_filled // num_parts, 1)
    found = np.flatnonzero(
        (num_filled > 0)
        & (counts.prod(axis=1, dtype=np.float64) * num_replicas == num_filled)
        & _are_parts(boxes, num_filled, num_replicas, shapes)
    )
    return GridShards(
        fqns=[fqns[tensor] for tensor in found.tolist()],
        items=items[found],
        num_parts=num_parts[found],
        num_replicas=num_replicas[found],
        holders=table.ranks,
        order=order[found],
        boxes=boxes[found],
    )


def _order(offsets: Int64s, is_filled: NDArray[np.bool_], shapes: Int64s) -> NDArray[np.intp] | None:
    """Returns for each tensor the order of its regions in the flat tensor, empty ones last; None if the regions of
    every tensor come in that order, as they do where rank r holds part r.
    """
    strides = np.ones_like(shapes)
    strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    starts = np.where(is_filled, (offsets * strides[:, None]).sum(axis=2), np.iinfo(np.int64).max)
    if (starts[:, 1:] >= starts[:, :-1]).all():
        return None
    return np.argsort(starts, axis=1, kind="stable")


def _are_parts(boxes: Int64s, num_filled: Int64s, num_replicas: Int64s, shapes: Int64s) -> NDArray[np.bool_]:
    """Returns a flag for each tensor, True if its first `num_filled` boxes are parts of a grid (see region.py), each
    given `num_replicas` times. The caller checks that no part of the grid is missing.
    """
    parts = np.maximum(boxes[:, 0, 1], 1)  # where all are empty nothing must be divided by 0
    counts = -(-shapes // parts)
    numbers = np.arange(boxes.shape[1])
    left = numbers // num_replicas[:, None]
    is_part = np.ones(left.shape, bool)
    for dim in reversed(range(shapes.shape[1])):
        left, index = np.divmod(left, counts[:, None, dim])
        expected = index * parts[:, None, dim]
        is_part &= boxes[:, :, 0, dim] == expected
        is_part &= boxes[:, :, 1, dim] == np.minimum(parts[:, None, dim], shapes[:, None, dim] - expected)
    are_parts: NDArray[np.bool_] = np.logical_and.reduce(is_part | (numbers >= num_filled[:, None]), axis=1)
    return are_parts
