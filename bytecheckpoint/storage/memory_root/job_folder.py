"""The folder of one job in a memory root: its owner, and the living processes that work on it. slot_file.py and
version_files.py describe the files in it.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH108, PTH110, PTH112, PTH116, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec
import xxhash

from bytecheckpoint.errors import CheckpointError, StorageError
from bytecheckpoint.storage.backends.file_lock import ProcessLock, create_locked, is_locked
from bytecheckpoint.storage.backends.posix_errors import describe
from bytecheckpoint.storage.paths import TEMPORARY_PREFIX

_HOST = "host"
_DESCRIPTION = "job"
_MAKING_S = 10.0
"""Seconds for which a temporary file may be in the making, not locked yet or about to get its name."""
_ALIVE = "alive"
_LOCK = "lock"
_NOT_SAVED = ".resumed"
"""End of the name of a process that has resumed, or has allocated slots, and has not saved."""
_ID = re.compile(r"\A[0-9a-f]{16}\Z")
_SHARED_MODE = 0o1777
_READABLE = 0o644
_OTHERS = 0o077
_TMPFS = "tmpfs"


class JobDescription(msgspec.Struct, frozen=True):
    """The job that a folder belongs to."""

    location: str
    """Path or URL of the root that the job saves to, without credentials."""
    uid: int
    version: int = 1


class LivingProcess(NamedTuple):
    """A process that works on the job."""

    name: str
    since_ns: int
    """Time of its first call, by the clock of the host."""

    @property
    def saves(self) -> bool:
        """True from its first save on, committed or not. Before that a process keeps no other job from saving."""
        return not self.name.endswith(_NOT_SAVED)


class JobFolder(NamedTuple):
    """A job's folder in a memory root, private to the user."""

    root: str
    path: str
    host: str
    """Random id of the memory root, which stands for the host."""

    @property
    def slots(self) -> str:
        return os.path.join(self.path, "slots")

    @property
    def versions(self) -> str:
        return os.path.join(self.path, "versions")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Waits for the folder's lock and holds it: nobody else looks for free slots in the folder, or removes some."""
        fd = os.open(os.path.join(self.path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def make_joinable(self) -> None:
        """Makes the folder that `join` writes to, if a removal that was killed has deleted it. Raises FileNotFoundError
        if the job's folder is gone.
        """
        with suppress(FileExistsError):
            os.mkdir(os.path.join(self.path, _ALIVE), 0o700)

    def join(self, *, saves: bool = True) -> tuple[ProcessLock, LivingProcess]:
        """Registers this process as working on the job, until it ends or the lock is released. `saves` is False for a
        process that has not saved yet.
        """
        name = secrets.token_hex(8) + ("" if saves else _NOT_SAVED)
        path = os.path.join(self.path, _ALIVE, name)
        lock = create_locked(path, mode=0o600)
        return lock, LivingProcess(name, os.stat(path).st_mtime_ns)

    def has_joined(self, process: LivingProcess) -> bool:
        """Returns True unless the registration of the process was deleted. Does not look whether the process lives."""
        return os.path.lexists(os.path.join(self.path, _ALIVE, process.name))

    def living(self) -> list[LivingProcess]:
        """Returns the processes that work on the job, and deletes the registrations of those that have ended."""
        alive, found = os.path.join(self.path, _ALIVE), []
        for name in sorted(os.listdir(alive)):
            path = os.path.join(alive, name)
            with suppress(FileNotFoundError):
                if _may_be_in_the_making(path):
                    continue  # Hazard: a look at its lock would keep the process that makes it from locking it.
                if not is_locked(path):
                    os.unlink(path)
                elif not name.startswith(TEMPORARY_PREFIX):
                    found.append(LivingProcess(name, os.stat(path).st_mtime_ns))
        return found

    def remove_stale_temporaries(self) -> None:
        """Removes temporary files older than 10 seconds, which killed processes have left, from the job's folder and
        from the memory root.
        """
        paths = [os.path.join(folder, name) for folder in (self.root, self.path) for name in os.listdir(folder)]
        for path in filter(_is_temporary, paths):
            with suppress(OSError):  # gone meanwhile, or another user's
                if not _may_be_in_the_making(path):
                    os.unlink(path)


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def _may_be_in_the_making(path: str) -> bool:
    return _is_temporary(path) and time.time() - os.stat(path).st_mtime <= _MAKING_S


def job_name(location: str) -> str:
    """Returns the name of the folder of the job that saves to this root. Each user has a folder of their own."""
    return xxhash.xxh3_64_hexdigest(f"{os.geteuid()}\0{location}".encode())


def open_job(root: str, location: str) -> JobFolder:
    """Returns the folder of a job, made if it is missing. Raises StorageError if it cannot be used, or is not private
    to this user.
    """
    with _using(root):
        host = _prepare_root(root)
        job = JobFolder(root, os.path.join(root, job_name(location)), host)
        with suppress(FileExistsError):
            os.mkdir(job.path, 0o700)
        _check_private(job.path)
        for folder in (os.path.join(job.path, _ALIVE), job.slots, job.versions):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        description_path = os.path.join(job.path, _DESCRIPTION)
        if not os.path.exists(description_path):
            replace_file(description_path, msgspec.json.encode(JobDescription(location, os.geteuid())))
        return job


def find_job(root: str, location: str) -> JobFolder | None:
    """Returns the folder of a job, or None if there is none. Raises StorageError as `find_jobs` does."""
    return next((job for job, _ in find_jobs(root) if job.path.endswith(f"/{job_name(location)}")), None)


def find_jobs(root: str) -> list[tuple[JobFolder, JobDescription]]:
    """Returns the folders of this user's jobs in a memory root, with descriptions of the jobs, whose location is
    "(unknown)" if it cannot be read; none if the root or its id is missing or the id damaged. Raises StorageError if
    the root cannot be read, or a job's folder is not private to this user.
    """
    found: list[tuple[JobFolder, JobDescription]] = []
    with _using(root):
        try:
            names = sorted(os.listdir(root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        host = _read_host(root)
        for name in filter(_ID.match, names):
            path = os.path.join(root, name)
            if host is None or not _is_own(path):
                continue
            description = JobDescription("(unknown)", os.geteuid())
            with suppress(OSError, msgspec.MsgspecError), open(os.path.join(path, _DESCRIPTION), "rb") as file:
                description = msgspec.json.decode(file.read(), type=JobDescription)
            found.append((JobFolder(root, path, host), description))
    return found


def _is_own(path: str) -> bool:
    """Returns True for a job's folder of this user, False for another's or one that is gone. Raises StorageError
    (permission) if it is this user's, and is no folder or others can open it.
    """
    with suppress(FileNotFoundError):
        if os.lstat(path).st_uid == os.geteuid():
            _check_private(path)
            return True
    return False


def is_in_memory(root: str) -> bool:
    """Returns False if the folder is known to lie on something else than tmpfs or ramfs, else True."""
    path, nearest = os.path.realpath(root), ("", _TMPFS)
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, mount_point, file_system, *_ = line.split(" ")
            mount_point = mount_point.replace("\\040", " ")
            is_below = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
            if is_below and len(mount_point) >= len(nearest[0]):
                nearest = (mount_point, file_system)
    return nearest[1] in {_TMPFS, "ramfs"}


def replace_file(path: str, *parts: bytes) -> None:
    """Writes a small file as a whole, so that a process that is killed leaves the old one or the new one."""
    temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb", opener=_private) as file:
            file.writelines(parts)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _prepare_root(root: str) -> str:
    """Makes the root, for all users of the host, and its id; returns the id. Raises StorageError if that is damaged."""
    if not os.path.isdir(root):
        os.makedirs(root, exist_ok=True)
        with suppress(PermissionError):  # another user was faster
            os.chmod(root, _SHARED_MODE)  # whatever the umask: jobs of other users have folders of their own there
    if (host := _read_host(root)) is not None:
        return host
    temporary = os.path.join(root, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    with open(temporary, "x", encoding="ascii") as file:
        file.write(secrets.token_hex(8))
    os.chmod(temporary, _READABLE)
    with suppress(FileExistsError):  # another process was faster, and its id counts
        os.link(temporary, os.path.join(root, _HOST))
    os.unlink(temporary)
    host = _read_host(root)
    if host is None:
        raise StorageError(
            f"{os.path.join(root, _HOST)}, the id of the memory root, is damaged; nothing was changed: if no job uses "
            f"{root}, remove it",
            kind="unsupported",
            path=root,
        )
    return host


def _read_host(root: str) -> str | None:
    """Returns the id of a memory root, which stands for the host; None if it is missing or damaged."""
    with suppress(FileNotFoundError, UnicodeDecodeError), open(os.path.join(root, _HOST), encoding="ascii") as file:
        host = file.read(64)
        return host if _ID.match(host) else None
    return None


def _check_private(path: str) -> None:
    """Raises StorageError (permission) unless only this user can open the folder."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise StorageError(
            f"{path} is not a folder that only this user can open (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}), so what is in it is not trusted; nothing was changed: remove it, or "
            "give Memory(root=...) a folder of your own",
            kind="permission",
            path=path,
        )


@contextmanager
def _using(root: str) -> Iterator[None]:
    """Translates an OSError into a StorageError."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        kind = "permission" if isinstance(error, PermissionError) else "unavailable"
        raise StorageError(
            f"the memory root {root} cannot be used: {describe(error)}; nothing was changed: give Memory(root=...) a "
            "folder in tmpfs that this process may write to",
            kind=kind,
            path=root,
        ) from error
