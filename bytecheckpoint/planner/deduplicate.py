"""Writer of each region that several ranks hold. Small ones stay together on few ranks, so that a load finds them in
few files; large ones go to the least loaded rank, largest first, and are split by rows where a rank would write more
than the others.

Which names of tied tensors are aliases for all ranks, and where ranks contradict one another about that. It knows no
memory: what is tied on a rank is what that rank says.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from bytecheckpoint.planner.file_layout import EXTENT_BYTES, OWN_EXTENT_BYTES
from bytecheckpoint.planner.shard_owners import disagreement
from bytecheckpoint.planner.write_items import AlikeRanks
from bytecheckpoint.region import Region, rows

MIN_SPLIT_BYTES = 1 << 20
"""A replica is split between its holders into parts no smaller than this."""
_SMALL_FRACTION = 32
"""Small replicas may add one part in so many to what a rank writes. Spreading them more evenly would save less time
than opening one more file costs each rank of a load."""


class Replica(NamedTuple):
    """A region that several ranks hold."""

    fqn: str
    region: Region
    byte_length: int
    offers: Sequence[int]
    """Of each holder, which of its offers this is."""


def is_small(byte_length: int) -> bool:
    """Whether a chunk of this length shares its extents with its neighbours, which a load then reads as well."""
    return byte_length < OWN_EXTENT_BYTES


def share_out(replicas: Sequence[Replica], loads: list[int]) -> Iterator[tuple[Replica, Region, int]]:
    """Distributes replicas of one set of holders: each replica, or part of one, with the position of its writer.

    Changes `loads`, the bytes that each holder writes.
    """
    level = _level(sorted(loads), sum(replica.byte_length for replica in replicas))
    small = [replica for replica in replicas if is_small(replica.byte_length)]
    for replica, position in _keep_together(small, loads, level):
        yield replica, replica.region, position
    yield from _balance([replica for replica in replicas if not is_small(replica.byte_length)], loads, level)


def _keep_together(replicas: Sequence[Replica], loads: list[int], level: int) -> Iterator[tuple[Replica, int]]:
    """Small replicas, by name, on the first holders: each takes what it may before the next one takes any."""
    position, taken = 0, 0
    room = max(level - loads[0], level // _SMALL_FRACTION, EXTENT_BYTES)
    for replica in sorted(replicas, key=lambda replica: (replica.fqn, replica.region)):
        if taken and taken + replica.byte_length > room and position + 1 < len(loads):
            position, taken = position + 1, 0
            room = max(level - loads[position], level // _SMALL_FRACTION, EXTENT_BYTES)
        loads[position] += replica.byte_length
        taken += replica.byte_length
        yield replica, position


def _balance(replicas: Sequence[Replica], loads: list[int], level: int) -> Iterator[tuple[Replica, Region, int]]:
    """Large replicas, largest first, on the least loaded holder."""
    heap = [(load, position) for position, load in enumerate(loads)]
    heapq.heapify(heap)
    for replica in sorted(replicas, key=lambda replica: (-replica.byte_length, replica.fqn, replica.region)):
        item_bytes = replica.byte_length // replica.region.numel
        left: Region | None = replica.region
        while left is not None:
            load, position = heap[0]
            taken, left = _split_off(left, item_bytes, level - load)
            loads[position] += taken.numel * item_bytes
            yield replica, taken, position
            heapq.heapreplace(heap, (loads[position], position))


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


Aliases = Mapping[str, str]
"""What one rank says: alias FQN -> FQN under which it offers the tensor."""


def agree_on_aliases(alike: Sequence[AlikeRanks], aliases: Sequence[Aliases], names: Sequence[int]) -> dict[str, str]:
    """An FQN is an alias unless some rank holds it with memory of its own (as pipeline stages hold tied weights).

    Raises CheckpointMismatchError (conflict) where ranks tie a name to tensors that no rank ties to one another, or
    where what it is tied to on one rank has another dtype or shape than what another one holds under the name.
    """
    first_ranks: dict[tuple[tuple[str, str], ...], int] = {}
    for rank, of_rank in enumerate(aliases):
        first_ranks.setdefault(tuple(of_rank.items()), rank)
    said = {rank: dict(items) for items, rank in first_ranks.items() if items}
    if not said:
        return {}
    merged = {alias: fqn for of_rank in said.values() for alias, fqn in of_rank.items()}
    real = _real(alike, merged)
    _refuse_contradictions(said, _described(alike, {*merged, *merged.values()}), real, names)
    return {alias: fqn for alias, fqn in merged.items() if alias not in real}


def _real(alike: Sequence[AlikeRanks], fqns: Collection[str]) -> set[str]:
    """Those of which some rank holds elements."""
    return {
        fqn
        for of_ranks in alike
        for offer, fqn in enumerate(of_ranks.fqns)
        if fqn in fqns and of_ranks.boxes(offer)[:, 1].all(axis=1).any()
    }


def _described(alike: Sequence[AlikeRanks], fqns: Collection[str]) -> dict[str, tuple[str, int]]:
    """Of these tensors: dtype and shape, as people write them, and the first rank that offers it."""
    found: dict[str, tuple[str, int]] = {}
    for of_ranks in alike:
        for fqn, dtype, shape in zip(of_ranks.fqns, of_ranks.dtypes, of_ranks.shapes, strict=True):
            if fqn in fqns:
                found.setdefault(fqn, (f"{dtype}{list(shape)}", int(of_ranks.ranks[0])))
    return found


def _refuse_contradictions(
    said: Mapping[int, Aliases], described: Mapping[str, tuple[str, int]], real: Collection[str], names: Sequence[int]
) -> None:
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    first_said: dict[str, tuple[int, str]] = {}
    for rank, of_rank in said.items():
        for alias, fqn in of_rank.items():
            other_rank, other = first_said.setdefault(alias, (rank, fqn))
            what, holder = described.get(alias, ("", rank)) if alias in real else ("", rank)
            tied_to = described[fqn][0] if fqn in described else ""
            if what and tied_to and what != tied_to:
                text = f"{alias}: {what} on rank {names[holder]}, tied to {fqn}, {tied_to}, on rank {names[rank]}"
                conflicts[alias] = text, (names[holder], names[rank])
            elif other != fqn and not any(_are_tied(each, other, fqn) for each in said.values()):
                text = f"{alias}: tied to {other} on rank {names[other_rank]}, to {fqn} on rank {names[rank]}"
                conflicts[alias] = text, (names[other_rank], names[rank])
    if conflicts:
        raise disagreement(conflicts)


def _are_tied(of_rank: Aliases, first: str, second: str) -> bool:
    return of_rank.get(first, first) == of_rank.get(second, second)
