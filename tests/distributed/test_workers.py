"""The pool itself: if it lies, every distributed test does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist

from distributed import workers as workers_module
from distributed.worker_process import RemoteError
from distributed.workers import WorkerDied, WorkerError, WorkerHung, WorkerPool


class PickyError(ValueError):
    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def sum_over_ranks(rank: int, world_size: int, factor: int) -> tuple[int, int, int]:
    tensor = torch.tensor([rank * factor])
    dist.all_reduce(tensor)
    return rank, world_size, int(tensor)


def say_pid(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on_one(rank: int, world_size: int) -> str:
    if rank == 1:
        try:
            raise OSError(28, "no space")
        except OSError as error:
            raise PickyError("rank one is picky", kind="pickiness") from error
    return "fine"


def fail_before_a_collective(rank: int, world_size: int) -> None:
    if rank == 1:
        raise PickyError("not in the mood", kind="mood")
    dist.barrier()


def raise_the_unpicklable(rank: int, world_size: int) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("nobody can import me", 7)


def return_the_unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def hang_on_one(rank: int, world_size: int) -> str:
    dist.barrier()  # where one is done, the other is here
    if rank == 1:
        time.sleep(600)
    return "done"


def die_on_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def warn(rank: int, world_size: int) -> None:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)


def group_is_there(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def leave_group_oneself(rank: int, world_size: int) -> None:
    dist.barrier()  # a rank that goes while another is still connecting breaks that one's connection
    dist.destroy_process_group()


def crash_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()  # here and now: a signal to the process may be taken by any of its threads, and later


def wait_for_end_of(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.01)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_by_rank(workers: WorkerPool, world_size: int) -> None:
    total = 10 * sum(range(world_size))
    assert workers.run(sum_over_ranks, 10, world_size=world_size) == [
        (rank, world_size, total) for rank in range(world_size)
    ]


def test_processes_are_kept_between_calls(workers: WorkerPool) -> None:
    assert workers.run(say_pid, world_size=2) == workers.run(say_pid, world_size=2) == workers.pids()[:2]


def test_an_exception_comes_back_whole(workers: WorkerPool) -> None:
    outcomes = workers.run_each(fail_on_one, world_size=2)
    assert outcomes[0].value == "fine"
    error = outcomes[1].error
    assert type(error) is PickyError
    assert (str(error), error.kind) == ("rank one is picky", "pickiness")
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == 28
    assert "in fail_on_one" in error.__notes__[0]


def test_run_raises_what_each_rank_raised_with_its_traceback(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1:.*PickyError: rank one is picky.*in fail_on_one") as raised:
        workers.run(fail_on_one, world_size=2)
    assert list(raised.value.errors) == [1]


def test_a_rank_that_fails_releases_those_that_wait_for_it(workers: WorkerPool) -> None:
    outcomes = workers.run_each(fail_before_a_collective, world_size=3)
    assert isinstance(outcomes[1].error, PickyError)
    assert isinstance(outcomes[0].error, RuntimeError)
    assert isinstance(outcomes[2].error, RuntimeError)


def test_what_cannot_be_rebuilt_comes_back_by_name(workers: WorkerPool) -> None:
    error = workers.run_each(raise_the_unpicklable, world_size=1)[0].error
    assert isinstance(error, RemoteError)
    assert error.type_name.endswith("LocalError")
    assert error.remote_args == ("nobody can import me", 7)


def test_a_result_that_cannot_be_pickled_is_an_error(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?i)pickle"):
        workers.run(return_the_unpicklable, world_size=1)


def test_a_worker_that_hangs_is_dumped_and_replaced(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is short for the rank that hangs only: a busy machine may take seconds for the other one."""
    monkeypatch.setattr(
        workers_module, "wait", lambda waited, timeout: wait(waited, 60.0 if len(waited) == 2 else timeout)
    )
    outcomes = workers.run_each(hang_on_one, world_size=2, timeout_s=0.5)
    assert outcomes[0].value == "done"
    assert isinstance(outcomes[1].error, WorkerHung)
    assert "in hang_on_one" in outcomes[1].error.stacks
    assert workers.run(sum_over_ranks, 1, world_size=2) == [(0, 2, 1), (1, 2, 1)]


def test_a_worker_that_dies_is_named_and_replaced(workers: WorkerPool) -> None:
    outcomes = workers.run_each(die_on_one, world_size=2)
    assert outcomes[0].value == "alive"
    assert isinstance(outcomes[1].error, WorkerDied)
    assert outcomes[1].error.exit_code == -signal.SIGKILL
    assert workers.run(sum_over_ranks, 1, world_size=2) == [(0, 2, 1), (1, 2, 1)]


def test_a_worker_that_crashes_says_where(workers: WorkerPool) -> None:
    error = workers.run_each(crash_on_one, world_size=2)[1].error
    assert isinstance(error, WorkerDied)
    assert error.exit_code == -signal.SIGABRT
    assert "in crash_on_one" in str(error)


def test_a_worker_that_died_between_calls_is_replaced(workers: WorkerPool) -> None:
    pid = workers.run(say_pid, world_size=2)[1]
    os.kill(pid, signal.SIGKILL)
    wait_for_end_of(pid)
    assert workers.run(sum_over_ranks, 1, world_size=2) == [(0, 2, 1), (1, 2, 1)]
    assert pid not in workers.pids()


def test_a_warning_is_an_error_there_too(workers: WorkerPool) -> None:
    error = workers.run_each(warn, world_size=1)[0].error
    assert isinstance(error, UserWarning)


@pytest.mark.filterwarnings("ignore:mind the gap")
def test_the_filters_of_the_test_hold_in_workers(workers: WorkerPool) -> None:
    workers.run(warn, world_size=1)


def test_a_call_may_do_without_a_group(workers: WorkerPool) -> None:
    assert workers.run(group_is_there, world_size=1, process_group=False) == [False]
    assert workers.run(group_is_there, world_size=1) == [True]


def test_a_function_may_leave_the_group_itself(workers: WorkerPool) -> None:
    workers.run(leave_group_oneself, world_size=2)
