"""Who writes what. The planner takes what every rank offers to write, drops replicas, balances the bytes and checks
that every tensor will be whole; it knows neither tensors nor files nor how ranks talk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.deduplicate import Replica, agree_on_aliases, is_small, share_out
from bytecheckpoint.planner.grid_shards import Splits, find_splits
from bytecheckpoint.planner.shard_owners import Holders, Offered, Shares, collect_offered, group_holders
from bytecheckpoint.planner.write_items import AlikeRanks, PackedOffers, Write, unpack_offers
from bytecheckpoint.region import Region, part_of_grid

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PlannedTensor(NamedTuple):
    """The chunks of one tensor, by rising offsets: what they are and who writes them."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, ...] | None
    """Where the chunks are a regular grid: the lengths of a part."""
    coordinates: Sequence[int] | NDArray[np.int64]
    """Of each chunk: its offsets, then its lengths. Empty for a grid."""
    ranks: Sequence[int] | NDArray[np.int32]
    """Of each chunk: the rank that writes it."""
    slots: Sequence[int] | NDArray[np.int32]
    """Of each chunk: which of its writes it is for that rank. See SavePlan."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What each rank writes. A rank's writes are numbered in slots: first, for each of its offers, the whole of it,
    then parts of offers.
    """

    kept: Sequence[NDArray[np.bool_]]
    """By rank: for each offer, whether all of it is written by the rank that offers it."""
    parts: Sequence[Sequence[Write]]
    """By rank: the parts of offers that it writes."""
    together: Sequence[Sequence[Sequence[int]]]
    """By rank: groups of its offers, small ones that the same ranks hold, the group with most holders first. A load
    mostly wants all of a group or nothing of it, so each has extents of its own."""
    num_bytes: Sequence[int]
    """By rank: of all values that it writes."""
    tensors: Sequence[PlannedTensor]
    aliases: Mapping[str, str]
    differing_replicas: Sequence[str]
    """FQNs of small tensors that ranks hold with different values; the lowest rank's value is written."""
    compared: Mapping[tuple[int, ...], Sequence[Sequence[int]]]
    """Small tensors that ranks hold as equal replicas: by ranks, the indices of each one's offers, in one order."""


def plan_save(
    packed: Sequence[PackedOffers], aliases: Sequence[Mapping[str, str]], *, names: Sequence[int]
) -> SavePlan:
    """The plan for what the ranks offer; `packed[r]` and `aliases[r]` (alias FQN -> stored FQN) come from rank r, which
    errors call `names[r]`.

    Raises CheckpointMismatchError: `conflict` where ranks disagree about a tensor or a tie, or hold parts that overlap,
    `coverage` where a part of a tensor is offered by no rank. One error is about all tensors.
    """
    alike = unpack_offers(packed)
    kept_aliases = agree_on_aliases(alike, aliases, names)
    tensors = collect_offered(alike, kept_aliases, names)
    planner = _Planner(alike, num_ranks=len(packed))
    others = dict(tensors)
    for splits in find_splits(tensors):
        planner.add_splits(splits, tensors)
        for fqn in splits.fqns:
            del others[fqn]
    for fqn, offered, holders in group_holders(others, names):
        if isinstance(holders, Shares):
            planner.add_shares(fqn, offered, holders)
        else:
            planner.add_holders(fqn, offered, holders)
    planner.share_out_replicas()
    return SavePlan(
        kept=planner.kept(),
        parts=planner.parts,
        together=planner.together(),
        num_bytes=planner.num_bytes(),
        tensors=planner.tensors(tensors),
        aliases=kept_aliases,
        differing_replicas=planner.differing,
        compared=planner.compared,
    )


class _Holding(NamedTuple):
    """Who holds one region: ranks, which of its offers this is for each, and what each one's digest is, if any."""

    ranks: Sequence[int]
    offers: Sequence[int]
    digests: Sequence[int]


