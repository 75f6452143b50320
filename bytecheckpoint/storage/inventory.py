"""Inventory of all objects under the root of a store, with their ages: unlike `Store.list` it shows temporaries, and
goes through all folders at once.

Also the rule about checkpoints at one path: a path is one checkpoint, or the root of steps, and never both.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from bytecheckpoint.errors import CheckpointExistsError, StorageError
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, join_name
from bytecheckpoint.storage.store import Store, one_block


class StoredObject(NamedTuple):
    """An object under a root."""

    name: str
    """Path from the root on."""
    num_bytes: int
    modified_s: float | None
    """Time of its write, by the clock of the storage, in seconds since 1970; None if the backend does not say."""


class StoredUpload(Protocol):
    """A multipart upload that was begun and neither completed nor aborted."""

    @property
    def name(self) -> str:
        """Name of the object that it was to become, from the root on."""

    @property
    def started_s(self) -> float:
        """Time of its start in seconds since 1970, by the clock of the storage."""


@runtime_checkable
class HasInventory(Protocol):
    """A store with an inventory of its own."""

    def inventory(self, folder: str) -> Iterator[StoredObject]:
        """Yields all objects anywhere below a folder ("" is the root), temporaries too."""


@runtime_checkable
class HasPendingUploads(Protocol):
    """A store that can list unfinished uploads, which are stored and paid for though no reader sees them."""

    def pending_uploads(self, folder: str) -> list[Any]:
        """Returns all `StoredUpload`s anywhere below a folder ("" is the root)."""

    def abort_upload(self, upload: Any) -> None:
        """Removes the parts of an upload."""


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


def clock_of(store: Store) -> float | None:
    """Reads the clock of the storage, in seconds since 1970, by writing and deleting an object. None if the backend
    gives no times.
    """
    folder = f"{TEMPORARY_PREFIX}clock-{secrets.token_hex(8)}"
    name = f"{folder}/now"
    store.write(name, one_block(b"\n"), replace=False)
    try:
        times = [item.modified_s for item in inventory_of(store, folder) if item.name == name]
    finally:
        store.delete(name)
    return times[0] if times else None


def refuse_occupied(store: Store, folder: str, *, overwrite: bool) -> None:
    """Raises CheckpointExistsError (exists) if no checkpoint may be saved in this folder: that of a step, or "", the
    store's root. Costs a listing of the root, and one of the step's folder if it exists.
    """
    listing = store.list("")
    if folder:
        if layout.has_manifest(listing):
            raise _beside(join_name(str(store), folder), str(store))
        is_taken = not overwrite and folder in listing and layout.has_manifest(store.list(folder))
    else:
        newest = layout.newest_below(store, "", listing)
        if newest is not None:
            raise _beside(str(store), join_name(str(store), layout.step_folder(newest)))
        is_taken = not overwrite and layout.has_manifest(listing)
    if is_taken:
        raise layout.exists_error(join_name(str(store), folder))


def checkpoint_in_the_way(store: Store, folder: str, *, is_step: bool) -> str:
    """Returns the path of a committed checkpoint that forbids one in this folder; empty if there is none."""
    if is_step:
        root = folder.rpartition("/")[0]
        return join_name(str(store), root) if layout.has_manifest(store.list(root)) else ""
    newest = layout.newest_below(store, folder, store.list(folder))
    return "" if newest is None else join_name(str(store), folder, layout.step_folder(newest))


def refuse_beside(store: Store, folder: str, *, is_step: bool) -> None:
    """Raises CheckpointExistsError (exists) if there is a `checkpoint_in_the_way`."""
    if other := checkpoint_in_the_way(store, folder, is_step=is_step):
        raise _beside(join_name(str(store), folder), other)


def _beside(path: str, other: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"no checkpoint can be saved at {path}, because one is committed at {other}: a path is one checkpoint, or the "
        "root of steps, and load would not know which of them is meant. Nothing was committed, and overwrite=True does "
        "not change this: save to another path, with a step everywhere or nowhere, or move what stands there",
        kind="exists",
        path=path,
    )
