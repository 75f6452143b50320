"""Who writes what. The planner takes what every rank offers to write, drops replicas, balances the bytes and checks
that every tensor will be whole; it knows neither tensors nor files nor how ranks talk.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import msgspec

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.region import Region, find_tiling_fault, rows, whole

MIN_SPLIT_BYTES = 1 << 20
"""A replica is split between its holders into parts no smaller than this."""

_NUM_SHOWN = 10


class Offer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard that a rank holds and could write. Travels between ranks."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """The global shape."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: int | None = None
    """The xxh3-64 of a small shard, by which replicas are compared."""

    @property
    def region(self) -> Region:
        return Region(self.offsets, self.lengths)


class Write(NamedTuple):
    """What a rank is to write of an offer, as one chunk or, where it is compressed and large, as several."""

    offer: int
    """Index into that rank's offers."""
    region: Region
    """What of the offered region, in global coordinates."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What each rank writes, by rank."""

    writes: Sequence[Sequence[Write]]
    aliases: Mapping[str, str]
    differing_replicas: Sequence[str] = ()
    """FQNs of small tensors that ranks hold with different values; the lowest rank's value is written."""
    compared: Mapping[tuple[int, ...], Sequence[Sequence[int]]] = field(default_factory=dict)
    """Small tensors that ranks hold as equal replicas: by ranks, the indices of each one's offers, in one order."""


class _Holder(NamedTuple):
    rank: int
    offer: int


@dataclass(slots=True)
class _Tensor:
    """All offers of one tensor, by region."""

    dtype: str
    shape: tuple[int, ...]
    holders: dict[Region, list[_Holder]] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)


def plan_save(
    offers: Sequence[Sequence[Offer]], aliases: Sequence[Mapping[str, str]], *, names: Sequence[int]
) -> SavePlan:
    """The plan for what the ranks offer; `offers[r]` and `aliases[r]` (alias FQN -> stored FQN) come from rank r, which
    errors call `names[r]`.

    Raises CheckpointMismatchError: `conflict` where ranks disagree about a tensor or hold parts that overlap,
    `coverage` where a part of a tensor is offered by no rank. One error is about all tensors.
    """
    kept_aliases = _agree_on_aliases(offers, aliases)
    tensors = _collect(offers, kept_aliases, names)
    _check_tiling(tensors)
    differing = _settle_differing_replicas(tensors, offers)
    return SavePlan(_assign(tensors, num_ranks=len(offers)), kept_aliases, differing, _compared(tensors, offers))


