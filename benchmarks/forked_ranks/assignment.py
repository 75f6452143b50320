"""Times the coordinator's part of an exchange between thousands of simulated ranks: their local plans are decoded,
extents assigned and answers encoded, for layouts of real jobs on hosts of 8 ranks, and for small replicas in one file
and, as earlier versions wrote them, in every file. Each in a process of its own, for its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.loading.between_ranks.assignment import LocalReadPlan, assign, decode_assignment
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents
from shared.child_process import in_a_process
from shared.memory import PeakMemory, own_memory
from shared.tables import table

TITLES = [
    "layout",
    "ranks",
    "CPU s",
    "MB beyond the plans",
    "MB of plans",
    "MB of answers",
    "most connections of a rank",
    "at most 2 s, 300 MB",
]
MAX_S, MAX_BYTES = 2.0, 300_000_000
EXTENT_BYTES, NUM_EXTENTS = 1 << 20, 8
SMALL_BYTES = 16 << 10
SHARDS = 8

QUADRATIC = "small replicas in every file"
MOST_QUADRATIC = 2048
"""Ranks up to which that is tried: each one's plan names every file."""

Wanted = Sequence[Sequence[ExtentRun]]


def measure_assignment(nums_ranks: Sequence[int]) -> Iterator[str]:
    """Yields a table."""
    both = [(name, num_ranks) for name in LAYOUTS for num_ranks in nums_ranks]
    rows = [in_a_process(measure_layout, *each) for each in both if each[0] != QUADRATIC or each[1] <= MOST_QUADRATIC]
    yield from table(TITLES, rows)


def measure_layout(name: str, num_ranks: int) -> list[str]:
    files, wanted = LAYOUTS[name](num_ranks)
    plans = [
        msgspec.msgpack.encode(
            LocalReadPlan(
                Address(["10.0.0.1", f"host-{rank}"], 40000, bytes(32)),
                msgspec.Raw(msgspec.msgpack.encode(runs)),
                *(8 << 20, 600.0, [], rank // 8 * 8),
            )
        )
        for rank, runs in enumerate(wanted)
    ]
    del wanted
    with PeakMemory(own_memory) as peak:
        started = time.process_time()
        answers = assign(plans, Extents(files))
        seconds = time.process_time() - started
    some = range(0, num_ranks, max(1, num_ranks // 64))
    shares = [decode_assignment(answers[rank], rank).share for rank in some]
    connections = max(len(share.peers) + len({reader for reader, _ in share.relayed}) for share in shares)
    sizes = [f"{num_bytes / 1e6:.1f}" for num_bytes in (peak.bytes, sum(map(len, plans)), sum(map(len, answers)))]
    reached = "reached" if seconds <= MAX_S and peak.bytes <= MAX_BYTES else "not reached"
    return [name, str(num_ranks), f"{seconds:.2f}", *sizes, str(connections), reached]


def one_file_a_rank(num_ranks: int) -> list[DataFile]:
    lengths = [4096, *[EXTENT_BYTES] * NUM_EXTENTS]
    return [DataFile(str(rank), sum(lengths), lengths) for rank in range(num_ranks)]


def hsdp(num_ranks: int) -> tuple[list[DataFile], Wanted]:
    """Each of 8 shards has as many replicas as fit, among which its files are divided."""
    files = one_file_a_rank(num_ranks)
    of_shard = [[ExtentRun(file, 1, 9) for file in range(shard, num_ranks, SHARDS)] for shard in range(SHARDS)]
    return files, [of_shard[rank % SHARDS] for rank in range(num_ranks)]


def ddp(num_ranks: int) -> tuple[list[DataFile], Wanted]:
    """All ranks want all, which all have written."""
    return one_file_a_rank(num_ranks), [[ExtentRun(file, 1, 9) for file in range(num_ranks)]] * num_ranks


def fsdp_on_another_size(num_ranks: int) -> tuple[list[DataFile], Wanted]:
    """Five sevenths as many ranks have saved: each loads of two files, and shares extents with its neighbours."""
    files = one_file_a_rank(max(num_ranks * 5 // 7, 1))
    all_bytes = len(files) * NUM_EXTENTS * EXTENT_BYTES
    wanted = []
    for rank in range(num_ranks):
        start, end = (number * all_bytes // num_ranks // 4 * 4 for number in (rank, rank + 1))
        first, last = start // EXTENT_BYTES, max(end - 1, start) // EXTENT_BYTES
        extents = [divmod(number, NUM_EXTENTS) for number in range(first, last + 1)]
        wanted.append(joined([ExtentRun(file, 1 + number, 2 + number) for file, number in extents]))
    return files, wanted


def tp_by_dp(num_ranks: int) -> tuple[list[DataFile], Wanted]:
    """Each of 8 tensor-parallel parts is replicated; some extents, of norms and embeddings, all ranks want."""
    files, wanted = hsdp(num_ranks)
    whole = ExtentRun(0, NUM_EXTENTS + 1, NUM_EXTENTS + 5)
    lengths = [*files[0].extent_lengths, *[EXTENT_BYTES] * 4]
    files[0] = DataFile("0", sum(lengths), lengths)
    parts = [joined(sorted([*runs, whole])) for runs in wanted[:SHARDS]]
    return files, [parts[rank % SHARDS] for rank in range(num_ranks)]


def small_replicas(num_ranks: int, *, is_spread: bool) -> tuple[list[DataFile], Wanted]:
    """Each rank wants all of its own file, and the small replicas."""
    files = one_file_a_rank(num_ranks)
    small = ExtentRun(0, NUM_EXTENTS + 1, NUM_EXTENTS + 2)
    if not is_spread:
        lengths = [*files[0].extent_lengths, SMALL_BYTES]
        files[0] = DataFile("0", sum(lengths), lengths)
    wanted = []
    for rank in range(num_ranks):
        own = ExtentRun(rank, 1, NUM_EXTENTS + 1)
        others = [ExtentRun(file, 1, 2) for file in range(num_ranks) if file != rank] if is_spread else [small]
        wanted.append(joined(sorted([own, *others])))
    return files, wanted


LAYOUTS: dict[str, Callable[[int], tuple[list[DataFile], Wanted]]] = {
    "HSDP, 8 shards": hsdp,
    "DDP": ddp,
    "FSDP of 5/7 as many": fsdp_on_another_size,
    "TP 8 x DP": tp_by_dp,
    "small replicas in one file": lambda num_ranks: small_replicas(num_ranks, is_spread=False),
    QUADRATIC: lambda num_ranks: small_replicas(num_ranks, is_spread=True),
}


def joined(runs: list[ExtentRun]) -> list[ExtentRun]:
    """Joins runs that touch: those of rank 0's own file do."""
    found = runs[:1]
    for run in runs[1:]:
        if (run.file, run.first) == (found[-1].file, found[-1].end):
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found