class _Planner:
    """The plan while it is made, tensor by tensor: what one rank alone holds is its own to write, replicas wait."""

    def __init__(self, alike: Sequence[AlikeRanks], *, num_ranks: int) -> None:
        num_offers = [0] * num_ranks
        for of_ranks in alike:
            for rank in of_ranks.ranks.tolist():
                num_offers[rank] = len(of_ranks.fqns)
        self._num_offers = num_offers
        self._first_slots = np.array([0, *accumulate(num_offers)])
        self._is_kept = np.zeros(self._first_slots[-1], bool)
        self._replicas: dict[tuple[int, ...], list[Replica]] = {}
        self._planned: dict[str, PlannedTensor] = {}
        self._chunks: dict[str, list[tuple[Region, int, int]]] = {}
        self._loads = np.zeros(num_ranks, np.int64)
        self._together: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(num_ranks)]
        """By writer: the small offers that it shares with other ranks, by all who hold them."""
        self.parts: list[list[Write]] = [[] for _ in range(num_ranks)]
        self.differing: list[str] = []
        self.compared: dict[tuple[int, ...], list[list[int]]] = {}

    def kept(self) -> list[NDArray[np.bool_]]:
        return np.split(self._is_kept, self._first_slots[1:-1])

    def together(self) -> list[list[list[int]]]:
        def order(holders: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
            return -len(holders), holders

        return [[of_rank[holders] for holders in sorted(of_rank, key=order)] for of_rank in self._together]

    def num_bytes(self) -> list[int]:
        loads: list[int] = self._loads.tolist()
        return loads

    def tensors(self, offered: Mapping[str, Offered]) -> list[PlannedTensor]:
        for fqn, chunks in self._chunks.items():
            self._planned[fqn] = _planned(fqn, offered[fqn], sorted(chunks))
        return [self._planned[fqn] for fqn in offered if fqn in self._planned]

    def add_splits(self, splits: Splits, offered: Mapping[str, Offered]) -> None:
        ranks = splits.ranks
        is_single = splits.num_replicas == 1
        is_written = is_single[:, None] & (np.arange(ranks.shape[1]) < splits.num_parts[:, None])
        slots = self._first_slots[ranks] + splits.offers[:, None]
        self._is_kept[slots[is_written]] = True
        item_bytes = np.array([itemsize(offered[fqn].dtype) for fqn in splits.fqns], np.int64)
        num_bytes = splits.boxes[:, :, 1].prod(axis=2) * item_bytes[:, None]
        np.add.at(self._loads, ranks[is_written], num_bytes[is_written])
        offers = np.repeat(splits.offers.astype(np.int32)[:, None], ranks.shape[1], axis=1)
        parts, num_parts = splits.boxes[:, 0, 1].tolist(), splits.num_parts.tolist()
        for tensor in np.flatnonzero(is_single).tolist():
            fqn, part, count = splits.fqns[tensor], tuple(parts[tensor]), num_parts[tensor]
            dtype, shape, *_ = offered[fqn]
            self._planned[fqn] = PlannedTensor(
                fqn, dtype, shape, part, (), ranks[tensor, :count], offers[tensor, :count]
            )
        for tensor in np.flatnonzero(~is_single).tolist():
            self._add_replicated(splits, tensor, offered[splits.fqns[tensor]])

    def _add_replicated(self, splits: Splits, tensor: int, offered: Offered) -> None:
        """The parts of one of the tensors, each of which several ranks hold."""
        fqn, num_replicas = splits.fqns[tensor], int(splits.num_replicas[tensor])
        ((of_ranks, offer),) = offered.sources
        end = int(splits.num_parts[tensor]) * num_replicas
        rows = splits.order[tensor, :end]
        ranks = splits.holders[rows].tolist()
        column = of_ranks.digest_columns.get(offer)
        digests = of_ranks.digests[rows, column].tolist() if column is not None else []
        starts = range(0, end, num_replicas)
        for start, (offsets, lengths) in zip(starts, splits.boxes[tensor, :end:num_replicas].tolist(), strict=True):
            held = slice(start, start + num_replicas)
            holding = _Holding(ranks[held], [offer] * num_replicas, digests[held])
            self._add_region(fqn, Region(tuple(offsets), tuple(lengths)), itemsize(offered.dtype), holding)

    def add_shares(self, fqn: str, offered: Offered, shares: Shares) -> None:
        num_holders = np.diff(shares.bounds)
        if num_holders.max() > 1:
            for index, (offsets, lengths) in enumerate(shares.boxes.tolist()):
                of_region = slice(shares.bounds[index], shares.bounds[index + 1])
                digests = shares.digests[of_region].tolist() if shares.digests is not None else ()
                holding = _Holding(shares.ranks[of_region].tolist(), shares.offers[of_region].tolist(), digests)
                self._add_region(fqn, Region(tuple(offsets), tuple(lengths)), itemsize(offered.dtype), holding)
            return
        self._is_kept[self._first_slots[shares.ranks] + shares.offers] = True
        np.add.at(self._loads, shares.ranks, shares.boxes[:, 1].prod(axis=1) * itemsize(offered.dtype))
        coordinates = shares.boxes.reshape(-1) if shares.part is None else ()
        self._planned[fqn] = PlannedTensor(
            fqn, offered.dtype, offered.shape, shares.part, coordinates, shares.ranks, shares.offers
        )

    def add_holders(self, fqn: str, offered: Offered, holders: Holders) -> None:
        for region, of_region in holders.items():
            if not region.numel and 0 not in offered.shape:
                continue  # this rank's share of an uneven split is empty
            holding = _Holding(
                [holder.rank for holder in of_region],
                [holder.offer for holder in of_region],
                [holder.digest for holder in of_region if holder.digest is not None],
            )
            self._add_region(fqn, region, itemsize(offered.dtype), holding)

    def _add_region(self, fqn: str, region: Region, item_bytes: int, holding: _Holding) -> None:
        ranks, offers, digests = holding
        num_bytes = region.numel * item_bytes
        if len(ranks) > 1 and len(set(digests)) > 1 and is_small(num_bytes):
            self._together[ranks[0]].setdefault(tuple(ranks), []).append(offers[0])
        if len(set(digests)) > 1:
            self.differing.append(fqn)
            ranks, offers = ranks[:1], offers[:1]
        elif len(ranks) > 1 and digests:
            by_holder = self.compared.setdefault(tuple(ranks), [[] for _ in ranks])
            for of_holder, offer in zip(by_holder, offers, strict=True):
                of_holder.append(offer)
        if len(ranks) == 1 or not region.numel:
            self._keep(fqn, region, ranks[0], offers[0])
            self._loads[ranks[0]] += num_bytes
        else:
            replica = Replica(fqn, region, num_bytes, offers)
            self._replicas.setdefault(tuple(ranks), []).append(replica)

    def _keep(self, fqn: str, region: Region, rank: int, offer: int) -> None:
        self._is_kept[self._first_slots[rank] + offer] = True
        self._chunks.setdefault(fqn, []).append((region, rank, offer))

    def share_out_replicas(self) -> None:
        for ranks in sorted(self._replicas, key=lambda ranks: (len(ranks), ranks)):
            loads = self._loads[list(ranks)].tolist()
            small: dict[int, list[int]] = {}
            for replica, region, position in share_out(self._replicas[ranks], loads):
                rank, offer = ranks[position], replica.offers[position]
                if is_small(replica.byte_length):
                    small.setdefault(rank, []).append(offer)
                if region == replica.region:
                    self._keep(replica.fqn, region, rank, offer)
                    continue
                slot = self._num_offers[rank] + len(self.parts[rank])
                self.parts[rank].append(Write(offer, region))
                self._chunks.setdefault(replica.fqn, []).append((region, rank, slot))
            for rank, of_rank in small.items():
                self._together[rank].setdefault(ranks, []).extend(of_rank)
            self._loads[list(ranks)] = loads


def _planned(fqn: str, offered: Offered, chunks: Sequence[tuple[Region, int, int]]) -> PlannedTensor:
    coordinates = [number for region, _, _ in chunks for number in (*region.offsets, *region.lengths)]
    part = part_of_grid(offered.shape, coordinates, len(chunks))
    return PlannedTensor(
        fqn=fqn,
        dtype=offered.dtype,
        shape=offered.shape,
        part=part,
        coordinates=() if part is not None else coordinates,
        ranks=[rank for _, rank, _ in chunks],
        slots=[slot for _, _, slot in chunks],
    )
