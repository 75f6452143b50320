"""Inventory of all objects under the root of a store, with their ages: unlike `Store.list` it shows temporaries, and
goes through all folders at once.

Also the rule about checkpoints at one path: a path is one checkpoint, or the root of steps, and never both.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, runtime_checkable

from bytecheckpoint.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    and_more,
)
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, join_name
from bytecheckpoint.storage.store import Store, one_block

_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "modifiedTime", "created")
"""Keys under which backends of fsspec give the time of an object, the best first."""


class StoredObject(NamedTuple):
    """An object under a root."""

    name: str
    """Path from the root on."""
    num_bytes: int
    modified_s: float | None
    """Time of its write, by the clock of the storage, in seconds since 1970; None if the backend does not say."""


class PendingUpload(NamedTuple):
    """A multipart upload that was begun and neither completed nor aborted. Its parts are stored, and paid for."""

    name: str
    """Name of the object that it was to become, from the root on."""
    upload_id: str
    started_s: float
    """Time of its start in seconds since 1970, by the clock of the storage."""


@runtime_checkable
class HasInventory(Protocol):
    """A store with an inventory of its own."""

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        """Yields all objects anywhere below a folder ("" is the root), temporaries too."""


@runtime_checkable
class HasPendingUploads(Protocol):
    """A store that can list unfinished uploads, which no reader sees."""

    def pending_uploads(self, folder: str) -> Sequence[PendingUpload]:
        """Returns all unfinished uploads anywhere below a folder ("" is the root)."""

    def abort_upload(self, upload: PendingUpload) -> None:
        """Removes the parts of an upload. An upload that is gone is not an error."""


def inventory_of(store: Store, folder: str) -> Iterator[StoredObject]:
    """Returns all objects below a folder of a store, temporaries too.

    Raises StorageError: `unsupported` if the store has no inventory.
    """
    if isinstance(store, HasInventory):
        return store.inventory(folder)
    raise StorageError(
        f"the store at {store} does not tell how old its objects are; nothing was changed",
        kind="unsupported",
        path=str(store),
    )


def time_of(entry: Mapping[str, Any]) -> float | None:
    """Returns the time in an entry of a listing of fsspec, in seconds since 1970; None if the backend gives none."""
    value = next((entry[key] for key in _TIMES if entry.get(key)), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else None


def clock_of(store: Store) -> float | None:
    """Returns the time by the clock of the storage, in seconds since 1970; None if the backend gives no times, or has
    no space: callers are about to free some. Writes an object and deletes it. If the deletion is not permitted, nothing
    is raised, and `bcp gc` finds the object later. Raises StorageError (unsupported) if the store has no inventory, and
    the store's other errors.
    """
    folder = f"{TEMPORARY_PREFIX}clock-{secrets.token_hex(8)}"
    name = f"{folder}/now"
    try:
        store.write(name, one_block(b"\n"), replace=False)
    except CheckpointSaveError as error:
        if error.kind != "no_space":
            raise
        return None
    try:
        times = [item.modified_s for item in inventory_of(store, folder) if item.name == name]
    finally:
        _delete_if_allowed(store, name)
    return times[0] if times else None


def _delete_if_allowed(store: Store, name: str) -> None:
    try:
        store.delete(name)
    except StorageError as error:
        if error.kind != "permission":
            raise


def refuse_occupied(store: Store, folder: str, *, overwrite: bool) -> None:
    """Raises CheckpointExistsError (exists) if no checkpoint may be saved in this folder, which is a step's, or "" for
    the root of the store. `overwrite` permits replacing a checkpoint in this folder, but not saving beside another
    one that is in the way. Raises CheckpointSaveError (storage) if a file is where the folder has to be.

    Costs a listing of the root, for a step at most one of its folder, and for the root a look at the steps in it.
    """
    path = join_name(str(store), folder)
    try:
        listing = store.list("")
    except CheckpointNotFoundError as error:
        if error.kind != "not_found":  # a service that answers a listing with 404 has no file there
            raise
        raise _file_error(str(error.path), path, "give another path") from error
    if listing.get(folder) is not None:
        raise _file_error(path, path, "move it away, or save another step")
    if other := _in_the_way(store, "", listing, is_step=bool(folder)):
        raise _beside_error(path, other)
    if overwrite or (folder and folder not in listing):
        return
    if layout.has_manifest(store.list(folder) if folder else listing):
        raise layout.exists_error(path)


def _file_error(file: str, path: str, advice: str) -> CheckpointSaveError:
    what = f"{file} is a file, where a folder is needed; nothing was saved: {advice}"
    return CheckpointSaveError(what, kind="storage", path=path)


def checkpoint_in_the_way(store: Store, folder: str, *, is_step: bool) -> str:
    """Returns the path of a committed checkpoint that forbids one in this folder; empty if there is none. For a step's
    folder this is a checkpoint in the folder above it, for any other folder the newest step in it.
    """
    root = folder.rpartition("/")[0] if is_step else folder
    return _in_the_way(store, root, store.list(root), is_step=is_step)


def _in_the_way(store: Store, root: str, listing: Mapping[str, int | None], *, is_step: bool) -> str:
    if is_step:
        return join_name(str(store), root) if layout.has_manifest(listing) else ""
    newest = next(layout.steps_below(store, root, listing), None)
    return "" if newest is None else join_name(str(store), root, layout.step_folder(newest))


def refuse_beside(store: Store, folder: str, *, is_step: bool) -> None:
    """Raises CheckpointExistsError (exists) if there is a `checkpoint_in_the_way`."""
    if other := checkpoint_in_the_way(store, folder, is_step=is_step):
        raise _beside_error(join_name(str(store), folder), other)


def _beside_error(path: str, other: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"no checkpoint can be saved at {path}, because one is committed at {other}: a path is one checkpoint, or the "
        "root of steps, and load would not know which of them is meant. Nothing was committed, and overwrite=True does "
        "not change this: save to another path, with a step everywhere or nowhere, or move what stands there",
        kind="exists",
        path=path,
    )


def refuse_beginning_anew(store: Store) -> None:
    """Raises CheckpointMismatchError (conflict) if the root is a checkpoint or has committed steps. The caller has
    found all of these abandoned: training must not begin anew beside them.
    """
    found, advice = "", ""
    if steps := list(layout.newest_steps(store)):
        found = f"holds the steps {and_more(list(map(str, steps)), 10)}, which training left, as committed checkpoints"
        advice = "restore a step by its number, or give the manager another root"
    elif layout.has_manifest(store.list("")):
        found = "is a checkpoint itself"
        advice = "give the manager another root, and this path to restore(initial=...)"
    if found:
        raise CheckpointMismatchError(
            f"{store} has no step to go on from, but {found}; nothing was changed, and training does not begin anew by "
            f"itself: {advice}",
            kind="conflict",
            path=str(store),
        )
