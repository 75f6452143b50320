"""A rank that dies or stops in a load whose ranks exchange what they read: whatever it was doing, all others raise and
name it, and the next load works. One that is only slow is waited for.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from faults.lost_ranks import LATER_S, NOISE_S
from faults.seams import EXCHANGE_PHASES, SOCKET_PHASES, Seam, Seen, before, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from bytecheckpoint.storage.backends import local_store
from distributed.played_hosts import on_host
from distributed.small_pieces import small_pieces
from distributed.workers import WorkerDied, WorkerPool

PHASES = EXCHANGE_PHASES | SOCKET_PHASES
GROUP_SIZE, NUM_GROUPS = 2, 4
TIMEOUT_S = 2.5
"""On a busy machine the ranks of a group come to a phase so much later than one another."""


class Case(NamedTuple):
    """A rank of a group that goes missing."""

    phase: str
    missing_rank: int
    how: str


def cases_of(phases: list[str]) -> list[Case]:
    """In each phase one rank dies and the other one stops, in the next phase the other way round."""
    return [
        Case(phase, (number + (how == "stopped")) % GROUP_SIZE, how)
        for number, phase in enumerate(phases)
        for how in ("killed", "stopped")
    ]


CASES = cases_of([*PHASES])
BATCHES = [CASES[first : first + NUM_GROUPS] for first in range(0, len(CASES), NUM_GROUPS)]


def go_missing(rank: int, world_size: int, root: str, cases: list[Case]) -> tuple[Seen | None, bool]:
    """In each group one rank goes missing in a load, all groups at once. The other wakes it when it has its error, and
    then both load again.
    """
    number, own_rank = divmod(rank, GROUP_SIZE)
    firsts = range(0, world_size, GROUP_SIZE)
    group = [dist.new_group([*range(first, first + GROUP_SIZE)]) for first in firsts][number]
    case, path = cases[number], f"{root}/{number}"
    pids: list[int] = [0] * GROUP_SIZE
    dist.all_gather_object(pids, os.getpid(), group=group)
    bcp.save(path, state_of(own_rank, 1.0), process_group=group)
    options = bcp.LoadOptions(exchange="on", timeout_s=TIMEOUT_S)
    dist.barrier(group=group)
    with going_missing(case) if own_rank == case.missing_rank else nullcontext(), in_phase(case.phase, own_rank):
        error = seen(lambda: bcp.load(path, state_of(own_rank, 9.0), options=options, process_group=group))
    if case.how == "killed":
        return error, True
    if own_rank != case.missing_rank:
        os.kill(pids[case.missing_rank], signal.SIGCONT)
    dist.barrier(group=group)
    patient = bcp.LoadOptions(exchange="on", timeout_s=30)
    return error, loads_as(path, own_rank, 1.0, options=patient, process_group=group)


def in_phase(phase: str, rank: int) -> Any:
    """Where the ranks are for it: on one host, or each on its own."""
    return on_host(rank if phase in SOCKET_PHASES else 0)


def going_missing(case: Case) -> Any:
    left = [signal.SIGKILL if case.how == "killed" else signal.SIGSTOP]
    # The thread that is there stops at once: what the process gets may be taken by any of its threads, and later.
    return before(PHASES[case.phase], lambda: signal.pthread_kill(get_ident(), left.pop()) if left else None)


@pytest.mark.parametrize("cases", BATCHES, ids=lambda cases: ", ".join(dict.fromkeys(case.phase for case in cases)))
def test_a_rank_that_is_lost_in_any_phase_is_named(workers: WorkerPool, tmp_path: Path, cases: list[Case]) -> None:
    outcomes = workers.run_each(go_missing, str(tmp_path), cases, world_size=GROUP_SIZE * len(cases))
    for number, case in enumerate(cases):
        of_group = outcomes[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]
        lost = of_group.pop(case.missing_rank)
        assert isinstance(lost.error, WorkerDied) == (case.how == "killed"), (case, lost)
        for outcome in of_group:
            assert outcome.error is None, (case, outcome.error)
            error, next_loads = outcome.value
            assert error is not None, case
            assert (error.kind, error.ranks) == ("rank_missing", (number * GROUP_SIZE + case.missing_rank,)), case
            assert error.seconds <= TIMEOUT_S + LATER_S + NOISE_S, case
            assert next_loads, case


def test_every_phase_is_tried_with_a_dead_and_a_stopped_rank() -> None:
    assert [case for cases in BATCHES for case in cases] == CASES
    hows = {"killed", "stopped"}
    assert {(case.phase, case.how) for case in CASES} == {(phase, how) for phase in PHASES for how in hows}
    assert {(case.missing_rank, case.how) for case in CASES} == {(rank, how) for rank in (0, 1) for how in hows}


def fail_in(rank: int, world_size: int, path: str, phase: str, failing_rank: int) -> tuple[Seen | None, bool]:
    bcp.save(path, state_of(rank, 1.0))
    options = bcp.LoadOptions(exchange="on", timeout_s=30)
    fails = before(PHASES[phase], raising(OSError("boom"))) if rank == failing_rank else nullcontext()
    with fails, in_phase(phase, rank):
        error = seen(lambda: bcp.load(path, state_of(rank, 0.0), options=options))
    dist.barrier()
    return error, loads_as(path, rank, 1.0, options=options)


@pytest.mark.parametrize("phase", ["planning what to exchange", "letting in", "taking in", "taking", "finishing"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_what_fails_in_any_phase_fails_all(workers: WorkerPool, tmp_path: Path, phase: str, failing_rank: int) -> None:
    """Other phases are in test_exchange.py and test_failures.py."""
    outcomes = workers.run(fail_in, str(tmp_path), phase, failing_rank, world_size=3)
    errors = [error for error, _ in outcomes]
    assert errors == [errors[0]] * 3
    assert errors[0] is not None
    assert (errors[0].kind, errors[0].ranks) == ("rank_failed", (failing_rank,))
    assert "boom" in errors[0].message
    assert all(next_loads for _, next_loads in outcomes)


NUM_SLOW_READS, SLOW_READ_S = 16, 0.5
EXTENT_BYTES = 8192
VALUES = {name: torch.arange(2 * NUM_SLOW_READS * EXTENT_BYTES // 4, dtype=torch.int32) for name in ("first", "second")}


def load_from_a_slow_store(rank: int, world_size: int, path: str) -> tuple[bool, float]:
    """Rank 1 reads half of `first` for itself and for rank 0 before rank 2 hears anything from it."""
    state = {name: torch.zeros_like(value) for name, value in VALUES.items() if rank < 2 or name == "second"}
    slow = before(Seam(local_store.LocalStore, "read_into"), lambda: time.sleep(SLOW_READ_S))
    started = time.monotonic()
    with small_pieces(extent_bytes=EXTENT_BYTES), slow if rank == 1 else nullcontext():
        one_extent = 2 * EXTENT_BYTES + 4000  # half of it is for reading
        options = bcp.LoadOptions(exchange="on", timeout_s=TIMEOUT_S, reader_threads=1, scratch_bytes=one_extent)
        bcp.load(path, state, options=options)
    return all(torch.equal(tensor, VALUES[name]) for name, tensor in state.items()), time.monotonic() - started


def test_a_reader_that_is_slow_is_waited_for(workers: WorkerPool, tmp_path: Path) -> None:
    with small_pieces(extent_bytes=EXTENT_BYTES):
        bcp.save(tmp_path, VALUES)
    outcomes = workers.run(load_from_a_slow_store, str(tmp_path), world_size=3, timeout_s=120)
    assert [is_right for is_right, _ in outcomes] == [True] * 3
    assert min(seconds for _, seconds in outcomes) > SLOW_READ_S * NUM_SLOW_READS > 3 * TIMEOUT_S


def lose_a_peer(rank: int, world_size: int, path: str, phase: str) -> Seen | None:
    """Rank 2 has so much of its own to read that it reads nothing for others, and dies of the first unit."""
    state = {name: torch.zeros_like(value) for name, value in VALUES.items() if rank == 2 or name == "first"}
    dies = before(PHASES[phase], lambda: os.kill(os.getpid(), signal.SIGKILL))
    with small_pieces(extent_bytes=EXTENT_BYTES), dies if rank == 2 else nullcontext(), in_phase(phase, rank):
        options = bcp.LoadOptions(exchange="on", timeout_s=300, scratch_bytes=40_000)
        return seen(lambda: bcp.load(path, state, options=options))


LOST = {
    "taking in": "was to take what this one reads, and is gone",
    "taking": "shared memory with this one, and its process has ended",
}
SEEN_AT_BARRIER = "cannot answer, because process"
"""What rank 0 says of rank 2 instead if rank 1 has left the exchange first, so that rank 0 waits for all already."""


@pytest.mark.parametrize("phase", LOST)
def test_a_peer_that_dies_is_known_long_before_the_timeout(workers: WorkerPool, tmp_path: Path, phase: str) -> None:
    with small_pieces(extent_bytes=EXTENT_BYTES):
        bcp.save(tmp_path, VALUES)
    *others, lost = workers.run_each(lose_a_peer, str(tmp_path), phase, world_size=3, timeout_s=100)
    assert isinstance(lost.error, WorkerDied)
    for outcome in others:
        assert outcome.error is None, outcome.error
        assert (outcome.value.kind, outcome.value.ranks) == ("rank_missing", (2,))
        assert LOST[phase] in outcome.value.message or SEEN_AT_BARRIER in outcome.value.message


HOLD_S = 60.0


def interrupt_rank_1(rank: int, world_size: int, path: str) -> tuple[str, tuple[int, ...]]:
    """While rank 0 answers nobody, rank 1 is interrupted: what each raises. Rank 0 goes on when rank 1 has raised."""
    store, is_over = dist.distributed_c10d._get_default_store(), "rank 1 has raised"
    bcp.save(path, state_of(rank, 1.0))
    interrupt = before(PHASES["letting in"], raising(KeyboardInterrupt()))
    hold = before(PHASES["dividing the work"], lambda: store.wait([is_over], timedelta(seconds=HOLD_S)))
    try:
        with hold if rank == 0 else interrupt:
            bcp.load(path, state_of(rank, 0.0), options=bcp.LoadOptions(exchange="on", timeout_s=2 * HOLD_S))
    except KeyboardInterrupt:
        store.set(is_over, "")
        return "KeyboardInterrupt", ()
    except bcp.CheckpointError as error:
        return error.kind, error.ranks
    return "", ()


def test_an_interrupt_does_not_wait_for_a_reader_that_does_not_answer(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(interrupt_rank_1, str(tmp_path), world_size=2)
    assert outcomes == [("rank_missing", (1,)), ("KeyboardInterrupt", ())]
