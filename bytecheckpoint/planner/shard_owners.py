"""Owners of the regions of each tensor: write items of all ranks collected, replicas found, and the tiling of the shape
checked. Layouts that thousands of ranks have, regular grids and runs of the flat tensor, take a few operations on
arrays; others are looked at region by region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.planner.write_items import ItemTable
from bytecheckpoint.region import Region, TilingFault, describe, find_tiling_fault, grid_counts, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

MIN_ARRAY_ITEMS = 24
"""Items of a tensor from which operations on arrays are faster than a loop."""

_NUM_SHOWN = 10


class Holder(NamedTuple):
    """A rank that holds a region."""

    rank: int
    item: int
    """Index into that rank's write items."""
    digest: int | None


class TensorItems(NamedTuple):
    """All write items of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    first_rank: int
    sources: list[tuple[ItemTable, int]]
    """Ranks that hold parts of it, and the index among their items."""


class RegionOwners(NamedTuple):
    """The distinct regions of one tensor, as arrays, and the ranks that hold them."""

    part: tuple[int, ...] | None
    """The lengths of a part if they are a regular grid."""
    boxes: Int64s
    """Offsets and lengths of each region, by rising offsets. Shape (regions, 2, dimensions)."""
    bounds: Int64s
    """First index of each region's holders in the arrays below, and the end of the last."""
    ranks: NDArray[np.int32]
    """Rising within a region."""
    items: NDArray[np.int32]
    digests: NDArray[np.uint64] | None


Holders = dict[Region, list[Holder]]
"""The ranks that hold each region of one tensor."""


def collect_items(
    tables: Sequence[ItemTable], aliases: Mapping[str, str], global_ranks: Sequence[int]
) -> dict[str, TensorItems]:
    """Returns the write items of each tensor that is not an alias. Errors name ranks by `global_ranks`, which has one
    for each rank, not for each table.

    Raises CheckpointMismatchError (conflict) if ranks disagree about dtype or shape.
    """
    tensors: dict[str, TensorItems] = {}
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for table in tables:
        for item, (fqn, dtype, shape) in enumerate(zip(table.fqns, table.dtypes, table.shapes, strict=True)):
            if fqn in aliases:
                continue
            rank = int(table.ranks[0])
            tensor = tensors.get(fqn)
            if tensor is None:
                tensor = tensors[fqn] = TensorItems(dtype, shape, rank, [])
            elif (tensor.dtype, tensor.shape) != (dtype, shape):
                here = f"{dtype}{list(shape)} on rank {global_ranks[rank]}"
                text = f"{fqn}: {tensor.dtype}{list(tensor.shape)} on rank {global_ranks[tensor.first_rank]}, {here}"
                conflicts[fqn] = text, (global_ranks[tensor.first_rank], global_ranks[rank])
            tensor.sources.append((table, item))
    if conflicts:
        raise disagreement(conflicts)
    return tensors


def disagreement(conflicts: Mapping[str, tuple[str, tuple[int, ...]]]) -> CheckpointMismatchError:
    """Returns the error for these FQNs. `conflicts` has for each its line of text and the global ranks concerned."""
    return CheckpointMismatchError(
        f"ranks disagree about {len(conflicts)} tensors; nothing was written. Give each its own FQN, or the same "
        "global shape and dtype on every rank, tied to the same, and save again:\n"
        + first_lines([text for text, _ in conflicts.values()]),
        kind="conflict",
        ranks=tuple(sorted({rank for _, ranks in conflicts.values() for rank in ranks})),
    )


def first_lines(lines: Sequence[str]) -> str:
    """Returns as text the first ten of these lines, indented, and how many follow."""
    return "  " + and_more(lines, _NUM_SHOWN, "\n  ")


def find_owners(
    tensors: Mapping[str, TensorItems], global_ranks: Sequence[int]
) -> Iterator[tuple[str, RegionOwners | Holders]]:
    """Yields the owners of the regions of each tensor.

    Raises CheckpointMismatchError after the last: `conflict` if one rank holds a region twice or regions overlap or
    reach out of the shape, `coverage` if some part of a tensor is on no rank. One error is about all tensors with that
    fault.
    """
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    faults: list[tuple[str, Sequence[int], TilingFault]] = []
    for fqn, tensor in tensors.items():
        owners = _owners_by_arrays(tensor)
        if owners is not None:
            yield fqn, owners
            continue
        holders = _holders(fqn, tensor, global_ranks, conflicts)
        fault = None if list(holders) == [whole(tensor.shape)] else find_tiling_fault(tensor.shape, list(holders))
        if fault is not None:
            faults.append((fqn, tensor.shape, fault))
        yield fqn, holders
    if conflicts:
        raise disagreement(conflicts)
    _refuse_faults(faults)


