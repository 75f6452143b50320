"""Objects handled block by block: blocks passed to several threads, objects written while their checksums are computed,
and copied between stores while these are compared, so that a damaged copy is never published. Handles bytes only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import xxhash

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointSaveError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block, cut_blocks
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

BLOCK_BYTES = 16 << 20
"""Length of one write; no checksummed extent crosses from one block into the next."""


class FileImage(NamedTuple):
    """The exact bytes of one data file, before it is written."""

    name: str
    """Relative to the checkpoint's folder."""
    extent_lengths: Sequence[int]
    """In bytes, adding up to the length of the file."""
    blocks: Sequence[Block]
    """Blocks with their content. Each extent lies in a single block."""
    extent_digests: Sequence[int] | None = None
    """Set if they are known already; extents may then cross blocks."""


def write_image(store: Store, name: str, image: FileImage, on_checksum: Callable[[float], None]) -> DataFile:
    """Writes the image as the object `name`, durably, and returns its entry in the manifest. Raises like `Store.write`
    without `replace`.

    `on_checksum` is called, from any thread, with the seconds that the checksums of a block took; never if the image
    has its `extent_digests`.
    """
    digests = list(image.extent_digests or [0] * len(image.extent_lengths))

    @contextmanager
    def checked(block: Block) -> Iterator[memoryview]:
        with block.content() as content:
            yield content
            # Only now: stores enter one block at a time but write several at once, so threads do this in parallel.
            started = time.perf_counter()
            for extent, part in _extents_in(content, image.extent_lengths, block.extents):
                digests[extent] = xxhash.xxh3_64_intdigest(part)
            on_checksum(time.perf_counter() - started)

    blocks = image.blocks
    if image.extent_digests is None:
        blocks = [block._replace(content=partial(checked, block)) for block in blocks]
    store.write(name, blocks, replace=False)
    return DataFile(image.name, sum(image.extent_lengths), tuple(image.extent_lengths), tuple(digests))


def copy_file(
    source: Store, target: Store, folder: str, file: DataFile, scratch: BufferPool, *, source_folder: str = ""
) -> None:
    """Copies a file from a folder of the source to the same name in a folder of the target. The blocks of `scratch`
    must be at least as long as BLOCK_BYTES and as the longest extent.

    Raises CheckpointCorruptError (checksum, truncated) if the source has other bytes than were written to it, and the
    errors of `Store.read_into` and `Store.write`; nothing is published then.
    """
    source_name = join_name(source_folder, file.name)

    @contextmanager
    def verified_content(block: Block) -> Iterator[memoryview]:
        with scratch.lend() as memory:
            view = memory[: block.byte_length]
            source.read_into(source_name, block.byte_offset, view)
            start = block.byte_offset
            for extent, part in _extents_in(view, file.extent_lengths, block.extents):
                found, expected = xxhash.xxh3_64_intdigest(part), file.extent_digests[extent]
                if found != expected:
                    path, end = join_name(str(source), source_name), start + part.nbytes
                    raise CheckpointCorruptError(
                        f"{path}, bytes {start} to {end}: checksum {found:016x} found, {expected:016x} expected; it "
                        f"was not copied to {join_name(str(target), folder)}, and nothing was committed there: the "
                        "storage has changed what was written to it; save again, elsewhere",
                        kind="checksum",
                        path=path,
                    )
                start += part.nbytes
            yield view

    planned = cut_blocks(file.extent_lengths, max_bytes=BLOCK_BYTES)
    blocks = [block._replace(content=partial(verified_content, block)) for block in planned]
    target.write(join_name(folder, file.name), blocks, replace=False)


def _extents_in(content: memoryview, lengths: Sequence[int], extents: range) -> Iterator[tuple[int, memoryview]]:
    """Yields the number and the bytes of each of these consecutive extents. The first begins where `content` begins."""
    start = 0
    for extent in extents:
        yield extent, content[start : start + lengths[extent]]
        start += lengths[extent]


def take_blocks(blocks: Sequence[Block], take: Callable[[memoryview, int], None], *, num_threads: int) -> None:
    """Calls `take` with the bytes and the byte offset of every block, on up to `num_threads` threads.

    Raises the first error, in time, of a block's `content` or of `take`, after all threads have left both. Blocks whose
    `content` was not called before the error are skipped.
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


@contextmanager
def open_block(block: Block) -> Iterator[memoryview]:
    """Gives the block's bytes for as long as the context lasts. Errors of its `content` pass through.

    Raises CheckpointSaveError (storage) if the bytes have another length than the block, or are not a flat view.
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


def count_bytes(blocks: Sequence[Block]) -> int:
    """Returns the length of the object, in bytes. Raises CheckpointSaveError (storage) unless the blocks follow one
    another from byte 0.
    """
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
