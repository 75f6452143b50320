"""Garbage under a root, by save id: data files, records, temporaries and unfinished uploads of saves and copies that
never committed. A save counts as dead by age alone, because it may run on any host.

Files of a committed checkpoint are never garbage, nor are files that no save of this library can have named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.deletion import METRICS_FOLDER, PIN_NAME, save_id_of_record, side_objects
from bytecheckpoint.storage.inventory import HasPendingUploads, PendingUpload, inventory_of
from bytecheckpoint.storage.layout import MANIFEST_NAME
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, join_name
from bytecheckpoint.storage.store import Store, delete_many

MIN_AGE_S = 24 * 3600.0
"""A save with an object that changed within this time counts as alive. Far more than a save takes, and than the clocks
of a storage's servers differ."""

DAMAGED = {"bad_manifest", "limits_exceeded"}
"""Kinds of errors about a manifest that no release can read."""

_MAY_NOT_LIST = {"permission", "unsupported"}
"""Kinds of errors of a store that may list objects, but not unfinished uploads."""

_SAVE_FILE = re.compile(r"\A([0-9a-f]{16})-(?:[0-9]{5,}|recovering)")
_TEMPORARY = re.compile(rf"\A{re.escape(TEMPORARY_PREFIX)}(?:[0-9a-f]{{16}}-|clock-|doctor-)")


@dataclass(slots=True)
class Leftover:
    """The garbage of one save in one folder of the root; or temporaries whose names have no save id."""

    folder: str
    """Folder of the checkpoint that it was to become; "" for the root."""
    save_id: str
    """Empty if unknown."""
    names: dict[str, int] = field(default_factory=dict)
    """Names of objects, from the root on, with their lengths in bytes."""
    uploads: list[PendingUpload] = field(default_factory=list)
    """Multipart uploads that were not finished."""
    newest_s: float | None = None
    """Time of the last change, by the clock of the storage; None unless known for all of it."""
    has_unknown_age: bool = False
    """True if the time of any of it is unknown."""

    @property
    def num_bytes(self) -> int:
        """Size of the objects. Uploads are not counted, because stores do not report their size."""
        return sum(self.names.values())

    def add(self, name: str, num_bytes: int, changed_s: float | None) -> None:
        self.names[name] = num_bytes
        self._note(changed_s)

    def add_upload(self, upload: PendingUpload) -> None:
        self.uploads.append(upload)
        self._note(upload.started_s)

    def _note(self, changed_s: float | None) -> None:
        self.has_unknown_age = self.has_unknown_age or changed_s is None
        known = [at for at in (self.newest_s, changed_s) if at is not None]
        self.newest_s = None if self.has_unknown_age else max(known)

    def is_dead(self, *, now_s: float, min_age_s: float) -> bool:
        """Returns True if none of these objects and uploads has changed for `min_age_s`; False if that is unknown."""
        return self.newest_s is not None and now_s - self.newest_s >= min_age_s


@dataclass(slots=True)
class Garbage:
    """The garbage of a root."""

    found: list[Leftover]
    """One item for each save and folder."""
    unreadable: list[str]
    """Folders whose manifest cannot be read: nothing in them counts as garbage."""
    not_looked_for: str
    """The reason why the store did not list unfinished uploads; empty if it did, or has none."""


