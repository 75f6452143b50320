"""Formats the results of the save benchmark as Markdown: tables by workload, and the targets with what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from saves.registry import CANDIDATES
from saves.targets import DCP, DCP_ASYNC, LIMIT, MEMCPY, outcomes
from shared.comparison import against_lines
from shared.machine import facts_line
from shared.results import Results, Row
from shared.tables import noted, spread, table, times
from shared.targets import target_lines
from shared.workloads import WORKLOADS


def report(results: Results) -> Iterator[str]:
    yield facts_line(results.machine)
    yield ""
    yield "Seconds: median (minimum - maximum). `x` are ratios of medians."
    for name in results.rows:
        yield from workload_lines(results, name)
    yield from against_lines(results, lambda name: ("durable",) if name == "bcp" else ("durable", "stall", "lost"))
    yield from target_lines(outcomes(results))


def workload_lines(results: Results, name: str) -> Iterator[str]:
    workload, rows = WORKLOADS[name], results.rows[name]
    yield f"\n### {name}: {workload.title}"
    yield f"\n{results.state_bytes[name] / 1e9:.2f} GB, {results.settings['rounds']} rounds.\n"
    yield from table(
        ("saves and waits", "durable, s", "x DCP", "x limit", "memory beyond the state"),
        [sync_cells(results, name, each) for each in rows if CANDIDATES[each].kind != "async"],
    )
    if any(CANDIDATES[each].kind == "async" for each in rows):
        yield ""
        yield from table(
            (
                "saves beside training",
                "stall, s",
                "x DCP default",
                "x memcpy",
                "wait before the step, s",
                "durable, s",
                "x limit",
                "training lost, s",
                "x DCP default",
                "memory beyond the state",
            ),
            [async_cells(results, name, each) for each in rows if CANDIDATES[each].kind == "async"],
        )
    yield from balance_lines(rows)


def sync_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CANDIDATES[name].title, row.skipped or "", "", "", ""]
    return [
        CANDIDATES[name].title + noted(row),
        spread(row.values("durable")),
        times(results.ratio(workload, "durable", name, DCP.candidates)),
        times(results.ratio(workload, "durable", name, LIMIT.candidates)),
        memory(row),
    ]


def async_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CANDIDATES[name].title, row.skipped or "", *[""] * 8]
    return [
        CANDIDATES[name].title + noted(row),
        spread(row.values("stall")),
        times(results.ratio(workload, "stall", name, DCP_ASYNC.candidates)),
        times(results.ratio(workload, "stall", name, MEMCPY.candidates)),
        spread(row.values("staged")),
        spread(row.values("durable")),
        times(results.ratio(workload, "durable", name, LIMIT.candidates)),
        spread(row.values("lost")),
        times(results.ratio(workload, "lost", name, DCP_ASYNC.candidates)),
        memory(row),
    ]


def balance_lines(rows: dict[str, Row]) -> Iterator[str]:
    spreads = {name: row.spread for name, row in rows.items() if row.spread is not None}
    if spreads:
        yield ""
        yield from table(
            ("bytes per rank, MB", "by rank", "largest less smallest, of the mean"),
            [[CANDIDATES[name].title, megabytes(rows[name]), f"{value:.1%}"] for name, value in spreads.items()],
        )


def memory(row: Row) -> str:
    return "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f} MB"


def megabytes(row: Row) -> str:
    return ", ".join(f"{num_bytes / 1e6:.0f}" for num_bytes in row.bytes_by_rank or [])
