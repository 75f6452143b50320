"""Two jobs at one store, in any order and with any fault. `python tests/faults/fault_table.py commit-machine` does more
of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.campaigns import Asked
from faults.commit_jobs import Crew
from faults.commit_machine import CAMPAIGNS, run_machine
from faults.launcher import Launcher

(CAMPAIGN,) = CAMPAIGNS


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    launcher = Launcher(tmp_path_factory.mktemp("programs"), ready_for="faults.commit_job")
    crew = Crew(launcher)
    yield crew
    crew.close()
    launcher.close()


def test_two_jobs_at_one_store_break_no_promise(crew: Crew) -> None:
    tally: dict[str, int] = {}
    run_machine(crew, seed_text="quick", num_runs=4, num_steps=25, tally=tally, shrinks=True)
    assert tally["runs"] == 4
    assert tally["acknowledged saves"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, len(CAMPAIGN.trials), 10))
def test_many_runs_of_two_jobs_break_no_promise(tmp_path: Path, first: int) -> None:
    outcome = CAMPAIGN.run(Asked(CAMPAIGN.seed, range(first, first + 10), tmp_path))
    assert outcome.broken == (), "once more: python tests/faults/fault_table.py commit-machine --trials N"
