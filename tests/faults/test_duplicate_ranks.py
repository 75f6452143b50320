"""A launch that gives two processes one rank. Torch builds no process group of them, so that no save ever begins."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.launcher import Launcher
from faults.seams import loads_as, state_of
from faults.test_exit import free_port

RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
from faults.seams import state_of

path, method, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3, timeout=timedelta(seconds=2))
bcp.save(path, state_of(rank, 2.0), step=2, options=bcp.SaveOptions(timeout_s=2))
print("saved")
"""


@pytest.mark.parametrize("kind", ["tcp", "file"])
@pytest.mark.parametrize("ranks", [(0, 0, 1), (0, 1, 1), (0, 1, 2, 2)], ids=str)
def test_no_save_begins_where_two_processes_claim_one_rank(
    launcher: Launcher, tmp_path: Path, kind: str, ranks: tuple[int, ...]
) -> None:
    path = tmp_path / "run"
    bcp.save(path, state_of(0, 1.0), step=1)
    method = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path / 'store'}"
    t = time.time()
    pids = [launcher.start(RANK, path, method, rank) for rank in ranks]
    ended = [launcher.wait(pid) for pid in pids]
    print(ranks, kind, round(time.time() - t, 1))
    for one in ended:
        print(one.exit_code, one.output[-300:])
    print(bcp.steps(path))
    assert 0
