"""Finds the checkpoint that a path means, in this library's format or a foreign one, and its manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError, StorageError
from bytecheckpoint.formats.file_reader import damaged, with_path
from bytecheckpoint.manifest import Manifest, ManifestOutline, encode_manifest, read_outline
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import expand_home, is_plain_path, open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

if TYPE_CHECKING:
    from bytecheckpoint.formats.detect import ForeignPlace

_HUB_LEVELS = 2
"""A snapshot of the Hugging Face cache is `<model>/snapshots/<revision>`, of links into `<model>/blobs`."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint whose manifest was not read yet."""

    store: Store
    folder: str
    """Path inside the store."""
    foreign: ForeignPlace | None
    """None for a checkpoint of this library."""
    levels: int = 0
    """Levels from the path that was given up to the store's root: 0 for a folder, 1 for a file; 2 more in a snapshot of
    the Hugging Face cache."""

    @property
    def path(self) -> str:
        """Path for messages: of the folder, or of the file that is the checkpoint."""
        return join_name(str(self.store), self.folder, self.foreign.file if self.foreign else "")

    @property
    def manifest_path(self) -> str:
        """Path in errors about the manifest."""
        return self.path if self.foreign else join_name(self.path, layout.MANIFEST_NAME)


class Opening(NamedTuple):
    """Options for opening the stores in which a checkpoint is looked for."""

    storage_options: Mapping[str, object] | None
    timeout_s: float | None = None
    """Timeout as of `open_store`."""

    def store(self, path: str) -> Store:
        return open_store(path, storage_options=self.storage_options, writer_threads=1, timeout_s=self.timeout_s)


def open_above(path: str, levels: int, opening: Opening) -> Store:
    """Opens the store `levels` folders above a path: with `FoundCheckpoint.levels`, the store of that checkpoint."""
    path = from_root(path)
    for _ in range(levels):
        path = split_path(path)[0]
    return opening.store(path)


def find_checkpoint(path: str, step: int | Literal["latest"] | None, opening: Opening) -> FoundCheckpoint:
    """Returns the checkpoint at a path, or that of a step under it, as `layout.find_checkpoint` finds it; if there is
    none of this library, one of a foreign format.

    Raises CheckpointNotFoundError (not_found, not_committed), StorageError, and for a file what `find_file` raises.
    """
    path = from_root(path)
    store = opening.store(path)
    try:
        found_here = FoundCheckpoint(store, layout.find_checkpoint(store, step, location=str(store)), None)
        return _in_hub(found_here, path, opening)  # the files of a manifest in a snapshot may be links out of it
    except CheckpointNotFoundError as error:
        found = _find_foreign(path, store, step, opening, is_own=error.kind == "not_committed")
        if found is None:
            raise
        return found


def open_folder(path: str, opening: Opening) -> tuple[Store, str]:
    """Returns a store for the folder at a path, and the folder's path inside that store: "" unless the folder is a
    snapshot of the Hugging Face cache.
    """
    path = from_root(path)
    found = _in_hub(FoundCheckpoint(opening.store(path), "", None), path, opening)
    return found.store, found.folder


def _find_foreign(
    path: str, store: Store, step: int | Literal["latest"] | None, opening: Opening, *, is_own: bool
) -> FoundCheckpoint | None:
    """Returns the checkpoint of a foreign format at the path; None if there is none. Raises what `find_file` does for a
    file, and the error of `find_unfinished_error`; not the latter if the path `is_own`, a save of this library that
    did not finish.
    """
    # A checkpoint of this library does not wait for the readers of all other formats.
    from bytecheckpoint.formats.detect import find_file, find_folder, find_step, find_unfinished_error  # noqa: PLC0415

    try:
        listing = store.list("")
    except CheckpointNotFoundError:  # a file
        listing = {}
    if listing or isinstance(step, int):
        place = None if isinstance(step, int) else find_folder(store, "", listing)
        if place is None and step is not None:
            place = find_step(store, None if step == "latest" else step, listing)
        if place is not None:
            return _in_hub(FoundCheckpoint(store, place.folder, place), path, opening)
        error = None if is_own else find_unfinished_error(store, step, listing)
        if error is not None:
            raise error
        return None
    parent, name = split_path(path)
    if not name:
        return None
    above = opening.store(parent)
    num_bytes = _list_above(above).get(name)
    if num_bytes is None:
        return None
    found = _in_hub(FoundCheckpoint(above, "", None, levels=1), parent, opening)
    return found._replace(foreign=find_file(found.store, found.folder, name, num_bytes))


