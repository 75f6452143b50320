"""Two jobs at one store, in any order and with any fault. `python tests/faults/fault_table.py commit-machine` does more
of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.commit_jobs import Crew
from faults.commit_machine import run_machine
from faults.launcher import Launcher


@pytest.fixture
def crew(launcher: Launcher) -> Iterator[Crew]:
    crew = Crew(launcher)
    yield crew
    crew.close()


def test_two_jobs_at_one_store_break_no_promise(crew: Crew) -> None:
    tally: dict[str, int] = {}
    run_machine(crew, seed_text="quick", num_runs=4, num_steps=25, tally=tally, shrinks=True)
    assert tally["runs"] == 4
    assert tally["acknowledged saves"] > 0
