"""What goes wrong on a rank that has reported what it wrote: the others may commit that already, so its data stays."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from faults.seams import Seam, before, loads_as, state_of

import bytecheckpoint as bcp
from bytecheckpoint.manifest import table
from bytecheckpoint.saving import commit
from bytecheckpoint.storage import layout
from distributed.workers import WorkerPool

INTERRUPTED_RANK = 1
OVERWRITE = bcp.SaveOptions(timeout_s=20, overwrite=True)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def save_over(
    rank: int, world_size: int, path: str, seam: Seam, action: Callable[[], object]
) -> tuple[str | None, bool]:
    """What the second save raised, and whether the checkpoint that stands then is the new one, whole."""
    bcp.save(path, state_of(rank, 1.0), options=OVERWRITE)
    outcome = None
    with ExitStack() as undo:
        ignoring = signal.signal(signal.SIGINT, signal.default_int_handler)  # the pool's workers ignore it
        undo.callback(signal.signal, signal.SIGINT, ignoring)
        undo.enter_context(before(seam, action) if rank == INTERRUPTED_RANK else nullcontext())
        try:
            bcp.save(path, state_of(rank, 2.0), options=OVERWRITE)
        except BaseException as error:  # noqa: BLE001  told
            outcome = type(error).__name__
    dist.barrier()
    return outcome, loads_as(path, rank, 2.0)


def test_what_a_rank_that_is_interrupted_has_reported_stays_where_the_others_commit_it(
    workers: WorkerPool, tmp_path: Path
) -> None:
    function = Seam(commit, "write_telemetry")
    outcomes = workers.run(save_over, str(tmp_path), function, press_ctrl_c, world_size=2)
    assert outcomes == [(None, True), ("KeyboardInterrupt", True)]


def no_network() -> None:
    raise OSError(5, "the network is gone")


@pytest.mark.parametrize("seam", [Seam(socket, "gethostname"), Seam(layout, "telemetry_name")], ids=str)
def test_telemetry_that_one_rank_cannot_write_is_no_failure_of_the_save(
    workers: WorkerPool, tmp_path: Path, seam: Seam
) -> None:
    outcomes = workers.run(save_over, str(tmp_path), seam, no_network, world_size=2)
    assert outcomes == [(None, True), (None, True)]


def checks_of_chunks(rank: int, world_size: int, path: str) -> int:
    """How often the first save of a layout has this rank check all chunks of a manifest."""
    checks: list[str] = []
    with before(Seam(table.TensorTable, "check_all"), lambda: checks.append("all")):
        bcp.save(path, {"first": state_of(rank, 1.0)}, options=OVERWRITE)
    return len(checks)


def test_a_save_has_the_chunks_of_its_manifest_checked_once(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(checks_of_chunks, str(tmp_path), world_size=2) == [1, 0]


def checks_of_later_saves(rank: int, world_size: int, path: str) -> list[int]:
    """How often each of three saves has this rank check all chunks of a manifest; they are of one layout."""
    checks: list[int] = []
    for number in range(3):
        checks.append(0)
        with before(Seam(table.TensorTable, "check_all"), lambda: checks.append(checks.pop() + 1)):
            bcp.save(f"{path}/{number}", {"later": state_of(rank, float(number))}, options=OVERWRITE)
    return checks


def test_later_saves_with_a_plan_check_no_chunk_again(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(checks_of_later_saves, str(tmp_path), world_size=2) == [[1, 0, 0], [0, 0, 0]]
