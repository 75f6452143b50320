"""docs/cli.md describes every command and option that there is, and the JSON that the commands really give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoint_files import flip

from bytecheckpoint.tools import exit_codes
from bytecheckpoint.tools.main import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
FREE = {"metadata", "provenance", "value"}
QUICK = ("--seconds", 0, "--max-mib", 1)
"""Whose content the checkpoint decides."""


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The text about each command."""
    parts = re.split(r"^## `bcp (\w+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented_keys(section: str) -> set[str]:
    """The first column of the table of JSON keys."""
    table = section.split("| key | ")[1].split("\n\n", maxsplit=1)[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE))


def keys_of(value: Any, prefix: str = "") -> set[str]:
    """`checkpoints`, `checkpoints[].step`, ...; what is nested in itself is not followed again."""
    keys: set[str] = set()
    for name, item in value.items():
        path = f"{prefix}{name}"
        keys.add(path)
        if name in FREE:
            continue
        inside, lead = (item, f"{path}[].") if isinstance(item, list) else ([item], f"{path}.")
        lead = lead.replace("children[].children[].", "children[].")
        for child in inside:
            keys |= keys_of(child, lead) if isinstance(child, dict) else set()
    return keys


def test_every_command_has_a_section(sections) -> None:
    assert sections.keys() == cli.commands.keys()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_is_described(sections, name) -> None:
    command = cli.commands[name]
    options = [param for param in command.get_params(click.Context(cli)) if isinstance(param, click.Option)]
    described = set(re.findall(r"^\| `(--[\w-]+)", sections[name], flags=re.MULTILINE))
    common = set(re.findall(r"^\| `(--[\w-]+)", PAGE.read_text(encoding="utf-8").split("\n## ")[0], flags=re.MULTILINE))
    assert described | common == {option.opts[-1] for option in options}


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_an_example_with_its_output(sections, name) -> None:
    assert f"```console\n$ bcp {name} " in sections[name]


def test_every_exit_code_is_described() -> None:
    described = {
        int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert described == {value for value in vars(exit_codes).values() if isinstance(value, int)}


def test_json_of_ls(call, root, sections) -> None:
    assert keys_of(call("ls", root, "--json").json) == documented_keys(sections["ls"])


def test_json_of_show(call, root, sections) -> None:
    full = call("show", root, "--tree", "--files", "--objects", "--stats", "--tensor", "*", "--json").json
    assert keys_of(full) == documented_keys(sections["show"])
    assert call("show", root, "--json").json.keys() == full.keys()


def test_json_of_verify(call, root, sections) -> None:
    (path,) = (root / "step_00001000" / "data").iterdir()
    assert call("verify", root, "--json").json.keys() == call("verify", root, "--json", "--sample", 1).json.keys()
    flip(path, 0)
    assert keys_of(call("verify", root, "--json").json) == documented_keys(sections["verify"])


def test_json_of_gc(call, root, sections) -> None:
    path = root / "step_00000007" / "data" / "00000000deadbeef-00000-0.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"1")
    assert keys_of(call("gc", root, "--json").json) == documented_keys(sections["gc"])


def test_json_of_doctor(call, root, tmp_path, sections) -> None:
    full = call("doctor", root, *QUICK, "--local-stage", tmp_path / "nvme", "--json").json
    assert keys_of(full) == documented_keys(sections["doctor"])
    assert full.keys() == call("doctor", root, *QUICK, "--json").json.keys()
