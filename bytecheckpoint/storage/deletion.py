"""Deletion of what a checkpoint is made of, and of what failed saves have written: several objects at a time. A
checkpoint's manifest goes first, so that no reader finds a part of a checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.layout import DATA_FOLDER, MANIFEST_NAME, read_manifest, telemetry_of
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_DELETIONS_IN_FLIGHT = 16
_MAX_FAILURES = 2


def files_of_checkpoint(store: Store, folder: str) -> list[str]:
    """The names, inside its folder, of the files that the save of a committed checkpoint has written, without the
    manifest; none where the manifest cannot be read.
    """
    with suppress(CheckpointError):
        return _files_of(store, folder, read_manifest(store, folder))
    return []


def _files_of(store: Store, folder: str, manifest: Manifest) -> list[str]:
    # Hazard: they are deleted. A manifest may point to other files below its folder, as to another step's.
    prefix = f"{DATA_FOLDER}/{manifest.save_id}-"
    data = [file.name for file in manifest.files if file.name.startswith(prefix)]
    return data + telemetry_of(store, folder, manifest.save_id)


def delete_checkpoint(store: Store, folder: str) -> None:
    """Deletes the committed checkpoint in a folder: its manifest, then the files that its save has written.

    Raises what `read_manifest` and `Store.delete` raise, and then nothing is deleted. A data file that cannot be
    deleted afterwards is a leftover.
    """
    names = _files_of(store, folder, read_manifest(store, folder))
    store.delete(join_name(folder, MANIFEST_NAME))
    discard(store, folder, names)


def discard(store: Store, folder: str, names: Sequence[str]) -> None:
    """Deletes files that no manifest points to. One that cannot be deleted is logged, and is a leftover.

    A store that fails several times in a row is not asked any more: other ranks may wait for this one.
    """
    deletion = _Deletion(store, folder)
    run_jobs(deletion.delete, deletion.until_store_fails(names), num_threads=min(len(names), _DELETIONS_IN_FLIGHT))
    if deletion.failure is not None:
        logger.warning(
            "%d of %d files in %s, which no checkpoint needs any more, could not be deleted (%s): `bcp gc` finds them",
            len(names) - deletion.num_deleted,
            len(names),
            join_name(str(store), folder),
            deletion.failure.message,
        )


class _Deletion:
    """Files of one folder that are being deleted by several threads."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._lock = threading.Lock()
        self._num_failures = 0
        """Failures in a row."""
        self.num_deleted = 0
        self.failure: CheckpointError | None = None
        """The first one."""

    def until_store_fails(self, names: Iterable[str]) -> Iterator[str]:
        """Yields the names, until the store has failed too often."""
        return takewhile(lambda _: self._num_failures < _MAX_FAILURES, names)

    def delete(self, name: str) -> None:
        try:
            self._store.delete(join_name(self._folder, name))
        except CheckpointError as error:
            with self._lock:
                self._num_failures += 1
                self.failure = self.failure or error
        else:
            with self._lock:
                self._num_failures = 0
                self.num_deleted += 1
