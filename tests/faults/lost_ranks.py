"""A rank that is killed, stops or never comes, in every phase of every kind of save and load: every other rank raises
in time and names it, what was there still loads, and a rank that was only stopped takes part in the next
call.

Several groups of ranks lose one each at the same time, because most of the time is spent waiting.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint.distributed import key_value_ranks
from bytecheckpoint.saving import commit
from bytecheckpoint.storage import stage_folder
from distributed.played_hosts import on_host
from distributed.workers import Outcome as OfRank
from distributed.workers import WorkerDied, WorkerPool
from faults.campaigns import Asked, Broken, Campaign, Outcome, side_by_side
from faults.seams import (
    COORDINATOR_PHASES,
    EXCHANGE_PHASES,
    LOAD_PHASES,
    SAVE_PHASES,
    SOCKET_PHASES,
    STAGED_PHASES,
    Seam,
    Seen,
    after,
    before,
    loads_as,
    seen,
    state_of,
)

NUM_RANKS = 8
"""Of all groups of a batch together."""
NUM_LANES = 3
"""Batches at a time: most of one is waiting, too."""
PATIENT_S = 60.0
LATER_S = 5.0
"""So much longer than its timeout a rank may wait, to hear from the coordinator who is missing."""
NOISE_S = 15.0
"""What all else in a call may take: it works before it waits, and the machine is shared."""
HUNG_S = 60.0
"""A rank that is not done by then hangs. The longest wait of a case is far shorter."""
MAY_BE_COMMITTED = "whether the checkpoint was committed"
CLOSING = Seam(key_value_ranks.GroupRanks, "close")
COMMIT = Seam(commit, "_create_manifest")
NEVER = "never comes"


class Case(NamedTuple):
    """A rank of a group that goes missing."""

    call: str
    phase: str
    how: str
    """`killed`, `stopped`, or `never comes`."""
    missing_rank: int
    group_size: int

    @property
    def longest_s(self) -> float:
        """How long a rank may take that loses another one."""
        return self.timeout_s + LATER_S + NOISE_S

    @property
    def is_save(self) -> bool:
        return "save" in self.call

    @property
    def timeout_s(self) -> float:
        """Ranks of a pair wait for the missing one only, and cannot be taken for it themselves."""
        return 1.5 if self.group_size == 2 else 5.0

    @property
    def is_over(self) -> bool:
        """Whether all has been done and told, so that nobody misses the rank."""
        return self.phase == "leaving"


class PhaseSeam(NamedTuple):
    """Where a phase of a call begins, or ends."""

    function: Seam
    is_before: bool = True
    """Whether the rank goes missing before the function is called, or after it."""
    is_coordinators: bool = False


def seams(call: str) -> dict[str, PhaseSeam]:
    """The phases of a call."""
    leaving = {"leaving": PhaseSeam(CLOSING)}
    if call == "load":
        return {phase: PhaseSeam(function) for phase, function in LOAD_PHASES.items()} | leaving
    if call == "exchanged load":
        return {phase: PhaseSeam(function) for phase, function in EXCHANGE_PHASES.items()} | leaving
    if call == "load across hosts":
        return {phase: PhaseSeam(function) for phase, function in SOCKET_PHASES.items()} | leaving
    of_all = STAGED_PHASES if call == "staged save" else SAVE_PHASES
    of_coordinator = {
        phase: PhaseSeam(function, is_coordinators=True) for phase, function in COORDINATOR_PHASES.items()
    }
    if call == "staged save":
        of_coordinator["keeping the manifest"] = PhaseSeam(
            Seam(stage_folder.StagedFolder, "keep_manifest"), is_coordinators=True
        )
    telling = {"telling": PhaseSeam(COMMIT, is_before=False, is_coordinators=True)}
    return {phase: PhaseSeam(function) for phase, function in of_all.items()} | of_coordinator | telling | leaving


CALLS = ("save", "async save", "lazy save", "staged save", "load", "exchanged load", "load across hosts")


def all_cases() -> list[Case]:
    """Every phase of every call, with each rank of a pair, killed and stopped; each phase once in a group of four."""
    cases = []
    for call in CALLS:
        for number, (phase, seam) in enumerate(seams(call).items()):
            ranks = [0] if seam.is_coordinators else [0, 1]
            cases += [Case(call, phase, how, rank, 2) for rank in ranks for how in ("killed", "stopped")]
            rank_of_four = 0 if seam.is_coordinators else 1 + number % 3
            cases.append(Case(call, phase, ("killed", "stopped")[number % 2], rank_of_four, 4))
        cases += [Case(call, NEVER, NEVER, rank, size) for rank, size in ((0, 2), (1, 2), (2, 4))]
    return cases


def batches() -> list[list[Case]]:
    """Those that are tried at the same time."""
    found = []
    for size in (2, 4):
        cases = [case for case in all_cases() if case.group_size == size]
        at_once = NUM_RANKS // size
        found += [cases[first : first + at_once] for first in range(0, len(cases), at_once)]
    return found


def lose_one(rank: int, world_size: int, root: str, cases: list[Case]) -> tuple[Seen | None, float, bool]:
    """What one rank sees: of the call in which a rank of its group goes missing, after how many seconds it ended, and
    whether the next call of both works.
    """
    size = cases[0].group_size
    number, own_rank = divmod(rank, size)
    groups = [dist.new_group([*range(first, first + size)]) for first in range(0, world_size, size)]
    case, group, path = cases[number], groups[number], f"{root}/{number}"
    pids: list[int] = [0] * size
    dist.all_gather_object(pids, os.getpid(), group=group)
    patient = bcp.SaveOptions(timeout_s=PATIENT_S)
    bcp.save(path, state_of(own_rank, 1.0), step=1, options=patient, process_group=group)
    is_missing = own_rank == case.missing_rank
    with going_missing(case, number) if is_missing else nullcontext():
        never_comes = is_missing and case.how == NEVER
        began_s = time.monotonic()
        error = None if never_comes else seen(_call(case, path, own_rank, group, f"{root}/stage"))
        seconds = time.monotonic() - began_s
    if case.how == "killed":
        return error, seconds, True
    if case.how == "stopped" and not is_missing:
        wait_for_others(number, size - 1)  # who is told late would be told that all went well
        if own_rank == (case.missing_rank + 1) % size:
            wake(number, pids[case.missing_rank])
    dist.barrier(group=group)
    bcp.save(path, state_of(own_rank, 3.0), step=3, options=patient, process_group=group)
    return error, seconds, loads_as(path, own_rank, 3.0, process_group=group)


def wait_for_others(number: int, num_others: int) -> None:
    """Returns when all ranks of a group but the one that is stopped have ended their call."""
    store, key = _store(), f"ended/{number}"
    store.add(key, 1)
    while store.add(key, 0) < num_others:
        time.sleep(0.01)


def wake(number: int, pid: int) -> None:
    """Returns when the rank of the group that is stopped says that it goes on. Hazard: at the end of a call the others
    may be done before it has come to where it stops. To be woken before that is to stay asleep; to be woken between the
    signal and the stop is not to stop at all.
    """
    while not _store().check([_awake_key(number)]):
        if _stands_still(pid):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def _stands_still(pid: int) -> bool:
    """Whether all of the process was stopped; True, too, where there is no telling."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "T"


