"""What tests of the pages in docs/migrate/ share: their blocks, and what `bcp doctor` prints about a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from formats.foreign_files import assert_same

from bytecheckpoint.tools.main import cli

FOLDER = Path(__file__).parents[1] / "docs" / "migrate"


def blocks_of(name: str) -> list[str]:
    """The blocks of a page: before, after, and the load of an old checkpoint."""
    return re.findall(r"```python\n(.*?)```", (FOLDER / name).read_text(), re.DOTALL)


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, "a block of docs/migrate", "exec"), names)


def assert_doctor_prints(path: str, block: str) -> None:
    """Every line of the block that calls the library is what `bcp doctor --checkpoint` prints of this path."""
    ended = CliRunner().invoke(cli, ["doctor", "--checkpoint", path])
    assert ended.exit_code == 0, ended.output
    calls = [line for line in block.splitlines() if "bcp." in line]
    assert calls
    assert [line for line in calls if f"    {line.partition('  #')[0]}\n" not in ended.stdout] == []


def assert_trained_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Model and optimizer are equal to the bit."""
    assert_same(dict(found["model"].state_dict()), dict(expected["model"].state_dict()))
    found_state, state = (each["optimizer"].state_dict()["state"] for each in (found, expected))
    assert state
    assert found_state.keys() == state.keys()
    for key, values in state.items():
        assert_same(found_state[key], values)
