"""Tells a checkpoint that was replaced or deleted while it was read, which is read again, from a checkpoint with
damaged files. Reads the manifest that is there now, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage.layout import DATA_FOLDER, committed_save_id
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store


@contextmanager
def detect_replacement(store: Store, folder: str, manifest: Manifest) -> Iterator[None]:
    """Turns the error of a missing file into one of kind `replaced` if the folder has another checkpoint, or none."""
    try:
        yield
    except CheckpointNotFoundError as error:
        if error.kind == "missing_file":
            refuse_replaced(store, folder, manifest, cause=error)
        raise


def refuse_replaced(store: Store, folder: str, manifest: Manifest, *, cause: BaseException | None) -> None:
    """Raises CheckpointNotFoundError (replaced) if the folder now has another checkpoint, or none. Does nothing if that
    cannot be read, or the files are not in the folder that has the manifest.
    """
    own = f"{DATA_FOLDER}/{manifest.save_id}-"
    zeros_file = manifest.map_notes.zeros_file  # which a name map has added
    written = [file for number, file in enumerate(manifest.files) if number != zeros_file]
    if not all(file.name.startswith(own) for file in written):
        return  # files of another format, or of a link: their manifest is elsewhere
    try:
        current_id = committed_save_id(store, folder)
    except CheckpointError:
        return
    if current_id == manifest.save_id:
        return
    path = join_name(str(store), folder)
    what = f"was replaced by another save ({current_id})" if current_id else "was deleted"
    raise CheckpointNotFoundError(
        f"the checkpoint at {path} (save {manifest.save_id}) {what} while it was read. Nothing is damaged: open or "
        "load it again",
        kind="replaced",
        path=path,
    ) from cause
