"""The rows of tests/thorough.py are true, and together `make test` and `make test-thorough` run everything."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import NEVER, THOROUGH

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", THOROUGH)
def test_each_row_names_a_test(file: str) -> None:
    nodes = ast.parse((TESTS / file).read_text()).body
    assert THOROUGH[file].keys() <= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def collected(marks: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "-m", marks]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if line.startswith("tests/")}


def test_each_row_has_something_for_every_day_and_something_for_later() -> None:
    everyday = collected("not thorough and not long and not frameworks")
    later = collected("thorough and not long and not frameworks")
    assert not everyday & later
    for file, rows in THOROUGH.items():
        for function, every_day_pattern in rows.items():
            test = f"tests/{file}::{function}"
            is_everyday, is_later = (test in {name.partition("[")[0] for name in part} for part in (everyday, later))
            assert is_everyday == (every_day_pattern != NEVER), test
            assert is_later, test
