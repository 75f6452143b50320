"""Targets of bytecheckpoint's loads, as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterator

from shared.results import Results
from shared.targets import Against, Outcome

OURS = "bcp"
CHECKED_LIMITS = ("checked-2", "checked-8")


DCP = Against("DCP", ("dcp",))
CHECKED = Against("preadv into place, xxh3", CHECKED_LIMITS)
STATE = Against("the state", ())

TARGETS: tuple[tuple[str, str, Against, float], ...] = (
    ("W1", "warm", DCP, 0.38),
    ("W1", "cold", DCP, 0.50),
    ("W1", "warm", CHECKED, 1.3),
    ("W1", "cold", CHECKED, 1.3),
    ("W2", "warm", DCP, 0.35),
    ("W2", "warm", CHECKED, 1.3),
    ("W3", "warm", DCP, 0.05),
    ("W3", "cold", DCP, 0.05),
    ("W3", "warm", CHECKED, 2.7),
    ("W3x10", "warm", CHECKED, 2.7),
    ("4to8", "warm", DCP, 0.35),
    ("4to8", "warm", CHECKED, 1.35),
    ("4to8", "warm called_bytes", DCP, 0.5),
    ("4to8", "warm called_bytes", STATE, 1.02),
    ("tp-fsdp", "warm", DCP, 0.5),
    ("tp-fsdp", "warm", CHECKED, 1.35),
    ("tp-fsdp", "warm called_bytes", DCP, 0.66),
    ("tp-fsdp", "warm called_bytes", STATE, 1.05),
    ("slow-ddp", "slow", DCP, 0.3),
    ("slow-ddp", "slow called_bytes", STATE, 1.05),
    ("slow-columns", "slow", DCP, 0.3),
    ("slow-columns", "slow called_bytes", STATE, 1.05),
    ("slice", "warm", DCP, 0.15),
    ("slice", "cold", DCP, 0.15),
)
"""Workload, measure, the other side, and the largest ratio."""


def outcomes(results: Results) -> Iterator[Outcome]:
    """Yields all targets for which the run has both sides."""
    for workload, measure, against, at_most in TARGETS:
        if not against.candidates:
            ratio = of_state(results, workload, OURS, measure)
        else:
            ratio = results.ratio(workload, measure, OURS, against.candidates)
        if ratio is not None:
            yield Outcome(workload, measure.replace("called_bytes", "bytes read"), against.title, at_most, ratio)


def of_state(results: Results, workload: str, candidate: str, measure: str) -> float | None:
    """Returns bytes by those of the state."""
    num_bytes = results.median(workload, candidate, measure)
    return None if num_bytes is None else num_bytes / results.state_bytes[workload]
