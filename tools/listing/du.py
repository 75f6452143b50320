"""`bcp du`: adds up the bytes that checkpoints take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import click

from bytecheckpoint.errors import CheckpointNotFoundError

from .. import exit_codes
from ..analysis.checkpoint_list import list_checkpoints, read_sole
from ..arguments import AccessOptions, with_limit_option, with_output_options
from ..completion.param_types import StoredPath
from ..render.number_format import count_text, size_text
from ..render.terminal import LAST_DROP, NAME_STYLE, Column, Screen, TableShape, print_json, without
from .space import CheckpointSpace, EntrySpace, space_of, spaces_of, sum_entries

_EXAMPLE = """\b
Example:
  bcp du s3://bucket/run
  bcp du /data/run/step_00001000
"""


def _size_or_dash(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes else "-"


_CHECKPOINTS = TableShape(
    [
        Column("checkpoint", style=NAME_STYLE),
        Column("data", is_right=True, drop=1),
        Column("other", is_right=True, drop=2),
        Column("shared", is_right=True, drop=LAST_DROP),
        Column("stored", is_right=True),
    ],
    lambda space: [
        (space.folder or ".") + ("" if space.committed else " (not committed)"),
        size_text(space.num_bytes),
        size_text(space.other_num_bytes),
        _size_or_dash(space.shared_num_bytes),
        size_text(space.stored_num_bytes),
    ],
)
_ENTRIES = TableShape(
    [
        Column("entry", style=NAME_STYLE),
        Column("size", is_right=True),
        Column("share", is_right=True, drop=1),
        Column("tied", is_right=True, drop=2),
    ],
    list,
)


@click.command(epilog=_EXAMPLE)
@click.argument("path", type=StoredPath())
@with_limit_option()
@with_output_options
def du(*, path: str, limit: int, access: AccessOptions, as_json: bool) -> int:
    """Add up the bytes of the checkpoints under PATH, or of the one that PATH is: by checkpoint, by top-level entry of
    the state, and those that are shared.

    data: files in its own folder that the checkpoint reads. other: its manifest, telemetry and marks, and what
    abandoned saves have left there; all files if the manifest is damaged. shared: files that a link reads and another
    checkpoint stores; they are counted there. tied: what further names of tied tensors would take. Only manifests are
    read, and folders listed. Exit code 1 if a checkpoint is damaged.
    """
    store = access.open_root(path)
    spaces: list[CheckpointSpace] = []
    with suppress(CheckpointNotFoundError):  # a file may be a checkpoint too
        spaces = spaces_of(store, list_checkpoints(store).checkpoints)
    if not spaces:
        found = access.find(path)  # or raises with what is there instead
        spaces = [space_of(found, read_sole(found), found.store.list)]
    spaces.sort(key=lambda space: -space.stored_num_bytes)
    entries = sum_entries(spaces)
    if as_json:
        totals = {
            "num_bytes": sum(space.num_bytes for space in spaces),
            "other_num_bytes": sum(space.other_num_bytes for space in spaces),
            "shared_num_bytes": sum(space.shared_num_bytes for space in spaces),
        }
        checkpoints = [{**without(space, "refused"), "folder": space.folder or "."} for space in spaces]
        print_json({"path": str(store), **totals, "checkpoints": checkpoints, "entries": entries})
    else:
        _print(Screen(), str(store), spaces, entries, limit=limit)
    is_damaged = any(space.problem and not space.is_refused for space in spaces)
    return exit_codes.CORRUPT if is_damaged else exit_codes.FINE


def _print(
    screen: Screen, path: str, spaces: Sequence[CheckpointSpace], entries: Sequence[EntrySpace], *, limit: int
) -> None:
    stored = sum(space.stored_num_bytes for space in spaces)
    shared = sum(space.shared_num_bytes for space in spaces)
    of_links = f"; {size_text(shared)} more are read through links" if shared else ""
    screen.line(f"{path}: {size_text(stored)} in {count_text(len(spaces), 'checkpoint')}{of_links}", style="bold")
    screen.section(_CHECKPOINTS, spaces, limit=limit, rest=": --limit 0 shows all")
    total_bytes = sum(entry.num_bytes for entry in entries)
    rows = [
        [
            entry.name,
            size_text(entry.num_bytes),
            f"{entry.num_bytes / total_bytes:.1%}" if total_bytes else "-",
            _size_or_dash(entry.tied_num_bytes),
        ]
        for entry in entries
    ]
    if rows:
        screen.section(_ENTRIES, rows, limit=limit, rest=": --limit 0 shows all")
    for space in spaces:
        if space.problem:
            screen.paragraph(space.problem, style="yellow" if space.is_refused else "red")
