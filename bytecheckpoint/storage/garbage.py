"""What saves that never committed have left under a root, by save id: data files, temporaries, unfinished uploads. It
tells the dead from the living by age alone, because a save may run on any host.

What a committed checkpoint is made of is never a leftover, nor is anything that no save of this library names so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.inventory import HasPendingUploads, StoredObject, inventory_of
from bytecheckpoint.storage.layout import MANIFEST_NAME
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, join_name
from bytecheckpoint.storage.store import Store

MIN_AGE_S = 24 * 3600.0
"""What has changed within this time is taken for the work of a living save. Far more than a save takes, and than clocks
of a storage's servers are apart."""

_MAY_NOT_LIST = {"permission", "unsupported"}
"""Errors of a store that would tell of objects, but not of unfinished uploads."""

_OF_A_SAVE = re.compile(r"\A([0-9a-f]{16})-(?:[0-9]{5,}|recovering)")
_TEMPORARY = re.compile(rf"\A{re.escape(TEMPORARY_PREFIX)}(?:[0-9a-f]{{16}}-|clock-|doctor-)")


@dataclass(slots=True)
class GarbageObject:
    """What one save has left in one folder of the root; or temporaries whose names do not tell of which save."""

    folder: str
    """Of the checkpoint that it was to become; "" for the root."""
    save_id: str
    """Empty where it is not known."""
    names: dict[str, int] = field(default_factory=dict)
    """Of objects, from the root on, with their lengths in bytes."""
    uploads: list[Any] = field(default_factory=list)
    """Multipart uploads that were not finished."""
    newest_s: float | None = None
    """When any of it last changed, by the clock of the storage; None where that is not known of all of it."""
    has_unknown_age: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the objects; what an upload holds, a store does not say."""
        return sum(self.names.values())

    def add(self, name: str, num_bytes: int, changed_s: float | None) -> None:
        self.names[name] = num_bytes
        self._note(changed_s)

    def add_upload(self, upload: Any) -> None:
        self.uploads.append(upload)
        self._note(upload.started_s)

    def _note(self, changed_s: float | None) -> None:
        self.has_unknown_age = self.has_unknown_age or changed_s is None
        known = [at for at in (self.newest_s, changed_s) if at is not None]
        self.newest_s = None if self.has_unknown_age else max(known)

    def is_dead(self, *, now_s: float, min_age_s: float) -> bool:
        """Whether nothing of it has changed for so long; never where that is not known."""
        return self.newest_s is not None and now_s - self.newest_s >= min_age_s


@dataclass(slots=True)
class Garbage:
    """All of a root."""

    found: list[GarbageObject]
    unreadable: list[str]
    """Folders whose manifest cannot be read: nothing in them is looked at."""
    num_committed: int
    not_looked_for: str
    """Why the store did not tell of unfinished uploads; empty where it did, or has none."""


def find_leftovers(store: Store, folder: str) -> Garbage:
    """Everything below a folder that belongs to no committed checkpoint. Raises StorageError, but not where only
    unfinished uploads may not be listed.
    """
    objects = list(inventory_of(store, folder))
    groups: dict[tuple[str, str], GarbageObject] = {}
    for item in objects:
        where = _place_of(item.name)
        if where is not None:
            groups.setdefault(where, GarbageObject(*where)).add(*item)
    uploads, not_looked_for = _pending_uploads(store, folder)
    for upload in uploads:
        where = _place_of(upload.name) or _manifest_place(upload.name)
        if where is not None:
            groups.setdefault(where, GarbageObject(*where)).add_upload(upload)

    manifests = {item.name.rpartition("/")[0] for item in objects if item.name.rpartition("/")[2] == MANIFEST_NAME}
    unreadable = []
    for parent in sorted(manifests):
        of_folder = {where: leftover for where, leftover in groups.items() if where[0] == parent}
        try:
            used = _used_among(store, parent, [save_id for _, save_id in of_folder if save_id])
        except (CheckpointCorruptError, UnsafeCheckpointError):
            unreadable.append(parent)
            groups = {where: leftover for where, leftover in groups.items() if where[0] != parent}
            continue
        for where, leftover in of_folder.items():
            leftover.names = {name: size for name, size in leftover.names.items() if not used(where[1], name)}
    found = [leftover for leftover in groups.values() if leftover.names or leftover.uploads]
    found.sort(key=lambda leftover: (leftover.folder, leftover.save_id))
    return Garbage(found, unreadable, len(manifests) - len(unreadable), not_looked_for)


def _pending_uploads(store: Store, folder: str) -> tuple[Sequence[Any], str]:
    """The unfinished uploads, or none and why they cannot be known: to list them is a right of its own."""
    if not isinstance(store, HasPendingUploads):
        return [], ""
    try:
        return store.pending_uploads(folder), ""
    except StorageError as error:
        if error.kind not in _MAY_NOT_LIST:
            raise
        return [], error.message


def _used_among(store: Store, folder: str, save_ids: Sequence[str]) -> Callable[[str, str], bool]:
    """Tells of a save id and the name of an object whether the committed checkpoint in the folder needs it."""
    if len(save_ids) < 2:  # all that there is must be its own: no need to read the manifest
        return lambda save_id, name: bool(save_id) and not _is_temporary(name)
    try:
        manifest = layout.read_manifest(store, folder)
    except CheckpointNotFoundError:  # deleted since it was listed: the next run finds what is left of it
        return lambda _, __: True
    used = _used_by(manifest, folder)
    return lambda _, name: used(name)


def _used_now(store: Store, folder: str) -> Callable[[str], bool]:
    try:
        manifest = layout.read_manifest(store, folder)
    except CheckpointNotFoundError:
        return lambda _: False
    return _used_by(manifest, folder)


def _used_by(manifest: Manifest, folder: str) -> Callable[[str], bool]:
    files = {join_name(folder, file.name) for file in manifest.files}
    telemetry = join_name(folder, layout.telemetry_prefix(manifest.save_id))
    return lambda name: name in files or name.startswith(telemetry)


def _place_of(name: str) -> tuple[str, str] | None:
    """The checkpoint's folder and the save id of an object that only saves make; None for all else."""
    folder, _, last = name.rpartition("/")
    for part in folder.split("/"):
        if _TEMPORARY.match(part):  # a probe's
            return folder.partition(part)[0].rstrip("/"), ""
    is_temporary = _is_temporary(name)
    own = _TEMPORARY.sub("", last) if is_temporary else last
    parent, _, kind = folder.rpartition("/")
    if kind in {layout.DATA_FOLDER, layout.TELEMETRY_FOLDER}:
        found = _OF_A_SAVE.match(own)
        if found or is_temporary:
            return parent, found.group(1) if found else ""
        return None
    return (folder, "") if is_temporary else None


