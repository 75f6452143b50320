"""The program `bcp`: its commands. A CheckpointError or a usage error of one becomes one line and an exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import warnings
from collections import UserDict
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.backends.posix_errors import describe

from . import exit_codes
from .completion.scripts import ASK
from .render.terminal import printable

_OUTPUT_FAILURES = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EROFS, errno.ESTALE, errno.EAGAIN}
)
"""Errors of a write to standard output."""
_EXAMPLE = """\b
Example:
  bcp ls s3://bucket/run
  bcp show s3://bucket/run --tree
"""


class _CommandModule(NamedTuple):
    module: str
    short_help: str


_COMMANDS = {
    "cat": _CommandModule("cat", "Print the values of a tensor, or of a part of it."),
    "completion": _CommandModule("completion.command", "Print a script that completes commands in a shell."),
    "convert": _CommandModule("convert", "Write a checkpoint in another format."),
    "diff": _CommandModule("diff", "Compare two checkpoints."),
    "doctor": _CommandModule("doctor", "Measure a storage, or tell what a folder of unknown origin is."),
    "du": _CommandModule("listing.du", "Add up the bytes that checkpoints take."),
    "gc": _CommandModule("gc_command", "List what abandoned saves left; remove it with --delete."),
    "keep": _CommandModule("keep", "List which checkpoints policies keep; delete the others with --delete."),
    "ls": _CommandModule("listing.ls", "List the checkpoints under a root."),
    "memory": _CommandModule("listing.memory", "List what memory holds; bring it to storage."),
    "pin": _CommandModule("pin", "Protect one checkpoint from retention."),
    "report": _CommandModule("listing.report", "Write one page about all checkpoints of a run."),
    "rm": _CommandModule("pin", "Delete one checkpoint."),
    "show": _CommandModule("show", "Show what is in a checkpoint."),
    "timeline": _CommandModule("timeline", "Show how a save went: phases by rank."),
    "unpin": _CommandModule("pin", "Take the pin of a checkpoint away."),
    "verify": _CommandModule("verify", "Read and check every byte of a checkpoint."),
    "watch": _CommandModule("listing.watch", "Print checkpoints as they commit, with their timings."),
}


class _Commands(UserDict[str, Any]):
    """Commands by name, made of entries such as those of `_COMMANDS`. The module of a command is imported when the
    command runs: some imports take half a second.
    """

    def __getitem__(self, name: str) -> click.Command:
        entry: _CommandModule = super().__getitem__(name)
        command: click.Command = getattr(import_module(f".{entry.module}", __package__), name)
        command.short_help = entry.short_help
        return command


class Program(click.Group):
    """A group of commands that return their exit code, and whose errors are one line, or one JSON object."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> NoReturn:
        # When numpy is imported, its OpenBLAS starts a thread for each core, and no command needs one.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        arguments = list(sys.argv[1:] if args is None else args)
        if arguments[:1] == [ASK]:
            _complete(arguments[1:])
        as_json = "--json" in arguments
        extra["standalone_mode"] = False
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # the shell has closed it: `>&-`
                setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - until the end
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode gets escapes, no traceback
        given, warnings.formatwarning = warnings.formatwarning, _format_warning
        try:
            code = super().main(arguments, prog_name or "bcp", **extra)
        except click.Abort as error:
            done = str(error) or "no committed checkpoint was changed"
            _report("interrupted", f"interrupted; {done}", None, as_json=as_json)
            code = exit_codes.INTERRUPTED
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "bcp"
            _report("usage", f"{error.format_message()} (`{command} --help` tells more)", None, as_json=as_json)
            code = exit_codes.USAGE
        except CheckpointError as error:
            _report(error.kind, error.message, error.path, as_json=as_json)
            code = exit_codes.code_of(error)
        except OSError as error:
            if error.filename is not None or error.errno not in _OUTPUT_FAILURES:  # standard output has no name
                raise
            _drop_output()
            what = f"cannot write the output: {describe(error)}; what the command was to do may be done, and its result"
            _report("storage", f"{what} is not known: free space there, and run it again", None, as_json=False)
            code = exit_codes.STORAGE
        finally:
            warnings.formatwarning = given  # of a process that does not end with the command
        sys.exit(code if isinstance(code, int) else exit_codes.FINE)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.short_help) for name, entry in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise click.Abort from None
        except BrokenPipeError:
            _drop_output()
            return exit_codes.BROKEN_PIPE
        return result


def _drop_output() -> None:
    """Sends the rest of standard output nowhere, so that the interpreter does not fail when it flushes that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _format_warning(
    message: Warning | str, category: object, filename: str, lineno: int, line: str | None = None
) -> str:
    del category, filename, lineno, line
    return f"warning: {printable(' '.join(str(message).split()))}\n"


def _complete(words: Sequence[str]) -> NoReturn:
    """Prints the completions of these words for the script of a shell, and ends the process."""
    from .completion.command import answer  # noqa: PLC0415 - no other call needs it

    for line in answer(cli, _COMMANDS, words):
        click.echo(line)
    sys.exit(exit_codes.FINE)


def _report(kind: str, message: str, path: str | None, *, as_json: bool) -> None:
    """Prints an error, if it can."""
    with suppress(OSError):  # the exit code still tells
        if as_json:
            click.echo(json.dumps({"error": {"kind": kind, "message": message, "path": path}}))
        else:
            click.echo(f"error: {printable(' '.join(message.split()))}", err=True)


@click.group(
    cls=Program,
    commands=_Commands(_COMMANDS),
    epilog=_EXAMPLE,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(None, "--version", package_name="bytecheckpoint", prog_name="bcp", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look into checkpoints, check, compare and convert them, and look after the storage that they are in.

    Paths are folders or any URL that fsspec knows (s3://bucket/run).

    Exit codes: 0 fine, 1 corrupt or different, 2 usage, 3 not found, 4 storage, 5 no checksums, 130 Ctrl-C, 141 closed
    pipe.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    cli.main()
