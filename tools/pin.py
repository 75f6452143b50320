"""`bcp rm`, `bcp pin` and `bcp unpin`: delete one checkpoint, or protect it."""

from __future__ import annotations

import os
import shlex
import time
from typing import NamedTuple

import click

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.formats.find_checkpoint import split_path
from bytecheckpoint.manager import abandoned_steps, retention, step_records
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage import deletion, garbage, layout
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.open_store import expand_home, is_plain_path
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

from . import exit_codes
from .arguments import AccessOptions, with_output_options, with_step_option
from .completion.param_types import StoredPath
from .render.number_format import count_text, size_text
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


_MIN_AGE_H = garbage.MIN_AGE_S / 3600


class CheckpointPlace(NamedTuple):
    """The place of a committed checkpoint of this library."""

    store: Store
    """Its root: for the folder of a step, the folder above it."""
    folder: str

    @property
    def step(self) -> int | None:
        """Step of the checkpoint in its root; None for one that stands alone."""
        return layout.parse_step(self.folder)

    @property
    def path(self) -> str:
        return join_name(str(self.store), self.folder)

    def read_manifest(self) -> Manifest:
        return layout.read_manifest(self.store, self.folder)


@click.command(epilog=_RM_EXAMPLE)
@click.argument("checkpoint", type=StoredPath())
@with_step_option()
@click.option("--force", is_flag=True, help="Delete it even if it is pinned, leased, or the newest under its root.")
@with_output_options
def rm(*, checkpoint: str, force: bool, access: AccessOptions, as_json: bool) -> int:
    """Delete CHECKPOINT without a question. Its manifest goes first: no reader finds a part of it.

    A pinned or leased one, and the newest step of a root, is refused without --force. Only files of
    the save of CHECKPOINT and records about it are deleted: all other files in its folder stay. If its
    manifest is damaged, nothing tells which files are its own: those of all saves in the folder are
    deleted, except of saves that changed within 24 h: `bcp gc` removes them later.
    """
    try:
        place = _find(checkpoint, access)
    except CheckpointNotFoundError as error:
        if error.kind != "not_committed":
            raise
        what = f"{error.message}. `bcp gc` lists and removes what that save has left"
        raise CheckpointNotFoundError(what, kind=error.kind, path=error.path, step=error.step) from error
    try:
        manifest, problem = _read_manifest(place)
        if not force and place.step is not None and _is_newest(place.store, place.step):
            though = ", though its manifest is damaged" if problem else ""
            raise _refused(place, f"it is the newest committed step of its root{though}", "--step names another")
        if manifest is None:
            _delete_damaged(place, problem, force=force, as_json=as_json)
        else:
            _delete(place, manifest, force=force, as_json=as_json)
    except KeyboardInterrupt:
        # Nobody can tell which of its files are left, but the manifest has gone before any of them.
        done = f"{place.path} is whole, or no longer a checkpoint: `bcp rm` again tells which"
        raise click.Abort(done) from None
    return exit_codes.FINE


def _read_manifest(place: CheckpointPlace) -> tuple[Manifest | None, str]:
    """Returns the manifest, or None and why no release can read it."""
    try:
        return place.read_manifest(), ""
    except (CheckpointCorruptError, UnsafeCheckpointError) as error:
        if error.kind not in garbage.DAMAGED:
            raise
        return None, error.message


def _delete(place: CheckpointPlace, manifest: Manifest, *, force: bool, as_json: bool) -> None:
    own_names = set(deletion.written_files(place.store, place.folder, manifest))
    num_bytes = sum(file.byte_length for file in manifest.files if file.name in own_names)
    why = retention.delete_one(place.store, place.folder, save_id=manifest.save_id, now=_now(place), force=force)
    _refuse_protected(place, why)
    if as_json:
        print_json({**_as_json(place, manifest), "num_bytes": num_bytes, "deleted": True, "problem": None, "left": []})
        return
    others_bytes = sum(file.byte_length for file in manifest.files) - num_bytes
    others = f"; {size_text(others_bytes)} that it pointed to stay where they are" if others_bytes else ""
    Screen().line(f"deleted {place.path}: {size_text(num_bytes)}{others}")


