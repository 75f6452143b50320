"""When `CheckpointManager.save` saves. A policy is a frozen value; `|` and `&` join policies.

    save=EverySteps(500) | EverySeconds(900) | Preempted()
    save=AtSteps([10, 100]) | (EverySteps(1000) & EverySeconds(600))

A policy of your own is any object with `due(now, saved)`. If its answer depends on `now.step`, `now.stopping` and
`bool(saved)` alone, the attribute `is_step_only = True` spares a message between the ranks at each call of `save`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from bytecheckpoint.manager.policy_arguments import (
    GivenSteps,
    check_function,
    check_parts,
    checked_fraction,
    checked_integer,
    checked_seconds,
    collect_steps,
    plain_number,
    show_call,
    wrong_argument,
)
from bytecheckpoint.manager.step_info import StepInfo

logger = logging.getLogger("bytecheckpoint")

__all__ = [
    "AtSteps",
    "Continuous",
    "CostBudget",
    "Deadline",
    "EverySeconds",
    "EverySteps",
    "First",
    "Last",
    "Overhead",
    "Preempted",
    "SavePolicy",
    "When",
    "every",
]


class SavePolicy(Protocol):
    """Decides if the step at which training is now is to be saved."""

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        """Returns True if this step is to be saved. `saved` are the saved steps in order, those that training left
        before all others; last comes the one whose save is in flight, with `committed=False`.
        """


class _JoinableSavePolicy:
    """Operators of the policies here, and of a user's policy beside one of them."""

    __slots__ = ()

    @property
    def is_step_only(self) -> bool:
        """True if the answer depends on `now.step`, `now.stopping` and `bool(saved)` alone, which every rank knows."""
        return False

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        raise NotImplementedError

    def __or__(self, other: SavePolicy) -> AnyDue:
        return AnyDue((self, other)) if hasattr(other, "due") else NotImplemented

    def __ror__(self, other: SavePolicy) -> AnyDue:
        return AnyDue((other, self)) if hasattr(other, "due") else NotImplemented

    def __and__(self, other: SavePolicy) -> AllDue:
        return AllDue((self, other)) if hasattr(other, "due") else NotImplemented

    def __rand__(self, other: SavePolicy) -> AllDue:
        return AllDue((other, self)) if hasattr(other, "due") else NotImplemented

    def __repr__(self) -> str:
        return show_call(self)


