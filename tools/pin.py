"""`bcp rm`, `bcp pin` and `bcp unpin`: delete one checkpoint, or protect it."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import click

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.find_checkpoint import split_path
from bytecheckpoint.info import CheckpointInfo, describe_checkpoint
from bytecheckpoint.manager import abandoned_steps, retention, step_records
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.open_store import expand_home, is_plain_path, open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

from . import exit_codes
from .arguments import AccessOptions, with_output_options, with_step_option
from .completion.param_types import StoredPath
from .render.number_format import size_text
from .render.terminal import Screen, print_json

_RM_EXAMPLE = """\b
Example:
  bcp rm s3://bucket/run --step 1000
  bcp rm s3://bucket/run/step_00001000 --json
"""
_PIN_EXAMPLE = """\b
Example:
  bcp pin s3://bucket/run --step 1000
"""
_UNPIN_EXAMPLE = """\b
Example:
  bcp unpin s3://bucket/run --step 1000
"""


class NamedCheckpoint(NamedTuple):
    """The committed checkpoint of this library that a command was given."""

    store: Store
    """Its root: for the folder of a step, the folder above it."""
    folder: str
    info: CheckpointInfo

    @property
    def step(self) -> int | None:
        """Step that the checkpoint is in its root; None for one that stands alone."""
        return layout.parse_step(self.folder)


@click.command(epilog=_RM_EXAMPLE)
@click.argument("checkpoint", type=StoredPath())
@with_step_option()
@click.option("--force", is_flag=True, help="Delete it even if it is pinned, leased, or the newest under its root.")
@with_output_options
def rm(*, checkpoint: str, force: bool, access: AccessOptions, as_json: bool) -> int:
    """Delete CHECKPOINT without a question. Its manifest goes first: no reader finds a part of it.

    A pinned or leased one, and the newest step of a root, is refused without --force. Only files of
    the save of CHECKPOINT and records about it are deleted: all other files in its folder stay.
    """
    found = _find(checkpoint, access)
    if not force and found.step is not None and _is_newest(found.store, found.step):
        raise _refused(found, "it is the newest committed step of its root", "--step names another")
    try:
        why = retention.delete_one(found.store, found.folder, save_id=found.info.save_id, now=_now(found), force=force)
    except KeyboardInterrupt:
        # Nobody can tell which of its files are left, but the manifest has gone before any of them.
        done = f"{found.info.path} is whole, or no longer a checkpoint: `bcp rm` again tells which"
        raise click.Abort(done) from None
    if why:
        raise _refused(found, f"it is {why}", "`bcp unpin` takes a pin away")
    if as_json:
        print_json({**_as_json(found), "num_bytes": found.info.num_bytes, "deleted": True})
    else:
        Screen().line(f"deleted {found.info.path}: {size_text(found.info.num_bytes)}")
    return exit_codes.FINE


@click.command(epilog=_PIN_EXAMPLE)
@click.argument("checkpoint", type=StoredPath())
@with_step_option()
@with_output_options
def pin(*, checkpoint: str, access: AccessOptions, as_json: bool) -> int:
    """Pin CHECKPOINT: no policy, no `bcp keep` and no `bcp rm` without --force deletes it until it is unpinned."""
    found = _find(checkpoint, access)
    was_pinned = step_records.is_pinned(found.store, found.folder)
    if not was_pinned:
        step_records.pin(found.store, found.folder, time=clock_of(found.store) or time.time())
    return _print_outcome(found, is_pinned=True, was_pinned=was_pinned, as_json=as_json)


@click.command(epilog=_UNPIN_EXAMPLE)
@click.argument("checkpoint", type=StoredPath())
@with_step_option()
@with_output_options
def unpin(*, checkpoint: str, access: AccessOptions, as_json: bool) -> int:
    """Take the pin of CHECKPOINT away. One that is not pinned stays as it is."""
    found = _find(checkpoint, access)
    was_pinned = step_records.is_pinned(found.store, found.folder)
    if was_pinned:
        step_records.unpin(found.store, found.folder)
    return _print_outcome(found, is_pinned=False, was_pinned=was_pinned, as_json=as_json)


def _find(path: str, access: AccessOptions) -> NamedCheckpoint:
    """Finds a committed checkpoint and its root. Raises like `layout.find_checkpoint` and `layout.read_manifest`."""
    path = expand_home(path)
    if is_plain_path(path):
        path = os.path.realpath(path)  # a link `latest` to the folder of a step means that step
    store = _open(path, access)
    folder = layout.find_checkpoint(store, access.step, location=str(store))
    parent, name = split_path(path)
    if not folder and layout.parse_step(name) is not None:
        store, folder = _open(parent, access), name
    manifest = layout.read_manifest(store, folder)
    where = join_name(str(store), folder)
    return NamedCheckpoint(store, folder, describe_checkpoint(manifest, path=where, seconds={}))


def _open(path: str, access: AccessOptions) -> Store:
    return open_store(path, storage_options=access.storage_options, writer_threads=1)


def _is_newest(store: Store, step: int) -> bool:
    """Returns True for the step with which a restart would go on: the highest that was not abandoned, or the highest if
    all were.
    """
    committed = layout.committed_steps(store)
    abandoned = abandoned_steps.present_abandoned(store)
    newest = [other for other in committed if other not in abandoned] or committed
    return newest[-1:] == [step]


def _now(found: NamedCheckpoint) -> float:
    """Returns the time by the clock of the storage, by which leases end; without a lease, or if the storage tells no
    time, that of this host.
    """
    is_leased = step_records.leased_until(found.store, found.folder) > 0
    return (clock_of(found.store) if is_leased else None) or time.time()


def _refused(found: NamedCheckpoint, why: str, advice: str) -> CheckpointMismatchError:
    what = f"{found.info.path} stays, because {why}; nothing was changed: --force deletes it all the same, {advice}"
    return CheckpointMismatchError(what, kind="conflict", path=found.info.path, step=found.step)


def _as_json(found: NamedCheckpoint) -> dict[str, object]:
    return {"path": found.info.path, "step": found.info.step, "save_id": found.info.save_id}


def _print_outcome(found: NamedCheckpoint, *, is_pinned: bool, was_pinned: bool, as_json: bool) -> int:
    if as_json:
        print_json({**_as_json(found), "pinned": is_pinned, "was_pinned": was_pinned})
    else:
        did = "pinned" if is_pinned else "unpinned"
        same = "is pinned already" if is_pinned else "is not pinned"
        Screen().line(f"{found.info.path} {same}" if is_pinned == was_pinned else f"{did} {found.info.path}")
    return exit_codes.FINE
