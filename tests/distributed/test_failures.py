"""A rank that fails or does not come, in every phase of a save and of a load: all ranks say the same about it, nothing
is committed, what was there still loads, and the next call works.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from faults.lost_ranks import LATER_S, NOISE_S
from faults.seams import (
    COORDINATOR_PHASES,
    LOAD_PHASES,
    SAVE_PHASES,
    Seam,
    Seen,
    before,
    files_under,
    holds,
    loads_as,
    raising,
    seen,
    state_of,
)

import bytecheckpoint as bcp
from distributed.held_by_rank import HeldByRank
from distributed.workers import WorkerDied, WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=30)
IMPATIENT_S = 3.0


def boom() -> Exception:
    return RuntimeError("boom")


def no_space() -> Exception:
    return bcp.CheckpointSaveError("the disk is full", kind="no_space")


def no_permission() -> Exception:
    return bcp.StorageError("you may not", kind="permission")


class Broken:
    """An object whose state cannot be had, or not be put back."""

    def __init__(self, *, breaks_on: str) -> None:
        self._breaks_on = breaks_on

    def state_dict(self) -> dict[str, Any]:
        if self._breaks_on == "save":
            raise RuntimeError("boom")
        return {"count": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        if self._breaks_on == "load":
            raise RuntimeError("boom")


class Outcome(NamedTuple):
    """What a rank saw of a save that failed between two that did not."""

    error: Seen | None
    steps: list[int]
    leftovers: list[str]
    previous_loads: bool
    next_loads: bool


def try_a_failing_save(
    rank: int,
    world_size: int,
    path: str,
    function: Seam | None,
    make_error: Callable[[], Exception],
    failing_rank: int,
    is_async: bool,
) -> Outcome:
    bcp.save(path, state_of(rank, 1.0), step=1, options=OPTIONS)
    state = state_of(rank, 2.0)
    if function is None and rank == failing_rank:
        state["broken"] = Broken(breaks_on="save")
    is_faulty = function is not None and rank == failing_rank
    with before(function, raising(make_error())) if function and is_faulty else nullcontext():
        error = seen(lambda: bcp.save(path, state, step=2, async_save=is_async, options=OPTIONS).result())
    dist.barrier()
    steps, leftovers = bcp.steps(path), files_under(Path(path, "step_00000002"))
    previous_loads = loads_as(path, rank, 1.0)
    bcp.save(path, state_of(rank, 3.0), step=3, async_save=is_async, options=OPTIONS).result()
    return Outcome(error, steps, leftovers, previous_loads, loads_as(path, rank, 3.0))


def check(outcomes: list[Outcome], failing_rank: int, expected: tuple[str, str]) -> None:
    errors = [outcome.error for outcome in outcomes]
    assert len(set(errors)) == 1, errors
    assert errors[0] is not None
    assert (errors[0].cls, errors[0].kind, errors[0].ranks) == (*expected, (failing_rank,))
    assert f"rank {failing_rank}" in errors[0].message
    for outcome in outcomes:
        assert outcome.steps == [1]
        assert outcome.leftovers == []
        assert outcome.previous_loads
        assert outcome.next_loads


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("failing_rank", [0, 2])
@pytest.mark.parametrize("phase", SAVE_PHASES)
def test_a_rank_that_fails_in_a_save_fails_all(
    workers: WorkerPool, tmp_path: Path, phase: str, failing_rank: int, is_async: bool
) -> None:
    outcomes = workers.run(
        try_a_failing_save, str(tmp_path), SAVE_PHASES[phase], boom, failing_rank, is_async, world_size=3
    )
    check(outcomes, failing_rank, ("CheckpointSaveError", "rank_failed"))


@pytest.mark.parametrize("phase", sorted(COORDINATOR_PHASES.keys() - {"committing"}))
def test_a_coordinator_that_fails_in_a_save_fails_all(workers: WorkerPool, tmp_path: Path, phase: str) -> None:
    outcomes = workers.run(try_a_failing_save, str(tmp_path), COORDINATOR_PHASES[phase], boom, 0, False, world_size=3)
    check(outcomes, 0, ("CheckpointSaveError", "rank_failed"))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_state_that_cannot_be_had_on_one_rank_fails_all(
    workers: WorkerPool, tmp_path: Path, failing_rank: int
) -> None:
    outcomes = workers.run(try_a_failing_save, str(tmp_path), None, boom, failing_rank, False, world_size=2)
    check(outcomes, failing_rank, ("CheckpointSaveError", "rank_failed"))


@pytest.mark.parametrize(
    ("make_error", "expected"),
    [(no_space, ("CheckpointSaveError", "no_space")), (no_permission, ("StorageError", "permission"))],
    ids=["no_space", "permission"],
)
def test_an_error_of_a_kind_keeps_it_on_every_rank(
    workers: WorkerPool, tmp_path: Path, make_error: Callable[[], Exception], expected: tuple[str, str]
) -> None:
    outcomes = workers.run(
        try_a_failing_save, str(tmp_path), SAVE_PHASES["writing"], make_error, 1, False, world_size=2
    )
    check(outcomes, 1, expected)


def save_without_sharing(rank: int, world_size: int, path: str) -> Outcome:
    """What rank 1 writes comes to a disk of its own."""
    bcp.save(path, state_of(rank, 1.0), step=1, options=OPTIONS)
    folder = Path(path, "step_00000002", "data")

    def hide() -> None:
        (found,) = folder.glob("*-00001-*")
        found.rename(Path(path, "elsewhere"))

    with before(COORDINATOR_PHASES["building"], hide) if rank == 0 else nullcontext():
        error = seen(lambda: bcp.save(path, state_of(rank, 2.0), step=2, options=OPTIONS))
    dist.barrier()
    steps, leftovers = bcp.steps(path), files_under(Path(path, "step_00000002"))
    previous_loads = loads_as(path, rank, 1.0)
    bcp.save(path, state_of(rank, 3.0), step=3, options=OPTIONS)
    return Outcome(error, steps, leftovers, previous_loads, loads_as(path, rank, 3.0))


def test_a_folder_that_the_hosts_do_not_share_is_noticed_before_the_commit(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(save_without_sharing, str(tmp_path), world_size=2)
    check(outcomes, 0, ("CheckpointSaveError", "storage"))
    error = outcomes[1].error
    assert error is not None
    assert "file system that the hosts of all ranks share" in error.message


def test_a_full_disk_at_the_commit_fails_all_and_leaves_nothing(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(
        try_a_failing_save, str(tmp_path), COORDINATOR_PHASES["committing"], no_space, 0, False, world_size=2
    )
    check(outcomes, 0, ("CheckpointSaveError", "no_space"))


def commit_without_an_answer(rank: int, world_size: int, path: str) -> tuple[Seen | None, bool]:
    lost = bcp.StorageError("connection reset", kind="unavailable")
    with before(COORDINATOR_PHASES["committing"], raising(lost)):
        error = seen(lambda: bcp.save(path, state_of(rank, 1.0), options=OPTIONS))
    bcp.save(path, state_of(rank, 2.0), options=OPTIONS)
    return error, loads_as(path, rank, 2.0)


def test_an_error_of_the_commit_that_may_have_succeeded_says_so(workers: WorkerPool, tmp_path: Path) -> None:
    (first, first_loads), (second, second_loads) = workers.run(commit_without_an_answer, str(tmp_path), world_size=2)
    assert first == second
    assert first is not None
    assert "whether the checkpoint was committed" in first.message
    assert first_loads
    assert second_loads


def fail_on_all(rank: int, world_size: int, path: str) -> Seen | None:
    with before(SAVE_PHASES["writing"], raising(RuntimeError(f"boom {rank}"))):
        return seen(lambda: bcp.save(path, state_of(rank, 1.0), options=OPTIONS))


def test_when_all_ranks_fail_all_raise_one_of_their_errors(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(fail_on_all, str(tmp_path), world_size=3)
    assert len(set(errors)) == 1
    assert errors[0].kind == "rank_failed"
    assert "boom" in errors[0].message


class Loaded(NamedTuple):
    """What a rank saw of a load that failed before one that did not."""

    error: Seen | None
    is_untouched: bool
    next_loads: bool


def try_a_failing_load(rank: int, world_size: int, path: str, function: Seam, failing_rank: int) -> Loaded:
    bcp.save(path, state_of(rank, 1.0), options=OPTIONS)
    state = state_of(rank, 9.0)
    options = bcp.LoadOptions(timeout_s=30)
    with before(function, raising(boom())) if rank == failing_rank else nullcontext():
        error = seen(lambda: bcp.load(path, state, options=options))
    return Loaded(error, holds(state, rank, 9.0), loads_as(path, rank, 1.0))


@pytest.mark.parametrize("failing_rank", [0, 2])
@pytest.mark.parametrize("phase", LOAD_PHASES)
def test_a_rank_that_fails_in_a_load_fails_all(
    workers: WorkerPool, tmp_path: Path, phase: str, failing_rank: int
) -> None:
    outcomes = workers.run(try_a_failing_load, str(tmp_path), LOAD_PHASES[phase], failing_rank, world_size=3)
    errors = [outcome.error for outcome in outcomes]
    assert len(set(errors)) == 1, errors
    assert (errors[0].cls, errors[0].kind, errors[0].ranks) == ("CheckpointError", "rank_failed", (failing_rank,))
    assert f"rank {failing_rank}" in errors[0].message
    assert all(outcome.next_loads for outcome in outcomes)
    for rank, outcome in enumerate(outcomes):
        assert outcome.is_untouched == (phase != "reading" or rank == failing_rank)
        assert (f"The state of rank {rank} is partly overwritten" in outcome.error.own) != outcome.is_untouched
        assert ("Nothing of the state of rank" in outcome.error.own) == (phase == "reading" and outcome.is_untouched)


def put_back_a_broken_object(rank: int, world_size: int, path: str, breaks_on: str) -> Seen | None:
    bcp.save(path, {"object": Broken(breaks_on="nothing")}, options=OPTIONS)
    state = {"object": Broken(breaks_on=breaks_on if rank == 1 else "nothing")}
    return seen(lambda: bcp.load(path, state, options=bcp.LoadOptions(timeout_s=30)))


@pytest.mark.parametrize("breaks_on", ["save", "load"])
def test_an_object_that_fails_on_one_rank_fails_the_load_on_all(
    workers: WorkerPool, tmp_path: Path, breaks_on: str
) -> None:
    errors = workers.run(put_back_a_broken_object, str(tmp_path), breaks_on, world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].kind, errors[0].ranks) == ("rank_failed", (1,))


class Case(NamedTuple):
    """A rank of a group that goes missing in a call."""

    kind: str
    function: Seam
    missing_rank: int
    how: str


PAIRS = [
    [
        Case("save", SAVE_PHASES["planning"], 1, "killed"),
        Case("save", SAVE_PHASES["staging"], 1, "stopped"),
        Case("async save", SAVE_PHASES["writing"], 1, "killed"),
        Case("load", LOAD_PHASES["matching"], 1, "stopped"),
    ],
    [
        Case("save", SAVE_PHASES["planning"], 0, "stopped"),
        Case("save", SAVE_PHASES["writing"], 0, "killed"),
        Case("save", COORDINATOR_PHASES["committing"], 0, "killed"),
        Case("load", LOAD_PHASES["opening"], 0, "killed"),
    ],
    [
        Case("async save", SAVE_PHASES["reporting"], 1, "stopped"),
        Case("async save", SAVE_PHASES["writing"], 0, "stopped"),
        Case("load", LOAD_PHASES["planning"], 1, "killed"),
        Case("load", LOAD_PHASES["reading"], 0, "stopped"),
    ],
]
TRIPLES = [
    [Case("save", SAVE_PHASES["writing"], 1, "stopped"), Case("load", LOAD_PHASES["reading"], 2, "killed")],
]


def go_missing(rank: int, world_size: int, root: str, cases: list[Case]) -> tuple[Seen | None, bool]:
    """In each group of ranks one rank stops or dies, all groups at once. The others wake it when they have their
    error, and then all save again.
    """
    size = world_size // len(cases)
    number, own_rank = divmod(rank, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
    case, group, path = cases[number], groups[number], f"{root}/{number}"
    pids: list[int] = [0] * size
    dist.all_gather_object(pids, os.getpid(), group=group)
    bcp.save(path, state_of(own_rank, 1.0), step=1, options=OPTIONS, process_group=group)
    dist.barrier(group=group)
    with ExitStack() as stack:
        if own_rank == case.missing_rank:
            signal_number = signal.SIGKILL if case.how == "killed" else signal.SIGSTOP
            stack.enter_context(before(case.function, once(lambda: signal.pthread_kill(get_ident(), signal_number))))
        error = seen(_call(path, own_rank, case.kind, group))
    if case.how == "killed":
        return error, True
    if own_rank == (case.missing_rank + 1) % size:
        os.kill(pids[case.missing_rank], signal.SIGCONT)
    dist.barrier(group=group)
    bcp.save(path, state_of(own_rank, 3.0), step=3, options=OPTIONS, process_group=group)
    return error, loads_as(path, own_rank, 3.0, process_group=group)


def _call(path: str, rank: int, kind: str, group: Any = None) -> Callable[[], object]:
    if kind == "load":
        load_options = bcp.LoadOptions(timeout_s=IMPATIENT_S)
        return lambda: bcp.load(path, state_of(rank, 9.0), options=load_options, process_group=group)
    is_async, options = kind == "async save", bcp.SaveOptions(timeout_s=IMPATIENT_S)
    state = state_of(rank, 2.0)
    return lambda: bcp.save(path, state, step=2, async_save=is_async, options=options, process_group=group).result()


def once(action: Callable[[], object]) -> Callable[[], object]:
    left = [action]
    return lambda: left.pop()() if left else None


@pytest.mark.parametrize(("cases", "size"), [*((cases, 2) for cases in PAIRS), *((cases, 3) for cases in TRIPLES)])
def test_a_rank_that_does_not_come_is_named_by_all_others(
    workers: WorkerPool, tmp_path: Path, cases: list[Case], size: int
) -> None:
    outcomes = workers.run_each(go_missing, str(tmp_path), cases, world_size=size * len(cases))
    for number, case in enumerate(cases):
        of_case = outcomes[number * size : (number + 1) * size]
        if case.how == "killed":
            assert isinstance(of_case.pop(case.missing_rank).error, WorkerDied)
        for rank, outcome in enumerate(of_case):
            assert outcome.error is None, (case, outcome.error)
            error, next_loads = outcome.value
            assert error is not None, case
            if case.how == "killed" or rank != case.missing_rank:  # a rank that is stopped is so for longer
                assert error.seconds <= IMPATIENT_S + LATER_S + NOISE_S, case
            assert next_loads, case
            name = number * size + case.missing_rank
            assert (error.kind, error.ranks) == ("rank_missing", (name,)), case
            expected = "cannot answer, because process" if case.how == "killed" else "did not answer"
            assert f"rank {name} {expected}" in error.message
        path = tmp_path / str(number)
        assert bcp.steps(path) == ([1] if case.how == "killed" else [1, 3])
        assert all(loads_as(path, rank, 1.0, step=1, strict=False) for rank in range(size))


def go_to_different_endpoints(rank: int, world_size: int, kind: str) -> Seen | None:
    own = {"endpoint_url": f"http://rank{rank}:9000"}
    state = state_of(rank, 1.0)
    if kind == "load":
        return seen(lambda: bcp.load("memory://run", state, storage_options=own))
    return seen(lambda: bcp.save("memory://run", state, storage_options=own, options=OPTIONS))


@pytest.mark.parametrize("kind", ["save", "load"])
def test_one_url_at_two_endpoints_is_refused(workers: WorkerPool, kind: str) -> None:
    """Else the manifest would be committed at one of them, and name data that is at the other."""
    first, second = workers.run(go_to_different_endpoints, kind, world_size=2)
    assert first == second
    assert (first.cls, first.kind, first.ranks) == ("CheckpointMismatchError", "conflict", (1,))
    assert "at http://rank0:9000" in first.message
    assert "at http://rank1:9000" in first.message


def one_does_not_call(rank: int, world_size: int, path: str) -> Seen | None:
    return None if rank == 1 else seen(_call(path, rank, "save"))


def test_a_rank_that_does_not_call_save_is_named(workers: WorkerPool, tmp_path: Path) -> None:
    first, nothing, third = workers.run(one_does_not_call, str(tmp_path), world_size=3)
    assert first == third
    assert (first.cls, first.kind, first.ranks) == ("CheckpointSaveError", "rank_missing", (1,))
    assert nothing is None
    assert bcp.steps(tmp_path) == []


def save_to_memory_without_options_for_it(rank: int, world_size: int, path: str, odd: int) -> tuple[Seen | None, bool]:
    memory = None if rank == odd else bcp.Memory(copies=1, root=f"{path}/memory")
    options = bcp.SaveOptions(timeout_s=30, memory=memory)
    error = seen(lambda: bcp.save(f"{path}/run", state_of(rank, 1.0), step=1, to="memory", options=options))
    bcp.save(f"{path}/run", state_of(rank, 1.0), step=2, options=OPTIONS)
    return error, loads_as(Path(path, "run"), rank, 1.0, step=2, strict=False)


@pytest.mark.filterwarnings("ignore:the memory root")
@pytest.mark.parametrize("odd", [0, 1])
def test_options_without_memory_on_one_rank_fail_a_save_to_memory_on_all(
    workers: WorkerPool, tmp_path: Path, odd: int
) -> None:
    """It was refused before that rank made the call, and the others waited for it until their time limit."""
    outcomes = workers.run(save_to_memory_without_options_for_it, str(tmp_path), odd, world_size=2)
    for error, goes_on in outcomes:
        assert error is not None
        assert (error.cls, error.kind) == ("CheckpointMismatchError", "conflict")
        assert "its options have none; nothing was saved" in error.message
        assert goes_on


def load_beside_another_failure(rank: int, world_size: int, path: str) -> Seen | None:
    """Rank 2 fails while rank 1 does not come at all."""
    if rank == 1:
        return None
    with before(SAVE_PHASES["planning"], raising(boom())) if rank == 2 else nullcontext():
        return seen(lambda: bcp.save(path, state_of(rank, 1.0), options=bcp.SaveOptions(timeout_s=IMPATIENT_S)))


def test_a_failure_is_not_kept_waiting_for_a_rank_that_does_not_come(workers: WorkerPool, tmp_path: Path) -> None:
    first, _, third = workers.run(load_beside_another_failure, str(tmp_path), world_size=3)
    assert first == third
    assert (first.kind, first.ranks) == ("rank_failed", (2,))


def report_too_little(rank: int, world_size: int, path: str) -> Seen | None:
    """The last rank of a group that is not the first says that its file is shorter than it was to be."""
    from bytecheckpoint.saving import commit
    from bytecheckpoint.saving import report as reporting

    def lie(agreed: Any, written: Any) -> bytes:
        report = msgspec.msgpack.decode(reporting.encode_report(agreed, written), type=reporting._RankReport)
        files = [msgspec.structs.replace(file, byte_length=1) for file in report.files]
        return msgspec.msgpack.encode(msgspec.structs.replace(report, files=files))

    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(commit, "encode_report", lie)
        return seen(lambda: bcp.save(path, state_of(rank, 1.0), options=OPTIONS, process_group=group))


def test_a_rank_that_reports_something_else_is_named_by_its_global_rank(workers: WorkerPool, tmp_path: Path) -> None:
    _, *errors = workers.run(report_too_little, str(tmp_path), world_size=3)
    assert errors[0] is not None
    assert errors == [errors[0]] * 2
    assert (errors[0].kind, errors[0].ranks) == ("storage", (2,))
    assert "rank 2 was to write" in errors[0].message
    assert bcp.steps(tmp_path) == []


def save_again_and_again(rank: int, world_size: int, path: str) -> list[HeldByRank]:
    """What is held after each of several rounds of saves."""
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for _ in range(3):
        for number in range(10):
            options = bcp.SaveOptions(overwrite=True, timeout_s=60)
            handle = bcp.save(path, state_of(rank, 1.0), async_save=number % 2 == 0, options=options)
            assert handle.result().num_tensors == world_size + 1
            assert loads_as(path, rank, 1.0)
        gc_collect()
        dist.barrier()
        counts.append(HeldByRank.now(store))
        dist.barrier()
    return counts


def gc_collect() -> None:
    import gc
    import threading
    import time

    gc.collect()
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("bcp") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)


def test_many_saves_leave_no_threads_descriptors_or_keys(workers: WorkerPool, tmp_path: Path) -> None:
    for counts in workers.run(save_again_and_again, str(tmp_path), world_size=2):
        assert counts[2].is_no_more_than(counts[1]), counts


def fail_again_and_again(rank: int, world_size: int, path: str) -> list[int]:
    counts = []
    store = dist.distributed_c10d._get_default_store()
    for number in range(6):
        with before(SAVE_PHASES["writing"], raising(boom())) if rank == number % 2 else nullcontext():
            assert seen(lambda: bcp.save(path, state_of(rank, 1.0), options=OPTIONS)) is not None
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_failed_saves_leave_no_keys(workers: WorkerPool, tmp_path: Path) -> None:
    for counts in workers.run(fail_again_and_again, str(tmp_path), world_size=2):
        assert counts[2:] == [counts[2]] * 4, counts


def train_while_saving(rank: int, world_size: int, path: str) -> list[float]:
    """Collectives of the training thread while saves are under way in the background."""
    weights = torch.zeros(1000)
    for step in range(30):
        gradient = torch.full((1000,), float(rank + step))
        dist.all_reduce(gradient)
        weights += gradient
        if step % 5 == 0:
            handle = bcp.save(path, {"weights": weights, "step": step}, step=step, async_save=True, options=OPTIONS)
            weights.add_(0.0)
    handle.result()
    loaded = {"weights": torch.zeros(1000), "step": -1}
    bcp.load(path, loaded)
    return [float(loaded["weights"][0]), float(loaded["step"])]


def test_collectives_go_on_while_a_save_is_under_way(workers: WorkerPool, tmp_path: Path) -> None:
    expected = [sum(0 + 1 + 2 * step for step in range(26)), 25.0]
    assert workers.run(train_while_saving, str(tmp_path), world_size=2) == [expected, expected]
    assert bcp.steps(tmp_path) == [0, 5, 10, 15, 20, 25]
