"""Saves that begin before the ranks have agreed on them: nobody waits for that who need not, what they then agree on is
what is saved, and what they do not agree on is told to all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seam, Seen, before, holds, loads_as, raising, seen, state_of

import bytecheckpoint as bcp
from bytecheckpoint.saving import prepare
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from distributed.workers import WorkerPool

OPTIONS = {kind: bcp.SaveOptions(snapshot=kind, timeout_s=60) for kind in ("copy", "lazy")}  # type: ignore[arg-type]


def begin(path: str, state: dict[str, Any], kind: str, **arguments: Any) -> bcp.SaveHandle:
    return bcp.save(path, state, async_save=True, options=OPTIONS[kind], **arguments)


def know_a_plan(rank: int, path: str) -> None:
    process_state().plans = PlanCache()
    for number in range(2):  # the first makes the plan and the second what is kept of it
        begin(f"{path}-{number}", state_of(rank, 1.0), "lazy").result()


def return_before_others_come(rank: int, world_size: int, path: str) -> bool:
    know_a_plan(rank, f"{path}-before")
    state = state_of(rank, 2.0)
    if rank == 1:
        dist.barrier()  # which rank 0 comes to when its save has returned
    handle = begin(path, state, "lazy")
    if rank == 0:
        dist.barrier()
    handle.staged()
    state["all"].fill_(-1.0)
    handle.result()
    return loads_as(path, rank, 2.0)


def test_a_lazy_save_with_a_known_plan_waits_for_nobody(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(return_before_others_come, str(tmp_path / "x"), world_size=2) == [True] * 2


def call_after_call(rank: int, world_size: int, path: str) -> list[bool]:
    """Two lazy saves and a load, one right after the other, on ranks of which each is late in turn."""
    know_a_plan(rank, f"{path}-before")
    outcomes = []
    for late in range(world_size):
        handles = []
        for number in range(2):
            if rank == late:
                dist.barrier()
            handles.append(begin(f"{path}-{late}-{number}", state_of(rank, float(number)), "lazy"))
            if rank != late:
                dist.barrier()
        outcomes.append(loads_as(f"{path}-before-1", rank, 1.0))
        for handle in handles:
            handle.result()
        outcomes += [loads_as(f"{path}-{late}-{number}", rank, float(number)) for number in range(2)]
    return outcomes


def test_calls_keep_their_order_on_all_ranks(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(call_after_call, str(tmp_path / "x"), world_size=2) == [[True] * 6] * 2


def save_more_on_one_rank(rank: int, world_size: int, path: str, kind: str) -> tuple[bool, bool]:
    know_a_plan(rank, f"{path}-before")
    state = state_of(rank, 3.0)
    if rank == 1:
        state["more"] = torch.arange(300_000.0)
    handle = begin(path, state, kind)
    handle.staged()
    for tensor in (state["all"], state["own"][f"rank{rank}"]):
        tensor.fill_(-1.0)
    handle.result()
    found = state_of(rank, 0.0)
    bcp.load(path, found)
    return holds(found, rank, 3.0), torch.equal(bcp.open(path)["more"][:], torch.arange(300_000.0))


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_is_saved_is_what_the_ranks_agree_on_not_what_one_of_them_knew(
    workers: WorkerPool, tmp_path: Path, kind: str
) -> None:
    assert workers.run(save_more_on_one_rank, str(tmp_path / "x"), kind, world_size=2) == [(True, True)] * 2


def save_where_one_stands(rank: int, world_size: int, path: str, kind: str) -> tuple[str, Seen | None, bool]:
    know_a_plan(rank, f"{path}-before")
    handles: list[bcp.SaveHandle] = []
    error = seen(lambda: handles.append(begin(f"{path}-before-0", state_of(rank, 4.0), kind)))
    where = "handle" if handles else "save"
    return where, seen(handles[0].result) if handles else error, saves_well(rank, path, kind)


def saves_well(rank: int, path: str, kind: str) -> bool:
    begin(path, state_of(rank, 5.0), kind).result()
    return loads_as(path, rank, 5.0) and loads_as(f"{path}-before-0", rank, 1.0)


@pytest.mark.parametrize(("kind", "where"), [("copy", "save"), ("lazy", "handle")])
def test_a_checkpoint_that_stands_there_is_told_to_all(
    workers: WorkerPool, tmp_path: Path, kind: str, where: str
) -> None:
    outcomes = workers.run(save_where_one_stands, str(tmp_path / "x"), kind, world_size=2)
    assert outcomes[0] == outcomes[1]
    told, error, is_good = outcomes[0]
    assert (told, error.cls, is_good) == (where, "CheckpointExistsError", True)


def save_differing(rank: int, world_size: int, path: str, kind: str) -> tuple[Seen | None, Seen | None, bool]:
    know_a_plan(rank, f"{path}-before")
    state = state_of(rank, 6.0)
    state["plain"]["value"] = float(rank)
    first = seen(lambda: begin(path, state, kind).result())
    # An error that only one rank meets, before anything is exchanged.
    with before(Seam(prepare, "new_snapshot"), raising(RuntimeError("boom")) if rank == 1 else lambda: None):
        second = seen(lambda: begin(path, state_of(rank, 6.0), kind).result())
    return first, second, saves_well(rank, path, kind)


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_ranks_do_not_agree_on_is_told_to_all(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    outcomes = workers.run(save_differing, str(tmp_path / "x"), kind, world_size=2)
    assert outcomes[0] == outcomes[1]
    first, second, is_good = outcomes[0]
    assert (first.cls, first.kind) == ("CheckpointMismatchError", "conflict")
    assert (second.cls, second.kind, second.ranks) == ("CheckpointSaveError", "rank_failed", (1,))
    assert is_good


def save_alone(rank: int, world_size: int, path: str) -> list[Seen | None]:
    """Rank 1 misses a lazy save, which returned on rank 0; the next one is good."""
    know_a_plan(rank, f"{path}-before")
    errors: list[Seen | None] = []
    if rank == 0:
        options = bcp.SaveOptions(snapshot="lazy", timeout_s=1)
        handle = bcp.save(path, state_of(rank, 7.0), async_save=True, options=options)
        errors.append(seen(handle.staged))
        errors.append(seen(handle.result))
    dist.barrier()
    begin(f"{path}-after", state_of(rank, 8.0), "lazy").result()
    return [*errors, None if loads_as(f"{path}-after", rank, 8.0) else Seen("", "", (), "wrong values")]


def test_a_rank_that_does_not_come_is_told_by_the_handle(workers: WorkerPool, tmp_path: Path) -> None:
    (staged, result, good), [also_good] = workers.run(save_alone, str(tmp_path / "x"), world_size=2)
    assert staged == result
    assert (result.kind, result.ranks) == ("rank_missing", (1,))
    assert (good, also_good) == (None, None)
