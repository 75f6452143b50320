"""Arguments of policies: checked when a policy is made, and shown as they were given. Knows no policy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields
from operator import index
from typing import Any, SupportsIndex, TypeAlias

from bytecheckpoint.runtime.integers import integer_of

GivenSteps: TypeAlias = int | Iterable[int]


def show_call(policy: Any) -> str:
    """Returns the call that makes this dataclass: `EverySteps(500, offset=3)`, `AtSteps([100, 250])`. Defaults are left
    out.
    """
    shown = []
    for field in (field for field in fields(policy) if field.init):
        value = getattr(policy, field.name)
        if field.default is MISSING:
            shown.append(_show(value))
        elif value != field.default:
            shown.append(f"{field.name}={_show(value)}")
    return f"{type(policy).__name__}({', '.join(shown)})"


def _show(value: object) -> str:
    value = sorted(value) if isinstance(value, frozenset) else value
    return getattr(value, "__qualname__", "") or repr(value)


def check_parts(parts: Iterable[object]) -> None:
    """Raises ValueError if one of the policies to be joined is a class, and no object of it."""
    for part in parts:
        if isinstance(part, type):
            raise ValueError(f"| and & join policies, and {part.__qualname__} is the class of one: call it")


def wrong_argument(policy: object, field: str, value: object, takes: str) -> ValueError:
    return ValueError(f"{type(policy).__name__}: {field} must be {takes}, not {value!r}")


def checked_integer(policy: object, field: str, value: object, *, minimum: int) -> int:
    """Returns the value as a plain int; numpy's integers are accepted. Raises ValueError for any other value, and for
    one below `minimum`.
    """
    number = integer_of(value)
    if number is None or number < minimum:
        raise wrong_argument(policy, field, value, f"an integer of at least {minimum}")
    return number


def plain_number(value: object) -> float | None:
    """Returns a number, also one of numpy, as a plain int or float; None for a bool, NaN and any other value."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        return None
    return index(value) if isinstance(value, SupportsIndex) else float(value)


def checked_seconds(policy: object, field: str, value: object, *, may_be_zero: bool) -> float:
    """Returns a finite number of seconds as a plain one; numpy's are accepted. Raises ValueError for all else."""
    seconds = plain_number(value)
    if seconds is None or not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not may_be_zero):
        takes = "at least 0" if may_be_zero else "above 0"
        raise wrong_argument(policy, field, value, f"a finite number of seconds {takes}")
    return seconds


def checked_fraction(policy: object, field: str, value: object) -> float:
    """Returns a number above 0 and below 1 as a plain one; numpy's are accepted. Raises ValueError for all else."""
    fraction = plain_number(value)
    if fraction is None or not 0 < fraction < 1:
        raise wrong_argument(policy, field, value, "a number above 0 and below 1")
    return fraction


def check_name(policy: object, field: str, value: object, *, takes: str) -> None:
    """Raises ValueError unless the value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong_argument(policy, field, value, takes)


def check_function(policy: object, field: str, value: object, *, takes: str) -> None:
    """Raises ValueError unless the value can be called."""
    if not callable(value):
        raise wrong_argument(policy, field, value, f"a function, called as {takes}")


def collect_steps(policy: object, given: Iterable[GivenSteps]) -> Collection[int]:
    """Returns the steps that were given as numbers, as lists of them, or both. A single range stays a range. Raises
    ValueError if there is no step, or if one is not an integer of at least 0.
    """
    given = tuple(given)
    if len(given) == 1 and isinstance(given[0], range) and _is_counting(given[0]):
        return given[0]
    steps: set[int] = set()
    for item in given:
        # An array or tensor without dimensions has __iter__, which raises TypeError.
        is_one = isinstance(item, str | bytes) or getattr(item, "ndim", None) == 0
        found = item if isinstance(item, Iterable) and not is_one else [item]
        steps.update(checked_integer(policy, "steps", number, minimum=0) for number in found)
    if not steps:
        raise wrong_argument(policy, "steps", given, "one step or more")
    return frozenset(steps)


def _is_counting(steps: range) -> bool:
    return len(steps) > 0 and min(steps[0], steps[-1]) >= 0
