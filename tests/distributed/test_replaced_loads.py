"""A checkpoint that is replaced while several ranks load it: all ranks begin again together, and load the new one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.seams import before

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

WORLD_SIZE = 3
SEAMS = {"planning": "bytecheckpoint.loading.read.plan_load", "reading": "bytecheckpoint.loading.read.run_fetches"}


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000, 7), value)}


def _load_while_it_is_replaced(
    rank: int, world_size: int, folder: str, moment: str, replacing_rank: int, exchange: str
) -> tuple[float, str]:
    own = [dist.new_group([member]) for member in range(world_size)]
    bcp.save(folder, _state(1.0))
    dist.barrier()
    left = [1]

    def replace() -> None:
        if left:
            left.pop()
            options = bcp.SaveOptions(overwrite=True)
            bcp.save(folder, _state(2.0), process_group=own[rank], options=options)

    state = _state(-1.0)
    with ExitStack() as stack:
        if rank == replacing_rank:
            stack.enter_context(before(SEAMS[moment], replace))
        report = bcp.load(folder, state, options=bcp.LoadOptions(exchange=exchange, timeout_s=30))
    (value,) = state["w"].unique().tolist()
    return value, report.save_id


@pytest.mark.parametrize("exchange", ["on", "off"])
@pytest.mark.parametrize("replacing_rank", [0, 2])
@pytest.mark.parametrize("moment", SEAMS)
def test_all_ranks_load_the_same_checkpoint(
    tmp_path: Path, workers: WorkerPool, moment: str, replacing_rank: int, exchange: str
) -> None:
    loaded = workers.run(
        _load_while_it_is_replaced,
        *(str(tmp_path), moment, replacing_rank, exchange),
        world_size=WORLD_SIZE,
        timeout_s=60,
    )
    assert len(set(loaded)) == 1, loaded
    value, save_id = loaded[0]
    is_new = save_id == bcp.open(tmp_path).info.save_id
    assert value == (2.0 if is_new else 1.0)
    assert is_new or (exchange, replacing_rank) != ("off", 2)
