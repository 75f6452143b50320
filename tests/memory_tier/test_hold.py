"""What the coordinator decides when ranks report what they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.memory_tier.hold import RankHolding, refuse_other_jobs


class CountedHost(str):
    """A host's id that counts how often one is compared with another."""

    __slots__ = ()
    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedHost.num_comparisons += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def holding(rank: int, others: list[tuple[str, int]]) -> RankHolding:
    host: Any = CountedHost(f"host {rank // 8}")
    return RankHolding(b"", host, None, f"process {rank}", 100, others, 0, 0, opens_generation=False, staged=[])


def test_ranks_of_thousands_of_hosts_are_not_compared_with_one_another() -> None:
    holdings, ranks = [holding(rank, []) for rank in range(1024)], SimpleNamespace(global_ranks=range(1024))
    refuse_other_jobs(holdings, ranks, "path")  # type: ignore[arg-type]
    assert CountedHost.num_comparisons <= 2 * len(holdings)


def test_another_job_on_a_host_is_named_by_the_first_rank_there() -> None:
    holdings = [holding(rank, [("old", 1)] if rank == 13 else []) for rank in range(16)]
    ranks = SimpleNamespace(global_ranks=range(100, 116))
    with pytest.raises(CheckpointSaveError, match="on the host of rank 108 hold") as caught:
        refuse_other_jobs(holdings, ranks, "path")  # type: ignore[arg-type]
    assert caught.value.kind == "superseded"
