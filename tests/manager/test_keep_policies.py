from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from manager.steps import step_info

import bytecheckpoint as bcp
from bytecheckpoint.manager.keep_policies import (
    All,
    Best,
    EverySeconds,
    EverySteps,
    Latest,
    Steps,
    When,
    Within,
    kept_by,
    parts_of,
)
from bytecheckpoint.manager.step_info import StepInfo

SAVED = [step_info(step, time=100.0 * step) for step in (0, 4, 5, 8, 10, 13)]


class OddSteps:
    """A policy of a user."""

    def keeps(self, saved, _):
        return [info.step % 2 for info in saved]

    def __repr__(self):
        return "OddSteps()"


def kept(policy, saved=SAVED, now=1300.0):
    return [info.step for info, is_kept in zip(saved, kept_by(policy, saved, now), strict=True) if is_kept]


def test_each_policy_keeps_its_steps() -> None:
    assert kept(All()) == [0, 4, 5, 8, 10, 13]
    assert kept(Latest(2)) == [10, 13]
    assert kept(Latest(99)) == [0, 4, 5, 8, 10, 13]
    assert kept(EverySteps(4)) == [0, 4, 8]
    assert kept(Steps(5, 10, 11)) == kept(Steps([10, 5])) == [5, 10]
    assert kept(Within(500)) == [8, 10, 13]
    assert kept(When(lambda info: info.step > 9)) == [10, 13]
    assert kept(EverySteps(4) | Latest(1)) == [0, 4, 8, 13]


def test_every_seconds_counts_from_the_one_kept_before() -> None:
    assert kept(EverySeconds(500)) == [0, 5, 10]
    assert kept(EverySeconds(401)) == [0, 5, 10]


def test_every_seconds_keeps_the_same_after_the_others_are_gone() -> None:
    saved = SAVED
    for end in range(1, len(SAVED) + 1):
        left = [info for info in saved[:end] if info.step in kept(EverySeconds(401), SAVED[:end])]
        assert kept(EverySeconds(401), left) == [info.step for info in left]


def test_a_policy_of_a_user_is_joined_from_either_side() -> None:
    assert kept(OddSteps() | EverySteps(8)) == kept(EverySteps(8) | OddSteps()) == [0, 5, 8, 13]
    assert [repr(part) for part in parts_of(OddSteps() | Latest(1) | All())] == ["OddSteps()", "Latest(1)", "All()"]
    with pytest.raises(TypeError):
        Latest(5) | 5


def measured(*values):
    return [step_info(step, metrics={} if value is None else {"loss": value}) for step, value in enumerate(values)]


def test_best_by_a_metric() -> None:
    saved = measured(3.0, 1.0, None, 2.0, 5.0)
    assert kept(Best(2, "loss"), saved) == [1, 3]
    assert kept(Best(2, "loss", mode="max"), saved) == [0, 4]
    assert kept(Best(9, "loss"), saved) == [0, 1, 3, 4]
    assert kept(Best(2, "accuracy"), saved) == []


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_ranks_behind_every_number(mode) -> None:
    saved = measured(math.nan, math.inf, math.nan, -math.inf)
    assert kept(Best(2, "loss", mode), saved) == [1, 3]
    assert kept(Best(3, "loss", mode), saved) == [1, 2, 3]
    assert Best(1, "loss", mode).ranking(saved)[2:] == [2, 0]


def test_of_equal_values_the_newer_is_better() -> None:
    assert kept(Best(1, "loss"), measured(1.0, 2.0, 1.0)) == [2]


def test_policies_are_values_and_shown_as_written() -> None:
    policy = Latest(3) | EverySteps(10_000) | Best(2, "val_loss", mode="min")
    assert repr(policy) == "Latest(3) | EverySteps(10000) | Best(2, 'val_loss')"
    assert repr(Best(1, "a", "max") | Steps(3, 1)) == "Best(1, 'a', mode='max') | Steps([1, 3])"
    assert policy == Latest(3) | EverySteps(10_000) | Best(2, "val_loss")
    assert hash(policy) == hash(Latest(3) | EverySteps(10_000) | Best(2, "val_loss"))
    with pytest.raises(FrozenInstanceError):
        Latest(3).n = 2  # type: ignore[misc]  # the case


def test_a_policy_of_a_user_may_take_the_steps_alone() -> None:
    class Odd:
        def keeps(self, saved):
            return [info.step % 2 == 1 for info in saved]

    saved = [StepInfo(step, 0.0, {}, {}, False, True) for step in range(4)]
    assert kept_by(Odd(), saved, 1.0) == [False, True, False, True]
    assert kept_by(Latest(1) | Odd(), saved, 1.0) == [False, True, False, True]
    assert kept_by(Odd() | Steps(0), saved, 1.0) == [True, True, False, True]


def test_a_policy_of_a_user_answers_for_every_step() -> None:
    class Short:
        def keeps(self, *_):
            return [True]

        def __repr__(self):
            return "Short()"

    with pytest.raises(
        ValueError, match=r"Short\(\)\.keeps\(saved, now\) returned 1 values for 6 checkpoints; nothing was"
    ):
        kept(Latest(1) | Short())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Latest(0), "Latest: n must be an integer of at least 1, not 0"),
        (lambda: Latest(torch.tensor(1.5)), r"Latest: n must be an integer of at least 1, not tensor\(1\.5"),
        (lambda: EverySteps(-1), "EverySteps: n must be an integer of at least 1, not -1"),
        (lambda: EverySeconds(0), "EverySeconds: s must be a finite number of seconds above 0, not 0"),
        (lambda: Within(math.inf), "Within: s must be a finite number of seconds above 0, not inf"),
        (lambda: Best(0, "loss"), "Best: n must be an integer of at least 1, not 0"),
        (lambda: Best(1, ""), "Best: metric must be the name of a metric, not ''"),
        (lambda: Best(1, None), "Best: metric must be the name of a metric, not None"),
        (lambda: Best(1, "loss", "least"), "Best: mode must be 'min' or 'max', not 'least'"),
        (lambda: Best(1, "loss", ["min"]), r"Best: mode must be 'min' or 'max', not \['min'\]"),
        (Steps, r"Steps: steps must be one step or more, not \(\)"),
        (lambda: When("x"), r"When: fn must be a function, called as fn\(info\), not 'x'"),
    ],
)
def test_arguments_are_checked_when_a_policy_is_made(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("module", [bcp.save_policies, bcp.keep_policies])
def test_each_policy_is_public_and_documented(module) -> None:
    assert [name for name in module.__all__ if not getattr(module, name).__doc__] == []


def test_every_so_many_seconds_goes_by_time_also_where_a_left_branch_comes_first() -> None:
    hours = [3, 4, 0, 1, 2, 4.1]
    saved = [StepInfo(step, hour * 3600, {}, {}, False, True) for step, hour in enumerate(hours)]
    assert bcp.keep_policies.EverySeconds(3600).keeps(saved, 0.0) == [True, True, True, True, True, False]
