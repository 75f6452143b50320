"""Every campaign, a few trials of each here and all of them in `make test-faults`; and what makes the table of them."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bytecheckpoint as bcp
from faults import fault_table, kill_calls, kill_times
from faults.campaigns import (
    EVERY,
    Asked,
    Broken,
    Campaign,
    Outcome,
    Row,
    Tally,
    all_campaigns,
    nothing_missing,
    side_by_side,
)
from faults.damage import flipped, load_own, saved
from faults.failing_calls import judged
from faults.kill_calls import Case, Crew, Striking, Struck
from faults.kill_times import left_alive
from faults.launcher import Ended, Launcher
from faults.savers import NARROW, OWN, Training, WrongBytesError
from faults.survived import clean_up, files_of_the_dead, lost, stuck, torn
from faults.traced import BEFORE, SAVED, FileCall

CAMPAIGNS = all_campaigns()
BY_NAME = {campaign.name: campaign for campaign in CAMPAIGNS}


def cases() -> list[object]:
    found = []
    for campaign in CAMPAIGNS:
        marks = [] if campaign.missing is nothing_missing else [pytest.mark.privileged]
        if campaign.quick:
            found.append(pytest.param(campaign, campaign.quick, id=f"{campaign.name} quick", marks=marks))
        if not campaign.is_peer:
            marks = [*marks, pytest.mark.long, pytest.mark.timeout(7200)]
            found.append(pytest.param(campaign, campaign.trials, id=campaign.name, marks=marks))
    return found


@pytest.mark.parametrize(("campaign", "trials"), cases())
def test_nothing_is_broken_by(campaign: Campaign, trials: range, tmp_path: Path) -> None:
    missing = campaign.missing()
    if missing is not None:
        pytest.skip(f"needs {missing}")
    outcome = campaign.run(Asked(campaign.seed, trials, tmp_path))
    assert outcome.num_trials > 0
    assert campaign.quick_shows in outcome.result
    assert campaign.is_peer or outcome.broken == (), f"python tests/faults/fault_table.py {campaign.name}"


class SlowRank:
    """A program that lives on for so long after the kill, by a clock of its own."""

    def __init__(self, ends_s: float, clock: list[float]) -> None:
        self._ends_s, self._clock = ends_s, clock

    def has_ended(self) -> bool:
        return self._clock[0] >= self._ends_s


@pytest.mark.parametrize(("ends_s", "is_hung"), [(30.0, False), (300.0, True)])
def test_a_rank_that_ends_long_after_a_kill_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch, ends_s: float, is_hung: bool
) -> None:
    """Also where other trials are made meanwhile."""
    clock = [0.0]
    monkeypatch.setattr(kill_calls, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def strike(crew: Crew, root: Path, trial: int, case: Case) -> Striking:
        clock[0] += 2.0
        return Striking(trial, case, root, [SlowRank(ends_s if trial == 0 else 0.0, clock)], clock[0])  # type: ignore[list-item]

    def judged(crew: Crew, striking: Striking) -> Struck:
        has_ended = all(program.has_ended() for program in striking.programs)
        return Struck(True, False, None if has_ended else "hung")

    monkeypatch.setattr(kill_calls, "strike", strike)
    monkeypatch.setattr(kill_calls, "judged", judged)
    cases = [Case(False, 0, FileCall("write", number, "")) for number in range(200)]
    asked = Asked(1, range(200), Path())
    found = {of.trial: one.is_wrong for of, one in kill_calls.all_struck(None, asked, cases)}  # type: ignore[arg-type]
    assert len(found) == 200
    assert (found[0] == "hung") == is_hung


def test_a_save_that_says_what_it_could_not_delete_is_acknowledged(tmp_path: Path) -> None:
    for steps in (BEFORE, SAVED):
        OWN.save(tmp_path, Training(steps=steps), in_place=True)
    left = "1 of 2 files in /run, which no checkpoint needs any more, could not be deleted (no): `bcp gc` finds them"
    assert judged(Ended(0, f"ready\n{left}\ndone\n"), tmp_path, in_place=True) == ("done", None)
    assert judged(Ended(0, "ready\nsomething else\ndone\n"), tmp_path, in_place=True)[0] == "broken"


def test_programs_with_the_same_process_id_have_outputs_of_their_own(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what the first one said would count for the second."""
    pids = [launcher.start("print('first')")]
    assert launcher.wait(pids[0]).output == "first\n"
    ask = Launcher._ask

    def same_id(self: Launcher, request: dict[str, Any]) -> Any:
        answer = ask(self, request | ({"wait": pids[-1]} if "wait" in request else {}))
        if "code" in request:
            pids.append(answer)
            return pids[0]
        return answer

    monkeypatch.setattr(Launcher, "_ask", same_id)
    for text in ("second", "third"):
        assert launcher.run(f"print({text!r})").output == f"{text}\n"


