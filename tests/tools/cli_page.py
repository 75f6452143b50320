"""Makes the tables of options in docs/cli.md from the commands. Run as a script it writes them into the page:
`make cli-doc`.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from bytecheckpoint.tools.main import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMON = {"--json", "--endpoint-url", "--profile", "--storage-option", "--help"}
"""Options of every command, which the page describes once, in words of its own."""
HEAD = "| option | does |\n| --- | --- |\n"


def option_table(command: click.Command) -> str:
    """Returns a row for each option of its own; "" without any."""
    options = [param for param in command.get_params(click.Context(cli)) if isinstance(param, click.Option)]
    rows = [_row(option) for option in options if option.opts[-1] not in COMMON]
    return HEAD + "".join(rows) if rows else ""


def _row(option: click.Option) -> str:
    name = option.opts[-1] + ("" if option.is_flag else f" {option.metavar}")
    default = f" {option.default} if not given." if option.show_default else ""
    cells = [cell.replace("|", "\\|") for cell in (f"`{name}`", f"{option.help or ''}{default}")]
    return f"| {cells[0]} | {cells[1]} |\n"


def with_option_tables(page: str) -> str:
    """Returns the page with the right table in the section of each command."""
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    return "".join(map(_with_table, sections))


def _with_table(section: str) -> str:
    found = re.match(r"## `bcp (\w+)`$", section, flags=re.MULTILINE)
    if found is None or found.group(1) not in cli.commands:
        return section
    table = option_table(cli.commands[found.group(1)])
    return re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table, section, count=1)


if __name__ == "__main__":
    PAGE.write_text(with_option_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
