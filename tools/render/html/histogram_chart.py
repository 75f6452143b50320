"""Draws a histogram of the values of a tensor."""

from __future__ import annotations

from ...analysis.tensor_stats import Histogram
from ..number_format import count_text, number_text
from .layout_charts import WIDTH, label, rect, svg
from .scales import round_ticks
from .treemap import Box

_HEIGHT, _AXIS_HEIGHT, _TOP = 150.0, 20.0, 14.0
_MAX_TICKS = 8


def histogram_text(histogram: Histogram) -> str:
    """Returns the numbers beside the picture."""
    stats = histogram.stats
    numbers = [f"{name} {number_text(getattr(stats, name))}" for name in ("min", "max", "mean", "std")]
    special_counts = [
        f"{count:,} {name}" for name, count in (("NaN", stats.num_nan), ("infinite", stats.num_inf)) if count
    ]
    return ", ".join([*numbers, *special_counts, f"{stats.num_zeros:,} zeros"])


def histogram_picture(histogram: Histogram) -> str:
    """Draws a bar for each bin, as high as its share of the fullest bin."""
    counts = histogram.counts.tolist()
    low, high = histogram.low, histogram.high
    width, bin_width = WIDTH / len(counts), (high - low) / len(counts)
    room = _HEIGHT - _AXIS_HEIGHT - _TOP
    parts = []
    for number, count in enumerate(counts):
        tall = max(room * count / max(counts), 1.0) if count else 0.0
        box = Box(number * width, _TOP + room - tall, width - 1, tall)
        start = low + number * bin_width
        span = f"{number_text(start)} to {number_text(start + bin_width)}"
        parts.append(rect(box, "hsl(212 55% 58%)", [span, count_text(count, "value")]))
    parts.append(label(0.0, 10.0, f"{max(counts):,}", "small"))
    for value in round_ticks(low, high, max_ticks=_MAX_TICKS):
        x = (value - low) / (high - low) * WIDTH
        kind = "small" if x < 30 else "small end" if x > WIDTH - 30 else "small middle"
        parts.append(label(x, _HEIGHT - 5, number_text(value), kind))
    return svg(WIDTH, _HEIGHT, "how the values spread", *parts)
