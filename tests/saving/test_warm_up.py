"""What warm_up does ahead, and that it does nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before, raising, state_of
from snapshot_cases import OPTIONS, save

import bytecheckpoint as bcp
from bytecheckpoint import phases
from bytecheckpoint.saving import global_plan, write
from distributed.workers import WorkerPool

NUM_BYTES = 96 << 20


def resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def grow(rank: int, world_size: int, path: str, kind: str) -> tuple[int, int, list[str]]:
    """By how much memory grows at a warm-up, and at the save after it; and what the warm-up has written."""
    state = {"x": torch.ones(NUM_BYTES, dtype=torch.uint8)}
    bcp.save(path + "-small", {"x": torch.ones(3)}, async_save=True, options=OPTIONS[kind]).result(20)
    before = resident_bytes()
    bcp.warm_up(state, options=OPTIONS[kind])
    after = resident_bytes()
    written = [entry.name for entry in Path(path).parent.iterdir() if not entry.name.endswith("-small")]
    save(path, state, kind).result(60)
    return after - before, resident_bytes() - after, written


@pytest.mark.parametrize(("kind", "num_bytes"), [("copy", NUM_BYTES), ("lazy", NUM_BYTES), ("waves", 32 << 20)])
def test_memory_is_taken_ahead_and_not_again(tmp_path: Path, kind: str, num_bytes: int) -> None:
    pool = WorkerPool()  # a process that has staged nothing yet
    try:
        ((ahead, later, written),) = pool.run(grow, str(tmp_path / "ckpt"), kind, world_size=1, process_group=False)
    finally:
        pool.close()
    assert 0.8 * num_bytes < ahead < 1.2 * num_bytes + (8 << 20)
    assert later < 16 << 20
    assert written == []


def test_the_plan_is_made_ahead(tmp_path: Path) -> None:
    state = state_of(0, 1.0) | {"another": torch.ones(17, 3)}
    bcp.warm_up(state)
    with before(Seam(global_plan, "plan_save"), raising(AssertionError("planned again"))):
        bcp.save(tmp_path, state, async_save=True).result(20)


def test_a_warm_up_waits_for_the_save_under_way_and_tells_of_its_failure(tmp_path: Path) -> None:
    with before(Seam(write, "write_image"), raising(OSError(5, "the disk fell off"))):
        handle = bcp.save(tmp_path, state_of(0, 1.0), async_save=True)
        with pytest.raises(bcp.CheckpointSaveError, match="the disk fell off"):
            bcp.warm_up(state_of(0, 1.0))
    with pytest.raises(bcp.CheckpointSaveError, match="the disk fell off"):
        handle.result()
    bcp.warm_up(state_of(0, 1.0))


@pytest.mark.parametrize(
    ("state", "arguments", "kind"),
    [
        ([1, 2], {}, "unsupported_value"),
        ({"x": object()}, {}, "unsupported_value"),
        ({"x": torch.empty(3, device="meta")}, {}, "unsupported_value"),
        ({"x": torch.ones(3)}, {"framework": "jax"}, "conflict"),
    ],
    ids=["no dict", "no data", "no memory", "no framework"],
)
def test_a_wrong_use_is_refused_as_by_save(tmp_path: Path, state: Any, arguments: Any, kind: str) -> None:
    for call in (lambda: bcp.warm_up(state, **arguments), lambda: bcp.save(tmp_path, state, **arguments)):
        with pytest.raises(bcp.CheckpointError) as raised:
            call()
        assert raised.value.kind == kind


def warm_up_in_a_group(rank: int, world_size: int, path: str, kind: str) -> bool:
    state = state_of(rank, 1.0)
    bcp.warm_up(state, options=OPTIONS[kind])
    save(path, state, kind).result(20)
    return not list(Path(path).glob("*.tmp"))


@pytest.mark.parametrize("kind", ["copy", "waves"])
def test_a_group_warms_up_together(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert workers.run(warm_up_in_a_group, str(tmp_path), kind, world_size=3) == [True] * 3


def warm_up_alone(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    try:
        bcp.warm_up({"x": torch.ones(3)}, options=bcp.SaveOptions(timeout_s=1))
    except bcp.CheckpointError as error:
        return f"{error.kind} {error.ranks}"
    return "nothing"


def test_a_rank_that_does_not_warm_up_is_named(workers: WorkerPool) -> None:
    assert workers.run(warm_up_alone, world_size=2)[0] == "rank_missing (1,)"


def without_room(rank: int, world_size: int, failing: int) -> tuple[str, tuple[int, ...]]:
    options = bcp.SaveOptions(timeout_s=60)
    fails = raising(MemoryError()) if rank == failing else int
    with before(Seam(phases, "allocate"), fails), pytest.raises(bcp.CheckpointError) as raised:
        bcp.warm_up(state_of(rank, 1.0), options=options)
    return raised.value.kind, raised.value.ranks


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_memory_for_a_warm_up_is_named_by_all(workers: WorkerPool, failing: int) -> None:
    """The others had left the call: it raised alone, after it had waited for their verdict."""
    assert workers.run(without_room, failing, world_size=2) == [("rank_failed", (failing,))] * 2


def different_states(rank: int, world_size: int) -> str:
    try:
        bcp.warm_up({"x": torch.ones(3 + rank)})
    except bcp.CheckpointError as error:
        return error.kind
    return "nothing"


def test_ranks_that_warm_up_for_different_states_all_hear_of_it(workers: WorkerPool) -> None:
    assert len(set(workers.run(different_states, world_size=2))) == 1


class WarmingUp:
    """Warms up while its state is asked for, as a signal handler may that interrupts a save there."""

    def state_dict(self) -> dict[str, Any]:
        with before(Seam(phases, "join_ranks"), raising(AssertionError("the call was counted on this rank alone"))):
            bcp.warm_up(state_of(0, 1.0))
        return {}

    def load_state_dict(self, _: Any) -> None: ...


def test_a_warm_up_inside_a_save_is_refused_before_other_ranks_would_wait_for_it(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match="neither would ever end"):
        bcp.save(tmp_path, {"own": WarmingUp()}, async_save=True)
