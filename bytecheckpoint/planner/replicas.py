"""Who of those that hold the same region writes it: largest first onto the least loaded, and what would lift a rank
above the common level is split by rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from bytecheckpoint.region import Region, rows

MIN_SPLIT_BYTES = 1 << 20
"""A replica is split between its holders into parts no smaller than this."""


class Replica(NamedTuple):
    """A region that several ranks hold."""

    fqn: str
    region: Region
    byte_length: int
    offers: Sequence[int]
    """Of each holder, which of its offers this is."""


def share_out(replicas: Sequence[Replica], loads: list[int]) -> Iterator[tuple[Replica, Region, int]]:
    """Gives replicas that the same ranks hold to these: which part of which one goes to which of the holders. Changes
    `loads`, the bytes that each holder writes.
    """
    level = _level(sorted(loads), sum(replica.byte_length for replica in replicas))
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
