"""The example of the drop-in for torch.distributed.checkpoint runs, and goes on with another number of processes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch
from forked_python import forked_python
from rank_programs import RankProcesses, run_ranks

import bytecheckpoint as bcp

EXAMPLE = Path(__file__).parents[2] / "examples" / "dcp_drop_in.py"
MAX_LINES = 80


def run(out: Path, *, steps: int, world_size: int) -> str:
    """What rank 0 prints."""
    return run_ranks(EXAMPLE, ["--out", out, "--steps", steps], world_size=world_size, python=forked_python())[0].output


def test_the_example_trains_and_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    printed = run(tmp_path, steps=20, world_size=2)
    assert re.findall(r"^step (\d+): loss \d", printed, re.MULTILINE) == ["10", "20"]
    printed = run(tmp_path, steps=30, world_size=1)
    assert re.findall(r"^step (\d+): loss \d", printed, re.MULTILINE) == ["30"]
    assert bcp.steps(tmp_path) == [10, 20, 30]
    assert bcp.open(tmp_path).info.world_size == 1
    assert bcp.open(tmp_path, step=20).info.world_size == 2


def test_a_run_stopped_by_sigterm_of_one_rank_has_saved_its_step_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    given = ["--out", out, "--steps", 10**6]
    with RankProcesses(EXAMPLE, given, world_size=2, python=forked_python()) as ranks:
        while bcp.latest(out) is None:
            assert [process.poll() for process in ranks.processes] == [None, None]
            time.sleep(0.05)
        ranks.processes[1].terminate()
        assert [ended.exit_code for ended in ranks.wait()] == [0, 0]
    stopped = bcp.steps(out)[-1]
    assert [*bcp.steps(out)[:-1], stopped] == [*range(10, stopped, 10), stopped]
    last = stopped + 10 - stopped % 10
    run(out, steps=last, world_size=2)
    run(tmp_path / "whole", steps=last, world_size=2)
    resumed, whole = (bcp.open(each, step=last) for each in (out, tmp_path / "whole"))
    assert sorted(resumed) == sorted(whole)
    assert [name for name in whole if not torch.equal(resumed[name][...], whole[name][...])] == []
    drawn = [[each.rank_values("rng")[rank]["torch"] for rank in range(2)] for each in (resumed, whole)]
    assert torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
