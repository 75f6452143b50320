"""Costs of a start: processor time, in seconds, of commands, imports and the first save of a process, beside those of
DCP and safetensors. Each is a process of its own; of several rounds the median counts.

    python benchmarks/run.py startup
    python benchmarks/run.py startup --tensors 1000 --rounds 3

Targets: `bcp --help` 0.15 s, `bcp show` of 20,000 tensors 0.35 s, `import bytecheckpoint` 0.08 s, the first save of a
process 0.3 s beyond `import torch`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shared.tables import spread, table

TORCH = "import torch"
STATE = '{"w": torch.zeros(1000)}'
BCP_SAVE = f"import bytecheckpoint as bcp; bcp.save('bcp', {STATE}, options=bcp.SaveOptions(overwrite=True))"
DCP_SAVE = f"import torch.distributed.checkpoint as dcp; dcp.save({STATE}, checkpoint_id='dcp', no_dist=True)"
SAFETENSORS_SAVE = f"from safetensors.torch import save_file; save_file({STATE}, 'st.safetensors')"


class Start(NamedTuple):
    """One row: what is run in a process of its own."""

    name: str
    code: str
    after: str = ""
    """Run before it, and not counted."""
    target_s: float | None = None


IMPORTS = (
    Start("python", "pass"),
    Start("import bytecheckpoint", "import bytecheckpoint", target_s=0.08),
    Start("import safetensors", "import safetensors"),
    Start("import torch", TORCH),
    Start("the names of bytecheckpoint, beyond torch", "import bytecheckpoint as bcp; bcp.save", TORCH),
    Start("import torch.distributed.checkpoint, beyond torch", "import torch.distributed.checkpoint", TORCH),
    Start("import safetensors.torch, beyond torch", "import safetensors.torch", TORCH),
    Start("the first bcp.save, beyond torch", BCP_SAVE, TORCH, 0.3),
    Start("the first dcp.save, beyond torch", DCP_SAVE, TORCH),
    Start("the first save_file of safetensors, beyond torch", SAFETENSORS_SAVE, TORCH),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=20_000, help="tensors of the checkpoint that is shown")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind")


def run(arguments: argparse.Namespace) -> None:
    """Prints a table of all starts."""
    with tempfile.TemporaryDirectory(prefix="bcp-startup-") as folder:
        _make_checkpoint(folder, arguments.tensors)
        starts = [
            *IMPORTS,
            Start("bcp --help", _command("--help"), target_s=0.15),
            Start(f"bcp show of {arguments.tensors:,} tensors", _command("show", "large"), target_s=0.35),
        ]
        # In turn, so that all meet the same machine.
        rounds = [[_measure(start, folder) for start in starts] for _ in range(arguments.rounds)]
    rows = [_row(start, found) for start, found in zip(starts, zip(*rounds, strict=True), strict=True)]
    print("\n".join(table(("start", "s of processor time", "target"), rows)))


def _row(start: Start, seconds: Sequence[float]) -> Sequence[str]:
    return start.name, spread(seconds), "" if start.target_s is None else f"{start.target_s:g}"


def _measure(start: Start, folder: str) -> float:
    if not start.after:
        return processor_s(start.code, folder)
    spent = Path(folder, "spent")
    counted = f"began = time.process_time(); {start.code}; spent = time.process_time() - began"
    processor_s(f"import pathlib, time; {start.after}; {counted}; pathlib.Path('spent').write_text(str(spent))", folder)
    return float(spent.read_text())


def _command(*arguments: str) -> str:
    return f"import sys; sys.argv = ['bcp', *{arguments!r}]; from bytecheckpoint.tools.main import main; main()"


def _make_checkpoint(folder: str, num_tensors: int) -> None:
    names = f"{{f'layers.{{n // 10}}.part{{n % 10}}.weight': torch.zeros(4, 4) for n in range({num_tensors})}}"
    processor_s(f"import torch, bytecheckpoint as bcp; bcp.save('large', {{'model': {names}}})", folder)


def processor_s(code: str, folder: str) -> float:
    """Runs the code in a new interpreter; returns its processor time, in seconds."""
    repository = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", f"import warnings; warnings.simplefilter('ignore'); {code}"]
    environment = {**os.environ, "PYTHONPATH": repository}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime
