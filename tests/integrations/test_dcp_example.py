"""The example of the drop-in for torch.distributed.checkpoint runs, and goes on with another number of processes."""

from __future__ import annotations

import re
from pathlib import Path

from forked_python import forked_python
from rank_programs import run_ranks

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


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
