"""Every benchmark runs, as small as it goes: a script that nobody runs for weeks does not notice that what it measures
has changed. What a figure is, no test says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
QUICK_S, LONG_S = 170, 840

QUICK = {
    "manifest.py --tensors 2 --chunks 2": [r"\n +2 x 2 +[\d.]+ "],
    "ranks.py --ranks 2 --tensors 8 --rounds 1 --share-out 16": [
        r"\n\| bytecheckpoint \| 2 \| load, exchanged \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| bytecheckpoint \| 2 \| load on half \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| torch DCP \| 2 \| load \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| in every file \| 16 \| [\d.]+ \|",
    ],
    "codec.py --mib 1 --rounds 1": [r"\| bfloat16 \| zstd \| \d", r"\| float32 \| zstd \| \d"],
    # Two blocks of ranks, so that one of them has a leader who passes messages on.
    "planning.py --ranks 66 --tensors 7 --dcp-up-to 66": [r"\n\| 66 \| 462 \| [\d.]+ \| \d.*\| 1/\d+ \| 1/\d+ \|\n"],
    "save.py --size 0.001 --rounds 1 --workloads W1 --contestants bcp-copy limit --memory": [
        r"\n\| bytecheckpoint, async, copy \| [\d.]+ \(",
        r"\n\| limit: O_DIRECT \+ fsync \| [\d.]+ \(",
    ],
    "load.py --size 0.001 --rounds 1 --workloads W1 --contestants bcp limit-2": [
        r"\n\| bytecheckpoint \| [\d.]+ \(",
        r"\n\| limit: preadv into place, 2 threads \| [\d.]+ \(",
    ],
}
LONG = {
    "plan_cache.py --tensors 4 --saves 1 --ranks 1 2": [
        rf"\n\| {re.escape(state)} \| 4 \| {ranks} \| \d" for state in ("dict", "model and AdamW") for ranks in (1, 2)
    ],
    "save.py --size 0.001 --rounds 1 --workloads W2 --contestants bcp-lazy dcp --memory W2": [
        r"\n\| bytecheckpoint, async, lazy \| [\d.]+ \(",
        r"\n\| torch DCP \| [\d.]+ \(",
    ],
    "load.py --size 0.001 --rounds 1 --workloads 4to2 slow-ddp --contestants bcp dcp": [
        r"4 ranks.*\n(.*\n)*?\| bytecheckpoint \| [\d.]+ \((.*\n)*\| bytecheckpoint \| [\d.]+ \(",
    ],
    "cold.py --size 0.001 --rounds 1": [r"\n\| bytecheckpoint, 2 threads \| \d", r"\n\| preadv of a copy of it, 8 th"],
    "foreign.py --gib 0.001": [
        rf"\n +{re.escape(name)} +\d+ +[\d.]+"
        for name in ("safetensors", "torch.save", "torch.distributed.checkpoint", "megatron", "torch.save of ranks")
    ],
    "convert.py --gb 0.001 --rounds 1": [
        r"\n +sharded safetensors to hf +\d",
        r"\n +DCP to torch.save +\d",
        r"\na load takes [\d.]+ s through it, [\d.]+ s natively",
    ],
    "object_store.py --size 0.001 --rounds 1 --libraries s3fs --settings 8x8": [
        r"\n\| bytecheckpoint \| [\d.]+ \(",
        r"\n\| torch DCP \| [\d.]+ \(",
        r"\nbytecheckpoint beside the best of s3fs: up [\d.]+x",
    ],
}


@pytest.mark.parametrize("call", QUICK)
def test_a_benchmark_runs_at_its_least_size(tmp_path: Path, call: str) -> None:
    check_that_it_runs(call, tmp_path, QUICK[call], within_s=QUICK_S)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call", LONG)
def test_a_benchmark_that_starts_many_processes_runs_at_its_least_size(tmp_path: Path, call: str) -> None:
    if call.startswith("object_store.py"):
        pytest.importorskip("s3fs")
    check_that_it_runs(call, tmp_path, LONG[call], within_s=LONG_S)


def test_no_benchmark_is_left_out() -> None:
    """But the scripts that others start."""
    with_main = {path.name for path in BENCHMARKS.glob("*.py") if "argparse.ArgumentParser(" in path.read_text()}
    started_by_others = {name for name in with_main if name.endswith("_worker.py")} | {"object_server.py"}
    assert {call.split()[0] for call in (*QUICK, *LONG)} == with_main - started_by_others


def check_that_it_runs(call: str, folder: Path, patterns: list[str], *, within_s: float) -> None:
    script, *arguments = call.split()
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=within_s,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    said = f"{call}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    assert "failed" not in done.stdout, said  # a contestant that fails is a row that says so
    missing = [pattern for pattern in patterns if not re.search(pattern, done.stdout)]
    assert not missing, f"{missing}\n{said}"
