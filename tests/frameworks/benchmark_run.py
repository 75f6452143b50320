"""Runs the benchmark of one framework at its least size, in the environment that the test runs in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
SPREAD = r" -?[\d.]+ \(-?[\d.]+ - -?[\d.]+\) \|"
ROW = re.compile(rf"^\| [^|]+ \|({SPREAD}){{3}} [\d.]+x \| [\d.]+ \| \d+ \([\d.]+\) \|$", re.MULTILINE)


def rows_of_benchmark(framework: str, folder: Path, *, ranks: int = 2, timeout_s: float = 300) -> list[str]:
    """Returns the rows that it prints, one for each candidate."""
    command = [sys.executable, str(RUN), "in_trainers", "--framework", framework, "--python", sys.executable]
    command += ["--mb", "4", "--rounds", "1", "--ranks", str(ranks), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [found.group() for found in ROW.finditer(done.stdout)]
