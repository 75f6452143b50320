"""What goes wrong between a save or a load and its object store, drawn from a seed. It knows neither."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from faults.fault_proxy import AT_ONCE, FOR_GOOD, Fault, Pace

SAVE_REQUESTS = ("any", "any", "data", "data", "manifest", "manifest", "telemetry", "head", "list", "delete")
PART_REQUESTS = (*SAVE_REQUESTS, "create", "create", "data", "complete", "complete", "abort")
LOAD_REQUESTS = ("any", "get", "get", "get", "head", "list", "list")

ENDINGS = ("reset", "refuse", "cut_request", "cut_answer", "cut_answer")
"""Of a request, which the client notices at once."""
STALLS = ("stall_request", "stall_answer", "late")
"""Which the client notices after a while."""


def stalls(faults: Sequence[Fault]) -> bool:
    """Whether one of them is such that the client has to give up a request."""
    return any(fault.kind in STALLS for fault in faults)


class Schedule(NamedTuple):
    """A save and a load, and what they meet with."""

    seed: int
    num_ranks: int
    is_async: bool
    overwrites: bool
    """Whether the save replaces the checkpoint that is there, in place of a step of its own."""
    in_parts: bool
    """Whether data is uploaded in parts."""
    pace: Pace
    save_faults: tuple[Fault, ...]
    load_faults: tuple[Fault, ...]

    @property
    def timeout_s(self) -> float:
        """Of the save and the load; a request is tried for half of it. Several ranks wait for one another."""
        return 6.0 if self.num_ranks == 1 else 30.0

    @property
    def is_for_good(self) -> bool:
        """Whether the server stays out of reach of the save."""
        return any(fault.count == FOR_GOOD for fault in self.save_faults)

    @property
    def takes_long(self) -> bool:
        """Whether somebody waits in vain for as long as may be."""
        faults = (*self.save_faults, *self.load_faults)
        return any(fault.count == FOR_GOOD for fault in faults) or sum(fault.kind in STALLS for fault in faults) > 1


def draw_schedule(seed: int) -> Schedule:
    """The same for the same seed."""
    rng = random.Random(seed)
    in_parts = rng.random() < 0.3
    return Schedule(
        seed=seed,
        num_ranks=2 if rng.random() < 0.25 else 1,
        is_async=rng.random() < 0.4,
        overwrites=rng.random() < 0.3,
        in_parts=in_parts,
        pace=_draw_pace(rng),
        save_faults=_draw_faults(rng, PART_REQUESTS if in_parts else SAVE_REQUESTS),
        load_faults=_draw_faults(rng, LOAD_REQUESTS),
    )


def _draw_pace(rng: random.Random) -> Pace:
    if rng.random() < 0.7:
        return AT_ONCE
    return Pace(latency_s=rng.choice((0.001, 0.01)), bytes_per_s=rng.choice((5e6, 50e6)))


def _draw_faults(rng: random.Random, sorts: tuple[str, ...]) -> tuple[Fault, ...]:
    faults = [_draw_fault(rng, sorts, may_stall=number == 0) for number in range(rng.choice((1, 1, 2, 2, 3, 5)))]
    if rng.random() < 0.12:
        faults[-1] = faults[-1]._replace(kind=rng.choice(("reset", "refuse")), count=FOR_GOOD)
    return tuple(faults)


def _draw_fault(rng: random.Random, sorts: tuple[str, ...], *, may_stall: bool) -> Fault:
    stalls = may_stall and rng.random() < 0.25
    where = rng.choice(sorts)
    # Of all requests only the one that completes an upload may fail after it has been answered with 200.
    endings = (*ENDINGS, "error_within") if where == "complete" else ENDINGS
    return Fault(
        kind=rng.choice(STALLS if stalls else endings),
        where=where,
        first=rng.randint(1, 12) if where == "any" else rng.choice((1, 1, 1, 2, 3)),
        count=1 if stalls else rng.choice((1, 1, 1, 2, 3)),
        num_bytes=rng.choice((0, 0, rng.randint(1, 400), rng.randint(1, 1 << 20))),
        is_reset=rng.random() < 0.5,
    )
