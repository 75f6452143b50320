"""docs/security.md says the limits of the code, all of them, and its other numbers are right."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from bytecheckpoint.distributed import rendezvous

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| ([0-9,]+) \| `([A-Za-z_.0-9]+)` \|$", PAGE, re.MULTILINE)
IN_NO_TABLE = {
    "formats.file_reader._MAX_BLOCKS",  # a cache
    "storage.layout._MAX_NAMED",  # names in a message
    "storage.layout._MAX_LOOKS",  # steps that are looked at together
    "storage.layout._MAX_FAILURES",  # of the library's own requests
    "formats.frameworks.dcp_folder._MAX_HEAD_BYTES",  # a cache
}
"""Limits that bound nothing of a checkpoint."""
PACKAGE = ROOT / "bytecheckpoint"
READERS = (
    "storage.safetensors_header",
    "storage.layout",
    *(
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        for part in ("manifest", "formats")
        for path in sorted((PACKAGE / part).rglob("[a-z]*.py"))
    ),
)


@pytest.mark.parametrize(("what", "number", "where"), ROWS, ids=[where for _, _, where in ROWS])
def test_a_limit_is_that_of_the_code(what: str, number: str, where: str) -> None:
    module, _, name = where.rpartition(".")
    assert getattr(importlib.import_module(f"bytecheckpoint.{module}"), name) == int(number.replace(",", "")), what


def test_every_limit_of_a_reader_is_in_the_page() -> None:
    named = {where for _, _, where in ROWS} | IN_NO_TABLE
    for reader in READERS:
        module = importlib.import_module(f"bytecheckpoint.{reader}")
        defined = re.findall(r"^(?:.*, )?(_?MAX_[A-Z_0-9]+)(?:, .*)? = ", inspect.getsource(module), re.MULTILINE)
        assert {f"{reader}.{name}" for name in defined if type(getattr(module, name)) is int} <= named


def test_the_tables_are_found() -> None:
    assert len(ROWS) == sum(line.startswith("| ") and line.endswith("` |") for line in PAGE.splitlines())
    assert len(ROWS) > 25


def test_the_token_of_a_reader_is_as_long_as_said() -> None:
    assert "random token of 32 bytes" in PAGE
    assert "connection is closed after 10 seconds" in PAGE
    assert rendezvous._HELLO_S == 10
    listener = rendezvous.Listener(towards=None)
    try:
        assert len(listener.address.token) == 32
    finally:
        listener.close()
