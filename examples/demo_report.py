"""Shows the results of the demo's runs: losses side by side, a plot, claims with their verdicts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from demo_runs import Run
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

LINES = [("lightgray", "-", 9.0), ("orange", "-", 5.0), ("green", "-", 2.5), ("blue", "--", 1.8), ("black", ":", 1.5)]
"""Colour, style and width of each run's line: those drawn later are thinner, so that all show where they agree."""
SPARSE_EVERY = 5
"""Distance of the rows before the step from which the runs resume."""


class Claim(NamedTuple):
    text: str
    is_true: bool
    evidence: str


def print_losses(console: Console, runs: Sequence[Run], *, resumed_after: int) -> None:
    """Prints a row a step, a column a run. A sign marks losses that are bit-identical to the first run's."""
    reference = runs[0].losses
    table = Table(title="Loss by step, in nats per byte; = is bit-identical to the reference")
    table.add_column("step", justify="right")
    for run in runs:
        table.add_column(f"{run.name}\n{run.title}", justify="right")
    for step, expected in reference.items():
        if step > resumed_after or step % SPARSE_EVERY == 0:
            table.add_row(str(step), *(_cell(run.losses.get(step), expected) for run in runs))
        if step == resumed_after:
            table.add_section()
    console.print(table)


def _cell(loss: float | None, expected: float) -> str:
    if loss is None:
        return ""
    return f"[green]{loss:.7f} =[/green]" if loss == expected else f"{loss:.7f}  "


def plot_losses(runs: Sequence[Run], *, resumed_after: int, tolerance: float, path: Path) -> None:
    """Draws a PNG: the losses of the reference, of the interrupted run and of those that resumed it over the steps, and
    the distance of the resumed ones from the reference.
    """
    mpl.use("Agg")
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, distances = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    reference, interrupted = runs[0].losses, runs[1].losses
    for run, (color, style, width) in zip(runs, LINES, strict=False):
        steps = list(run.losses)
        label = f"{run.name}: {run.title}"
        losses.plot(steps, [run.losses[step] for step in steps], style, color=color, linewidth=width, label=label)
        if run not in runs[:2]:
            distance = [abs(run.losses[step] - reference[step]) for step in steps]
            distances.plot(steps, distance, style, color=color, linewidth=width)
    last = max(interrupted)
    losses.plot([last], [interrupted[last]], "X", color="red", markersize=12, label=f"{runs[1].name} here")
    losses.axvline(resumed_after, color="gray", linewidth=0.8, label="newest save")
    losses.set_ylabel("loss, nats per byte")
    losses.set_title(f"One training run, {runs[1].name}, and resumed")
    losses.legend()
    distances.axhline(tolerance, color="gray", linestyle=":", label=f"tolerance {tolerance}")
    distances.set_yscale("symlog", linthresh=1e-8)
    distances.set_ylim(bottom=-1e-9)
    distances.set_ylabel("distance from\nthe reference")
    distances.set_xlabel("step")
    distances.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def show_checkpoint(console: Console, checkpoint: str) -> bool:
    """Runs `bcp show`; returns True if it succeeded."""
    command = [sys.executable, "-m", "bytecheckpoint.tools", "show", checkpoint]
    console.print(f"$ bcp show {checkpoint}", style="bold", soft_wrap=True)
    return subprocess.run(command, check=False).returncode == 0


def print_claims(console: Console, claims: Sequence[Claim]) -> None:
    for claim in claims:
        verdict = "[bold green]PASS[/bold green]" if claim.is_true else "[bold red]FAIL[/bold red]"
        console.print(f"{verdict}  {claim.text}: {claim.evidence}", soft_wrap=True)
