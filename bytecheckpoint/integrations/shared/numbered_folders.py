"""The checkpoints of a run in folders that a framework names by number, such as `step-1000`: which are committed, in
the order of their commits, and the deletion of the oldest in the background of rank 0.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from bytecheckpoint import api
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.retention import JOURNAL_FOLDER, delete_one, finish_deletions
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.open_store import expand_home, is_plain_path, open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_RECORD = "numbered_folder"
"""Key of the record in the metadata of a checkpoint."""
_FAILING_S = 30.0
"""Time that `wait` gives deletions that fail; those that have begun are finished by the next run."""
_NEVER_SAVED = -1


class FolderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a save, in the metadata of its checkpoint."""

    sequence: int
    """Rises with each save of the run, also where training goes back to an earlier step."""
    model_only: bool = False

    def as_metadata(self) -> dict[str, Any]:
        """Returns the metadata of a checkpoint."""
        return {_RECORD: msgspec.to_builtins(self)}


class NumberedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint of the run."""

    number: int
    path: str
    save_id: str
    record: FolderRecord


class NumberedFolders:
    """The folders of one run. One rank has it, which looks after them; methods may be called from any thread."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        prefix: str,
        *,
        below: str = "",
        storage_options: Mapping[str, Any] | None,
        on_deleted: Callable[[str], object] = bool,
        resumed_next: Callable[[], int | None] = lambda: None,
    ) -> None:
        """A checkpoint is at `root/<prefix><number>/<below>`. `on_deleted` is called with the path of one that is
        deleted, before its empty folders are removed. `resumed_next` returns the number that a restart would go on
        from, if others decide that: this one stays.
        """
        self._on_deleted = on_deleted
        self._resumed_next = resumed_next
        self.root = expand_home(os.fspath(root))
        self._prefix = prefix
        self._below = below
        self._storage_options = storage_options
        self._is_named = re.compile(rf"{re.escape(prefix)}([0-9]+)").fullmatch
        self._first_to_go: set[str] = set()
        """Save ids of checkpoints that training has left by going back to an earlier one."""
        self._next_sequence = 0
        self._num_kept = 0
        self._work = RetriedWork("bcp-retention", self._delete_old, what=f"the deletion of checkpoints in {self.root}")

    def path_of(self, number: int) -> str:
        """Returns the path or URL of a checkpoint."""
        return join_name(self.root, f"{self._prefix}{number}", self._below)

    def numbers(self) -> list[int]:
        """Returns the numbers of all folders with such a name, rising, whatever is in them."""
        names = open_store(self.root, storage_options=self._storage_options, writer_threads=1).list("")
        matches = (self._is_named(name) for name, num_bytes in names.items() if num_bytes is None)
        return sorted(int(match[1]) for match in matches if match is not None)

    def names_in(self, path: str) -> Mapping[str, int | None]:
        """Returns the names in one of the folders, and lengths of files."""
        return open_store(path, storage_options=self._storage_options, writer_threads=1).list("")

    def committed(self) -> list[NumberedFolder]:
        """Returns the checkpoints that are committed, those that are to go first at the start, else as committed.

        Raises the errors of `bytecheckpoint.open` for a damaged one: it could be the newest.
        """
        found = [folder for number in self.numbers() if (folder := self._read(number)) is not None]
        return sorted(
            found, key=lambda each: (each.save_id not in self._first_to_go, each.record.sequence, each.number)
        )

    def begin(self, *, resumed: str = "") -> None:
        """Finishes deletions that killed processes have begun, and looks at what is there. `resumed` is the save id of
        the checkpoint that training goes on from: those that were committed after it are the first to go.
        """
        found = self.committed()
        for number in set(self.numbers()) - {folder.number for folder in found}:
            store = self._store(number)
            if JOURNAL_FOLDER.partition("/")[0] in store.list(""):
                finish_deletions(store, now=time.time())
                self._remove_empty(number)
        sequences = {folder.save_id: folder.record.sequence for folder in found}
        self._next_sequence = max(sequences.values(), default=_NEVER_SAVED) + 1
        last = sequences.get(resumed, self._next_sequence)
        self._first_to_go = {save_id for save_id, sequence in sequences.items() if sequence > last}

    def record(self, *, model_only: bool = False) -> FolderRecord:
        """Returns the record for the next save."""
        record = FolderRecord(sequence=self._next_sequence, model_only=model_only)
        self._next_sequence += 1
        return record

    def keep_newest(self, handle: SaveHandle, num_kept: int) -> None:
        """Deletes all but so many committed checkpoints once this save is committed, in the background."""
        self._num_kept = num_kept

        def after(ended: SaveHandle) -> None:
            if ended._progress.error is None:  # not by the handle's methods: these note that the caller has seen it
                self._work.ask()

        if num_kept > 0:
            handle.add_done_callback(after)

    def delete_again(self) -> None:
        """Deletes, in the background, what has stayed because a restart would have gone on from it."""
        if self._num_kept > 0:
            self._work.ask()

    def close(self, hanging_s: float) -> None:
        """Does what `wait` does, and ends the thread."""
        self.wait(hanging_s)
        self._work.close()

    def wait(self, hanging_s: float) -> None:
        """Waits until what is due is deleted. Deletions that fail, or hang for so long, are named in a warning."""
        failure = self._work.wait(began=time.monotonic(), failing_s=min(_FAILING_S, hanging_s), hanging_s=hanging_s)
        if failure is not None:
            logger.warning("deletions in %s are not finished (%s): the next run finishes them", self.root, failure)

    def _delete_old(self) -> None:
        self.delete_oldest(self._num_kept)

    def delete_oldest(self, num_kept: int) -> None:
        """Deletes all but so many committed checkpoints now, at least 1. Those that are pinned or leased stay.

        Raises what the store raises, and for a damaged checkpoint the errors of `bytecheckpoint.open`.
        """
        old = self.committed()[:-num_kept]
        needed = self._resumed_next() if old else None
        for folder in old:
            if folder.number == needed:
                continue
            store = self._store(folder.number)
            now = clock_of(store) or time.time()
            why = delete_one(store, "", save_id=folder.save_id, now=now, force=False)
            self._work.note_progress()
            if why:
                logger.info("%s stays: %s", folder.path, why)
            else:
                self._remove_empty(folder.number)

    def _remove_empty(self, number: int) -> None:
        """Removes the local folders of a checkpoint that is gone, as far as they are empty."""
        if is_plain_path(self.root):
            path = self.path_of(number)
            self._on_deleted(path)
            with suppress(OSError):  # files of others are in it
                while path != self.root:
                    Path(path).rmdir()
                    path = str(Path(path).parent)

    def _store(self, number: int) -> Store:
        return open_store(self.path_of(number), storage_options=self._storage_options, writer_threads=1)

    def _read(self, number: int) -> NumberedFolder | None:
        store = self._store(number)
        if not layout.has_manifest(store.list("")):
            return None
        path = self.path_of(number)
        checkpoint = api.open(path, step=None, storage_options=self._storage_options)
        record = checkpoint.metadata.get(_RECORD)
        # Another program's checkpoint at this place counts as older than those of the run.
        known = msgspec.convert(record, FolderRecord) if record else FolderRecord(sequence=_NEVER_SAVED)
        return NumberedFolder(number=number, path=path, save_id=checkpoint.info.save_id, record=known)
