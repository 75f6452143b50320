"""What is decided about saves that were found in local stages, by what is on the disks and at the path."""

from __future__ import annotations

from typing import Any

import pytest
from counted_looks import CountedList

from bytecheckpoint.planner.recovery_plan import StagedPart, TargetFolder, plan_recovery

NOTHING = TargetFolder("", {})


def name_of(save_id: str, rank: int) -> str:
    return f"data/{save_id}-{rank:05d}-0.safetensors"


def part(rank: int, *, save_id: str = "a", num_ranks: int = 2, **fields: Any) -> StagedPart:
    """Of a save of which everything is there, unless told otherwise."""
    needed = {name_of(save_id, number): 10 + number for number in range(num_ranks)} if rank == 0 else None
    values: dict[str, Any] = {
        "name": f"{save_id}-{rank:05d}",
        "save_id": save_id,
        "rank": rank,
        "num_ranks": num_ranks,
        "folder": "step_00000001",
        "step": 1,
        "overwrite": False,
        "replaces": [],
        "host": f"host{rank}",
        "started_at": 1.0,
        "is_alive": False,
        "here": {name_of(save_id, rank): 10 + rank},
        "needed": needed,
        "is_complete": True,
    }
    return StagedPart(**{**values, **fields})


def decide(
    *found: list[StagedPart], there: TargetFolder = NOTHING
) -> tuple[list[list[tuple[str, list[str], bool]]], list[str]]:
    """By rank the folders with what is uploaded and committed; and the outcome of each save."""
    plan = plan_recovery(found, {"step_00000001": there})
    tasks = [[(task.name, task.uploads, task.commits) for task in of_rank] for of_rank in plan.tasks]
    return tasks, [f"{verdict.save_id}: {verdict.outcome}: {verdict.what}" for verdict in plan.verdicts]


def test_a_save_that_is_all_there_is_committed_by_whoever_has_its_manifest() -> None:
    tasks, outcomes = decide([part(1)], [part(0)])
    assert tasks == [[("a-00001", [name_of("a", 1)], False)], [("a-00000", [name_of("a", 0)], True)]]
    assert outcomes == ["a: committed: every rank's data was there"]


def test_ranks_that_share_a_disk_share_the_work() -> None:
    both = [part(0), part(1)]
    tasks, _ = decide(both, both, both)
    assert sorted(task for of_rank in tasks for task in of_rank) == [
        ("a-00000", [name_of("a", 0)], True),
        ("a-00001", [name_of("a", 1)], False),
    ]
    assert [len(of_rank) for of_rank in tasks] == [1, 1, 0]


def test_what_is_at_the_path_is_not_uploaded_again() -> None:
    tasks, outcomes = decide([part(0), part(1)], there=TargetFolder("", {name_of("a", 1): 11}))
    assert tasks == [[("a-00000", [name_of("a", 0)], True), ("a-00001", [], False)]]
    tasks, outcomes = decide([part(0)], there=TargetFolder("", {name_of("a", 1): 11}))
    assert outcomes == ["a: committed: every rank's data was there"]


def test_what_is_missing_is_named_and_the_rest_kept() -> None:
    tasks, (outcome,) = decide([part(0, num_ranks=3)], [part(2, num_ranks=3)])
    assert tasks == [[], []]
    assert outcome.startswith("a: kept: 1 of 3 data files are neither at the path nor in a local stage here")
    assert name_of("a", 1) in outcome
    assert "the parts of ranks 0, 2 of 3" in outcome


def test_a_part_that_is_not_whole_is_missing() -> None:
    _, (outcome,) = decide([part(0), part(1, here={})])
    assert outcome.startswith("a: kept: 1 of 2")
    _, (outcome,) = decide([part(0), part(1, here={})], there=TargetFolder("", {name_of("a", 1): 7}))
    assert outcome.startswith("a: kept: 1 of 2")


def test_without_the_manifest_it_depends_on_whether_rank_0_is_seen() -> None:
    tasks, outcomes = decide([part(0, needed=None), part(1)])
    assert outcomes == ["a: removed: it was cut short before every rank's data was durable"]
    assert tasks == [[("a-00000", [], False), ("a-00001", [], False)]]
    tasks, (outcome,) = decide([part(1)])
    assert tasks == [[]]
    assert outcome.startswith("a: kept: the local stage of rank 0 of 2")


def may_arrive(*parts: StagedPart, there: TargetFolder) -> bool:
    (verdict,) = plan_recovery([parts], {"step_00000001": there}).verdicts
    assert verdict.outcome == "removed"
    assert ("left to `bcp gc`" in verdict.what) == verdict.manifest_may_arrive
    return verdict.manifest_may_arrive


