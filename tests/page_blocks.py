"""Runs the blocks of a page of docs/ in the order of the page, in a folder of its own.

A block with a title is a file and is written. A `python` block runs in this process, after those above it; so does a
`sh` block of `bcp` commands alone. Any other runs in a shell with the programs of this environment. Where the text
behind a block says "It prints `...`", the block has to.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner
from forked_python import forked_python

from bytecheckpoint.tools.main import cli

LANGUAGES = {"python", "sh"}
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"\bIt prints `([^`]+)`")
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
    printed: list[str]
    """What the text behind it says that it prints."""


def blocks_of(page: Path) -> list[Block]:
    _, *parts = FENCE.split(page.read_text(encoding="utf-8"))
    fours = zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True)
    return [Block(language, title or "", text, PRINTED.findall(after)) for language, title, text, after in fours]


def run_page(page: Path, folder: Path, replaced: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the names that the page's Python has made. The caller stands in `folder`."""
    names: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    programs = _programs(folder.parent / f"{folder.name}-bin")
    environment = {**os.environ, **environment, "PATH": f"{programs}:{os.environ['PATH']}"}
    for number, block in enumerate(blocks_of(page)):
        text = block.text
        for shown, here in replaced.items():
            text = text.replace(shown, here)
        which, output = f"block {number} of {page.name}", ""
        if block.title:
            (folder / block.title).write_text(text)
        elif block.language == "python":
            output = _run_python(text, names, which)
        elif block.language == "sh" and all(line.startswith("bcp ") for line in text.splitlines()):
            output = "".join(_run_command(line) for line in text.splitlines())
        elif block.language == "sh":
            output = _run_shell(text, folder, environment, which)
        assert [line for line in block.printed if line not in output] == [], f"{which} printed\n{output}"
    return names


def _programs(folder: Path) -> Path:
    folder.mkdir()
    for name, line in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{line.format(python=forked_python())}\n")
        program.chmod(0o755)
    return folder


def _run_python(text: str, names: dict[str, Any], which: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, which, "exec"), names)
    return printed.getvalue()


def _run_command(line: str) -> str:
    """Without a process of its own, which would import torch for each line."""
    ended = CliRunner().invoke(cli, shlex.split(line, comments=True)[1:])
    assert ended.exit_code == 0, f"{line}\n{ended.output}"
    return ended.stdout


def _run_shell(text: str, folder: Path, environment: Mapping[str, str], which: str) -> str:
    command = ["bash", "-euo", "pipefail", "-c", text]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{which}:\n{text}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
