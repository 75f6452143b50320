"""Round numbers for the axes of charts."""

from __future__ import annotations

import math


def round_ticks(low: float, high: float, *, max_ticks: int, base: int = 10) -> list[float]:
    """Returns at most `max_ticks` multiples of 1, 2 or 5 times a power of ten in an interval; with base 1024, of so
    many KiB, MiB and so on. Returns only `low` for an interval that is empty, not finite, or below 1e-300.
    """
    span = high - low
    if not 1e-300 <= span < math.inf:  # a shorter step would be 0
        return [low]
    unit = 1.0
    while base != 10 and max(abs(low), abs(high)) >= base * unit:
        unit *= base
    power = 10.0 ** math.floor(math.log10(span / unit / max_ticks))
    step = next(
        unit * power * factor for factor in (1, 2, 5, 10, 20) if span / (unit * power * factor) <= max_ticks - 1
    )
    first = math.ceil(low / step - 1e-9)
    return [
        round(number * step, 12) if step > 1e-6 else number * step
        for number in range(first, math.floor(high / step + 1e-9) + 1)
    ]
