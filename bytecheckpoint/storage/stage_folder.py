"""Folders of the local stage: files of saves on a disk of the host until they are uploaded. Each rank of each save has
one, with its data files, a journal that says where they belong, and on the coordinator the manifest, created last.

A folder belongs to the process that holds its lock. Recovery looks for folders whose process has died.
"""

# ruff: noqa: PTH100, PTH102, PTH104, PTH106, PTH108, PTH112, PTH118, PTH208 - calls of `os`, as in posix_files.py

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, StorageError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.storage.backends.file_lock import ProcessLock, create_locked, is_locked
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.backends.posix_errors import describe, write_error
from bytecheckpoint.storage.backends.posix_files import make_folders, sync_folder
from bytecheckpoint.storage.layout import DATA_FOLDER, MAX_MANIFEST_BYTES
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX, join_name
from bytecheckpoint.storage.store import Store, one_block, read_whole

logger = logging.getLogger("bytecheckpoint")

JOURNAL_NAME = "journal"
PENDING_NAME = "pending.manifest"
"""Unlike a manifest's name, because a staged folder is not a checkpoint."""
_LOCK_NAME = "lock"
_FOLDER = re.compile(r"\A[0-9a-f]{16}-[0-9]{5,}\Z")
_VERSION = 1


class RootObject(msgspec.Struct, frozen=True, array_like=True):
    """An object of a root, in a checkpoint (its pin) or beside all, that a save writes just before it commits."""

    name: str
    """Name inside the root."""
    before: bytes | None
    """Content when the save began; None if there was no object."""
    content: bytes


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the staged files of one rank of a save."""

    version: int = _VERSION
    save_id: str
    rank: int
    """Rank within the group that saves, which has `num_ranks`."""
    num_ranks: int
    root: str
    """Path or URL of the store, without credentials."""
    endpoint: str = ""
    """Endpoint of the store; empty if its URL has it."""
    folder: str
    """Folder of the checkpoint inside the store."""
    step: int | None
    overwrite: bool
    """True if the save may replace a checkpoint. Set by the coordinator alone, as is `replaces`."""
    replaces: list[str] = []
    """Save ids of the checkpoints that were there, or being saved there, when the save began; empty without
    `overwrite`.
    """
    host: str = msgspec.field(default_factory=socket.gethostname)
    started_at: float = msgspec.field(default_factory=time.time)
    files: list[DataFile] | None = None
    """Set once all files of this rank are durable."""
    direct: list[str] = []
    """Names of files that are at the path already: there was no space here, or an earlier checkpoint had them."""
    root_objects: list[RootObject] = []
    """Set by the coordinator alone. Recovery writes those that nobody has changed since the save began; of all but the
    newest save of a root, only those in the folder of the checkpoint."""

    @property
    def path(self) -> str:
        """Path or URL of the checkpoint."""
        return join_name(self.root, self.folder)


class StagedFolder:
    """A folder locked by this process: of its own save, or taken over from a dead process."""

    def __init__(self, path: str, lock: ProcessLock, *, writer_threads: int) -> None:
        self.path = path
        self.store = LocalStore(path, writer_threads=writer_threads)
        """Store of the data files, under their names in the checkpoint."""
        self._lock = lock

    def write_journal(self, journal: Journal) -> None:
        """Writes the journal durably, in place of the one before."""
        self._write(JOURNAL_NAME, msgspec.msgpack.encode(journal))

    def keep_manifest(self, content: bytes) -> None:
        """Writes the manifest durably: from now on, recovery can commit the save."""
        self._write(PENDING_NAME, content)

    def _write(self, name: str, content: bytes) -> None:
        self.store.write(name, one_block(content), replace=True)

    def remove(self) -> None:
        """Removes as much of the folder as can be removed, without an error, and releases the lock."""
        # The journal goes first: without one, the rest of an interrupted removal is known to be worthless.
        for name in (JOURNAL_NAME, PENDING_NAME):
            with suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        data = os.path.join(self.path, DATA_FOLDER)
        shutil.rmtree(data, ignore_errors=True)
        if not os.path.lexists(data):  # the lock file goes last: `scan` leaves out a folder without it
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Releases the lock and leaves the files. May be called again."""
        self._lock.release()


class FoundStage(NamedTuple):
    """A folder in a local stage."""

    name: str
    is_alive: bool
    """True if a living process holds the lock of the folder, or the folder is another user's."""
    journal: Journal | None
    """None after an interrupted removal or creation: then it is certain that there is no journal."""
    sizes: dict[str, int]
    """Sizes of the data files, by name in the checkpoint, in bytes."""
    has_manifest: bool


