"""Thousands of forked snapshots under everything that could hold a lock at the fork: threads that take and free memory
of torch, numpy and Python, that log, import and multiply, and collectives of other ranks. Whoever hangs is named with
the stacks of its threads.

The threads are in the middle of their work at every fork. While most forks are prepared and read back they pause: what
a child could hang of it has from the moment of the fork, and the time is better spent on more of them. A few forks are
prepared and read back while they work on, too; collectives, which wait for the other ranks, never pause.

    python tests/faults/fork_stress.py --forks 2000 --ranks 2
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from snapshot_cases import running

from bytecheckpoint import forking
from bytecheckpoint.adapters.tensors import LocalShards
from bytecheckpoint.forking import ForkedState, can_fork
from bytecheckpoint.planner.offers import Offer, Write
from bytecheckpoint.staging import LiveFile, plan_files
from bytecheckpoint.storage.scratch import Scratch
from distributed.workers import Outcome as OfRank
from distributed.workers import WorkerPool, describe
from faults.campaigns import Asked, Broken, Campaign, Outcome

SWITCH_INTERVAL_S = 1e-4
"""Threads take turns that often, so that forks come at more different moments, and sooner."""
RESTLESS = 20
"""Of so many forks one is prepared and read back while the threads work on."""
COLLECTIVES = "collectives"
LATEST_S = 0.002
"""How long after the threads have gone on a fork may wait, so that it meets them anywhere in their work."""


class Stress(NamedTuple):
    """What one rank is to do."""

    num_forks: int
    blas_threads: int = 1
    restless: int = RESTLESS
    """As RESTLESS."""
    seed: int = 0


class Stressed(NamedTuple):
    """What one rank did."""

    num_forks: int
    num_restless: int
    """Of these, how many were prepared and read back while the threads worked on."""
    num_threads: int
    longest_s: float
    """From the start of a fork to the end of its child."""
    total_s: float
    rounds: dict[str, int]
    """How often each loop went round meanwhile."""
    met: dict[str, int]
    """How many forks came while it was in the middle of a round."""
    num_wrong: int


class Load:
    """Threads that work, and but for collectives pause between two rounds while they are told to."""

    def __init__(self, names: Iterable[str]) -> None:
        self._goes = threading.Event()
        self._goes.set()
        self._rounds = dict.fromkeys(names, 0)
        self._inside = dict.fromkeys(self._rounds, False)
        self._met = dict.fromkeys(self._rounds, 0)
        self._failed: list[tuple[str, Exception]] = []

    def round(self, name: str, work: Callable[[], object]) -> None:
        if name != COLLECTIVES:  # with a pause there, those of the other ranks would only wait
            self._goes.wait()
        self._inside[name] = True
        try:
            work()
        except Exception as error:
            self._failed.append((name, error))
            raise
        finally:
            self._inside[name] = False
        self._rounds[name] += 1

    def go_on(self) -> None:
        self._goes.set()

    def go_on_all(self) -> None:
        """Returns when every thread is at work. Raises what a thread has raised: it comes to no work again."""
        self.go_on()
        while not all(self._inside.values()):
            for name, error in self._failed:
                raise RuntimeError(f"the thread of {name} has ended") from error
            time.sleep(0)  # those that wait for a turn have theirs

    def pause(self) -> None:
        self._goes.clear()

    def count_met(self) -> None:
        for name, is_inside in self._inside.items():
            self._met[name] += is_inside

    @property
    def is_going(self) -> bool:
        return self._goes.is_set()

    @property
    def rounds(self) -> dict[str, int]:
        return dict(self._rounds)

    @property
    def met(self) -> dict[str, int]:
        return dict(self._met)


def busy_loops(stop: threading.Event) -> dict[str, Callable[[], object]]:
    """What each thread does again and again, by name."""
    logger = logging.getLogger("fork_stress")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    logger.setLevel(logging.INFO)
    matrix = np.random.default_rng(0).random((192, 192))
    weights = torch.randn(96, 96)
    return {
        "torch memory": lambda: [torch.empty(size).fill_(1) for size in (10, 1000, 100_000, 3_000_000)],
        "torch work": lambda: (weights @ weights).relu().sum(),
        "numpy memory": lambda: [np.ones(size) for size in (10, 1000, 1_000_000)],
        "numpy work": lambda: matrix @ matrix,
        "objects": lambda: json.loads(json.dumps([{str(number): [number] * 3} for number in range(200)])),
        "logging": lambda: [logger.info("message %d", number) for number in range(20)],
        "importing": lambda: importlib.reload(importlib.import_module("colorsys")),
        "threads": _start_and_join,
        "waiting": lambda: stop.wait(0.001),
    }


def _start_and_join() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def fork_under_load(rank: int, world_size: int, stress: Stress) -> Stressed:
    """Forks that often, and reads each snapshot back after its memory was changed."""
    torch.set_num_threads(stress.blas_threads)
    stop = threading.Event()
    loops = busy_loops(stop)
    if world_size > 1:
        total, enough = torch.zeros(1000), torch.zeros(1)
        group = dist.new_group(backend="gloo")

        def collect() -> None:
            dist.all_reduce(total, group=group)
            enough.fill_(float(stop.is_set()))
            dist.all_reduce(enough, group=group)  # all ranks leave after the same one

        loops[COLLECTIVES] = collect
    load = Load(loops)

    def turn(name: str) -> Callable[[], None]:
        def loop() -> None:
            while not stop.is_set() if name != COLLECTIVES else enough.item() < world_size:
                load.round(name, loops[name])

        return loop

    started, interval_s = time.monotonic(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with running([turn(name) for name in loops], stop):
            longest_s, num_restless, num_wrong = fork_and_read(stress._replace(seed=stress.seed + rank), load)
    finally:
        sys.setswitchinterval(interval_s)
    total_s = time.monotonic() - started
    return Stressed(stress.num_forks, num_restless, len(loops), longest_s, total_s, load.rounds, load.met, num_wrong)


def fork_and_read(stress: Stress, load: Load) -> tuple[float, int, int]:
    """The longest time that a fork took, how many were prepared and read back under load, and how many snapshots were
    not as they were at their fork.
    """
    drawn = random.Random(stress.seed)
    state = {"flat": torch.zeros(30_000), "strided": torch.zeros(300, 40)[:, ::3], "scalar": torch.tensor(0.0)}
    shared = Scratch(1 << 20, 2, is_shared=True)
    longest_s, num_restless, num_wrong = 0.0, 0, 0
    try:
        for number in range(stress.num_forks):
            value = float(drawn.randrange(1, 1000))
            for tensor in state.values():
                tensor.fill_(value)
            files = files_of(state)
            started = time.monotonic()
            is_restless = number % stress.restless == 0
            with forks_meeting(load, drawn.uniform(0, LATEST_S), is_restless=is_restless):
                forked = ForkedState(files, shared)
            for tensor in state.values():
                tensor.fill_(-1)
            num_wrong += not is_filled_with(forked, files[0], value)
            forked.close()
            num_restless += is_restless and load.is_going
            longest_s = max(longest_s, time.monotonic() - started)
    finally:
        load.go_on()  # or nobody sees that this is over
    return longest_s, num_restless, num_wrong


@contextmanager
def forks_meeting(load: Load, later_s: float, *, is_restless: bool) -> Iterator[None]:
    """Within the block, a fork finds every thread at work, so many seconds after all have begun."""
    fork = forking._fork

    def fork_at_work() -> int:
        load.go_on_all()
        time.sleep(later_s)
        load.count_met()
        pid = fork()
        if pid and not is_restless:  # in the child, whoever held the lock of an event at the fork holds it for ever
            load.pause()
        return pid

    if is_restless:
        load.go_on_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forking, "_fork", fork_at_work)
        yield


def files_of(state: dict[str, torch.Tensor]) -> list[LiveFile]:
    """All of the state in one file."""
    found = LocalShards()
    for fqn, tensor in state.items():
        found.add(fqn, tensor)
    shards = found.found
    offers = [Offer(shard.fqn, shard.dtype, shard.global_shape, *shard.region) for shard in shards]
    writes = [Write(number, shard.region) for number, shard in enumerate(shards)]
    files = plan_files(offers, writes, together=(), max_file_bytes=1 << 30, codec="none", num_ranks=1)
    return [LiveFile(planned, shards) for planned in files]


def is_filled_with(forked: ForkedState, file: LiveFile, value: float) -> bool:
    (block,) = file.planned.blocks
    with forked.content(0, *block) as content:
        values = np.frombuffer(bytes(content[len(file.planned.header) :]), np.float32)
    return bool(len(values)) and bool((values == value).all())


FORKS_OF_A_RANK = 100
NUM_RANKS = 2
HUNG_S = 120.0
"""A trial takes some seconds, on a busy machine some tens of them."""
LONGEST_S = 30.0
"""That one fork may take, with all threads at work."""


def run(asked: Asked) -> Outcome:
    """Each trial is so many forks of each of two ranks, whose threads and collectives go on."""
    done: list[Stressed] = []
    broken = []
    workers = WorkerPool()
    try:
        for trial in asked.due():
            seed = asked.rng(trial).randrange(1 << 30)
            stress = Stress(FORKS_OF_A_RANK, seed=seed)
            outcomes = workers.run_each(fork_under_load, stress, world_size=NUM_RANKS, timeout_s=HUNG_S)
            for rank, outcome in enumerate(outcomes):
                what = what_is_wrong(outcome)
                broken += [] if what is None else [Broken(trial, f"rank {rank}: {what}")]
            done += [outcome.value for outcome in outcomes if outcome.error is None]
    finally:
        workers.close()
    num_forks = sum(stressed.num_forks for stressed in done)
    num_threads = max((stressed.num_threads for stressed in done), default=0)
    num_met = sum(sum(stressed.met.values()) for stressed in done)
    num_restless = sum(stressed.num_restless for stressed in done)
    told = f"beside {num_threads} threads, of which a fork met {num_met / max(num_forks, 1):.1f} at work; "
    told += f"{num_restless:,} were also prepared and read back beside them; the longest "
    told += f"took {max((stressed.longest_s for stressed in done), default=0.0):.1f} s"
    return Outcome(num_forks, tuple(broken), told)


def what_is_wrong(outcome: OfRank) -> str | None:
    """With what one rank did: a hang comes as an error, with the stacks of its threads."""
    if outcome.error is not None:
        return describe(outcome.error)
    stressed: Stressed = outcome.value
    if stressed.num_wrong:
        return f"{stressed.num_wrong} of {stressed.num_forks} snapshots were not as at the fork"
    if stressed.longest_s > LONGEST_S:
        return f"a fork took {stressed.longest_s:.1f} s, and {LONGEST_S:.0f} s is the most that it may"
    if not stressed.num_restless:
        return "no fork was prepared and read back under load"
    # Who stays in one round is met at every fork, and does nothing.
    times = {name: min(met, stressed.rounds[name]) for name, met in stressed.met.items()}
    idle = [name for name, number in times.items() if 2 * number < stressed.num_forks]
    return f"most forks came while nothing was done: {idle}" if idle else None


def what_is_missing() -> str | None:
    return None if can_fork() else "Linux"


CAMPAIGNS = (
    Campaign(
        name="forks",
        fault="a snapshot is forked under busy threads: torch, numpy and Python memory, logs, imports, collectives",
        how=f"threads that take turns every 0.1 ms, on 2 ranks over gloo; all are at work at each fork, and while one "
        f"in {RESTLESS} is prepared and read back; every snapshot is read back",
        unit="forks",
        run=run,
        trials=range(10),
        quick=range(0),  # test_fork_stress.py
        missing=what_is_missing,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forks", type=int, default=2000, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="after which a rank counts as hung, in seconds")
    parser.add_argument("--threads", type=int, default=1, help="that torch uses for one operation")
    parser.add_argument(
        "--restless", type=int, default=RESTLESS, help="of so many forks one is prepared and read back under load, too"
    )
    arguments = parser.parse_args()
    pool = WorkerPool()
    try:
        for rank, stressed in enumerate(
            pool.run(
                fork_under_load,
                Stress(arguments.forks, arguments.threads, arguments.restless),
                world_size=arguments.ranks,
                timeout_s=arguments.timeout,
            )
        ):
            sys.stdout.write(f"rank {rank}: {stressed}\n")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
