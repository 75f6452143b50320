"""Two jobs at one store, in any order and with any fault. `python tests/faults/fault_table.py commit-machine` does more
of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.commit_job import Call
from faults.commit_jobs import Crew, Planned
from faults.commit_machine import RUN, Ask, CommitMachine, GoOn, LateArrives, Step, run_machine
from faults.launcher import Launcher
from faults.object_world import Fault


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
    assert 0 < tally["runs that saved"] <= 4


def replay(crew: Crew, *steps: Step) -> dict[str, int]:
    """What was counted."""
    machine_class = type("CommitMachine", (CommitMachine,), {"crew": crew, "tally": {}})
    machine = machine_class()
    try:
        for step in steps:
            CommitMachine.step(machine, step=step)
    finally:
        machine.teardown()
    return machine.tally


def test_a_manifest_that_arrives_after_a_recovery_finds_its_data(crew: Crew) -> None:
    """That of a save which was told that it is kept, and which was to replace what another job has saved meanwhile."""
    staged = Call("save", RUN, 3, overwrite=True, snapshot="copy", stage="stage")
    replay(
        crew,
        Ask(1, staged, (Planned("manifest", 1, Fault.LATE),), "write"),
        Ask(0, Call("save", RUN, 3), (), None),
        GoOn(1, None),
        Ask(0, Call("recover", RUN, stage="stage"), (), None),
        LateArrives(0),
        Ask(0, Call("load", RUN, 3), (), None),
    )


def test_a_run_in_which_no_save_was_acknowledged_is_not_counted_as_one_that_saved(crew: Crew) -> None:
    assert "runs that saved" not in replay(crew, Ask(0, Call("load", RUN, 3), (), None))
    assert replay(crew, *[Ask(0, Call("save", RUN, step), (), None) for step in (1, 2)])["runs that saved"] == 1


def test_one_seed_draws_the_same_steps_again(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Ask] = []
    ask = CommitMachine.ask

    def note(machine: CommitMachine, asked: Ask) -> None:
        drawn.append(asked)
        ask(machine, asked)

    monkeypatch.setattr(CommitMachine, "ask", note)

    def steps_of(seed_text: str) -> list[Ask]:
        drawn.clear()
        run_machine(crew, seed_text=seed_text, num_runs=4, num_steps=8, tally={}, shrinks=False)
        return list(drawn)

    first = steps_of("one")
    assert first
    assert steps_of("one") == first
    assert steps_of("another") != first
