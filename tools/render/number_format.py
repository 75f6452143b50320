"""Formats numbers, sizes and times for people."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bytecheckpoint.loading.select import LeftOut

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(num_bytes: float) -> str:
    """Returns `1.5 MiB`."""
    power = 0
    while num_bytes >= 1023.95 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.1f} {_UNITS[power]}" if power else f"{num_bytes:.0f} B"


def rate_text(num_bytes: float, seconds: float = 1.0) -> str:
    """Returns `1.5 MiB/s`, for bytes that took so many seconds."""
    return f"{size_text(num_bytes / max(seconds, 1e-9))}/s"


def count_text(number: int | None, noun: str = "") -> str:
    """Returns `1,234 tensors`, `1 tensor`; `-` for None."""
    if number is None:
        return "-"
    return f"{number:,}" + (f" {noun}" + "s" * (number != 1) if noun else "")


def left_out_text(item: LeftOut) -> str:
    """Returns `NAME: 2 tensors, 1.5 MiB (WHY)`."""
    size = f": {count_text(item.num_tensors, 'tensor')}, {size_text(item.num_bytes)}" if item.num_tensors else ""
    return f"{item.name}{size} ({item.why})"


def short_count(number: int) -> str:
    """Returns `7.20 B`: millions (M), billions (B) or trillions (T); for a number below a million all its digits."""
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:,}"


def utc_of(seconds: float) -> datetime | None:
    """Returns a time given in seconds since 1970, without fractions; None for one outside of the years 1 to 9999, which
    a file or a record may have.
    """
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(int(seconds), UTC)
    return None


def time_text(when: datetime | None) -> str:
    if when is None:
        return "-"
    # A list may have ten thousand: `strftime` takes four times as long.
    return f"{when.replace(tzinfo=None).isoformat(' ', 'seconds')} {when.tzname()}"


def age_text(when: datetime | None, now: datetime) -> str:
    """Returns `5 min ago`; `just now` below a minute and for a clock that runs ahead; `-` for None."""
    if when is None:
        return "-"
    num_seconds = int((now - when).total_seconds())
    for unit, seconds in (("day", 86400), ("h", 3600), ("min", 60)):
        count = num_seconds // seconds
        if count >= 1:
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "just now"


def shape_text(shape: Sequence[int]) -> str:
    """Returns `4096 x 1024`; `scalar` for a tensor without dimensions."""
    return " x ".join(map(str, shape)) if shape else "scalar"


def number_text(value: float | None) -> str:
    """Returns four significant digits; `-` for None."""
    return "-" if value is None else f"{value:.4g}"


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def ranges_text(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as a text such as `0-3,5,7-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
