"""The results of benchmarks/load.py as Markdown: tables by workload, and the targets beside what was reached."""

from __future__ import annotations

from collections.abc import Iterator

from load_catalogue import CONTESTANTS, SLOW, WORKLOADS, Workload
from load_targets import CHECKED_LIMITS, DCP, Outcome, of_state, outcomes
from report_tables import noted, spread, table, times
from results import Results, Row


def report(results: Results) -> str:
    parts = [*heading(results), *(line for name in results.rows for line in workload_lines(results, WORKLOADS[name]))]
    return "\n".join([*parts, *target_lines(results)])


def heading(results: Results) -> Iterator[str]:
    yield ", ".join(f"{key} {value}" for key, value in results.machine.items())
    yield ""
    yield f"Cold: {results.settings['cold']}."
    yield f"A slow store: {SLOW['latency_s'] * 1e3:.0f} ms and {SLOW['bytes_per_s'] / 1e6:.0f} MB/s for each request."
    yield "Seconds: median (minimum - maximum), the slowest rank's. `x` are ratios of medians."


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
        return [CONTESTANTS[name].title, row.skipped or "", *[""] * 7]
    return [
        CONTESTANTS[name].title + noted(row),
        *seconds_cells(results, workload, name, "warm"),
        *seconds_cells(results, workload, name, "cold"),
        times(of_state(results, workload, name, "warm called_bytes")),
        times(of_state(results, workload, name, "cold disk_bytes")),
    ]


def seconds_cells(results: Results, workload: str, name: str, condition: str) -> list[str]:
    row: Row = results.rows[workload][name]
    return [
        spread(row.values(condition)),
        times(results.ratio(workload, condition, name, DCP.contestants)),
        times(results.ratio(workload, condition, name, CHECKED_LIMITS)),
    ]


def slow_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CONTESTANTS[name].title, row.skipped or "", *[""] * 3]
    return [
        CONTESTANTS[name].title + noted(row),
        spread(row.values("slow")),
        times(results.ratio(workload, "slow", name, DCP.contestants)),
        times(of_state(results, workload, name, "slow called_bytes")),
        f"{row.median('slow requests'):.0f}",
    ]


def target_lines(results: Results) -> Iterator[str]:
    yield "\n### Targets\n"
    yield from table(
        ("workload", "what", "against", "at most", "measured", "reached"),
        [
            [one.workload, one.what, one.against, times(one.at_most), times(one.measured), reached(one)]
            for one in outcomes(results)
        ],
    )


def reached(outcome: Outcome) -> str:
    return "yes" if outcome.measured <= outcome.at_most else "no"
