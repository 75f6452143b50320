"""The blocks of an object that is being written: what they add up to, and their bytes, one block after the other or in
several threads at once. It knows no backend.

A data file written in large blocks, checksummed on the way. It handles bytes; what they mean, and in which memory
they are, is nothing to it.

A data file copied from one store to another, block by block, and compared with its checksums on the way: what a disk
has damaged meanwhile is never published.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import xxhash

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointSaveError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Block, Store


def count_bytes(blocks: Sequence[Block]) -> int:
    """The length of the object. Raises CheckpointSaveError (storage) unless each block starts where the last ended."""
    end = 0
    for block in blocks:
        if block.byte_offset != end or block.byte_length < 0:
            raise CheckpointSaveError(
                f"a block of {block.byte_length} bytes starts at byte {block.byte_offset}, the blocks before it end at "
                f"byte {end}; nothing was written: this is a bug, please report it",
                kind="storage",
            )
        end += block.byte_length
    return end


@contextmanager
def open_block(block: Block) -> Iterator[memoryview]:
    """The block's bytes, for as long as the context lasts. What its `content` raises passes through.

    Raises CheckpointSaveError (storage) where it gives another length than it said, or no flat view of bytes.
    """
    with block.content() as content:
        if (content.nbytes, content.shape, content.strides) != (block.byte_length, (block.byte_length,), (1,)):
            raise CheckpointSaveError(
                f"the block at byte {block.byte_offset} gave {content.nbytes} bytes in the shape {content.shape} with "
                f"the strides {content.strides}, not {block.byte_length} bytes in a row; nothing was published: this "
                "is a bug, please report it",
                kind="storage",
            )
        yield content


def take_blocks(blocks: Sequence[Block], take: Callable[[memoryview, int], None], *, num_threads: int) -> None:
    """Calls `take` with the bytes and the byte offset of every block, in up to `num_threads` threads at once.

    The first error in time, of a block or of `take`, is raised, and only once no thread is in either any more; blocks
    that were not entered by then never are.
    """

    def enter_all() -> Iterator[tuple[ExitStack, memoryview, int]]:
        for block in blocks:
            with ExitStack() as stack:
                content = stack.enter_context(open_block(block))
                yield stack.pop_all(), content, block.byte_offset

    def take_entered(job: tuple[ExitStack, memoryview, int]) -> None:
        stack, content, byte_offset = job
        with stack:
            take(content, byte_offset)

    run_jobs(take_entered, enter_all(), num_threads=min(num_threads, len(blocks)))


BLOCK_BYTES = 16 << 20
"""How much one write carries, and no checksummed extent reaches from one block into the next."""


class FileImage(NamedTuple):
    """The exact bytes of one data file, before it is written."""

    name: str
    """Relative to the checkpoint's folder."""
    extent_lengths: Sequence[int]
    """In bytes, adding up to the length of the file."""
    blocks: Sequence[tuple[int, int]]
    """Byte offset and length of the ranges in which the content is asked for, once each and in this order. An extent
    lies in one of them."""
    content: Callable[[int, int], AbstractContextManager[memoryview]]
    """Gives such a range, for as long as the context lasts."""
    extent_digests: Sequence[int] | None = None
    """Where they are known already; extents may then reach over several blocks."""


def write_image(store: Store, name: str, image: FileImage, on_checksum: Callable[[float], None]) -> DataFile:
    """Writes the image as the object `name`, durably, and returns what the manifest says about it.

    `on_checksum` is told, from any thread, how many seconds a checksum took.
    """
    digests = list(image.extent_digests or [0] * len(image.extent_lengths))

    @contextmanager
    def checked(byte_offset: int, byte_length: int, extents: range) -> Iterator[memoryview]:
        with image.content(byte_offset, byte_length) as content:
            yield content
            # Only now, because stores enter one block at a time but write several at once: this is done side by side.
            started = time.perf_counter()
            lengths = [image.extent_lengths[extent] for extent in extents]
            for extent, end in zip(extents, accumulate(lengths), strict=True):
                digests[extent] = xxhash.xxh3_64_intdigest(content[end - image.extent_lengths[extent] : end])
            on_checksum(time.perf_counter() - started)

    contents: list[Callable[[], AbstractContextManager[memoryview]]]
    if image.extent_digests is None:
        contents = [partial(checked, *block, extents) for block, extents in _with_extents(image)]
    else:
        contents = [partial(image.content, *block) for block in image.blocks]
    blocks = [Block(*block, content) for block, content in zip(image.blocks, contents, strict=True)]
    store.write(name, blocks, replace=False)
    return DataFile(image.name, sum(image.extent_lengths), tuple(image.extent_lengths), tuple(digests))


def _with_extents(image: FileImage) -> list[tuple[tuple[int, int], range]]:
    """The blocks, and the numbers of the extents that each is made of."""
    ends = [0, *accumulate(image.extent_lengths)]
    bounds = [*(bisect_left(ends, byte_offset) for byte_offset, _ in image.blocks), len(image.extent_lengths)]
    return [(block, range(*bound)) for block, bound in zip(image.blocks, pairwise(bounds), strict=True)]


def copy_file(source: Store, target: Store, folder: str, file: DataFile, scratch: BufferPool) -> None:
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
