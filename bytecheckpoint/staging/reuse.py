"""Data files that need not be written, because an earlier checkpoint under the same root has the same bytes: which
tensors are worth files of their own, and which files of the newest checkpoint a rank may take. Sends no messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from bytecheckpoint.errors import CheckpointNotFoundError, StorageError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.staging.file_image import PlannedFile
from bytecheckpoint.storage.object_io import FileImage
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import SupportsDuplicate

logger = logging.getLogger("bytecheckpoint")

_MAX_ROOTS = 64
"""Roots whose histories are kept: a process that saves each checkpoint to a path of its own would keep all of them.
Saves to more roots than this in turn find nothing unchanged."""
_MIN_SHARE = 0.01
"""Share of a rank's bytes that must have been found unchanged to be worth a new plan."""


class ReusableFiles(msgspec.Struct, frozen=True, array_like=True):
    """The data files of one rank in a committed checkpoint that have digests of their whole content."""

    save_id: str = ""
    folder: str = ""
    """Folder of the checkpoint inside the store."""
    files: tuple[DataFile, ...] = ()


class RootHistory:
    """History of one rank's saves to one root: the files of the newest one, and the tensors that have changed."""

    def __init__(self) -> None:
        self.newest = ReusableFiles()
        self._plan_id = ""
        self._written: Sequence[DataFile] = ()
        self._changed: frozenset[str] = frozenset()
        """FQNs that have differed between two saves in a row with one plan. They stay here, so that plans do not
        alternate.
        """
        self._unchanged: frozenset[str] | None = None
        """FQNs that were the same in the first two saves in a row with one plan, or no FQNs if these are too few bytes;
        None before.
        """

    def frozen(self, marked: Collection[str]) -> frozenset[str]:
        """Returns the FQNs that get files of their own: those `marked` and those found unchanged, without those that
        have ever differed between two saves in a row.
        """
        return (frozenset(marked) | (self._unchanged or frozenset())) - self._changed

    def add(
        self, newest: ReusableFiles, plan_id: str, planned: Sequence[PlannedFile], files: Sequence[DataFile]
    ) -> None:
        """Records a committed save: all `files` of this rank, in the order of `planned`."""
        if plan_id == self._plan_id:
            found = compare_files(planned, self._written, files)
            self._changed |= found.changed
            if self._unchanged is None:
                is_worth_it = found.unchanged_bytes >= _MIN_SHARE * sum(file.byte_length for file in files)
                self._unchanged = found.unchanged if is_worth_it else frozenset()
        self.newest, self._plan_id, self._written = newest, plan_id, files


class ReuseHistory:
    """The histories of the last 64 roots to which a process has saved."""

    def __init__(self) -> None:
        self._roots: dict[str, RootHistory] = {}
        self._lock = threading.Lock()

    def of_root(self, location: str) -> RootHistory:
        """Returns the history of a root, a new one if there is none, and notes the root as the last one saved to."""
        with self._lock:
            history = self._roots[location] = self._roots.pop(location, RootHistory())
            while len(self._roots) > _MAX_ROOTS:
                del self._roots[next(iter(self._roots))]
            return history


class FoundChanges(NamedTuple):
    """FQNs of tensors whose bytes changed between two saves with one plan, and of those whose bytes did not."""

    changed: frozenset[str]
    unchanged: frozenset[str]
    unchanged_bytes: int


