"""Every benchmark runs at its least size, so that it follows the library. No test compares figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import forked_python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUN = BENCHMARKS / "run.py"
QUICK_S, LONG_S = 590, 840

QUICK = {
    "manifest --tensors 2 --chunks 2": [r"\n +2 x 2 +[\d.]+ "],
    "ranks --ranks 2 --tensors 8 --rounds 1 --late 0.5 --assign 16 --files 20": [
        r"\n\| bytecheckpoint \| 2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| (not )?reached \|",
        r"\n\| torch DCP \| 2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| (not )?reached \|",
        r"\n\| checked before a commit \| 20 \| [\d.]+ \| [\d.]+ \| 1 \| (yes|no) \|",
        r"\n\| bytecheckpoint \| 2 \| load, exchanged \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| bytecheckpoint \| 2 \| load on half \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| torch DCP \| 2 \| load \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| HSDP, 8 shards \| 16 \| [\d.]+ \|",
        r"\n\| small replicas in every file \| 16 \| [\d.]+ \|",
    ],
    "manager --steps 20 --deleted 5 --saves 3 --calls 100 --ranks 2 --s3-steps 20": [
        r"\| `save` of a step that is not due, us \| 100 calls \| [\d.]+ \|",
        r"\| the same on 2 ranks, the slowest, us \(of processor time\) \| 100 calls each \| [\d.]+ \([\d.]+\) \|",
        *(
            pattern
            for where in ("a folder", "S3")
            for pattern in (
                rf"\| `latest` of {where}, s \(of processor time\) \| 20 steps \| [\d.]+ \([\d.]+\) \|",
                rf"\| `steps` of {where}, s \(of processor time\) \| 20 steps \| [\d.]+ \([\d.]+\) \|",
                rf"\| save to {where} beside the deletion of steps, ms \| 5 steps, \d.* \| [\d.]+ \([\d.]+ of alone\)",
            )
        ),
    ],
    "reuse --mib 4 --rounds 1": [
        r"\n\| frozen base, LoRA \| bcp, reuse \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|",
        r"\n\| full AdamW \| DCP \| ",
    ],
    "data_state --streams 10 --gib 0.01 --rounds 1": [
        r"\n\| 10 \|( [\d.]+ \|){7}\n",
        r"\n\| 0.01 \| ratio \| [\d.]+ \| [\d.]+ \|",
    ],
    "data_prefetch --gather-s 0.01 --saves 1": [
        rf"\n\| {loader} \| [\d.]+ \| [\d.]+ \([\d.]+, [\d.]+\) \|"
        for loader in ("none", "workers, not prepared", "workers, prepared", "a thread, prepared")
    ],
    "gpu": [r"there is no GPU here|\n\| bytecheckpoint, lazy \| [\d.]+"],
    "gpu --device cpu --gib 0.001 --rounds 1": [
        r"\n\| bytecheckpoint, copy \| [\d.]+.*\|.*\|",
        r"\n\| torch DCP, async, pinned \| [\d.]+",
        r"\n\| limit: pinned copy to the host \| [\d.]+",
        r"\n\| limit: reading the files \| [\d.]+",
    ],
    "startup --tensors 10 --rounds 1": [
        r"\n\| bcp --help \| [\d.]+ \([\d.]+ - [\d.]+\) \| 0.15 \|",
        r"\n\| bcp show of 10 tensors \| [\d.]+ \(",
        r"\n\| the first bcp.save, beyond torch \| [\d.]+ \(.*\) \| 0.3 \|",
        r"\n\| the first dcp.save, beyond torch \| [\d.]+ \(",
    ],
    "memory --mib 1 --rounds 1": [r"\| save to memory \| \d", r"\| resume from memory, verified \| \d"],
    "exchange --ranks 2 --mib 1 --rounds 1 --layouts DDP --hosts 2": [
        r"\n\| DDP \| 2 \| 2 \| this \| [\d.]+ \(.*\| 1.0\d\d \| 0.000 \| \d \| ",
    ],
    "memory_hosts --mib 1 --rounds 1": [
        r"\| HSDP, a replica on each host \| 1.0 \| 0.0 \| 0.000 \|",
        r"\| DDP \| 1.0 \| 0.0 \| 0.000 \|",
        r"\| FSDP over all ranks \| 1.0 \| 1.1 \| 1.\d",
    ],
    "memory_recovery --mib 1 --rounds 1": [
        r"\| copies=2 \|( [\d.]+ \|){3} 0\.[1-9] \|( [\d.]+ \|){2}",
        r"\| copies=1, parity=1 \|( [\d.]+ \|){3} \d.\d \|( [\d.]+ \|){2}",
    ],
    "codec --mib 1 --rounds 1": [r"\| bfloat16 \| zstd \| \d", r"\| float32 \| zstd \| \d"],
    # Two blocks of ranks, so that the leader of one forwards messages.
    "planning --ranks 66 --tensors 7 --dcp-up-to 66": [r"\n\| 66 \| 462 \| [\d.]+ \| \d.*\| 1/\d+ \| 1/\d+ \|\n"],
    "save --size 0.001 --rounds 1 --workloads W1 --candidates bcp-copy limit --memory": [
        r"\n\| bytecheckpoint, async, copy \| [\d.]+ \(",
        r"\n\| limit: O_DIRECT \+ fsync \| [\d.]+ \(",
    ],
    "load --size 0.001 --rounds 1 --workloads W1 --candidates bcp limit-2": [
        r"\n\| bytecheckpoint \| [\d.]+ \(",
        r"\n\| limit: preadv into place, 2 threads \| [\d.]+ \(",
    ],
}
LONG = {
    "save --size 0.001 --rounds 1 --workloads W1 --candidates bcp --memory --against {checkout}": [
        r"\n\| W1 \| bcp \| durable \| [\d.]+ \| [\d.]+ \| [\d.]+x \| [\d.]+x - ",
    ],
    "load --size 0.001 --rounds 1 --workloads W1 --candidates bcp --against {checkout}": [
        r"\n\| W1 \| bcp \| warm \| [\d.]+ \| [\d.]+ \| [\d.]+x \| [\d.]+x - ",
    ],
    "plan_cache --tensors 4 --saves 2 --ranks 1 --against {checkout}": [r"\n\| dict \| 4 \| 1 \| .* \| [\d.]+x \|"],
    "plan_cache --tensors 4 --saves 1 --ranks 1 2": [
        rf"\n\| {re.escape(state)} \| 4 \| {ranks} \| \d" for state in ("dict", "model and AdamW") for ranks in (1, 2)
    ],
    "save --size 0.001 --rounds 1 --workloads W2 --candidates bcp-lazy dcp --memory W2": [
        r"\n\| bytecheckpoint, async, lazy \| [\d.]+ \(",
        r"\n\| torch DCP \| [\d.]+ \(",
    ],
    "load --size 0.001 --rounds 1 --workloads 4to2 slow-ddp --candidates bcp dcp": [
        r"4 ranks.*\n(.*\n)*?\| bytecheckpoint \| [\d.]+ \((.*\n)*\| bytecheckpoint \| [\d.]+ \(",
    ],
    "dcp_drop_in --mb 4 --rounds 1 --candidates dcp-async bcp-async bcp-stager": [
        r"\n\| torch DCP, async_save \| [\d.]+ \(.*\| 1.00x \| 12.\d \|",
        r"\n\| drop-in, async_save, a stager \| [\d.]+ \(.*\| [\d.]+x \| 1[23].\d \|",
    ],
    "cold --size 0.001 --rounds 1": [r"\n\| bytecheckpoint, 2 threads \| \d", r"\n\| preadv of a copy of it, 8 th"],
    "foreign --gib 0.001": [
        rf"\n +{re.escape(name)} +\d+ +[\d.]+"
        for name in ("safetensors", "torch.save", "torch.distributed.checkpoint", "megatron", "torch.save of ranks")
    ],
    "convert --gb 0.001 --rounds 1": [
        r"\n +sharded safetensors to hf +\d",
        r"\n +DCP to torch.save +\d",
        r"\na load takes [\d.]+ s through it, [\d.]+ s natively",
    ],
    "object_store --size 0.001 --rounds 1 --libraries s3fs --settings 8x8": [
        r"\n\| bytecheckpoint \| [\d.]+ \(",
        r"\n\| torch DCP \| [\d.]+ \(",
        r"\nbytecheckpoint beside the best of s3fs: up [\d.]+x",
    ],
}


@pytest.mark.timeout(600)  # they start processes that import torch, which takes minutes on a busy machine
@pytest.mark.parametrize("call", QUICK)
def test_a_benchmark_runs_at_its_least_size(tmp_path: Path, call: str) -> None:
    check_that_it_runs(call, tmp_path, QUICK[call], within_s=QUICK_S, python=forked_python())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call", LONG)
def test_a_benchmark_that_starts_many_processes_runs_at_its_least_size(tmp_path: Path, call: str) -> None:
    if call.startswith("object_store"):
        pytest.importorskip("s3fs")
    check_that_it_runs(call, tmp_path, LONG[call], within_s=LONG_S, python=sys.executable)


IN_FRAMEWORKS = "in_trainers"
"""Needs frameworks; tests/frameworks runs it for each."""


def test_no_benchmark_is_left_out() -> None:
    listed = subprocess.run([sys.executable, RUN, "--help"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^  (\w+) ", listed.partition("benchmarks:")[2], re.MULTILINE)
    modules = {path.stem for path in BENCHMARKS.glob("*.py")} - {"run", "worker"}
    assert {IN_FRAMEWORKS, *(call.split()[0] for call in (*QUICK, *LONG))} == set(names) == modules


def check_that_it_runs(call: str, folder: Path, patterns: list[str], *, within_s: float, python: str) -> None:
    command = [python, str(RUN), *call.format(checkout=BENCHMARKS.parent).split()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=within_s,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    output = f"{call}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert "failed" not in done.stdout, output  # a candidate that fails is a row that says so
    missing = [pattern for pattern in patterns if not re.search(pattern, done.stdout)]
    assert not missing, f"{missing}\n{output}"
