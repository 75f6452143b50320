"""The storage plug-ins, with the functions of torch.distributed.checkpoint itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from integrations.dcp_programs import AppState, digest, filled, replicated, sharded, step
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import bytecheckpoint as bcp
from bytecheckpoint.integrations import dcp as drop_in
from bytecheckpoint.integrations.dcp import BcpStorageReader, BcpStorageWriter
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(world_size: int) -> AppState:
    model, optimizer = sharded(world_size, 0)
    step(model, optimizer, torch.ones(3, 10))
    return AppState(model, optimizer)


def save_by_torch(rank: int, world_size: int, path: Path, is_async: bool) -> str:
    app = trained(world_size)
    state, writer = {"app": app, "step": 3, "list": [torch.ones(2), 5]}, BcpStorageWriter("nowhere")
    saved = digest(app.state_dict())
    if is_async:
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=path)
        with torch.no_grad():
            for parameter in app.model.parameters():
                parameter.zero_()
        future.result()
    else:
        dcp.save(state, storage_writer=writer, checkpoint_id=path)
    return saved


def load_by_torch(rank: int, world_size: int, path: Path, is_drop_in: bool) -> tuple[str, Any, Any]:
    app = AppState(*sharded(world_size, 1))
    state: dict[str, Any] = {"app": app, "step": 0, "list": [torch.zeros(2), 0]}
    if is_drop_in:
        drop_in.load(state, checkpoint_id=path)
    else:
        dcp.load(state, storage_reader=BcpStorageReader(path))
    return digest(app.state_dict()), state["step"], [state["list"][0].tolist(), state["list"][1]]


@pytest.mark.parametrize("is_async", [False, True])
def test_torch_saves_on_two_ranks_and_loads_on_three_through_the_plug_ins(
    tmp_path: Path, workers: WorkerPool, is_async: bool
) -> None:
    (saved, _) = workers.run(save_by_torch, tmp_path, is_async, world_size=2)
    for world_size in (3, 1):
        for is_drop_in in (False, True):
            found = workers.run(load_by_torch, tmp_path, is_drop_in, world_size=world_size)
            assert found == [(saved, 3, [[1, 1], 5])] * world_size


def save_by_drop_in(rank: int, world_size: int, path: Path) -> str:
    app = trained(world_size)
    drop_in.save({"app": app, "step": 3, "list": [torch.ones(2), 5]}, checkpoint_id=path)
    return digest(app.state_dict())


def test_torch_loads_what_the_drop_in_saved(tmp_path: Path, workers: WorkerPool) -> None:
    (saved, _) = workers.run(save_by_drop_in, tmp_path, world_size=2)
    assert workers.run(load_by_torch, tmp_path, False, world_size=3) == [(saved, 3, [[1, 1], 5])] * 3


def save_and_load_each_own(rank: int, world_size: int, path: Path) -> list[Any]:
    state = {"rng": {"state": torch.full((3,), rank), "n": rank}, "w": torch.ones(2)}
    dcp.save(state, storage_writer=BcpStorageWriter(path))
    state = {"rng": {"state": torch.full((3,), -1), "n": -1}, "w": torch.zeros(2)}
    dcp.load(state, storage_reader=BcpStorageReader(path))
    return [state["rng"]["state"].tolist(), state["rng"]["n"], state["w"].tolist()]


@pytest.mark.filterwarnings("ignore:.* values differ between ranks")
def test_values_that_differ_come_back_to_each_rank(tmp_path: Path, workers: WorkerPool) -> None:
    found = workers.run(save_and_load_each_own, tmp_path, world_size=2)
    assert found == [[[rank] * 3, rank, [1, 1]] for rank in range(2)]


def save_alone_and_in_groups(rank: int, world_size: int, path: Path) -> list[int | None]:
    dcp.save({"n": rank}, storage_writer=BcpStorageWriter(path / str(rank)), no_dist=True)
    state = {"n": -1}
    dcp.load(state, storage_reader=BcpStorageReader(path / str(rank)), no_dist=True)
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    if rank == 2:
        return [state["n"], None]
    dcp.save(
        {"w": torch.ones(1)},
        storage_writer=BcpStorageWriter(path / "p", process_group=pairs[0]),
        process_group=pairs[0],
    )
    with pytest.raises(dcp.CheckpointException, match="2 ranks save, and the process_group of BcpStorageWriter has 3"):
        dcp.save({"w": torch.ones(1)}, storage_writer=BcpStorageWriter(path / "q"), process_group=pairs[0])
    return [state["n"], bcp.open(path / "p").info.world_size]


def test_the_ranks_of_a_save_are_those_that_torch_has(tmp_path: Path, workers: WorkerPool) -> None:
    assert workers.run(save_alone_and_in_groups, tmp_path, world_size=3) == [[0, 2], [1, 2], [2, None]]


def test_a_part_of_a_tensor_in_columns_and_another_dtype_is_filled(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": filled((4, 6), 0), "scalar": torch.tensor(3.0)}})
    target = torch.zeros(6, 4, dtype=torch.float64).t()
    scalar = torch.zeros(())
    dcp.load({"model": {"w": target, "scalar": scalar}}, storage_reader=BcpStorageReader(tmp_path))
    assert torch.equal(target, filled((4, 6), 0).double())
    assert scalar.item() == 3


def test_a_state_is_rebuilt_from_the_metadata_alone(tmp_path: Path) -> None:
    """As torch's converters and its partial reads do it."""
    bcp.save(tmp_path, {"model": replicated(0)[0], "extra": {"epoch": 3, "names": ["a"]}})
    state: dict[str, Any] = {}
    _load_state_dict(state, BcpStorageReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert state["extra"] == {"epoch": 3, "names": ["a"]}
    assert digest(state["model"]) == digest(dict(replicated(0)[0].state_dict()))


def test_a_folder_of_torchs_own_is_read(tmp_path: Path) -> None:
    dcp.save({"a": {"w": filled((3,), 1), "n": 4}}, checkpoint_id=tmp_path)
    state = {"a": {"w": torch.zeros(3), "n": 0}}
    dcp.load(state, storage_reader=BcpStorageReader(tmp_path))
    assert digest(state) == digest({"a": {"w": filled((3,), 1), "n": 4}})


@pytest.mark.parametrize("saves", [dcp.save, drop_in.save], ids=["torch", "drop-in"])
def test_tensors_in_a_tuple_have_their_values(tmp_path: Path, saves: Any) -> None:
    """DCP takes no tuple apart, and reads it as one pickle."""
    saves({"ema": (filled((3,), 1), 0.5), "deep": {"x": [({"y": filled((2,), 2)}, 1)]}}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {"ema": (torch.zeros(3), 0.0), "deep": {"x": [({"y": torch.zeros(2)}, 0)]}}
    dcp.load(state, storage_reader=BcpStorageReader(tmp_path))
    assert torch.equal(state["ema"][0], filled((3,), 1))
    assert state["ema"][1] == 0.5
    assert torch.equal(state["deep"]["x"][0][0]["y"], filled((2,), 2))


def test_what_is_missing_is_an_error_of_torch(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"a": 1})
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: b"):
        dcp.load({"b": 0}, storage_reader=BcpStorageReader(tmp_path))


class RenamingPlanner(DefaultSavePlanner):
    """Changes what is saved."""


class PickledPlanner(DefaultLoadPlanner):
    """Takes plain data as it is in the files of torch."""

    def load_bytes(self, *_arguments: Any) -> None:
        raise AssertionError


def test_planners_that_change_what_is_saved_or_want_pickles_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="RenamingPlanner is not DefaultSavePlanner"):
        dcp.save({"n": 1}, storage_writer=BcpStorageWriter(tmp_path / "x"), planner=RenamingPlanner())
    assert not (tmp_path / "x").exists()
    bcp.save(tmp_path, {"n": 1})
    with pytest.raises(dcp.CheckpointException, match="PickledPlanner takes plain data, as 'n', as pickles"):
        dcp.load({"n": 0}, storage_reader=BcpStorageReader(tmp_path), planner=PickledPlanner())


def test_a_writer_travels_to_the_process_that_torch_saves_in(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(BcpStorageWriter(tmp_path, options=bcp.SaveOptions(writer_threads=2))))
    dcp.save({"n": 1}, storage_writer=writer)
    assert bcp.open(tmp_path).objects == {"n": 1}
    assert writer.options == bcp.SaveOptions(writer_threads=2, overwrite=True)
