"""Finds checkpoints under a root as they commit: new ones, and those that were replaced in place. A look makes as
many requests in a run of ten thousand steps as in one of ten, but for the pages of the root's listing; only `begin`
asks for every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointNotFoundError, StorageError, UnsafeCheckpointError
from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint
from bytecheckpoint.runtime.threads import map_looks
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

from ..analysis.checkpoint_list import ListedCheckpoint, read_checkpoint

_LOOKED_AT = 8
"""Number of the last checkpoints of `CommitWatch._seen` that each look compares with what they were, and of the others
that it compares in turn.
"""
_LOOKS_IN_FLIGHT = 8
_DIGEST_BYTES = 8
_GONE = b""


class NewCheckpoint(NamedTuple):
    """A checkpoint that was committed since the last look."""

    checkpoint: ListedCheckpoint
    is_replacement: bool
    """True if another one stood at its path."""


class CommitWatch:
    """The committed checkpoints of a store, as they were at the last look."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, bytes | None] = {}
        """Folders with how their manifest ends, None until that can be read: those that `begin` found, by step, and
        then those without one, such as `best`; after them those that `look` has yielded, in that order.
        """
        self._turn = 0
        """Index of the folder, among all but the last ones, at which the next look goes on."""

    @property
    def num_seen(self) -> int:
        return len(self._seen)

    def begin(self) -> None:
        """Marks the checkpoints that are there now as seen. Raises the errors of the store."""
        # Stores list in any order, and the last ones are compared at each look: those most likely to be replaced.
        folders = sorted(self._new_folders(), key=_step_or_last)
        # All are read once: one that is replaced before its turn comes would look as if it had always been so.
        ends = map_looks(self._end_if_readable, folders, num_threads=_LOOKS_IN_FLIGHT)
        self._seen = dict(zip(folders, ends, strict=True))

    def look(self) -> Iterator[NewCheckpoint]:
        """Yields the checkpoints that were committed since the last look, in the order of their commits, except those
        that are gone by now. Of the checkpoints seen before, a look compares the last 8 and 8 others, in turn: the
        replacement of any other comes with the look at which its turn comes.

        A checkpoint counts as seen when the next one is asked for. Raises the errors of the store; checkpoints not seen
        by then come with a later look.
        """
        ends = {folder: self._end_if_readable(folder) for folder in self._new_folders()}
        ends = {folder: end for folder, end in ends.items() if end is not None}  # the others: perhaps at a later look
        for folder in self._folders_to_compare():
            end, before = self._end_if_readable(folder), self._seen[folder]
            if end == _GONE:  # a checkpoint that is committed there later is a new one
                del self._seen[folder]
            elif end is None:
                continue
            elif before is None or before == end:
                self._seen[folder] = end
            else:
                ends[folder] = end
        for item in self._read([*ends]):
            yield NewCheckpoint(item, is_replacement=self._seen.get(item.folder) is not None)
            # Not before: what a caller failed to report must come again.
            self._seen.pop(item.folder, None)
            self._seen[item.folder] = ends[item.folder]

    def _folders_to_compare(self) -> list[str]:
        """Returns the last folders seen, and some of the others: after enough looks each had its turn."""
        folders = list(self._seen)
        old = folders[:-_LOOKED_AT]
        first = self._turn if self._turn < len(old) else 0
        self._turn = first + _LOOKED_AT
        return folders[-_LOOKED_AT:] + old[first : first + _LOOKED_AT]

    def _end_if_readable(self, folder: str) -> bytes | None:
        """Returns the checksum that the manifest in a folder ends with, `_GONE` if the folder has no manifest, None if
        it cannot be read now.
        """
        try:
            return self._end_of_manifest(folder)
        except CheckpointCorruptError:  # replaced by a shorter one since it was listed: a listing may stay old for long
            return None
        except (StorageError, UnsafeCheckpointError) as error:
            if error.kind not in {"permission", "path_escape"}:
                raise
            return None  # a checkpoint of somebody else beside the others

    def _end_of_manifest(self, folder: str) -> bytes:
        """Returns the last bytes of a manifest, its checksum; _GONE if there is none."""
        num_bytes = self._store.list(folder).get(layout.MANIFEST_NAME)
        if num_bytes is None:
            return _GONE
        end = bytearray(min(_DIGEST_BYTES, num_bytes))
        try:
            name = join_name(folder, layout.MANIFEST_NAME)
            self._store.read_into(name, num_bytes - len(end), memoryview(end))
        except CheckpointNotFoundError:
            return _GONE
        return bytes(end)

    def _read(self, folders: Sequence[str]) -> list[ListedCheckpoint]:
        listed = [read_checkpoint(FoundCheckpoint(self._store, folder, None), _step_of(folder)) for folder in folders]
        found = [item for item in listed if item is not None]
        # Manifests have whole seconds.
        return sorted(found, key=lambda item: (item.created_at.timestamp() if item.created_at else 0.0, item.step or 0))

    def _new_folders(self) -> list[str]:
        """Returns the folders of committed checkpoints that were not seen. No request is made for a seen folder,
        except the root.
        """
        return [folder for folder in self._committed_folders() if folder not in self._seen]

    def _committed_folders(self) -> Iterator[str]:
        """Yields the folders with a manifest: the root, even if seen; unseen folders in it; and unseen folders in those
        of them that hold neither a manifest nor data files.
        """
        for folder, entries in self._listings([""]):
            if layout.has_manifest(entries):
                yield folder
            for inner, inner_entries in self._listings(_folders(folder, entries)):
                if layout.has_manifest(inner_entries):
                    yield inner
                elif layout.DATA_FOLDER not in inner_entries:
                    deeper = self._listings(_folders(inner, inner_entries))
                    yield from (name for name, held in deeper if layout.has_manifest(held))

    def _listings(self, folders: Sequence[str]) -> Iterator[tuple[str, Mapping[str, int | None]]]:
        """Yields these folders with their entries; leaves out seen ones, except the root, and those that are gone or
        may not be listed.
        """
        for folder in folders:
            if folder in self._seen and folder:
                continue
            try:
                entries = self._store.list(folder)
            except CheckpointNotFoundError:  # it is gone by now, or a file
                continue
            except (StorageError, UnsafeCheckpointError) as error:
                if error.kind not in {"permission", "path_escape"} or not folder:
                    raise
                continue  # a folder of somebody else, as lost+found, a link out of the root, or a name with ':'
            yield folder, entries


def _step_of(folder: str) -> int | None:
    return layout.parse_step(folder.rpartition("/")[2])


def _step_or_last(folder: str) -> float:
    step = _step_of(folder)
    return math.inf if step is None else step


def _folders(folder: str, entries: Mapping[str, int | None]) -> list[str]:
    return [join_name(folder, name) for name, size in entries.items() if size is None]
