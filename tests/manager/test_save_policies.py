from __future__ import annotations

import logging
import math
import pickle
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from manager.steps import now_at, step_info

from bytecheckpoint.manager.save_policies import (
    AtSteps,
    Continuous,
    Deadline,
    EverySeconds,
    EverySteps,
    First,
    Last,
    Overhead,
    Preempted,
    When,
    is_step_only,
    needed_to_stop_s,
    parts_of,
)


class AtPrimes:
    """A policy of a user, which says nothing about itself."""

    def due(self, now, _):
        return now.step in {2, 3, 5, 7}

    def __repr__(self):
        return "AtPrimes()"


def due_steps(policy, num_steps=12):
    return [step for step in range(num_steps) if policy.due(now_at(step), [])]


def test_every_steps_leaves_out_step_0() -> None:
    assert due_steps(EverySteps(5)) == [5, 10]
    assert due_steps(EverySteps(5, offset=1)) == [1, 6, 11]
    assert due_steps(EverySteps(5, 4)) == [4, 9]


def test_an_offset_may_be_larger_than_the_interval() -> None:
    assert due_steps(EverySteps(5, offset=6)) == [1, 6, 11]


@pytest.mark.parametrize(
    "policy",
    [
        AtSteps([3, 7]),
        AtSteps(3, 7),
        AtSteps({7, 3}),
        AtSteps(np.array([3, 7])),
        AtSteps([3], 7),
        AtSteps(np.array(3), np.int64(7)),
        AtSteps(torch.tensor(3), torch.tensor([7])),
    ],
)
def test_steps_are_given_as_numbers_or_lists(policy: AtSteps) -> None:
    assert due_steps(policy) == [3, 7]
    assert policy == AtSteps([7, 3])


def test_a_range_of_steps_stays_one() -> None:
    policy = AtSteps(range(0, 10**12, 5))
    assert due_steps(policy) == [0, 5, 10]
    assert repr(policy) == "AtSteps(range(0, 1000000000000, 5))"


def test_first_is_due_until_something_is_saved_or_in_flight() -> None:
    assert First().due(now_at(7), [])
    assert not First().due(now_at(8), [step_info(7, committed=False)])


def test_last_is_the_step_before_the_number_of_steps() -> None:
    assert due_steps(Last(10)) == [9]


def test_every_seconds_counts_from_the_newest_commit() -> None:
    policy = EverySeconds(100)
    saved = [step_info(1, time=500.0), step_info(2, time=1000.0)]
    assert not policy.due(now_at(3, time=1099.0), saved)
    assert policy.due(now_at(3, time=1100.0), saved)


def test_every_seconds_counts_a_save_in_flight() -> None:
    saved = [step_info(1, time=500.0), step_info(2, time=1000.0, committed=False)]
    assert not EverySeconds(100).due(now_at(3, time=1050.0), saved)


def test_without_a_checkpoint_every_seconds_counts_from_the_start() -> None:
    assert not EverySeconds(100).due(now_at(3, time=5e9, seconds={"since_start": 99.0}), [])
    assert EverySeconds(100).due(now_at(3, time=5e9, seconds={"since_start": 100.0}), [])


def test_a_checkpoint_from_the_future_makes_nothing_due() -> None:
    saved = [step_info(1, time=5000.0)]
    assert not EverySeconds(100).due(now_at(2, time=1400.0), saved)
    assert not Continuous(1).due(now_at(2, time=1400.0), saved)


def test_continuous_waits_for_the_save_in_flight() -> None:
    assert Continuous().due(now_at(1), [])
    assert not Continuous().due(now_at(2, time=9.0), [step_info(1, time=1.0, committed=False)])
    assert Continuous().due(now_at(2, time=9.0), [step_info(1, time=1.0)])


def test_continuous_counts_its_pause_from_where_the_newest_save_began() -> None:
    saved = [step_info(1, time=100.0, seconds={"total": 30.0})]
    assert not Continuous(60).due(now_at(2, time=129.0), saved)
    assert Continuous(60).due(now_at(2, time=130.0), saved)


def test_overhead_spreads_the_last_stall() -> None:
    saved = [step_info(1, time=50.0, seconds={"stall": 9.0}), step_info(2, time=100.0, seconds={"stall": 2.0})]
    assert Overhead(0.01).due(now_at(1), [])
    assert not Overhead(0.01).due(now_at(3, time=299.0), saved)
    assert Overhead(0.01).due(now_at(3, time=300.0), saved)