LEAVES_A_CHILD = """
import os, signal, time

os.setsid()
child = os.fork()
if child == 0:
    while os.getppid() == int(os.environ["LAUNCHED"]):
        time.sleep(0.001)
    print(f"now of {os.getppid()}", flush=True)
    os._exit(0)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the kernel lists no children")
def test_what_a_killed_program_leaves_behind_is_waited_for_by_the_launcher(launcher: Launcher) -> None:
    """The first process of a machine took up to two seconds for that, in every trial of a forked snapshot."""
    pid = launcher.start("import os; os.environ['LAUNCHED'] = str(os.getpid())" + LEAVES_A_CHILD)
    launcher.wait_for_output(pid, "ready")
    assert not launcher.has_ended(pid)
    os.kill(pid, signal.SIGKILL)
    launcher.wait_for_output(pid, "now of")
    ended = launcher.wait(pid)
    assert ended.exit_code == -signal.SIGKILL
    assert "now of" in ended.output
    assert left_alive(pid) is None


def test_what_has_ended_and_was_not_waited_for_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_times, "SURELY_TOLD_S", 0.0)
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.killpg(child, 0)  # its number is taken still
    assert left_alive(child) is None
    os.waitpid(child, 0)


def test_what_lives_on_after_a_program_is_told_with_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_times, "SURELY_TOLD_S", 0.0)
    monkeypatch.setattr(kill_times, "ENDS_WITHIN_S", 0.2)
    child = os.fork()
    if child == 0:
        os.setsid()
        while True:
            signal.pause()
    while os.getpgid(child) != child:
        time.sleep(0.001)
    assert f"lives 0.2 s after it: {child} in " in str(left_alive(child))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_program_that_has_ended_keeps_its_number_until_it_is_waited_for(launcher: Launcher) -> None:
    """Or a kill that comes too late would hit another program."""
    pid = launcher.start("")
    while not launcher.has_ended(pid):
        time.sleep(0.001)
    assert launcher.run("print('another')").output == "another\n"
    os.kill(pid, 0)
    assert launcher.wait(pid).exit_code == 0
    assert launcher.has_ended(pid)  # and the launcher goes on
    assert launcher.run("").exit_code == 0


def test_campaigns_have_names_of_their_own() -> None:
    names = [campaign.name for campaign in CAMPAIGNS]
    assert len(set(names)) == len(names)


def test_a_trial_draws_the_same_whatever_was_done_before(tmp_path: Path) -> None:
    alone, among = Asked(3, range(7, 8), tmp_path), Asked(3, range(10), tmp_path)
    assert [alone.rng(trial).random() for trial in alone.due()] == [among.rng(7).random()]
    assert Asked(4, range(1), tmp_path).rng(7).random() != among.rng(7).random()
    assert list(Asked(3, range(10), tmp_path, until_s=0.0).due()) == []


def test_lanes_try_each_trial_once_and_one_at_a_time_each(tmp_path: Path) -> None:
    """Two are under way at once, or they would wait for one another in vain."""
    tally, busy, both = Tally(), {"a": threading.Lock(), "b": threading.Lock()}, threading.Barrier(2, timeout=60)

    def try_one(lane: str, trial: int) -> tuple[str, int]:
        assert busy[lane].acquire(blocking=False)
        both.wait()
        busy[lane].release()
        return lane, trial

    tried = side_by_side(Asked(1, range(4, 10), tmp_path, tally=tally), ["a", "b"], try_one)
    assert [trial for _, trial in tried] == [*range(4, 10)]
    assert {lane for lane, _ in tried} == {"a", "b"}
    assert tally.num_tried == 6


def test_where_one_lane_cannot_go_on_no_other_begins_another_trial(tmp_path: Path) -> None:
    tally = Tally()

    def try_one(_lane: str, trial: int) -> None:
        if trial == 3:
            raise OSError("no room")
        time.sleep(0.001)

    with pytest.raises(OSError, match="no room"):
        side_by_side(Asked(1, EVERY, tmp_path, tally=tally), ["a", "b"], try_one)
    assert tally.num_tried >= 4


class TestWhatACampaignLooksFor:
    """Each check is seen to find what it is there for."""

    def test_an_acknowledged_step_that_is_gone(self, tmp_path: Path) -> None:
        OWN.save(tmp_path, Training(steps=1), in_place=False)
        assert lost(OWN, tmp_path, begun=2, acknowledged=[1], in_place=False) is None
        assert "step 2 does not load" in str(lost(OWN, tmp_path, begun=2, acknowledged=[1, 2], in_place=False))

    def test_a_checkpoint_in_place_that_is_older_than_acknowledged(self, tmp_path: Path) -> None:
        OWN.save(tmp_path, Training(steps=1), in_place=True)
        assert lost(OWN, tmp_path, begun=2, acknowledged=[1], in_place=True) is None
        assert "that after 1 steps" in str(lost(OWN, tmp_path, begun=3, acknowledged=[1, 2], in_place=True))

    def test_a_snapshot_in_place_that_was_made_after_the_call(self, tmp_path: Path) -> None:
        """Asynchronous saves are of steps 1, 3, 5: the training goes on meanwhile."""
        OWN.save(tmp_path, Training(steps=2), in_place=True)
        assert "that after 2 steps" in str(lost(OWN, tmp_path, begun=3, acknowledged=[1], in_place=True))
        assert "that after 2 steps" in str(torn(tmp_path, begun=1, acknowledged=[], in_place=True))

    def test_other_bits_than_were_saved(self, tmp_path: Path) -> None:
        training = Training(steps=1)
        training.model.wide.data[5] += 1e-3
        OWN.save(tmp_path, training, in_place=True)
        with pytest.raises(WrongBytesError, match="wide is not as it was"):
            OWN.steps_loaded(tmp_path, step=None)
        assert "WrongBytesError" in str(torn(tmp_path, begun=1, acknowledged=[], in_place=True))

    def test_a_visible_step_that_does_not_load(self, tmp_path: Path) -> None:
        OWN.save(tmp_path, Training(steps=1), in_place=False)
        (data_file,) = tmp_path.glob("step_00000001/data/*")
        data_file.write_bytes(data_file.read_bytes()[:-1])
        assert "step 1 does not load: CheckpointCorruptError" in str(
            torn(tmp_path, begun=1, acknowledged=[], in_place=False)
        )

    def test_a_file_that_no_clean_up_removes(self, tmp_path: Path) -> None:
        OWN.save(tmp_path, Training(steps=1), in_place=False)
        stranger = tmp_path / "step_00000001" / "data" / "stranger"
        stranger.write_text("x")
        clean_up(tmp_path)
        assert files_of_the_dead(tmp_path, in_place=False) == ["step_00000001/data/stranger"]
        assert "left after clean-up" in str(stuck(tmp_path, begun=1, in_place=False))
        stranger.unlink()
        assert stuck(tmp_path, begun=2, in_place=False) is None

    def test_damage_that_nobody_notices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        root = saved(tmp_path, saver_name="own")
        (file,) = root.glob("data/*")
        verify_nothing = bcp.LoadOptions(verify=False)
        monkeypatch.setattr(
            OWN, "load", lambda *args, **kwargs: load_unverified(*args, options=verify_nothing, **kwargs)
        )
        with flipped(file, 8 * file.stat().st_size - 20_000):
            shot = load_own(root, file=file.name, width=NARROW)
        assert "was not noticed" in str(shot.is_wrong)


def load_unverified(root: Path, training: Training, *, step: int | None, options: bcp.LoadOptions) -> None:
    state = {"model": training.model, "optimizer": training.optimizer, "extra_state": training.extra}
    bcp.load(root, state, step=step, options=options)


def toy(*, num_broken: int = 0, missing: str | None = None, is_peer: bool = False) -> Campaign:
    def run(asked: Asked) -> Outcome:
        broken = tuple(Broken(trial, "it | fell off") for trial in range(num_broken))
        return Outcome(len(list(asked.due())), broken, "as expected")

    return Campaign(
        name="toy",
        fault="a toy",
        how="by hand",
        unit="tries",
        run=run,
        trials=range(3),
        quick=range(1),
        missing=lambda: missing,
        is_peer=is_peer,
    )


def test_a_row_says_what_was_run_and_how_to_repeat_it() -> None:
    row = fault_table.run(toy(num_broken=2), seed=5, trials=range(3))
    assert (row.number, row.asked, row.broken, row.seed) == (3, 3, 2, 5)
    assert row.first_broken == "it | fell off (python tests/faults/fault_table.py toy --seed 5 --trials 0)"
    line = fault_table.page([row]).splitlines()[-1]
    assert "| 3 tries | **2** |" in line
    assert "it \\| fell off" in line


def test_a_row_that_was_not_run_says_what_is_missing() -> None:
    row = fault_table.run(toy(missing="a disk"), seed=1, trials=range(3))
    assert row.number is None
    assert "| - | - | not run: needs a disk |" in fault_table.page([row])


def test_a_row_with_no_time_for_all_says_so() -> None:
    row = fault_table.run(toy(), seed=1, trials=range(3), until_s=0.0)
    assert "0 tries (0 of 3 trials: the time was up)" in fault_table.page([row])
    of_every = fault_table.run(toy(), seed=1, trials=EVERY, until_s=0.0)
    assert of_every.asked is None
    assert "0 tries (not all: the time was up)" in fault_table.page([of_every])


def test_a_campaign_that_came_to_its_end_says_nothing_of_time() -> None:
    """Also where its time was up a moment later, or not each of its trials was a fault."""
    row = fault_table.run(toy(), seed=1, trials=range(3))
    assert (row.tried, row.is_cut_short) == (3, False)
    assert "the time was up" not in fault_table.page([replace(row, number=2)])


def test_rows_are_kept_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_table, "KEPT", tmp_path / "kept")
    row = fault_table.run(toy(is_peer=True), seed=1, trials=range(3))
    fault_table.keep(row)
    other = replace(toy(), name="other")
    found, never_run = fault_table.kept_rows([toy(is_peer=True), other])
    assert asdict(found) == asdict(row)
    assert (never_run.number, never_run.result) == (None, "not run yet")
    assert "torch.distributed.checkpoint" in fault_table.page([row])


def test_a_row_is_added_to_until_all_its_trials_were_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(asked: Asked) -> Outcome:
        done = list(asked.due())
        return Outcome(len(done), (), f"{sum(trial < 2 for trial in done)} early, {sum(map(bool, done))} late")

    campaign = replace(toy(), run=count, trials=range(5))
    monkeypatch.setattr(fault_table, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(fault_table, "_commit", lambda: "second")
    first = fault_table.run(campaign, seed=1, trials=range(2))
    fault_table.keep(replace(first, is_cut_short=True, commit="first"))
    for _ in range(2):  # nothing is left for the second time
        row = fault_table.do_more(campaign, math.inf)
        fault_table.keep(row)
        assert (row.number, row.tried, row.asked, row.result) == (5, 5, 5, "2 early, 4 late")
        assert (row.is_cut_short, row.commit) == (False, "first to second")


def test_the_page_says_what_was_kept() -> None:
    """`python tests/faults/fault_table.py --table` writes it anew."""
    rows = fault_table.kept_rows(CAMPAIGNS)
    assert fault_table.PAGE.read_text() == fault_table.page(rows, fault_table.whole_run(rows))


def keeping_as(rows: list[Row], run_first: list[str], failing: Sequence[str] = ()) -> Callable[..., list[int]]:
    """Stands for the processes of campaigns: notes their order, and keeps these rows."""

    def each_alone(names: Sequence[str], _jobs: int, _minutes: float) -> list[int]:
        run_first.extend(names)
        for row in rows:
            if row.name not in failing:
                fault_table.keep(row)
        return [-9 if name in failing else 0 for name in names]

    return each_alone


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """All campaigns that there are; what was kept of the last one stopped half-way."""
    campaigns = [replace(toy(), name=name) for name in ("short", "long", "cut")]
    monkeypatch.setattr(fault_table, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(fault_table, "PAGE", tmp_path / "faults.md")
    monkeypatch.setattr(fault_table, "all_campaigns", lambda: campaigns)
    rows = [replace(fault_table.run(each, seed=1, trials=range(3)), seconds=60.0) for each in campaigns]
    return [rows[0], replace(rows[1], seconds=120.0), replace(rows[2], seconds=90.0, tried=1, is_cut_short=True)]


def run_all(jobs: int = 2) -> int:
    return fault_table.run_many(fault_table.all_campaigns(), jobs=jobs, minutes=1.0)


def test_the_campaign_that_may_take_longest_is_begun_first(three: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[str] = []
    monkeypatch.setattr(fault_table, "_each_alone", keeping_as(three, first))
    run_all()
    assert first == ["short", "long", "cut"]  # of none is anything known
    run_all()
    assert first[3:] == ["cut", "long", "short"]  # of 90 s for a third of it


def test_fuzzing_that_was_cut_short_says_so(tmp_path: Path) -> None:
    tally = Tally()
    asked = Asked(1, range(1_000_000), tmp_path, time.monotonic() + 1.0, tally)
    (fuzzing,) = [campaign for campaign in CAMPAIGNS if campaign.name == "fuzz-manifests"]
    outcome = fuzzing.run(asked)
    assert tally == Tally(outcome.num_trials, is_cut_short=True)
    assert 0 < outcome.num_trials < 1_000_000


def test_a_run_of_all_says_how_long_it_took_and_what_was_broken(
    three: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    three[0] = replace(three[0], broken=2, first_broken="it fell off")
    monkeypatch.setattr(fault_table, "_each_alone", keeping_as(three, []))
    clock = iter([1000.0, 1180.0])
    monkeypatch.setattr(fault_table, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run_all() == 0
    assert capsys.readouterr().out == "3 campaigns in 3.0 minutes: 2 broken\n"
    assert "All rows are of one run, which took 3 minutes, 2 campaigns at a time." in fault_table.PAGE.read_text()


def test_a_row_that_files_date_before_the_run_is_of_the_run(three: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel does that dates files by its last tick, or a clock that was set back."""

    def each_alone(names: Sequence[str], _jobs: int, _minutes: float) -> list[int]:
        for row in three:
            fault_table.keep(row)
            os.utime(fault_table.KEPT / f"{row.name}.json", (0, 0))
        return [0 for _ in names]

    monkeypatch.setattr(fault_table, "_each_alone", each_alone)
    assert run_all() == 0


