"""Runs the blocks of a page of docs/ in the order of the page, in a folder of its own.

A block with a title is a file and is written. A `python` block runs in this process, after those above it; a `sh` block
runs in a shell whose `python`, `bcp` and `torchrun` are those of this environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LANGUAGES = {"python", "sh"}
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAMS = {
    "python": 'exec {python} "$@"',
    "bcp": 'exec {python} -m bytecheckpoint.tools "$@"',
    "torchrun": 'exec {python} -m torch.distributed.run "$@"',
    # a cluster of this machine alone
    "sbatch": 'exec bash "$@"',
    "srun": 'exec "$@"',
}


class Block(NamedTuple):
    language: str
    title: str
    """Name of the file that the block is; "" for one that runs."""
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def run_page(page: Path, folder: Path, replaced: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the names that the page's Python has made. The caller stands in `folder`."""
    names: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    programs = _programs(folder.parent / f"{folder.name}-bin")
    environment = {**os.environ, **environment, "PATH": f"{programs}:{os.environ['PATH']}"}
    for number, block in enumerate(blocks_of(page)):
        text = block.text
        for shown, here in replaced.items():
            text = text.replace(shown, here)
        if block.title:
            (folder / block.title).write_text(text)
        elif block.language == "python":
            exec(compile(text, f"block {number} of {page.name}", "exec"), names)
        elif block.language == "sh":
            _run_shell(text, folder, environment, f"block {number} of {page.name}")
    return names


def _programs(folder: Path) -> Path:
    folder.mkdir()
    for name, line in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{line.format(python=sys.executable)}\n")
        program.chmod(0o755)
    return folder


def _run_shell(text: str, folder: Path, environment: Mapping[str, str], which: str) -> None:
    command = ["bash", "-euo", "pipefail", "-c", text]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{which}:\n{text}\n{ended.stdout}\n{ended.stderr}"
