"""Runs of accelerate on two ranks that are killed: they go on bit for bit, and on other ranks with the samples left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from rank_programs import Ended, run_ranks

import bytecheckpoint as bcp
from frameworks.accelerate.accelerate_program import told

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]
PROGRAM = Path(__file__).parent / "accelerate_program.py"


def lines_of(ranks: list[Ended]) -> list[list[str]]:
    return [[line for line in each.output.splitlines() if line.startswith(("step", "parameters"))] for each in ranks]


def samples(line: str) -> list[int]:
    return [int(each) for each in line.split()[2].split(",")]


def dealt(lines: list[list[str]]) -> list[list[int]]:
    """The samples of each step on all ranks."""
    steps = zip(*([line for line in of_rank if line.startswith("step")] for of_rank in lines), strict=True)
    return [sorted(sample for line in step for sample in samples(line)) for step in steps]


def test_a_killed_run_of_ddp_goes_on_bit_for_bit(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--stateful"]
    whole = lines_of(run_ranks(PROGRAM, given, world_size=2))
    assert whole[0] != whole[1]
    died = run_ranks(PROGRAM, [*given, "--save-at", 5, "--die-at", 6], world_size=2, exit_codes=[-signal.SIGKILL] * 2)
    assert lines_of(died) == [lines[:6] for lines in whole]
    for loader in (["--stateful"], ["--skip", 1]):
        resumed = lines_of(run_ranks(PROGRAM, ["--out", tmp_path, "--resume", *loader], world_size=2))
        assert resumed == [lines[5:] for lines in whole]


def test_the_advised_skip_is_right_where_rank_0_reads_for_all_ranks(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--dispatch"]
    whole = lines_of(run_ranks(PROGRAM, [*given, "--save-at", 6], world_size=2))
    for step, num_to_skip in ((6, 4), (7, 6)):  # the second was saved by the first that went on
        then = ["--resume", "--skip", num_to_skip, "--save-at", step + 1]
        ranks = run_ranks(PROGRAM, [*given, *then], world_size=2)
        assert f"skip_first_batches(loader, {num_to_skip})" in ranks[0].errors
        assert lines_of(ranks) == [lines[step:] for lines in whole]


@pytest.mark.parametrize("kind", [["--split", "--batch", 4], ["--workers", 1], ["--iterable"]])
def test_a_stateful_loader_goes_on_where_rank_0_reads_for_all_ranks(tmp_path: Path, kind: list[object]) -> None:
    given = ["--out", tmp_path, "--dispatch", "--stateful", *kind]
    whole = lines_of(run_ranks(PROGRAM, [*given, "--save-at", 2], world_size=2))
    assert lines_of(run_ranks(PROGRAM, [*given, "--resume"], world_size=2)) == [lines[2:] for lines in whole]


def test_a_killed_run_of_fsdp2_goes_on_bit_for_bit_and_on_one_rank(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--stateful", "--seedable", "--split", "--batch", 4, "--fsdp"]
    whole = lines_of(run_ranks(PROGRAM, given, world_size=2))
    run_ranks(PROGRAM, [*given, "--save-at", 8, "--die-at", 9], world_size=2, exit_codes=[-signal.SIGKILL] * 2)
    resumed = lines_of(run_ranks(PROGRAM, [*given, "--resume"], world_size=2))
    assert resumed == [lines[8:] for lines in whole]
    alone = told([each for each in [*given, "--resume"] if each != "--fsdp"])
    assert dealt([alone]) == dealt(whole)[8:]


def test_another_number_of_ranks_takes_the_samples_that_are_left(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--stateful", "--batch", 2]
    whole = dealt(lines_of(run_ranks(PROGRAM, given, world_size=2)))
    run_ranks(PROGRAM, [*given, "--save-at", 8, "--die-at", 8], world_size=2, exit_codes=[-signal.SIGKILL] * 2)
    alone = dealt([told([*given, "--resume"])])
    pairs = [sorted(one + other) for one, other in zip(alone[::2], alone[1::2], strict=True)]
    assert pairs[:10] == whole[8:]
    of_three = dealt(lines_of(run_ranks(PROGRAM, [*given, "--resume"], world_size=3)))
    left_of_epoch = {sample for step in whole[8:12] for sample in step}
    taken_again = {sample for step in of_three[:3] for sample in step} - left_of_epoch
    assert len(left_of_epoch) == 16
    assert len(taken_again) == 2


@pytest.mark.parametrize("doing", ["save", "load"])
def test_a_hook_that_fails_on_one_rank_is_raised_by_all(tmp_path: Path, doing: str) -> None:
    given = ["--out", tmp_path, "--hook-fails", doing]
    if doing == "load":
        told(["--out", tmp_path, "--save-at", 1, "--stop-at", 1])
        given.append("--resume")
    ranks = run_ranks(PROGRAM, [*given, "--save-at", 1], world_size=2, exit_codes=[1, 1])
    assert all(f"running the hooks before the {doing}" in each.errors for each in ranks)
    assert all("OSError: the hook failed" in each.errors for each in ranks)


def test_a_hook_that_one_rank_alone_has_runs_there(tmp_path: Path) -> None:
    given = ["--out", tmp_path, "--hook-on-rank-0"]
    run_ranks(PROGRAM, [*given, "--save-at", 2, "--stop-at", 2], world_size=2)
    run_ranks(PROGRAM, [*given, "--resume", "--skip", 2, "--stop-at", 3], world_size=2)
    assert bcp.steps(tmp_path) == [2]


def test_a_signal_on_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    ranks = run_ranks(PROGRAM, ["--out", tmp_path, "--stateful", "--signal-at", 3], world_size=2)
    assert [each.output.splitlines()[-1] for each in ranks] == ["stopped 3", "stopped 3"]
    assert bcp.steps(tmp_path) == [3]
