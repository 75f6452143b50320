"""Draws values over steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .elements import color, tag, text
from .layout_charts import WIDTH, label, rect, svg
from .scales import round_ticks
from .treemap import Box

_LEFT, _RIGHT, _TOP, _AXIS_HEIGHT, _HEIGHT = 78.0, 12.0, 8.0, 20.0, 190.0
_ROOM = Box(_LEFT, _TOP, WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _AXIS_HEIGHT)
_MAX_POINTS = 400
_MAX_CURVES = 20


class Curve(NamedTuple):
    """Values of one run."""

    name: str
    points: Sequence[tuple[int, float]]
    """Steps, in ascending order, and values."""


class _Scale(NamedTuple):
    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def line_chart(title: str, curves: Sequence[Curve], format_value: Callable[[float], str], *, base: int) -> str:
    """Returns a picture, each curve in a colour of its own; "" without a finite value. At most 20 curves are drawn, and
    of each at most 400 points. `base` is that of `round_ticks`, for the values.
    """
    thinned = ((number, curve._replace(points=_thinned(curve.points))) for number, curve in enumerate(curves))
    drawn = [(number, curve) for number, curve in thinned if curve.points][:_MAX_CURVES]
    points = [point for _, curve in drawn for point in curve.points]
    if not points:
        return ""
    steps = _scale([step for step, _ in points], from_zero=False)
    values = _scale([value for _, value in points], from_zero=True)
    parts = [*_value_axis(values, format_value, base), *_step_axis(steps)]
    for number, curve in drawn:
        places = [(_x(steps, step), _y(values, value)) for step, value in curve.points]
        parts += _line(places, color(number, lightness=46))
        for (step, value), (x, y) in zip(curve.points, places, strict=True):
            lines = [*filter(None, [curve.name]), f"step {step:,}", format_value(value)]
            hint = tag("title", {}, "\n".join(map(text, lines)))
            parts.append(tag("circle", {"cx": x, "cy": y, "r": 3.0, "fill": color(number, lightness=46)}, hint))
    return svg(WIDTH, _HEIGHT, f"{title} over the steps", *parts)


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the finite points, or at most `_MAX_POINTS` of them, the last one included."""
    finite = [point for point in points if math.isfinite(point[1])]
    stride = -(-len(finite) // _MAX_POINTS)
    return finite[::-1][:: stride or 1][::-1]


def _scale(values: Sequence[float], *, from_zero: bool) -> _Scale:
    """Returns the range of the values, widened if they are all equal. With `from_zero`, it begins at 0 if all are above
    0 and the least is below half of the largest.
    """
    low, high = min(values), max(values)
    if from_zero and 0 < low < high / 2:
        low = 0.0
    if high > low:
        return _Scale(low, high)
    margin = abs(high) / 2 or 0.5
    return _Scale(low - margin, high + margin)


def _x(steps: _Scale, step: float) -> float:
    return _ROOM.x + steps.share(step) * _ROOM.width


def _y(values: _Scale, value: float) -> float:
    return _ROOM.y + (1 - values.share(value)) * _ROOM.height


def _value_axis(values: _Scale, format_value: Callable[[float], str], base: int) -> list[str]:
    parts = []
    for value in round_ticks(values.low, values.high, max_ticks=5, base=base):
        y = _y(values, value)
        parts.append(rect(Box(_ROOM.x, y, _ROOM.width, 1.0), "currentColor", [format_value(value)], "tick"))
        parts.append(label(_LEFT - 8, y + 4, format_value(value) if value else "0", "small end"))
    return parts


def _step_axis(steps: _Scale) -> list[str]:
    ticks = [step for step in round_ticks(steps.low, steps.high, max_ticks=8) if step == int(step)]
    return [label(_x(steps, step), _HEIGHT - 5, f"{step:,.0f}", "small middle") for step in ticks]


def _line(places: Sequence[tuple[float, float]], stroke: str) -> list[str]:
    if len(places) == 1:
        return []
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return [tag("path", {"d": f"M{path}", "fill": "none", "stroke": stroke, "stroke-width": 1.5}, "")]
