"""Features of the file system of a folder: links, direct writes, preallocation, locks, the time of a sync, free
space.
"""

# ruff: noqa: PTH108, PTH118, PTH123 - the calls of `os` by name, as in posix_files.py

from __future__ import annotations

import mmap
import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.storage.backends.direct_io import PAGE_BYTES, _open_direct
from bytecheckpoint.storage.backends.file_lock import ProcessLock
from bytecheckpoint.storage.backends.posix_errors import describe, write_error
from bytecheckpoint.storage.backends.posix_files import free_bytes, preallocate, sync_folder, sync_to_disk

_NUM_SYNCS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemFeatures:
    """Features of one folder's file system; times are medians, in seconds."""

    file_system: str | None
    """Name in the kernel: ext4, xfs, nfs4, ..."""
    free_bytes: int | None
    """None if the file system has no limit; `total_bytes` is 0 then."""
    total_bytes: int
    hard_links: bool
    """True if files can be linked. With links, or a rename that does not replace, a name is created in one step."""
    direct_writes: bool
    """Writes past the page cache (O_DIRECT)."""
    preallocation: bool
    """With it, a full disk is noticed before anything is written."""
    locks: bool
    """Needed by a local stage."""
    file_sync_s: float
    """Time to write 4 KiB and sync the file."""
    folder_sync_s: float


def probe_filesystem(folder: str) -> FilesystemFeatures:
    """Tries every feature in an existing folder. Files `probe` and `probe-link` in it are overwritten, and deleted at
    the end. Raises StorageError or CheckpointSaveError if it cannot write there.
    """
    path = os.path.join(folder, "probe")
    try:
        status = os.statvfs(folder)
        return FilesystemFeatures(
            file_system=_file_system(folder),
            free_bytes=free_bytes(folder),
            total_bytes=status.f_blocks * status.f_frsize,
            hard_links=_works(lambda: _link(path)),
            direct_writes=_works(lambda: _write_direct(path)),
            preallocation=_works(lambda: _preallocate(path)),
            locks=_works(lambda: ProcessLock(path).release()),
            file_sync_s=_median_of(lambda: _write_and_sync(path)),
            folder_sync_s=_median_of(lambda: sync_folder(folder)),
        )
    except OSError as error:
        raise write_error(
            error, path, reason=describe(error), needed_bytes=4096, free_bytes=None, may_be_done=False
        ) from error
    finally:
        for name in (path, f"{path}-link"):
            with suppress(OSError):
                os.unlink(name)


def _works(probe: Callable[[], object]) -> bool:
    try:
        probe()
    except (OSError, CheckpointError):
        return False
    return True


def _median_of(probe: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_NUM_SYNCS):
        started = time.perf_counter()
        probe()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _link(path: str) -> None:
    _write_and_sync(path)
    with suppress(FileNotFoundError):
        os.unlink(f"{path}-link")  # os.link does not overwrite
    os.link(path, f"{path}-link")


def _write_and_sync(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(fd, bytes(4096), 0)
        sync_to_disk(fd)
    finally:
        os.close(fd)


def _write_direct(path: str) -> None:
    _write_and_sync(path)
    fd = _open_direct(path)
    if fd is None:
        raise OSError("no O_DIRECT")
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.pwrite(fd, page, 0)
    finally:
        os.close(fd)


def _preallocate(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        preallocate(fd, 1 << 20)
        if os.fstat(fd).st_size != 1 << 20:
            raise OSError("nothing was preallocated")
    finally:
        os.close(fd)


def _file_system(folder: str) -> str | None:
    """Returns the type of the mount that the folder is on; None without /proc."""
    path = os.path.realpath(folder)
    nearest, file_system = "", None
    with suppress(OSError), open("/proc/self/mounts", "rb") as mounts:
        for line in map(os.fsdecode, mounts):
            _, mount_point, kind, *_ = line.split(" ")
            mount_point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount_point)
            is_above = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
            if is_above and len(mount_point) >= len(nearest):
                nearest, file_system = mount_point, kind
    return file_system
