"""How fast bytes go, as the errors of those say it who gave up on them. It measures nothing itself."""

from __future__ import annotations

from typing import NamedTuple

_WHOLE_FROM = 100
"""Of so many MB/s on, three digits are whole numbers."""
_SHOWN_BYTES = 50_000
"""Fewer would be told as 0.0 MB."""


class Moved(NamedTuple):
    """How far a transfer had come when it was given up."""

    done_bytes: int
    num_bytes: int
    """All that were to be moved."""
    seconds: float


def describe_pace(moved: Moved) -> str:
    """`64.0 of 1,500.0 MB were there after 310.0 s, 0.206 MB/s, at which the rest takes 6,956.2 s`. Empty where nothing
    was left to be moved, and where all of it is too small to tell.
    """
    done, of_all = f"{moved.done_bytes / 1e6:,.1f}", f"{moved.num_bytes / 1e6:,.1f} MB"
    if moved.done_bytes >= moved.num_bytes or moved.num_bytes < _SHOWN_BYTES:
        return ""
    if not moved.done_bytes or not moved.seconds:
        return f"none of {of_all} was there after {moved.seconds:,.1f} s"
    left_s = (moved.num_bytes - moved.done_bytes) * moved.seconds / moved.done_bytes
    rate = f"{describe_rate(moved.done_bytes, moved.seconds)}, at which the rest takes {left_s:,.1f} s"
    return f"{done} of {of_all} were there after {moved.seconds:,.1f} s, {rate}"


def describe_rate(num_bytes: int, seconds: float) -> str:
    """As `0.206 MB/s`."""
    rate = num_bytes / 1e6 / seconds
    return f"{rate:,.0f} MB/s" if rate >= _WHOLE_FROM else f"{rate:.3g} MB/s"
