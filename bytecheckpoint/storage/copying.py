"""A data file copied from one store to another, block by block, and compared with its checksums on the way: what a disk
has damaged meanwhile is never published.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import xxhash

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.scratch import Scratch
from bytecheckpoint.storage.store import Block, Store
from bytecheckpoint.storage.writer import BLOCK_BYTES


def copy_file(source: Store, target: Store, folder: str, file: DataFile, scratch: Scratch) -> None:
    """Copies `file.name` of the source to the same name in a folder of the target.

    Raises CheckpointCorruptError (checksum, truncated) where the source has other bytes than were written to it, and
    what `Store.write` raises; nothing is published then. `scratch` lends blocks of BLOCK_BYTES.
    """

    @contextmanager
    def content(byte_offset: int, extents: range) -> Iterator[memoryview]:
        lengths = [file.extent_lengths[extent] for extent in extents]
        with scratch.lend() as block:
            view = block[: sum(lengths)]
            source.read_into(file.name, byte_offset, view)
            _verify(source, file, byte_offset, extents, view)
            yield view

    blocks = [Block(start, num_bytes, partial(content, start, extents)) for start, num_bytes, extents in _blocks(file)]
    target.write(join_name(folder, file.name), blocks, replace=False)


def _blocks(file: DataFile) -> Iterator[tuple[int, int, range]]:
    """Byte offset, byte length and extents of the blocks in which a file is copied: as many whole extents as fit."""
    start, num_bytes, first = 0, 0, 0
    for number, length in enumerate(file.extent_lengths):
        if num_bytes + length > BLOCK_BYTES:
            yield start, num_bytes, range(first, number)
            start, num_bytes, first = start + num_bytes, 0, number
        num_bytes += length
    if num_bytes:
        yield start, num_bytes, range(first, len(file.extent_lengths))


def _verify(source: Store, file: DataFile, byte_offset: int, extents: range, view: memoryview) -> None:
    start = 0
    for extent in extents:
        end = start + file.extent_lengths[extent]
        found, expected = xxhash.xxh3_64_intdigest(view[start:end]), file.extent_digests[extent]
        if found != expected:
            path = join_name(str(source), file.name)
            raise CheckpointCorruptError(
                f"{path}, bytes {byte_offset + start} to {byte_offset + end}: checksum {found:016x} found, "
                f"{expected:016x} expected; it was not uploaded, and nothing was committed: the disk has changed what "
                "was written to it; save again, elsewhere",
                kind="checksum",
                path=path,
            )
        start = end
