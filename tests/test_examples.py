"""The script that `make demo` trains with, small and on one process: it stops at SIGTERM and goes on where it stopped.
The demo itself judges its runs on several processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bytecheckpoint as bcp

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
TINY = ["--width=32", "--depth=1", "--batch=2", "--length=16", "--save-every=1000000", "--digests"]


def start(out: Path, num_steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), f"--out={out}", f"--steps={num_steps}", *TINY]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def logged(out: Path, event: str) -> list[dict[str, Any]]:
    log = out / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [found for found in map(json.loads, lines) if found["event"] == event]


def test_the_training_script_stops_at_sigterm_with_0_and_goes_on_from_what_that_saved(tmp_path: Path) -> None:
    process = start(tmp_path, 1_000_000)
    try:
        while len(logged(tmp_path, "step")) < 3 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
    stopped_after = logged(tmp_path, "stopping")[0]["step"]
    assert bcp.steps(tmp_path / "checkpoints") == [stopped_after]

    num_steps = stopped_after + 4
    assert start(tmp_path, num_steps).wait() == 0
    assert [event["step"] for event in logged(tmp_path, "step")] == list(range(num_steps))
    (saved, _), (loaded,) = logged(tmp_path, "saving"), logged(tmp_path, "loaded")
    assert (loaded["step"], loaded["digests"]) == (stopped_after, saved["digests"])
    assert bcp.steps(tmp_path / "checkpoints") == [stopped_after, num_steps - 1]
