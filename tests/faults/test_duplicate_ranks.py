"""A launch that gives two processes one rank: no process is told of a save that is not the one in the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.launcher import Ended, Launcher
from faults.seams import loads_as, state_of

RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist

path, store, rank, number = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=1))
state = {"own": {f"rank{rank}": torch.full((300_000,), number)}}
bcp.save(path, state, step=2, options=bcp.SaveOptions(timeout_s=1))
print("saved", flush=True)
"""


def launch(launcher: Launcher, folder: Path, ranks: tuple[int, ...]) -> list[Ended]:
    """Processes of these ranks, of 3; each saves its number in this list."""
    bcp.save(folder / "run", state_of(0, 1.0), step=1)
    pids = [launcher.start(RANK, folder / "run", folder / "store", rank, number) for number, rank in enumerate(ranks)]
    return [launcher.wait(pid) for pid in pids]


@pytest.mark.parametrize("ranks", [(0, 1, 1), pytest.param((0, 0, 1), marks=pytest.mark.long)], ids=str)
def test_no_save_begins_where_a_rank_is_there_twice_and_another_is_not(
    launcher: Launcher, tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    """Torch waits in vain for the rank whose place the second one has."""
    for ended in launch(launcher, tmp_path, ranks):
        assert ended.exit_code == 1, ended.output
        assert "timeout" in ended.output
        assert "init_process_group" in ended.output
    assert bcp.steps(tmp_path / "run") == [1]
    assert loads_as(tmp_path / "run", 0, 1.0)


def test_of_two_processes_of_one_rank_no_more_than_one_is_told_that_it_has_saved(
    launcher: Launcher, tmp_path: Path
) -> None:
    """All ranks are there, so that torch may build a group, and both may get as far as the save."""
    ended = launch(launcher, tmp_path, (0, 1, 2, 2))
    saved = [number for number, one in enumerate(ended) if one.exit_code == 0]
    assert len(saved) < len(ended)
    assert all("Error" in one.output for number, one in enumerate(ended) if number not in saved)
    if saved:
        checkpoint = bcp.open(tmp_path / "run", step=2)
        for number in saved:
            found = checkpoint[f"own.rank{min(number, 2)}"][:]
            assert found.unique().tolist() == [float(number)]
    assert loads_as(tmp_path / "run", 0, 1.0, step=1)