def _in_hub(found: FoundCheckpoint, path: str, opening: Opening) -> FoundCheckpoint:
    """Returns the same checkpoint; if its folder is a snapshot of the Hugging Face cache, with the folder of the model
    as root of the store, because the files of a snapshot are links to elsewhere in that folder.
    """
    above, revision = split_path(path)
    model, snapshots = split_path(above)
    if snapshots != "snapshots" or not revision or found.folder:
        return found
    store = opening.store(model)
    listing = _list_above(store)
    # A folder on a disk that may not be listed may still be entered, and then the links of the snapshot lead there.
    if "blobs" not in listing and (listing or not _list_above(store, "blobs")):
        return found
    folder = f"{snapshots}/{revision}"
    place = found.foreign and found.foreign._replace(folder=folder)
    return FoundCheckpoint(store, folder, place, levels=found.levels + _HUB_LEVELS)


def _list_above(above: Store, folder: str = "") -> Mapping[str, int | None]:
    """Returns the listing of a folder in a store above the path that was given; an empty one if it may not be listed,
    because a caller needs permission for the path alone.
    """
    try:
        return above.list(folder)
    except StorageError as error:
        if error.kind != "permission":
            raise
        return {}


def from_root(path: str) -> str:
    """Returns the path absolute, `~` expanded, so that folders above have names; URLs and the empty path as given."""
    path = expand_home(path)
    return os.path.abspath(path) if is_plain_path(path) else path  # noqa: PTH100 - as LocalStore does it: links stay


def split_path(path: str) -> tuple[str, str]:
    """Returns the folder of a path or URL, and its name in that folder; the root itself and "" for a root."""
    stripped = path.rstrip("/")
    if stripped.endswith(":") and path.startswith(f"{stripped}//"):  # a protocol alone
        return path, ""
    parent, separator, name = stripped.rpartition("/")
    if not separator:
        return ("." if stripped else "/"), stripped
    if parent.endswith(":/") or not name:  # what follows is a host or a bucket
        return stripped, ""
    return parent or "/", name


def manifest_bytes(found: FoundCheckpoint) -> bytes:
    """Returns the encoded manifest of a checkpoint, for one rank to send to all. Checks all of it for a foreign
    checkpoint, and nothing of it for a checkpoint of this library.

    Raises the errors of `layout.read_manifest_bytes`, or the CheckpointErrors of `detect.read_manifest`.
    """
    if found.foreign is None:
        return layout.read_manifest_bytes(found.store, found.folder)
    from bytecheckpoint.formats.detect import read_manifest  # noqa: PLC0415 - as in `_find_foreign`

    try:
        content = encode_manifest(read_manifest(found.store, found.foreign))
    except CheckpointSaveError as error:
        raise damaged(found.path, f"what it says of its tensors cannot be right: {error.__cause__}") from error
    except CheckpointError:
        raise
    except (ValueError, OverflowError, MemoryError) as error:
        raise damaged(found.path, f"it cannot be read: {type(error).__name__}: {error}") from error
    layout.parse_manifest(content, path=found.manifest_path, check_all=True)
    return content


def manifest_of(found: FoundCheckpoint) -> Manifest:
    """Returns the manifest, all of it checked. Raises the errors of `manifest_bytes` and `decode_manifest`."""
    return layout.parse_manifest(manifest_bytes(found), path=found.manifest_path, check_all=True)


def outline_of(found: FoundCheckpoint) -> ManifestOutline:
    """Returns the outline of a checkpoint, for lists of many. The manifest of a foreign one is checked, all of it."""
    content = manifest_bytes(found)
    try:
        return read_outline(content)
    except CheckpointError as error:
        raise with_path(error, found.manifest_path) from error
