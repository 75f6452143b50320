"""Targets of bytecheckpoint's saves, as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterator

from saves.registry import CANDIDATES
from shared.results import Results
from shared.targets import Against, Outcome

DCP = Against("DCP, sync", ("dcp",))
DCP_ASYNC = Against("DCP, default async", ("dcp-async",))
DCP_BEST = Against("DCP, its best async", ("dcp-async", "dcp-cached", "dcp-process"))
LIMIT = Against("O_DIRECT + fsync", ("limit",))
MEMCPY = Against("memcpy into warm memory", ("memcpy",))

MEASURES = {"durable": "durable", "stall": "stall", "lost": "training lost"}
MODES = ("bcp-copy", "bcp-lazy")
BIG, SMALL = ("W1", "W2"), ("W3", "W3x4")
MANY = ("W3", "W3x10")
LAZY_STALL_S = {"W3": 0.015, "W3x10": 0.15}
"""Stall of a lazy save, at most."""

RATIOS: tuple[tuple[tuple[str, ...], str, tuple[str, ...], Against, float], ...] = (
    (("W1",), "durable", ("bcp",), DCP, 0.45),
    (("W1",), "durable", ("bcp",), LIMIT, 1.25),
    (("W2",), "durable", ("bcp",), DCP, 0.30),
    (("W2",), "durable", ("bcp",), LIMIT, 1.3),
    (("W3",), "durable", ("bcp",), DCP, 0.10),
    (("W3x4",), "durable", ("bcp",), DCP, 0.06),
    (SMALL, "durable", ("bcp",), LIMIT, 1.5),
    (("W4",), "durable", ("bcp",), DCP, 0.75),
    (("W4",), "durable", ("bcp",), LIMIT, 1.3),
    (BIG, "stall", ("bcp-copy",), DCP_ASYNC, 0.08),
    (BIG, "stall", ("bcp-copy",), DCP_BEST, 0.4),
    (BIG, "stall", ("bcp-copy",), MEMCPY, 1.3),
    (MANY, "stall", ("bcp-copy",), MEMCPY, 1.3),
    (BIG, "stall", ("bcp-lazy",), DCP_ASYNC, 1 / 54),
    (BIG, "lost", MODES, DCP_ASYNC, 0.10),
    (BIG, "lost", MODES, DCP_BEST, 0.4),
    (SMALL, "lost", MODES, DCP_ASYNC, 0.05),
    ((*BIG, *SMALL, "W4"), "durable", MODES, DCP_BEST, 0.5),
)
"""Workloads, measure, candidates, the other side, and the largest ratio."""

SYNC_MEMORY_BYTES = 256_000_000
MEMORY = (("bcp-copy", 1.05),)
"""Memory of an asynchronous save beyond the state, at most, as a part of the state."""
SPREAD = 0.02
"""Difference of the ranks' bytes, at most, where all hold the same, as a part of their mean."""


def outcomes(results: Results) -> Iterator[Outcome]:
    """Yields all targets for which the run has both sides."""
    for workloads, measure, names, against, at_most in RATIOS:
        for workload, name in ((workload, name) for workload in workloads for name in names):
            ratio = results.ratio(workload, measure, name, against.candidates)
            if ratio is not None:
                yield Outcome(workload, _what(measure, name), against.title, at_most, ratio)
    for workload in results.rows:
        yield from _other_outcomes(results, workload)


def _other_outcomes(results: Results, workload: str) -> Iterator[Outcome]:
    rows = results.rows[workload]
    stall = results.median(workload, "bcp-lazy", "stall") if "bcp-lazy" in rows else None
    if workload in LAZY_STALL_S and stall is not None:
        limit_s = LAZY_STALL_S[workload]
        yield Outcome(workload, _what("stall", "bcp-lazy"), f"{limit_s:g} s", 1.0, stall / limit_s)
    memory = {name: row.memory_bytes for name, row in rows.items() if row.memory_bytes is not None}
    if "bcp" in memory:
        yield Outcome(workload, _what("memory", "bcp"), "256 MB", 1.0, memory["bcp"] / SYNC_MEMORY_BYTES)
    for name, at_most in MEMORY:
        if name in memory:
            ratio = memory[name] / results.state_bytes[workload]
            yield Outcome(workload, _what("memory", name), "the state", at_most, ratio)
    if workload == "W4" and "bcp" in rows and (spread := rows["bcp"].spread) is not None:
        yield Outcome(workload, _what("spread of bytes over ranks", "bcp"), "their mean", SPREAD, spread)


def _what(measure: str, name: str) -> str:
    return f"{MEASURES.get(measure, measure)}: {CANDIDATES[name].title}"
