"""What bytecheckpoint sets out to reach when it loads, as ratios within one run, and what a run of benchmarks/load.py
says of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from results import Results

OURS = "bcp"
CHECKED_LIMITS = ("checked-2", "checked-8")


class Against(NamedTuple):
    """What is compared with: the best of these contestants, or the bytes of the state."""

    title: str
    contestants: tuple[str, ...] | None


DCP = Against("DCP", ("dcp",))
CHECKED = Against("preadv into place, xxh3", CHECKED_LIMITS)
STATE = Against("the state", None)

TARGETS: tuple[tuple[str, str, Against, float], ...] = (
    ("W1", "warm", DCP, 0.38),
    ("W1", "cold", DCP, 0.50),
    ("W1", "warm", CHECKED, 1.3),
    ("W1", "cold", CHECKED, 1.3),
    ("W2", "warm", DCP, 0.35),
    ("W2", "warm", CHECKED, 1.3),
    ("W3", "warm", DCP, 0.05),
    ("W3", "cold", DCP, 0.05),
    ("4to8", "warm", DCP, 0.35),
    ("4to8", "warm called_bytes", DCP, 0.5),
    ("4to8", "warm called_bytes", STATE, 1.02),
    ("tp-fsdp", "warm", DCP, 0.5),
    ("tp-fsdp", "warm called_bytes", DCP, 0.66),
    ("tp-fsdp", "warm called_bytes", STATE, 1.05),
    ("slow-ddp", "slow", DCP, 0.3),
    ("slow-ddp", "slow called_bytes", STATE, 1.05),
    ("slow-columns", "slow", DCP, 0.3),
    ("slow-columns", "slow called_bytes", STATE, 1.05),
    ("slice", "warm", DCP, 0.15),
    ("slice", "cold", DCP, 0.15),
)
"""Workload, what is measured, against what, and how much of that it may be."""


class Outcome(NamedTuple):
    """A target, and what a run says of it."""

    workload: str
    what: str
    against: str
    at_most: float
    measured: float


def outcomes(results: Results) -> Iterator[Outcome]:
    """Of all targets for which the run has both sides."""
    for workload, measure, against, at_most in TARGETS:
        if against.contestants is None:
            ratio = of_state(results, workload, OURS, measure)
        else:
            ratio = results.ratio(workload, measure, OURS, against.contestants)
        if ratio is not None:
            yield Outcome(workload, measure.replace("called_bytes", "bytes read"), against.title, at_most, ratio)


def of_state(results: Results, workload: str, contestant: str, measure: str) -> float | None:
    """Bytes by those of the state, which are those that are wanted, once."""
    num_bytes = results.median(workload, contestant, measure)
    return None if num_bytes is None else num_bytes / results.state_bytes[workload]
