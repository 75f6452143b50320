"""Formats the results of the load benchmark as Markdown: tables by workload, and the targets with what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from loads.registry import CANDIDATES
from loads.targets import CHECKED_LIMITS, DCP, of_state, outcomes
from shared.comparison import against_lines
from shared.machine import facts_line
from shared.results import Results, Row
from shared.tables import noted, spread, table, times
from shared.targets import target_lines
from shared.workloads import SLOW, WORKLOADS, Workload


def report(results: Results) -> Iterator[str]:
    yield facts_line(results.machine)
    yield ""
    yield f"Cold: {results.settings['cold']}."
    yield f"A slow store: {SLOW['latency_s'] * 1e3:.0f} ms and {SLOW['bytes_per_s'] / 1e6:.0f} MB/s for each request."
    yield "Seconds: median (minimum - maximum), the slowest rank's. `x` are ratios of medians."
    for name in results.rows:
        yield from workload_lines(results, WORKLOADS[name])
    yield from against_lines(results, lambda _: ("warm", "cold", "slow"))
    yield from target_lines(outcomes(results))


def workload_lines(results: Results, workload: Workload) -> Iterator[str]:
    rows = results.rows[workload.name]
    yield f"\n### {workload.name}: {workload.title}"
    yield f"\n{results.state_bytes[workload.name] / 1e9:.3f} GB, {results.settings['rounds']} rounds.\n"
    if workload.storage == "slow":
        titles = ["loads", "s", "x DCP", "read, x state", "requests"]
        yield from table(titles, [slow_cells(results, workload.name, each) for each in rows])
        return
    titles = [
        "loads",
        *(f"{condition}{title}" for condition in ("warm", "cold") for title in (", s", " x DCP", " x limit, xxh3")),
        "read by calls, x state",
        "from disk when cold, x state",
    ]
    yield from table(titles, [disk_cells(results, workload.name, each) for each in rows])


def disk_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CANDIDATES[name].title, row.skipped or "", *[""] * 7]
    return [
        CANDIDATES[name].title + noted(row),
        *seconds_cells(results, workload, name, "warm"),
        *seconds_cells(results, workload, name, "cold"),
        times(of_state(results, workload, name, "warm called_bytes")),
        times(of_state(results, workload, name, "cold disk_bytes")),
    ]


def seconds_cells(results: Results, workload: str, name: str, condition: str) -> list[str]:
    row: Row = results.rows[workload][name]
    return [
        spread(row.values(condition)),
        times(results.ratio(workload, condition, name, DCP.candidates)),
        times(results.ratio(workload, condition, name, CHECKED_LIMITS)),
    ]


def slow_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CANDIDATES[name].title, row.skipped or "", *[""] * 3]
    return [
        CANDIDATES[name].title + noted(row),
        spread(row.values("slow")),
        times(results.ratio(workload, "slow", name, DCP.candidates)),
        times(of_state(results, workload, name, "slow called_bytes")),
        f"{row.median('slow requests'):.0f}",
    ]
