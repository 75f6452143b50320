"""Times saves to an object store and loads from it, beside torch DCP's FsspecWriter and FsspecReader and
beside what s3fs, boto3 and obstore need to move the same bytes as plain objects. All interleaved in one
run, against objects/server.py: a fast S3 on this machine, which shares its cores.

    python benchmarks/run.py object_store --size 0.25             # 0.5 GB
    python benchmarks/run.py object_store --size 0.25 --latency 0.02

The state is W2 of the save benchmark: fully_shard on 4 gloo ranks. It is loaded on 2. Bare transfers move as many bytes
on as many ranks: 4 objects go up, one a rank; 2 come down to each of 2 ranks. Seconds are the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.machine import facts_line, machine_facts, version
from shared.memory import PeakMemory, memory_of
from shared.process_pool import PoolError, ProcessPool
from shared.results import Row
from shared.tables import spread, table, times

SERVER = Path(__file__).parent / "objects" / "server.py"
SETTINGS = ("8x8", "16x4", "16x8", "64x4")
"""MiB of a part, and number of parts at the same time."""
CHECKPOINTS = ("bcp", "dcp", "dcp-4")
TITLES = {"bcp": "bytecheckpoint", "dcp": "torch DCP", "dcp-4": "torch DCP, 4 threads"}
LIBRARIES = ("s3fs", "boto3", "obstore")


class ObjectRounds:
    """Rows of all candidates, up and down; they fill up as it goes."""

    def __init__(self, arguments: argparse.Namespace, port: int) -> None:
        bulk = [f"{library} {setting}" for library in arguments.libraries for setting in arguments.settings]
        self.names = [*CHECKPOINTS, *bulk]
        self.rows = {side: {name: Row() for name in self.names} for side in ("up", "down")}
        self.memory_bytes = 0
        """Peak of all ranks together beyond their state in two saves."""
        settings = {"size": arguments.size, "endpoint": f"http://127.0.0.1:{port}"}
        self._source, self._target = (
            ProcessPool("objects.worker", {**settings, "side": side}, num_ranks=ranks, timeout_s=arguments.timeout)
            for side, ranks in (("source", 4), ("target", 2))
        )
        self.state_bytes = int(self._source.facts[0]["state_bytes"])

    def end(self) -> None:
        self._source.end()
        self._target.end()

    def run(self, rounds: int) -> None:
        """Runs the rounds. The first one does not count: it checks what was loaded."""
        with PeakMemory(lambda: memory_of(self._source.sessions)) as peak:
            for number in range(2):
                for task in ("up", "remove"):
                    self._source.run(candidate="bcp", folder=f"memory-{number}", task=task)
        self.memory_bytes = peak.bytes
        rng = random.Random(0)
        for number in range(rounds + 1):
            for name in rng.sample(self.names, len(self.names)):
                for side in ("up", "down"):
                    self._time(name, side, number)

    def _time(self, name: str, side: str, number: int) -> None:
        row = self.rows[side][name]
        if row.skipped is not None:
            return
        pool = self._source if side == "up" else self._target
        command = {"candidate": name, "folder": f"{name.replace(' ', '-')}-{number}"}
        seconds = max(answer["seconds"] for answer in pool.run(**command, task=side))
        if number > 0:
            row.rounds.append({"seconds": seconds})
        elif side == "down":
            self._target.run(**command, task="check")
        if side == "down":
            self._source.run(**command, task="remove")
        print(f"  {number} {side} {name}: {seconds:.3f} s", file=sys.stderr, flush=True)


def report(rounds: ObjectRounds, facts: dict[str, Any]) -> Iterator[str]:
    yield facts_line(facts)
    yield ""
    titles = ["what", "up, s", "up, GB/s", "x best of a library", "x DCP", "down, s", "down, GB/s", "x best", "x DCP"]
    best = {side: min(medians(rounds, side, rounds.names[len(CHECKPOINTS) :])) for side in rounds.rows}
    dcp = {side: min(medians(rounds, side, ("dcp", "dcp-4"))) for side in rounds.rows}
    cells = []
    for name in rounds.names:
        cell = [TITLES.get(name, name)]
        for side in ("up", "down"):
            row = rounds.rows[side][name]
            middle = row.median("seconds")
            if middle is None:
                cell += [row.skipped or "", "", "", ""]
                continue
            speed = rounds.state_bytes / middle / 1e9
            ratios = [times(middle / best[side]), times(middle / dcp[side])]
            cell += [spread(row.values("seconds")), f"{speed:.2f}", *ratios]
        cells.append(cell)
    yield from table(titles, cells)
    yield ""
    yield f"Memory beyond the state in two saves, all 4 ranks: {rounds.memory_bytes / 1e6:.0f} MB"
    for library in LIBRARIES:
        names = [name for name in rounds.names if name.startswith(library)]
        if names:
            own = {side: rounds.rows[side]["bcp"].median("seconds") for side in rounds.rows}
            ratios = [f"{side} {own[side] / min(medians(rounds, side, names)):.2f}x" for side in rounds.rows]
            yield f"bytecheckpoint beside the best of {library}: {', '.join(ratios)}"


def medians(rounds: ObjectRounds, side: str, names: Sequence[str]) -> list[float]:
    found = [rounds.rows[side][name].median("seconds") for name in names]
    return [value for value in found if value is not None]


@contextmanager
def serving(latency_s: float) -> Iterator[int]:
    """Serves objects; yields the port."""
    command = [sys.executable, str(SERVER), "--latency", str(latency_s)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=float, default=1.0, help="1.0 is the full size of W2, 2.1 GB")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer of the server")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="MiB of a part x parts at once")
    parser.add_argument("--libraries", nargs="+", default=LIBRARIES, choices=LIBRARIES)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a transfer has failed")
    parser.add_argument("--json", type=Path, help="write all figures there")


def run(arguments: argparse.Namespace) -> None:
    facts = machine_facts(Path(tempfile.gettempdir()))
    facts |= {name: version(name) for name in ("botocore", *LIBRARIES)}
    with serving(arguments.latency) as port:
        rounds = ObjectRounds(arguments, port)
        try:
            rounds.run(arguments.rounds)
        except PoolError:
            print(rounds._source.log_tail(), rounds._target.log_tail(), file=sys.stderr)
            raise
        finally:
            rounds.end()
    facts |= {"state": f"{rounds.state_bytes / 1e9:.3f} GB", "rounds": arguments.rounds, "latency": arguments.latency}
    print("\n".join(report(rounds, facts)))
    if arguments.json is not None:
        seconds = {
            side: {name: row.values("seconds") for name, row in rows.items()} for side, rows in rounds.rows.items()
        }
        arguments.json.write_text(json.dumps({"facts": facts, "seconds": seconds}, indent=1))