def _awake_key(number: int) -> str:
    return f"awake/{number}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def going_missing(case: Case, number: int) -> Iterator[None]:
    if case.how == NEVER:
        yield
        return
    seam = seams(case.call)[case.phase]
    left = [signal.SIGKILL if case.how == "killed" else signal.SIGSTOP]

    def action() -> None:
        if left:
            signal.pthread_kill(get_ident(), left.pop())  # a rank that is stopped goes on from here
            _store().set(_awake_key(number), "")

    with (before if seam.is_before else after)(seam.function, action):
        yield


def _call(case: Case, path: str, rank: int, group: Any, stage: str) -> Callable[[], object]:
    if not case.is_save:
        exchange: Any = "off" if case.call == "load" else "on"
        options = bcp.LoadOptions(timeout_s=case.timeout_s, exchange=exchange)

        def load() -> None:
            with on_host(rank if case.call == "load across hosts" else 0):
                bcp.load(path, state_of(rank, 9.0), options=options, process_group=group)

        return load
    save_options = bcp.SaveOptions(
        timeout_s=case.timeout_s,
        snapshot="lazy" if case.call == "lazy save" else "auto",
        local_stage=stage if case.call == "staged save" else None,
    )
    state, is_async = state_of(rank, 2.0), case.call != "save"
    return lambda: bcp.save(
        path, state, step=2, async_save=is_async, options=save_options, process_group=group
    ).result()


