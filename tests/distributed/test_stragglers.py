"""A rank that writes slowly: who waits for it in vain says at what rate he has written himself, and how long the bytes
of that rank take at it.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults.seams import Seam, Seen, before, seen

import bytecheckpoint as bcp
from bytecheckpoint.distributed.ranks import SoleRank
from bytecheckpoint.distributed.store_limits import store_lost
from bytecheckpoint.distributed.stragglers import report_straggler_rate
from bytecheckpoint.planner.save_plan import plan_save
from bytecheckpoint.planner.write_items import WriteItem, pack_items
from bytecheckpoint.saving import local_stage as local_stage_module
from bytecheckpoint.saving import write
from distributed.workers import WorkerPool

IMPATIENT_S = 2.0
LATE_S = 60.0


def save_late(rank: int, world_size: int, path: str, stage: str | None, seam: str) -> tuple[list[Seen | None], bool]:
    """The plan of the first save is new, that of the second one known. Rank 1 writes when rank 0 has given up on it."""
    store = dist.distributed_c10d._get_default_store()
    state = {f"rank{rank}": torch.arange(250_000 * (1 + 3 * rank), dtype=torch.float32)}
    patient = bcp.SaveOptions(local_stage=stage)
    errors = []
    bcp.save(path, {"other": torch.ones(3)}, step=0, options=patient)  # the first one imports what saves need
    for step in (1, 3):
        options = bcp.SaveOptions(timeout_s=IMPATIENT_S, local_stage=stage)
        has_given_up = f"rank 0 has given up on rank 1 in step {step}"
        be_late = partial(store.wait, [has_given_up], timedelta(seconds=LATE_S))
        dist.barrier()
        with before(seam, be_late) if rank == 1 else nullcontext():
            errors.append(seen(lambda step=step, options=options: bcp.save(path, state, step=step, options=options)))
        if rank == 0:
            store.set(has_given_up, "")
        dist.barrier()
        bcp.save(path, state, step=step + 1, options=patient)
    loaded = {f"rank{rank}": torch.zeros_like(state[f"rank{rank}"])}
    bcp.load(path, loaded, step=4)
    return errors, torch.equal(loaded[f"rank{rank}"], state[f"rank{rank}"])


@pytest.mark.parametrize(
    ("is_staged", "seam"),
    [
        (False, Seam(write, "write_image")),
        (True, Seam(local_stage_module, "write_image")),
        (True, Seam(local_stage_module, "copy_file")),
    ],
)
def test_a_rank_that_writes_too_slowly_is_told_from_one_that_is_stuck(
    workers: WorkerPool, tmp_path: Path, is_staged: bool, seam: str
) -> None:
    stage = str(tmp_path / "stage") if is_staged else None
    outcomes = workers.run(save_late, str(tmp_path / "run"), stage, seam, world_size=2)
    assert [loads for _, loads in outcomes] == [True, True]
    for of_rank, _ in outcomes:
        for error in of_rank:
            assert error is not None
            assert (error.kind, error.ranks) == ("rank_missing", (1,))
            found = re.search(
                r"rank 1 did not answer within 2 s.*\. Rank 0 (?:wrote|uploaded) its 1\.0 MB of values in (\d+\.\d) s, "
                r"[\d.,]+ MB/s, at which the 4\.0 MB of rank 1 take (\d+\.\d) s; (\d+\.\d) s had gone by",
                error.message,
            )
            assert found is not None, error
            own_s, needed_s, gone_s = map(float, found.groups())
            assert abs(needed_s - 4 * own_s) <= 0.25  # both are rounded
            assert gone_s >= own_s + IMPATIENT_S - 0.1


@pytest.mark.parametrize("names", [(0, 1), (2, 3)])
def test_a_store_that_is_gone_is_no_rank_that_is_late(names: tuple[int, int]) -> None:
    """Its message names rank 0 of the whole job, which may be the coordinator, or of no rank of the group."""
    ranks = SoleRank()
    ranks.global_ranks, ranks.num_ranks = names, 2
    offered = [[WriteItem("a", "float32", (4,), (0,), (4,), None)], []]
    plan = plan_save(list(map(pack_items, offered)), [{}, {}], global_ranks=names)
    lost = store_lost(ConnectionError("gone"))
    with pytest.raises(bcp.CheckpointError) as error, report_straggler_rate(ranks, plan, 1.0):
        raise lost
    assert error.value is lost
