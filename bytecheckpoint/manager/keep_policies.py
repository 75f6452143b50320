"""Policies that choose the checkpoints to keep, for `CheckpointManager` and `bcp keep`. A policy is a frozen value; `|`
joins policies, and a checkpoint stays if one of them keeps it.

    keep=Latest(3) | EverySteps(10_000) | Best(2, "val_loss", mode="min")

Beyond the policy, the newest checkpoint and pinned and leased ones always stay, and until the next restore the restored
one: `Latest(3)` may leave four. A policy of your own is any object with `keeps(saved)` or `keeps(saved, now)`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from bytecheckpoint.manager.policy_arguments import (
    GivenSteps,
    check_function,
    check_name,
    check_parts,
    checked_integer,
    checked_seconds,
    collect_steps,
    show_call,
    wrong_argument,
)
from bytecheckpoint.manager.step_info import StepInfo

__all__ = ["All", "Best", "EverySeconds", "EverySteps", "KeepPolicy", "Latest", "Steps", "When", "Within"]


class KeepPolicy(Protocol):
    """Decides which of the committed checkpoints of a root stay. A policy that needs no time may take `saved` alone."""

    def keeps(self, saved: Sequence[StepInfo], now: float, /) -> Sequence[bool]:
        """Returns True or False for each of the committed steps. They come in the order of the steps, but those of a
        branch that training left come before all others. `now` is the time by the clock of the storage, in seconds
        since 1970.
        """


class _JoinableKeepPolicy:
    """A keep policy that `|` joins with another one, which may be a user's own."""

    __slots__ = ()

    def keeps(self, saved: Sequence[StepInfo], now: float, /) -> Sequence[bool]:
        raise NotImplementedError

    def __or__(self, other: KeepPolicy) -> AnyKeeps:
        return AnyKeeps((self, other)) if hasattr(other, "keeps") else NotImplemented

    def __ror__(self, other: KeepPolicy) -> AnyKeeps:
        return AnyKeeps((other, self)) if hasattr(other, "keeps") else NotImplemented

    def __repr__(self) -> str:
        return show_call(self)


@dataclass(frozen=True, slots=True, repr=False)
class AnyKeeps(_JoinableKeepPolicy):
    """Policies joined by `|`: a step stays if one of them keeps it."""

    policies: tuple[KeepPolicy, ...]

    def __post_init__(self) -> None:
        check_parts(self.policies)

    def keeps(self, saved: Sequence[StepInfo], now: float, /) -> Sequence[bool]:
        kept = [kept_by(policy, saved, now) for policy in self.policies]
        return [any(of_step) for of_step in zip(*kept, strict=True)]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def parts_of(policy: KeepPolicy) -> Iterator[KeepPolicy]:
    """Yields the policies that are joined in a policy, or the policy itself."""
    if isinstance(policy, AnyKeeps):
        for part in policy.policies:
            yield from parts_of(part)
    else:
        yield policy


def best_of(policy: KeepPolicy, metric: str | None) -> Best:
    """Returns a `Best` with n=1 for a metric: the first of `policy` that has it; if none has, the lowest value is best.
    None takes the metric of the only `Best` in `policy`, and raises ValueError if there is none, or more than one.
    """
    parts = [part for part in parts_of(policy) if isinstance(part, Best)]
    named = [part for part in parts if metric in {None, part.metric}]
    if metric is None and len(named) != 1:
        raise ValueError(f"best() needs a metric: the manager keeps by {len(named)} Best policies, not by one")
    return replace(named[0], n=1) if named else Best(1, str(metric))


def kept_by(policy: KeepPolicy, saved: Sequence[StepInfo], now: float) -> list[bool]:
    """Returns what the policy answers for each step. Raises ValueError if it answers for more steps, or for fewer."""
    arguments = (saved, now) if _takes_now(policy) else (saved,)
    kept = [bool(each) for each in policy.keeps(*arguments)]
    if len(kept) != len(saved):
        raise ValueError(
            f"{policy!r}.keeps(saved, now) returned {len(kept)} values for {len(saved)} checkpoints; nothing was "
            "deleted: return one bool for each, in the same order"
        )
    return kept


