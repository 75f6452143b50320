"""The table in README.md beside this: every row of the catalogue, and tests and campaigns that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from faults.campaigns import all_campaigns

TESTS = Path(__file__).parents[1]
LINES = (Path(__file__).parent / "README.md").read_text().splitlines()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if re.match(r"\| \d", line)]
NUM_ROWS = 67


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def named(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[2])


def test_every_row_is_there_once() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, NUM_ROWS + 1))
    assert {len(row) for row in ROWS} == {4}


def test_every_test_that_is_named_is_there() -> None:
    tests = [name.split("::") for row in ROWS for name in named(row) if "::" in name]
    assert len(tests) > NUM_ROWS
    assert [f"{path}::{name}" for path, name in tests if name not in functions_of(path)] == []


def test_every_campaign_that_is_named_is_there() -> None:
    names = {name for row in ROWS for name in named(row) if "::" not in name}
    assert names <= {campaign.name for campaign in all_campaigns() if not campaign.is_peer}


def test_a_row_without_a_test_says_what_is_open() -> None:
    assert [row[0] for row in ROWS if not named(row) and not row[3]] == []
