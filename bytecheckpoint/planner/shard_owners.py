"""Who holds which region of a tensor: what all ranks offer of it, replicas found, and seen to tile its shape. Where
many ranks hold parts that lie as they mostly do, in operations on arrays; region by region otherwise.

Proofs that many regions tile a shape, for the layouts that thousands of ranks have: regular grids, and runs of the
flat tensor. What is proved here costs a few operations on arrays; what is not has to be looked at region by region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.planner.write_items import AlikeRanks
from bytecheckpoint.region import Region, TilingFault, describe, find_tiling_fault, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
from typing import TYPE_CHECKING

from bytecheckpoint.region import grid_counts

MIN_ARRAY_OFFERS = 24
"""Of a tensor. For fewer, operations on arrays take longer than a loop."""

_NUM_SHOWN = 10


class Holder(NamedTuple):
    """A rank that holds a region."""

    rank: int
    offer: int
    """Index into that rank's offers."""
    digest: int | None


class Offered(NamedTuple):
    """All that is offered of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    first_rank: int
    sources: list[tuple[AlikeRanks, int]]
    """Ranks that hold parts of it, and which of their offers those are."""


class Shares(NamedTuple):
    """The distinct regions of one tensor, as arrays, and who holds them."""

    part: tuple[int, ...] | None
    """Where they are a regular grid: the lengths of a part."""
    boxes: Int64s
    """Of each region, by rising offsets: offsets and lengths. Shape (regions, 2, dimensions)."""
    bounds: Int64s
    """Where the holders of each begin in what follows, and where the last ones end."""
    ranks: NDArray[np.int32]
    """Rising within a region."""
    offers: NDArray[np.int32]
    digests: NDArray[np.uint64] | None


Holders = dict[Region, list[Holder]]
"""The same, region by region."""


def collect_offered(
    alike: Sequence[AlikeRanks], aliases: Mapping[str, str], names: Sequence[int]
) -> dict[str, Offered]:
    """What is offered of each tensor that is no alias.

    Raises CheckpointMismatchError (conflict) where ranks disagree about what a tensor is.
    """
    tensors: dict[str, Offered] = {}
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    for of_ranks in alike:
        for offer, (fqn, dtype, shape) in enumerate(zip(of_ranks.fqns, of_ranks.dtypes, of_ranks.shapes, strict=True)):
            if fqn in aliases:
                continue
            rank = int(of_ranks.ranks[0])
            tensor = tensors.get(fqn)
            if tensor is None:
                tensor = tensors[fqn] = Offered(dtype, shape, rank, [])
            elif (tensor.dtype, tensor.shape) != (dtype, shape):
                here = f"{dtype}{list(shape)} on rank {names[rank]}"
                text = f"{fqn}: {tensor.dtype}{list(tensor.shape)} on rank {names[tensor.first_rank]}, {here}"
                conflicts[fqn] = text, (names[tensor.first_rank], names[rank])
            tensor.sources.append((of_ranks, offer))
    if conflicts:
        raise disagreement(conflicts)
    return tensors


def disagreement(conflicts: Mapping[str, tuple[str, tuple[int, ...]]]) -> CheckpointMismatchError:
    """The error for these FQNs: for each a line, and the ranks that it is about."""
    return CheckpointMismatchError(
        f"ranks disagree about {len(conflicts)} tensors; nothing was written. Give each its own FQN, or the same "
        "global shape and dtype on every rank, tied to the same, and save again:\n"
        + first_lines([text for text, _ in conflicts.values()]),
        kind="conflict",
        ranks=tuple(sorted({rank for _, ranks in conflicts.values() for rank in ranks})),
    )


def first_lines(lines: Sequence[str]) -> str:
    """The first of these lines, indented, and how many there are more: an error is for reading."""
    return "  " + and_more(lines, _NUM_SHOWN, "\n  ")


def group_holders(
    tensors: Mapping[str, Offered], names: Sequence[int]
) -> Iterator[tuple[str, Offered, Shares | Holders]]:
    """Who holds which region of each tensor, one tensor after the other.

    Raises CheckpointMismatchError when all have been seen: `conflict` where one rank offers a region twice or regions
    overlap, `coverage` where a part is offered by no rank. One error is about all tensors.
    """
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    faults: list[tuple[str, TilingFault]] = []
    for fqn, offered in tensors.items():
        shares = _share_at_once(offered)
        if shares is not None:
            yield fqn, offered, shares
            continue
        holders = _hold(fqn, offered, names, conflicts)
        fault = None if list(holders) == [whole(offered.shape)] else find_tiling_fault(offered.shape, list(holders))
        if fault is not None:
            faults.append((f"{fqn}{list(offered.shape)}", fault))
        yield fqn, offered, holders
    if conflicts:
        raise disagreement(conflicts)
    _refuse_faults(faults)


def _share_at_once(offered: Offered) -> Shares | None:
    """None where the offers are few, or not seen at a glance to tile the shape."""
    if sum(len(of_ranks.ranks) for of_ranks, _ in offered.sources) < MIN_ARRAY_OFFERS or not prod(offered.shape):
        return None
    ranks = _joined([of_ranks.ranks for of_ranks, _ in offered.sources])
    offers = _joined([np.full(len(of_ranks.ranks), offer, np.int32) for of_ranks, offer in offered.sources])
    boxes = _joined([of_ranks.boxes(offer) for of_ranks, offer in offered.sources])
    digests = _digests(offered)
    starts = flat_starts(offered.shape, boxes[:, 0])
    is_filled = boxes[:, 1].min(axis=1, initial=1) > 0
    if not is_filled.all() or (np.diff(starts) <= 0).any() or len(offered.sources) > 1:
        order = np.lexsort((offers, ranks, starts))
        order = order[is_filled[order]]
        ranks, offers, boxes, starts = ranks[order], offers[order], boxes[order], starts[order]
        digests = digests[order] if digests is not None else None
    if not len(ranks):
        return None
    is_first: NDArray[np.bool_] = np.append(True, starts[1:] != starts[:-1])
    bounds = np.append(np.flatnonzero(is_first), len(ranks))
    distinct = boxes[is_first]
    is_same = np.array_equal(boxes, np.repeat(distinct, np.diff(bounds), axis=0))
    is_twice = (ranks[1:] == ranks[:-1]) & ~is_first[1:]
    part = find_grid(offered.shape, distinct[:, 0], distinct[:, 1])
    if not is_same or is_twice.any() or not (part or are_runs(offered.shape, starts[is_first], distinct[:, 1])):
        return None
    return Shares(part, distinct, bounds, ranks, offers, digests)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _digests(offered: Offered) -> NDArray[np.uint64] | None:
    """One for each offer; None unless all have one."""
    columns = [of_ranks.digest_columns.get(offer) for of_ranks, offer in offered.sources]
    known = [column for column in columns if column is not None]
    if len(known) < len(columns):
        return None
    return _joined([of_ranks.digests[:, column] for (of_ranks, _), column in zip(offered.sources, known, strict=True)])


def _hold(
    fqn: str, offered: Offered, names: Sequence[int], conflicts: dict[str, tuple[str, tuple[int, ...]]]
) -> Holders:
    holders: Holders = {}
    for region, holder in _in_order(offered):
        of_region = holders.setdefault(region, [])
        if of_region and of_region[-1].rank == holder.rank and region.numel:
            name = names[holder.rank]
            conflicts[fqn] = f"{fqn}: rank {name} has two tensors of this name", (name,)
        of_region.append(holder)
    return holders


def _in_order(offered: Offered) -> list[tuple[Region, Holder]]:
    """All offers, by rank."""
    found = []
    for of_ranks, offer in offered.sources:
        column = of_ranks.digest_columns.get(offer)
        digests = of_ranks.digests[:, column].tolist() if column is not None else [None] * len(of_ranks.ranks)
        for rank, region, digest in zip(of_ranks.ranks.tolist(), of_ranks.regions(offer), digests, strict=True):
            found.append((region, Holder(rank, offer, digest)))
    return found if len(offered.sources) == 1 else sorted(found, key=lambda each: each[1][:2])


def _refuse_faults(faults: Sequence[tuple[str, TilingFault]]) -> None:
    overlaps = [
        f"{what}: more than one rank's shard holds {describe(fault.overlap)}" for what, fault in faults if fault.overlap
    ]
    holes = [f"{what}: no rank holds {describe(fault.hole)}" for what, fault in faults if fault.hole]
    if overlaps:
        raise CheckpointMismatchError(
            f"the shards of {len(overlaps)} tensors overlap without being replicas; nothing was written. Every element "
            "must lie in one region, or in the same region on all ranks that hold it, and options.codec must be the "
            "same on all ranks:\n" + first_lines(overlaps),
            kind="conflict",
        )
    if holes:
        raise CheckpointMismatchError(
            f"{len(holes)} tensors would not be whole; nothing was written. Every rank that holds a part must pass it "
            "to save:\n" + first_lines(holes),
            kind="coverage",
        )


def flat_starts(shape: Sequence[int], offsets: Int64s) -> Int64s:
    """The number of each region's first element in the row-major flat tensor. Sorts regions as their offsets do."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return offsets @ np.array(strides, np.int64)


def find_grid(shape: Sequence[int], offsets: Int64s, lengths: Int64s) -> tuple[int, ...] | None:
    """The lengths of a part where the regions, sorted by offsets and none empty, are a regular grid; see region.py."""
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
    """Whether the regions, sorted and none empty, are runs of the flat tensor that follow one another to its end."""
    ends = np.cumsum(lengths.prod(axis=1))
    if ends[-1] != prod(shape) or not np.array_equal(starts, np.concatenate([[0], ends[:-1]])):
        return False
    is_partial = lengths != np.array(shape, np.int64)
    # A run has one row of every dimension that lies before one of which it has only a part.
    partial_after = np.cumsum(is_partial[:, ::-1], axis=1)[:, ::-1] - is_partial > 0
    return bool((lengths[partial_after] == 1).all())