def test_rows_of_several_runs_are_not_passed_off_as_one(three: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_table, "_each_alone", keeping_as(three, []))
    run_all()
    fault_table.keep(replace(three[0], seconds=30.0))
    fault_table.write_page()
    assert "of several runs. Their seconds add up to 4 minutes." in fault_table.PAGE.read_text()


def test_a_campaign_that_ends_without_an_outcome_is_named_and_makes_no_whole_run(
    three: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault_table.keep(three[1])
    monkeypatch.setattr(fault_table, "_each_alone", keeping_as(three, [], failing=["long"]))
    assert run_all() == 1
    assert "0 broken; of long nothing is known: they ended early" in capsys.readouterr().out
    assert "of several runs" in fault_table.PAGE.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("17", range(17, 18)), ("3-9", range(3, 10))],
)
def test_trials_are_a_number_or_a_range(arguments: str, expected: range) -> None:
    assert fault_table.range_of(arguments) == expected


@pytest.mark.parametrize("names", [[], ["flip-data", "mix-up"]])
@pytest.mark.parametrize("option", [["--more"], ["--seed", "3"], ["--trials", "17"]])
def test_an_option_of_one_campaign_is_refused_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: list[str], option: list[str]
) -> None:
    """Instead of a run of all their trials, which would replace what was kept."""
    monkeypatch.setattr(sys, "argv", ["fault_table.py", *names, *option])
    with pytest.raises(SystemExit, match="2"):
        fault_table.main()
    assert "name exactly one" in capsys.readouterr().err


def test_the_numbers_of_the_page_about_guarantees_are_those_that_were_kept() -> None:
    """Its rows name the campaigns that they sum up."""
    kept = {row.name: row for row in fault_table.kept_rows(CAMPAIGNS)}
    lines = (fault_table.ROOT / "docs" / "guarantees.md").read_text().splitlines()
    named = [(re.findall(r"`([a-z-]+)`", line), line) for line in lines if line.startswith("| ")]
    sums = [(names, line) for names, line in named if names and all(name in BY_NAME for name in names)]
    assert sums
    for names, line in sums:
        rows = [kept[name] for name in names]
        assert all(row.number is not None for row in rows), line
        number, broken = sum(row.number or 0 for row in rows), sum(row.broken for row in rows)
        assert [cell.strip() for cell in line.split("|")[2:4]] == [f"{number:,}", f"{broken:,}"], line