def _agree_on_aliases(offers: Sequence[Sequence[Offer]], aliases: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """An FQN is an alias unless some rank holds it with memory of its own (as pipeline stages hold tied weights)."""
    merged = {alias: fqn for of_rank in aliases for alias, fqn in of_rank.items()}
    if not merged:
        return {}
    real = {offer.fqn for of_rank in offers for offer in of_rank if offer.region.numel and offer.fqn in merged}
    return {alias: fqn for alias, fqn in merged.items() if alias not in real}


def _collect(offers: Sequence[Sequence[Offer]], aliases: Mapping[str, str], names: Sequence[int]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    first_ranks: dict[str, int] = {}
    conflicts: dict[str, tuple[str, tuple[int, int]]] = {}
    for rank, of_rank in enumerate(offers):
        for index, offer in enumerate(of_rank):
            if offer.fqn in aliases:
                continue
            tensor = tensors.get(offer.fqn)
            if tensor is None:
                tensor = tensors[offer.fqn] = _Tensor(offer.dtype, offer.shape)
                first_ranks[offer.fqn] = rank
            holders = tensor.holders.setdefault(offer.region, [])
            if (tensor.dtype, tensor.shape) != (offer.dtype, offer.shape):
                first = first_ranks[offer.fqn]
                here = f"{offer.dtype}{list(offer.shape)} on rank {names[rank]}"
                text = f"{offer.fqn}: {tensor.dtype}{list(tensor.shape)} on rank {names[first]}, {here}"
                conflicts[offer.fqn] = text, (names[first], names[rank])
            elif holders and holders[-1].rank == rank and offer.region.numel:
                text = f"{offer.fqn}: rank {names[rank]} has two tensors of this name"
                conflicts[offer.fqn] = text, (names[rank], names[rank])
            holders.append(_Holder(rank, index))
    if conflicts:
        raise CheckpointMismatchError(
            f"ranks disagree about {len(conflicts)} tensors; nothing was written. Give each its own FQN, or the same "
            "global shape and dtype on every rank, and save again:\n"
            + first_lines([text for text, _ in conflicts.values()]),
            kind="conflict",
            ranks=tuple(sorted({rank for _, ranks in conflicts.values() for rank in ranks})),
        )
    return tensors


def _check_tiling(tensors: Mapping[str, _Tensor]) -> None:
    holes, overlaps = [], []
    for fqn, tensor in tensors.items():
        if len(tensor.holders) == 1 and whole(tensor.shape) in tensor.holders:
            continue
        fault = find_tiling_fault(tensor.shape, list(tensor.holders))
        if fault is not None and fault.overlap is not None:
            overlaps.append(f"{fqn}{list(tensor.shape)}: more than one rank's shard holds {describe(fault.overlap)}")
        elif fault is not None and fault.hole is not None:
            holes.append(f"{fqn}{list(tensor.shape)}: no rank holds {describe(fault.hole)}")
    if overlaps:
        raise CheckpointMismatchError(
            f"the shards of {len(overlaps)} tensors overlap without being replicas; nothing was written. Every element "
            "must lie in one region, or in the same region on all ranks that hold it:\n" + first_lines(overlaps),
            kind="conflict",
        )
    if holes:
        raise CheckpointMismatchError(
            f"{len(holes)} tensors would not be whole; nothing was written. Every rank that holds a part must pass it "
            "to save:\n" + first_lines(holes),
            kind="coverage",
        )


def describe(region: Region) -> str:
    """A region as people write it: `[0:4, 8:16]`."""
    return "[" + ", ".join(f"{offset}:{end}" for offset, end in zip(region.offsets, region.ends, strict=True)) + "]"


def first_lines(lines: Sequence[str]) -> str:
    """The first of these lines, indented, and how many there are more: an error is for reading."""
    rest = [f"  and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else []
    return "\n".join([f"  {line}" for line in lines[:_NUM_SHOWN]] + rest)


def _settle_differing_replicas(tensors: Mapping[str, _Tensor], offers: Sequence[Sequence[Offer]]) -> list[str]:
    """Where replicas have different digests, leaves only the lowest rank as holder. Returns their FQNs."""
    differing = []
    for fqn, tensor in tensors.items():
        for region, holders in tensor.holders.items():
            if len(holders) > 1 and len({offers[rank][index].digest for rank, index in holders}) > 1:
                tensor.holders[region] = holders[:1]
                differing.append(fqn)
    return differing


def _compared(
    tensors: Mapping[str, _Tensor], offers: Sequence[Sequence[Offer]]
) -> dict[tuple[int, ...], list[list[int]]]:
    compared: dict[tuple[int, ...], list[list[int]]] = {}
    for holders in (holders for tensor in tensors.values() for holders in tensor.holders.values()):
        if len(holders) > 1 and offers[holders[0].rank][holders[0].offer].digest is not None:
            ranks = tuple(holder.rank for holder in holders)
            by_holder = compared.setdefault(ranks, [[] for _ in ranks])
            for of_holder, holder in zip(by_holder, holders, strict=True):
                of_holder.append(holder.offer)
    return compared


class _Candidate(NamedTuple):
    fqn: str
    region: Region
    byte_length: int
    offers: Mapping[int, int]
    """Rank -> index of its offer."""


def _assign(tensors: Mapping[str, _Tensor], *, num_ranks: int) -> list[list[Write]]:
    """Largest first onto the least loaded holder; what would lift a rank above the common level is split by rows."""
    writes: list[list[Write]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    shared: dict[tuple[int, ...], list[_Candidate]] = {}
    for fqn, tensor in tensors.items():
        for region, holders in tensor.holders.items():
            byte_length = region.numel * tensor.itemsize
            if byte_length == 0 and 0 not in tensor.shape:
                continue  # this rank's share of an uneven split is empty
            if len(holders) == 1 or byte_length == 0:
                writes[holders[0].rank].append(Write(holders[0].offer, region))
                loads[holders[0].rank] += byte_length
                continue
            by_rank = dict(holders)
            shared.setdefault(tuple(sorted(by_rank)), []).append(_Candidate(fqn, region, byte_length, by_rank))
    for ranks in sorted(shared, key=lambda ranks: (len(ranks), ranks)):
        _share_out(shared[ranks], ranks, loads, writes)
    return writes


def _share_out(
    candidates: Sequence[_Candidate], ranks: Sequence[int], loads: list[int], writes: Sequence[list[Write]]
) -> None:
    """Gives the replicated regions of one group of ranks to its members; changes `loads` and `writes`."""
    level = _level(sorted(loads[rank] for rank in ranks), sum(candidate.byte_length for candidate in candidates))
    heap = [(loads[rank], rank) for rank in ranks]
    heapq.heapify(heap)
    for candidate in sorted(
        candidates, key=lambda candidate: (-candidate.byte_length, candidate.fqn, candidate.region)
    ):
        item_bytes = candidate.byte_length // candidate.region.numel
        left: Region | None = candidate.region
        while left is not None:
            load, rank = heap[0]
            taken, left = _split_off(left, item_bytes, level - load)
            loads[rank] += taken.numel * item_bytes
            writes[rank].append(Write(candidate.offers[rank], taken))
            heapq.heapreplace(heap, (loads[rank], rank))


def _level(loads: Sequence[int], num_bytes: int) -> int:
    """How high these (sorted) loads stand once `num_bytes` more are spread so that the lowest rise first."""
    total = num_bytes
    for count, load in enumerate(loads, start=1):
        total += load
        if count == len(loads) or total <= loads[count] * count:
            return ceil(total / count)
    return 0


def _split_off(region: Region, item_bytes: int, room_bytes: int) -> tuple[Region, Region | None]:
    """The region's first rows, about `room_bytes` of them, and the rest; the rest is None where all is taken."""
    dim = next((dim for dim, length in enumerate(region.lengths) if length > 1), None)
    num_bytes = region.numel * item_bytes
    if dim is None or num_bytes - max(room_bytes, MIN_SPLIT_BYTES) < MIN_SPLIT_BYTES:
        return region, None
    row_bytes = num_bytes // region.lengths[dim]
    count = ceil(max(room_bytes, MIN_SPLIT_BYTES) / row_bytes)
    if count >= region.lengths[dim]:
        return region, None
    return rows(region, dim, 0, count), rows(region, dim, count, region.lengths[dim] - count)