def prepare(root: str) -> None:
    """Makes the stage's folder, if it is missing. Raises StorageError or CheckpointSaveError if it is not writable."""
    try:
        make_folders(os.path.abspath(root))
        probe = os.path.join(root, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        os.mkdir(probe)
        os.rmdir(probe)
    except OSError as error:
        raise _cannot_use(root, error) from error


def create(root: str, journal: Journal, *, writer_threads: int) -> StagedFolder:
    """Creates a folder for a rank of a save, with its journal, durable and locked from the moment it is visible. Raises
    like `prepare`, also if the folder exists.
    """
    name = f"{journal.save_id}-{journal.rank:05d}"
    path, temporary = os.path.join(root, name), os.path.join(root, f"{TEMPORARY_PREFIX}{name}")
    try:
        make_folders(os.path.abspath(root))
        os.mkdir(temporary)
    except OSError as error:
        raise _cannot_use(root, error) from error
    lock: ProcessLock | None = None
    try:
        lock = create_locked(os.path.join(temporary, _LOCK_NAME), mode=0o666)
        StagedFolder(temporary, lock, writer_threads=writer_threads).write_journal(journal)
        os.rename(temporary, path)
        sync_folder(root)
    except BaseException as error:
        if lock is not None:
            lock.release()
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise _cannot_use(root, error) from error
        raise
    return StagedFolder(path, lock, writer_threads=writer_threads)


def store_of(root: str, name: str) -> LocalStore:
    """Returns a store to read a folder of a stage."""
    return LocalStore(os.path.join(root, name), writer_threads=1)


def take_over(root: str, name: str, *, writer_threads: int) -> StagedFolder | None:
    """Locks and returns the folder of a dead process; None if the folder is gone, or another process holds its lock.
    Raises PermissionError if the folder is another user's, and StorageError if its file system cannot lock.
    """
    path = os.path.join(root, name)
    try:
        lock = ProcessLock(os.path.join(path, _LOCK_NAME))
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        return None
    if not os.path.isdir(path):  # removed before it was locked
        lock.release()
        return None
    return StagedFolder(path, lock, writer_threads=writer_threads)


def scan(root: str) -> Iterator[FoundStage]:
    """Yields the folders of saves in a stage, in the order of their names; none if there is no stage. Changes nothing.

    Folders that are being made or removed, or that cannot be read, are left out. If the process of an unreadable one is
    dead, this is logged. Raises StorageError if the stage cannot be listed, or its file system has no locks.
    """
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _cannot_use(root, error) from error
    for name in names:
        if not _FOLDER.match(name.removeprefix(TEMPORARY_PREFIX)):
            continue
        path = os.path.join(root, name)
        try:
            is_alive = is_locked(os.path.join(path, _LOCK_NAME))
        except FileNotFoundError:
            continue  # being made or removed at this moment
        except PermissionError:
            is_alive = True  # another user's
        except StorageError:
            raise  # the file system has no locks
        except OSError as error:
            _leave_alone(path, describe(error))
            continue
        found = _read_stage(path, name, is_alive=is_alive)
        if found is not None:
            yield found


def _read_stage(path: str, name: str, *, is_alive: bool) -> FoundStage | None:
    """Returns the content of a folder of a local stage; None if it cannot be read, or is being removed."""
    store = store_of(*os.path.split(path))
    try:
        journal = read_journal(store)
        own = store.list("")
        data = store.list(DATA_FOLDER)
    except CheckpointNotFoundError:
        return None  # being removed at this moment
    except CheckpointError as error:
        if not is_alive:
            _leave_alone(path, error.message)
        return None
    if journal is None and JOURNAL_NAME in own:
        if not is_alive:
            _leave_alone(path, "its journal is damaged, or of another version of this library")
        return None
    sizes = {f"{DATA_FOLDER}/{last}": size for last, size in data.items() if size is not None}
    return FoundStage(name, is_alive, journal, sizes, own.get(PENDING_NAME) is not None)


def _leave_alone(path: str, why: str) -> None:
    logger.warning(
        "%s, which a save has left, is left alone: %s; nothing of it is recovered or removed until it can be read: "
        "delete the folder if no job needs it",
        path,
        why,
    )


def read_journal(store: LocalStore) -> Journal | None:
    """Reads the journal; None if it is missing, damaged, or of another version. Raises the other errors of
    `LocalStore.read_whole`.
    """
    content = _read(store, JOURNAL_NAME)
    if content is None:
        return None
    with suppress(msgspec.MsgspecError, ValueError):
        journal = msgspec.msgpack.decode(content, type=Journal)
        return journal if journal.version == _VERSION else None
    return None


def read_manifest(store: LocalStore) -> bytes | None:
    """Reads the encoded manifest that is to be committed; None if it is not here."""
    return _read(store, PENDING_NAME)


def _read(store: Store, name: str) -> bytes | None:
    with suppress(CheckpointNotFoundError):
        return read_whole(store, name, max_bytes=MAX_MANIFEST_BYTES)
    return None


def root_object(store: Store, name: str, content: bytes) -> RootObject:
    """Returns the record of an object that is to get this content. `before` is its content now. Raises like
    `read_whole`, but not for a missing object.
    """
    return RootObject(name, _read(store, name), content)


def write_root_objects(store: Store, folder: str, objects: Sequence[RootObject]) -> None:
    """Writes those objects whose content is still their `before`. Their names are relative to `folder`."""
    for each in objects:
        name = join_name(folder, each.name)
        if _read(store, name) == each.before:
            store.write(name, one_block(each.content), replace=True)


def remove_all(root: str, names: Sequence[str]) -> list[str]:
    """Removes those of the named folders whose lock is free; returns their names, also if a file in one could not be
    removed. Raises like `take_over`.
    """
    removed = []
    for name in names:
        folder = take_over(root, name, writer_threads=1)
        if folder is not None:
            folder.remove()
            removed.append(name)
    return removed


def _cannot_use(root: str, error: OSError) -> CheckpointError:
    refused = write_error(error, root, reason=describe(error), needed_bytes=0, free_bytes=None, may_be_done=False)
    message = f"the local stage cannot be used: {refused.message}; set SaveOptions.local_stage to a folder of a disk "
    return type(refused)(f"{message}of this host that this process may write to", kind=refused.kind, path=root)
