"""One rank's files of a save on a disk of the host, before they are uploaded to the path. A file that does not fit on
the disk is written to the path at once. The phases, and the messages between ranks, are in upload.py.
"""

from __future__ import annotations

# ruff: noqa: PTH100 - paths are text here, as in the stage itself
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import msgspec

from bytecheckpoint.errors import CheckpointError, CheckpointSaveError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage import stage_folder
from bytecheckpoint.storage.backends.posix_files import free_bytes
from bytecheckpoint.storage.object_io import BLOCK_BYTES, FileImage, copy_file, write_image
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.stage_folder import Journal, StagedFolder
from bytecheckpoint.storage.store import Store

logger = logging.getLogger("bytecheckpoint")

_SPARE_BYTES = 64 << 20
"""Room left free on the disk: for the journals and manifests of all ranks of the host."""
_BLOCKS_IN_FLIGHT = 8
"""Blocks of 16 MiB of host memory for an upload: as many as a store may send at once."""


class LocalStage:
    """One rank's files of one save in its local stage."""

    def __init__(self, options: SaveOptions) -> None:
        """Raises StorageError or CheckpointSaveError if the folder cannot be used."""
        self.root = os.path.abspath(options.local_stage or "")
        stage_folder.prepare(self.root)
        self.is_recoverable = False
        """True once every rank's data and the manifest are durable: nothing is deleted if a later step fails."""
        self.files: Sequence[DataFile] = ()
        """Data files of this rank, once they are complete."""
        self._writer_threads = options.writer_threads
        self._folder: StagedFolder | None = None
        """None if the disk is so full that there cannot even be a folder."""
        self._journal: Journal | None = None
        self._has_warned = False
        self._direct: list[str] = []
        """Names of files for which the disk had no room, at the path already."""
        self._reused: list[str] = []
        """Names of files that are at the path already, because an earlier checkpoint had them."""

    @property
    def folder(self) -> str | None:
        """Path of this rank's folder in the stage; None before `begin`, or if the disk was too full for a folder."""
        return self._folder.path if self._folder else None

    @property
    def is_direct(self) -> bool:
        """True if a file of this rank went directly to the path, because the disk had no room for it."""
        return bool(self._direct)

    def begin(self, journal: Journal) -> None:
        """Makes the folder, which other processes then see in use. If the disk is too full for that, only warns."""
        self._journal = journal
        try:
            self._folder = stage_folder.create(self.root, journal, writer_threads=self._writer_threads)
        except CheckpointSaveError as error:
            if error.kind != "no_space":
                raise
            self._warn()

    def write(self, image: FileImage, store: Store, path: str, on_checksum: Callable[[float], None]) -> DataFile:
        """Writes an image durably to the disk, or to `path` in the store if the disk has no room for it. Raises
        CheckpointSaveError (no_space) if the disk fills up after the first block was taken from the snapshot.
        """
        was_entered = False

        def content(block: Block) -> AbstractContextManager[memoryview]:
            nonlocal was_entered
            was_entered = True
            return block.content()

        if self._folder is not None and self._has_room(sum(image.extent_lengths)):
            try:
                blocks = [block._replace(content=partial(content, block)) for block in image.blocks]
                return write_image(self._folder.store, image.name, image._replace(blocks=blocks), on_checksum)
            except CheckpointSaveError as error:
                # Hazard: bytes that were taken out of a snapshot cannot be taken again.
                if error.kind != "no_space" or was_entered:
                    raise
        self._warn()
        self._direct.append(image.name)
        return write_image(store, path, image, on_checksum)

    def leave_out(self, name: str) -> None:
        """Records that a file is at the path already, so that `upload` does not copy it."""
        self._reused.append(name)

    def _has_room(self, num_bytes: int) -> bool:
        free = free_bytes(self.root)
        return free is None or free >= num_bytes + _SPARE_BYTES

    def _warn(self) -> None:
        """Warns once that the disk is full."""
        if self._journal is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the local stage %s has no room for all of this save: the rest is written to %s directly, which may "
                "take longer; free space there (`bcp gc ROOT --local-stage %s` lists what saves left)",
                self.root,
                self._journal.path,
                self.root,
            )

    def complete(self, files: Sequence[DataFile]) -> None:
        """Records in the journal that all files of this rank are durable, here or at the path."""
        self.files = files
        if self._folder is not None and self._journal is not None:
            self._journal = msgspec.structs.replace(self._journal, files=list(files), direct=self._at_path())
            self._folder.write_journal(self._journal)

    def write_manifest(self, content: bytes) -> bool:
        """Writes the manifest durably, so that recovery can commit the save. Returns False if the disk is full."""
        if self._folder is None:
            return False
        try:
            self._folder.keep_manifest(content)
        except CheckpointSaveError as error:
            if error.kind != "no_space":
                raise
            return False
        return True

    @property
    def num_upload_bytes(self) -> int:
        """Bytes of the files that `upload` copies."""
        return sum(file.byte_length for file in self._to_upload())

    def _to_upload(self) -> list[DataFile]:
        at_path = self._at_path()
        return [file for file in self.files if file.name not in at_path] if self._folder is not None else []

    def _at_path(self) -> list[str]:
        return self._direct + self._reused

    def upload(self, store: Store, folder: str, on_bytes: Callable[[int], None]) -> None:
        """Copies this rank's files to the checkpoint's folder in the store. `on_bytes` is called with the length of
        each file that was copied.
        """
        if self._folder is not None:
            files = self._to_upload()
            upload_files(self._folder, store, folder, files, writer_threads=self._writer_threads, on_bytes=on_bytes)

    def remove(self) -> None:
        """Deletes the folder."""
        if self._folder is not None:
            self._folder.remove()

    def close(self) -> None:
        """Unlocks the folder, so that recovery may take over the files that are still in it."""
        if self._folder is not None:
            self._folder.close()

    def remove_superseded(self) -> None:
        """Deletes from the stage, once this save is committed, the folders that dead processes left of saves to the
        same path, or of its step or an earlier one under the same root; and folders without a journal, which belong to
        no save. Ignores errors.
        """
        committed = self._journal
        if committed is not None:
            with suppress(CheckpointError, OSError):
                found = stage_folder.scan(self.root)
                names = [each.name for each in found if not each.is_alive and _is_superseded(each, committed)]
                stage_folder.remove_all(self.root, names)


def upload_files(
    staged: StagedFolder,
    store: Store,
    folder: str,
    files: Sequence[DataFile],
    *,
    writer_threads: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Copies files from a local stage to a folder of the store, one after the other, through buffers of this call."""
    num_blocks = -(-max((file.byte_length for file in files), default=0) // BLOCK_BYTES)
    scratch = BufferPool(BLOCK_BYTES, min(num_blocks, max(_BLOCKS_IN_FLIGHT, writer_threads)))
    for file in files:
        copy_file(staged.store, store, folder, file, scratch)
        on_bytes(file.byte_length)


def _is_superseded(found: stage_folder.FoundStage, committed: Journal) -> bool:
    """Returns True if the committed save supersedes that of a staged folder, or the folder belongs to no save."""
    journal = found.journal
    if journal is None:
        return True  # a removal or a creation was interrupted
    if journal.endpoint != committed.endpoint:
        return False
    if journal.path == committed.path:
        return True
    is_same_run = _run_of(journal) == _run_of(committed)
    return is_same_run and None not in (journal.step, committed.step) and (journal.step or 0) <= (committed.step or 0)


def _run_of(journal: Journal) -> str:
    """Returns the path under which the steps of a run are."""
    return journal.root if journal.step is not None else join_name(journal.root, journal.folder)