def _owners_by_arrays(tensor: TensorItems) -> RegionOwners | None:
    """Returns the owners; None if the items are few, or arrays do not prove that they tile the shape."""
    if sum(len(table.ranks) for table, _ in tensor.sources) < MIN_ARRAY_ITEMS or not prod(tensor.shape):
        return None
    ranks = _joined([table.ranks for table, _ in tensor.sources])
    items = _joined([np.full(len(table.ranks), item, np.int32) for table, item in tensor.sources])
    boxes = _joined([table.boxes(item) for table, item in tensor.sources])
    digests = _digests(tensor)
    starts = flat_starts(tensor.shape, boxes[:, 0])
    is_filled = boxes[:, 1].min(axis=1, initial=1) > 0
    if not is_filled.all() or (np.diff(starts) <= 0).any() or len(tensor.sources) > 1:
        order = np.lexsort((items, ranks, starts))
        order = order[is_filled[order]]
        ranks, items, boxes, starts = ranks[order], items[order], boxes[order], starts[order]
        digests = digests[order] if digests is not None else None
    if not len(ranks):
        return None
    is_first: NDArray[np.bool_] = np.append(True, starts[1:] != starts[:-1])
    bounds = np.append(np.flatnonzero(is_first), len(ranks))
    distinct = boxes[is_first]
    is_same = np.array_equal(boxes, np.repeat(distinct, np.diff(bounds), axis=0))
    is_twice = (ranks[1:] == ranks[:-1]) & ~is_first[1:]
    part = find_grid(tensor.shape, distinct[:, 0], distinct[:, 1])
    if not is_same or is_twice.any() or not (part or are_runs(tensor.shape, starts[is_first], distinct[:, 1])):
        return None
    return RegionOwners(part, distinct, bounds, ranks, items, digests)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _digests(tensor: TensorItems) -> NDArray[np.uint64] | None:
    """Returns the digests of all items; None if an item has none."""
    columns = [table.digest_columns.get(item) for table, item in tensor.sources]
    known = [column for column in columns if column is not None]
    if len(known) < len(columns):
        return None
    return _joined([table.digests[:, column] for (table, _), column in zip(tensor.sources, known, strict=True)])


def _holders(
    fqn: str, tensor: TensorItems, global_ranks: Sequence[int], conflicts: dict[str, tuple[str, tuple[int, ...]]]
) -> Holders:
    holders: Holders = {}
    for region, holder in _items_by_rank(tensor):
        holders_of_region = holders.setdefault(region, [])
        if holders_of_region and holders_of_region[-1].rank == holder.rank and region.numel:
            name = global_ranks[holder.rank]
            conflicts[fqn] = f"{fqn}: rank {name} has two tensors of this name", (name,)
        holders_of_region.append(holder)
    return holders


def _items_by_rank(tensor: TensorItems) -> list[tuple[Region, Holder]]:
    """Returns the region of every item, with its holder, in ascending order of rank."""
    found = []
    for table, item in tensor.sources:
        column = table.digest_columns.get(item)
        digests = table.digests[:, column].tolist() if column is not None else [None] * len(table.ranks)
        for rank, region, digest in zip(table.ranks.tolist(), table.regions(item), digests, strict=True):
            found.append((region, Holder(rank, item, digest)))
    return found if len(tensor.sources) == 1 else sorted(found, key=lambda each: each[1][:2])


def _refuse_faults(faults: Sequence[tuple[str, Sequence[int], TilingFault]]) -> None:
    overlaps = [
        f"{fqn}{list(shape)}: {_describe_overlap(fault.overlap, shape)}"
        for fqn, shape, fault in faults
        if fault.overlap
    ]
    holes = [f"{fqn}{list(shape)}: no rank holds {describe(fault.hole)}" for fqn, shape, fault in faults if fault.hole]
    if overlaps:
        raise CheckpointMismatchError(
            f"the shards of {len(overlaps)} tensors overlap without being replicas, or reach out of the tensor; "
            "nothing was written. Every element must lie in one region, or in the same region on all ranks that hold "
            "it, and options.codec must be the same on all ranks:\n" + first_lines(overlaps),
            kind="conflict",
        )
    if holes:
        raise CheckpointMismatchError(
            f"{len(holes)} tensors would not be whole; nothing was written. Every rank that holds a part must pass it "
            "to save:\n" + first_lines(holes),
            kind="coverage",
        )


def _describe_overlap(overlap: Region, shape: Sequence[int]) -> str:
    is_inside = min(overlap.offsets, default=0) >= 0 and not any(map(int.__gt__, overlap.ends, shape))
    return f"{'more than one' if is_inside else 'a'} rank's shard holds {describe(overlap)}"


def flat_starts(shape: Sequence[int], offsets: Int64s) -> Int64s:
    """Returns the index of each region's first element in the row-major flat tensor; it sorts as offsets do."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return offsets @ np.array(strides, np.int64)


def find_grid(shape: Sequence[int], offsets: Int64s, lengths: Int64s) -> tuple[int, ...] | None:
    """Returns the lengths of a part if the regions, sorted and none empty, are a regular grid (see region.py), else
    None. There is at least one region.
    """
    part = lengths[0]
    counts = grid_counts(shape, part.tolist())
    if prod(counts) != len(offsets):
        return None
    indices = np.stack(np.unravel_index(np.arange(len(offsets)), counts), axis=1) if counts else offsets
    expected = indices * part
    is_grid = np.array_equal(offsets, expected) and np.array_equal(
        lengths, np.minimum(part, np.array(shape, np.int64) - expected)
    )
    return tuple(part.tolist()) if is_grid else None


def are_runs(shape: Sequence[int], starts: Int64s, lengths: Int64s) -> bool:
    """Returns True if the regions, sorted and none empty, are runs of the flat tensor without gaps, from its start to
    its end. `starts` are those of `flat_starts`.
    """
    ends = np.cumsum(lengths.prod(axis=1))
    if ends[-1] != prod(shape) or not np.array_equal(starts, np.concatenate([[0], ends[:-1]])):
        return False
    is_partial = lengths != np.array(shape, np.int64)
    # A run has one row of every dimension that lies before one of which it has only a part.
    partial_after = np.cumsum(is_partial[:, ::-1], axis=1)[:, ::-1] - is_partial > 0
    return bool((lengths[partial_after] == 1).all())
