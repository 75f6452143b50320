"""Adds up the bytes of checkpoints for `bcp du`: by checkpoint, by entry of the state, and those that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from bytecheckpoint.errors import CheckpointNotFoundError, StorageError, UnsafeCheckpointError
from bytecheckpoint.formats.detect import find_file, find_folder
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint, manifest_of
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.manifest.records import DataFile
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.deletion import LEASES_FOLDER, METRICS_FOLDER
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

from ..analysis.checkpoint_list import ListedCheckpoint
from ..analysis.summary import ManifestSummary

_LOOKS_IN_FLIGHT = 8
_LISTINGS_KEPT = 64
_FOLDERS = (layout.DATA_FOLDER, layout.TELEMETRY_FOLDER, METRICS_FOLDER, LEASES_FOLDER)
"""Folders of a checkpoint. They hold files only."""
_ListFolder = Callable[[str], Mapping[str, int | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySpace:
    """A top-level entry of the state, of one checkpoint or summed over several."""

    name: str
    num_bytes: int
    """Bytes of its tensors, before compression."""
    tied_num_bytes: int
    """Bytes that further names of its tied tensors would take if they were stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpace:
    """A checkpoint, and the bytes that it takes."""

    path: str
    folder: str
    step: int | None
    committed: bool
    num_bytes: int
    """Bytes of the data files that it reads and that lie in its own folder, as far as they are there; of all there if
    it is not committed. 0 if the manifest cannot be read."""
    shared_num_bytes: int
    """Bytes of data files that it reads and that lie elsewhere: a link to another checkpoint."""
    other_num_bytes: int
    """Bytes of all other files in its folder and in those that saves and the manager make there: manifest, telemetry,
    marks, leftovers of abandoned saves; data files too if the manifest cannot be read. For another format, 0, but for
    one that cannot be read, the bytes of its file, or of what is left in its folder."""
    entries: Sequence[EntrySpace]
    """Empty if it is not committed, or the manifest cannot be read."""
    problem: str | None
    """Error of reading the manifest, or of listing the folder, whose other files then count as 0."""
    is_refused: bool
    """True if the problem is no damage, as in `ListedCheckpoint`."""

    @property
    def stored_num_bytes(self) -> int:
        return self.num_bytes + self.other_num_bytes


def spaces_of(store: Store, listed: Sequence[ListedCheckpoint]) -> list[CheckpointSpace]:
    """Returns the space of each of the checkpoints that `list_checkpoints` has found in the store, without those that
    were deleted meanwhile. Raises StorageError for a store that cannot be listed.
    """
    # One folder may have thousands of files of another format; all folders of a run may have millions of files.
    list_folder = lru_cache(_LISTINGS_KEPT)(store.list)

    def space(item: ListedCheckpoint) -> CheckpointSpace | None:
        with suppress(CheckpointNotFoundError):
            return space_of(_found(store, item, list_folder), item, list_folder)
        return None

    return [found for found in map_jobs(space, listed, num_threads=_LOOKS_IN_FLIGHT) if found is not None]


def space_of(found: FoundCheckpoint, item: ListedCheckpoint, list_folder: _ListFolder) -> CheckpointSpace:
    """Returns the space of one checkpoint; `list_folder` returns the entries of a folder in its store. Raises
    CheckpointNotFoundError if it was deleted meanwhile, and StorageError.
    """
    file_bytes, linked_bytes, entries, own_files = 0, 0, list[EntrySpace](), list[DataFile]()
    if item.committed and not item.problem:
        manifest = manifest_of(found)
        num_bytes = sum(file.byte_length for file in manifest.files)
        file_bytes, linked_bytes = (0, num_bytes) if manifest.linked_to else (num_bytes, 0)
        own_files = [] if found.foreign or manifest.linked_to else [*manifest.files]
        entries = _entries(ManifestSummary(manifest))
    elif not item.committed:
        file_bytes = item.num_bytes
    other_bytes, problem = 0, item.problem
    try:
        if own_files:
            file_bytes = _bytes_present(own_files, found.folder, list_folder)
        if _owns_folder(found, item, list_folder):
            other_bytes = max(_bytes_below(item.folder, list_folder) - file_bytes, 0)
        elif item.problem:
            folder, name = (found.folder, found.foreign.file) if found.foreign else item.folder.rpartition("/")[::2]
            other_bytes = list_folder(folder).get(name) or 0
    except (StorageError, UnsafeCheckpointError) as error:
        if error.kind not in {"permission", "path_escape"}:
            raise
        problem = error.message
    return CheckpointSpace(
        path=item.path,
        folder=item.folder,
        step=item.step,
        committed=item.committed,
        num_bytes=file_bytes,
        shared_num_bytes=linked_bytes,
        other_num_bytes=other_bytes,
        entries=entries,
        problem=problem,
        is_refused=item.is_refused,
    )


