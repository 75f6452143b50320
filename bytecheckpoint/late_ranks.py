"""What the coordinator says of a rank that is not done in time: how long its bytes take at the rate of those that were,
so that a slow storage is told from a rank that is stuck. It knows plans, and neither stores nor messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.planner.save_plan import SavePlan
from bytecheckpoint.ranks import Ranks
from bytecheckpoint.storage.pace import describe_rate


@contextmanager
def telling_the_rate(ranks: Ranks, plan: SavePlan | None, write_s: float) -> Iterator[None]:
    """Within the block the coordinator, which has the plan, waits for what the others have written. It took so long
    for its own bytes.
    """
    started = time.monotonic()
    try:
        yield
    except CheckpointError as error:
        waited_s = time.monotonic() - started
        if error.kind != "rank_missing" or plan is None or not plan.num_bytes[ranks.rank]:
            raise
        message = f"{error.message}. {_rate(ranks, plan, error.ranks, write_s=write_s, waited_s=waited_s)}"
        raise type(error)(message, kind=error.kind, ranks=error.ranks) from error


def _rate(ranks: Ranks, plan: SavePlan, missing: tuple[int, ...], *, write_s: float, waited_s: float) -> str:
    own_bytes = plan.num_bytes[ranks.rank]
    most_bytes, slowest = max((plan.num_bytes[ranks.names.index(name)], name) for name in missing)
    return (
        f"Rank {ranks.names[ranks.rank]} wrote its {own_bytes / 1e6:,.1f} MB in {write_s:,.1f} s, "
        f"{describe_rate(own_bytes, write_s)}, at which the {most_bytes / 1e6:,.1f} MB of rank {slowest} take "
        f"{most_bytes * write_s / own_bytes:,.1f} s; {write_s + waited_s:,.1f} s had gone by"
    )
