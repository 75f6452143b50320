"""The checkpoints of a run in folders that a framework names by number, such as `step-1000`: which are committed, in
the order of their commits, and the deletion of old ones in the background of one rank.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from bytecheckpoint import api
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manager.after_commit.retried_work import RetriedWork
from bytecheckpoint.manager.retention import JOURNAL_FOLDER, delete_one, finish_deletions
from bytecheckpoint.saving.handle import SaveHandle, has_failed
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.deletion import LEASES_FOLDER, METRICS_FOLDER
from bytecheckpoint.storage.inventory import clock_of
from bytecheckpoint.storage.open_store import expand_home, is_plain_path, open_store
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_RECORD = "numbered_folder"
"""Key of the record in the metadata of a checkpoint."""
_JOURNALS = JOURNAL_FOLDER.partition("/")[0]
_OWN_FOLDERS = (layout.DATA_FOLDER, layout.TELEMETRY_FOLDER, METRICS_FOLDER, LEASES_FOLDER, JOURNAL_FOLDER, _JOURNALS)
_FAILING_S = 30.0
"""Time that `wait` gives deletions that fail; those that have begun are finished by the next run."""
_HANGING_S = 60.0
"""Longest wait for a deletion that makes no progress. One rank deletes, and others may wait for it in a collective."""
_DAMAGED = (CheckpointCorruptError, UnsafeCheckpointError)
_NEVER_SAVED = -1


class FolderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a save, in the metadata of its checkpoint."""

    sequence: int
    """Rises with each save of the run, also where training goes back to an earlier step."""
    model_only: bool = False

    def as_metadata(self) -> dict[str, Any]:
        return {_RECORD: msgspec.to_builtins(self)}


class NumberedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint of the run."""

    number: int
    path: str
    save_id: str
    record: FolderRecord


Choose = Callable[[], Iterable[NumberedFolder]]
"""Returns the checkpoints that are to be deleted. It is called in the background."""


class NumberedFolders:
    """The folders of one run. One rank has this object and manages them; methods may be called from any thread."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        prefix: str,
        *,
        below: str = "",
        width: int = 0,
        own_key: str = "",
        storage_options: Mapping[str, Any] | None,
        remove_beside: Callable[[str], object] | None = None,
    ) -> None:
        """A checkpoint is at `root/<prefix><number>/<below>`, its number with at least `width` digits.

        `remove_beside` is called with the local path of a checkpoint after it is deleted, before its empty folders are
        removed; it is not called for URLs. With `own_key`, records are in the metadata under that key, and checkpoints
        without a record do not belong to the run; without `own_key`, they count as older than those that have one.
        """
        self.root = expand_home(os.fspath(root))
        self._prefix, self._below, self._width, self._own_key = prefix, below, width, own_key
        self._storage_options = storage_options
        self._remove_beside = remove_beside
        self._is_named = re.compile(rf"{re.escape(prefix)}([0-9]+)").fullmatch
        self._first_to_go: set[str] = set()
        """Save ids of checkpoints that training has left by going back to an earlier one."""
        self._next_sequence = 0
        self.damaged: dict[int, CheckpointError] = {}
        """Errors of damaged checkpoints by number, as `committed` has found them last."""
        self._changed = threading.Condition()
        self._saving: list[int] = []
        """Numbers of saves that have not ended; of two saves at one number, each counts."""
        self._recorded: int | None = None
        """Number of the last `record`; None once its save was passed to `retire_after`."""
        self._num_saves = self._chosen = 0
        """Saves so far, and the number of the save that last chose what to delete."""
        self._num_awaited = 0
        """Saves whose end has not been noted here; a caller that waits for a save may go on earlier."""
        self._deleting: int | None = None
        self._unfinished: set[int] = set()
        """Numbers of deletions that have begun and did not end."""
        self._has_looked = True
        """False from `finish_begun` until the background has looked for deletions that killed processes have begun."""
        self._choose: Choose | None = None
        """The latest one, which each run in the background calls again."""
        self._work = RetriedWork("bcp-retention", self._delete_due, what=f"the deletion of checkpoints in {self.root}")
        self._pid = os.getpid()

    def path_of(self, number: int) -> str:
        return join_name(self.root, f"{self._prefix}{number:0{self._width}}", self._below)

    def numbers(self) -> list[int]:
        """Returns the numbers of all folders with such a name, in ascending order, whatever is in them. A name with
        other digits than `path_of` gives, such as `step-007` for `step-7`, does not count.
        """
        matches = (self._is_named(name) for name, num_bytes in self.names_in(self.root).items() if num_bytes is None)
        found = (match[1] for match in matches if match is not None)
        return sorted(int(digits) for digits in found if digits == f"{int(digits):0{self._width}}")

    def names_in(self, path: str) -> Mapping[str, int | None]:
        """Returns what is in the folder at `path`, by name: for a file its length in bytes, for a folder None. Empty if
        there is no such folder.
        """
        return self._store_at(path).list("")

    def _store_at(self, path: str) -> Store:
        return open_store(path, storage_options=self._storage_options, writer_threads=1)

    def committed(self, *, to_load: bool = False) -> list[NumberedFolder]:
        """Returns the committed checkpoints in the order in which they may be deleted: first those that training left
        behind when it went back to an earlier checkpoint, then the others, oldest save first. Leaves out damaged ones,
        with a warning, and links to another checkpoint: neither count, and neither are deleted.

        With `to_load`, raises the error of the damaged checkpoint with the highest number if all are damaged.
        """
        found = [folder for folder in map(self.find, self.numbers()) if folder is not None]
        if to_load and not found and self.damaged:
            raise self.damaged[max(self.damaged)]
        return sorted(
            _without_links(found, root=self.root),
            key=lambda each: (each.save_id not in self._first_to_go, each.record.sequence, each.number),
        )

    def read(self, number: int) -> NumberedFolder | None:
        """Returns the checkpoint with this number; None if no checkpoint of the run is committed in its folder. Raises
        the errors of `bytecheckpoint.open` for a damaged one, and for one that is deleted meanwhile.
        """
        path = self.path_of(number)
        if not layout.has_manifest(self.names_in(path)):
            return None
        checkpoint = api.open(path, step=None, storage_options=self._storage_options)
        record = checkpoint.metadata.get(self._own_key or _RECORD)
        if record is None and self._own_key:
            return None
        try:
            known = FolderRecord(sequence=_NEVER_SAVED) if record is None else msgspec.convert(record, FolderRecord)
        except msgspec.ValidationError:  # others have metadata under this key
            return None
        return NumberedFolder(number=number, path=path, save_id=checkpoint.info.save_id, record=known)

    def find(self, number: int) -> NumberedFolder | None:
        """Returns the checkpoint with this number; None if no checkpoint of the run is committed in its folder, and for
        a damaged one, which is logged as a warning and noted in `damaged`.
        """
        try:
            folder = self.read(number)
        except CheckpointNotFoundError:  # deleted meanwhile
            return None
        except _DAMAGED as error:
            if number not in self.damaged:
                logger.warning("%s is passed over, and stays as it is: %s", self.path_of(number), error.message)
            self.damaged[number] = error
            return None
        self.damaged.pop(number, None)
        return folder

    def begin(self, *, resumed: str = "") -> None:
        """Reads the records of the committed checkpoints, and calls `finish_begun`. `resumed` is the path or URL of the
        checkpoint that training goes on from: those that were saved after it are the first to be deleted. One that is
        not of this run, or empty text for a fresh start, changes nothing.
        """
        save_id = layout.committed_save_id(self._store_at(resumed), "") if resumed else ""
        sequences = {folder.save_id: folder.record.sequence for folder in self.committed()}
        self._next_sequence = max(sequences.values(), default=_NEVER_SAVED) + 1
        last = sequences.get(save_id, self._next_sequence)
        self._first_to_go = {save_id for save_id, sequence in sequences.items() if sequence > last}
        self.finish_begun()

    def finish_begun(self) -> None:
        """Finishes, in the background, the deletions that killed processes have begun."""
        self._has_looked = False
        self._ask()

    def record(self, number: int, *, model_only: bool = False) -> FolderRecord:
        """Returns the record for the next save, which is at this number. Until the save that is passed to
        `retire_after` has ended, no checkpoint at this number is deleted. If the save raises before it is passed, that
        ends with the next call of this method.

        Waits for a deletion that is under way at this number; raises StorageError (unavailable) if it takes over a
        minute.
        """
        with self._changed:
            self._saving.append(number)
            # Hazard: a deletion under way could delete the new manifest, taking it for the old one.
            if not self._changed.wait_for(lambda: self._deleting != number, _HANGING_S):
                self._saving.remove(number)
                raise StorageError(
                    f"the deletion of {showable_url(self.path_of(number))}, a checkpoint that training has left, has "
                    f"not ended within {_HANGING_S:g} s; nothing was written, and other checkpoints are as they were: "
                    "look at the storage, and save again",
                    kind="unavailable",
                )
            if self._recorded is not None:  # that save has raised: one thread makes the saves of a run
                self._saving.remove(self._recorded)
            self._recorded = number
        record = FolderRecord(sequence=self._next_sequence, model_only=model_only)
        self._next_sequence += 1
        return record

    def retire_after(self, handle: SaveHandle, number: int, choose: Choose | None) -> None:
        """Once the save at `number` is committed, deletes the checkpoints that `choose` returns, in the background. If
        the save failed, or with None, calls the latest earlier `choose` again. Pinned and leased checkpoints stay.
        """

        def after(ended: SaveHandle) -> None:
            with self._changed, suppress(ValueError):  # a caller need not have asked for a record
                self._saving.remove(number)
            is_newest = False
            if choose is not None and not has_failed(ended):
                with self._changed:
                    # Hazard: the end of a save may be noted after that of a later one, whose choice counts.
                    is_newest, self._chosen = place > self._chosen, max(place, self._chosen)
            if choose is not None and is_newest:
                self.retire(choose)
            else:
                self.retire_again()  # a deletion has skipped this folder while its save was not noted
            with self._changed:
                self._num_awaited -= 1
                self._changed.notify_all()

        with self._changed:
            self._recorded = None
            self._num_awaited += 1
            self._num_saves += 1
            place = self._num_saves
        handle.add_done_callback(after)

    def keep_newest(self, handle: SaveHandle, number: int, num_kept: int) -> None:
        """Calls `retire_after` so that all except the newest `num_kept` checkpoints are deleted; 0 keeps all."""
        self.retire_after(handle, number, (lambda: self.committed()[:-num_kept]) if num_kept > 0 else None)

    def retire(self, choose: Choose) -> None:
        """Deletes what `choose` returns, in the background, which may call it again and again until a later `choose`
        takes its place.
        """
        self._choose = choose
        self._ask()

    def retire_again(self) -> None:
        """Calls the latest `choose` again, in the background, and deletes what it returns: for callers that have
        changed what it depends on. Does nothing before the first `choose`.
        """
        if self._choose is not None:
            self._ask()

    def close(self, hanging_s: float) -> None:
        """Does what `wait` does, and ends the thread of the deletions. Called at the exit of the process unless the
        caller did so before.
        """
        atexit.unregister(self.close)
        self.wait(hanging_s)
        self._work.close()

    def wait(self, hanging_s: float) -> None:
        """Waits for the end of the saves, at most `hanging_s` seconds, and then of the deletions. Gives up, with a
        warning, if deletions make no progress for `hanging_s`, at most a minute, or still fail after half a minute.
        Returns at once in a forked child: saves and deletions go on in its parent.
        """
        if os.getpid() != self._pid:  # a thread of the parent may have held the lock when it forked
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._num_awaited, hanging_s)
        hanging_s = min(hanging_s, _HANGING_S)
        failure = self._work.wait(began=time.monotonic(), failing_s=min(_FAILING_S, hanging_s), hanging_s=hanging_s)
        if failure is not None:
            logger.warning("deletions in %s are not finished (%s): the next run finishes them", self.root, failure)

    def _ask(self) -> None:
        atexit.unregister(self.close)
        atexit.register(self.close, _HANGING_S)
        self._work.ask()

    def _delete_due(self) -> None:
        if not self._has_looked:
            self._unfinished.update(filter(self._is_half_deleted, self.numbers()))
            self._has_looked = True
        for number in sorted(self._unfinished):
            with self._deletion_of(number) as store:
                if store is not None:
                    finish_deletions(store, now=clock_of(store) or time.time())
        for folder in self._choose() if self._choose is not None else ():
            with self._deletion_of(folder.number) as store:
                if store is not None:
                    _delete(store, folder)
            self._work.note_progress()

    def _is_half_deleted(self, number: int) -> bool:
        listing = self.names_in(self.path_of(number))
        return _JOURNALS in listing and not layout.has_manifest(listing)

    @contextmanager
    def _deletion_of(self, number: int) -> Iterator[Store | None]:
        """Yields a store in the folder that is to be deleted; None if a save to this folder is under way. If the
        checkpoint is gone afterwards, removes from a local folder what the framework has written beside it. A deletion
        that raises is finished by the next attempt.
        """
        with self._changed:
            self._deleting = None if number in self._saving else number
        if self._deleting is None:
            yield None
            return
        try:
            self._unfinished.add(number)
            path = self.path_of(number)
            yield self._store_at(path)
            if is_plain_path(path) and not layout.has_manifest(self.names_in(path)):
                if self._remove_beside is not None:
                    self._remove_beside(path)
                _remove_empty(path, root=self.root)
            self._unfinished.discard(number)
        finally:
            with self._changed:
                self._deleting = None
                self._changed.notify_all()


