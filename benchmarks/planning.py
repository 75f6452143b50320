"""Costs of planning when many ranks save: the coordinator's work and memory, the manifest, and what a rank that loads
its part spends before it reads. One process simulates thousands of ranks; their messages are real, and travel through
a store as those of a process group do. The coordinator does all that it does in a save but write its own data.

    python benchmarks/run.py planning                                       500 tensors on 64 to 1,024 ranks, beside DCP
    python benchmarks/run.py planning --adam --ranks 1024 2048 4096 8192    two Adam states: up to 12 million chunks
    python benchmarks/run.py planning --adam --width 32768 --ranks 32768    49 million chunks
    python benchmarks/run.py planning --json r.json --markdown r.md

Every tensor is cut by rows over all ranks, as FSDP2 does. torch DCP's planner is measured up to --dcp-up-to ranks.
Seconds are of processor time, of one thread: what else the machine does changes them little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Self

from simulated_ranks.coordinator import Cost, coordinate, load
from simulated_ranks.ranks import NamedShape, Setting, SimulatedRanks, model

TITLES = {
    "ranks": "{:,}",
    "chunks": "{:,}",
    "request_kb": "{:.1f}",
    "plan_s": "{:.2f}",
    "manifest_s": "{:.2f}",
    "again_s": "{:.2f}",
    "commit_s": "{:.2f}",
    "coordinator_mb": "{:.0f}",
    "manifest_mb": "{:.2f}",
    "load_s": "{:.2f}",
    "load_mb": "{:.0f}",
    "us_a_chunk": "{:.2f}",
    "dcp_plan_s": "{:.2f}",
    "dcp_metadata_mb": "{:.1f}",
    "plan_ratio": "1/{:.0f}",
    "manifest_ratio": "1/{:.0f}",
}


@dataclasses.dataclass
class PlanningRow:
    """Costs of one number of ranks."""

    ranks: int
    chunks: int
    request_kb: float
    """Size of a rank's request, which offers its shards, on average."""
    plan_s: float
    """Time of the coordinator, from its state and the others' requests to the answers, and to its own files."""
    manifest_s: float
    """Time from the reports to the manifest's bytes, which are decoded and checked once more."""
    again_s: float
    """The same in a later save, whose plan is known."""
    commit_s: float
    """Time until the manifest is in its place, all files were checked and the others have acknowledged the end."""
    coordinator_mb: float
    """Peak memory of the coordinator, all messages included, beyond what it had before."""
    manifest_mb: float
    load_s: float
    """Time from the manifest's bytes to a plan of all reads of one rank with the same layout, its files checked."""
    load_mb: float
    us_a_chunk: float
    """Microseconds of the coordinator in all, by chunks: constant if the costs are linear."""
    dcp_plan_s: float | None = None
    dcp_metadata_mb: float | None = None
    plan_ratio: float | None = None
    manifest_ratio: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--width", type=int, default=8192, help="of the model: each of as many ranks gets a row")
    parser.add_argument("--adam", action="store_true", help="two more tensors for each")
    parser.add_argument("--dcp-up-to", type=int, default=1024, metavar="RANKS", help="0 leaves DCP out")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the table there")


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each number of ranks."""
    tensors = model(arguments.tensors, width=arguments.width, with_adam=arguments.adam)
    rows, lines = [], table_head(len(tensors))
    print("\n".join(lines), flush=True)
    for num_ranks in arguments.ranks:
        rows.append(measure(tensors, num_ranks, with_dcp=num_ranks <= arguments.dcp_up_to))
        lines.append(table_line(rows[-1]))
        print(lines[-1], flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join(lines) + "\n")


def table_head(num_tensors: int) -> list[str]:
    titles = [title.replace("_", " ") for title in TITLES]
    return [f"{num_tensors} tensors", "", "| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]


def table_line(row: PlanningRow) -> str:
    values = ((getattr(row, name), form) for name, form in TITLES.items())
    return "| " + " | ".join(form.format(value) if value is not None else "" for value, form in values) + " |"


def measure(tensors: list[NamedShape], num_ranks: int, *, with_dcp: bool) -> PlanningRow:
    with tempfile.TemporaryDirectory() as root:
        setting = Setting(tensors, num_ranks, Path(root))
        with Helper(coordinate, setting) as coordinator:
            ranks = SimulatedRanks(setting, port=coordinator.connection.recv())
            ranks.ask()
            coordinator.go_on()
            coordinator.connection.recv()
            ranks.write()
            coordinator.go_on()
            cost: Cost = coordinator.connection.recv()
        with Helper(load, setting) as loader:
            load_s, load_mb = loader.connection.recv()
    row = PlanningRow(
        ranks=num_ranks,
        chunks=cost.num_chunks,
        request_kb=ranks.request_bytes / max(num_ranks - 1, 1) / 1e3,
        plan_s=cost.plan_s,
        manifest_s=cost.manifest_s,
        again_s=cost.again_s,
        commit_s=cost.commit_s,
        coordinator_mb=cost.peak_mb,
        manifest_mb=cost.manifest_bytes / 1e6,
        load_s=load_s,
        load_mb=load_mb,
        us_a_chunk=(cost.plan_s + cost.manifest_s + cost.commit_s) / cost.num_chunks * 1e6,
    )
    if with_dcp:
        from simulated_ranks.dcp_planner import measure_dcp  # noqa: PLC0415  the helpers import this script too: DCP takes seconds

        seconds, num_bytes = measure_dcp(tensors, num_ranks)
        row.dcp_plan_s, row.dcp_metadata_mb = seconds, num_bytes / 1e6
        row.plan_ratio, row.manifest_ratio = seconds / cost.plan_s, num_bytes / cost.manifest_bytes
    return row


class Helper:
    """A process of its own for one part, because a process remembers its peak memory for ever."""

    def __init__(self, work: object, setting: Setting) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, setting))
        self._theirs = theirs

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()  # else its end would not show when the process fails
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self._process.join()

    def go_on(self) -> None:
        self.connection.send(None)
