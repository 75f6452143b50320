"""Lists the checkpoints of a path, on three levels: the path, the folders in it, and the folders in those of them that
are no checkpoints. Reads manifests, and the small objects beside them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.formats.detect import find_file, find_folder
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, outline_of
from bytecheckpoint.info import OWN_FORMAT, describe_checkpoint
from bytecheckpoint.manager import step_records
from bytecheckpoint.manifest.validation import UNSAFE_NAME
from bytecheckpoint.runtime.gc_pause import gc_paused
from bytecheckpoint.runtime.threads import map_jobs, map_looks
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.deletion import LEASES_FOLDER, METRICS_FOLDER, PIN_NAME
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, list_many

_LOOKS_IN_FLIGHT = 8
MAX_RUN_FOLDERS = 10_000
"""Largest number of folders within runs that are listed, in all."""
_FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files that may be a checkpoint of another format; their first bytes decide."""
_DATA_FILE = re.compile(r"\A[0-9a-f]{16}-[0-9]{5,}-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A folder or file that is a checkpoint, or a folder that a save has not finished."""

    folder: str
    """Path inside the root, of a folder or file; "" is the root itself."""
    path: str
    run: str = ""
    """Folder of the root that holds it, if that is not a checkpoint itself."""
    step: int | None
    committed: bool
    num_bytes: int
    """Bytes of the data files: as the manifest says, or without one, as they are. 0 if there is a problem."""
    num_tensors: int | None = None
    world_size: int | None = None
    created_at: datetime | None = None
    save_id: str | None = None
    format: str = OWN_FORMAT
    """Format of the program that wrote it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_pinned: bool = False
    leased_until: datetime | None = None
    """End of the longest lease; None without one, or if it has ended by the clock of this host."""
    problem: str | None = None
    """Error of reading the manifest."""
    is_refused: bool = False
    """True if the problem is no damage: a file of another program has values that are never loaded."""

    @property
    def is_damaged(self) -> bool:
        return self.problem is not None and not self.is_refused

    @property
    def state(self) -> str:
        """The first that holds of `damaged`, `refused`, `not committed`, `pinned` and `leased`; else `committed`, or
        the format of another program.
        """
        if self.problem:
            return "damaged" if self.is_damaged else "refused"
        if not self.committed:
            return "not committed"
        if self.is_pinned or self.leased_until:
            return "pinned" if self.is_pinned else "leased"
        return "committed" if self.format == OWN_FORMAT else self.format

    @property
    def name(self) -> str:
        """Path within its run, or within the root; "" for the root itself."""
        return self.folder.removeprefix(f"{self.run}/") if self.run else self.folder


class CheckpointList(NamedTuple):
    """Checkpoints under a root."""

    checkpoints: Sequence[ListedCheckpoint]
    """The root itself, its steps, its other folders and files; then those of each run below it."""
    not_listed: Sequence[str]
    """Folders of the root, and folders and files in its runs, that were not listed: there are too many, the storage
    does not permit it, or no store of the root reads them, as a link that leads out of the root.
    """


class _ListedFolder(NamedTuple):
    """A folder, and its checkpoint, if it is one."""

    folder: str
    checkpoint: ListedCheckpoint | None
    entries: Mapping[str, int | None] | None
    """Names and sizes in it; None if the storage does not permit a listing, or the store does not read such a name."""


def list_checkpoints(store: Store) -> CheckpointList:
    """Lists the root, each folder in it, and each folder in a folder that is neither a checkpoint nor a step; and files
    that are checkpoints of other programs, in a root that is none and in such folders.

    Raises CheckpointNotFoundError where the root is a file, StorageError where it cannot be listed.
    """
    with gc_paused():  # a folder of ten thousand steps becomes a million objects without a cycle
        return _list(store)


def _list(store: Store) -> CheckpointList:
    entries = store.list("")
    root = _ListedFolder("", _checkpoint_in(store, "", entries), entries)
    listed_folders = _list_folders(store, _folders(entries))
    runs, skipped = _runs_to_list([listed for listed in listed_folders if not listed.checkpoint])
    run_folders = [join_name(run.folder, name) for run in runs for name in _folders(run.entries or {})]
    in_run_folders = _list_folders(store, run_folders)
    run_checkpoints = [listed.checkpoint for listed in in_run_folders]
    skipped += [listed.folder for listed in in_run_folders if listed.entries is None]
    plain_root = [root] if root.checkpoint is None else []
    files = [(listed.folder, *file) for listed in (*plain_root, *runs) for file in _files(listed.entries or {})]
    file_checkpoints = map_jobs(lambda file: _checkpoint_in_file(store, *file), files, num_threads=_LOOKS_IN_FLIGHT)
    root_checkpoints = [root.checkpoint, *(listed.checkpoint for listed in listed_folders)]
    in_runs = [
        replace(item, run=item.folder.rpartition("/")[0]) for item in (*run_checkpoints, *file_checkpoints) if item
    ]
    found = [*filter(None, root_checkpoints), *in_runs]
    found.sort(key=lambda item: (item.run, item.folder != "", item.step is None, item.step or 0, item.folder))
    return CheckpointList(found, skipped)


def _folders(entries: Mapping[str, int | None]) -> list[str]:
    return sorted(name for name, size in entries.items() if size is None and name != layout.DATA_FOLDER)


def _files(entries: Mapping[str, int | None]) -> list[tuple[str, int]]:
    """Returns names and bytes of files that may be checkpoints."""
    return [(name, size) for name, size in entries.items() if size is not None and name.endswith(_FILE_SUFFIXES)]


def _runs_to_list(listed_folders: Sequence[_ListedFolder]) -> tuple[list[_ListedFolder], list[str]]:
    """Returns the folders to list one level further, and the names of those skipped: that could not be listed, or
    that would exceed MAX_RUN_FOLDERS folders in all.
    """
    runs: list[_ListedFolder] = []
    skipped: list[str] = []
    num_folders = 0
    for listed in listed_folders:
        count = len(_folders(listed.entries or {}))
        if listed.entries is None or num_folders + count > MAX_RUN_FOLDERS:
            skipped.append(listed.folder)
        else:
            runs.append(listed)
            num_folders += count
    return runs, skipped


def _list_folders(store: Store, folders: Sequence[str]) -> list[_ListedFolder]:
    readable = [folder for folder in folders if not UNSAFE_NAME.search(folder)]
    unread = [_ListedFolder(folder, None, None) for folder in folders if UNSAFE_NAME.search(folder)]
    folder_entries = zip(readable, list_many(store, readable), strict=True)
    return [*map_looks(lambda item: _list_folder(store, *item), folder_entries, num_threads=_LOOKS_IN_FLIGHT), *unread]


def _list_folder(store: Store, folder: str, entries: Mapping[str, int | None] | None) -> _ListedFolder:
    try:
        entries = store.list(folder) if entries is None else entries
        return _ListedFolder(folder, _checkpoint_in(store, folder, entries), entries)
    except (StorageError, UnsafeCheckpointError) as error:
        if error.kind not in {"permission", "path_escape"}:
            raise
        return _ListedFolder(folder, None, None)


def _checkpoint_in(store: Store, folder: str, entries: Mapping[str, int | None]) -> ListedCheckpoint | None:
    """Returns the checkpoint in a folder, also one that did not finish; None for any other folder."""
    step, is_own = layout.parse_step(folder.rpartition("/")[2]), layout.has_manifest(entries)
    foreign = None if is_own else find_folder(store, folder, entries)
    if is_own or foreign:
        return read_checkpoint(FoundCheckpoint(store, folder, foreign), step, entries)
    data = store.list(join_name(folder, layout.DATA_FOLDER)) if layout.DATA_FOLDER in entries else {}
    if step is None and not any(map(_DATA_FILE.match, data)):
        return None
    path, num_bytes = join_name(str(store), folder), sum(size or 0 for size in data.values())
    return ListedCheckpoint(folder=folder, path=path, step=step, committed=False, num_bytes=num_bytes)


def _checkpoint_in_file(store: Store, folder: str, name: str, num_bytes: int) -> ListedCheckpoint | None:
    """Returns the checkpoint of another format that a file is; None for any other file."""
    try:
        place = find_file(store, folder, name, num_bytes)
    except (CheckpointNotFoundError, CheckpointCorruptError):  # of no format that is known, or empty
        return None
    except UnsafeCheckpointError as error:  # a name with ':', or a link that leads out of the root
        path = join_name(str(store), folder, name)
        item_format = "safetensors" if name.endswith(".safetensors") else "torch.save"
        return ListedCheckpoint(
            folder=join_name(folder, name),
            path=path,
            step=None,
            committed=True,
            num_bytes=num_bytes,
            format=item_format,
            problem=f"{path} was not looked into: {error.message.removeprefix(f'{path}: ')}",
            is_refused=True,
        )
    item = read_checkpoint(FoundCheckpoint(store, folder, place), None)
    return item and replace(item, folder=join_name(folder, name))


def read_checkpoint(
    found: FoundCheckpoint, step: int | None, entries: Mapping[str, int | None] | None = None
) -> ListedCheckpoint | None:
    """Describes a checkpoint by its manifest, and by the small objects beside it where its folder has such entries;
    None if it was deleted since it was found. The error of a damaged or refused manifest becomes its `problem`, and so
    does that of a folder of another format that has lost files.
    """
    entries = entries or {}
    item = ListedCheckpoint(
        folder=found.folder,
        path=found.path,
        step=step,
        committed=True,
        num_bytes=0,
        format=found.foreign.format if found.foreign else OWN_FORMAT,
        is_pinned=found.foreign is None and PIN_NAME in entries,
    )
    try:
        info = describe_checkpoint(outline_of(found), path=found.path)
    except (
        CheckpointCorruptError,
        CheckpointMismatchError,
        CheckpointNotFoundError,
        UnsafeCheckpointError,
    ) as error:
        is_refused = bool(found.foreign and found.foreign.file) and isinstance(error, UnsafeCheckpointError)
        if isinstance(error, CheckpointNotFoundError) and (found.foreign is None or found.foreign.file):
            return None
        return replace(item, problem=error.message, is_refused=is_refused)
    metrics = {}
    if found.foreign is None:
        has_records = METRICS_FOLDER in entries
        metrics = step_records.metrics_of(found.store, found.folder, info, has_records=has_records)
    return replace(
        item,
        step=info.step if step is None else step,
        num_bytes=info.num_bytes,
        num_tensors=info.num_tensors,
        world_size=info.world_size,
        created_at=info.created_at,
        save_id=info.save_id,
        format=info.format,
        metrics=metrics,
        leased_until=_lease_end(found.store, found.folder) if LEASES_FOLDER in entries else None,
    )


def read_sole(found: FoundCheckpoint) -> ListedCheckpoint:
    """Describes a checkpoint that stands alone. Raises CheckpointNotFoundError (not_found) if it was deleted since."""
    item = read_checkpoint(found, None)
    if item is None:
        what = f"{found.path} was there and is gone, or a file of it is"
        raise CheckpointNotFoundError(what, kind="not_found", path=found.path)
    return item


def _lease_end(store: Store, folder: str) -> datetime | None:
    end = datetime.fromtimestamp(step_records.leased_until(store, folder), UTC)
    return end if end > datetime.now(UTC) else None
