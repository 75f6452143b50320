"""`bcp memory ls` and `bcp memory flush`: what the memory of this host holds, and its upload without a
trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from bytecheckpoint.errors import and_more
from bytecheckpoint.memory_tier.flush import FlushedStep, MemoryCheckpoint, flush, list_held
from bytecheckpoint.options import Memory
from bytecheckpoint.storage.open_store import expand_home

from .. import exit_codes
from ..arguments import AccessOptions, with_output_options
from ..completion.param_types import StoredPath
from ..render.number_format import count_text, size_text
from ..render.terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape, print_json

_LS_EXAMPLE = """\b
Example:
  bcp memory ls
  bcp memory ls --memory-root /mnt/memory --json
"""
_FLUSH_EXAMPLE = """\b
Example:
  bcp memory flush s3://bucket/run
"""
MEMORY_ROOT = click.option(
    "--memory-root",
    "roots",
    multiple=True,
    type=click.Path(file_okay=False),
    callback=lambda _, __, folders: tuple(map(expand_home, folders)),
    metavar="FOLDER",
    default=(str(Memory().root),),
    help="Look into this memory root, as the job does. May be repeated. /dev/shm/bytecheckpoint if not given.",
)


@click.group(name="memory")
def memory() -> None:
    """List the memory checkpoints of this host, or bring the newest of a job to storage."""


@memory.command(name="ls", epilog=_LS_EXAMPLE)
@MEMORY_ROOT
@with_output_options
def ls(*, roots: Sequence[str], access: AccessOptions, as_json: bool) -> int:
    """List the memory checkpoints that this host knows, of all jobs of this user."""
    del access
    found = list(list_held(roots))
    if as_json:
        print_json({"checkpoints": [each._asdict() for each in found]})
        return exit_codes.FINE
    screen = Screen()
    if not found:
        screen.line(f"no memory checkpoint in {', '.join(roots)}", style="bold")
        return exit_codes.FINE
    screen.section(_table(), found)
    return exit_codes.FINE


@memory.command(name="flush", epilog=_FLUSH_EXAMPLE)
@click.argument("root", type=StoredPath())
@MEMORY_ROOT
@with_output_options
def flush_command(*, root: str, roots: Sequence[str], access: AccessOptions, as_json: bool) -> int:
    """Upload the newest memory checkpoint of the job that saves to ROOT, and commit it.

    Run it once on every host of the job, after the job has ended: each host uploads what it has, and the one that finds
    all files there commits the checkpoint. Ends with 3, and names what is missing, as long as other hosts have some.
    """
    flushed = flush(root, roots, storage_options=access.storage_options)
    if as_json:
        print_json(flushed._asdict())
    else:
        _print(flushed)
    return exit_codes.FINE if flushed.is_committed else exit_codes.NOT_FOUND


def _print(flushed: FlushedStep) -> None:
    screen = Screen()
    files = f"{count_text(flushed.num_uploaded, 'file')} uploaded"
    if flushed.is_committed:
        screen.line(f"{flushed.path}: committed, {files}", style="bold green")
        return
    screen.line(f"{flushed.path}: {files}, not committed", style="bold yellow")
    screen.paragraph(
        f"{count_text(len(flushed.missing), 'file')} found neither in the memory of this host nor at the path: "
        f"{and_more(list(flushed.missing), 10)}. Run it on the other hosts of the job.",
        style="yellow",
    )


def _table() -> TableShape:
    columns = [
        Column("step", style=NAME_STYLE, is_right=True, is_whole=True),
        Column("root", drop=LAST_DROP),
        Column("files here", is_right=True, drop=2),
        Column("size here", is_right=True),
        Column("save id", style="dim", drop=1),
        Column("state", is_whole=True),
        Column("processes", is_right=True, drop=3),
    ]

    def cells(each: MemoryCheckpoint) -> list[str]:
        return [
            str(each.step),
            each.root,
            f"{each.num_here} of {each.num_files}",
            size_text(each.num_bytes),
            each.save_id,
            "complete" if each.is_complete else "pending",
            f"{each.num_living:,}" if each.num_living else "",
        ]

    return TableShape(columns, cells)
