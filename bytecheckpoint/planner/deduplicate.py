"""Chooses one writer for each region that several ranks hold, and one FQN for each tied tensor.

Small replicas stay together on few ranks, so that a load finds them in few files; large ones go to the least loaded
rank, largest first, and are split by rows if a rank would write more than the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from bytecheckpoint.planner.file_layout import EXTENT_BYTES, OWN_EXTENT_BYTES
from bytecheckpoint.planner.shard_owners import disagreement
from bytecheckpoint.planner.write_items import ItemTable
from bytecheckpoint.region import Region, rows

MIN_SPLIT_BYTES = 1 << 20
"""Least size of a part when a replica is split between its holders; the last may lack less than a row."""
_SMALL_FRACTION = 32
"""Small replicas may add this fraction to the bytes that a rank writes. Spreading them more evenly would save less time
than opening one more file costs each rank of a load."""


class Replica(NamedTuple):
    """A region that several ranks hold."""

    fqn: str
    region: Region
    byte_length: int
    items: Sequence[int]
    """Index of the replica among the write items of each holder."""


def is_small(byte_length: int) -> bool:
    """Returns True if a chunk of this length shares its extents with its neighbours, which a load then reads as
    well.
    """
    return byte_length < OWN_EXTENT_BYTES


def assign_writers(replicas: Sequence[Replica], loads: list[int]) -> Iterator[tuple[Replica, Region, int]]:
    """Yields each replica of one set of holders with its region, or a part of that, and the position of the writer
    among the holders. Adds to `loads`, the bytes that each holder writes, while it yields.
    """
    level = fill_level(loads, sum(replica.byte_length for replica in replicas))
    small = [replica for replica in replicas if is_small(replica.byte_length)]
    for replica, position in _assign_small(small, loads, level):
        yield replica, replica.region, position
    yield from _assign_large([replica for replica in replicas if not is_small(replica.byte_length)], loads, level)


def _assign_small(replicas: Sequence[Replica], loads: list[int], level: int) -> Iterator[tuple[Replica, int]]:
    """Assigns small replicas, in the order of their names, to the first holders: each holder is filled before the next
    one gets any. Yields each replica with the position of its writer.
    """
    position, assigned_bytes = 0, 0
    room = max(level - loads[0], level // _SMALL_FRACTION, EXTENT_BYTES)
    for replica in sorted(replicas, key=lambda replica: (replica.fqn, replica.region)):
        if assigned_bytes and assigned_bytes + replica.byte_length > room and position + 1 < len(loads):
            position, assigned_bytes = position + 1, 0
            room = max(level - loads[position], level // _SMALL_FRACTION, EXTENT_BYTES)
        loads[position] += replica.byte_length
        assigned_bytes += replica.byte_length
        yield replica, position


def _assign_large(replicas: Sequence[Replica], loads: list[int], level: int) -> Iterator[tuple[Replica, Region, int]]:
    """Assigns large replicas, largest first, to the least loaded holder. Splits a replica that would lift the holder
    above `level`, into parts of whole rows: see MIN_SPLIT_BYTES. Yields the parts, each with the position of its
    writer.
    """
    heap = [(load, position) for position, load in enumerate(loads)]
    heapq.heapify(heap)
    for replica in sorted(replicas, key=lambda replica: (-replica.byte_length, replica.fqn, replica.region)):
        item_bytes = replica.byte_length // replica.region.numel
        left: Region | None = replica.region
        while left is not None:
            load, position = heap[0]
            part, left = _split_off(left, item_bytes, level - load)
            loads[position] += part.numel * item_bytes
            yield replica, part, position
            heapq.heapreplace(heap, (loads[position], position))


def fill_level(loads: Iterable[int], num_bytes: int) -> int:
    """Returns the load, rounded up, that the least loaded ranks reach if `num_bytes` more are filled in from below."""
    filled = accumulate(sorted(loads))
    return min(-(-(num_bytes + of_first) // count) for count, of_first in enumerate(filled, start=1))


def _split_off(region: Region, item_bytes: int, room_bytes: int) -> tuple[Region, Region | None]:
    """Returns the region's first rows, of about `room_bytes` but at least MIN_SPLIT_BYTES, and the rest; None as the
    rest if the region is not split.
    """
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
"""Tied tensors of one rank: alias FQN -> FQN of the write item."""


def merge_aliases(
    tables: Sequence[ItemTable], aliases: Sequence[Aliases], global_ranks: Sequence[int]
) -> dict[str, str]:
    """Returns the aliases of all ranks: an FQN is one unless some rank holds elements of it in memory of its own (as
    pipeline stages hold tied weights), or holds it and it has no elements.

    Raises CheckpointMismatchError (conflict) if ranks tie a name to tensors that no rank ties to one another, or if a
    tensor that it is tied to has another dtype or shape than the tensor that another rank holds under the name.
    """
    first_ranks: dict[tuple[tuple[str, str], ...], int] = {}
    for rank, of_rank in enumerate(aliases):
        first_ranks.setdefault(tuple(of_rank.items()), rank)
    distinct = {rank: dict(items) for items, rank in first_ranks.items() if items}
    if not distinct:
        return {}
    merged = {alias: fqn for of_rank in distinct.values() for alias, fqn in of_rank.items()}
    held = {
        fqn
        for table in tables
        for item, fqn in enumerate(table.fqns)
        if fqn in merged and (0 in table.shapes[item] or table.boxes(item)[:, 1].all(axis=1).any())
    }
    described = _describe(tables, {*merged, *merged.values()})
    conflicts: dict[str, tuple[str, tuple[int, ...]]] = {}
    first_tie: dict[str, tuple[int, str]] = {}
    for rank, alias, fqn in ((rank, *tie) for rank, of_rank in distinct.items() for tie in of_rank.items()):
        other_rank, other = first_tie.setdefault(alias, (rank, fqn))
        tied_to, _ = described.get(fqn, ("", rank))
        what, holder = described.get(alias, ("", rank)) if alias in held else ("", rank)
        here = global_ranks[rank]
        if what and tied_to and what != tied_to:
            there = global_ranks[holder]
            conflicts[alias] = (
                f"{alias}: {what} on rank {there}, tied to {fqn}, {tied_to}, on rank {here}",
                (there, here),
            )
        elif other != fqn and not any(ties.get(other, other) == ties.get(fqn, fqn) for ties in distinct.values()):
            there = global_ranks[other_rank]
            conflicts[alias] = f"{alias}: tied to {other} on rank {there}, to {fqn} on rank {here}", (there, here)
    if conflicts:
        raise disagreement(conflicts)
    return {alias: fqn for alias, fqn in merged.items() if alias not in held}


def _describe(tables: Sequence[ItemTable], fqns: Collection[str]) -> dict[str, tuple[str, int]]:
    """Returns dtype and shape of these tensors, as text, and the first rank that has an item of each."""
    found: dict[str, tuple[str, int]] = {}
    for table in tables:
        for fqn, dtype, shape in zip(table.fqns, table.dtypes, table.shapes, strict=True):
            if fqn in fqns:
                found.setdefault(fqn, (f"{dtype}{list(shape)}", int(table.ranks[0])))
    return found