def _is_temporary(name: str) -> bool:
    """Told by its last part; no checkpoint is made of such, not even the one whose save could not remove it."""
    return bool(_TEMPORARY.match(name.rpartition("/")[2]))


def _manifest_place(name: str) -> tuple[str, str] | None:
    folder, _, last = name.rpartition("/")
    return (folder, "") if last == MANIFEST_NAME else None


def remove(store: Store, leftover: GarbageObject) -> int:
    """Deletes a leftover, but for what has become a part of a committed checkpoint since it was found; returns how many
    objects and uploads are gone. Raises StorageError, and CheckpointCorruptError where a manifest cannot be read; then
    nothing is deleted.
    """
    # Hazard: a slow save, or a recovery, may just have committed.
    used = _used_now(store, leftover.folder) if leftover.save_id else lambda _: False
    names = [name for name in leftover.names if not used(name)]
    for name in names:
        store.delete(name)
    if leftover.uploads and isinstance(store, HasPendingUploads):
        for upload in leftover.uploads:
            store.abort_upload(upload)
    return len(names) + len(leftover.uploads)


def sweep(store: Store, folder: str, save_id: str) -> None:
    """After a commit: removes from the folder of the checkpoint what dead saves have left there, as far as the store
    lets it. The files of the save itself tell what the storage's clock shows.
    """
    with suppress(CheckpointError):
        for leftover in _dead_in(store, folder, save_id):
            remove(store, leftover)


def _dead_in(store: Store, folder: str, save_id: str) -> list[GarbageObject]:
    objects = list(inventory_of(store, folder))
    now_s = _newest(objects, join_name(folder, layout.DATA_FOLDER), save_id)
    if now_s is None or not _has_others(objects, save_id):
        return []
    found = find_leftovers(store, folder).found
    return [item for item in found if item.folder == folder and item.is_dead(now_s=now_s, min_age_s=MIN_AGE_S)]


def _newest(objects: Iterable[StoredObject], data_folder: str, save_id: str) -> float | None:
    own = (item.modified_s for item in objects if item.name.startswith(f"{data_folder}/{save_id}-"))
    return max((at for at in own if at is not None), default=None)


def _has_others(objects: Iterable[StoredObject], save_id: str) -> bool:
    places = (_place_of(item.name) for item in objects)
    return any(where is not None and where[1] != save_id for where in places)