@dataclass(frozen=True, slots=True, repr=False)
class AnyDue(_JoinableSavePolicy):
    """Policies joined by `|`: due if one of them is."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        check_parts(self.policies)

    @property
    def is_step_only(self) -> bool:
        return all(is_step_only(policy) for policy in self.policies)

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        return any(policy.due(now, saved) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(f"({policy!r})" if isinstance(policy, AllDue) else repr(policy) for policy in self.policies)


@dataclass(frozen=True, slots=True, repr=False)
class AllDue(_JoinableSavePolicy):
    """Policies joined by `&`: due if all of them are."""

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        check_parts(self.policies)

    @property
    def is_step_only(self) -> bool:
        """True if `is_step_only` is true of all joined policies, and none is a Deadline, which needs the time here."""
        has_deadline = any(isinstance(part, Deadline) for part in parts_of(self))
        return not has_deadline and all(is_step_only(policy) for policy in self.policies)

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        return all(policy.due(now, saved) for policy in self.policies)

    def __repr__(self) -> str:
        return " & ".join(f"({policy!r})" if isinstance(policy, AnyDue) else repr(policy) for policy in self.policies)


def is_step_only(policy: SavePolicy) -> bool:
    """Returns True if every rank finds the policy's answer without a message, as the attribute `is_step_only` says;
    False for a user's policy without it.
    """
    return bool(getattr(policy, "is_step_only", False))


def parts_of(policy: SavePolicy) -> Iterator[SavePolicy]:
    """Yields the policies that are joined in a policy, or the policy itself."""
    if isinstance(policy, AnyDue | AllDue):
        for part in policy.policies:
            yield from parts_of(part)
    else:
        yield policy


def deadlines_of(policy: SavePolicy) -> list[Deadline]:
    """Returns the deadlines that request a stop: the policy itself if it is one, or those that it joins by `|`. One
    that is joined by `&` requests no stop.
    """
    if isinstance(policy, AnyDue):
        return [deadline for part in policy.policies for deadline in deadlines_of(part)]
    return [policy] if isinstance(policy, Deadline) else []


def needed_to_stop_s(now: StepInfo, saved: Sequence[StepInfo]) -> float:
    """Returns the seconds that one more step and its save are expected to take: the total of the last save and the
    longest step so far, each 0 if it is not known.
    """
    return _last_seconds(saved, "total") + now.seconds.get("step", 0.0)


def _last_seconds(saved: Sequence[StepInfo], name: str) -> float:
    """Returns the seconds of this name of the newest step that has them; 0.0 if none has."""
    return next((info.seconds[name] for info in reversed(saved) if name in info.seconds), 0.0)


@dataclass(frozen=True, slots=True, repr=False)
class EverySteps(_JoinableSavePolicy):
    """Due at each step above 0 with `(step - offset) % n == 0`."""

    n: int
    offset: int = 0
    is_step_only = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_integer(self, "n", self.n, minimum=1))
        object.__setattr__(self, "offset", checked_integer(self, "offset", self.offset, minimum=0))

    def due(self, now: StepInfo, _: Sequence[StepInfo], /) -> bool:
        return now.step > 0 and (now.step - self.offset) % self.n == 0


@dataclass(frozen=True, slots=True, repr=False)
class EverySeconds(_JoinableSavePolicy):
    """Due when `s` seconds have passed since the newest checkpoint was committed, or since its save began if that
    is in flight. Without a checkpoint they count from the start of the manager.
    """

    s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "s", checked_seconds(self, "s", self.s, may_be_zero=False))

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        passed_s = now.time - saved[-1].time if saved else now.seconds.get("since_start", 0.0)
        return max(passed_s, 0.0) >= self.s


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AtSteps(_JoinableSavePolicy):
    """Due at the given steps: `AtSteps([10, 100])`, `AtSteps(10, 100)` or `AtSteps(range(0, 1000, 50))`."""

    steps: Collection[int]
    is_step_only = True

    def __init__(self, *steps: GivenSteps) -> None:
        object.__setattr__(self, "steps", collect_steps(self, steps))

    def due(self, now: StepInfo, _: Sequence[StepInfo], /) -> bool:
        return now.step in self.steps


@dataclass(frozen=True, slots=True, repr=False)
class First(_JoinableSavePolicy):
    """Due at the first `save` of a root that has no checkpoint."""

    is_step_only = True

    def due(self, _: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        return not saved


@dataclass(frozen=True, slots=True, repr=False)
class Last(_JoinableSavePolicy):
    """Due at the last of `num_steps` steps, which count from 0: at `num_steps - 1`."""

    num_steps: int
    is_step_only = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_steps", checked_integer(self, "num_steps", self.num_steps, minimum=1))

    def due(self, now: StepInfo, _: Sequence[StepInfo], /) -> bool:
        return now.step == self.num_steps - 1


@dataclass(frozen=True, slots=True, repr=False)
class Continuous(_JoinableSavePolicy):
    """Due as often as a save fits: when none is in flight, and the newest began at least `minimum_s` seconds ago."""

    minimum_s: float = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "minimum_s", checked_seconds(self, "minimum_s", self.minimum_s, may_be_zero=True))

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        if not saved:
            return True
        began = saved[-1].time - saved[-1].seconds.get("total", 0.0)
        return saved[-1].committed and max(now.time - began, 0.0) >= self.minimum_s


@dataclass(frozen=True, slots=True, repr=False)
class Overhead(_JoinableSavePolicy):
    """Due as often as it can be if training is to wait for saves at most this share of the time: 0.01 for a hundredth.
    The stall of the last save stands for that of the next one. The first save is due at once, and none while one is in
    flight.
    """

    fraction: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", checked_fraction(self, "fraction", self.fraction))

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        """Returns True if no save is in flight, and the stall of the last is at most this share of the time since."""
        return CostBudget(self.fraction).due(now, saved)


@dataclass(frozen=True, slots=True, repr=False)
class CostBudget(_JoinableSavePolicy):
    """Due as often as it can be if training is to wait for saves at most the share `budget` of the time; and with
    `mtbf_s`, the mean time between failures in seconds, no more often than by Young's formula, which makes the sum of
    waiting and lost work least. The first save is due at once, and none while one is in flight.
    """

    budget: float = 0.01
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", checked_fraction(self, "budget", self.budget))
        if self.mtbf_s is not None:
            object.__setattr__(self, "mtbf_s", checked_seconds(self, "mtbf_s", self.mtbf_s, may_be_zero=False))

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        """Returns True if no save is in flight, and the time since the last one is worth another save."""
        if not saved:
            return True
        stall = _last_seconds(saved, "stall")
        interval = max(stall / self.budget, math.sqrt(2 * stall * (self.mtbf_s or 0.0)))
        return saved[-1].committed and max(now.time - saved[-1].time, 0.0) >= interval


def every(*, budget: float = 0.01, mtbf_s: float | None = None) -> CostBudget:
    """Returns a save policy that chooses by cost how often to save: see CostBudget."""
    return CostBudget(budget, mtbf_s)


@dataclass(frozen=True, slots=True, repr=False)
class Preempted(_JoinableSavePolicy):
    """Due when all ranks have agreed to stop: after a signal, a deadline or `request_stop`. Every manager saves then
    anyway: this policy makes it visible.
    """

    is_step_only = True

    def due(self, now: StepInfo, _: Sequence[StepInfo], /) -> bool:
        return now.stopping


@dataclass(frozen=True, slots=True, repr=False)
class Deadline(_JoinableSavePolicy):
    """Stops training early enough before a given time: when the time that remains is no more than the total of the last
    save, the longest step so far and `margin_s` seconds.

    The manager watches the clock of rank 0's host and requests the stop, which all ranks receive at the same step. A
    Deadline that is joined by `&` requests no stop, and only says when a save is due.
    """

    at: float | datetime | str
    """Seconds since 1970, a datetime with a time zone, or the name of an environment variable that holds seconds since
    1970, such as `SLURM_JOB_END_TIME`. Without the variable there is no deadline."""
    margin_s: float = 60.0
    at_s: float = field(init=False, compare=False)
    """The time in seconds since 1970; infinity if there is no deadline."""
    is_step_only = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin_s", checked_seconds(self, "margin_s", self.margin_s, may_be_zero=True))
        object.__setattr__(self, "at_s", self._seconds_since_1970())

    def _seconds_since_1970(self) -> float:
        takes = "seconds since 1970, a datetime with a time zone, or the name of an environment variable"
        at: object = self.at
        if isinstance(at, str):
            return self._from_environment(at)
        if isinstance(at, datetime) and at.tzinfo is not None:
            return at.timestamp()
        if (seconds := plain_number(at)) is not None:
            return float(seconds)
        raise wrong_argument(self, "at", at, takes)

    def _from_environment(self, name: str) -> float:
        # The user names the variable, because a scheduler has no other way to tell a job when it ends.
        text = os.environ.get(name)
        if text is None:
            logger.warning("%r is no deadline here: the environment variable %s is not set", self, name)
            return math.inf
        with suppress(ValueError):
            if (seconds := plain_number(float(text))) is not None:
                return seconds
        takes = f"the name of an environment variable that holds seconds since 1970; {name} holds {text!r}"
        raise wrong_argument(self, "at", name, takes)

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        """Returns True if training stops, or has to by `now.host_time`."""
        return now.stopping or self.at_s - now.host_time <= needed_to_stop_s(now, saved) + self.margin_s


@dataclass(frozen=True, slots=True, repr=False)
class When(_JoinableSavePolicy):
    """Due when a function returns True. Rank 0 calls the function, at most once for each `save` and each `due`."""

    fn: Callable[[StepInfo, Sequence[StepInfo]], Any]
    """Called as `fn(now, saved)`."""

    def __post_init__(self) -> None:
        check_function(self, "fn", self.fn, takes="fn(now, saved)")

    def due(self, now: StepInfo, saved: Sequence[StepInfo], /) -> bool:
        return bool(self.fn(now, saved))
