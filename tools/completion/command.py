"""`bcp completion`: prints the script that switches completion on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from click.shell_completion import ShellComplete

from .. import exit_codes
from ..arguments import AccessOptions, with_output_options
from ..render.terminal import print_json
from .scripts import SCRIPTS

if TYPE_CHECKING:
    from collections.abc import Collection

_EXAMPLE = """\b
Example:
  bcp completion bash >> ~/.bashrc
  eval "$(bcp completion zsh)"
  bcp completion fish > ~/.config/fish/completions/bcp.fish
"""


@click.command(epilog=_EXAMPLE)
@click.argument("shell", type=click.Choice(tuple(SCRIPTS)))
@with_output_options
def completion(*, shell: str, access: AccessOptions, as_json: bool) -> int:
    """Print the script that completes commands, options, paths, steps and names of tensors in SHELL: bash, zsh or
    fish.

    Paths and names are completed for local checkpoints: a bucket is not asked at each key.
    """
    del access
    if as_json:
        print_json({"shell": shell, "script": SCRIPTS[shell]})
    else:
        click.echo(SCRIPTS[shell], nl=False)
    return exit_codes.FINE


def answer(cli: click.Group, names: Collection[str], words: Sequence[str]) -> list[str]:
    """Returns the lines that answer a script: how to complete, and the candidates for the last of these words."""
    incomplete = words[-1] if words else ""
    if len(words) < 2 and not incomplete.startswith("-"):
        # Without the group, which would import every command for its help.
        return ["words", *(name for name in names if name.startswith(incomplete))]
    if words[0] not in names:
        return ["nothing"]
    before, lead = list(words[:-1]), ""
    if _takes_value(cli.commands[words[0]], before[-1]):
        # click does not parse a line that ends with an option without its value: it is given as `--option=`.
        incomplete = f"{before.pop()}={incomplete}"
    elif incomplete.startswith("--"):
        lead = incomplete[: incomplete.find("=") + 1]
    items = ShellComplete(cli, {}, "bcp", "").get_completions(before, incomplete)
    if any(item.type in {"file", "dir"} for item in items):
        return ["files"]
    return ["words", *(lead + item.value for item in items)]


def _takes_value(command: click.Command, word: str) -> bool:
    options = [param for param in command.params if isinstance(param, click.Option) and not param.is_flag]
    return any(word in option.opts for option in options)
