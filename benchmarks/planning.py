"""What planning costs when many ranks save: the coordinator's work and memory, the manifest, and what a rank that loads
its part spends before it reads. Thousands of ranks are played by one process; their messages are real.

    python benchmarks/planning.py                                       500 tensors on 64 to 1,024 ranks, beside DCP
    python benchmarks/planning.py --adam --ranks 1024 2048 4096 8192    with two Adam states: up to 12 million chunks
    python benchmarks/planning.py --json r.json --markdown r.md

Every tensor is cut by rows over all ranks, as FSDP2 does. torch DCP's planner is measured up to --dcp-up-to ranks.
Seconds are of processor time, of one thread: what else the machine does changes them little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from planning_dcp import measure_dcp
from planning_ranks import ManyRanks, Tensor, model, offers_of, reports, requests, wish_of_rank

from bytecheckpoint.agreement import agree
from bytecheckpoint.collector import collector_paused
from bytecheckpoint.manifest import decode_manifest, encode_manifest, open_manifest
from bytecheckpoint.plan_cache import PlanCache
from bytecheckpoint.planner.load_plan import Want, plan_load
from bytecheckpoint.reporting import build_manifest

TITLES = {
    "ranks": "{:,}",
    "chunks": "{:,}",
    "request_kb": "{:.1f}",
    "plan_s": "{:.2f}",
    "manifest_s": "{:.2f}",
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
class Row:
    """What one number of ranks costs."""

    ranks: int
    chunks: int
    request_kb: float
    """What a rank sends to offer its shards, on average."""
    plan_s: float
    """On the coordinator, from the requests to the orders."""
    manifest_s: float
    """There, from the reports to the manifest's bytes, which are decoded and checked once more."""
    coordinator_mb: float
    """Its peak memory, all messages included, beyond what it had before."""
    manifest_mb: float
    load_s: float
    """From the manifest's bytes to a plan of all reads of one rank with the same layout."""
    load_mb: float
    us_a_chunk: float
    """The coordinator's microseconds in all, by chunks: what grows no worse than linearly does not rise."""
    dcp_plan_s: float | None = None
    dcp_metadata_mb: float | None = None
    plan_ratio: float | None = None
    manifest_ratio: float | None = None


def main() -> None:
    """Prints a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tensors", type=int, default=500)
    parser.add_argument("--adam", action="store_true", help="two more tensors for each")
    parser.add_argument("--dcp-up-to", type=int, default=1024, metavar="RANKS", help="0 leaves DCP out")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    arguments = parser.parse_args()
    tensors = model(arguments.tensors, with_adam=arguments.adam)
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


def table_line(row: Row) -> str:
    values = ((getattr(row, name), form) for name, form in TITLES.items())
    return "| " + " | ".join(form.format(value) if value is not None else "" for value, form in values) + " |"


def measure(tensors: list[Tensor], num_ranks: int, *, with_dcp: bool) -> Row:
    ranks = ManyRanks(num_ranks)
    with Helper(coordinate, tensors, num_ranks) as coordinator:
        payloads = list(requests(tensors, ranks))
        coordinator.send(payloads)
        orders = coordinator.receive()
        plan_s, *_ = coordinator.connection.recv()
        coordinator.send(reports(tensors, iter(orders), num_ranks))
        (manifest,) = coordinator.receive()
        manifest_s, num_chunks, coordinator_mb = coordinator.connection.recv()
    with Helper(load, tensors, num_ranks) as loader:
        loader.send([manifest])
        load_s, load_mb = loader.connection.recv()
    row = Row(
        ranks=num_ranks,
        chunks=num_chunks,
        request_kb=sum(map(len, payloads)) / len(payloads) / 1e3,
        plan_s=plan_s,
        manifest_s=manifest_s,
        coordinator_mb=coordinator_mb,
        manifest_mb=len(manifest) / 1e6,
        load_s=load_s,
        load_mb=load_mb,
        us_a_chunk=(plan_s + manifest_s) / num_chunks * 1e6,
    )
    if with_dcp:
        seconds, num_bytes = measure_dcp(tensors, num_ranks)
        row.dcp_plan_s, row.dcp_metadata_mb = seconds, num_bytes / 1e6
        row.plan_ratio, row.manifest_ratio = seconds / plan_s, num_bytes / len(manifest)
    return row


class Helper:
    """A process of its own for one part, because a process remembers its peak memory for ever."""

    def __init__(self, work: object, tensors: list[Tensor], num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, tensors, num_ranks))

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()

    def send(self, payloads: Iterable[bytes]) -> None:
        send_all(self.connection, payloads)

    def receive(self) -> list[bytes]:
        return receive_all(self.connection)


def send_all(connection: Connection, payloads: Iterable[bytes]) -> None:
    for payload in payloads:
        connection.send_bytes(payload)
    connection.send_bytes(b"")


def receive_all(connection: Connection) -> list[bytes]:
    payloads = []
    while payload := connection.recv_bytes():
        payloads.append(payload)
    return payloads


def coordinate(connection: Connection, tensors: list[Tensor], num_ranks: int) -> None:
    """The coordinator of a save."""
    before = memory_mb()
    ranks = ManyRanks(num_ranks)
    wish = wish_of_rank(offers_of(tensors, 0, num_ranks))
    ranks.payloads = receive_all(connection)
    started = time.process_time()
    with collector_paused():
        agreed = agree(ranks, wish, PlanCache())
    plan_s = time.process_time() - started
    ranks.payloads = []
    send_all(connection, ranks.scattered)
    ranks.scattered = []
    connection.send((plan_s,))
    payloads = receive_all(connection)
    started = time.process_time()
    with collector_paused():
        content = encode_manifest(build_manifest(agreed, payloads, names=range(len(payloads)), step=1000, metadata={}))
        decoded = decode_manifest(content)
    manifest_s = time.process_time() - started
    num_chunks = int(decoded.tensors.columns.num_chunks.sum())
    send_all(connection, [content])
    connection.send((manifest_s, num_chunks, peak_mb() - before))


def load(connection: Connection, tensors: list[Tensor], num_ranks: int) -> None:
    """A rank that loads what the middle one of as many saved."""
    before = memory_mb()
    offers = offers_of(tensors, num_ranks // 2, num_ranks)
    (content,) = receive_all(connection)
    started = time.process_time()
    with collector_paused():
        manifest = open_manifest(content)
        wants = [Want(offer.fqn, offer.region, is_flat=True) for offer in offers]
        plan_load(manifest, wants, verify=True, max_gap_bytes=1 << 16, max_fetch_bytes=1 << 24)
    connection.send((time.process_time() - started, peak_mb() - before))


def memory_mb() -> float:
    """Resident memory now."""
    return _status_mb("VmRSS")


def peak_mb() -> float:
    """The most there was. Not what getrusage says, which counts the parent's memory before a process was its own."""
    return _status_mb("VmHWM")


def _status_mb(field: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
