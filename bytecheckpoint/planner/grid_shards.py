"""Tensors that ranks hold as the parts of a regular grid, as they mostly do: shards, replicas of the whole, or both.
They are found in operations on arrays over tensors and ranks: where there are thousands, a look at each takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.planner.write_items import AlikeRanks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bytecheckpoint.planner.shard_owners import Offered

    Int64s = NDArray[np.int64]

_OFFERS_AT_ONCE = 1 << 17


class Splits(NamedTuple):
    """Tensors that the same ranks hold in this way, every part of a tensor by as many ranks as its others."""

    fqns: Sequence[str]
    offers: Int64s
    """For each of the ranks, which of its offers the tensor is."""
    num_parts: Int64s
    num_replicas: Int64s
    """How many ranks hold each part."""
    holders: NDArray[np.int32]
    """All these ranks, rising."""
    order: NDArray[np.intp]
    """Which of them hold the first part, in row-major order, which the second, ...; each rising. Those without elements
    stand at the end. Here and below: (tensors, ranks)."""
    boxes: Int64s
    """Offsets and lengths of what they hold, in this order: (tensors, ranks, 2, dimensions)."""

    @property
    def ranks(self) -> NDArray[np.int32]:
        """Those that hold the parts, in the order of these."""
        return self.holders[self.order]


def find_splits(tensors: Mapping[str, Offered]) -> Iterator[Splits]:
    """All tensors that are held like this. What is not found may be as good, and has to be looked at by itself."""
    alike: dict[tuple[int, int], list[str]] = {}
    for fqn, offered in tensors.items():
        if len(offered.sources) == 1 and 0 not in offered.shape:
            alike.setdefault((id(offered.sources[0][0]), len(offered.shape)), []).append(fqn)
    for fqns in alike.values():
        of_ranks, _ = tensors[fqns[0]].sources[0]
        step = max(1, _OFFERS_AT_ONCE // len(of_ranks.ranks))
        for first in range(0, len(fqns), step):
            some = fqns[first : first + step]
            offers = np.array([tensors[fqn].sources[0][1] for fqn in some], np.int64)
            shapes = np.array([tensors[fqn].shape for fqn in some], np.int64).reshape(len(some), -1)
            yield _find(some, of_ranks, offers, shapes)


def _find(fqns: Sequence[str], of_ranks: AlikeRanks, offers: Int64s, shapes: Int64s) -> Splits:
    boxes = of_ranks.boxes_of(offers)
    is_filled = (boxes[:, :, 1] != 0).all(axis=2)
    order = _order(boxes[:, :, 0], is_filled, shapes)
    num_filled = np.count_nonzero(is_filled, axis=1)
    boxes = np.take_along_axis(boxes, order[:, :, None, None], axis=1)
    counts = -(-shapes // np.maximum(boxes[:, 0, 1], 1))
    num_parts = np.maximum(counts.prod(axis=1), 1)
    num_replicas = np.maximum(num_filled // num_parts, 1)
    found = np.flatnonzero(
        (num_filled > 0)
        & (counts.prod(axis=1, dtype=np.float64) * num_replicas == num_filled)
        & _are_parts(boxes, num_filled, num_replicas, shapes)
    )
    return Splits(
        fqns=[fqns[tensor] for tensor in found.tolist()],
        offers=offers[found],
        num_parts=num_parts[found],
        num_replicas=num_replicas[found],
        holders=of_ranks.ranks,
        order=order[found],
        boxes=boxes[found],
    )


def _order(offsets: Int64s, is_filled: NDArray[np.bool_], shapes: Int64s) -> NDArray[np.intp]:
    """The order in which, of each tensor, regions begin in the flat tensor; those that are empty come last."""
    strides = np.ones_like(shapes)
    strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    starts = np.where(is_filled, (offsets * strides[:, None]).sum(axis=2), np.iinfo(np.int64).max)
    return np.argsort(starts, axis=1, kind="stable")


def _are_parts(boxes: Int64s, num_filled: Int64s, num_replicas: Int64s, shapes: Int64s) -> NDArray[np.bool_]:
    """Whether the first `num_filled` boxes of each tensor are parts of a grid (see region.py), each given
    `num_replicas` times. Whether that are all parts of it is for the caller to see.
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
