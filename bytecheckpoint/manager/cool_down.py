"""Cool-down: a committed checkpoint copied to a second root, byte for byte and under the same save id. Knows no policy.

The manifest is created last, so that a reader of the second root sees a whole copy or none. A copy that was interrupted
goes on with the files that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from bytecheckpoint.errors import CheckpointExistsError, CheckpointNotFoundError, CheckpointSaveError, and_more
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage import garbage, layout
from bytecheckpoint.storage.checksum_scan import find_files, size_faults
from bytecheckpoint.storage.deletion import METRICS_FOLDER, discard, files_of_checkpoint
from bytecheckpoint.storage.inventory import HasInventory, refuse_beside
from bytecheckpoint.storage.object_io import BLOCK_BYTES, copy_file
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, one_block, read_whole

_BLOCKS_IN_FLIGHT = 4
_MAX_SIDE_BYTES = 64 << 20
_MAX_NAMED = 10


def copy_step(
    source: Store,
    source_folder: str,
    target: Store,
    target_folder: str,
    *,
    may_replace: Collection[str] = (),
    on_file: Callable[[], object] = lambda: None,
) -> bool:
    """Copies a committed checkpoint and its metrics into a folder of another store; returns False if the checkpoint was
    there already, and then copies only telemetry and metrics that are new.

    Every byte of a data file that is copied is compared with the manifest's checksums. Memory is a few blocks of
    16 MiB, or of the longest checksummed extent. `may_replace` are the save ids of checkpoints that the copy may
    replace. `on_file` is called after each data file that is copied.

    Raises CheckpointCorruptError (checksum, truncated) and CheckpointNotFoundError (missing_file) for a damaged source;
    CheckpointNotFoundError (not_committed) for one that was deleted meanwhile; CheckpointExistsError if another
    checkpoint is in the target's folder; CheckpointSaveError for a checkpoint without checksums or with files
    elsewhere, or a copied file of a wrong length; and what the two stores raise. The copy of a damaged source is not
    committed. Files that were copied stay for the next attempt.
    """
    content = layout.read_manifest_bytes(source, source_folder)
    path = join_name(str(source), source_folder)
    manifest = layout.parse_manifest(content, path=join_name(path, layout.MANIFEST_NAME), check_all=True)
    _refuse_unchecked(manifest, path)
    refuse_beside(target, target_folder, is_step=layout.parse_step(target_folder.rpartition("/")[2]) is not None)
    existing_id = layout.committed_save_id(target, target_folder)
    if existing_id == manifest.save_id:
        _copy_side_objects(source, source_folder, target, target_folder, manifest.save_id)
        return False
    if existing_id and existing_id not in may_replace:
        raise _exists_error(manifest.save_id, existing_id, join_name(str(target), target_folder))
    replaced = files_of_checkpoint(target, target_folder) if existing_id else []
    _copy_files(source, source_folder, target, target_folder, manifest, on_file=on_file)
    _copy_side_objects(source, source_folder, target, target_folder, manifest.save_id)
    layout.commit(target, target_folder, content, replace=bool(existing_id))
    discard(target, target_folder, replaced)
    return True


def clear_cut_off(target: Store, target_folder: str, save_id: str) -> None:
    """Deletes the temporary files, and aborts the uploads, that killed copies of this checkpoint have left. Only the
    owner of the target may call this: a copy that another process is making loses them too. Raises as `garbage.remove`.
    """
    if not isinstance(target, HasInventory):
        return
    for leftover in garbage.find_leftovers(target, target_folder).found:
        if (leftover.folder, leftover.save_id) == (target_folder, save_id):
            names = leftover.names.items()
            leftover.names = {name: size for name, size in names if garbage.is_temporary(name)}
            garbage.remove(target, leftover)


def _copy_files(
    source: Store,
    source_folder: str,
    target: Store,
    target_folder: str,
    manifest: Manifest,
    *,
    on_file: Callable[[], object],
) -> None:
    layout.check_files(source, source_folder, manifest, range(len(manifest.files)))
    longest_bytes = max((length for file in manifest.files for length in file.extent_lengths), default=0)
    scratch = BufferPool(max(BLOCK_BYTES, longest_bytes), _BLOCKS_IN_FLIGHT)
    for file, num_bytes in zip(manifest.files, find_files(target, target_folder, manifest.files), strict=True):
        if num_bytes == file.byte_length:
            continue  # copied and compared before: the save id in its name says that it is this file
        if num_bytes is not None:
            target.delete(join_name(target_folder, file.name))
        with suppress(CheckpointExistsError):  # another process copies the same one; the lengths are looked at below
            copy_file(source, target, target_folder, file, scratch, source_folder=source_folder)
        on_file()
    faults = size_faults(manifest.files, find_files(target, target_folder, manifest.files))
    if faults:
        path = join_name(str(target), target_folder)
        wrong = and_more([f"{manifest.files[fault.file].name}: {fault.what}" for fault in faults], _MAX_NAMED)
        raise CheckpointSaveError(
            f"{path} has {len(faults)} of {len(manifest.files)} files that are not as they were written: {wrong}; "
            "nothing was committed there: check the storage, then copy again",
            kind="storage",
            path=path,
        )


def _copy_side_objects(source: Store, source_folder: str, target: Store, target_folder: str, save_id: str) -> None:
    """Copies the objects of telemetry and metrics that the target lacks, such as metrics reported since an earlier
    copy, and replaces none. They have no checksums, so that a damaged one is copied too.
    """
    for parent in (layout.TELEMETRY_FOLDER, METRICS_FOLDER):
        existing = target.list(join_name(target_folder, parent))
        for name, num_bytes in source.list(join_name(source_folder, parent)).items():
            if num_bytes is None or name in existing or not _is_of(save_id, name):
                continue
            with suppress(CheckpointNotFoundError, CheckpointExistsError):  # deleted, or copied by another process
                content = read_whole(source, join_name(source_folder, parent, name), max_bytes=_MAX_SIDE_BYTES)
                target.write(join_name(target_folder, parent, name), one_block(content), replace=False)


def _is_of(save_id: str, name: str) -> bool:
    return name.startswith((f"{save_id}-", f"{save_id}."))


def _refuse_unchecked(manifest: Manifest, path: str) -> None:
    """Raises CheckpointSaveError for a checkpoint whose bytes cannot be compared, or lie in another place."""
    if manifest.linked_to:
        what = f"its files are those below {manifest.linked_to}"
    elif any(file.byte_length and not file.extent_lengths for file in manifest.files):
        what = "its files have no checksums"
    else:
        return
    raise CheckpointSaveError(
        f"{path} was not copied: {what}; nothing was changed: write it whole with `bcp convert --to bcp`, then copy "
        "that one",
        kind="unsupported_value",
        path=path,
    )


def _exists_error(save_id: str, existing_id: str, path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"another checkpoint, with the save id {existing_id}, stands at {path}, so that the one with the save id "
        f"{save_id} was not copied there; both were left as they are: delete the one there with bcp.delete, or copy to "
        "another root",
        kind="exists",
        path=path,
    )
