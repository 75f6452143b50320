"""Loads of replicated and hybrid-sharded states whose ranks pass on what they read: bytes over sockets between hosts
and within them, connections, and time, beside another checkout of the library.

    python benchmarks/run.py exchange --against PATH          4 and 8 ranks on one host and on two
    python benchmarks/run.py exchange --ranks 4 --mib 16

All ranks are on this machine and take one another for processes of one or two hosts, by the label of their kernel. The
checkpoint is a folder in the page cache, with `exchange="on"`. HSDP has two replicas, one a host where there are two.
Checkouts alternate; every load is compared with what was saved. The first load of each is not counted.

"x state" are bytes by those of the state; connections are those of the rank with most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shared.comparison import add_against
from shared.machine import facts_line, machine_facts
from shared.process_pool import ProcessPool
from shared.tables import spread, table

LAYOUTS = ("DDP", "HSDP")
TITLES = ["layout", "ranks", "hosts", "library", "load, s", "between hosts, x state", "within hosts, x state"]
TITLES += ["connections", "x against, by round"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--mib", type=float, default=256.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    add_against(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints a table."""
    with tempfile.TemporaryDirectory() as folder:
        print(facts_line(machine_facts(Path(folder))))
    print()
    for line in table(TITLES, []):
        print(line, flush=True)
    for ranks in arguments.ranks:
        for layout in arguments.layouts:
            for hosts in arguments.hosts:
                for cells in measure(layout, ranks, hosts, arguments):
                    print(f"| {' | '.join(cells)} |", flush=True)


def measure(layout: str, ranks: int, hosts: int, arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yields the rows of both checkouts, which alternate."""
    setting = {"layout": layout, "ranks": ranks, "hosts": hosts, "mib": arguments.mib}
    checkouts = {"this": None, **({"against": arguments.against.resolve()} if arguments.against else {})}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pools = {name: stack.enter_context(_pool(setting, ranks, checkout)) for name, checkout in checkouts.items()}
        rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in pools}
        pools["this"].run(task="save", folder=folder)
        for number in range(arguments.rounds + 1):
            for name, pool in [*pools.items()][:: 1 if number % 2 else -1]:
                rounds[name].append(pool.run(task="load", folder=folder))
        state_bytes = pools["this"].facts[0]["state_bytes"]
    seconds = {name: [max(rank["seconds"] for rank in each) for each in rounds[name][1:]] for name in rounds}
    for name, each in rounds.items():
        between, within = (sum(rank[kind] for rank in each[-1]) / state_bytes for kind in ("between", "within"))
        connections = max(rank["connections"] for rank in each[-1])
        ratio = ""
        if name == "this" and "against" in seconds:
            ratios = [own / other for own, other in zip(seconds["this"], seconds["against"], strict=True)]
            ratio = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} - {max(ratios):.2f})"
        counts = [f"{between:.3f}", f"{within:.3f}", str(connections), ratio]
        yield [layout, str(ranks), str(hosts), name, spread(seconds[name]), *counts]


def _pool(setting: dict[str, Any], ranks: int, checkout: Path | None) -> ProcessPool:
    return ProcessPool(
        "exchanged.worker", setting, num_ranks=ranks, timeout_s=300.0, python=sys.executable, checkout=checkout
    )
