"""The shares of all ranks at once, where each rank of a load derives its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents, ReaderShare
from bytecheckpoint.planner.read_division import Hosts, divide_reading, share_of


def assign_readers(
    wanted: Sequence[Sequence[ExtentRun]],
    extents: Extents,
    held: Sequence[Collection[int]] = (),
    hosts: Hosts | None = None,
) -> list[ReaderShare]:
    """Returns the share of each rank in what `divide_reading` returns. Without `hosts` no ranks share memory."""
    division = divide_reading(wanted, extents, held, hosts or Hosts([[rank] for rank in range(len(wanted))]))
    groups = ([division.groups[number] for number in numbers] for numbers in division.groups_of_rank())
    return [share_of(rank, of_rank, division.common, division.hosts) for rank, of_rank in enumerate(groups)]
