"""The blocks of an object that is being written: what they add up to, and their bytes, one block after the other or in
several threads at once. It knows no backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.storage.store import Block


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
def entered(block: Block) -> Iterator[memoryview]:
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
    line = _Line(blocks, take)
    num_threads = min(num_threads, len(blocks))
    if num_threads <= 1:
        line.work()
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bytecheckpoint-write")
    try:
        try:
            wait([pool.submit(line.work) for _ in range(num_threads)])
        except RuntimeError:  # the interpreter is exiting and starts no more threads: a save in flight still ends
            line.work()
    finally:
        line.stop()
        pool.shutdown(wait=True)
    if line.errors:
        raise line.errors[0]


class _Line:
    """Blocks that wait for a thread."""

    def __init__(self, blocks: Sequence[Block], take: Callable[[memoryview, int], None]) -> None:
        self._blocks = iter(blocks)
        self._take = take
        self._entering = threading.Lock()
        self._is_stopped = False
        self.errors: list[BaseException] = []
        """In the order of time."""

    def stop(self) -> None:
        self._is_stopped = True

    def work(self) -> None:
        """Takes blocks until there are no more, or until any thread has failed."""
        try:
            while self._take_next():
                pass
        except BaseException as error:
            self.errors.append(error)
            self.stop()
            raise

    def _take_next(self) -> bool:
        with ExitStack() as stack:
            with self._entering:
                block = None if self._is_stopped else next(self._blocks, None)
                if block is None:
                    return False
                try:
                    content = stack.enter_context(entered(block))
                except BaseException:
                    self.stop()  # before another thread enters the next one
                    raise
            self._take(content, block.byte_offset)
        return True
