"""Adds to the error about a missing rank how long its bytes take at the coordinator's rate, to tell slow storage from a
stuck rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.errors import CheckpointError, describe_rate
from bytecheckpoint.planner.save_plan import SavePlan


@contextmanager
def report_straggler_rate(
    ranks: Ranks, plan: SavePlan | None, write_s: float, *, did: str = "wrote", is_all: bool = True
) -> Iterator[None]:
    """Runs a block in which the coordinator waits for the other ranks. To an error about missing ones, adds the time
    that their bytes take at the rate of the coordinator, which moved its bytes of the `plan` in `write_s`. `did` is the
    verb for that.

    The error stays unchanged without a `plan`, if the coordinator has no bytes in it, or if it did not move all of them
    (`is_all` is False).
    """
    started = time.monotonic()
    try:
        yield
    except CheckpointError as error:
        waited_s = time.monotonic() - started
        others = {name for name in ranks.global_ranks if name != ranks.global_ranks[ranks.rank]}
        is_late = error.kind == "rank_missing" and bool(error.ranks) and others.issuperset(error.ranks)
        if not is_late or plan is None or not is_all or not plan.num_bytes[ranks.rank]:
            raise
        rate = _rate(ranks, plan, error.ranks, did=did, write_s=write_s, waited_s=waited_s)
        message = f"{error.message}. {rate}"
        raise type(error)(message, kind=error.kind, ranks=error.ranks) from error


def _rate(ranks: Ranks, plan: SavePlan, missing: tuple[int, ...], *, did: str, write_s: float, waited_s: float) -> str:
    own_bytes = plan.num_bytes[ranks.rank]
    most_bytes, slowest = max((plan.num_bytes[ranks.global_ranks.index(name)], name) for name in missing)
    return (
        f"Rank {ranks.global_ranks[ranks.rank]} {did} its {own_bytes / 1e6:,.1f} MB of values in {write_s:,.1f} s, "
        f"{describe_rate(own_bytes, write_s)}, at which the {most_bytes / 1e6:,.1f} MB of rank {slowest} take "
        f"{most_bytes * write_s / own_bytes:,.1f} s; {write_s + waited_s:,.1f} s had gone by"
    )