def _without_links(found: list[NumberedFolder], *, root: str) -> list[NumberedFolder]:
    """Returns the folders except links to another of them."""
    if not is_plain_path(root):
        return found
    # Hazard: a link would count as one more, and the deletion of either would take the other.
    places = [os.path.realpath(each.path) for each in found]
    own = [str(Path(os.path.realpath(root), os.path.relpath(each.path, root))) for each in found]
    real = set(places) & set(own)
    return [each for each, place, name in zip(found, places, own, strict=True) if place == name or place not in real]


def _delete(store: Store, folder: NumberedFolder) -> None:
    now = clock_of(store) or time.time()
    try:
        why = delete_one(store, "", save_id=folder.save_id, now=now, force=False)
    except _DAMAGED as error:  # which files are its own is not known
        why = error.message
    if why:
        logger.info("%s stays: %s", folder.path, why)


def _remove_empty(path: str, *, root: str) -> None:
    """Removes what is empty of the local folder of a deleted checkpoint, and of the folders above it, up to but not
    including `root`.
    """
    for name in _OWN_FOLDERS:
        with suppress(OSError):  # files of others are in it, or it is gone
            Path(path, name).rmdir()
    with suppress(OSError):
        folder = Path(path)
        while folder != Path(root):
            with suppress(FileNotFoundError):  # the store removes empty folders too
                folder.rmdir()
            folder = folder.parent
