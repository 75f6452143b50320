"""The results of benchmarks/save.py as Markdown: tables by workload, and the targets beside what was reached."""

from __future__ import annotations

from collections.abc import Iterator

from report_tables import noted, spread, table, times
from results import Results, Row
from save_catalogue import CONTESTANTS, WORKLOADS
from save_targets import DCP, DCP_ASYNC, LIMIT, MEMCPY, Outcome, outcomes


def report(results: Results) -> str:
    parts = [*machine_lines(results), *(line for name in results.rows for line in workload_lines(results, name))]
    return "\n".join([*parts, *target_lines(results)])


def machine_lines(results: Results) -> Iterator[str]:
    yield ", ".join(f"{key} {value}" for key, value in results.machine.items())
    yield ""
    yield "Seconds: median (minimum - maximum). `x` are ratios of medians."


def workload_lines(results: Results, name: str) -> Iterator[str]:
    workload, rows = WORKLOADS[name], results.rows[name]
    yield f"\n### {name}: {workload.title}"
    yield f"\n{results.state_bytes[name] / 1e9:.2f} GB, {results.settings['rounds']} rounds.\n"
    yield from table(
        ("saves and waits", "durable, s", "x DCP", "x limit", "memory beyond the state"),
        [sync_cells(results, name, each) for each in rows if CONTESTANTS[each].kind != "async"],
    )
    if any(CONTESTANTS[each].kind == "async" for each in rows):
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
            [async_cells(results, name, each) for each in rows if CONTESTANTS[each].kind == "async"],
        )
    yield from balance_lines(rows)


def sync_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CONTESTANTS[name].title, row.skipped or "", "", "", ""]
    return [
        CONTESTANTS[name].title + noted(row),
        spread(row.values("durable")),
        times(results.ratio(workload, "durable", name, DCP.contestants)),
        times(results.ratio(workload, "durable", name, LIMIT.contestants)),
        memory(row),
    ]


def async_cells(results: Results, workload: str, name: str) -> list[str]:
    row = results.rows[workload][name]
    if not row.rounds:
        return [CONTESTANTS[name].title, row.skipped or "", *[""] * 8]
    return [
        CONTESTANTS[name].title + noted(row),
        spread(row.values("stall")),
        times(results.ratio(workload, "stall", name, DCP_ASYNC.contestants)),
        times(results.ratio(workload, "stall", name, MEMCPY.contestants)),
        spread(row.values("staged")),
        spread(row.values("durable")),
        times(results.ratio(workload, "durable", name, LIMIT.contestants)),
        spread(row.values("lost")),
        times(results.ratio(workload, "lost", name, DCP_ASYNC.contestants)),
        memory(row),
    ]


def balance_lines(rows: dict[str, Row]) -> Iterator[str]:
    spreads = {name: row.spread for name, row in rows.items() if row.spread is not None}
    if spreads:
        yield ""
        yield from table(
            ("bytes per rank, MB", "by rank", "largest less smallest, of the mean"),
            [[CONTESTANTS[name].title, megabytes(rows[name]), f"{value:.1%}"] for name, value in spreads.items()],
        )


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


def memory(row: Row) -> str:
    return "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f} MB"


def megabytes(row: Row) -> str:
    return ", ".join(f"{num_bytes / 1e6:.0f}" for num_bytes in row.bytes_by_rank or [])
