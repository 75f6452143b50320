"""Shows what the runs of the demo came to: losses side by side, a plot, claims with their verdicts."""

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

SPARSE_EVERY = 5
"""Before the step from which the runs resume, only every so many steps are shown."""


class Claim(NamedTuple):
    text: str
    is_true: bool
    evidence: str


def print_losses(console: Console, runs: Sequence[Run], *, resumed_at: int) -> None:
    """A row a step, a column a run. A sign says which losses are bit for bit those of the first run."""
    reference = runs[0].losses
    table = Table(title="Loss by step, in nats per byte; = is bit-identical to the reference")
    table.add_column("step", justify="right")
    for run in runs:
        table.add_column(f"{run.name}\n{run.title}", justify="right")
    for step, expected in reference.items():
        if step > resumed_at or step % SPARSE_EVERY == 0:
            table.add_row(str(step), *(_cell(run.losses.get(step), expected) for run in runs))
        if step == resumed_at:
            table.add_section()
    console.print(table)


def _cell(loss: float | None, expected: float) -> str:
    if loss is None:
        return ""
    return f"[green]{loss:.7f} =[/green]" if loss == expected else f"{loss:.7f}  "


def plot_losses(runs: Sequence[Run], *, resumed_at: int, path: Path) -> None:
    """A PNG of the losses of all runs over the steps."""
    mpl.use("Agg")
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    widths = [6.0, 3.5, 2.5, 1.8, 1.2]
    for run, width, style in zip(runs, widths, ["-", "-", "--", "-.", ":"], strict=True):
        losses = run.losses
        axes.plot(list(losses), list(losses.values()), style, linewidth=width, label=f"{run.name}: {run.title}")
    killed_at = max(runs[1].losses)
    axes.axvline(resumed_at, color="gray", linewidth=0.8)
    axes.annotate("resumed from here ", (resumed_at, axes.get_ylim()[1]), ha="right", va="top")
    axes.plot([killed_at], [runs[1].losses[killed_at]], "x", color="red", markersize=12, label="killed")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("One training run, killed, and resumed on three layouts")
    axes.legend()
    figure.savefig(path, dpi=120)


def show_checkpoint(console: Console, checkpoint: str) -> bool:
    """What `bcp show` prints; whether it could."""
    command = [sys.executable, "-m", "bytecheckpoint.tools", "show", checkpoint]
    console.print(f"$ bcp show {checkpoint}", style="bold", soft_wrap=True)
    return subprocess.run(command, check=False).returncode == 0


def print_claims(console: Console, claims: Sequence[Claim]) -> None:
    for claim in claims:
        verdict = "[bold green]PASS[/bold green]" if claim.is_true else "[bold red]FAIL[/bold red]"
        console.print(f"{verdict}  {claim.text}: {claim.evidence}", soft_wrap=True)
