"""Runs the benchmark of one framework at its least size, in the environment that the test runs in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
SPREAD = r" -?[\d.]+ \(-?[\d.]+ - -?[\d.]+\) \|"
ROW = re.compile(rf"^\| ([^|]+) \|({SPREAD}){{3}} [\d.]+x \| [\d.]+ \| \d+ \([\d.]+\) \|$", re.MULTILINE)
RESUMED = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
LIBRARY = "bytecheckpoint"


class Printed(NamedTuple):
    """The tables of a benchmark, by candidate."""

    saves: set[str]
    """Those that have a row of times."""
    resumes: dict[str, tuple[str, str]]
    """What came of resuming on 1 and on 3 ranks."""

    def of_library(self) -> list[tuple[str, str]]:
        """Resumes through this library's integration."""
        return [outcome for name, outcome in self.resumes.items() if name.startswith(LIBRARY)]

    def of_framework(self) -> list[tuple[str, str]]:
        """Resumes in the framework's own way."""
        return [outcome for name, outcome in self.resumes.items() if not name.startswith(LIBRARY)]


def run_benchmark(framework: str, folder: Path, *, timeout_s: float = 500) -> Printed:
    """Runs it with 2 ranks, and returns what it prints."""
    command = [sys.executable, str(RUN), "in_trainers", "--framework", framework, "--python", sys.executable]
    command += ["--mb", "4", "--rounds", "1", "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    resumes = {name: (one, three) for name, one, three in RESUMED.findall(done.stdout.split("| resumed on |")[1])}
    del resumes["---"]
    return Printed({found.group(1) for found in ROW.finditer(done.stdout)}, resumes)
