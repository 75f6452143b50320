"""Deletion of checkpoints and of the files of failed saves, several objects at a time. A checkpoint's manifest goes
first, so that no reader finds a part of a checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.layout import DATA_FOLDER, MANIFEST_NAME, read_manifest, telemetry_of
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, SupportsDeleteMany

logger = logging.getLogger("bytecheckpoint")

METRICS_FOLDER = "metrics"
LEASES_FOLDER = "leases"
PIN_NAME = "pin.json"
"""Places of what a manager writes beside a manifest."""

_DELETIONS_IN_FLIGHT = 16
_MAX_FAILURES = 2


def files_of_checkpoint(store: Store, folder: str) -> list[str]:
    """Returns the names, inside its folder, of the files that the save of a committed checkpoint has written, and of a
    manager's records about that save, without the manifest. Raises no CheckpointError: the list is empty if the
    manifest or a listing cannot be read.
    """
    with suppress(CheckpointError):
        manifest = read_manifest(store, folder)
        names = store.list(join_name(folder, METRICS_FOLDER))
        records = [f"{METRICS_FOLDER}/{name}" for name in names if save_id_of_record(name) == manifest.save_id]
        return records + written_files(store, folder, manifest)
    return []


def written_files(store: Store, folder: str, manifest: Manifest) -> list[str]:
    """Returns the names, inside its folder, of the data files and telemetry that the save of this manifest has
    written. Lists the folder of the telemetry, and raises like `Store.list`.
    """
    # Hazard: these are deleted. A manifest may also point to files of others, such as another step's.
    prefix = f"{DATA_FOLDER}/{manifest.save_id}-"
    data = [file.name for file in manifest.files if file.name.startswith(prefix)]
    return data + telemetry_of(store, folder, manifest.save_id)


def side_objects(store: Store, folder: str) -> list[str]:
    """Returns the names, inside its folder, of the records and leases that a manager has put beside a checkpoint."""
    records = (name for name in store.list(join_name(folder, METRICS_FOLDER)) if save_id_of_record(name))
    leases = (name for name in store.list(join_name(folder, LEASES_FOLDER)) if name.partition("-")[0].isdecimal())
    return [*(f"{METRICS_FOLDER}/{name}" for name in records), *(f"{LEASES_FOLDER}/{name}" for name in leases)]


def save_id_of_record(name: str) -> str:
    """Returns the save id in the file name of a manager's record or report; empty for any other name."""
    save_id, _, extra = name.removesuffix(".json").partition("-")
    is_own = name.endswith(".json") and len(save_id) == 16 and len(extra) in {0, 8}
    return save_id if is_own and not set(save_id + extra) - set("0123456789abcdef") else ""


def delete_checkpoint(store: Store, folder: str) -> None:
    """Deletes the committed checkpoint in a folder: its manifest, then the files that its save has written, and the
    pin, records and leases that a manager has put beside it.

    If this fails before the manifest is deleted, raises like `read_manifest`, `Store.list` and `Store.delete`, and
    deletes nothing. A later failure is logged and not raised: the files that stay are garbage.
    """
    names = [*written_files(store, folder, read_manifest(store, folder)), *side_objects(store, folder)]
    if PIN_NAME in store.list(folder):
        names.append(PIN_NAME)  # a later checkpoint at this place must not inherit it
    store.delete(join_name(folder, MANIFEST_NAME))
    discard(store, folder, names)


def discard(store: Store, folder: str, names: Sequence[str]) -> None:
    """Deletes files that no manifest points to, many with one request where the store can. A file that cannot be
    deleted is garbage: one warning gives the number of these files and the first error, which is not raised.

    No deletion begins once the store has failed twice in a row, because other ranks may wait for this one.
    """
    if isinstance(store, SupportsDeleteMany):
        with suppress(CheckpointError):  # then one by one, which shows the files that cannot be deleted
            store.delete_many([join_name(folder, name) for name in names])
            return
    lock = threading.Lock()
    num_deleted = num_failures_in_a_row = 0
    first_failure: CheckpointError | None = None

    def delete(name: str) -> None:
        nonlocal num_deleted, num_failures_in_a_row, first_failure
        try:
            store.delete(join_name(folder, name))
        except CheckpointError as error:
            with lock:
                num_failures_in_a_row += 1
                first_failure = first_failure or error
        else:
            with lock:
                num_failures_in_a_row = 0
                num_deleted += 1

    until_store_fails = takewhile(lambda _: num_failures_in_a_row < _MAX_FAILURES, names)
    run_jobs(delete, until_store_fails, num_threads=min(len(names), _DELETIONS_IN_FLIGHT))
    if first_failure is not None:
        logger.warning(
            "%d of %d files in %s, which no checkpoint needs any more, could not be deleted (%s): `bcp gc` finds them",
            len(names) - num_deleted,
            len(names),
            join_name(str(store), folder),
            first_failure.message,
        )
