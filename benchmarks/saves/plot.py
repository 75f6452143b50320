"""Draws the results of the save benchmark: the stall of each candidate and the time until durable, on a logarithmic
scale, a panel for each workload. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saves.registry import CANDIDATES
from shared.results import Results
from shared.workloads import WORKLOADS

OURS, THEIRS, LIMIT = "#0b6e4f", "#8a8f98", "#c0392b"


def plot(results: Results, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  only a plot needs matplotlib
    from matplotlib.figure import Figure  # noqa: PLC0415  as above

    shown = {name: [each for each, row in rows.items() if row.rounds] for name, rows in results.rows.items()}
    heights = [len(names) + 2 for names in shown.values()]
    figure = Figure(figsize=(9, 0.3 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (workload, names) in zip(panels, shown.items(), strict=True):
        draw(panel, results, workload, names)
    panels[-1].set_xlabel("seconds, median: hollow until training goes on, filled until the checkpoint is durable")
    figure.savefig(path, dpi=150)


def draw(panel: Any, results: Results, workload: str, names: list[str]) -> None:
    for place, name in enumerate(names):
        stall, durable = (results.median(workload, name, measure) for measure in ("stall", "durable"))
        color = colour(name)
        panel.plot([stall, durable], [place, place], color=color, linewidth=2, alpha=0.5, zorder=1)
        panel.scatter([stall], [place], facecolors="white", edgecolors=color, s=36, zorder=2)
        panel.scatter([durable], [place], color=color, s=36, zorder=3)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_yticks(range(len(names)), [CANDIDATES[name].title for name in names], fontsize=8)
    for label, name in zip(panel.get_yticklabels(), names, strict=True):
        label.set_color(colour(name))
    panel.invert_yaxis()
    panel.grid(axis="x", which="major", color="#dddddd", zorder=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    title = f"{workload}: {WORKLOADS[workload].title}, {results.state_bytes[workload] / 1e9:.2f} GB"
    panel.set_title(title, loc="left", fontsize=9, fontweight="bold")


def colour(name: str) -> str:
    if CANDIDATES[name].is_limit:
        return LIMIT
    return OURS if name.startswith("bcp") else THEIRS
