"""Direct writes of a new file, past the page cache if the file system supports it: nothing is copied, and the page
cache is left to training. Raises OSError and knows nothing of names, blocks or checkpoints.
"""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np

from bytecheckpoint.storage.backends.posix_files import preallocate, sync_to_disk, write_fully, write_some

MIN_DIRECT_BYTES = 1 << 20
"""Smaller files go through the page cache: the extra calls of a direct write cost more than they save."""
PAGE_BYTES = max(4096, mmap.PAGESIZE)
"""Alignment of memory, file offset and length of a direct write. No disk in use has larger blocks."""

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EFAULT})
"""EFAULT means memory that a driver has mapped and a disk cannot read: the page cache can copy it."""


class DirectFile:
    """An empty file that several threads fill at once, each with bytes of its own.

    Whole pages go by a second descriptor straight from the caller's memory to the disk. The rest goes through the page
    cache: small files, pages that a write fills only in part, memory that is not aligned, and everything after a
    refusal by the file system. No page is written both ways at the same time.
    """

    def __init__(self, path: str, fd: int) -> None:
        """`fd` is open for writing at `path`; `close` closes it."""
        self._path = path
        self._fd = fd
        self._direct_fd: int | None = None
        self._is_refused = False

    def prepare(self, num_bytes: int) -> None:
        """Allocates disk space for the file and opens it for direct writes, if the system can. Does nothing for a file
        of less than MIN_DIRECT_BYTES. Raises OSError if there is too little space.
        """
        if num_bytes < MIN_DIRECT_BYTES:
            return
        preallocate(self._fd, num_bytes)
        self._direct_fd = _open_direct(self._path)

    def write(self, content: memoryview, byte_offset: int) -> None:
        """Writes flat bytes. May be called from several threads at once, for ranges that share no byte."""
        start, end = _whole_pages(content, byte_offset)
        write_fully(self._fd, content[:start], byte_offset)
        start += self._write_direct(content[start:end], byte_offset + start)
        write_fully(self._fd, content[start:], byte_offset + start)

    def sync(self) -> None:
        """Makes writes by either descriptor durable."""
        sync_to_disk(self._fd)

    def close(self) -> None:
        """Closes the file. It must be called once, when no thread is in `write`."""
        try:
            if self._direct_fd is not None:
                os.close(self._direct_fd)
        finally:
            os.close(self._fd)

    def _write_direct(self, pages: memoryview, byte_offset: int) -> int:
        """Writes pages straight to the disk, as long as the file system accepts that. Returns how many bytes, in whole
        pages, it has written; the rest has to go through the page cache.
        """
        written = 0
        while self._direct_fd is not None and not self._is_refused and written < pages.nbytes:
            try:
                count = write_some(self._direct_fd, pages[written:], byte_offset + written)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self._is_refused = True
                break
            written += count - count % PAGE_BYTES
            if count == 0 or count % PAGE_BYTES:
                break  # a direct write cannot start within a page, so this page is written again, through the cache
        return written


def _open_direct(path: str) -> int | None:
    """Returns a second descriptor; None if the system has no direct writes or refuses for any reason."""
    o_direct: int = getattr(os, "O_DIRECT", 0)
    if not o_direct:
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | o_direct)
    except OSError:  # the first descriptor suffices, or writing to it raises the error
        return None


def _whole_pages(content: memoryview, byte_offset: int) -> tuple[int, int]:
    """Returns start and end, in `content`, of the pages of the file that `content` fills completely; (0, 0) if
    there are none, or their memory is not aligned.
    """
    start = -byte_offset % PAGE_BYTES
    end = content.nbytes - (byte_offset + content.nbytes) % PAGE_BYTES
    if end <= start or (_address(content) + start) % PAGE_BYTES:
        return 0, 0
    return start, end


def _address(content: memoryview) -> int:
    address: int = np.frombuffer(content, np.uint8).__array_interface__["data"][0]  # also of read-only memory
    return address
