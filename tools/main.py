"""The program `bcp`: its commands. Any error of one becomes one line and an exit code."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import click

from bytecheckpoint.errors import CheckpointError

from . import exit_codes
from .convert import convert
from .diff import diff
from .doctor import doctor
from .gc_command import gc
from .keep import keep
from .ls import ls
from .pin import pin, rm, unpin
from .render.terminal import printable
from .show import show
from .timeline import timeline
from .verify import verify

_EXAMPLE = """\b
Example:
  bcp ls s3://bucket/run
  bcp show s3://bucket/run --tree
"""


class Program(click.Group):
    """A group of commands that return their exit code, and whose errors are one line, or one JSON object."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> NoReturn:
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in given
        extra["standalone_mode"] = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode gets escapes, no traceback
        try:
            code = super().main(given, prog_name or "bcp", **extra)
        except click.Abort as error:
            done = str(error) or "no committed checkpoint was changed"
            code = _report("interrupted", f"interrupted; {done}", None, as_json=as_json)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "bcp"
            code = _report("usage", f"{error.format_message()} (`{command} --help` tells more)", None, as_json=as_json)
        except CheckpointError as error:
            _report(error.kind, error.message, error.path, as_json=as_json)
            code = exit_codes.code_of(error)
        sys.exit(code if isinstance(code, int) else exit_codes.FINE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise click.Abort from None
        except BrokenPipeError:
            # The reader has closed the pipe. The interpreter must not complain when it flushes the rest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exit_codes.BROKEN_PIPE
        return result


def _report(kind: str, message: str, path: str | None, *, as_json: bool) -> int:
    """Prints an error; returns the exit code of the two kinds that are no CheckpointError."""
    if as_json:
        click.echo(json.dumps({"error": {"kind": kind, "message": message, "path": path}}))
    else:
        click.echo(f"error: {printable(' '.join(message.split()))}", err=True)
    return exit_codes.INTERRUPTED if kind == "interrupted" else exit_codes.USAGE


@click.group(
    cls=Program,
    epilog=_EXAMPLE,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version("bytecheckpoint"), "--version", prog_name="bcp", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look into checkpoints, check, compare and convert them, and look after the storage that they are in.

    Paths are folders or any URL that fsspec knows (s3://bucket/run).

    Exit codes: 0 fine, 1 corrupt or different, 2 usage, 3 not found, 4 storage, 130 Ctrl-C, 141 closed pipe.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (doctor, gc, ls, show, verify, diff, convert, timeline, keep, rm, pin, unpin):
    cli.add_command(command)


def main() -> NoReturn:
    """Runs the console script."""
    cli.main()
