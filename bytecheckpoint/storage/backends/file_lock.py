"""A lock on a file that lasts as long as the process that took it: the kernel releases it, however the process ends.
So others can tell what a living process still uses from what a dead one has left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading

from bytecheckpoint.errors import StorageError

_IS_TAKEN = frozenset({errno.EAGAIN, errno.EACCES})


class ProcessLock:
    """Held until `release`, or until the process ends."""

    def __init__(self, path: str) -> None:
        """Raises FileNotFoundError where there is no such file and BlockingIOError where another one holds it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(self._fd, path, fcntl.LOCK_EX)
        except BaseException:
            os.close(self._fd)
            raise
        _HELD.add(self)

    def release(self) -> None:
        """May be called again."""
        _HELD.remove(self)
        if self._fd >= 0:
            # Not by closing alone: a child that was forked just now may not have closed its copy yet.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Lets go of this process' part in it: others that share it keep it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def is_locked(path: str) -> bool:
    """Whether a living process holds it. Several may ask at once. Raises FileNotFoundError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _lock(fd, path, fcntl.LOCK_SH)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock(fd: int, path: str, kind: int) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _IS_TAKEN:
            raise BlockingIOError(error.errno, error.strerror, path) from error
        raise StorageError(
            f"cannot lock {path}: {error.strerror}; nothing was changed: a local stage has to be on a disk of the "
            "host, not on a network file system without locks",
            kind="unsupported",
            path=path,
        ) from error


class _Held:
    """The locks of this process. A forked child shares them, and would keep them after its parent has died."""

    def __init__(self) -> None:
        self._locks: list[ProcessLock] = []
        self._changing = threading.Lock()
        self._has_hook = False

    def add(self, lock: ProcessLock) -> None:
        with self._changing:
            self._locks = [*self._locks, lock]
            if not self._has_hook:
                self._has_hook = True
                os.register_at_fork(after_in_child=self._let_go)

    def remove(self, lock: ProcessLock) -> None:
        with self._changing:
            self._locks = [other for other in self._locks if other is not lock]

    def _let_go(self) -> None:
        self._changing = threading.Lock()
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.close()


_HELD = _Held()
