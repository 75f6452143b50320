"""Writes the files of a target from windows that are read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

from bytecheckpoint.conversion.assemble import Elements
from bytecheckpoint.conversion.stream import NUM_WINDOWS, ReadAhead, Stream, TargetFile, window_bytes_of
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block, cut_blocks
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage.object_io import BLOCK_BYTES, FileImage, write_image
from bytecheckpoint.storage.store import Store


class FileWriter:
    """Writes files to one store."""

    def __init__(
        self,
        store: Store,
        elements: Elements,
        longest_file_bytes: int,
        *,
        memory_bytes: int,
        on_progress: Callable[[int], None],
    ) -> None:
        self._store = store
        self._elements = elements
        self._window_bytes = window_bytes_of(memory_bytes, longest_file_bytes)
        self._scratch = BufferPool(self._window_bytes, NUM_WINDOWS)
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def write(self, file: TargetFile, *, replace: bool) -> DataFile:
        """Writes one file, durably. With `replace`, a file without extents replaces an older one of its name; in every
        other case raises CheckpointExistsError for a name that is taken. Raises the errors of a load and of a write.
        """
        stream = Stream(file.runs)
        with closing(ReadAhead(stream, self._elements, self._scratch, self._window_bytes)) as ahead:
            extents = file.extent_lengths
            planned = cut_blocks(extents, max_bytes=BLOCK_BYTES) if extents else stream.blocks
            blocks = [block._replace(content=partial(self._content, ahead, block)) for block in planned]
            if extents:
                return write_image(self._store, file.name, FileImage(file.name, extents, blocks), lambda _: None)
            self._store.write(file.name, blocks, replace=replace)
            return DataFile(file.name, stream.byte_length)

    @contextmanager
    def _content(self, ahead: ReadAhead, block: Block) -> Iterator[memoryview]:
        with ahead.content(block) as content:
            yield content
        with self._lock:
            self._on_progress(block.byte_length)