def find_leftovers(store: Store, folder: str) -> Garbage:
    """Returns the files below a folder that saves have made and no committed checkpoint needs. Those of saves that
    still run are among them: use `Leftover.is_dead` before you remove any.

    Leaves out all unfinished uploads if it may not list them, and folders whose manifest cannot be read; the result
    says so. Other failures raise StorageError. Finished files beside a manifest count as needed if all are of one save.
    """
    objects = list(inventory_of(store, folder))
    by_folder: dict[str, dict[str, Leftover]] = {}

    def leftover_of(owner: tuple[str, str]) -> Leftover:
        return by_folder.setdefault(owner[0], {}).setdefault(owner[1], Leftover(*owner))

    for item in objects:
        owner = _owner_of(item.name)
        if owner is not None:
            leftover_of(owner).add(*item)
    uploads, not_looked_for = pending_uploads(store, folder)
    for upload in uploads:
        parent, _, last = upload.name.rpartition("/")
        owner = _owner_of(upload.name) or ((parent, "") if last == MANIFEST_NAME else None)
        if owner is not None:
            leftover_of(owner).add_upload(upload)

    manifests = {item.name.rpartition("/")[0] for item in objects if item.name.rpartition("/")[2] == MANIFEST_NAME}
    unreadable = []
    for parent in sorted(manifests & by_folder.keys()):
        beside = by_folder[parent]
        try:
            used = _used_among(store, parent, [save_id for save_id in beside if save_id])
        except (CheckpointCorruptError, UnsafeCheckpointError):
            unreadable.append(parent)
            del by_folder[parent]
            continue
        for save_id, leftover in beside.items():
            leftover.names = {name: size for name, size in leftover.names.items() if not used(save_id, name)}
    found = [item for items in by_folder.values() for item in items.values() if item.names or item.uploads]
    found.sort(key=lambda leftover: (leftover.folder, leftover.save_id))
    return Garbage(found, unreadable, not_looked_for)


def pending_uploads(store: Store, folder: str) -> tuple[Sequence[PendingUpload], str]:
    """Returns the unfinished uploads below a folder; or none, and why the store does not list them, which takes a
    permission of its own.
    """
    if not isinstance(store, HasPendingUploads):
        return [], ""
    try:
        return store.pending_uploads(folder), ""
    except StorageError as error:
        if error.kind not in _MAY_NOT_LIST:
            raise
        return [], error.message


def _used_among(store: Store, folder: str, save_ids: Sequence[str]) -> Callable[[str, str], bool]:
    """Returns a predicate of save id and object name: True if the object counts as needed by the committed checkpoint
    in the folder. `save_ids` are those of all files there.
    """
    # The files of a single save are taken for the checkpoint's own: reading the manifest of every step would cost too
    # much. Garbage beside a checkpoint whose files are all elsewhere, as a linked one's, is missed.
    if len(save_ids) < 2:
        return lambda save_id, name: bool(save_id) and not is_temporary(name)
    try:
        manifest = layout.read_manifest(store, folder)
    except CheckpointNotFoundError:  # deleted since it was listed: the next run finds the rest
        return lambda _, __: True
    used = _used_by(manifest, folder)
    return lambda _, name: used(name)


def _used_by(manifest: Manifest, folder: str) -> Callable[[str], bool]:
    files = {join_name(folder, file.name) for file in manifest.files}
    beside = (layout.telemetry_prefix(manifest.save_id), f"{METRICS_FOLDER}/{manifest.save_id}")
    prefixes = tuple(join_name(folder, prefix) for prefix in beside)
    return lambda name: name in files or name.startswith(prefixes)


def _owner_of(name: str) -> tuple[str, str] | None:
    """Returns the checkpoint's folder and the save id, "" if the name has none, of a temporary, also a probe's, or of
    another object that only saves make; None for any other.
    """
    folder, _, last = name.rpartition("/")
    for part in folder.split("/"):
        if _TEMPORARY.match(part):  # an object of a probe, such as `clock_of`
            return folder.partition(part)[0].rstrip("/"), ""
    is_unfinished = is_temporary(name)
    own = _TEMPORARY.sub("", last) if is_unfinished else last
    parent, _, kind = folder.rpartition("/")
    if kind in {layout.DATA_FOLDER, layout.TELEMETRY_FOLDER}:
        found = _SAVE_FILE.match(own)
        if found or is_unfinished:
            return parent, found.group(1) if found else ""
        return None
    if kind == METRICS_FOLDER and (save_id := save_id_of_record(last)):
        return parent, save_id
    return (folder, "") if is_unfinished else None


def is_temporary(name: str) -> bool:
    """Returns True if the last part of the name is a temporary object's. No checkpoint contains such an object, not
    even the one whose save could not remove it.
    """
    return bool(_TEMPORARY.match(name.rpartition("/")[2]))


