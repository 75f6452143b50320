"""A store that fails at its k-th operation, for every k and in every way: the previous checkpoint loads whole, and the
new one is whole or absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from storage.faulty_store import Fault, FaultyStore

import bytecheckpoint as bcp
from bytecheckpoint import api
from distributed.workers import WorkerPool
from faults.seams import files_under, loads_as, seen, state_of

OPTIONS = bcp.SaveOptions(timeout_s=20)
OVERWRITING = bcp.SaveOptions(timeout_s=20, overwrite=True)
MAX_OPERATIONS = 40


@contextmanager
def faulty(fail_at: int, fault: Fault, *, on_and_on: bool) -> Iterator[list[FaultyStore]]:
    """Within the block every store that is opened fails at that operation; yields them."""
    opened: list[FaultyStore] = []
    open_store = api.open_store

    def open_faulty(*args: Any, **kwargs: Any) -> FaultyStore:
        opened.append(
            FaultyStore(open_store(*args, **kwargs), fail_at=fail_at, fault=fault, broken_from_then_on=on_and_on)
        )
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytecheckpoint.saving.target.open_store", open_faulty)
        patch.setattr("bytecheckpoint.formats.find_checkpoint.open_store", open_faulty)
        yield opened


class Result(NamedTuple):
    """What became of a save with one fault."""

    failed_with: str | None
    fault_was_met: bool
    previous_loads: bool
    new_is: str
    """`whole`, `absent`, or what is wrong with it."""


def what_is(path: Path, rank: int, step: int | None, old: float, new: float, **arguments: Any) -> tuple[bool, str]:
    """Whether the old value loads, and what is at the place of the new one."""
    if step is None:  # in place of the old one
        is_new = loads_as(path, rank, new, **arguments)
        is_old = loads_as(path, rank, old, **arguments)
        return is_new or is_old, "whole" if is_new else "absent" if is_old else "broken"
    is_old = loads_as(path, rank, old, step=1, **arguments)
    if 2 not in bcp.steps(path):
        return is_old, "absent"
    return is_old, "whole" if loads_as(path, rank, new, step=2, **arguments) else "broken"


def save_with_fault(path: Path, rank: int, kind: str, fail_at: int, fault: Fault, on_and_on: bool) -> Result:
    step = None if kind == "overwrite" else 1
    bcp.save(path, state_of(rank, 1.0), step=step, options=OPTIONS)
    second_step = None if kind == "overwrite" else 2
    options = OVERWRITING if kind == "overwrite" else OPTIONS
    is_async = kind == "async"

    def save() -> object:
        return bcp.save(path, state_of(rank, 2.0), step=second_step, async_save=is_async, options=options).result()

    if dist.is_initialized():
        dist.barrier()
    with faulty(fail_at, fault, on_and_on=on_and_on) as opened:
        error = seen(save)
    if dist.is_initialized():
        dist.barrier()
    is_old, new_is = what_is(path, rank, second_step, 1.0, 2.0)
    met = any(store.failed for store in opened)
    return Result(None if error is None else f"{error.cls}[{error.kind}] {error.message}", met, is_old, new_is)


KINDS = ("save", "overwrite", "async")


@pytest.mark.parametrize("on_and_on", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process(tmp_path: Path, kind: str, fault: Fault, on_and_on: bool) -> None:
    check(lambda k: [save_with_fault(tmp_path / str(k), 0, kind, k, fault, on_and_on)])


def save_with_faults(
    rank: int, world_size: int, root: str, kind: str, fault: Fault, faulty_rank: int, ks: list[int]
) -> list[Result]:
    return [save_with_fault(Path(root, str(k)), rank, kind, k if rank == faulty_rank else 0, fault, False) for k in ks]


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(workers: WorkerPool, tmp_path: Path, kind: str, fault: Fault, faulty_rank: int) -> None:
    ks = list(range(1, 14 if faulty_rank == 0 else 5))
    by_rank = workers.run(save_with_faults, str(tmp_path), kind, fault, faulty_rank, ks, world_size=2)
    results = dict(zip(ks, zip(*by_rank, strict=True), strict=True))
    check(lambda k: list(results[k]))
    assert all(first.failed_with == second.failed_with for first, second in results.values())


def check(run: Callable[[int], list[Result]]) -> None:
    """Goes through k until the fault comes after all that a save does."""
    num_failed = 0
    for k in range(1, MAX_OPERATIONS):
        results = run(k)
        for result in results:
            assert result.previous_loads, (k, result)
            assert result.new_is in {"whole", "absent"}, (k, result)
            if result.failed_with is None:
                assert result.new_is == "whole", (k, result)
        if not any(result.fault_was_met for result in results):
            break
        num_failed += any(result.failed_with is not None for result in results)
    else:
        pytest.fail(f"a save has more than {MAX_OPERATIONS} operations")
    assert num_failed >= 1


def test_what_a_failed_write_leaves_is_removed(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0), step=1)
    for k in (2, 4):  # the third is telemetry
        with faulty(k, Fault.CUT, on_and_on=False) as opened:
            error = seen(lambda: bcp.save(tmp_path, state_of(0, 2.0), step=2))
        if error is not None and "whether the checkpoint was committed" not in error.message:
            assert files_under(tmp_path / "step_00000002") == [], opened[0].operations
    assert bcp.steps(tmp_path) == [1]


def test_a_save_is_as_good_without_its_telemetry(tmp_path: Path) -> None:
    with faulty(3, Fault.BEFORE, on_and_on=False) as opened:
        bcp.save(tmp_path, state_of(0, 1.0))
    assert opened[0].failed
    assert loads_as(tmp_path, 0, 1.0)
    assert not (tmp_path / "telemetry").exists()


def test_an_overwrite_removes_what_it_replaced(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        bcp.save(tmp_path, state_of(0, value), options=OVERWRITING)
        assert len(files_under(tmp_path)) == 3
    assert loads_as(tmp_path, 0, 3.0)