def test_overhead_takes_the_stall_of_the_last_save_that_has_one() -> None:
    saved = [step_info(1, time=50.0, seconds={"stall": 2.0}), step_info(2, time=100.0)]
    assert not Overhead(0.01).due(now_at(3, time=299.0), saved)
    assert Overhead(0.01).due(now_at(3, time=299.0), saved[1:])
    assert not Overhead(0.01).due(now_at(3, time=299.0), [step_info(1, time=0.0, committed=False)])


def test_preempted_is_due_when_training_stops() -> None:
    assert Preempted().due(now_at(1, stopping=True), [])
    assert not Preempted().due(now_at(1), [])


def test_a_deadline_leaves_time_for_a_step_and_a_save() -> None:
    saved = [step_info(1, seconds={"total": 20.0})]
    policy = Deadline(1000.0, margin_s=30)
    assert needed_to_stop_s(now_at(2, seconds={"step": 5.0}), saved) == 25.0
    assert not policy.due(now_at(2, host_time=944.0, seconds={"step": 5.0}), saved)
    assert policy.due(now_at(2, host_time=945.0, seconds={"step": 5.0}), saved)
    assert policy.due(now_at(2, host_time=5000.0), [])
    assert policy.due(now_at(2, stopping=True), [])


def test_a_deadline_is_quiet_while_no_clock_may_be_used() -> None:
    assert not Deadline(1000.0, margin_s=30).due(now_at(2), [])


def test_a_deadline_goes_by_the_clock_of_the_host_and_not_of_the_storage() -> None:
    assert not Deadline(1000.0, margin_s=30).due(now_at(2, time=5000.0, host_time=900.0), [])
    assert Deadline(1000.0, margin_s=30).due(now_at(2, time=500.0, host_time=980.0), [])


def test_a_deadline_is_a_time_with_a_zone() -> None:
    assert Deadline(datetime(2030, 1, 1, tzinfo=UTC), 5).at_s == datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    with pytest.raises(ValueError, match=r"Deadline: at must be .* a time zone"):
        Deadline(datetime(2030, 1, 1))  # noqa: DTZ001  the case


def test_a_deadline_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1900000000")
    policy = Deadline("SLURM_JOB_END_TIME", margin_s=60)
    assert policy.at_s == 1.9e9
    assert repr(policy) == "Deadline('SLURM_JOB_END_TIME')"


def test_without_the_variable_there_is_no_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        policy = Deadline("SLURM_JOB_END_TIME", margin_s=60)
        assert not policy.due(now_at(2, host_time=9e9), [])
    assert policy.at_s == math.inf
    assert [record.getMessage() for record in caplog.records] == [
        "Deadline('SLURM_JOB_END_TIME') is no deadline here: the environment variable SLURM_JOB_END_TIME is not set"
    ]


@pytest.mark.parametrize("text", ["tomorrow", "", "nan"])
def test_a_variable_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MY_END", text)
    with pytest.raises(ValueError, match=f"MY_END holds '{text}'"):
        Deadline("MY_END")


def test_when_calls_the_function() -> None:
    policy = When(lambda now, saved: len(saved) < 2 and now.metrics["loss"] < 1)
    assert policy.due(now_at(1, metrics={"loss": 0.5}), []) is True
    assert policy.due(now_at(1, metrics={"loss": 1.5}), []) is False


def test_policies_are_joined() -> None:
    assert due_steps(EverySteps(5) | AtSteps(3)) == [3, 5, 10]
    assert due_steps(EverySteps(2) & EverySteps(5)) == [10]
    assert due_steps(EverySteps(5) | EverySteps(2) & EverySteps(3)) == [5, 6, 10]


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        (AtPrimes() | EverySteps(5), [2, 3, 5, 7, 10]),
        (EverySteps(5) | AtPrimes(), [2, 3, 5, 7, 10]),
        (AtPrimes() & EverySteps(5), [5]),
        (EverySteps(5) & AtPrimes(), [5]),
    ],
)
def test_a_policy_of_a_user_is_joined_from_either_side(policy, steps: list[int]) -> None:
    assert due_steps(policy) == steps
    assert {type(part) for part in parts_of(policy)} == {AtPrimes, EverySteps}
    assert not is_step_only(policy)


