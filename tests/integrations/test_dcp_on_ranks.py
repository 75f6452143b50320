"""The drop-in for torch.distributed.checkpoint on several ranks: other numbers of ranks, values that differ, and a run
that is killed and goes on as if nothing had happened.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.dcp_programs import AppState, Run, digest, replicated, same_on_all_ranks, sharded, step, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.integrations import dcp
from bytecheckpoint.integrations.dcp import conflicts
from distributed.workers import WorkerDied, WorkerPool

per_rank = pytest.mark.filterwarnings("ignore:.* values? differ between ranks")


def save_trained(rank: int, world_size: int, path: Path, is_async: bool) -> str:
    model, optimizer = sharded(world_size, 0)
    step(model, optimizer, torch.ones(3, 10))
    app = AppState(model, optimizer)
    saved = digest(app.state_dict())
    state = {"app": app, "step": 3}
    if is_async:
        future = dcp.async_save(state, checkpoint_id=path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        future.result()
    else:
        dcp.save(state, checkpoint_id=path)
    return saved


def loaded(rank: int, world_size: int, path: Path) -> tuple[str, int]:
    app = AppState(*sharded(world_size, 1))
    state = {"app": app, "step": 0}
    dcp.load(state, checkpoint_id=path)
    return digest(app.state_dict()), state["step"]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_two_ranks_saved_is_the_same_on_three_and_on_one(
    tmp_path: Path, workers: WorkerPool, is_async: bool
) -> None:
    (saved, _) = workers.run(save_trained, tmp_path, is_async, world_size=2)
    for world_size in (2, 3, 1):
        assert workers.run(loaded, tmp_path, world_size=world_size) == [(saved, 3)] * world_size
    model, _ = replicated(1)
    bcp.load(tmp_path, {"app": {"model": model}}, strict=False)
    names = {f"app.model.{name}": value for name, value in model.state_dict().items()}
    assert all(torch.equal(bcp.open(tmp_path)[name][...], value) for name, value in names.items())


def save_differing(rank: int, world_size: int, path: Path, on_conflict: str) -> tuple[int, str]:
    state = {
        "same": torch.ones(3),
        "nested": {"rng": torch.full((4,), rank), "position": rank, "epoch": 2},
        "groups": [{"rank": rank, "w": torch.ones(1)}],
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = dcp.save(state, checkpoint_id=path, on_conflict=on_conflict)
    assert len(found.state_dict_metadata) == 6
    return len(caught), str(caught[0].message) if caught else ""


def load_differing(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    state = {
        "same": torch.zeros(3),
        "nested": {"rng": torch.full((4,), -1), "position": -1, "epoch": 0},
        "groups": [{"rank": -1, "w": torch.zeros(1)}],
    }
    dcp.load(state, checkpoint_id=path)
    return {**state["nested"], "rng": state["nested"]["rng"].tolist(), "group": state["groups"][0]["rank"]}


def test_values_that_differ_are_kept_for_each_rank_with_one_warning(tmp_path: Path, workers: WorkerPool) -> None:
    (warned, others) = workers.run(save_differing, tmp_path, "per_rank", world_size=2)
    assert warned[0] == 1
    assert (
        "3 values differ between ranks: groups.0.rank, nested.position, nested.rng. Each rank's is saved" in warned[1]
    )
    assert others == (0, "")
    found = workers.run(load_differing, tmp_path, world_size=2)
    assert found == [{"rng": [rank] * 4, "position": rank, "epoch": 2, "group": rank} for rank in range(2)]
    with bcp.open(tmp_path) as checkpoint:
        assert checkpoint["same"][...].tolist() == [1, 1, 1]
        assert checkpoint.rank_values("nested.position") == {0: 0, 1: 1}


def sets_of_differing_names(rank: int, world_size: int, path: Path) -> int:
    """Returns the number of sets that the names of conflicts are put into."""
    given: list[Any] = []
    mark = conflicts._marked

    def marked(value: Any, fqn: str, differing: set[str], on_the_way: set[str]) -> Any:
        given.append(differing)
        return mark(value, fqn, differing, on_the_way)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(conflicts, "_marked", marked)
        dcp.save({f"steps_{number}": rank for number in range(20)}, checkpoint_id=path)
    return len(set(map(id, given)))


def test_the_names_that_differ_are_put_into_a_set_once_and_not_for_each_value(
    tmp_path: Path, workers: WorkerPool
) -> None:
    assert workers.run(sets_of_differing_names, tmp_path, world_size=2) == [1, 1]


def save_pair(rank: int, world_size: int, path: Path, on_conflict: str) -> dict[str, Any]:
    dcp.save({"pair": (torch.tensor(rank), 1)}, checkpoint_id=path, on_conflict=on_conflict)
    state: dict[str, Any] = {"pair": (torch.tensor(-1), 0)}
    dcp.load(state, checkpoint_id=path)
    return state


@per_rank
def test_tensors_in_tuples_that_differ_are_kept_for_each_rank(tmp_path: Path, workers: WorkerPool) -> None:
    assert workers.run(save_pair, tmp_path, "per_rank", world_size=2) == [{"pair": (rank, 1)} for rank in range(2)]
    for outcome in workers.run_each(save_pair, tmp_path / "refused", "error", world_size=2):
        assert "1 values differ between ranks: pair" in str(outcome.error)


def save_pair_with_dtensor(rank: int, world_size: int, path: Path) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    in_parts = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dcp.save({"pair": (torch.tensor(rank), in_parts)}, checkpoint_id=path)
    return "".join(str(each.message) for each in warned)


def test_a_tuple_with_a_dtensor_is_saved_with_a_warning_of_tensors_that_differ(
    tmp_path: Path, workers: WorkerPool
) -> None:
    """A RankLocal, which would keep them, takes no DTensor."""
    assert "have different values: pair.0" in workers.run(save_pair_with_dtensor, tmp_path, world_size=2)[0]
    with bcp.open(tmp_path) as checkpoint:
        assert checkpoint["pair.1"][...].tolist() == [0, 1, 2, 3]


def test_a_rank_of_which_nothing_was_saved_is_told_so(tmp_path: Path, workers: WorkerPool) -> None:
    workers.run(save_differing, tmp_path, "per_rank", world_size=2, timeout_s=60)
    for outcome in workers.run_each(load_differing, tmp_path, world_size=3):
        assert isinstance(outcome.error, bcp.CheckpointMismatchError)
        assert outcome.error.kind == "missing_key"
        assert "nested.position: differed between the 2 ranks that saved it" in str(outcome.error)


def test_on_conflict_error_refuses_on_every_rank_and_writes_nothing(tmp_path: Path, workers: WorkerPool) -> None:
    for outcome in workers.run_each(save_differing, tmp_path, "error", world_size=2):
        assert isinstance(outcome.error, bcp.CheckpointMismatchError)
        assert outcome.error.kind == "conflict"
        assert "nested.rng" in str(outcome.error)
    assert list(tmp_path.iterdir()) == []


def save_with_random_numbers(rank: int, world_size: int, path: Path) -> int:
    torch.manual_seed(rank)
    dcp.save({"rng": bcp.RngState(), "epoch": 1}, checkpoint_id=path)
    return int(torch.randint(1 << 30, ()))


def load_with_random_numbers(rank: int, world_size: int, path: Path) -> int:
    torch.manual_seed(100 + rank)
    dcp.load({"rng": bcp.RngState(), "epoch": 0}, checkpoint_id=path)
    return int(torch.randint(1 << 30, ()))


def test_an_rng_state_comes_back_on_more_ranks_which_keep_their_own(tmp_path: Path, workers: WorkerPool) -> None:
    drawn = workers.run(save_with_random_numbers, tmp_path, world_size=2)
    torch.manual_seed(102)
    own = int(torch.randint(1 << 30, ()))
    assert workers.run(load_with_random_numbers, tmp_path, world_size=3) == [*drawn, own]


def save_a_stage(rank: int, world_size: int, path: Path) -> None:
    dcp.save({"model": {f"layers.{rank}.w": torch.full((3,), rank), "shared": torch.ones(2)}}, checkpoint_id=path)


def load_all_stages(rank: int, world_size: int, path: Path) -> list[list[float]]:
    state = {"model": {f"layers.{number}.w": torch.zeros(3, dtype=torch.int64) for number in range(2)}}
    dcp.load(state, checkpoint_id=path)
    return [tensor.tolist() for tensor in state["model"].values()]


def test_ranks_may_hold_different_keys(tmp_path: Path, workers: WorkerPool) -> None:
    workers.run(save_a_stage, tmp_path, world_size=2)
    assert workers.run(load_all_stages, tmp_path, world_size=3) == [[[0] * 3, [1] * 3]] * 3


def save_and_load_alone(rank: int, world_size: int, path: Path) -> int:
    folder = path / str(rank)
    for _ in range(2):
        dcp.save({"n": rank, "w": torch.full((2,), rank)}, checkpoint_id=folder, no_dist=True)
    if rank:  # the ranks need not come together
        dcp.save({"n": rank, "w": torch.full((2,), rank)}, checkpoint_id=folder, no_dist=True)
    state = {"n": -1, "w": torch.full((2,), -1)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert state["w"].tolist() == [rank, rank]
    return state["n"]


def test_without_dist_each_rank_saves_and_loads_on_its_own(tmp_path: Path, workers: WorkerPool) -> None:
    assert workers.run(save_and_load_alone, tmp_path, world_size=2) == [0, 1]


def save_in_a_group(rank: int, world_size: int, path: Path) -> str | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path, process_group=group)
    state = {"w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=path, process_group=group)
    assert state["w"].tolist() == [1, 1]
    return str(bcp.open(path).info.world_size)


def test_a_process_group_takes_part_alone(tmp_path: Path, workers: WorkerPool) -> None:
    assert workers.run(save_in_a_group, tmp_path, world_size=3) == ["2", None, "2"]


NUM_STEPS, SAVED_AT, KILLED_AT = 10, 4, 7


def train_uninterrupted(rank: int, world_size: int) -> tuple[list[float], str]:
    run = Run(rank, world_size, seed=0)
    run.train(NUM_STEPS)
    return run.outcome()


def train_until_killed(rank: int, world_size: int, path: Path) -> None:
    run = Run(rank, world_size, seed=0)

    def after_step(number: int) -> None:
        if number == SAVED_AT:
            futures.append(dcp.async_save(run.state(), checkpoint_id=path))
        if number == KILLED_AT:
            futures[0].result()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    futures: list[Any] = []
    run.train(NUM_STEPS, after_step)


def resume(rank: int, world_size: int, path: Path) -> tuple[list[float], str]:
    run = Run(rank, world_size, seed=1)
    state = run.state()
    dcp.load(state, checkpoint_id=path)
    run.next_step = state["next_step"]
    run.train(NUM_STEPS)
    return run.outcome()


@per_rank
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, workers: WorkerPool) -> None:
    """With dropout, and a loader that shuffles: each rank has random numbers and an order of its own."""
    expected = workers.run(train_uninterrupted, world_size=2)
    outcomes = workers.run_each(train_until_killed, tmp_path, world_size=2)
    assert all(isinstance(outcome.error, WorkerDied) for outcome in outcomes)
    resumed = workers.run(resume, tmp_path, world_size=2)
    assert [losses for losses, _ in resumed] == [losses[SAVED_AT:] for losses, _ in expected]
    assert [parameters for _, parameters in resumed] == [parameters for _, parameters in expected]


def train_elastic(rank: int, world_size: int, path: Path, is_saved: bool) -> str:
    """Without random numbers, and with the same batches on every rank: any number of ranks comes to the same."""
    model, optimizer = sharded(world_size, 0 if is_saved else 1)
    model.eval()
    app, batch = AppState(model, optimizer), torch.linspace(-1, 1, 30).reshape(3, 10)
    if is_saved:
        step(model, optimizer, batch)
        dcp.save({"app": app}, checkpoint_id=path)
    dcp.load({"app": app}, checkpoint_id=path)
    before = digest(app.state_dict())
    assert same_on_all_ranks(before)
    step(model, optimizer, batch)
    assert all(whole(parameter).isfinite().all() for parameter in model.parameters())
    return before


def test_training_goes_on_on_another_number_of_ranks(tmp_path: Path, workers: WorkerPool) -> None:
    (saved, _) = workers.run(train_elastic, tmp_path, True, world_size=2)
    assert workers.run(train_elastic, tmp_path, False, world_size=3) == [saved] * 3
