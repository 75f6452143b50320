"""File locks that the kernel releases when their process ends, even if it is killed. They distinguish files in use from
files of a dead process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from contextlib import suppress

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX

_HELD_BY_ANOTHER = frozenset({errno.EAGAIN, errno.EACCES})
_MAX_TRIES = 200
"""Tries to lock a file that other processes only look at."""
_LOOK_S = 0.005
"""Time between two tries: a look takes much less."""


class ProcessLock:
    """A lock held until `release`, or until the process ends."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be opened, such as FileNotFoundError; BlockingIOError if the lock is held;
        StorageError (unsupported) if the file cannot be locked. Waits for processes that are in `is_locked`.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _take(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise
        _held_locks().add(self)

    def release(self) -> None:
        """Releases the lock. May be called again."""
        _held_locks().remove(self)
        if self._fd >= 0:
            # Closing alone is not enough: a child that was forked just now may not have closed its copy yet.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Closes this process' descriptor. A process that shares the lock keeps the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def create_locked(path: str, *, mode: int) -> ProcessLock:
    """Makes an empty file with these permissions that this process has locked from the moment it is visible; replaces
    a file that is there, locked or not. A process that is killed meanwhile leaves the file under its name with
    TEMPORARY_PREFIX. Raises FileExistsError if that name is taken, so choose a new name each time; else as ProcessLock.
    """
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/{TEMPORARY_PREFIX}{name}"
    os.close(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    lock = ProcessLock(temporary)
    try:
        os.rename(temporary, path)  # noqa: PTH104 - the calls of `os` by name, as in posix_files.py
    except BaseException:
        lock.release()
        raise
    return lock


def is_locked(path: str) -> bool:
    """Returns True if a living process holds the lock of a file. Several processes may ask at once.

    Raises OSError if the file cannot be opened, such as FileNotFoundError or PermissionError, and StorageError
    (unsupported) if it cannot be locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _look(fd, path)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _take(fd: int, path: str) -> None:
    """Takes the lock; waits up to a second for processes in `is_locked`.

    Raises BlockingIOError if it is held, and StorageError (unsupported) if the file cannot be locked.
    """
    for _ in range(_MAX_TRIES):
        with suppress(BlockingIOError):
            _lock(fd, path, fcntl.LOCK_EX)
            return
        _look(fd, path)
        time.sleep(_LOOK_S)
    _lock(fd, path, fcntl.LOCK_EX)


def _look(fd: int, path: str) -> None:
    """Raises BlockingIOError if the lock is held, also by this process. Shares it for a moment with all that look."""
    _lock(fd, path, fcntl.LOCK_SH)
    fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked just now may not close its copy


def _lock(fd: int, path: str, kind: int) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            raise BlockingIOError(error.errno, error.strerror, path) from error
        raise StorageError(
            f"cannot lock {path}: {error.strerror}; nothing was changed: a local stage or a memory root has to be on a "
            "file system of the host, not on one of a network without locks",
            kind="unsupported",
            path=path,
        ) from error


class _HeldLocks:
    """The locks of this process. A forked child, which shares them, closes them: it may outlive its parent."""

    def __init__(self) -> None:
        self._locks: list[ProcessLock] = []
        self._mutex = threading.Lock()
        self._has_hook = False

    def add(self, lock: ProcessLock) -> None:
        with self._mutex:
            self._locks = [*self._locks, lock]
            if not self._has_hook:
                self._has_hook = True
                os.register_at_fork(after_in_child=self._close_all)

    def remove(self, lock: ProcessLock) -> None:
        with self._mutex:
            self._locks = [other for other in self._locks if other is not lock]

    def _close_all(self) -> None:
        self._mutex = threading.Lock()
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.close()


_HELD: dict[str, _HeldLocks] = {}
"""Empty until the first lock. A dict, because `setdefault` is one step for all threads."""


def _held_locks() -> _HeldLocks:
    return _HELD.get("locks") or _HELD.setdefault("locks", _HeldLocks())