@pytest.mark.parametrize("other", [5, None, "EverySteps(5)"])
def test_other_things_are_not_joined(other) -> None:
    with pytest.raises(TypeError):
        EverySteps(5) | other
    with pytest.raises(TypeError):
        other & EverySteps(5)


def test_a_join_is_shown_as_it_was_written() -> None:
    assert repr(EverySteps(500) | (EverySeconds(900) & Preempted())) == (
        "EverySteps(500) | (EverySeconds(900) & Preempted())"
    )
    assert repr((EverySteps(500) | First()) & EverySeconds(9.5)) == "(EverySteps(500) | First()) & EverySeconds(9.5)"
    assert repr(EverySteps(5) | First() | Last(9)) == "EverySteps(5) | First() | Last(9)"
    assert repr(AtPrimes() | EverySteps(5, 2)) == "AtPrimes() | EverySteps(5, offset=2)"
    assert (
        repr(AtSteps([9, 3]) | Continuous() | Continuous(5))
        == "AtSteps([3, 9]) | Continuous() | Continuous(minimum_s=5)"
    )
    assert repr(When(due_steps)) == "When(due_steps)"


def test_joins_of_policies_by_step_need_no_message() -> None:
    by_step = EverySteps(5) | AtSteps(3) | (First() & Last(9)) | Preempted() | Deadline(5.0, 3)
    assert is_step_only(by_step)
    assert not is_step_only(by_step | EverySeconds(5))
    assert not is_step_only(First() & Continuous())
    assert not is_step_only(Overhead(0.5))
    assert not is_step_only(When(due_steps))


def test_policies_are_values() -> None:
    policy = EverySteps(500) | (EverySeconds(900) & AtSteps(1, 2))
    assert policy == EverySteps(500) | (EverySeconds(900) & AtSteps(2, 1))
    assert len({policy, pickle.loads(pickle.dumps(policy))}) == 1
    with pytest.raises(FrozenInstanceError):
        EverySteps(5).n = 6  # type: ignore[misc]  # the case


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EverySteps(0), "EverySteps: n must be an integer of at least 1, not 0"),
        (lambda: EverySteps(2.5), "EverySteps: n must be an integer of at least 1, not 2.5"),
        (lambda: EverySteps(True), "EverySteps: n must be an integer of at least 1, not True"),
        (lambda: EverySteps(5, -1), "EverySteps: offset must be an integer of at least 0, not -1"),
        (lambda: EverySeconds(0), "EverySeconds: s must be a finite number of seconds above 0, not 0"),
        (lambda: EverySeconds("9"), "EverySeconds: s must be a finite number of seconds above 0, not '9'"),
        (lambda: EverySeconds(math.nan), "EverySeconds: s must be a finite number of seconds above 0, not nan"),
        (AtSteps, r"AtSteps: steps must be one step or more, not \(\)"),
        (lambda: AtSteps([]), r"AtSteps: steps must be one step or more, not \(\[\],\)"),
        (lambda: AtSteps(np.array(1.5)), r"AtSteps: steps must be an integer of at least 0, not array\(1\.5\)"),
        (lambda: AtSteps("12"), "AtSteps: steps must be an integer of at least 0, not '12'"),
        (lambda: AtSteps(range(-5, 5)), "AtSteps: steps must be an integer of at least 0, not -5"),
        (lambda: Last(0), "Last: num_steps must be an integer of at least 1, not 0"),
        (lambda: Continuous(-1), "Continuous: minimum_s must be a finite number of seconds at least 0, not -1"),
        (lambda: Overhead(1), "Overhead: fraction must be a number above 0 and below 1, not 1"),
        (lambda: Overhead(math.nan), "Overhead: fraction must be a number above 0 and below 1, not nan"),
        (lambda: Deadline(None), "Deadline: at must be seconds since 1970, .* not None"),
        (lambda: Deadline(5.0, -1), "Deadline: margin_s must be a finite number of seconds at least 0, not -1"),
        (lambda: When(5), r"When: fn must be a function, called as fn\(now, saved\), not 5"),
    ],
)
def test_arguments_are_checked_when_a_policy_is_made(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