def compare_files(
    planned: Sequence[PlannedFile], earlier: Sequence[DataFile], later: Sequence[DataFile]
) -> FoundChanges:
    """Compares the files of two saves with one plan, each in the order of `planned`, by the checksums of their extents.
    A tensor has changed if an extent that holds bytes of it has.

    Files of compressed chunks are left out, because their extents move with the values.
    """
    of_chunks: list[tuple[str, bool, int]] = []
    for plan, old, new in zip(planned, earlier, later, strict=True):
        if not plan.codecs:
            differ = np.array(old.extent_digests, np.uint64) != np.array(new.extent_digests, np.uint64)
            num_differing = np.concatenate([[0], np.cumsum(differ)])
            bounds = np.concatenate([[0], np.cumsum(np.array(plan.extent_lengths, np.int64))])
            starts = np.array([len(plan.header) + chunk.data_offset for chunk in plan.chunks], np.int64)
            lengths = np.array([chunk.byte_length for chunk in plan.chunks], np.int64)
            first = np.searchsorted(bounds, starts, side="right") - 1
            end = np.maximum(np.searchsorted(bounds, starts + lengths, side="left"), first)
            is_changed = (num_differing[end] > num_differing[first]).tolist()
            fqns = (chunk.fqn for chunk in plan.chunks)
            of_chunks += zip(fqns, is_changed, lengths.tolist(), strict=True)
    changed = frozenset(fqn for fqn, is_changed, _ in of_chunks if is_changed)
    same = [(fqn, num_bytes) for fqn, _, num_bytes in of_chunks if fqn not in changed]
    return FoundChanges(changed, frozenset(fqn for fqn, _ in same), sum(num_bytes for _, num_bytes in same))


class FileReuse:
    """The files that one rank may take from the newest checkpoint in one save."""

    def __init__(self, store: SupportsDuplicate, known: ReusableFiles) -> None:
        self._store = store
        self._folder = known.folder
        self._found = {(file.byte_length, file.content_digest): file for file in known.files if file.content_digest}
        self.reused_bytes = 0

    def may_have(self, image: FileImage) -> bool:
        """Returns False if no file is as long as the image, so that nothing need be hashed."""
        num_bytes = sum(image.extent_lengths)
        return any(byte_length == num_bytes for byte_length, _ in self._found)

    def take(self, image: FileImage, path: str, digest: bytes) -> DataFile | None:
        """Makes the object `path` out of an equal file of the newest checkpoint, and returns its entry in the manifest.

        Returns None if that checkpoint has no equal file: then the file is to be written. Also returns None, now and in
        all later calls, if the equal file is gone or the store cannot duplicate it. Raises any other StorageError, and
        CheckpointExistsError if `path` is taken.
        """
        found = self._found.get((sum(image.extent_lengths), digest))
        if found is None or list(found.extent_lengths) != list(image.extent_lengths):
            return None
        source = join_name(self._folder, found.name)
        try:
            self._store.duplicate(source, path, num_bytes=found.byte_length)
        except (CheckpointNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and error.kind != "unsupported":
                raise
            logger.info("%s is written again: %s", path, error.message)
            self._found = {}  # its other files went with it, and are not asked for one by one
            return None
        self.reused_bytes += found.byte_length
        return found._replace(name=image.name)


def reused_bytes(reuse: FileReuse | None) -> int:
    """Returns the bytes of files that a save has taken from an earlier checkpoint."""
    return 0 if reuse is None else reuse.reused_bytes


def content_digest(blocks: Sequence[Block]) -> bytes:
    """Returns the xxh3-128 of the blocks of a file: two files with the same one are taken for equal."""
    hasher = xxhash.xxh3_128()
    for block in blocks:
        with block.content() as content:
            hasher.update(content)
    return hasher.digest()


class RunningDigest:
    """The `content_digest` of a file, taken of the bytes that a store gets. Blocks are entered in file order."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._num_bytes = 0

    def hashed_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns the blocks, each hashed as it is entered."""
        return [block._replace(content=partial(self._content, block)) for block in blocks]

    @contextmanager
    def _content(self, block: Block) -> Iterator[memoryview]:
        with block.content() as content:
            if block.byte_offset == self._num_bytes:
                self._hasher.update(content)
                self._num_bytes += content.nbytes
            yield content

    def digest(self, num_bytes: int) -> bytes:
        """Returns the digest of a file of this length; an empty one, which matches no file, if not all bytes came in
        order.
        """
        return self._hasher.digest() if self._num_bytes == num_bytes else b""
