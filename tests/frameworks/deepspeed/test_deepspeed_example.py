"""The example with DeepSpeed, whose model has dropout and whose loader shuffles: killed, stopped, and resumed on the
same and on another number of ranks.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rank_programs import Ended, RankProcesses, run_ranks

import bytecheckpoint as bcp

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(600),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "deepspeed_resume.py"
ON_HOST = Path(__file__).parent / "on_host.py"
MAX_LINES = 80


def run(out: Path, *, steps: int, world_size: int = 2, stage: int = 2) -> Sequence[Ended]:
    arguments = [EXAMPLE, "--out", out, "--steps", steps, "--stage", stage]
    return run_ranks(ON_HOST, arguments, world_size=world_size, timeout_s=400)


def start(out: Path, stage: int) -> RankProcesses:
    return RankProcesses(ON_HOST, [EXAMPLE, "--out", out, "--steps", 100_000, "--stage", stage], world_size=2)


def wait_for(path: Path, ranks: RankProcesses) -> None:
    while not path.exists():
        assert [process.poll() for process in ranks.processes] == [None, None]
        time.sleep(0.05)


def losses_of(ended: Ended) -> dict[int, str]:
    """As they were printed, to the last bit, by step."""
    return {
        int(step): loss for step, loss in re.findall(r"^step (\d+) rank \d+: loss (\S+)$", ended.output, re.MULTILINE)
    }


def newest(out: Path) -> int:
    return int((out / "latest").read_text().removeprefix("global_step"))


def assert_equal_tensors(left: Path, right: Path) -> None:
    one, other = bcp.open(left), bcp.open(right)
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name][...], other[name][...])] == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, stage: int) -> None:
    with start(tmp_path / "killed", stage) as ranks:
        wait_for(tmp_path / "killed" / "latest", ranks)
        ranks.kill()
        assert [ended.exit_code for ended in ranks.wait()] == [-signal.SIGKILL] * 2
    step = newest(tmp_path / "killed")
    resumed = run(tmp_path / "killed", steps=step + 5, stage=stage)
    uninterrupted = run(tmp_path / "whole", steps=step + 5, stage=stage)
    for one, other in zip(resumed, uninterrupted, strict=True):
        wanted = losses_of(other)
        assert losses_of(one) == {number: wanted[number] for number in range(step + 1, step + 6)}
    name = f"global_step{step + 5}"
    assert_equal_tensors(tmp_path / "killed" / name, tmp_path / "whole" / name)


def test_a_stop_is_saved_and_three_ranks_go_on_under_another_stage(tmp_path: Path) -> None:
    with start(tmp_path, 2) as ranks:
        wait_for(tmp_path / "latest", ranks)
        ranks.processes[1].send_signal(signal.SIGTERM)
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [0, 0]
    last = max(losses_of(ended[0]))
    assert newest(tmp_path) == last == max(losses_of(ended[1]))

    on_three = run(tmp_path, steps=last + 1, world_size=3, stage=3)
    assert [list(losses_of(each)) for each in on_three] == [[last + 1]] * 3
    assert bcp.open(tmp_path / f"global_step{last + 1}").info.world_size == 3
    for each in on_three:
        assert "begins anew" not in each.errors


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
