"""The example of the drop-in for torch.distributed.checkpoint runs, and goes on with another number of processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import bytecheckpoint as bcp

EXAMPLE = Path(__file__).parents[2] / "examples" / "dcp_drop_in.py"
MAX_LINES = 80


def run(out: Path, *, steps: int, world_size: int) -> str:
    """What rank 0 prints. Starts the processes as torchrun does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    command = [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", str(steps)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world_size, outputs
    return outputs[0][0]


def test_the_example_trains_and_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    printed = run(tmp_path, steps=20, world_size=2)
    assert re.findall(r"^step (\d+): loss \d", printed, re.MULTILINE) == ["10", "20"]
    printed = run(tmp_path, steps=30, world_size=3)
    assert re.findall(r"^step (\d+): loss \d", printed, re.MULTILINE) == ["30"]
    assert bcp.steps(tmp_path) == [10, 20, 30]
    assert bcp.open(tmp_path).info.world_size == 3
    assert bcp.open(tmp_path, step=20).info.world_size == 2


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