def _takes_now(policy: KeepPolicy) -> bool:
    try:
        inspect.signature(policy.keeps).bind((), 0.0)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


@dataclass(frozen=True, slots=True, repr=False)
class All(_JoinableKeepPolicy):
    """Keeps all checkpoints."""

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        return [True] * len(saved)


@dataclass(frozen=True, slots=True, repr=False)
class Latest(_JoinableKeepPolicy):
    """Keeps the newest n checkpoints."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_integer(self, "n", self.n, minimum=1))

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        return [len(saved) - number <= self.n for number in range(len(saved))]


@dataclass(frozen=True, slots=True, repr=False)
class EverySteps(_JoinableKeepPolicy):
    """Keeps the checkpoints of every n-th step: those with `step % n == 0`."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_integer(self, "n", self.n, minimum=1))

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        return [info.step % self.n == 0 for info in saved]


@dataclass(frozen=True, slots=True, repr=False)
class EverySeconds(_JoinableKeepPolicy):
    """Keeps one checkpoint every `s` seconds: the oldest, and each that was committed at least `s` seconds after the
    one kept before it.
    """

    s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "s", checked_seconds(self, "s", self.s, may_be_zero=False))

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        """Returns True for the oldest, and for each that is at least `s` seconds younger than the last kept one. Steps
        of a branch that training left come first in `saved`, and may be younger than others.
        """
        kept, newest_s = [False] * len(saved), -math.inf
        for index in sorted(range(len(saved)), key=lambda index: saved[index].time):
            if saved[index].time - newest_s >= self.s:
                kept[index], newest_s = True, saved[index].time
        return kept


@dataclass(frozen=True, slots=True, repr=False)
class Within(_JoinableKeepPolicy):
    """Keeps the checkpoints that were committed in the last `s` seconds."""

    s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "s", checked_seconds(self, "s", self.s, may_be_zero=False))

    def keeps(self, saved: Sequence[StepInfo], now: float, /) -> Sequence[bool]:
        return [now - info.time <= self.s for info in saved]


@dataclass(frozen=True, slots=True, repr=False)
class Best(_JoinableKeepPolicy):
    """Keeps the n checkpoints with the lowest value of a metric, or with `mode="max"` the highest.

    NaN ranks behind every number. Of equal values the newer is better. A checkpoint without the metric is no candidate.
    """

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_integer(self, "n", self.n, minimum=1))
        check_name(self, "metric", self.metric, takes="the name of a metric")
        if self.mode not in ("min", "max"):
            raise wrong_argument(self, "mode", self.mode, "'min' or 'max'")

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        best = set(self.ranking(saved)[: self.n])
        return [number in best for number in range(len(saved))]

    def ranking(self, saved: Sequence[StepInfo]) -> list[int]:
        """Returns the positions of the candidates in `saved`, the best first."""
        sign = 1 if self.mode == "min" else -1
        ranked = []
        for number, info in enumerate(saved):
            value = info.metrics.get(self.metric)
            if value is not None:
                is_nan = math.isnan(value)
                ranked.append((is_nan, 0.0 if is_nan else sign * value, -number))
        return [-number for _, _, number in sorted(ranked)]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Steps(_JoinableKeepPolicy):
    """Keeps the checkpoints of the given steps: `Steps(10, 100)`, `Steps([10, 100])` or `Steps(range(0, 1000, 50))`."""

    steps: Collection[int]

    def __init__(self, *steps: GivenSteps) -> None:
        object.__setattr__(self, "steps", collect_steps(self, steps))

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        return [info.step in self.steps for info in saved]


@dataclass(frozen=True, slots=True, repr=False)
class When(_JoinableKeepPolicy):
    """Keeps each checkpoint for which a function returns True."""

    fn: Callable[[StepInfo], Any]
    """Called as `fn(info)`."""

    def __post_init__(self) -> None:
        check_function(self, "fn", self.fn, takes="fn(info)")

    def keeps(self, saved: Sequence[StepInfo], _: float, /) -> Sequence[bool]:
        return [bool(self.fn(info)) for info in saved]
