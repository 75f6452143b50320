"""Ranks of which one calls something else than the others, or makes the manager of another root."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seen, seen

import bytecheckpoint as bcp
from bytecheckpoint import save_policies
from bytecheckpoint.saving import prepare
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
SOON_S = 20
"""Less than the time limit of the calls, from which a busy machine may take much."""


def state() -> dict[str, Any]:
    return {"weight": torch.ones(8)}


def manager_at(path: str, *, policy: Any = None, **options: Any) -> bcp.CheckpointManager:
    return bcp.CheckpointManager(
        path,
        save=policy or save_policies.EverySteps(1),
        options=bcp.ManagerOptions(async_save=False, signals=(), save=OPTIONS, **options),
    )


def timed(call: Callable[[], object]) -> tuple[Seen | None, bool]:
    """Returns the error of the call, and if it came soon."""
    began = time.monotonic()
    error = seen(call)
    return error, time.monotonic() - began < SOON_S


def save_or_manage(rank: int, world_size: int, path: str, managing: int) -> tuple[tuple[Seen | None, bool], bool]:
    """One rank makes a manager while the others save; then all save."""
    save = lambda at: bcp.save(at, state(), options=OPTIONS)  # noqa: E731
    outcome = timed((lambda: manager_at(path)) if rank == managing else lambda: save(path))
    save(f"{path}-good")
    return outcome, bcp.load(f"{path}-good", state()).num_tensors == 1


@pytest.mark.parametrize("managing", [0, 1, 2])
def test_a_rank_that_makes_a_manager_while_others_save_is_named_at_once(
    workers: WorkerPool, tmp_path: Path, managing: int
) -> None:
    outcomes = workers.run(save_or_manage, str(tmp_path / "run"), managing, world_size=3)
    named = 1 if managing == 0 else managing
    other = "save" if managing == 0 else "CheckpointManager (opening the root)"
    for (error, is_soon), goes_on in outcomes:
        assert error is not None
        assert (error.cls, error.kind, error.ranks) == ("CheckpointMismatchError", "conflict", (named,))
        assert f"rank {named} called {other} while rank 0 called" in error.message
        assert is_soon
        assert goes_on
    assert not (tmp_path / "run").exists()


def mark_on_one_rank(rank: int, world_size: int, path: str, marking: int) -> tuple[Seen | None, bool]:
    """One rank alone pins a step, as if that were no call of all ranks, while the other goes on to save."""
    manager = manager_at(path)
    manager.save(1, state())
    return timed((lambda: manager.pin(1)) if rank == marking else lambda: manager.save(2, state()))


@pytest.mark.parametrize("marking", [0, 1])
def test_a_call_that_one_rank_alone_makes_is_named(workers: WorkerPool, tmp_path: Path, marking: int) -> None:
    outcomes = workers.run(mark_on_one_rank, str(tmp_path), marking, world_size=2)
    errors = [error for error, _ in outcomes if error is not None]
    calls = ("save", "CheckpointManager (pinning step 1)")
    called = f"rank 1 called {calls[marking]} while rank 0 called {calls[1 - marking]}"
    assert any(called in error.message for error in errors), errors
    assert outcomes[1][1]


def mark_apart(rank: int, world_size: int, path: str) -> Seen | None:
    manager = manager_at(path)
    manager.save(1, state())
    return seen(lambda: manager.pin(1) if rank == 0 else manager.report(1, {"loss": 1.0}))


def test_ranks_that_mark_a_step_in_different_ways_are_told(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(mark_apart, str(tmp_path), world_size=2)
    assert errors[1] is not None
    assert "rank 1 called CheckpointManager (reporting metrics of step 1) while rank 0" in errors[1].message
    assert "(pinning step 1)" in errors[1].message


def make_apart(rank: int, world_size: int, paths: list[str], read_only: list[bool]) -> tuple[Seen | None, bool]:
    return timed(lambda: manager_at(paths[rank], read_only=read_only[rank]))


@pytest.mark.parametrize(
    ("names", "read_only", "told"),
    [
        (("a", "a", "b"), (False, False, False), "/b"),
        (("a", "a", "a"), (False, False, True), "/a (read_only)"),
        (("a", "a", "a"), (True, True, False), "/a"),
    ],
    ids=["root", "reads only", "owns"],
)
def test_a_manager_is_refused_before_its_root_is_claimed_if_the_ranks_do_not_make_the_same(
    workers: WorkerPool, tmp_path: Path, names: tuple[str, ...], read_only: tuple[bool, ...], told: str
) -> None:
    paths = [str(tmp_path / name) for name in names]
    for error, is_soon in workers.run(make_apart, paths, list(read_only), world_size=3):
        assert error is not None
        assert (error.cls, error.kind, error.ranks) == ("CheckpointMismatchError", "conflict", (2,))
        assert f"rank 2 {tmp_path}{told}; nothing was changed" in error.message
        assert is_soon
    assert not list(tmp_path.iterdir())


def make_with_bad_options(rank: int, world_size: int, path: str) -> tuple[Seen | None, bool]:
    given = {"key": "x"} if rank == 1 else None  # which a local path does not take
    return timed(lambda: bcp.CheckpointManager(path, storage_options=given))


def test_a_root_that_one_rank_cannot_open_fails_on_all(workers: WorkerPool, tmp_path: Path) -> None:
    for error, is_soon in workers.run(make_with_bad_options, str(tmp_path / "a"), world_size=2):
        assert error is not None
        assert (error.kind, error.ranks) == ("conflict", (1,))
        assert "storage_options" in error.message
        assert is_soon
    assert not (tmp_path / "a").exists()


def refuse(*_: object, **__: object) -> Any:
    raise MemoryError("no memory")


def fail_on_rank_1(rank: int, world_size: int, path: str, snapshot: Any) -> tuple[bool, bool, Seen | None, int]:
    """The first save that can fails at once on rank 1 alone: its state is not finite, or it has no memory for it."""
    save = replace(OPTIONS, snapshot=snapshot, check_finite="refuse")
    options = bcp.ManagerOptions(signals=(), save=save, on_failed_save="warn")
    model, real = torch.nn.Linear(2, 2), prepare.new_snapshot
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    with bcp.CheckpointManager(path, save=save_policies.EverySteps(1), options=options) as manager:
        if snapshot == "lazy":
            manager.save(1, {"model": model})
            manager.wait()
            model.weight.data[0] = float("nan") if rank == 1 else 0.0
        elif rank == 1:
            prepare.new_snapshot = refuse
        try:
            has_handle = manager.save(2, {"model": model}) is not None
        finally:
            prepare.new_snapshot = real
        model.weight.data[0] = 0.0
        is_due = manager.due(2)
        error = seen(lambda: manager.report(2, {"loss": 1.0}))
        manager.save(3, {"model": model})
        manager.wait()
        return has_handle, is_due, error, manager.stats().num_failed_saves


@pytest.mark.parametrize("snapshot", ["lazy", "copy"])
def test_ranks_go_on_alike_after_a_save_that_failed_at_once_on_one_of_them(
    workers: WorkerPool, tmp_path: Path, snapshot: str
) -> None:
    for has_handle, is_due, error, num_failed in workers.run(fail_on_rank_1, str(tmp_path), snapshot, world_size=2):
        assert (has_handle, is_due, num_failed) == (True, False, 1)
        assert error is not None
        assert error.ranks == (1,)
    assert 3 in bcp.steps(tmp_path)


def restore_with_no_state_on_rank_1(rank: int, world_size: int, path: str) -> tuple[Seen | None, bool]:
    with manager_at(path) as manager:
        return timed(lambda: manager.restore({} if rank == 0 else None))  # type: ignore[arg-type]


def test_a_fresh_start_with_a_state_that_is_none_on_one_rank_fails_on_all(workers: WorkerPool, tmp_path: Path) -> None:
    for error, is_soon in workers.run(restore_with_no_state_on_rank_1, str(tmp_path), world_size=2):
        assert error is not None
        assert error.ranks == (1,)
        assert is_soon