def try_batch(workers: WorkerPool, root: Path, cases: list[Case]) -> list[str]:
    """What does not hold."""
    num_ranks = sum(case.group_size for case in cases)
    outcomes = workers.run_each(lose_one, str(root), cases, world_size=num_ranks, timeout_s=HUNG_S)
    wrong = []
    for number, case in enumerate(cases):
        first = number * case.group_size
        what = what_is_wrong(case, outcomes[first : first + case.group_size], first, root / str(number))
        if what is not None:
            wrong.append(f"{case}: {what}")
    return wrong


def what_is_wrong(case: Case, outcomes: list[OfRank], first: int, path: Path) -> str | None:
    """Of a group whose first rank has this global number."""
    missing, told = outcomes[case.missing_rank], []
    if isinstance(missing.error, WorkerDied) != (case.how == "killed"):
        return f"the rank that was to be {case.how} did otherwise: {missing}"
    for rank, outcome in enumerate(outcomes):
        if rank == case.missing_rank and case.how == "killed":
            continue
        if outcome.error is not None:
            return f"rank {first + rank} broke off: {outcome.error}"
        error, seconds, next_works = outcome.value
        told.append(error)
        what = _wrong_with(case, rank, error, first + case.missing_rank)
        if what is not None:
            return f"rank {first + rank} {what}"
        if rank != case.missing_rank and seconds > case.longest_s:  # a rank that is stopped is so for longer
            return f"rank {first + rank} took {seconds:.1f} s, and {case.longest_s:.1f} s is the most that it may"
        if not next_works:
            return f"rank {first + rank} does not load the next save"
    return _wrong_at(path, case, told)


def _wrong_with(case: Case, rank: int, error: Seen | None, missing: int) -> str | None:
    """With what a rank was told."""
    if case.is_over:
        return None if error is None else f"raised though all was done: {error}"
    if error is None:  # who goes on may find that there is nobody left to wait for
        return None if rank == case.missing_rank else "did not notice"
    if rank == case.missing_rank:  # to whom the others are missing
        return None if error.kind == "rank_missing" else f"was told something else: {error}"
    if (error.kind, error.ranks) != ("rank_missing", (missing,)) or f"rank {missing}" not in error.message:
        return f"was told something else: {error}"
    return None


def _wrong_at(path: Path, case: Case, told: list[Seen | None]) -> str | None:
    """With what is to be seen afterwards, by what the ranks were told of the call."""
    steps = bcp.steps(path)
    if set(steps) - {2} != ({1} if case.how == "killed" else {1, 3}):
        return f"steps are {steps}"
    is_there, was_done = 2 in steps, case.is_save and (case.phase in {"telling", "leaving"} or None in told)
    if was_done and case.how != NEVER and not is_there:
        return "what was committed is not there"
    if is_there and not all(error is None or MAY_BE_COMMITTED in error.message for error in told):
        return f"it was committed, against what ranks were told: {told}"
    for step in steps:
        if not all(loads_as(path, rank, float(step), step=step, strict=False) for rank in range(case.group_size)):
            return f"step {step} is not what was saved"
    return None


def run(asked: Asked) -> Outcome:
    found = batches()

    def try_one(workers: WorkerPool, trial: int) -> tuple[int, list[str]]:
        return trial, try_batch(workers, asked.folder / str(trial), found[trial])

    with ExitStack() as stack:
        lanes = [stack.enter_context(closing(WorkerPool())) for _ in range(min(NUM_LANES, len(asked.trials)))]
        ended = side_by_side(asked, lanes, try_one)
    tried = [case for trial, _ in ended for case in found[trial]]
    broken = [Broken(trial, what) for trial, wrong in ended for what in wrong]
    num_phases = len({(case.call, case.phase) for case in tried if case.how != NEVER})
    hows = {how: sum(case.how == how for case in tried) for how in ("killed", "stopped", NEVER)}
    told = ", ".join(f"{count} {how}" for how, count in hows.items())
    num_calls = len({case.call for case in tried})
    return Outcome(len(tried), tuple(broken), f"{num_phases} phases of {num_calls} calls: {told}")


CAMPAIGNS = (
    Campaign(
        name="lost-ranks",
        fault="a rank is killed, is stopped or never comes, in every phase of every kind of save and load",
        how="SIGKILL and SIGSTOP at a function of the phase; groups of 2 and 4 ranks over gloo",
        unit="ranks lost",
        run=run,
        trials=range(len(batches())),
        quick=range(0),  # distributed/test_failures.py and test_lost_ranks.py
    ),
)
