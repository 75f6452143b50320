"""The script that `make demo` trains with, small and on one process: it stops at SIGTERM and goes on where it stopped.
The demo itself judges its runs on several processes. The script with packed documents is killed, and resumed on other
numbers of processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python
from rank_programs import reserved_port

import bytecheckpoint as bcp

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
PACKED_SCRIPT = SCRIPT.with_name("train_gpt_packed.py")
NUM_ROWS, NUM_EPOCHS = 12, 2
TINY = ["--width=32", "--depth=1", "--batch=2", "--length=16", "--save-every=1000000", "--digests"]


def start(out: Path, num_steps: int) -> subprocess.Popen[bytes]:
    command = [forked_python(), str(SCRIPT), f"--out={out}", f"--steps={num_steps}", *TINY]
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


def start_packed(out: Path, seen: Path, num_processes: int, port: int) -> list[subprocess.Popen[bytes]]:
    """Starts the ranks as torchrun does, but each so that it can be killed."""
    command = [forked_python(), str(PACKED_SCRIPT), f"--out={out}", f"--seen={seen}", "--save-every=3", "--width=32"]
    command += [f"--rows={NUM_ROWS}", f"--steps={NUM_ROWS * NUM_EPOCHS}", "--length=32"]
    of_all = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    of_all |= {"WORLD_SIZE": str(num_processes)}
    environments = [{**os.environ, **of_all, "RANK": str(rank)} for rank in range(num_processes)]
    return [subprocess.Popen(command, env=environment) for environment in environments]


def seen_by_step(seen: Path) -> dict[int, Counter[str]]:
    """Tokens of each document that all ranks of one run have read in each step."""
    found: dict[int, Counter[str]] = {}
    for journal in seen.parent.glob(f"{seen.name}-*.jsonl"):
        for line in journal.read_text().split("\n")[:-1]:
            noted = json.loads(line)
            found.setdefault(noted["step"], Counter()).update(noted["num_tokens"])
    return found


def run_packed(out: Path, seen: Path, num_processes: int, *, kill_at: int | None) -> dict[int, Counter[str]]:
    """Runs the script to its end, or kills all of its processes once a step was made."""
    with reserved_port() as port:
        processes = start_packed(out, seen, num_processes, port)
        try:
            while kill_at is not None and max(seen_by_step(seen), default=-1) < kill_at:
                assert all(process.poll() is None for process in processes)
                time.sleep(0.05)
            if kill_at is None:
                assert [process.wait() for process in processes] == [0] * num_processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return seen_by_step(seen)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_document_is_read_once_an_epoch_whatever_kills_the_training(tmp_path: Path) -> None:
    alone = run_packed(tmp_path / "alone", tmp_path / "seen-alone", 1, kill_at=None)
    runs: Sequence[tuple[int, int | None]] = [(4, 8), (2, 16), (3, None)]
    by_step: dict[int, Counter[str]] = {}
    for number, (num_processes, kill_at) in enumerate(runs):
        found = run_packed(tmp_path / "run", tmp_path / f"seen-{number}", num_processes, kill_at=kill_at)
        first = min(found)
        assert (first > 0) == (number > 0)  # it goes on from a checkpoint
        # Training goes back to that checkpoint: what came after it was lost with the weights.
        by_step = {step: read for step, read in by_step.items() if step < first} | found
    assert sorted(by_step) == list(range(NUM_ROWS * NUM_EPOCHS))
    assert by_step == alone  # each global batch has the same documents on any number of processes

    of_epochs = [sum((by_step[step + NUM_ROWS * epoch] for step in range(NUM_ROWS)), Counter()) for epoch in range(2)]
    assert of_epochs[0] == of_epochs[1]  # all tokens of each document, once
    assert sorted(map(int, of_epochs[0])) == list(range(len(of_epochs[0])))
    assert sum(of_epochs[0].values()) == 12 * NUM_ROWS * 33
