"""File system calls of a local store: whole reads and writes, publishing a finished file under its name, and making
names survive a power cut. Raises OSError and knows nothing of checkpoints.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH112, PTH120, PTH121 - calls of `os` by name, in an order that tests record

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from bytecheckpoint.storage.store import FillHook, PiecesHook

_MAX_CALL_BYTES = 1 << 30
"""Linux moves at most 2 GiB - 4 KiB a call, macOS refuses more than 2 GiB - 1."""
_MAX_BUFFERS = 1024
"""Limit of the kernel for one call (UIO_MAXIOV)."""
_CACHED_BYTES = 1 << 20
"""Length of a read whose bytes are still in the processor's cache when it has ended."""

_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_PREALLOCATION = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EINTR})
"""Includes EINTR: a timer that ticks faster than the call would interrupt it for ever, and it is only an
optimisation.
"""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def preallocate(fd: int, num_bytes: int) -> None:
    """Allocates the disk space of an empty file and sets its length; does neither, and raises nothing, if the file
    system does not support that. Raises OSError for any other failure, such as too little space.
    """
    # Not posix_fallocate: if the file system cannot preallocate, the C library writes zeros.
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return
    if fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) == 0:
        return
    number = ctypes.get_errno()
    if number not in _NO_PREALLOCATION:
        raise OSError(number, os.strerror(number))


def write_fully(fd: int, content: memoryview, byte_offset: int) -> None:
    """Writes flat bytes from `byte_offset` on, however many calls that takes."""
    written = 0
    while written < content.nbytes:
        count = write_some(fd, content[written:], byte_offset + written)
        if count == 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        written += count


def write_some(fd: int, content: memoryview, byte_offset: int) -> int:
    """Writes flat bytes with one system call, and returns how many it wrote, which may be fewer."""
    return os.pwritev(fd, [content[:_MAX_CALL_BYTES]], byte_offset)


def read_fully(fd: int, byte_offset: int, buffer: memoryview, on_filled: FillHook | None = None) -> int:
    """Fills the buffer with a file's bytes from `byte_offset` on; returns how many, fewer if the file ends early."""
    filled = 0
    step_bytes = _MAX_CALL_BYTES if on_filled is None else _CACHED_BYTES
    while filled < buffer.nbytes:
        count = os.preadv(fd, [buffer[filled : filled + step_bytes]], byte_offset + filled)
        if count == 0:
            break
        filled += count
        if on_filled is not None:
            on_filled(filled)
    return filled


def read_pieces(fd: int, byte_offset: int, buffers: Sequence[memoryview], on_filled: PiecesHook) -> int:
    """Fills buffers, none of them empty, with a file's bytes from `byte_offset` on. Returns the number of
    bytes, as `read_fully` does.
    """
    filled = first = 0
    ends = [*accumulate(map(len, buffers))]
    while first < len(buffers):
        # As many as one call can fill, and as the processor's cache can hold; at least one.
        last = bisect_right(ends, filled + _CACHED_BYTES, first + 1, min(first + _MAX_BUFFERS, len(buffers)))
        run, wanted_bytes = buffers[first:last], ends[last - 1] - filled
        count = os.preadv(fd, run, byte_offset + filled)
        if count < wanted_bytes:  # the end of the file, or a signal
            count = _fill_rest(fd, byte_offset + filled, run, count)
        filled, first = filled + count, last
        if count < wanted_bytes:
            break
        on_filled(run)
    return filled


def _fill_rest(fd: int, byte_offset: int, buffers: Sequence[memoryview], filled: int) -> int:
    """Fills what a call has not filled of these buffers. Returns the number of bytes that they hold then."""
    start = 0
    for buffer in buffers:
        done = min(max(filled - start, 0), len(buffer))
        done += read_fully(fd, byte_offset + start + done, buffer[done:])
        start += done
        if done < len(buffer):
            break
    return start


def file_in_the_way(path: str) -> str:
    """Returns the path of the file, at this path or above it, where a folder is needed."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def has_file(folder: str, name: str) -> bool | None:
    """Returns True if an ordinary file of this name is in a folder, False if not, None if only a listing can tell.

    Opens both by name, following no link: on a network file system a look without opening may be old.
    """
    folder_fd = -1
    try:
        folder_fd = os.open(folder, _FOLDER_FLAGS)
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    except OSError:
        return None  # a link, or no permission
    finally:
        if folder_fd >= 0:
            os.close(folder_fd)
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def free_bytes(folder: str) -> int | None:
    """Returns the free space for an ordinary user, in bytes; None if unknown. The folder need not exist yet."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    with suppress(OSError):
        status = os.statvfs(folder)
        if status.f_blocks:  # else it counts none, as a tmpfs without a limit
            return status.f_bavail * status.f_frsize
    return None


def publish(temporary: str, path: str, *, replace: bool) -> None:
    """Gives the finished temporary file its final name, in one atomic step. Raises FileExistsError if the name is
    taken, unless `replace`; on a file system with neither hard links nor RENAME_NOREPLACE, a name that another writer
    takes at the same moment may be replaced instead.
    """
    if replace:
        os.rename(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        # Over NFS a link can succeed and its answer be lost: the repeated request then finds its own link.
        if not os.path.samefile(temporary, path):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_without_replacing(temporary, path)
        return
    remove_quietly(temporary)


def link(existing: str, path: str) -> bool:
    """Gives an existing file a second name; True also if it had that name. Returns False if the file system cannot.
    Raises FileExistsError if another file has the name.
    """
    try:
        os.link(existing, path)
    except FileExistsError:  # as in `publish`
        if not os.path.samefile(existing, path):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS | {errno.EXDEV}:
            raise
        return False
    return True


def _rename_without_replacing(temporary: str, path: str) -> None:
    if _renameat2(temporary, path):
        return
    # Hazard: two writers that both pass this check both succeed, and the later one replaces the earlier. Nothing better
    # exists on file systems with neither hard links nor RENAME_NOREPLACE.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os.rename(temporary, path)


def _renameat2(temporary: str, path: str) -> bool:
    """Renames without replacing. Returns False if C library, kernel or file system does not support that, else raises
    OSError, such as FileExistsError, if it fails.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        return False
    raise OSError(number, os.strerror(number), path)


def make_folders(folder: str) -> None:
    """Makes the folder and the missing ones above it, durably. Raises NotADirectoryError if one of them is a file, and
    FileNotFoundError if one was removed meanwhile.
    """
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    make_folders(parent)
    with suppress(FileExistsError):  # another writer was faster, or a file is in the way
        os.mkdir(folder)
    if not os.path.isdir(folder):
        if not os.path.lexists(folder):  # another writer took it meanwhile, as it was empty
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file, where a folder is needed", folder)
    sync_folder(parent)


def sync_to_disk(fd: int) -> None:
    """Makes a file or folder survive a power cut: by F_FULLFSYNC on macOS, where fsync leaves writes in the drive's
    cache, else by fsync.
    """
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        with suppress(OSError):  # not every file system there knows it
            fcntl.fcntl(fd, full_sync)
            return
    os.fsync(fd)


def sync_folder(folder: str) -> None:
    """Makes the names in a folder survive a power cut, if its file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_to_disk(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def remove_empty_folders(folder: str, root: str) -> None:
    """Removes a folder, and those above it up to `root`, which stays, as long as they are empty."""
    with suppress(OSError):
        while folder != root:
            with suppress(FileNotFoundError):
                os.rmdir(folder)
            folder = os.path.dirname(folder)


def remove_quietly(path: str) -> None:
    """Removes a file that is not needed; if that fails, it is only garbage."""
    with suppress(OSError):
        os.unlink(path)
