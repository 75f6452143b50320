"""Runs a benchmark of candidates on workloads: its options, the loop over workloads, and where the figures go."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.machine import machine_facts
from shared.results import Results, Row, read_results
from shared.rounds import AGAINST, Settings
from shared.tables import table
from shared.workloads import Workload

Measure = Callable[[Workload, list[str], Settings], tuple[dict[str, Row], int]]
"""Measures candidates, given by name, on a workload; returns their rows and the bytes of the state."""


def add_arguments(
    parser: argparse.ArgumentParser, workloads: Collection[str], candidates: Collection[str], *, rounds: int
) -> None:
    plain = [name for name in candidates if not name.endswith(AGAINST)]
    parser.add_argument("--workloads", nargs="+", default=list(workloads), choices=list(workloads))
    parser.add_argument("--candidates", nargs="+", default=plain, choices=plain)
    parser.add_argument("--size", type=float, default=1.0, help="1.0 is the full size of every state")
    parser.add_argument("--rounds", type=int, default=rounds, help="counted rounds")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder if not given")
    parser.add_argument("--peers", metavar="PYTHON", help="the Python that has torchsnapshot and ByteCheckpoint")
    add_against(parser)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a save or load has failed")
    parser.add_argument("--json", type=Path, help="write all figures there, after every workload")
    parser.add_argument("--resume", action="store_true", help="keep what the file of --json has, measure the rest")
    parser.add_argument("--markdown", type=Path, help="write the tables there as well")
    parser.add_argument("--read", type=Path, help="take the figures from a file that --json has written")


def add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout of this library, as one more candidate"
    )


def run(
    arguments: argparse.Namespace,
    workloads: Mapping[str, Workload],
    measure: Measure,
    report: Callable[[Results], Iterator[str]],
    **settings: Any,
) -> Results:
    """Measures, or reads what an earlier run has measured, and prints the report. `settings` go into the results."""
    if arguments.resume and arguments.json is None:
        sys.exit("--resume goes with --json")
    results = read_results(arguments.read) if arguments.read else _measured(arguments, workloads, measure, settings)
    text = "\n".join([*report(results)])
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text + "\n")
    return results


def _measured(
    arguments: argparse.Namespace, workloads: Mapping[str, Workload], measure: Measure, more: dict[str, Any]
) -> Results:
    results = _earlier_or_empty(arguments, {"size": arguments.size, "rounds": arguments.rounds, **more})
    names = list(arguments.candidates)
    if arguments.against is not None:
        names += [name + AGAINST for name in names if name.startswith("bcp")]
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    settings = Settings(
        size=arguments.size,
        rounds=arguments.rounds,
        folder=folder,
        peers_python=arguments.peers,
        against=arguments.against and arguments.against.resolve(strict=True),
        timeout_s=arguments.timeout,
        drops_all=getattr(arguments, "drop_all", False),
    )
    try:
        for name in arguments.workloads:
            if name in results.rows:
                continue
            print(f"{name}: {workloads[name].title}", file=sys.stderr, flush=True)
            started = time.monotonic()
            results.rows[name], results.state_bytes[name] = measure(workloads[name], names, settings)
            print(f"  {time.monotonic() - started:.0f} s in all", file=sys.stderr, flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(dataclasses.asdict(results), indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def _earlier_or_empty(arguments: argparse.Namespace, settings: dict[str, Any]) -> Results:
    if arguments.resume and arguments.json.exists():
        earlier = read_results(arguments.json)
        if earlier.settings != settings:
            sys.exit(f"{arguments.json} was measured with {earlier.settings}, not with {settings}: name another file")
        return earlier
    return Results(machine_facts(arguments.folder or Path(tempfile.gettempdir())), settings)


def against_lines(results: Results, measures: Callable[[str], Sequence[str]]) -> Iterator[str]:
    """Compares the library with that of --against, where a run has both. `measures` is by candidate."""
    cells: list[list[str]] = []
    for workload, rows in results.rows.items():
        for name in [name for name in rows if name + AGAINST in rows]:
            if rows[name].rounds and rows[name + AGAINST].rounds:
                found = [measure for measure in measures(name) if measure in rows[name].rounds[0]]
                cells += [_against_cells(results, workload, measure, name) for measure in found]
    if cells:
        yield "\n### Against the other checkout\n"
        yield from table(("workload", "candidate", "measure", "this, s", "that, s", "ratio", "by round"), cells)


def _against_cells(results: Results, workload: str, measure: str, name: str) -> list[str]:
    ratios = results.paired(workload, measure, name, name + AGAINST)
    medians = [results.median(workload, each, measure) or 0.0 for each in (name, name + AGAINST)]
    ratio = f"{medians[0] / medians[1]:.3f}x" if medians[1] else ""
    by_round = f"{min(ratios):.3f}x - {max(ratios):.3f}x" if ratios else ""
    return [workload, name, measure, *(f"{seconds:.4f}" for seconds in medians), ratio, by_round]
