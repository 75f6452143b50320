"""Times the coordinator's part of an exchange between thousands of simulated ranks: their local plans are decoded,
extents assigned and answers encoded, for small replicas in one file and, as earlier versions wrote them, in every file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from bytecheckpoint.distributed.rendezvous import Address
from bytecheckpoint.loading.exchange import LocalReadPlan, assign
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents
from shared.tables import table

TITLES = ["small replicas", "ranks", "CPU s", "MB of answers"]
EXTENT_BYTES, NUM_EXTENTS = 1 << 20, 8
SMALL_BYTES = 16 << 10


def measure_assignment(nums_ranks: Sequence[int]) -> Iterator[str]:
    """Yields a table."""
    rows = []
    for placing in ("in one file", "in every file"):
        for num_ranks in nums_ranks:
            files, plans = simulated_plans(num_ranks, is_spread=placing == "in every file")
            started = time.process_time()
            answers = assign(plans, Extents(files))
            seconds = time.process_time() - started
            rows.append([placing, str(num_ranks), f"{seconds:.2f}", f"{sum(map(len, answers)) / 1e6:.1f}"])
    yield from table(TITLES, rows)


def simulated_plans(num_ranks: int, *, is_spread: bool) -> tuple[list[DataFile], list[bytes]]:
    """Returns the files of so many ranks, and the local plan of each: all of its own file, and the small replicas."""
    lengths = [4096, *[EXTENT_BYTES] * NUM_EXTENTS]
    files = [DataFile(str(rank), sum(lengths), lengths) for rank in range(num_ranks)]
    small = ExtentRun(0, NUM_EXTENTS + 1, NUM_EXTENTS + 2)
    if not is_spread:
        lengths = [*lengths, SMALL_BYTES]
        files[0] = DataFile("0", sum(lengths), lengths)
    plans = []
    for rank in range(num_ranks):
        own = ExtentRun(rank, 1, NUM_EXTENTS + 1)
        others = [ExtentRun(file, 1, 2) for file in range(num_ranks) if file != rank] if is_spread else [small]
        address = Address(["10.0.0.1", f"host-{rank}"], 40000, bytes(32))
        runs = joined(sorted([own, *others]))
        plans.append(msgspec.msgpack.encode(LocalReadPlan(address, runs, 8 << 20, 600.0)))
    return files, plans


def joined(runs: list[ExtentRun]) -> list[ExtentRun]:
    """Joins runs that touch: those of rank 0's own file do."""
    found = runs[:1]
    for run in runs[1:]:
        if (run.file, run.first) == (found[-1].file, found[-1].end):
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found