def remove(store: Store, leftover: Leftover) -> int:
    """Deletes garbage, except objects that a checkpoint needs which has been committed since; returns the number of
    objects and uploads removed, or gone already. If the manifest cannot be read, raises CheckpointCorruptError,
    UnsafeCheckpointError or StorageError, and deletes nothing. If a deletion fails, raises StorageError; others may
    have succeeded.
    """
    names = list(leftover.names)
    if leftover.save_id:  # Hazard: a slow save, or a recovery, may just have committed.
        with suppress(CheckpointNotFoundError):
            used = _used_by(layout.read_manifest(store, leftover.folder), leftover.folder)
            names = [name for name in names if not used(name)]
    delete_many(store, names)
    if leftover.uploads and isinstance(store, HasPendingUploads):
        for upload in leftover.uploads:
            store.abort_upload(upload)
    return len(names) + len(leftover.uploads)


def delete_damaged(store: Store, folder: str, *, now_s: float) -> tuple[list[Leftover], list[Leftover]]:
    """Deletes a checkpoint whose manifest cannot be read: pin, records and leases, the manifest, then what dead saves
    have left in its folder. Nothing tells which files were its own, so those of a save that may still run stay.

    Returns what was deleted, and what stays, for `bcp gc`. Raises CheckpointExistsError (exists), and deletes nothing,
    if the manifest can be read now, and what the store raises.
    """
    names = [join_name(folder, name) for name in (PIN_NAME, *side_objects(store, folder))]
    _refuse_replaced(store, folder)
    # Hazard: a later checkpoint at this place must not inherit the pin, and `bcp gc` does not find it.
    delete_many(store, names)
    store.delete(join_name(folder, MANIFEST_NAME))
    found = [item for item in find_leftovers(store, folder).found if item.folder == folder]
    is_dead = [item.is_dead(now_s=now_s, min_age_s=MIN_AGE_S) for item in found]
    deleted = list(compress(found, is_dead))
    for item in deleted:
        remove(store, item)
    return deleted, [item for item, is_gone in zip(found, is_dead, strict=True) if not is_gone]


def _refuse_replaced(store: Store, folder: str) -> None:
    """Raises CheckpointExistsError if a save has committed a checkpoint where a damaged one was."""
    try:
        layout.read_manifest(store, folder)
    except (CheckpointCorruptError, UnsafeCheckpointError) as error:
        if error.kind not in DAMAGED:
            raise
    else:
        path = join_name(str(store), folder)
        what = f"{path} was damaged, and a save has committed it anew since; nothing was deleted: look at it first"
        raise CheckpointExistsError(what, kind="exists", path=path)


def sweep(store: Store, folder: str, save_id: str) -> None:
    """Removes the garbage of abandoned saves from the folder of a checkpoint just committed, as far as the store
    allows: no CheckpointError is raised. `save_id` is the save that made the checkpoint; the newest of its data files
    gives the present time of the storage's clock, and without one nothing is removed.
    """
    with suppress(CheckpointError, UserWarning):  # under `python -W error` a folder that may not be listed raises
        for leftover in _dead_in(store, folder, save_id):
            remove(store, leftover)


def _dead_in(store: Store, folder: str, save_id: str) -> list[Leftover]:
    """Returns the garbage of dead saves in a folder. The time of the newest data file of `save_id` is taken as now. If
    the store gives none, returns an empty list.
    """
    objects = list(inventory_of(store, folder))
    own = join_name(folder, layout.DATA_FOLDER, f"{save_id}-")
    times = (item.modified_s for item in objects if item.name.startswith(own))
    now_s = max((at for at in times if at is not None), default=None)
    owners = (_owner_of(item.name) for item in objects)
    if now_s is None or all(owner is None or owner[1] == save_id for owner in owners):
        return []
    found = find_leftovers(store, folder).found
    return [item for item in found if item.folder == folder and item.is_dead(now_s=now_s, min_age_s=MIN_AGE_S)]
