"""Costs of saves and loads by the number of ranks: processor time of a rank, bytes read, files opened,
connections and threads, for tensors so small that what does not shrink with the shards decides.

    python benchmarks/run.py ranks                                 8, 16, 32 and 64 ranks; DCP up to 16
    python benchmarks/run.py ranks --ranks 8 64 --states dict --libraries bcp
    python benchmarks/run.py ranks --assign 1024 2048           also the coordinator's part of an exchange, alone
    python benchmarks/run.py ranks --states                      only what waiting for a late rank takes
    python benchmarks/run.py ranks --states --late 0 --assign 8192 --files 8192    only parts of one of 8,192 ranks
    python benchmarks/run.py ranks --json r.json --markdown r.md

One process imports torch and starts no thread; the ranks are forked from it, and apart from them a process with the
TCPStore server. All ranks begin a call at one moment; a call ends with the last of them. N ranks share the machine's
cores, so wall time says little: compare the other columns. Each rank holds the same bytes whatever their number is, so
these columns should not grow with it.

"read / wanted" compares all bytes read, the manifest's included, with the sum of all ranks' local bytes; those of DCP
are what /proc/self/io counts. Files are data files that a rank has opened, connections and threads those that it has
begun in the call: each is of the rank with most. What a rank sends
to the store are its messages in the call. Processor time is the mean of all ranks. Every load is compared with what was
saved. The first call of each kind is not counted.

A second table has one rank late for a meeting of all: the share of a core that the process with the store and a rank
that waits take meanwhile, and how soon the others are woken once it comes. DCP's ranks wait as they do in its planning:
for a gather and a scatter of objects.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy and torch read them at import

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked_ranks.assignment import measure_assignment
from forked_ranks.many_files import measure_files
from forked_ranks.pool import ForkedRanks
from shared.machine import facts_line, machine_facts
from shared.process_pool import PoolError
from shared.tables import table

CALLS = ("save", "load", "load, exchanged", "load on half", "load on half, exchanged")
EXCHANGED = ", exchanged"
STATES = ("dict", "objects")
LIBRARIES = {"bcp": "bytecheckpoint", "dcp": "torch DCP"}
TITLES = ["library", "ranks", "call", "wall s", "CPU ms a rank", "CPU ms rank 0", "read / wanted", "MB read"]
TITLES += ["files", "connections", "threads", "kB a rank to the store"]
WAITING_TITLES = ["library", "ranks", "store's process, % of a core", "a waiting rank, %", "the busiest, %"]
WAITING_TITLES += ["woken after, ms: first", "median", "last", "at most 5 %, 0.5 %, 30 ms"]
STORE_SHARE, RANK_SHARE, WOKEN_MS = 0.05, 0.005, 30.0
SETTLE_S = 2.0


@dataclasses.dataclass
class RankRow:
    """One call of one library on so many ranks: medians of the rounds."""

    state: str
    library: str
    ranks: int
    call: str
    wall_s: float
    cpu_ms: float
    """Processor time of a rank, the mean of all."""
    cpu_ms_rank_0: float
    wanted_bytes: int
    """Sum of the local bytes of all ranks."""
    read_bytes: int
    """Sum of the bytes read by all ranks."""
    files: int
    """Count of the rank with most, as below."""
    connections: int
    threads: int
    sent_bytes: int
    """Messages that a rank has put into the store, the mean of all but rank 0."""


@dataclasses.dataclass
class WaitingRow:
    """One rank late for so many others."""

    library: str
    ranks: int
    store: float
    """Shares of a core."""
    rank: float
    busiest: float
    first_ms: float
    """Time from the arrival of the late rank to the first that is woken."""
    median_ms: float
    last_ms: float

    @property
    def is_reached(self) -> bool:
        """True if no more is taken than may be."""
        return self.store <= STORE_SHARE and self.rank <= RANK_SHARE and self.last_ms <= WOKEN_MS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--tensors", type=int, default=200, help="weights in the state, each with what AdamW keeps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--states", nargs="*", choices=STATES, default=STATES)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--dcp-up-to", type=int, default=16, metavar="RANKS", help="more take it minutes a call")
    parser.add_argument("--late", type=float, default=5.0, metavar="S", help="for how long ranks wait for one; 0: not")
    parser.add_argument("--assign", type=int, nargs="*", default=[], metavar="RANKS", help="time the coordinator alone")
    parser.add_argument("--files", type=int, default=0, metavar="N", help="time what is done once for each of N files")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="of a call")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the tables there")


def run(arguments: argparse.Namespace) -> None:
    """Prints a table for each state."""
    lines: list[str] = []
    rows: list[RankRow] = []

    def emit(more: Iterator[str] | list[str]) -> None:
        for line in more:
            lines.append(line)
            print(line, flush=True)

    with tempfile.TemporaryDirectory() as root:
        facts = machine_facts(Path(root))
        emit([facts_line(facts)])
        for state in arguments.states:
            emit(["", f"## {state}, {arguments.tensors} weights with AdamW's state", ""])
            emit(table(TITLES, []))
            for row in measure_state(state, arguments, Path(root)):
                if isinstance(row, str):
                    emit([row])
                    continue
                rows.append(row)
                emit([table_line(row)])
    waits: list[WaitingRow] = []
    if arguments.late:
        emit(["", f"## One rank {arguments.late:g} s late: what waiting for it takes, and how soon it is noticed", ""])
        emit(table(WAITING_TITLES, []))
        for num_ranks in arguments.ranks:
            for library in arguments.libraries:
                waits.append(measure_waiting(library, num_ranks, arguments))
                emit([waiting_line(waits[-1])])
    if arguments.files:
        emit(["", "## Files of a checkpoint, on one rank", ""])
        with tempfile.TemporaryDirectory() as root:
            emit(measure_files(arguments.files, Path(root), rounds=arguments.rounds))
    if arguments.assign:
        emit(["", "## Assigning reads to ranks, on the coordinator", ""])
        emit(measure_assignment(arguments.assign))
    if arguments.json is not None:
        found = {"rows": list(map(dataclasses.asdict, rows)), "waiting": list(map(dataclasses.asdict, waits))}
        arguments.json.write_text(json.dumps({"machine": facts, **found}, indent=1))
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(lines) + "\n")


def measure_state(state: str, arguments: argparse.Namespace, root: Path) -> Iterator[RankRow | str]:
    """Yields the rows of a table, or the line of a library that failed."""
    for num_ranks in arguments.ranks:
        for library in arguments.libraries:
            name = LIBRARIES[library]
            if library == "dcp" and num_ranks > arguments.dcp_up_to:
                continue
            folder = root / f"{state}-{library}-{num_ranks}"
            try:
                yield from measure_ranks(state, library, num_ranks, folder=folder, arguments=arguments)
            except PoolError as error:
                yield f"| {name} | {num_ranks} | failed: {str(error).replace('|', '/')} |" + " |" * (len(TITLES) - 3)
            shutil.rmtree(folder, ignore_errors=True)


def measure_ranks(
    state: str, library: str, num_ranks: int, *, folder: Path, arguments: argparse.Namespace
) -> Iterator[RankRow]:
    setting = {"library": library, "state": state, "tensors": arguments.tensors, "parts": num_ranks}
    calls = [call for call in CALLS if library == "bcp" or not call.endswith(EXCHANGED)]
    halves = max(num_ranks // 2, 1)
    for here, members in ((num_ranks, calls[:1] + [c for c in calls[1:] if "half" not in c]), (halves, calls)):
        with ForkedRanks(here, {**setting, "folder": str(folder)}, timeout_s=arguments.timeout) as ranks:
            for call in members:
                if here == num_ranks or "half" in call:
                    rounds = [ranks.run(call, number) for number in range(arguments.rounds + 1)]
                    yield row_of(rounds[1:], state=state, library=LIBRARIES[library], ranks=num_ranks, call=call)


def measure_waiting(library: str, num_ranks: int, arguments: argparse.Namespace) -> WaitingRow:
    setting = {"library": library, "state": "dict", "tensors": 1, "parts": num_ranks, "folder": ""}
    waits, woken = [], []
    with ForkedRanks(num_ranks, setting, timeout_s=arguments.timeout) as ranks:
        for number in range(arguments.rounds):
            answers, waiting = ranks.run_late(number, settle_s=SETTLE_S, wait_s=arguments.late)
            *others, late = answers
            waits.append(waiting)
            woken.append(sorted((each["woken_at"] - late["came_at"]) * 1e3 for each in others))
    return WaitingRow(
        LIBRARIES[library],
        num_ranks,
        *map(statistics.median, zip(*waits, strict=True)),
        first_ms=statistics.median(each[0] for each in woken),
        median_ms=statistics.median(map(statistics.median, woken)),
        last_ms=statistics.median(each[-1] for each in woken),
    )


def waiting_line(row: WaitingRow) -> str:
    shares = [f"{share * 100:.3f}" for share in (row.store, row.rank, row.busiest)]
    times = [f"{each:.1f}" for each in (row.first_ms, row.median_ms, row.last_ms)]
    reached = "reached" if row.is_reached else "not reached"
    return f"| {' | '.join([row.library, str(row.ranks), *shares, *times, reached])} |"


def row_of(rounds: list[list[dict[str, Any]]], *, state: str, library: str, ranks: int, call: str) -> RankRow:
    """Returns the medians of what each rank measured in each round."""

    def median(measure: str, of_ranks: Any) -> float:
        return statistics.median(of_ranks([answer[measure] for answer in answers]) for answers in rounds)

    return RankRow(
        state=state,
        library=library,
        ranks=ranks,
        call=call,
        wall_s=median("wall_s", max),
        cpu_ms=median("cpu_s", statistics.mean) * 1e3,
        cpu_ms_rank_0=median("cpu_s", lambda values: values[0]) * 1e3,
        wanted_bytes=int(median("wanted_bytes", sum)),
        read_bytes=int(median("read_bytes", sum)),
        files=int(median("files", max)),
        connections=int(median("connections", max)),
        threads=int(median("threads", max)),
        sent_bytes=int(median("sent_bytes", lambda values: statistics.mean(values[1:] or [0]))),
    )


def table_line(row: RankRow) -> str:
    is_load = row.call.startswith("load")
    cells = [
        row.library,
        str(row.ranks),
        row.call,
        f"{row.wall_s:.3f}",
        f"{row.cpu_ms:.1f}",
        f"{row.cpu_ms_rank_0:.1f}",
    ]
    read = [f"{row.read_bytes / row.wanted_bytes:.3f}", f"{row.read_bytes / 1e6:.1f}", str(row.files)]
    cells += [*(read if is_load else [""] * len(read)), str(row.connections), str(row.threads)]
    cells.append(f"{row.sent_bytes / 1e3:.1f}" if row.library == LIBRARIES["bcp"] else "")
    return f"| {' | '.join(cells)} |"
