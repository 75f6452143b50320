"""Files taken from the newest checkpoint where several ranks save: each rank its own, and all ranks the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.reuse import ReuseHistory
from distributed.workers import WorkerPool

REUSE = bcp.SaveOptions(reuse=True)


def model_of(world_size: int, *, values: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * values)
    model[0].requires_grad_(False)
    return fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))


def save_steps(rank: int, world_size: int, root: str, restarts: bool) -> list[int]:
    """Returns the reused bytes of each save."""
    process_state().reuse = ReuseHistory()
    model, reused = model_of(world_size, values=1.0), []
    for step in range(3):
        with torch.no_grad():
            model[1].weight.add_(1)
        handle = bcp.save(root, {"model": model}, step=step, options=REUSE, async_save=step == 1)
        reused.append(handle.result().reused_bytes)
        if restarts and rank == 1:  # its process was replaced, and the others' were not
            process_state().reuse = ReuseHistory()
    return reused


def loads_right(rank: int, world_size: int, root: str, step: int) -> bool:
    model, expected = model_of(world_size, values=0.0), model_of(world_size, values=1.0)
    with torch.no_grad():
        expected[1].weight.add_(step + 1)
    bcp.load(root, {"model": model}, step=step)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(found.to_local(), wanted.to_local()) for found, wanted in pairs)


@pytest.mark.parametrize("restarts", [False, True])
def test_each_rank_takes_its_files_also_where_one_was_restarted(
    workers: WorkerPool, tmp_path: Path, *, restarts: bool
) -> None:
    (reused, *others) = workers.run(save_steps, str(tmp_path), restarts, world_size=3)
    assert all(other == reused for other in others)
    assert reused[0] == 0
    assert min(reused[1:]) >= 256 * 512 * 4
    bcp.delete(tmp_path, step=0)
    for world_size in (2, 3):
        for step in (1, 2):
            assert all(workers.run(loads_right, str(tmp_path), step, world_size=world_size))


def save_in_different_ways(rank: int, world_size: int, root: str) -> str:
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.save(root, {"t": torch.ones(3)}, step=0, options=bcp.SaveOptions(reuse=rank == 0))
    return caught.value.kind


def test_ranks_that_do_not_all_reuse_files_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(save_in_different_ways, str(tmp_path), world_size=2) == ["conflict"] * 2