def test_the_data_of_a_save_stays_that_may_have_sent_its_manifest() -> None:
    """Which it does when all data is at the path; by then another has committed there."""
    sizes = {name_of("a", 0): 10, name_of("a", 1): 11}
    assert may_arrive(part(0), part(1), there=TargetFolder("b", sizes))
    assert not may_arrive(part(0), part(1), there=TargetFolder("b", {name_of("a", 0): 10}))
    assert not may_arrive(part(0), part(1), there=TargetFolder("b", {**sizes, name_of("a", 1): 5}))


def test_a_save_whose_manifest_had_no_room_in_the_stage_may_have_sent_it() -> None:
    there = TargetFolder("", {name_of("a", 1): 11})
    assert may_arrive(part(0, needed=None), part(1), there=there)
    assert not may_arrive(part(0, needed=None), part(1, is_complete=False), there=there)
    assert not may_arrive(part(0, needed=None), part(1), there=TargetFolder("", {name_of("b", 1): 11}))


@pytest.mark.parametrize("alive", [0, 1])
def test_what_lives_is_left_alone(alive: int) -> None:
    tasks, (outcome,) = decide([part(rank, is_alive=rank == alive) for rank in range(2)])
    assert tasks == [[]]
    assert outcome == f"a: under_way: a living process on host{alive} has it"


def test_what_was_committed_is_removed_whatever_is_missing() -> None:
    tasks, outcomes = decide([part(1)], there=TargetFolder("a", {}))
    assert tasks == [[("a-00001", [], False)]]
    assert outcomes == ["a: removed: it had been committed"]


@pytest.mark.parametrize(
    ("overwrite", "replaces", "there", "outcome"),
    [
        (False, [], "b", "removed"),
        (True, [], "b", "removed"),
        (True, ["c", "b"], "b", "committed"),
        (True, ["b"], "", "committed"),
        (False, [], None, "kept"),
        (True, ["b"], None, "kept"),
    ],
)
def test_only_what_was_to_be_replaced_is(overwrite: bool, replaces: list[str], there: str | None, outcome: str) -> None:
    parts = [part(rank, overwrite=overwrite, replaces=replaces) for rank in range(2)]
    _, (found,) = decide(parts, there=TargetFolder(there, {}))
    assert found.split(": ")[1] == outcome


def test_of_two_saves_to_one_place_the_later_is_finished() -> None:
    old = [part(rank, save_id="old", started_at=1.0) for rank in range(2)]
    new = [part(rank, save_id="new", started_at=2.0) for rank in range(2)]
    _, outcomes = decide([*new, *old])
    assert [outcome.rsplit(": ", 1)[0] for outcome in outcomes] == ["old: removed", "new: committed"]
    verdicts = plan_recovery([[*new, *old]], {"step_00000001": NOTHING}).verdicts
    assert [(verdict.save_id, verdict.superseded_by) for verdict in verdicts] == [("old", "new"), ("new", "")]
    _, outcomes = decide([new[0], *old])
    assert [outcome.split(": ")[1] for outcome in outcomes] == ["committed", "kept"]


def test_nothing_is_finished_where_a_living_save_is_at_work() -> None:
    old = [part(rank, save_id="old", started_at=1.0, overwrite=True) for rank in range(2)]
    new = [part(rank, save_id="new", started_at=2.0, is_alive=True) for rank in range(2)]
    tasks, outcomes = decide([*new, *old])
    assert tasks == [[]]
    assert [outcome.split(": ")[1] for outcome in outcomes] == ["kept", "under_way"]
    assert "call recover again when it has ended" in outcomes[0]


def test_a_manifest_that_cannot_be_read_is_kept_with_all_that_belongs_to_it() -> None:
    old = [part(rank, save_id="old", started_at=1.0) for rank in range(2)]
    new = [part(0, save_id="new", started_at=2.0, needed=None, damage="it is damaged"), part(1, save_id="new")]
    tasks, outcomes = decide([*new, *old])
    assert outcomes == ["old: committed: every rank's data was there", "new: kept: it is damaged"]
    assert {name for ((name, _, _), *_) in tasks} == {"old-00000"}


def test_nothing_found_is_nothing_to_do() -> None:
    assert decide([], []) == ([[], []], [])


def test_the_parts_of_a_rank_are_not_walked_again_for_each_part_of_others() -> None:
    found = [[CountedList([part(rank, num_ranks=count)]) for rank in range(count)] for count in (2, 20)]
    for by_rank in found:
        decide(*by_rank)
    assert found[1][0].num_walks == found[0][0].num_walks
