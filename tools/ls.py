"""`bcp ls`: which checkpoints there are."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import click

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.info import OWN_FORMAT, describe_checkpoint
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.finding import Found, Opening, find_checkpoint, manifest_of
from bytecheckpoint.storage.foreign.formats import find_folder
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.opening import open_store
from bytecheckpoint.storage.store import Store

from . import exit_codes
from .arguments import with_output_options
from .screen import Column, Screen, print_json
from .wording import age_text, count_text, size_text, time_text

_LOOKS_IN_FLIGHT = 8
_NOT_COMMITTED = "not committed"
_COLUMNS = [
    Column("step", is_right=True, style="bold cyan"),
    Column("size", is_right=True),
    Column("saved"),
    Column("age"),
    Column("tensors", is_right=True),
    Column("ranks", is_right=True),
    Column("folder", style="dim"),
    Column("state"),
]

_EXAMPLE = """\b
Example:
  bcp ls s3://bucket/run
  bcp ls /data/run --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A folder that is a checkpoint, or that a save has not finished."""

    folder: str
    """Inside the root; "" is the root itself."""
    path: str
    step: int | None
    committed: bool
    num_bytes: int
    """Of the data files: what the manifest says, or where there is none, what lies there."""
    num_tensors: int | None = None
    world_size: int | None = None
    created_at: datetime | None = None
    save_id: str | None = None
    format: str = OWN_FORMAT
    """Another one where other programs wrote it."""
    problem: str | None = None
    """Why the manifest cannot be read."""


@click.command(short_help="The checkpoints under a root.", epilog=_EXAMPLE)
@click.argument("root")
@with_output_options
def ls(*, root: str, as_json: bool, storage_options: Mapping[str, Any]) -> int:
    """The checkpoints under ROOT, or the one that ROOT is: step, size, age, tensors, how many ranks saved it.

    Folders of saves that did not finish, or are still being written, are listed as not committed. Only manifests are
    read. Exit code 1 where one of them is damaged.
    """
    store = open_store(root, storage_options=storage_options, writer_threads=1)
    found: list[Listed] = []
    with suppress(CheckpointNotFoundError):  # a file may be a checkpoint too
        found = _find(store)
    if not found:
        alone = find_checkpoint(root, "latest", Opening(storage_options))  # or it says what is there instead
        found = [_read(alone, None) or _gone(alone)]
    if as_json:
        print_json({"root": str(store), "checkpoints": [_as_json(item) for item in found], "warning": _mixed(found)})
    else:
        _print(str(store), found)
    return exit_codes.CORRUPT if any(item.problem for item in found) else exit_codes.FINE


def _mixed(found: list[Listed]) -> str | None:
    """The warning for a root that is a checkpoint and has steps below it."""
    own = [item for item in found if item.committed and item.format == OWN_FORMAT]
    steps = [item.step for item in own if layout.parse_step(item.folder) is not None]
    if not steps or all(item.folder for item in own):
        return None
    return (
        f"This path is a checkpoint and has committed steps below it: load and the other commands ask for --step none "
        f"or --step {steps[-1]}. Move one of the two to a path of its own."
    )


def _find(store: Store) -> list[Listed]:
    listing = store.list("")
    folders = [name for name, size in listing.items() if size is None and name != layout.DATA_FOLDER]
    with ThreadPoolExecutor(_LOOKS_IN_FLIGHT) as pool:
        found = [item for item in pool.map(lambda folder: _look_into(store, folder), ["", *folders]) if item]
    return sorted(found, key=lambda item: (item.folder != "", item.step is None, item.step or 0, item.folder))


def _look_into(store: Store, folder: str) -> Listed | None:
    listing = store.list(folder)
    path, step = join_name(str(store), folder), layout.parse_step(folder)
    foreign = None if layout.has_manifest(listing) else find_folder(store, folder, listing)
    if layout.has_manifest(listing) or foreign:
        return _read(Found(store, 0, folder, foreign), step)
    data = store.list(join_name(folder, layout.DATA_FOLDER)) if layout.DATA_FOLDER in listing else {}
    if step is None and not data:
        return None
    num_bytes = sum(size or 0 for size in data.values())
    return Listed(folder=folder, path=path, step=step, committed=False, num_bytes=num_bytes)


def _read(found: Found, step: int | None) -> Listed | None:
    folder, path = found.folder, found.path
    own_format = found.foreign.format if found.foreign else OWN_FORMAT
    try:
        info = describe_checkpoint(manifest_of(found), path=path, seconds={})
    except (CheckpointCorruptError, CheckpointMismatchError, UnsafeCheckpointError) as error:
        what = error.message
        return Listed(folder=folder, path=path, step=step, committed=True, num_bytes=0, format=own_format, problem=what)
    except CheckpointNotFoundError:  # deleted since it was listed
        return None
    return Listed(
        folder=folder,
        path=path,
        step=info.step if step is None else step,
        committed=True,
        num_bytes=info.num_bytes,
        num_tensors=info.num_tensors,
        world_size=info.world_size,
        created_at=info.created_at,
        save_id=info.save_id,
        format=info.format,
    )


def _gone(found: Found) -> Listed:
    raise CheckpointNotFoundError(
        f"{found.path} was there and is gone, or a file of it is", kind="not_found", path=found.path
    )


def _as_json(item: Listed) -> dict[str, Any]:
    fields = asdict(item)
    del fields["folder"]
    return {**fields, "created_at": item.created_at.isoformat() if item.created_at else None}


def _print(root: str, found: list[Listed]) -> None:
    screen = Screen()
    committed = [item for item in found if item.committed]
    rest = f", {len(found) - len(committed)} not committed" if len(committed) < len(found) else ""
    total = size_text(sum(item.num_bytes for item in found))
    screen.line(f"{root}: {count_text(len(committed), 'checkpoint')}{rest}, {total}", style="bold")
    screen.line()
    now = datetime.now(UTC)
    screen.table(_COLUMNS, [_row(item, now) for item in found])
    warning = _mixed(found)
    if warning:
        screen.line()
        screen.line(warning, style="yellow")
    for item in found:
        if item.problem:
            screen.line()
            screen.line(item.problem, style="red")


def _state(item: Listed) -> str:
    if not item.committed:
        return _NOT_COMMITTED
    return "committed" if item.format == OWN_FORMAT else item.format


def _row(item: Listed, now: datetime) -> list[str]:
    state = "damaged" if item.problem else _state(item)
    return [
        "-" if item.step is None else str(item.step),
        "-" if item.problem else size_text(item.num_bytes),
        time_text(item.created_at),
        age_text(item.created_at, now),
        "-" if item.num_tensors is None else count_text(item.num_tensors),
        "-" if item.world_size is None else count_text(item.world_size),
        item.folder or ".",
        state,
    ]
