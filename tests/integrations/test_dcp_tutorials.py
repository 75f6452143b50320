"""The programs of torch's tutorials about distributed checkpoints, in our words: each runs with torch's module and with
the drop-in, and nothing but the import differs. Both end with the same bits.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.staging as torch_staging
from click.testing import CliRunner
from integrations.dcp_programs import AppState, digest, replicated, sharded, step
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from bytecheckpoint.tools.main import cli
from distributed.workers import WorkerPool

TORCH, OURS = "torch.distributed.checkpoint", "bytecheckpoint.integrations.dcp"
WRITERS = {TORCH: "FileSystemWriter", OURS: "BcpStorageWriter"}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
modules = pytest.mark.parametrize("module", [TORCH, OURS])


def save_a_sharded_model(rank: int, world_size: int, module: str, path: Path) -> str:
    """The program of "Getting started": an application state of a model that is sharded."""
    dcp = import_module(module)
    model, optimizer = sharded(world_size, 0)
    step(model, optimizer, torch.ones(8, 10))
    state_dict = {"app": AppState(model, optimizer)}
    dcp.save(state_dict, checkpoint_id=path)
    return digest(state_dict["app"].state_dict())


def load_a_sharded_model(rank: int, world_size: int, module: str, path: Path) -> str:
    dcp = import_module(module)
    model, optimizer = sharded(world_size, 1)
    state_dict = {"app": AppState(model, optimizer)}
    dcp.load(state_dict=state_dict, checkpoint_id=path)
    return digest(state_dict["app"].state_dict())


@modules
def test_a_sharded_model_is_saved_and_loaded_on_another_number_of_ranks(
    tmp_path: Path, workers: WorkerPool, module: str
) -> None:
    (saved, _) = workers.run(save_a_sharded_model, module, tmp_path, world_size=2)
    assert workers.run(load_a_sharded_model, module, tmp_path, world_size=3) == [saved] * 3


def save_a_model(rank: int, world_size: int, module: str, path: Path) -> str:
    dcp = import_module(module)
    model, _ = sharded(world_size, 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return digest(model.state_dict())


@modules
def test_a_sharded_model_is_loaded_for_inference_without_a_group(
    tmp_path: Path, workers: WorkerPool, module: str
) -> None:
    (saved, _) = workers.run(save_a_model, module, tmp_path, world_size=2)
    dcp = import_module(module)
    model, _ = replicated(1)
    state_dict = {"model": model.state_dict()}
    dcp.load(state_dict=state_dict, checkpoint_id=tmp_path)
    model.load_state_dict(state_dict["model"])
    assert digest(dict(model.state_dict())) == saved


def train_with_saves_in_the_background(rank: int, world_size: int, module: str, path: Path) -> list[str]:
    """The program of "Asynchronous saving", with a writer that keeps its pinned staging memory from save to save."""
    dcp = import_module(module)
    model, optimizer = sharded(world_size, 0)
    group = dist.new_group()  # training goes on beside the save, with collectives of its own
    # Staging memory that is pinned and kept is an option of torch's, which raises where there is no device.
    keeps = {"cache_staged_state_dict": torch.cuda.is_available()} if module == TORCH else {}
    writer = getattr(dcp, WRITERS[module])(path=str(path), **keeps)
    checkpoint_future, digests = None, []
    for number in range(3):
        step(model, optimizer, torch.full((8, 10), number / 3))
        # Not more than one save at a time.
        if checkpoint_future is not None:
            checkpoint_future.result()
        state_dict = {"app": AppState(model, optimizer)}
        digests.append(digest(state_dict["app"].state_dict()))
        checkpoint_future = dcp.async_save(
            state_dict, storage_writer=writer, checkpoint_id=f"{path}_step{number}", process_group=group
        )
    checkpoint_future.result()
    return digests


@modules
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_saves_in_the_background_with_kept_staging_memory_hold_each_step(
    tmp_path: Path, workers: WorkerPool, module: str
) -> None:
    digests, _ = workers.run(train_with_saves_in_the_background, module, tmp_path / "run", world_size=2)
    assert len(set(digests)) == 3
    for number, saved in enumerate(digests):
        found = workers.run(load_a_sharded_model, module, tmp_path / f"run_step{number}", world_size=2)
        assert found == [saved] * 2


def train_with_a_stager(rank: int, world_size: int, module: str, path: Path) -> list[str]:
    """The program of "Fully asynchronous staging": the next forward and backward pass run while the state is staged."""
    dcp = import_module(module)
    model, optimizer = sharded(world_size, 0)
    group = dist.new_group()  # as above
    # On accelerators, all options are True.
    stager = torch_staging.DefaultStager(torch_staging.StagingOptions(False, False, True, False))
    response, digests = None, []
    for number in range(3):
        optimizer.zero_grad()
        model(torch.full((8, 10), number / 3)).square().sum().backward()
        if response is not None:
            response.staging_completion.result()  # before the state changes
        optimizer.step()
        if response is not None:
            response.upload_completion.result()
        state_dict = {"app": AppState(model, optimizer)}
        digests.append(digest(state_dict["app"].state_dict()))
        response = dcp.async_save(
            state_dict, async_stager=stager, checkpoint_id=f"{path}_step{number}", process_group=group
        )
    response.upload_completion.result()
    stager.close()
    return digests


@modules
def test_staging_beside_the_next_step_holds_each_step(tmp_path: Path, workers: WorkerPool, module: str) -> None:
    digests, _ = workers.run(train_with_a_stager, module, tmp_path / "run", world_size=2)
    assert len(set(digests)) == 3
    for number, saved in enumerate(digests):
        found = workers.run(load_a_sharded_model, module, tmp_path / f"run_step{number}", world_size=2)
        assert found == [saved] * 2


@modules
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpoint_becomes_a_file_of_torch_save(tmp_path: Path, module: str) -> None:
    """The tutorial's "Formats"."""
    dcp = import_module(module)
    model, optimizer = replicated(0)
    step(model, optimizer, torch.ones(8, 10))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
    file = tmp_path / "model.pt"
    if module == TORCH:
        dcp_to_torch_save(tmp_path / "checkpoint", file)
    else:
        arguments = ["convert", str(tmp_path / "checkpoint"), str(file), "--to", "torch"]
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    loaded = torch.load(file, weights_only=True)
    assert digest(loaded["model"]) == digest(dict(model.state_dict()))