def _found(store: Store, item: ListedCheckpoint, list_folder: _ListFolder) -> FoundCheckpoint:
    if item.format == OWN_FORMAT or item.problem:  # of one that cannot be read, nothing but its folder is looked at
        return FoundCheckpoint(store, item.folder, None)
    folder, _, name = item.folder.rpartition("/")
    size = list_folder(folder).get(name) if name else None
    if size is not None:
        return FoundCheckpoint(store, folder, find_file(store, folder, name, size))
    entries = list_folder(item.folder)
    foreign = None if layout.has_manifest(entries) else find_folder(store, item.folder, entries)
    return FoundCheckpoint(store, item.folder, foreign)


def _owns_folder(found: FoundCheckpoint, item: ListedCheckpoint, list_folder: _ListFolder) -> bool:
    """Returns True for a checkpoint of this library, also a link to one of another format, and for a folder of another
    format that cannot be read.
    """
    if item.format == OWN_FORMAT or not item.problem:
        return found.foreign is None
    if found.foreign is not None:
        return not found.foreign.file
    folder, _, name = item.folder.rpartition("/")
    return not name or list_folder(folder).get(name) is None


def _bytes_present(files: Sequence[DataFile], folder: str, list_folder: _ListFolder) -> int:
    """Returns the bytes of data files that are in a checkpoint's folder: one may be gone, or cut short."""
    held = list_folder(join_name(folder, layout.DATA_FOLDER)) if layout.DATA_FOLDER in list_folder(folder) else {}
    return sum(min(file.byte_length, held.get(file.name.rpartition("/")[2]) or 0) for file in files)


def _bytes_below(folder: str, list_folder: _ListFolder) -> int:
    """Returns the bytes of the files in a checkpoint's folder, and in the folders that saves and the manager make
    there. Other folders in it are not counted, because they may hold further checkpoints.
    """
    entries = list_folder(folder)
    listings = (list_folder(join_name(folder, name)) for name in _FOLDERS if name in entries and entries[name] is None)
    return sum(size or 0 for listing in (entries, *listings) for size in listing.values())


def _entries(summary: ManifestSummary) -> list[EntrySpace]:
    tied: dict[str, int] = {}
    for tensor in summary.tensors:
        if tensor.alias_of:
            name = tensor.fqn.split(".", 1)[0]
            tied[name] = tied.get(name, 0) + tensor._replace(alias_of=None).num_bytes
    totals = {total.name: total.num_bytes for total in summary.entries}
    return [
        EntrySpace(name=name, num_bytes=totals.get(name, 0), tied_num_bytes=tied.get(name, 0))
        for name in dict.fromkeys([*totals, *tied])
    ]


def sum_entries(spaces: Sequence[CheckpointSpace]) -> list[EntrySpace]:
    """Returns each entry, summed over checkpoints, the largest first."""
    sums: dict[str, list[int]] = {}
    for space in spaces:
        for entry in space.entries:
            total = sums.setdefault(entry.name, [0, 0])
            total[0] += entry.num_bytes
            total[1] += entry.tied_num_bytes
    rows = [EntrySpace(name=name, num_bytes=own, tied_num_bytes=tied) for name, (own, tied) in sums.items()]
    return sorted(rows, key=lambda entry: -entry.num_bytes)
