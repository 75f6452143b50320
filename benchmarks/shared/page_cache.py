"""Takes files out of the page cache, or reads them into it, so that a load finds them cold or warm. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DROP_ALL = Path("/proc/sys/vm/drop_caches")
BUFFER_BYTES = 8 << 20


def can_drop_all() -> bool:
    return os.access(DROP_ALL, os.W_OK)


def drop(folder: Path, *, everything: bool) -> None:
    """Takes the files of a folder out, after an fsync; or the whole machine's, which takes root."""
    for path in files(folder):
        with opened(path) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if everything:
        DROP_ALL.write_text("3")


def read_through(folder: Path) -> None:
    buffer = bytearray(BUFFER_BYTES)
    for path in files(folder):
        with opened(path) as fd:
            while os.readv(fd, [buffer]):
                pass


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