def _delete_damaged(place: CheckpointPlace, problem: str, *, force: bool, as_json: bool) -> None:
    store, folder = place.store, place.folder
    if not force:
        _refuse_protected(place, retention.protection_of(store, folder, now=_now(place)))
    deleted, left = garbage.delete_damaged(store, folder, now_s=clock_of(store) or time.time())
    num_bytes = sum(item.num_bytes for item in deleted)
    if as_json:
        about = {"path": place.path, "step": place.step, "save_id": None, "num_bytes": num_bytes, "deleted": True}
        print_json({**about, "problem": problem, "left": [item.save_id for item in left]})
        return
    screen = Screen()
    screen.line(f"deleted {place.path}, whose manifest was damaged: {size_text(num_bytes)}")
    for item in left:
        # Hazard: without an id only age tells them from what saves still write, in this folder and elsewhere.
        when = "if no save writes there any more" if item.save_id else f"once they are {_MIN_AGE_H:.0f} h old"
        dead = ["--save-id", item.save_id] if item.save_id else []
        command = shlex.join(["bcp", "gc", str(store), *dead, "--delete"])
        what = f"{count_text(len(item.names), 'file')}, {size_text(item.num_bytes)}, not {_MIN_AGE_H:.0f} h old"
        screen.line(f"  left: {what}: {when}, `{command}` removes them")


@click.command(epilog=_PIN_EXAMPLE)
@click.argument("checkpoint", type=StoredPath())
@with_step_option()
@with_output_options
def pin(*, checkpoint: str, access: AccessOptions, as_json: bool) -> int:
    """Pin CHECKPOINT: no policy, no `bcp keep` and no `bcp rm` without --force deletes it until it is unpinned."""
    return _set_pin(checkpoint, access, is_pinned=True, as_json=as_json)


@click.command(epilog=_UNPIN_EXAMPLE)
@click.argument("checkpoint", type=StoredPath())
@with_step_option()
@with_output_options
def unpin(*, checkpoint: str, access: AccessOptions, as_json: bool) -> int:
    """Take the pin of CHECKPOINT away. One that is not pinned stays as it is."""
    return _set_pin(checkpoint, access, is_pinned=False, as_json=as_json)


def _set_pin(checkpoint: str, access: AccessOptions, *, is_pinned: bool, as_json: bool) -> int:
    place = _find(checkpoint, access)
    manifest = place.read_manifest()
    was_pinned = step_records.is_pinned(place.store, place.folder)
    if is_pinned and not was_pinned:
        step_records.pin(place.store, place.folder, time=clock_of(place.store) or time.time())
    elif was_pinned and not is_pinned:
        step_records.unpin(place.store, place.folder)
    if as_json:
        print_json({**_as_json(place, manifest), "pinned": is_pinned, "was_pinned": was_pinned})
    else:
        did = "pinned" if is_pinned else "unpinned"
        same = "is pinned already" if is_pinned else "is not pinned"
        Screen().line(f"{place.path} {same}" if is_pinned == was_pinned else f"{did} {place.path}")
    return exit_codes.FINE


def _find(path: str, access: AccessOptions) -> CheckpointPlace:
    """Finds a committed checkpoint and its root. Raises like `layout.find_checkpoint`."""
    path = expand_home(path)
    if is_plain_path(path):
        path = os.path.realpath(path)  # a link `latest` to the folder of a step means that step
    store = access.open_root(path)
    folder = layout.find_checkpoint(store, access.step, location=str(store))
    parent, name = split_path(path)
    if not folder and layout.parse_step(name) is not None:
        store, folder = access.open_root(parent), name
    return CheckpointPlace(store, folder)


def _is_newest(store: Store, step: int) -> bool:
    """Returns True for the step with which a restart would go on: the highest that was not abandoned, or the highest if
    all were.
    """
    committed = layout.committed_steps(store)
    abandoned = abandoned_steps.present_abandoned(store)
    candidates = [other for other in committed if other not in abandoned] or committed
    return candidates[-1:] == [step]


def _now(place: CheckpointPlace) -> float:
    """Returns the time by the clock of the storage, by which leases end; without a lease, or if the storage tells no
    time, that of this host.
    """
    is_leased = step_records.leased_until(place.store, place.folder) > 0
    return (clock_of(place.store) if is_leased else None) or time.time()


def _refuse_protected(place: CheckpointPlace, why: str) -> None:
    if why:
        raise _refused(place, f"it is {why}", "`bcp unpin` takes a pin away")


def _refused(place: CheckpointPlace, why: str, advice: str) -> CheckpointMismatchError:
    what = f"{place.path} stays, because {why}; nothing was changed: --force deletes it all the same, {advice}"
    return CheckpointMismatchError(what, kind="conflict", path=place.path, step=place.step)


def _as_json(place: CheckpointPlace, manifest: Manifest) -> dict[str, object]:
    return {"path": place.path, "step": place.step, "save_id": manifest.save_id}
